/* What NCCL's network code (net_ib) does with a verbs device, without a GPU: it loads libibverbs by dlopen and
 * each function by dlvsym, chooses its GID by what /sys says, brings queue pairs up by number, and moves data by
 * Writes with immediate data that its receiver grants through a queue in the sender's memory. The sender watches the
 * last 8 bytes of a grant, and calls no verb meanwhile. All devices are used together, as one.
 *
 *	nccl first|second ADDRESS PORT QPS	the first one listens, and each sends to the other one
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <sys/socket.h>

#include "common.h"

#define DEVICES 4		/* that are used as one */
#define QPS 16
#define RECEIVES 8		/* of one request */
#define SLOTS 256		/* requests between both ends */
#define WINDOW 8		/* requests that are granted at a time, in our test */
#define ALIGNMENT 128		/* of the parts of one message on several queue pairs */
#define ROOM (256 << 10)	/* for one of the receives of a request */
#define TRANSFERS 400		/* each way: slots are used again */
#define SPINS 40
#define READ_ID 1000		/* wr_id of Reads that flush */

/* The functions that are loaded, with the version that each has had since it came. */
#define SYMBOLS(X) \
	X(get_device_list, 1.1, struct ibv_device **, (int *)) \
	X(free_device_list, 1.1, void, (struct ibv_device **)) \
	X(get_device_name, 1.1, const char *, (struct ibv_device *)) \
	X(open_device, 1.1, struct ibv_context *, (struct ibv_device *)) \
	X(close_device, 1.1, int, (struct ibv_context *)) \
	X(get_async_event, 1.1, int, (struct ibv_context *, struct ibv_async_event *)) \
	X(ack_async_event, 1.1, void, (struct ibv_async_event *)) \
	X(query_device, 1.1, int, (struct ibv_context *, struct ibv_device_attr *)) \
	X(query_port, 1.1, int, (struct ibv_context *, uint8_t, struct ibv_port_attr *)) \
	X(query_gid, 1.1, int, (struct ibv_context *, uint8_t, int, union ibv_gid *)) \
	X(query_qp, 1.1, int, (struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *)) \
	X(alloc_pd, 1.1, struct ibv_pd *, (struct ibv_context *)) \
	X(dealloc_pd, 1.1, int, (struct ibv_pd *)) \
	X(reg_mr, 1.1, struct ibv_mr *, (struct ibv_pd *, void *, size_t, int)) \
	X(dereg_mr, 1.1, int, (struct ibv_mr *)) \
	X(create_cq, 1.1, struct ibv_cq *, (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
	X(destroy_cq, 1.1, int, (struct ibv_cq *)) \
	X(create_qp, 1.1, struct ibv_qp *, (struct ibv_pd *, struct ibv_qp_init_attr *)) \
	X(modify_qp, 1.1, int, (struct ibv_qp *, struct ibv_qp_attr *, int)) \
	X(destroy_qp, 1.1, int, (struct ibv_qp *)) \
	X(fork_init, 1.1, int, (void)) \
	X(event_type_str, 1.1, const char *, (enum ibv_event_type)) \
	X(reg_mr_iova2, 1.8, struct ibv_mr *, (struct ibv_pd *, void *, size_t, uint64_t, unsigned int)) \
	X(query_ece, 1.10, int, (struct ibv_qp *, struct ibv_ece *)) \
	X(set_ece, 1.10, int, (struct ibv_qp *, struct ibv_ece *)) \
	X(reg_dmabuf_mr, 1.12, struct ibv_mr *, (struct ibv_pd *, uint64_t, size_t, uint64_t, int, int))

#define POINTER(name, version, result, arguments) static result (*v_##name) arguments;
SYMBOLS(POINTER)
/* Version 1.16; older libraries have none. */
static int (*v_query_port_speed)(struct ibv_context *, uint32_t, uint64_t *);

static void load_symbols(void)
{
	void *library = dlopen("libibverbs.so", RTLD_NOW), *runtime = dlopen("libibverbs.so.1", RTLD_NOW);

	check(library && library == runtime, "libibverbs.so and libibverbs.so.1 are one library", "%s", dlerror());
	MUST(runtime);
#define LOAD(name, version, result, arguments) \
	*(void **)&v_##name = dlvsym(runtime, "ibv_" #name, "IBVERBS_" #version); \
	check(v_##name != NULL, "ibv_" #name " of IBVERBS_" #version, "%s", dlerror());
	SYMBOLS(LOAD)
	*(void **)&v_query_port_speed = dlvsym(runtime, "ibv_query_port_speed", "IBVERBS_1.16");
}

struct device {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_port_attr port;
	const char *name;
	int gid_index;
	union ibv_gid gid;
};

static struct device devices[DEVICES];
static int ndevices;

/* Into the text what a file of the device holds; -1 if it cannot be opened, -2 if it cannot be read. */
static int read_file(char *text, size_t room, const char *format, ...)
{
	char path[PATH_MAX];
	va_list ap;
	ssize_t n;
	int fd;

	va_start(ap, format);
	vsnprintf(path, sizeof path, format, ap);
	va_end(ap);
	fd = open(path, O_RDONLY);
	if (fd < 0)
		return -1;
	n = read(fd, text, room - 1);
	close(fd);
	if (n < 0)
		return -2;
	text[n] = 0;
	return 0;
}

static bool is_v4(const union ibv_gid *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };

	return memcmp(gid->raw, mapped, sizeof mapped) == 0;
}

/* The first GID of RoCE v2 and IPv4, found by looking through the whole table. A type that cannot be opened is fatal;
 * one that cannot be read (EINVAL) belongs to an entry that is empty. */
static void choose_gid(struct device *device)
{
	union ibv_gid gid;
	bool opened = true, queried = true;
	int valid = 0;
	char type[32];

	device->gid_index = -1;
	for (int i = 0; i < device->port.gid_tbl_len; i++) {
		queried &= v_query_gid(device->context, 1, i, &gid) == 0;
		int found = read_file(type, sizeof type, "/sys/class/infiniband/%s/ports/1/gid_attrs/types/%d",
				      device->name, i);
		opened &= found != -1;
		valid += found == 0;
		if (found == 0 && strncmp(type, "RoCE v2", 7) == 0 && is_v4(&gid) && device->gid_index < 0) {
			device->gid_index = i;
			device->gid = gid;
		}
	}
	check(queried, "every GID of the table can be queried", "errno %d", errno);
	check(opened, "the type of every GID can be opened", "errno %d", errno);
	check(valid > 0 && device->gid_index >= 0, "there is a GID of RoCE v2 and IPv4", "%d types", valid);
	MUST(device->gid_index >= 0);
}

/* It waits for events as long as the process lives. */
static void *wait_for_events(void *context)
{
	struct ibv_async_event event;

	while (v_get_async_event(context, &event) == 0) {
		check(event.event_type == IBV_EVENT_COMM_EST, "no event that NCCL warns of", "%s",
		      v_event_type_str(event.event_type));
		v_ack_async_event(&event);
	}
	return NULL;
}

static void look_at_paths(const char *name)
{
	char path[PATH_MAX], text[64];
	int interfaces = 0;
	struct dirent *entry;
	DIR *list;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s", name);
	check(access(path, F_OK) == 0, "the device has a directory in /sys", "errno %d", errno);
	check(read_file(text, sizeof text, "%s/ports/1/link_layer", path) == 0, "its link layer is there", "no");
	/* A path of PCI, or none: both are right. NCCL cuts four characters off its end. */
	strcat(path, "/device");
	char *real = realpath(path, NULL);
	check(!real || strlen(real) > 4, "its path, if it has one, is longer than a function's number", "%s", real);
	free(real);
	MUST(list = opendir("/sys/class/net"));
	while ((entry = readdir(list)))
		interfaces += entry->d_name[0] != '.' &&
			      read_file(text, sizeof text, "/sys/class/net/%s/address", entry->d_name) == 0;
	closedir(list);
	check(interfaces > 0, "the interfaces are in /sys/class/net", "none");
}

static void open_devices(void)
{
	struct ibv_device_attr attr;
	struct ibv_device **list;
	pthread_t thread;
	int n = 0;

	MUST(v_fork_init() == 0);
	MUST(list = v_get_device_list(&n));
	for (int i = 0; i < n && ndevices < DEVICES; i++) {
		struct device *device = &devices[ndevices];

		MUST(device->context = v_open_device(list[i]));
		memset(&attr, 0, sizeof attr);
		MUST(v_query_device(device->context, &attr) == 0);
		/* The function of version 1.1 knows the structure of then, which has no last fields. */
		memset(&device->port, 0, sizeof device->port);
		MUST(attr.phys_port_cnt == 1 && v_query_port(device->context, 1, &device->port) == 0);
		if (device->port.state != IBV_PORT_ACTIVE) {
			v_close_device(device->context);
			continue;
		}
		device->name = v_get_device_name(list[i]);
		check(device->port.link_layer == IBV_LINK_LAYER_ETHERNET, "a port of Ethernet", "%d",
		      device->port.link_layer);
		if (v_query_port_speed) {
			uint64_t speed = 0;
			int failed = v_query_port_speed(device->context, 1, &speed);

			check(failed || speed > 0, "a speed, or none", "%d, %lu", failed, (unsigned long)speed);
		}
		MUST(device->pd = v_alloc_pd(device->context));
		/* Asked without a buffer: EBADF says that there is such a thing. */
		errno = 0;
		MUST(v_reg_dmabuf_mr(device->pd, 0, 0, 0, -1, 0) == NULL);
		check(errno == EBADF || errno == EOPNOTSUPP || errno == EPROTONOSUPPORT,
		      "DMA buffers are supported, or refused as NCCL expects", "errno %d", errno);
		look_at_paths(device->name);
		choose_gid(device);
		MUST(pthread_create(&thread, NULL, wait_for_events, device->context) == 0);
		pthread_detach(thread);
		ndevices++;
	}
	v_free_device_list(list);
	check(ndevices > 0, "a device whose port is active", "none of %d", n);
	MUST(ndevices > 0);
}

static struct ibv_mr *register_at(int device, void *start, size_t length)
{
	struct ibv_mr *mr = v_reg_mr_iova2(devices[device].pd, start, length, (uintptr_t)start,
					   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
						   IBV_ACCESS_RELAXED_ORDERING);

	MUST(mr);
	return mr;
}

/* A grant, as the receiver writes it into the sender's memory: `index` comes last. */
struct grant {
	uint64_t address, size;
	uint32_t rkeys[DEVICES];
	uint32_t receives, tag;
	uint64_t index;
};

/* What the ends tell each other over a socket. */
struct description {
	struct {
		uint32_t number, device;
		struct ibv_ece ece;
		int has_ece;
	} qps[QPS];
	struct {
		union ibv_gid gid;
		uint32_t rkey;	/* of the grants at the sender, of the sizes at the receiver */
		uint8_t mtu;
	} devices[DEVICES];
	uint64_t start;
};

/* One way, at one of its ends. */
struct way {
	bool sends;
	int nqps;
	struct ibv_cq *cqs[DEVICES];
	struct ibv_qp *qps[QPS], *flush[DEVICES];
	struct description own, peer;
	/* At the sender: what the receiver has granted, and the sizes of what is sent. At the receiver: what it grants, and
	 * the sizes as they arrive. */
	struct grant grants[SLOTS][RECEIVES];
	int sizes[SLOTS][RECEIVES];
	struct ibv_mr *grant_mrs[DEVICES], *size_mrs[DEVICES], *data_mrs[DEVICES];
	char *data;	/* WINDOW requests of RECEIVES buffers */
	char flushed;
	struct ibv_mr *flush_mrs[DEVICES];
	uint64_t head, tail;	/* requests begun, and ended */
	int pending[SLOTS];	/* completions that a request still waits for */
	int flushes;		/* Reads that have not completed */
};

static struct ibv_qp *make_qp(struct way *way, int device, uint32_t receives, uint32_t sends)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = way->cqs[device], .recv_cq = way->cqs[device], .qp_type = IBV_QPT_RC, .qp_context = way,
		.cap = { .max_recv_wr = receives, .max_send_wr = sends, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	};
	struct ibv_qp *qp = v_create_qp(devices[device].pd, &attr);

	MUST(qp);
	MUST(v_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	return qp;
}

static void connect_qp(struct ibv_qp *qp, int device, uint32_t number, const union ibv_gid *gid, uint8_t mtu)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = number, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = {
			.is_global = 1, .port_num = 1,
			.grh = { .dgid = *gid, .sgid_index = (uint8_t)devices[device].gid_index, .hop_limit = 255 },
		},
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS, .timeout = 20, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
	};

	MUST(v_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	MUST(v_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					   IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void prepare(struct way *way, bool sends, int nqps)
{
	size_t room = (size_t)WINDOW * RECEIVES * ROOM;

	way->sends = sends;
	way->nqps = nqps;
	MUST(way->data = aligned_alloc(4096, room));
	memset(way->data, 0, room);
	for (int d = 0; d < ndevices; d++) {
		MUST(way->cqs[d] = v_create_cq(devices[d].context, 2 * SLOTS * nqps, NULL, NULL, 0));
		way->grant_mrs[d] = register_at(d, way->grants, sizeof way->grants);
		way->size_mrs[d] = register_at(d, way->sizes, sizeof way->sizes);
		way->data_mrs[d] = register_at(d, way->data, room);
		way->own.devices[d].gid = devices[d].gid;
		way->own.devices[d].mtu = (uint8_t)devices[d].port.active_mtu;
		way->own.devices[d].rkey = sends ? way->grant_mrs[d]->rkey : way->size_mrs[d]->rkey;
	}
	way->own.start = (uintptr_t)(sends ? (void *)way->grants : (void *)way->sizes);
	for (int q = 0; q < nqps; q++) {
		int d = q % ndevices;

		way->qps[q] = make_qp(way, d, sends ? 0 : SLOTS, sends ? 2 * SLOTS : SLOTS);
		way->own.qps[q].number = way->qps[q]->qp_num;
		way->own.qps[q].device = (uint32_t)d;
		int failed = v_query_ece(way->qps[q], &way->own.qps[q].ece);
		way->own.qps[q].has_ece = failed == 0;
		check(failed == 0 || failed == EOPNOTSUPP, "ECE can be asked for", "%d", failed);
	}
}

/* All queue pairs up, and at the receiver one more for each device, which is connected to itself. */
static void bring_up(struct way *way)
{
	for (int q = 0; q < way->nqps; q++) {
		int d = q % ndevices, theirs = (int)way->peer.qps[q].device;
		uint8_t mtu = way->peer.devices[theirs].mtu, own = way->own.devices[d].mtu;

		if (way->own.qps[q].has_ece && way->peer.qps[q].has_ece) {
			int failed = v_set_ece(way->qps[q], &way->peer.qps[q].ece);

			check(failed == 0 || failed == EOPNOTSUPP, "ECE of the peer can be set", "%d", failed);
		}
		connect_qp(way->qps[q], d, way->peer.qps[q].number, &way->peer.devices[theirs].gid, mtu < own ? mtu : own);
	}
	for (int d = 0; d < ndevices && !way->sends; d++) {
		way->flush[d] = make_qp(way, d, 0, SLOTS);
		connect_qp(way->flush[d], d, way->flush[d]->qp_num, &devices[d].gid, (uint8_t)devices[d].port.active_mtu);
		way->flush_mrs[d] = v_reg_mr(devices[d].pd, &way->flushed, 1, IBV_ACCESS_LOCAL_WRITE);
		MUST(way->flush_mrs[d]);
	}
}

/* What both ends know of a request: how many receives it has, and of each how much is sent, and where. */
static int receives_of(uint64_t request)
{
	return request % 3 ? 1 : 1 + (int)(request / 3 % RECEIVES);
}

static int size_of(uint64_t request, int r)
{
	static const int some[] = { 1, 0, 64, 127, 128, 129, 4096, 9001, 65535, 65536, 200000, ROOM };

	return some[(request * 7 + (uint64_t)r * 5) % (sizeof some / sizeof *some)];
}

static char *buffer_of(struct way *way, uint64_t request, int r)
{
	return way->data + ((size_t)(request % WINDOW) * RECEIVES + (size_t)r) * ROOM;
}

static uint64_t word_of(uint64_t request, int r, int at)
{
	return (request * 31 + (uint64_t)r) * 0x9e3779b97f4a7c15u + (uint64_t)at;
}

static void fill(char *buffer, uint64_t request, int r, int size)
{
	for (int at = 0; at < size; at += 8) {
		uint64_t word = word_of(request, r, at);

		memcpy(buffer + at, &word, (size_t)(size - at < 8 ? size - at : 8));
	}
}

/* As it was sent, and untouched behind its end. */
static bool holds(const char *buffer, uint64_t request, int r, int size)
{
	for (int at = 0; at < size; at += 8) {
		uint64_t word = word_of(request, r, at);

		if (memcmp(buffer + at, &word, (size_t)(size - at < 8 ? size - at : 8)))
			return false;
	}
	return size >= ROOM || buffer[size] == 0x5a;
}

/* Receives of the next request: their buffers are granted to the sender with one Write. */
static void grant(struct way *way)
{
	uint64_t request = way->head;
	int slot = (int)(request % SLOTS), n = receives_of(request), q = (int)(request % (uint64_t)way->nqps);
	struct grant *grants = way->grants[slot];
	struct ibv_recv_wr receive = { .wr_id = (uint64_t)slot }, *bad_receive;

	memset(way->sizes[slot], 0, sizeof way->sizes[slot]);
	for (int i = 0; i < way->nqps; i++)
		MUST(ibv_post_recv(way->qps[i], &receive, &bad_receive) == 0);
	way->pending[slot] = way->nqps;
	for (int r = 0; r < n; r++) {
		char *buffer = buffer_of(way, request, r);

		memset(buffer, 0x5a, ROOM);
		grants[r] = (struct grant){
			.address = (uintptr_t)buffer, .size = ROOM, .receives = (uint32_t)n, .tag = 100 + (uint32_t)r,
			.index = request + 1,
		};
		for (int d = 0; d < ndevices; d++)
			grants[r].rkeys[d] = way->data_mrs[d]->rkey;
	}
	int d = q % ndevices, theirs = (int)way->peer.qps[q].device;
	struct ibv_sge sge = { (uintptr_t)grants, (uint32_t)(n * (int)sizeof *grants), way->grant_mrs[d]->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr_id = READ_ID + 1,
		/* One of all slots has a completion, which frees the queue up to it. */
		.send_flags = slot < way->nqps ? IBV_SEND_SIGNALED : 0,
		.wr.rdma = {
			.remote_addr = way->peer.start + (uint64_t)slot * RECEIVES * sizeof *grants,
			.rkey = way->peer.devices[theirs].rkey,
		},
	}, *bad;
	MUST(ibv_post_send(way->qps[q], &wr, &bad) == 0);
	way->head++;
}

/* Whether the next request has been granted: a look at memory, and no verb. */
static bool is_granted(const struct way *way)
{
	const volatile struct grant *grants = way->grants[way->head % SLOTS];

	if (grants[0].index != way->head + 1)
		return false;
	for (uint32_t r = 1; r < grants[0].receives; r++)
		while (grants[r].index != way->head + 1)
			;
	__sync_synchronize();
	return true;
}

/* Sends what is granted: on each queue pair a part of every buffer, and with the last of its Writes immediate data. */
static bool send_granted(struct way *way)
{
	uint64_t request = way->head;
	int slot = (int)(request % SLOTS), n = receives_of(request), sent[RECEIVES] = { 0 };
	struct grant *grants = way->grants[slot];
	struct ibv_send_wr wrs[RECEIVES + 1], *bad;
	struct ibv_sge sges[RECEIVES + 1];
	bool right = grants[0].receives == (uint32_t)n;

	for (int r = 0; r < n; r++) {
		right &= grants[r].tag == 100 + (uint32_t)r && grants[r].size == ROOM && grants[r].address != 0;
		way->sizes[slot][r] = size_of(request, r);
		fill(buffer_of(way, request, r), request, r, size_of(request, r));
	}
	for (int q = 0; q < way->nqps; q++) {
		int d = q % ndevices, theirs = (int)way->peer.qps[q].device;

		memset(wrs, 0, sizeof wrs);
		for (int r = 0; r < n; r++) {
			int size = size_of(request, r), part = (size + way->nqps - 1) / way->nqps;

			part = (part + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
			part = part < size - sent[r] ? part : size - sent[r];
			sges[r] = (struct ibv_sge){
				(uintptr_t)buffer_of(way, request, r) + (uintptr_t)sent[r], (uint32_t)part, way->data_mrs[d]->lkey,
			};
			wrs[r].opcode = IBV_WR_RDMA_WRITE;
			wrs[r].sg_list = &sges[r];
			wrs[r].num_sge = part > 0;
			wrs[r].wr.rdma.remote_addr = grants[r].address + (uint64_t)sent[r];
			wrs[r].wr.rdma.rkey = grants[r].rkeys[theirs];
			wrs[r].next = &wrs[r + 1];
			sent[r] += part;
		}
		struct ibv_send_wr *last = &wrs[n - 1];
		if (n > 1) {
			/* The sizes of all of them. */
			last = &wrs[n];
			sges[n] = (struct ibv_sge){
				(uintptr_t)way->sizes[slot], (uint32_t)(n * (int)sizeof(int)), way->size_mrs[d]->lkey,
			};
			last->sg_list = &sges[n];
			last->num_sge = 1;
			last->wr.rdma.remote_addr = way->peer.start + (uint64_t)slot * RECEIVES * sizeof(int);
			last->wr.rdma.rkey = way->peer.devices[theirs].rkey;
		}
		last->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		last->imm_data = htonl((uint32_t)size_of(request, 0));
		last->send_flags = IBV_SEND_SIGNALED;
		last->next = NULL;
		last->wr_id = (uint64_t)slot;
		MUST(ibv_post_send(way->qps[q], wrs, &bad) == 0);
	}
	way->pending[slot] = way->nqps;
	way->head++;
	return right;
}

/* Takes completions of one way, at most four at a time. False after one with an error. */
static bool take_completions(struct way *way)
{
	struct ibv_wc wcs[4];

	for (int d = 0; d < ndevices; d++) {
		int n = ibv_poll_cq(way->cqs[d], 4, wcs);

		MUST(n >= 0);
		for (int i = 0; i < n; i++) {
			if (wcs[i].status) {
				check(false, "no completion has an error", "status %d of opcode %d", wcs[i].status, wcs[i].opcode);
				return false;
			}
			if (wcs[i].opcode == IBV_WC_RDMA_READ) {
				way->flushes--;
			} else if (way->sends || wcs[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
				uint64_t slot = wcs[i].wr_id, request = way->tail + (slot + SLOTS - way->tail % SLOTS) % SLOTS;

				way->pending[slot]--;
				/* Sizes of several receives are written; that of one is the immediate data. */
				if (!way->sends && receives_of(request) == 1)
					way->sizes[slot][0] = (int)ntohl(wcs[i].imm_data);
			}
		}
	}
	return true;
}

/* After a receive: a Read of its last byte by the queue pair that is connected to itself, on every device. */
static void flush(struct way *way, const char *byte)
{
	for (int d = 0; d < ndevices; d++) {
		struct ibv_sge sge = { (uintptr_t)&way->flushed, 1, way->flush_mrs[d]->lkey };
		struct ibv_send_wr wr = {
			.wr_id = READ_ID, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { .remote_addr = (uintptr_t)byte, .rkey = way->data_mrs[d]->rkey },
		}, *bad;

		way->flushes++;
		MUST(ibv_post_send(way->flush[d], &wr, &bad) == 0);
	}
}

/* The oldest request of the receiver, if it is complete: flushed, its sizes and bytes as they were sent. */
static bool end_receive(struct way *way, bool *good)
{
	uint64_t request = way->tail, end = now_ms() + LIMIT_MS;
	int slot = (int)(request % SLOTS);

	if (way->pending[slot])
		return false;
	flush(way, buffer_of(way, request, 0));
	while (way->flushes && now_ms() < end)
		if (!take_completions(way))
			break;
	if (way->flushes)
		die("the Read to itself does not complete");
	for (int r = 0; r < receives_of(request); r++) {
		int size = size_of(request, r);

		if (way->sizes[slot][r] != size || !holds(buffer_of(way, request, r), request, r, size)) {
			if (*good)
				check(false, "every byte as it was sent", "request %lu, receive %d: size %d, sent were %d",
				      (unsigned long)request, r, way->sizes[slot][r], size);
			*good = false;
		}
	}
	way->tail++;
	return true;
}

/* Both ways at once, as many requests as slots are used more than twice for. */
static void transfer(struct way *in, struct way *out)
{
	bool good = true, right = true;
	uint64_t end = now_ms() + LIMIT_MS;

	while ((in->tail < TRANSFERS || out->tail < TRANSFERS) && now_ms() < end) {
		bool idle = true;

		if (in->head < TRANSFERS && in->head - in->tail < WINDOW) {
			grant(in);
			idle = false;
		}
		/* The buffers of a request are used again WINDOW requests later. */
		if (out->head < TRANSFERS && out->head - out->tail < WINDOW && is_granted(out)) {
			right &= send_granted(out);
			idle = false;
		}
		if (in->tail < in->head && take_completions(in) && end_receive(in, &good))
			idle = false;
		/* Completions of a sender are looked for while it has some to come, and not while it waits for a grant. */
		if (out->tail < out->head && take_completions(out) && !out->pending[out->tail % SLOTS]) {
			out->tail++;
			idle = false;
		}
		if (idle)
			sched_yield();
	}
	check(in->tail == TRANSFERS && out->tail == TRANSFERS, "every request of both ways", "%lu received, %lu sent",
	      (unsigned long)in->tail, (unsigned long)out->tail);
	check(right, "every grant as it was written", "not all");
	check(good, "every byte as it was sent, and none beside", "not all");
}

static void swap(int fd, const void *own, void *peer, size_t length)
{
	MUST(send(fd, own, length, MSG_NOSIGNAL) == (ssize_t)length);
	MUST(recv(fd, peer, length, MSG_WAITALL) == (ssize_t)length);
}

/* The sender does nothing but look at memory, and the receiver grants when it has slept. */
static void spin(struct way *in, struct way *out, int fd, bool sender)
{
	uint64_t to = TRANSFERS + SPINS;
	bool good = true, came = true;
	char byte = 0;

	while (sender && out->tail < to && came) {
		uint64_t end = now_ms() + LIMIT_MS;

		while (!(came = is_granted(out)) && now_ms() < end)
			;
		if (!came)
			break;
		send_granted(out);
		while (out->pending[out->tail % SLOTS] && now_ms() < end)
			MUST(take_completions(out));
		out->tail++;
	}
	while (!sender && in->tail < to) {
		usleep(500 + (useconds_t)(in->head % 7) * 900);
		grant(in);
		uint64_t end = now_ms() + LIMIT_MS;
		while (in->pending[in->tail % SLOTS] && now_ms() < end)
			MUST(take_completions(in));
		if (!end_receive(in, &good))
			break;
	}
	if (sender)
		check(out->tail == to, "a sender that looks at memory alone sees every grant", "%lu of %lu",
		      (unsigned long)out->tail, (unsigned long)to);
	else
		check(good && in->tail == to, "what it sends arrives", "%lu of %lu", (unsigned long)in->tail,
		      (unsigned long)to);
	swap(fd, &byte, &byte, 1);
}

static int meet(bool first, const char *where, uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1, peer;

	MUST(inet_pton(AF_INET, where, &address.sin_addr) == 1);
	if (!first) {
		MUST(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
		return fd;
	}
	MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
	MUST(bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 1) == 0);
	MUST((peer = accept(fd, NULL, NULL)) >= 0);
	close(fd);
	return peer;
}

static void take_down(struct way *way)
{
	bool good = true;

	for (int q = 0; q < way->nqps; q++)
		good &= v_destroy_qp(way->qps[q]) == 0;
	for (int d = 0; d < ndevices; d++) {
		if (way->flush[d])
			good &= v_destroy_qp(way->flush[d]) == 0 && v_dereg_mr(way->flush_mrs[d]) == 0;
		good &= v_dereg_mr(way->grant_mrs[d]) == 0 && v_dereg_mr(way->size_mrs[d]) == 0;
		good &= v_dereg_mr(way->data_mrs[d]) == 0 && v_destroy_cq(way->cqs[d]) == 0;
	}
	free(way->data);
	check(good, way->sends ? "the sender's end is taken down" : "the receiver's end is taken down", "not all");
}

int main(int argc, char **argv)
{
	static struct way in, out;
	char byte = 0;

	if (argc != 5)
		die("usage: nccl first|second ADDRESS PORT QPS");
	bool first = strcmp(argv[1], "first") == 0;
	int fd = meet(first, argv[2], (uint16_t)atoi(argv[3])), nqps = atoi(argv[4]);

	MUST(nqps > 0 && nqps <= QPS);
	load_symbols();
	open_devices();
	prepare(&in, false, nqps);
	prepare(&out, true, nqps);
	/* The way in of one end is the way out of the other one. */
	swap(fd, first ? &in.own : &out.own, first ? &in.peer : &out.peer, sizeof in.own);
	swap(fd, first ? &out.own : &in.own, first ? &out.peer : &in.peer, sizeof in.own);
	bring_up(&in);
	bring_up(&out);
	swap(fd, &byte, &byte, 1);
	transfer(&in, &out);
	swap(fd, &byte, &byte, 1);
	spin(&in, &out, fd, first);
	spin(&in, &out, fd, !first);
	take_down(&in);
	take_down(&out);
	for (int d = 0; d < ndevices; d++)
		check(v_dealloc_pd(devices[d].pd) == 0, "the domain is deallocated", "errno %d", errno);
	printf("ok %d devices, %d queue pairs each way\n", ndevices, nqps);
	return failures ? 1 : 0;
}
