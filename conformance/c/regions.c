/* Memory regions over mappings of every kind. Each kind is run over each link, at both ends of a connection: RDMA Writes, RDMA
 * Reads, messages and atomic operations, small and large.
 *
 *	regions [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * files	of a file, shared and private, and of a memfd: shared mappings change the file, private ones do not
 * pages	of transparent huge pages, of /dev/zero, of a driver's pages; the kernel's own page is refused, as no adapter can pin it
 * huge		of huge pages of the system's pool, which are taken for it and given back
 * read_only	for peers that read
 * on_demand	of memory that has no pages yet, or loses them
 * forked	beside a child, which writes its own copies
 * truncated	of a file that is truncated: only the connection that uses it ends
 * remapped	where the program maps something else: a region is its addresses, as with on-demand paging
 *
 * UWARP is the command, and LINK is the link that `uwarp stat` must show for each connection at both ends. What cannot be had
 * here is named in a line with "left out". */
#define _GNU_SOURCE
#include <linux/if_packet.h>

#include <sys/file.h>

#include "processes.h"

#define QUARTER (1u << 20)
#define SIZE (4 * QUARTER)
#define SMALL_AT (4096 - 13)
#define ALL (REMOTE_ALL | IBV_ACCESS_REMOTE_ATOMIC)
/* What a file holds at first. */
#define OF_FILE 7000
/* What an end is told whose peer's memory is gone. */
#define THEIR_MEMORY IBV_WC_REM_OP_ERR

static struct conn c;
static unsigned char *own;		/* this end's region */
static uint64_t message = 1;		/* the last one; equal at both ends */
static const char *kind;

/* What each end knows of the other. */
static struct book {
	uint64_t at[2];
	uint32_t key[2];
} *book;

static struct ibv_mr *registered(void *at, int access)
{
	struct ibv_mr *region = ibv_reg_mr(domain, at, SIZE, access);

	if (!region)
		die("%s: no region", kind);
	book->at[server] = (uintptr_t)at;
	book->key[server] = region->rkey;
	return region;
}

static void use(void *at, int access)
{
	MUST(at != MAP_FAILED);
	own = at;
	mr = registered(at, access);
	both_are_here();
}

static void unuse(void)
{
	both_are_here();
	MUST(ibv_dereg_mr(mr) == 0);
	munmap(own, SIZE);
}

static unsigned char *in(int quarter, size_t at)
{
	return own + (size_t)quarter * QUARTER + at;
}

static uint64_t there(int quarter, size_t at)
{
	return book->at[!server] + (size_t)quarter * QUARTER + at;
}

static void do_one(enum ibv_wr_opcode op, int quarter, size_t at, uint32_t length, enum ibv_wc_status status)
{
	struct ibv_sge sge = { (uintptr_t)in(quarter, at), length, mr->lkey };
	struct ibv_wc wc;

	MUST(submit(&c, op, &sge, 1, 1, there(quarter, at), book->key[!server]) == 0);
	wc = poll_one(c.sent);
	if (wc.status != status)
		die("%s: operation %d of %u bytes ends with %s, want %s", kind, op, length, ibv_wc_status_str(wc.status),
		    ibv_wc_status_str(status));
}

static void receive_in(int quarter, size_t at, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)in(quarter, at), length, mr->lkey };

	MUST(receive(&c, &sge, 1, 1) == 0);
}

static void received(int quarter, size_t at, uint32_t length)
{
	struct ibv_wc wc = poll_one(c.came);

	if (wc.status != IBV_WC_SUCCESS || wc.byte_len != length)
		die("%s: a message of %u bytes ends with %s, %u", kind, length, ibv_wc_status_str(wc.status), wc.byte_len);
	must_hold(in(quarter, at), length, message, kind);
}

/* The client writes what the server then holds. */
static void written(int quarter, size_t at, uint32_t length)
{
	message++;
	if (!server) {
		fill(in(quarter, at), length, message);
		do_one(IBV_WR_RDMA_WRITE, quarter, at, length, IBV_WC_SUCCESS);
	}
	both_are_here();
	must_hold(in(quarter, at), length, message, kind);
}

