/* Run under `uwarp run --files on`: every function of libc that takes a path sees the device's files, all of them see
 * the same, and the files say what the verbs say.
 *
 *   files ADDRESS [GROUP]
 */
#define _FILE_OFFSET_BITS 64
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <glob.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define CLASS "/sys/class/infiniband"
#define DEVICE CLASS "/uwarp0"
#define PORT DEVICE "/ports/1"
#define UVERBS "/dev/infiniband/uverbs0"

static int failed;

#define EXPECT(what, ...) expect((what), #what, __VA_ARGS__)

__attribute__((format(printf, 3, 4))) static void expect(int holds, const char *what, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	printf("%s", holds ? "ok " : "FAIL ");
	vprintf(format, list);
	if (!holds) printf(": %s (%s)", what, strerror(errno));
	printf("\n");
	va_end(list);
	failed |= !holds;
}

/* The first line of a file; empty if it cannot be read. */
static const char *line(const char *format, ...)
{
	static char lines[4][256];
	static int next;
	char path[PATH_MAX], *text = lines[next++ % 4];
	va_list list;
	va_start(list, format);
	vsnprintf(path, sizeof path, format, list);
	va_end(list);
	text[0] = 0;
	FILE *file = fopen(path, "r");
	if (!file) return text;
	if (!fgets(text, 256, file)) text[0] = 0;
	fclose(file);
	text[strcspn(text, "\n")] = 0;
	return text;
}

static int holds(const char *directory, const char *name, int type)
{
	DIR *stream = opendir(directory);
	int found = 0;
	if (!stream) return 0;
	for (struct dirent *entry; (entry = readdir(stream));)
		found += !strcmp(entry->d_name, name) && (entry->d_type == type || type < 0);
	closedir(stream);
	return found;
}

static void reading(void)
{
	char text[64] = "";
	int fd = open(DEVICE "/node_type", O_RDONLY);
	EXPECT(fd >= 0 && read(fd, text, 5) == 5 && !strcmp(text, "1: CA"), "open");
	close(fd);
	int class = open("/sys/class", O_RDONLY | O_DIRECTORY);
	fd = openat(class, "infiniband/uwarp0/fw_ver", O_RDONLY);
	EXPECT(fd >= 0, "openat from a directory outside");
	close(fd);
	int device = openat(class, "infiniband/uwarp0", O_RDONLY | O_DIRECTORY);
	fd = openat(device, "fw_ver", O_RDONLY);
	EXPECT(fd >= 0, "openat from a directory of the device");
	close(fd);
	close(device);
	EXPECT(openat(class, "infiniband/none", O_RDONLY) < 0 && errno == ENOENT, "openat of nothing");
	close(class);
	EXPECT(!strcmp(line("/sys/class/./net/../infiniband//uwarp0/node_type"), "1: CA"), "fopen by a detour");
	FILE *file = freopen(DEVICE "/node_type", "r", fopen("/dev/null", "r"));
	EXPECT(file && fgets(text, sizeof text, file) && !strcmp(text, "1: CA\n"), "freopen");
	if (file) fclose(file);
	EXPECT(access(DEVICE "/node_guid", R_OK) == 0, "access");
	EXPECT(access(DEVICE "/none", F_OK) < 0 && errno == ENOENT, "access of nothing");
	EXPECT(faccessat(AT_FDCWD, DEVICE "/node_guid", R_OK, 0) == 0, "faccessat");
	EXPECT(eaccess(DEVICE "/node_guid", R_OK) == 0 && euidaccess(DEVICE "/node_guid", R_OK) == 0, "euidaccess");
	struct statfs fs;
	EXPECT(statfs(CLASS, &fs) == 0, "statfs");
	EXPECT(getxattr(DEVICE, "user.none", text, sizeof text) < 0 && errno != ENOENT, "getxattr");
	EXPECT(open("/sys/class/infiniband_mad/abi_version", O_RDONLY) < 0 && errno == ENOENT, "nothing beside it");
}