/* The client reads what the server holds, which is this message. */
static void read_back(int quarter, size_t at, uint32_t length, uint64_t what)
{
	both_are_here();
	if (!server) {
		memset(in(quarter, at), 0xee, length);
		do_one(IBV_WR_RDMA_READ, quarter, at, length, IBV_WC_SUCCESS);
		must_hold(in(quarter, at), length, what, kind);
	}
	both_are_here();
}

static void sent_by(bool sender, int quarter, size_t at, uint32_t length)
{
	message++;
	if (!sender)
		receive_in(quarter, at, length);
	both_are_here();
	if (sender) {
		fill(in(quarter, at), length, message);
		do_one(IBV_WR_SEND, quarter, at, length, IBV_WC_SUCCESS);
	} else {
		received(quarter, at, length);
	}
	both_are_here();
}

static void added(size_t at)
{
	uint64_t word = 5000 + message, found = 0;
	struct ibv_send_wr wr = {
		.wr_id = 1, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	struct ibv_sge sge = { (uintptr_t)in(3, at), 8, mr->lkey };

	if (server)
		memcpy(in(0, at), &word, 8);
	both_are_here();
	if (!server) {
		wr.sg_list = &sge;
		wr.wr.atomic.remote_addr = there(0, at);
		wr.wr.atomic.rkey = book->key[!server];
		wr.wr.atomic.compare_add = 7;
		MUST(ibv_post_send(c.id->qp, &wr, &bad) == 0 && poll_one(c.sent).status == IBV_WC_SUCCESS);
		memcpy(&found, in(3, at), 8);
	}
	both_are_here();
	if (server)
		memcpy(&found, in(0, at), 8), found -= 7;
	if (found != word)
		die("%s: an atomic operation finds %" PRIu64 ", not %" PRIu64, kind, found, word);
}

/* All operations, small and large. */
static void work(void)
{
	static const struct { size_t at; uint32_t length; } pieces[] = { { SMALL_AT, 64 }, { 0, QUARTER } };

	for (int i = 0; i < 2; i++) {
		written(0, pieces[i].at, pieces[i].length);
		message++;
		if (server)
			fill(in(1, pieces[i].at), pieces[i].length, message);
		read_back(1, pieces[i].at, pieces[i].length, message);
		sent_by(!server, 2, pieces[i].at, pieces[i].length);
		sent_by(server, 3, pieces[i].at, pieces[i].length);
	}
	added(4096);
}

static void works(const char *what)
{
	kind = what;
	work();
	check(true, what, "");
}

static void left_out(const char *what)
{
	printf("# left out, because this system has none: %s\n", what);
	fflush(stdout);
}

/* ------------------------------------------------------------------ files */

static unsigned char *expected;

/* A file on disk, which is gone with its descriptor. */
static int new_file(void)
{
	char name[] = "/var/tmp/uwarp-regions-XXXXXX";
	int fd = mkstemp(name);

	MUST(fd >= 0 && unlink(name) == 0);
	return fd;
}

static void write_file(int fd)
{
	if (!expected)
		MUST(expected = malloc(SIZE));
	for (int quarter = 0; quarter < 4; quarter++)
		fill(expected + quarter * QUARTER, QUARTER, OF_FILE);
	MUST(pwrite(fd, expected, SIZE, 0) == (ssize_t)SIZE);
}

static void file_of(const char *what, int fd, int flags, int access)
{
	char name[128];
	bool shared = flags == MAP_SHARED;

	kind = what;
	write_file(fd);
	use(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, flags, fd, 0), access);
	read_back(2, 0, QUARTER, OF_FILE);
	work();
	if (shared)
		memcpy(expected, own, SIZE);
	for (size_t at = 0; at < SIZE; at += 4096) {
		unsigned char page[4096];

		MUST(pread(fd, page, sizeof page, (off_t)at) == (ssize_t)sizeof page);
		if (memcmp(page, expected + at, sizeof page))
			die("%s: the file has other bytes at %zu", kind, at);
	}
	snprintf(name, sizeof name, "%s: the file %s", what, shared ? "has all bytes" : "is as it was");
	check(true, name, "");
	unuse();
	close(fd);
}

static void files_end(void)
{
	int fd;

	meet(&c, 16, 1);
	file_of("a file, shared", new_file(), MAP_SHARED, ALL);
	file_of("a file, private", new_file(), MAP_PRIVATE, ALL);
	file_of("a file, private and on demand", new_file(), MAP_PRIVATE, ALL | IBV_ACCESS_ON_DEMAND);
	MUST((fd = memfd_create("regions", MFD_CLOEXEC)) >= 0);
	file_of("a memfd, shared", fd, MAP_SHARED, ALL);
	MUST((fd = memfd_create("regions", MFD_CLOEXEC)) >= 0);
	file_of("a memfd, private", fd, MAP_PRIVATE, ALL);
}

static void files(void)
{
	two(files_end, 1);
}

/* ------------------------------------------------------------------ pages */

static void *anonymous(int flags)
{
	return mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE | flags, -1, 0);
}

/* What /proc/self/smaps says of the mapping that holds this address, in kilobytes. */
static long smaps_of(const void *address, const char *word)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	unsigned long from, to, at = (uintptr_t)address;
	char line[512];
	bool here = false;
	long found = -1;

	MUST(smaps);
	while (fgets(line, sizeof line, smaps)) {
		if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
			here = from <= at && at < to;
		else if (here && !strncmp(line, word, strlen(word)))
			found = atol(line + strlen(word));
	}
	fclose(smaps);
	return found;
}

#define HUGE_PAGE (2u << 20)

/* Transparent huge pages, which have boundaries of their own. */
static void transparent(void)
{
	unsigned char *all = mmap(NULL, SIZE + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE, -1, 0);
	unsigned char *at = (unsigned char *)(((uintptr_t)all + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);

	MUST(all != MAP_FAILED);
	munmap(all, (size_t)(at - all));
	munmap(at + SIZE, HUGE_PAGE - (size_t)(at - all));
	madvise(at, SIZE, MADV_HUGEPAGE);
	use(at, ALL);
	if (smaps_of(at, "AnonHugePages:") <= 0)
		left_out("transparent huge pages (ordinary ones are used)");
	works("transparent huge pages");
	unuse();
}

/* The pages of the system's pool; with `wanted`, sets it to that many. -1: there is none. */
static long hugetlb_pages(long wanted)
{
	FILE *file = fopen("/proc/sys/vm/nr_hugepages", "r");
	long now = 0;

	if (!file || fscanf(file, "%ld", &now) != 1)
		now = -1;
	if (file)
		fclose(file);
	if (now >= 0 && wanted >= 0 && (file = fopen("/proc/sys/vm/nr_hugepages", "w"))) {
		fprintf(file, "%ld\n", wanted);
		fclose(file);
	}
	return now;
}

static void huge_end(void)
{
	void *at = anonymous(MAP_HUGETLB);
	char mine = at != MAP_FAILED, other_s;

	meet(&c, 16, 1);
	tell(&mine, 1);
	hear(&other_s, 1);
	if (mine && other_s) {
		use(at, ALL);
		check(smaps_of(at, "KernelPageSize:") == HUGE_PAGE / 1024, "the region has pages of the pool", "not");
		works("huge pages of the pool");
		unuse();
	} else {
		left_out("huge pages of the pool (vm.nr_hugepages)");
	}
	check(true, "the process lives", "");
}

/* The pool is the system's, so it is as before whatever becomes of the processes; and one at a time uses it. */
static void huge(void)
{
	int status, lock = open("/proc/sys/vm", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	long before;
	pid_t child;

	alarm(0);
	MUST(lock >= 0 && flock(lock, LOCK_EX) == 0);
	before = hugetlb_pages(-1);
	if (before >= 0)
		hugetlb_pages(before + 2 * SIZE / HUGE_PAGE);
	fflush(stdout);
	MUST((child = fork()) >= 0);
	if (child == 0) {
		two(huge_end, 1);
		_exit(failures ? 1 : 0);
	}
	MUST(waitpid(child, &status, 0) == child);
	if (before >= 0)
		hugetlb_pages(before);
	close(lock);
	check(status == 0, "both ends end as they should", "%x", status);
}

/* Pages that a driver has made and mapped, as those of many devices. */
static void packet_ring(void)
{
	struct tpacket_req ring = { .tp_block_size = 1 << 16, .tp_block_nr = SIZE >> 16, .tp_frame_size = 1 << 16,
				    .tp_frame_nr = SIZE >> 16 };
	/* Of no protocol: nothing comes. */
	int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
	char mine = fd >= 0 && setsockopt(fd, SOL_PACKET, PACKET_RX_RING, &ring, sizeof ring) == 0, other_s;

	tell(&mine, 1);
	hear(&other_s, 1);
	if (mine && other_s) {
		use(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), ALL);
		works("the pages of a packet socket");
		unuse();
	} else {
		left_out("the pages of a packet socket");
	}
	close(fd);
}

/* What has no pages behind it (VM_PFNMAP), as registers of a device. */
static void without_pages(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long from = 0, to;
	char line[512];
	bool found = false;
	struct ibv_mr *region;

	MUST(maps);
	while (!found && fgets(line, sizeof line, maps))
		found = strstr(line, "[vvar]") && sscanf(line, "%lx-%lx", &from, &to) == 2;
	fclose(maps);
	if (!found)
		return left_out("a mapping without pages ([vvar])");
	errno = 0;
	region = ibv_reg_mr(domain, (void *)from, 4096, IBV_ACCESS_REMOTE_READ);
	check_failed(!region, EFAULT, "memory without pages cannot be pinned");
}

static void pages_end(void)
{
	int zero = open("/dev/zero", O_RDWR | O_CLOEXEC);

	MUST(zero >= 0);
	meet(&c, 16, 1);
	transparent();
	use(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE, zero, 0), ALL);
	works("/dev/zero, private");
	unuse();
	use(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, zero, 0), ALL);
	works("/dev/zero, shared");
	unuse();
	packet_ring();
	without_pages();
}