static void kinds(void)
{
	struct stat st, other;
	EXPECT(stat(PORT, &st) == 0 && S_ISDIR(st.st_mode), "stat of a directory");
	EXPECT(stat(DEVICE "/fw_ver", &st) == 0 && S_ISREG(st.st_mode), "stat of a file");
	EXPECT(lstat(DEVICE "/fw_ver", &other) == 0 && other.st_ino == st.st_ino, "lstat sees the same");
	int fd = open(DEVICE "/fw_ver", O_RDONLY);
	EXPECT(fstat(fd, &other) == 0 && other.st_ino == st.st_ino, "fstat sees the same");
	close(fd);
	int class = open("/sys/class", O_RDONLY | O_DIRECTORY);
	EXPECT(fstatat(class, "infiniband/uwarp0/fw_ver", &other, AT_SYMLINK_NOFOLLOW) == 0 && other.st_ino == st.st_ino,
	       "fstatat sees the same");
	close(class);
	struct statx stx;
	EXPECT(statx(AT_FDCWD, DEVICE "/fw_ver", 0, STATX_INO, &stx) == 0 && stx.stx_ino == st.st_ino,
	       "statx sees the same");
	/* UCX looks so before it takes a device. */
	EXPECT(stat(UVERBS, &st) == 0 && S_ISCHR(st.st_mode) && access(UVERBS, R_OK | W_OK) == 0,
	       "a character device that can be read and written");
	char numbers[32];
	snprintf(numbers, sizeof numbers, "%u:%u", major(st.st_rdev), minor(st.st_rdev));
	EXPECT(!strcmp(numbers, line("/sys/class/infiniband_verbs/uverbs0/dev")), "its number is %s", numbers);
	EXPECT(lstat(UVERBS, &other) == 0 && S_ISCHR(other.st_mode) && other.st_rdev == st.st_rdev, "lstat of a device");
	EXPECT(fstatat(AT_FDCWD, UVERBS, &other, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(other.st_mode), "fstatat of a device");
	EXPECT(statx(AT_FDCWD, UVERBS, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &stx) == 0 && S_ISCHR(stx.stx_mode) &&
		       stx.stx_rdev_major == major(st.st_rdev),
	       "statx of a device");
	int dir = open("/dev/infiniband", O_RDONLY | O_DIRECTORY);
	EXPECT(fstatat(dir, "uverbs0", &other, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(other.st_mode),
	       "fstatat of a device, from its directory");
	close(dir);
	EXPECT(lstat("/dev/infiniband/rdma_cm", &other) == 0 && S_ISCHR(other.st_mode), "rdma_cm");
	fd = open(UVERBS, O_RDWR | O_CLOEXEC);
	EXPECT(fd >= 0, "open of a device");
	close(fd);
	EXPECT(stat("/dev/infiniband/uverbs1", &st) < 0 && errno == ENOENT, "there is no other");
}

static int visits, strange, devices;

static int visit(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
	(void)st;
	visits++;
	devices += flag == FTW_F && S_ISCHR(st->st_mode);
	strange += strncmp(path, "/sys/class/infiniband", 21) && strncmp(path, "/dev/infiniband", 15);
	strange += ftw->base > (int)strlen(path) || (ftw->base > 0 && path[ftw->base - 1] != '/');
	return 0;
}

static int some(const struct dirent *entry)
{
	return !strncmp(entry->d_name, "infiniband", 10);
}

static void listing(void)
{
	EXPECT(holds("/sys/class", "infiniband", DT_DIR) == 1 && holds("/sys/class", "infiniband_verbs", DT_DIR) == 1,
	       "readdir of /sys/class");
	EXPECT(holds("/sys/class", "net", -1) == 1, "what else is in /sys/class");
	EXPECT(holds("/dev", "infiniband", DT_DIR) == 1 && holds("/dev", "null", DT_CHR) == 1, "readdir of /dev");
	EXPECT(holds(CLASS, "uwarp0", DT_DIR) == 1, "readdir of the class");
	EXPECT(holds("/dev/infiniband", "uverbs0", DT_CHR) == 1 && holds("/dev/infiniband", "rdma_cm", DT_CHR) == 1,
	       "readdir of the devices");
	DIR *stream = opendir("/dev");
	for (int round = 0; round < 2; round++, rewinddir(stream)) {
		int found = 0;
		for (struct dirent *entry; (entry = readdir(stream));) found += !strcmp(entry->d_name, "infiniband");
		EXPECT(found == 1, "readdir, round %d", round + 1);
	}
	closedir(stream);
	stream = fdopendir(open("/sys/class", O_RDONLY | O_DIRECTORY));
	int found = 0;
	for (struct dirent *entry; (entry = readdir(stream));) found += some(entry);
	EXPECT(found == 2, "readdir of a descriptor");
	closedir(stream);
	struct dirent **list;
	int count = scandir("/sys/class", &list, some, alphasort);
	EXPECT(count == 2 && !strcmp(list[0]->d_name, "infiniband"), "scandir, in order");
	for (int i = 0; i < count; i++) free(list[i]);
	if (count >= 0) free(list);
	count = scandir(PORT "/gids", &list, NULL, alphasort);
	EXPECT(count >= 3 && !strcmp(list[2]->d_name, "0"), "scandir of GIDs");
	for (int i = 0; i < count; i++) free(list[i]);
	if (count >= 0) free(list);
	glob_t names;
	EXPECT(glob("/sys/class/infini*/*/ports/*/gids/0", 0, NULL, &names) == 0 && names.gl_pathc == 1 &&
		       !strcmp(names.gl_pathv[0], PORT "/gids/0"),
	       "glob");
	globfree(&names);
	EXPECT(glob("/dev/infiniband/*", 0, NULL, &names) == 0 && names.gl_pathc == 2, "glob of devices");
	globfree(&names);
	EXPECT(nftw(CLASS, visit, 8, FTW_PHYS) == 0 && visits > 40 && !strange, "nftw");
	EXPECT(nftw("/dev/infiniband", visit, 8, FTW_PHYS) == 0 && devices == 2 && !strange, "nftw of devices");
}

static void names(void)
{
	char text[PATH_MAX], *name = realpath(DEVICE "/../uwarp0/ports/", text);
	EXPECT(name && !strcmp(name, DEVICE "/ports"), "realpath");
	EXPECT(realpath(CLASS "/none", text) == NULL && errno == ENOENT, "realpath of nothing");
	/* As Mooncake looks for the hardware. */
	name = realpath(DEVICE "/../..", text);
	EXPECT(name && !strncmp(name, "/sys/", 5), "realpath of what is above the device");
	name = realpath(UVERBS, NULL);
	EXPECT(name && !strcmp(name, UVERBS), "realpath of a device");
	free(name);
	name = canonicalize_file_name("/sys/class/infiniband");
	EXPECT(name && !strcmp(name, CLASS), "canonicalize_file_name");
	free(name);
	EXPECT(readlink(UVERBS, text, sizeof text) < 0 && errno == EINVAL, "readlink of a device");
	DIR *stream = opendir(DEVICE "/device/net");
	struct dirent *entry = NULL;
	while (stream && (entry = readdir(stream)) && entry->d_name[0] == '.') {
	}
	EXPECT(entry != NULL, "device/net has an interface");
	if (entry) {
		ssize_t length;
		snprintf(text, sizeof text, DEVICE "/device/net/%s", entry->d_name);
		char target[PATH_MAX];
		length = readlink(text, target, sizeof target);
		EXPECT(length > 15 && !strncmp(target, "/sys/class/net/", 15), "readlink of an interface");
		EXPECT(!strcmp(line(PORT "/gid_attrs/ndevs/0"), entry->d_name), "ndevs/0 is %s", entry->d_name);
	}
	if (stream) closedir(stream);
	EXPECT(chdir(DEVICE "/ports") == 0 && getcwd(text, sizeof text) && !strcmp(text, DEVICE "/ports"), "getcwd");
	EXPECT(!strcmp(line("1/link_layer"), "Ethernet"), "a relative path");
	name = realpath("1", text);
	EXPECT(name && !strcmp(name, PORT), "realpath of a relative path");
	EXPECT(chdir("/sys") == 0 && !strcmp(line("class/infiniband/uwarp0/node_type"), "1: CA"), "from above");
	EXPECT(chdir("/dev/infiniband") == 0, "chdir");
	struct stat st;
	EXPECT(lstat("uverbs0", &st) == 0 && S_ISCHR(st.st_mode), "lstat of a device beside us");
	EXPECT(chdir("/") == 0, "and back");
}

/* A message of a datagram queue pair to itself; the queue pair stays. */
static int send_one(void)
{
	static uint8_t memory[40 + 64];
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_cq *cq = pd ? ibv_create_cq(context, 4, NULL, NULL, 0) : NULL;
	struct ibv_mr *mr = cq ? ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE) : NULL;
	struct ibv_qp_init_attr init = {.send_cq = cq,
					.recv_cq = cq,
					.qp_type = IBV_QPT_UD,
					.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct ibv_qp *qp = mr ? ibv_create_qp(pd, &init) : NULL;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7};
	struct ibv_ah_attr home = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 64}};
	struct ibv_sge sge = {.addr = (uintptr_t)memory, .length = sizeof memory, .lkey = mr ? mr->lkey : 0};
	struct ibv_recv_wr receive = {.sg_list = &sge, .num_sge = 1}, *bad_receive;
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	int done = 0;
	if (!qp || ibv_query_gid(context, 1, 0, &home.grh.dgid)) return 0;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY)) return 0;
	attr.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE) || ibv_post_recv(qp, &receive, &bad_receive)) return 0;
	attr.qp_state = IBV_QPS_RTS;
	if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN)) return 0;
	wr.wr.ud.ah = ibv_create_ah(pd, &home);
	wr.wr.ud.remote_qpn = qp->qp_num;
	wr.wr.ud.remote_qkey = 7;
	sge.length = 64;
	if (!wr.wr.ud.ah || ibv_post_send(qp, &wr, &bad)) return 0;
	/* The case's time limit ends this if nothing comes. */
	while (done < 2) {
		int count = ibv_poll_cq(cq, 1, &wc);
		if (count < 0 || (count && wc.status)) return 0;
		done += count;
	}
	return 1;
}