static void pages(void)
{
	two(pages_end, 1);
}

/* ------------------------------------------------------------------ read_only */

static void read_only_end(void)
{
	struct ibv_mr *refused;
	int fd = new_file();

	kind = "a read-only mapping";
	meet(&c, 16, 1);
	write_file(fd);
	if (server) {
		own = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, fd, 0);
		errno = 0;
		refused = ibv_reg_mr(domain, own, SIZE, ALL);
		check_failed(!refused, EFAULT, "a read-only mapping is no region that is written");
		use(own, IBV_ACCESS_REMOTE_READ);
	} else {
		use(anonymous(0), ALL);
	}
	read_back(0, 0, 64, OF_FILE);
	read_back(0, 0, QUARTER, OF_FILE);
	if (!server)
		receive_in(1, 0, QUARTER);
	both_are_here();
	message = OF_FILE;
	if (server)
		do_one(IBV_WR_SEND, 1, 0, QUARTER, IBV_WC_SUCCESS);
	else
		received(1, 0, QUARTER);
	unuse();
	check(true, "a read-only mapping is read by peers, and sent", "");
	close(fd);
}

static void read_only(void)
{
	two(read_only_end, 1);
}

/* ------------------------------------------------------------------ on_demand */

static size_t resident(void)
{
	static unsigned char pages[SIZE / 4096];
	size_t count = 0;

	MUST(mincore(own, SIZE, pages) == 0);
	for (size_t i = 0; i < sizeof pages; i++)
		count += pages[i] & 1;
	return count;
}

static void must_be_zero(int quarter)
{
	for (size_t at = 0; at < QUARTER; at++)
		if (*in(quarter, at))
			die("%s: byte %zu is %x", kind, at, *in(quarter, at));
}

/* The client reads zeros. */
static void read_zeros(int quarter)
{
	both_are_here();
	if (!server) {
		memset(in(quarter, 0), 0xee, QUARTER);
		do_one(IBV_WR_RDMA_READ, quarter, 0, QUARTER, IBV_WC_SUCCESS);
		must_be_zero(quarter);
	}
	both_are_here();
}

static void on_demand_end(void)
{
	void *at = anonymous(MAP_NORESERVE);

	meet(&c, 16, 1);
	kind = "memory on demand";
	use(at, ALL | IBV_ACCESS_ON_DEMAND);
	check(resident() == 0, "memory on demand has no pages when it is registered", "%zu", resident());
	read_zeros(1);
	works("memory on demand");
	MUST(madvise(own, SIZE, MADV_DONTNEED) == 0);
	read_zeros(1);
	works("memory on demand that has lost its pages");
	unuse();
	kind = "memory without rights";
	at = mmap(NULL, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	use(at, ALL | IBV_ACCESS_ON_DEMAND);
	MUST(mprotect(at, SIZE, PROT_READ | PROT_WRITE) == 0);
	both_are_here();
	works("memory that has got its rights after its region");
	unuse();
	use(anonymous(0), ALL);
	check(resident() == SIZE / 4096, "other memory has all its pages then", "%zu", resident());
	unuse();
}

static void on_demand(void)
{
	two(on_demand_end, 1);
}

/* ------------------------------------------------------------------ forked */

#define AT_FORK 8000
#define CHILDS 9000

static void fill_all(uint64_t what)
{
	for (int quarter = 0; quarter < 4; quarter++)
		fill(in(quarter, 0), QUARTER, what);
}

struct child {
	pid_t pid;
	int to;
};

static uint64_t word_from(int fd)
{
	uint64_t word;

	if (!readable(fd, LIMIT_MS) || read(fd, &word, sizeof word) != sizeof word)
		die("%s: a child or its parent says nothing", kind);
	return word;
}

static void word_to(int fd, uint64_t word)
{
	MUST(write(fd, &word, sizeof word) == sizeof word);
}

/* Writes half of what it has, if it is told to; at the end it must hold what its parent names. */
static int life_of_child(int parent)
{
	bool writes = word_from(parent);
	uint64_t rest;

	if (writes) {
		fill(in(0, 0), QUARTER, CHILDS);
		fill(in(2, 0), QUARTER, CHILDS);
		word_to(parent, 0);
	}
	rest = word_from(parent);
	kind = "a child";
	for (int quarter = 0; quarter < 4; quarter++)
		must_hold(in(quarter, 0), QUARTER, writes && quarter % 2 == 0 ? CHILDS : rest, kind);
	return 0;
}

static struct child forked_child(bool writes)
{
	struct child child;
	int ends[2];

	MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
	fflush(stdout);
	MUST((child.pid = fork()) >= 0);
	if (child.pid == 0) {
		close(ends[0]);
		alarm(GROUP_LIMIT);
		_exit(life_of_child(ends[1]));
	}
	close(ends[1]);
	child.to = ends[0];
	word_to(child.to, writes);
	if (writes)
		word_from(child.to);
	/* The peer's too: what it writes from now on comes behind the fork. */
	both_are_here();
	return child;
}

static void must_have(struct child *child, uint64_t rest, const char *what)
{
	int status;

	word_to(child->to, rest);
	MUST(waitpid(child->pid, &status, 0) == child->pid);
	check(status == 0, what, "%x", status);
	close(child->to);
}

static void forked_end(void)
{
	struct child child;

	meet(&c, 16, 1);
	kind = "beside a child";
	use(anonymous(0), ALL);
	fill_all(AT_FORK);
	child = forked_child(true);
	read_back(0, 0, QUARTER, AT_FORK);
	fill_all(AT_FORK);
	both_are_here();
	works("a parent whose child has written its copies");
	must_have(&child, AT_FORK, "the child has its own bytes, and nothing of its parent's peer");
	fill_all(AT_FORK);
	child = forked_child(false);
	works("a parent whose child has written nothing");
	must_have(&child, AT_FORK, "that child has the bytes of the fork");
	unuse();
	use(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), ALL);
	child = forked_child(true);
	read_back(0, 0, QUARTER, CHILDS);
	works("shared memory beside a child");
	fill_all(AT_FORK);
	read_back(1, 0, QUARTER, AT_FORK);
	fill(in(0, 0), QUARTER, CHILDS);
	fill(in(2, 0), QUARTER, CHILDS);
	fill(in(3, 0), QUARTER, CHILDS);
	both_are_here();
	/* What the peer has written, both have. */
	if (!server) {
		fill(in(3, 0), QUARTER, AT_FORK);
		do_one(IBV_WR_RDMA_WRITE, 3, 0, QUARTER, IBV_WC_SUCCESS);
	}
	both_are_here();
	must_have(&child, AT_FORK, "the child has what the peer has written into shared memory");
	unuse();
}