/* Waits for it: a busy host may answer too late for one look at the file. The case's time limit ends this. */
static int counted(const char *name)
{
	while (!strtoull(line(PORT "/%s", name), NULL, 10)) usleep(20000);
	return 1;
}

static void counters(void)
{
	static const char *const moved[] = {"counters/port_xmit_data",  "counters/port_rcv_data",
					    "counters/port_xmit_packets", "counters/port_rcv_packets",
					    "hw_counters/sent_bytes",   "hw_counters/received_messages"};
	EXPECT(send_one(), "a message to ourselves");
	for (unsigned i = 0; i < sizeof moved / sizeof *moved; i++)
		EXPECT(counted(moved[i]), "%s counts it", moved[i]);
	static const char *const wanted[] = {"counters/port_xmit_data", "counters/port_rcv_packets",
					     "counters/symbol_error", "hw_counters/sent_bytes", "hw_counters/retransmits"};
	for (unsigned i = 0; i < sizeof wanted / sizeof *wanted; i++) {
		const char *value = line(PORT "/%s", wanted[i]);
		EXPECT(*value && strspn(value, "0123456789") == strlen(value), "%s", wanted[i]);
	}
}

static void agreeing(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	if (!context || ibv_query_device(context, &device) || ibv_query_port(context, 1, &port)) {
		EXPECT(0, "the device");
		return;
	}
	char text[64];
	uint8_t *raw = (uint8_t *)&device.node_guid;
	snprintf(text, sizeof text, "%02x%02x:%02x%02x:%02x%02x:%02x%02x", raw[0], raw[1], raw[2], raw[3], raw[4], raw[5],
		 raw[6], raw[7]);
	EXPECT(!strcmp(line(DEVICE "/node_guid"), text), "node_guid %s", text);
	EXPECT(!strcmp(line(DEVICE "/sys_image_guid"), text), "sys_image_guid");
	EXPECT(!strcmp(line(DEVICE "/fw_ver"), device.fw_ver), "fw_ver %s", device.fw_ver);
	EXPECT(atoi(line(PORT "/state")) == (int)port.state, "state %s", line(PORT "/state"));
	EXPECT(atoi(line(PORT "/phys_state")) == port.phys_state, "phys_state %s", line(PORT "/phys_state"));
	EXPECT(!strcmp(line(PORT "/link_layer"), port.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand"),
	       "link_layer");
	EXPECT(strtoul(line(PORT "/lid"), NULL, 16) == port.lid && strtoul(line(PORT "/sm_lid"), NULL, 16) == port.sm_lid,
	       "lid %s", line(PORT "/lid"));
	EXPECT(strtoul(line(PORT "/cap_mask"), NULL, 16) == port.port_cap_flags, "cap_mask");
	EXPECT(atoi(line(PORT "/lid_mask_count")) == port.lmc, "lid_mask_count");
	EXPECT(strstr(line(PORT "/rate"), "Gb/sec (") != NULL, "rate %s", line(PORT "/rate"));
	EXPECT(!strcmp(line(PORT "/pkeys/0"), "0xffff"), "pkeys");
	for (int i = 0; i < port.gid_tbl_len; i++) {
		union ibv_gid gid;
		struct ibv_gid_entry entry;
		char *end = text;
		EXPECT(ibv_query_gid(context, 1, i, &gid) == 0, "GID %d", i);
		for (int k = 0; k < 16; k++) end += sprintf(end, "%02x%s", gid.raw[k], k % 2 && k < 15 ? ":" : "");
		EXPECT(!strcmp(line(PORT "/gids/%d", i), text), "gids/%d %s", i, text);
		if (ibv_query_gid_ex(context, 1, i, &entry, 0)) continue;
		const char *kind = entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "IB/RoCE v1";
		EXPECT(!strcmp(line(PORT "/gid_attrs/types/%d", i), kind), "types/%d %s", i, kind);
	}
	EXPECT(!strcmp(line("%s/ibdev", list[0]->dev_path), ibv_get_device_name(list[0])), "ibdev");
	EXPECT(!strcmp(line("%s/node_type", list[0]->ibdev_path), "1: CA"), "ibdev_path");
	EXPECT(atoi(line("/sys/class/infiniband_verbs/abi_version")) == 6, "abi_version");
	ibv_close_device(context);
	ibv_free_device_list(list);
}

/* What programs of the system print; `how` is a shell's line whose output must have `wanted` in it. */
static void child(const char *how, const char *wanted)
{
	char text[65536];
	FILE *pipe = popen(how, "r");
	size_t length = pipe ? fread(text, 1, sizeof text - 1, pipe) : 0;
	text[length] = 0;
	int status = pipe ? pclose(pipe) : -1;
	int as_wanted = status == 0 && strstr(text, wanted);
	EXPECT(as_wanted, "%s", how);
	if (!as_wanted) printf("%s\n", text);
}

static void children(void)
{
	child("cat " DEVICE "/node_type", "1: CA");
	child("ls -lR " CLASS " 2>&1", "node_guid");
	child("ls /sys/class", "infiniband_verbs");
	child("ls -l /dev/infiniband 2>&1", "crw");
	child("cd " DEVICE "/ports && pwd -P && cat 1/link_layer", DEVICE "/ports\nEthernet");
	child("find " CLASS "/ -name link_layer", PORT "/link_layer");
	child("find /dev/infiniband -type c", UVERBS);
	child("test -c " UVERBS " && test -r " UVERBS " && test -w " UVERBS " && echo yes", "yes");
	child("stat -c %t:%T " UVERBS, "e7:c0");
	child("readlink -f " PORT "/../1", PORT);
	child("echo /sys/class/infiniband/*/ports/*", PORT);
	child("grep -r Ethernet " CLASS " 2>&1", PORT "/link_layer:Ethernet");
	child("python3 -c 'import os; print(sum(len(files) for _, _, files in os.walk(\"" CLASS "\")) > 40, "
	      "\"infiniband\" in os.listdir(\"/sys/class\"))'",
	      "True True");
	child("python3 -c 'import glob, os.path as p; print(glob.glob(\"/sys/class/infiniband/*/fw_ver\"), "
	      "p.realpath(\"" UVERBS "\"), p.islink(\"" UVERBS "\"))'",
	      "['" DEVICE "/fw_ver'] " UVERBS " False");
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} groups[] = {{"reading", reading},   {"kinds", kinds},       {"listing", listing},  {"names", names},
		      {"counters", counters}, {"agreeing", agreeing}, {"children", children}};
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (unsigned i = 0; i < sizeof groups / sizeof *groups; i++)
		if (argc < 3 || !strcmp(argv[2], groups[i].name)) groups[i].run();
	return failed;
}