static void forked(void)
{
	two(forked_end, 1);
}

/* ------------------------------------------------------------------ truncated */

static struct conn bystander;
static int fd_of_region;

static void leave(void)
{
	rdma_destroy_qp(c.id);
	MUST(rdma_destroy_id(c.id) == 0);
	MUST(ibv_destroy_cq(c.sent) == 0 && ibv_destroy_cq(c.came) == 0);
	MUST(ibv_destroy_comp_channel(c.channel) == 0);
	c = (struct conn){ 0 };
}

/* Both ends hear that the connection is over. */
static void ended(const char *what)
{
	struct rdma_cm_event event = must_event(events, RDMA_CM_EVENT_DISCONNECTED);

	check(event.id == c.id, what, "another connection ends");
	both_are_here();
	leave();
}

static void begin_to_truncate(const char *what)
{
	kind = what;
	meet(&c, 16, 1);
	check_links(server ? "the server's" : "the client's", 2);
	fd_of_region = new_file();
	write_file(fd_of_region);
	use(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd_of_region, 0), ALL);
}

static void truncate_it(bool server_s)
{
	if (server == server_s)
		MUST(ftruncate(fd_of_region, 0) == 0);
	both_are_here();
}

static void end_of_it(const char *what)
{
	struct conn gone;

	ended(what);
	unuse();
	close(fd_of_region);
	gone = c;
	c = bystander;
	kind = "another connection";
	use(anonymous(0), ALL);
	work();
	unuse();
	c = gone;
}

static void receive_into_it(uint32_t length)
{
	begin_to_truncate("a receive into it");
	if (server)
		receive_in(0, 0, length);
	truncate_it(true);
	if (server) {
		struct ibv_wc wc = poll_one(c.came);

		check(wc.status == IBV_WC_LOC_PROT_ERR, "a receive into it fails", "%s", ibv_wc_status_str(wc.status));
	} else {
		do_one(IBV_WR_SEND, 0, 0, length, THEIR_MEMORY);
	}
	end_of_it("a receive into it ends the connection");
}

/* While the client's requests are under way. */
static void under_way(enum ibv_wr_opcode op, enum ibv_wc_status first, const char *what)
{
	int posted = 0, done = 0, good = 0;
	enum ibv_wc_status failed = IBV_WC_SUCCESS;

	begin_to_truncate(what);
	if (server) {
		usleep((useconds_t)any(20000));
		MUST(ftruncate(fd_of_region, 0) == 0);
	}
	while (!server && (!failed || done < posted)) {
		struct ibv_wc wc;

		for (; !failed && posted - done < 8; posted++) {
			int quarter = posted % 4;
			struct ibv_sge sge = { (uintptr_t)in(quarter, 0), QUARTER, mr->lkey };

			if (submit(&c, op, &sge, 1, 1, there(quarter, 0), book->key[!server]))
				break;
		}
		wc = poll_one(c.sent);
		done++;
		if (!wc.status && failed)
			die("%s: a success behind %s", kind, ibv_wc_status_str(failed));
		if (!wc.status)
			good++;
		else if (!failed)
			failed = wc.status;
		else if (wc.status != IBV_WC_WR_FLUSH_ERR)
			die("%s: %s behind the first that failed", kind, ibv_wc_status_str(wc.status));
	}
	if (!server)
		check(failed == first, what, "%s after %d", ibv_wc_status_str(failed), good);
	end_of_it("that ends the connection");
}

static void truncated_end(void)
{
	static const uint32_t lengths[] = { 64, QUARTER };

	meet(&bystander, 16, 1);
	for (int i = 0; i < 2; i++) {
		begin_to_truncate("a peer's RDMA Read of it");
		truncate_it(true);
		if (!server)
			do_one(IBV_WR_RDMA_READ, 0, 0, lengths[i], THEIR_MEMORY);
		end_of_it("a peer's RDMA Read of it ends the connection");
		begin_to_truncate("a peer's RDMA Write into it");
		truncate_it(true);
		if (!server)
			do_one(IBV_WR_RDMA_WRITE, 0, 0, lengths[i], THEIR_MEMORY);
		end_of_it("a peer's RDMA Write into it ends the connection");
		begin_to_truncate("a Send from it");
		truncate_it(false);
		if (!server)
			do_one(IBV_WR_SEND, 0, 0, lengths[i], IBV_WC_LOC_PROT_ERR);
		end_of_it("a Send from it ends the connection");
		begin_to_truncate("an RDMA Read into it");
		truncate_it(false);
		if (!server)
			do_one(IBV_WR_RDMA_READ, 0, 0, lengths[i], IBV_WC_LOC_PROT_ERR);
		end_of_it("an RDMA Read into it ends the connection");
		receive_into_it(lengths[i]);
	}
	under_way(IBV_WR_RDMA_READ, THEIR_MEMORY, "RDMA Reads under way while it is truncated");
	under_way(IBV_WR_RDMA_WRITE, THEIR_MEMORY, "RDMA Writes under way while it is truncated");
}

static void truncated(void)
{
	two(truncated_end, 1);
}

/* ------------------------------------------------------------------ remapped */

#define NEW 8100

/* Replaces what is mapped in one step: another thread of the process might map something in between. */
static void map_over(int rights)
{
	void *at = mmap(own, SIZE, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	MUST(at == own);
}

static void remapped_end(void)
{
	unsigned char *moved;

	meet(&c, 16, 1);
	kind = "mapped again";
	use(anonymous(0), ALL);
	work();
	map_over(PROT_READ | PROT_WRITE);
	fill_all(NEW);
	read_back(0, 0, QUARTER, NEW);
	works("a region where other memory was mapped");

	moved = own;
	MUST((own = anonymous(0)) != MAP_FAILED);
	fill_all(NEW + 1);
	MUST(mremap(own, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) == moved);
	own = moved;
	read_back(0, 0, QUARTER, NEW + 1);
	works("a region where other memory was moved to");

	fill_all(NEW + 2);
	both_are_here();
	moved = mremap(own, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
	MUST(moved != MAP_FAILED);
	read_zeros(1);
	works("a region whose memory was moved away");
	for (int quarter = 0; quarter < 4; quarter++)
		must_hold(moved + quarter * QUARTER, QUARTER, NEW + 2, "what was moved away");
	check(true, "and that is as it was", "");
	munmap(moved, SIZE);

	if (server)
		map_over(PROT_NONE);
	both_are_here();
	if (!server)
		do_one(IBV_WR_RDMA_READ, 0, 0, 64, THEIR_MEMORY);
	ended("a region without memory ends the connection");
	if (server)
		map_over(PROT_READ | PROT_WRITE);
	meet(&c, 16, 1);
	works("a region that has memory again");
	unuse();
}

static void remapped(void)
{
	two(remapped_end, 1);
}

static const struct group groups[] = {
	{ "files", files },
	{ "pages", pages },
	{ "huge", huge },
	{ "read_only", read_only },
	{ "on_demand", on_demand },
	{ "forked", forked },
	{ "truncated", truncated },
	{ "remapped", remapped },
};

int main(int argc, char **argv)
{
	const char *given = getenv("SEED");

	seed = (given ? strtoull(given, NULL, 10) : now_us() * 7919 + (uint64_t)getpid()) | 1;
	printf("# seed %" PRIu64 "\n", seed);
	book = in_common(sizeof *book);
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
