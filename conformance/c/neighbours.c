/* A process that shares memory with this one is killed at any instant, or writes that memory at random, under
 * traffic: the other end learns of its end, what was acknowledged was placed, nothing is left, and no other
 * connection notices.
 *
 *     neighbours ADDRESS kill|scribble ROUNDS [SEED]
 *
 * This process is the survivor. Each round it starts a victim (this program again), which connects or accepts,
 * and another thread kills it. A witness, which is a third process, has a connection with the survivor all the
 * time. The victim's memory is a memfd that the survivor has mapped, too, so that it can be looked at when the
 * victim is gone. The instant is found in the ledger of the two ends, read from the survivor's own mapping
 * (crates/llp/src/memory/ledger.rs). One that scribbles runs the same traffic, has a thread that spoils what it
 * shares, and is killed in the end. */
#define _GNU_SOURCE
#include <dirent.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "chance.h"
#include "common.h"

enum shape { SETUP, EMPTY, FULL, WRAP, ASLEEP, CLOSING, SHAPES, SCRIBBLE = SHAPES };
static const char *const shape_names[] = { "set-up", "empty", "full", "wrap", "asleep", "closing", "scribble" };

#define SLOTS 8
#define SLOT 65536
#define RECEIVES 32
#define MESSAGE 4096
#define DEPTH 24

/* What the survivor and its victim have in common. */
struct book {
	_Atomic uint32_t port;			/* of a victim that listens */
	_Atomic uint32_t closing;		/* the victim disconnects */
	_Atomic uint64_t scribbled;		/* how often it has spoiled the memory */
	uint64_t target[2], key[2];		/* of the victim's memory below */
	unsigned char written[SLOTS][SLOT];	/* by Writes; read by Reads */
	unsigned char received[RECEIVES][MESSAGE];
};

static struct book *book;
static enum shape shape;

/* One end of the connection between survivor and victim, or survivor and witness. */
struct end {
	struct side side;
	struct ibv_mr *mr;			/* what it sends from, and reads into */
	struct ibv_mr *own;			/* what it receives into, and the peer writes */
	unsigned char *memory, *into;		/* SLOTS of SLOT and RECEIVES of MESSAGE */
	uint64_t remote;			/* for Writes and Reads; 0: this end only sends */
	uint32_t rkey;
	uint64_t posted, done;			/* work requests, from 1 on */
	uint64_t sends, writes;			/* posted */
	uint64_t sent, placed;			/* numbers of the last Send and Write with success */
	uint64_t came;				/* messages */
	bool failed;
};

static struct end seen;				/* the survivor's end with the witness */

/* A work request's number is its count, with what it was above. */
#define SEND (1ull << 56)
#define WRITE (2ull << 56)
#define READ (3ull << 56)
#define KIND (0xffull << 56)
#define RECEIVE (4ull << 56)

static void mark(unsigned char *at, uint32_t length, uint64_t number)
{
	memcpy(at, &number, 8);
	memcpy(at + length - 8, &number, 8);
}

static uint64_t first_of(const unsigned char *at)
{
	uint64_t number;

	memcpy(&number, at, 8);
	return number;
}

static uint64_t last_of(const unsigned char *at, uint32_t length)
{
	return first_of(at + length - 8);
}

static uint32_t message_length(uint64_t number)
{
	static const uint32_t of[] = { 64, 16, 4096, 1000 };

	return of[number % 4];
}

static void receive_into(struct end *e, uint64_t slot)
{
	struct ibv_sge sge = { (uintptr_t)e->into + slot * MESSAGE, MESSAGE, e->own->lkey };

	if (post_recv(&e->side, &sge, 1, RECEIVE | slot))
		e->failed = true;
}

static void post_send(struct end *e)
{
	uint64_t number = ++e->sends;
	uint32_t length = message_length(number);
	/* Sends and Writes have halves of the memory; a slot is used again long after its request has completed. */
	unsigned char *from = e->memory + SLOTS * SLOT + number % RECEIVES * MESSAGE;
	struct ibv_sge sge = { (uintptr_t)from, length, e->mr->lkey };

	mark(from, length, number);
	if (post(&e->side, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, SEND | ++e->posted))
		e->posted--, e->failed = true;
}

/* Of a Write into this slot. Where the ring is to be full, they are large. */
static uint32_t length_of(uint64_t slot)
{
	static const uint32_t lengths[SLOTS] = { 8, 64, 65536, 1000, 20000, 8, 4097, 65536 };

	return shape == FULL || shape == WRAP ? SLOT - lengths[slot] % SLOT : lengths[slot];
}

static void post_write(struct end *e)
{
	uint64_t number = ++e->writes, slot = number % SLOTS;
	struct ibv_sge sge = { (uintptr_t)e->memory + slot * SLOT, length_of(slot), e->mr->lkey };

	mark(e->memory + slot * SLOT, length_of(slot), number);
	if (post(&e->side, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, e->remote + slot * SLOT, e->rkey,
		 WRITE | ++e->posted))
		e->posted--, e->failed = true;
}

static void post_read(struct end *e)
{
	unsigned char *to = e->memory + SLOTS * SLOT + RECEIVES * MESSAGE;
	struct ibv_sge sge = { (uintptr_t)to, SLOT, e->mr->lkey };

	if (post(&e->side, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, e->remote + 2 * SLOT, e->rkey,
		 READ | ++e->posted))
		e->posted--, e->failed = true;
}

/* Takes what has completed; each work request once, in order. Returns whether there was anything. */
static bool take(struct end *e)
{
	struct ibv_wc wc[16];
	int n = ibv_poll_cq(e->side.scq, 16, wc);

	MUST(n >= 0);
	for (int i = 0; i < n; i++) {
		uint64_t number = wc[i].wr_id & ~KIND;

		if ((wc[i].wr_id & KIND) == RECEIVE) {
			const unsigned char *at = e->into + number * MESSAGE;

			if (wc[i].status)
				continue;
			e->came++;
			if (shape == SCRIBBLE && e != &seen) {
				receive_into(e, number);
				continue;
			}
			if (number != e->came % RECEIVES || wc[i].byte_len != message_length(e->came) ||
			    first_of(at) != e->came || last_of(at, wc[i].byte_len) != e->came)
				die("message %" PRIu64 " is slot %" PRIu64 " with %u bytes of message %" PRIu64, e->came,
				    number, wc[i].byte_len, first_of(at));
			receive_into(e, number);
			continue;
		}
		if (number != e->done + 1)
			die("request %" PRIu64 " completes behind %" PRIu64, number, e->done);
		e->done = number;
		if (wc[i].status) {
			if (wc[i].status != IBV_WC_WR_FLUSH_ERR && wc[i].status != IBV_WC_RETRY_EXC_ERR &&
			    shape != SCRIBBLE)
				die("request %" PRIu64 ": %s", number, ibv_wc_status_str(wc[i].status));
			e->failed = true;
		} else if (e->failed) {
			die("request %" PRIu64 " succeeds behind one that failed", number);
		} else if ((wc[i].wr_id & KIND) == SEND) {
			e->sent++;
		} else if ((wc[i].wr_id & KIND) == WRITE) {
			e->placed++;
		}
	}
	return n > 0;
}

/* Posts as this shape of traffic wants. */
static void traffic(struct end *e)
{
	uint64_t depth = shape == EMPTY || shape == ASLEEP ? 1 : DEPTH;

	/* One that computes between its messages finds the ring empty, and its peer asleep. */
	if (shape == ASLEEP && e->posted == e->done)
		usleep((useconds_t)any(1000));
	while (!e->failed && e->posted - e->done < depth) {
		uint64_t what = any(e->remote ? 16 : 2);

		if (what < 2 || (what < 8 && shape != FULL && shape != WRAP))
			post_send(e);
		else if (what < 15)
			post_write(e);
		else
			post_read(e);
	}
}

/* Waits until something may have completed, on the channel. */
static void wait_asleep(struct end *e, int ms)
{
	struct ibv_cq *cq;
	void *context;

	MUST(ibv_req_notify_cq(e->side.scq, 0) == 0);
	if (take(e) || !readable(e->side.cc->fd, ms))
		return;
	MUST(ibv_get_cq_event(e->side.cc, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
}

static void open_resources(struct end *e, unsigned char *written, unsigned char *into)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	size_t length = SLOTS * SLOT + RECEIVES * MESSAGE + SLOT;

	MUST(e->side.pd = ibv_alloc_pd(e->side.id->verbs));
	MUST(e->side.cc = ibv_create_comp_channel(e->side.id->verbs));
	MUST(e->side.scq = ibv_create_cq(e->side.id->verbs, 4 * RECEIVES, NULL, e->side.cc, 0));
	attr.send_cq = attr.recv_cq = e->side.scq;
	MUST(rdma_create_qp(e->side.id, e->side.pd, &attr) == 0);
	e->side.qp = e->side.id->qp;
	MUST(e->memory = calloc(1, length));
	MUST(e->mr = ibv_reg_mr(e->side.pd, e->memory, length, IBV_ACCESS_LOCAL_WRITE));
	if (written)
		MUST(e->own = ibv_reg_mr(e->side.pd, written, sizeof *book - (size_t)(written - (unsigned char *)book),
					 REMOTE_ALL));
	else
		MUST(e->own = ibv_reg_mr(e->side.pd, into, RECEIVES * MESSAGE, IBV_ACCESS_LOCAL_WRITE));
	e->into = into;
	/* Message 1 comes into slot 1. */
	for (uint64_t i = 1; i <= RECEIVES; i++)
		receive_into(e, i % RECEIVES);
}

static void close_end(struct end *e)
{
	if (!e->side.id)
		return;
	if (e->side.qp) {
		rdma_destroy_qp(e->side.id);
		MUST(ibv_dereg_mr(e->mr) == 0 && ibv_dereg_mr(e->own) == 0);
		MUST(ibv_destroy_cq(e->side.scq) == 0 && ibv_destroy_comp_channel(e->side.cc) == 0);
		MUST(ibv_dealloc_pd(e->side.pd) == 0);
		free(e->memory);
	}
	MUST(rdma_destroy_id(e->side.id) == 0);
}

static struct rdma_conn_param parameters(void)
{
	return (struct rdma_conn_param){ .responder_resources = 4, .initiator_depth = 4, .retry_count = 1,
					 .rnr_retry_count = 7 };
}

/* An id with its route resolved. */
static void resolve_to(struct end *e, struct rdma_event_channel *ch, uint32_t port)
{
	struct sockaddr_storage ss = sockaddr_of(address, (uint16_t)port);

	e->side.ch = ch;
	MUST(rdma_create_id(ch, &e->side.id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(e->side.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	must_event(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(e->side.id, 2000) == 0);
	must_event(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static struct rdma_cm_id *listener_on(struct rdma_event_channel *ch)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	struct rdma_cm_id *listener;

	MUST(rdma_create_id(ch, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0);
	MUST(rdma_listen(listener, 8) == 0);
	return listener;
}

#define MOST_MAPPINGS 64
struct mappings {
	int count;
	uint64_t start[MOST_MAPPINGS], inode[MOST_MAPPINGS];
};

/* The mappings of this process with that name. */
static void find_mappings(const char *name, struct mappings *found)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];

	MUST(maps);
	found->count = 0;
	while (found->count < MOST_MAPPINGS && fgets(line, sizeof line, maps)) {
		uint64_t *start = &found->start[found->count], *inode = &found->inode[found->count];

		if (strstr(line, name))
			found->count += sscanf(line, "%" SCNx64 "-%*x %*s %*x %*s %" SCNu64, start, inode) == 2;
	}
	fclose(maps);
}

/* Where one begins that was not known; 0: there is none. */
static uint64_t new_mapping(const char *name, const struct mappings *known)
{
	struct mappings now;

	find_mappings(name, &now);
	for (int i = 0, k; i < now.count; i++) {
		for (k = 0; k < known->count && known->inode[k] != now.inode[i]; k++)
			;
		if (k == known->count)
			return now.start[i];
	}
	return 0;
}

/* The ledger's. */
#define RING (512u << 10)
enum { TAIL, HEAD, FLAGS = 4, BASE = 5, WORDS = 8 };

/* Spoils what this process shares with the survivor, each time a little. */
static void scribble(uint64_t slab)
{
	uint64_t *words = (uint64_t *)slab, *rings = words + 4096 / 8 + 2 * 64 * 8, at;
	uint64_t lane = any(4) ? 0 : any(64), side = any(2);
	uint64_t *line = words + 4096 / 8 + (lane * 2 + side) * 8;

	switch (any(8)) {
	case 0:		/* a word of a line, a little wrong */
		line[any(8)] += any(2) ? any(4096) : -any(4096);
		break;
	case 1:
		line[any(8)] = any(2) ? any(~0ull) : any(8);
		break;
	case 2:		/* flags, alone */
		line[FLAGS] = any(8);
		break;
	case 3:		/* the words of lanes that have news */
		words[side * 8] = any(~0ull);
		break;
	case 4:		/* bytes of a ring, where frames are */
		at = any(2) ? any(64) : any(RING / 8);
		rings[(lane * 2 + side) * (RING / 8) + at] ^= 1ull << any(64);
		break;
	case 5:
		for (at = 0; at < 512; at++)
			rings[(lane * 2 + side) * (RING / 8) + at] = any(~0ull);
		break;
	case 6:		/* the pages are given back */
		madvise((char *)slab + 4096 * any(64), 4096 * (1 + any(16)), MADV_REMOVE);
		break;
	default:
		line[TAIL] = line[HEAD] + any(RING + 2);
	}
}

/* Fills each bell that this process has, so that whoever rings it waits. */
static void spoil_bells(void)
{
	uint64_t all = ~1ull;
	char name[64], target[64];

	for (int fd = 3; fd < 256; fd++) {
		ssize_t n;

		snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
		n = readlink(name, target, sizeof target - 1);
		if (n <= 0 || (target[n] = 0, strcmp(target, "anon_inode:[eventfd]")))
			continue;
		n = write(fd, &all, sizeof all);
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	}
}

static void *scribbles(void *unused)
{
	struct mappings slabs;
	uint64_t pause = any(4) ? any(2000) : 0;
	bool bells = any(4) == 0;

	do
		find_mappings("uwarp-slab", &slabs);
	while (slabs.count == 0);
	usleep((useconds_t)any(3000));
	for (;;) {
		scribble(slabs.start[0]);
		book->scribbled++;
		if (bells)
			spoil_bells();
		if (pause)
			usleep((useconds_t)pause);
	}
	return unused;
}

/* The victim's life: it is killed, or its peer has killed nobody and disconnects. */
static int victim(uint32_t port)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	struct rdma_cm_event event;
	struct end e = { 0 };
	pthread_t thread;

	MUST(ch);
	if (port) {
		resolve_to(&e, ch, port);
		open_resources(&e, book->written[0], book->received[0]);
		book->target[0] = (uintptr_t)book->written, book->key[0] = e.own->rkey;
		MUST(rdma_connect(e.side.id, &param) == 0);
	} else {
		book->port = ntohs(rdma_get_src_port(listener_on(ch)));
		event = must_event(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
		e.side.id = event.id;
		open_resources(&e, book->written[0], book->received[0]);
		book->target[0] = (uintptr_t)book->written, book->key[0] = e.own->rkey;
		MUST(rdma_accept(e.side.id, &param) == 0);
	}
	if (take_event(ch).event != RDMA_CM_EVENT_ESTABLISHED)
		return 1;
	if (shape == SCRIBBLE)
		MUST(pthread_create(&thread, NULL, scribbles, NULL) == 0);
	for (uint64_t turns = 0; !readable(ch->fd, 0); turns++) {
		traffic(&e);
		if (shape == ASLEEP)
			wait_asleep(&e, 50);
		else
			take(&e);
		if (shape == CLOSING && turns > 20) {
			book->closing = 1;
			rdma_disconnect(e.side.id);
			while (e.posted != e.done)
				take(&e);
			close_end(&e);
			usleep(2000);
			return 0;
		}
	}
	return 1;
}

/* Sends its count and waits for the survivor's, over and over. */
static int witness(uint32_t port)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	struct end e = { 0 };
	unsigned char *into;

	MUST(ch);
	resolve_to(&e, ch, port);
	MUST(into = calloc(RECEIVES, MESSAGE));
	open_resources(&e, NULL, into);
	param.private_data = "witness", param.private_data_len = 8;
	MUST(rdma_connect(e.side.id, &param) == 0);
	must_event(ch, RDMA_CM_EVENT_ESTABLISHED);
	while (!e.failed) {
		post_send(&e);
		while (e.came < e.sends || e.done < e.posted) {
			if (e.failed || readable(ch->fd, 0))
				die("the witness's connection has ended");
			wait_asleep(&e, 1000);
		}
		usleep(300);
	}
	return 1;
}

static atomic_ulong seen_came;
static atomic_bool seen_over;

static void *with_witness(void *unused)
{
	while (!seen_over) {
		wait_asleep(&seen, 100);
		while (seen.sends < seen.came && seen.posted - seen.done < DEPTH)
			post_send(&seen);
		if (seen.failed)
			die("the connection with the witness has failed");
		seen_came = seen.came;
	}
	return unused;
}

static pid_t start(const char *role, uint32_t port, int fd)
{
	char words[4][24];
	pid_t pid;

	snprintf(words[0], sizeof words[0], "%u", port);
	snprintf(words[1], sizeof words[1], "%d", fd);
	snprintf(words[2], sizeof words[2], "%d", (int)shape);
	snprintf(words[3], sizeof words[3], "%" PRIu64, any(~0ull));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		execl("/proc/self/exe", "neighbours", address, role, words[0], words[1], words[2], words[3], (char *)NULL);
		_exit(9);
	}
	MUST(pid > 0);
	return pid;
}

static int descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	MUST(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

struct killer {
	pid_t pid;
	uint64_t after;			/* µs */
	uint64_t slab;			/* where it is mapped here, and the board of the victim; 0: nowhere */
	uint64_t board;
	int mine;			/* which line is the survivor's */
	const char *phase;
	_Atomic bool dead;
	_Atomic bool stopped;
};

/* The first lane's lines at this instant. */
static const char *phase_of(const struct killer *k)
{
	uint64_t lines[2][WORDS], board = 0, tail, head, base;
	int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
	const uint64_t *mine = lines[k->mine], *theirs = lines[!k->mine];
	bool seen = memory >= 0 && pread(memory, lines, sizeof lines, (off_t)k->slab + 4096) == sizeof lines;

	seen = seen && pread(memory, &board, 8, (off_t)k->board) == 8;
	close(memory);
	if (!seen || (!mine[TAIL] && !theirs[TAIL]))
		return "set-up";
	if (theirs[FLAGS] & 6)
		return "closing";
	tail = mine[TAIL], head = theirs[HEAD], base = mine[BASE];
	if (tail - head + SLOT > RING || theirs[TAIL] - mine[HEAD] + SLOT > RING)
		return "full";
	if (tail != head && (tail - base) / RING != (head - base) / RING)
		return "wrap";
	if (tail != head || theirs[TAIL] != mine[HEAD])
		return "some";
	return board & 0xffff ? "asleep" : "empty";
}

static void *kills(void *arg)
{
	struct killer *k = arg;
	uint64_t until = now_us() + k->after;

	if (shape == CLOSING)
		for (uint64_t end = now_ms() + LIMIT_MS; !book->closing && now_ms() < end; )
			usleep(50);
	if (shape == CLOSING)
		until = now_us() + k->after;
	if (until > now_us() + 2000)
		usleep((useconds_t)(until - now_us() - 1000));
	while (now_us() < until)
		;
	if (shape == FULL) {
		kill(k->pid, SIGSTOP);
		usleep(20000);
	}
	if (shape == WRAP) {
		/* So that the ring is not empty, and goes round. */
		kill(k->pid, SIGSTOP);
		usleep(3000);
		kill(k->pid, SIGCONT);
	}
	/* Half of them die at this instant, and half when the ledger shows what is meant, if it soon does. */
	until = now_us() + (k->slab && k->after % 2 ? 5000 : 0);
	do
		k->phase = k->slab ? phase_of(k) : "set-up";
	while (strcmp(k->phase, shape_names[shape]) && now_us() < until);
	kill(k->pid, SIGKILL);
	k->dead = true;
	return NULL;
}

static struct { const char *name; int count; } phases[] = {
	{ "set-up", 0 }, { "empty", 0 }, { "full", 0 }, { "wrap", 0 }, { "asleep", 0 }, { "closing", 0 }, { "some", 0 },
};

static uint64_t longest, setup_time = 20000;
static int late, ended, spoiled;

/* What has completed as acknowledged is in the victim's memory; later requests may be, too. */
static void check_placed(const struct end *e)
{
	for (uint64_t n = e->placed; n > 0 && n + SLOTS > e->placed; n--) {
		const unsigned char *at = book->written[n % SLOTS];

		if (first_of(at) < n || last_of(at, length_of(n % SLOTS)) < n)
			die("Write %" PRIu64 " of %" PRIu64 " was acknowledged; there are %" PRIu64 " and %" PRIu64, n,
			    e->writes, first_of(at), last_of(at, length_of(n % SLOTS)));
	}
	for (uint64_t n = e->sent; n > 0 && n + RECEIVES > e->sent; n--)
		if (first_of(book->received[n % RECEIVES]) < n)
			die("Send %" PRIu64 " was acknowledged; there is %" PRIu64, n,
			    first_of(book->received[n % RECEIVES]));
}

/* One victim. Returns whether it was killed as was meant. */
static bool round_of(int fd, struct rdma_event_channel *listening, uint32_t port, bool connects, bool waits)
{
	struct rdma_event_channel *ch = connects ? rdma_create_event_channel() : listening;
	struct rdma_conn_param param = parameters();
	struct killer k = { .mine = connects ? 0 : 1 };
	struct end e = { 0 };
	unsigned char *around = calloc(3 * RECEIVES, MESSAGE), *into = around + RECEIVES * MESSAGE;
	struct mappings known_slabs, known_boards;
	uint64_t begun = now_us(), died = 0;
	bool established = false, over = false, good = true, killing = false;
	pthread_t thread;
	int status;

	MUST(ch && around);
	memset(book, 0, sizeof *book);
	find_mappings("uwarp-slab", &known_slabs);
	find_mappings("uwarp-board", &known_boards);
	k.pid = start("victim", connects ? 0 : port, fd);
	if (shape == SETUP) {
		k.after = any(setup_time * 5 / 4);
		MUST(pthread_create(&thread, NULL, kills, &k) == 0);
		killing = true;
	}
	if (connects) {
		for (uint64_t end = now_ms() + LIMIT_MS; !book->port && !k.dead && now_ms() < end; )
			usleep(50);
		if (book->port) {
			resolve_to(&e, ch, book->port);
			open_resources(&e, NULL, into);
			MUST(rdma_connect(e.side.id, &param) == 0);
		} else {
			over = true;
		}
	}
	for (uint64_t end = now_ms() + LIMIT_MS; !over; ) {
		struct rdma_cm_event event;

		if (now_ms() > end)
			die("the survivor does not learn that a victim is dead: %s, %s, posted %" PRIu64 ", done %" PRIu64,
			    shape_names[shape], connects ? "it has connected" : "it has accepted", e.posted, e.done);
		/* A victim that dies before its request is heard of leaves nothing to be told. */
		if (!e.side.id && k.dead && !readable(ch->fd, QUIET_MS))
			break;
		if (established) {
			traffic(&e);
			if (shape == ASLEEP && any(2))
				wait_asleep(&e, 5);
			else
				take(&e);
		}
		if (k.dead && !died)
			died = now_us();
		/* Once the first message is there, the ledger is, and there is something to be killed. */
		if (established && !killing && (e.came || e.sent || e.placed || shape == SCRIBBLE)) {
			k.slab = new_mapping("uwarp-slab", &known_slabs);
			k.board = new_mapping("uwarp-board", &known_boards);
			if ((!k.slab || !k.board) && shape != SCRIBBLE)
				die("the connection does not go through memory");
			k.after = shape == SCRIBBLE ? 100000 + any(200000) : any(any(2) ? 20000 : 1000);
			MUST(pthread_create(&thread, NULL, kills, &k) == 0);
			killing = true;
		}
		if (!readable(ch->fd, established ? 0 : 1))
			continue;
		event = take_event(ch);
		switch (event.event) {
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			e.side.id = event.id;
			open_resources(&e, NULL, into);
			if (rdma_accept(e.side.id, &param))
				over = true;
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			established = true;
			setup_time = (3 * setup_time + now_us() - begun) / 4;
			if (book->target[0])
				e.remote = book->target[0], e.rkey = (uint32_t)book->key[0];
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
		case RDMA_CM_EVENT_REJECTED:
		case RDMA_CM_EVENT_UNREACHABLE:
		case RDMA_CM_EVENT_CONNECT_ERROR:
			over = true;
			if (died && now_us() - died > longest)
				longest = now_us() - died;
			break;
		default:
			die("event %s", rdma_event_str(event.event));
		}
	}
	if (!killing || (shape != CLOSING && shape != SCRIBBLE && !k.dead)) {
		/* It has ended by itself: memory was not granted in time. */
		good = false;
		kill(k.pid, SIGKILL);
	}
	if (killing)
		pthread_join(thread, NULL);
	MUST(waitpid(k.pid, &status, 0) == k.pid);
	if (shape != SCRIBBLE && WIFEXITED(status) && WEXITSTATUS(status) == 2)
		die("the victim has failed");
	if (e.side.qp) {
		bool flushed = !waits;

		take(&e);
		ended += e.failed;

		/* A request that waits for a peer that is gone ends by itself; all do when the program disconnects. */
		if (flushed)
			rdma_disconnect(e.side.id);
		for (uint64_t end = now_ms() + LIMIT_MS; e.posted != e.done; ) {
			take(&e);
			if (now_ms() > end)
				die("%" PRIu64 " of %" PRIu64 " requests complete", e.done, e.posted);
		}
		spoiled += book->scribbled > 0;
		if (good && shape != SCRIBBLE && !as_iwarp())
			check_placed(&e);
	}
	close_end(&e);
	if (connects)
		rdma_destroy_event_channel(ch);
	for (size_t i = 0; i < RECEIVES * MESSAGE; i++)
		if (around[i] || around[2 * RECEIVES * MESSAGE + i])
			die("memory beside a receive was written");
	free(around);
	for (size_t i = 0; good && i < sizeof phases / sizeof *phases; i++)
		phases[i].count += !strcmp(phases[i].name, k.phase);
	return good;
}

/* Waits until there are as few of something as there were. */
static void come_down(const char *what, int (*count)(void), int to)
{
	int n = count();

	for (uint64_t end = now_ms() + LIMIT_MS; n > to && now_ms() < end; n = count())
		usleep(10000);
	check(n <= to, what, "%d are left, there were %d", n, to);
}

static int slabs(void)
{
	struct mappings found;

	find_mappings("memfd:uwarp-slab", &found);
	return found.count;
}

static int boards(void)
{
	struct mappings found;

	find_mappings("memfd:uwarp-board", &found);
	return found.count;
}

static int survivor(int rounds, bool scribbling)
{
	struct rdma_event_channel *listening = rdma_create_event_channel(), *events = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	int fd = memfd_create("book", 0), fds, of_slabs, of_boards, alive;
	pid_t watching;
	pthread_t thread;
	uint32_t port;
	unsigned char *into = calloc(RECEIVES, MESSAGE);
	struct rdma_cm_id *listener;

	MUST(listening && events && into && fd >= 0 && ftruncate(fd, sizeof *book) == 0);
	book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(book != MAP_FAILED);
	listener = listener_on(listening);
	port = ntohs(rdma_get_src_port(listener));
	watching = start("witness", port, fd);
	seen.side.id = must_event(listening, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	open_resources(&seen, NULL, into);
	MUST(rdma_migrate_id(seen.side.id, events) == 0);
	MUST(rdma_accept(seen.side.id, &param) == 0);
	must_event(events, RDMA_CM_EVENT_ESTABLISHED);
	MUST(pthread_create(&thread, NULL, with_witness, NULL) == 0);
	for (uint64_t end = now_ms() + LIMIT_MS; !seen_came && now_ms() < end; )
		usleep(1000);
	fds = descriptors(), of_slabs = slabs(), of_boards = boards();
	check(of_slabs == 1, "the witness's connection goes through memory", "%d slabs", of_slabs);
	for (int i = 0; i < rounds; i++) {
		unsigned long came = seen_came;
		int turn = scribbling ? i : i / SHAPES;

		shape = scribbling ? SCRIBBLE : (enum shape)(i % SHAPES);
		/* The survivor's end is the client's and the server's in turn; of some, all requests are waited for. */
		if (!round_of(fd, listening, port, turn % 2, turn % 4 == 3))
			late++;
		for (uint64_t end = now_ms() + LIMIT_MS; seen_came < came + 2; usleep(200))
			if (now_ms() > end)
				die("the connection with the witness stands still");
	}
	alive = waitpid(watching, NULL, WNOHANG);
	check(alive == 0 && !readable(events->fd, 0), "the other connection has noticed nothing", "it has ended");
	if (scribbling) {
		printf("# %d of %d have spoiled the memory; %d connections had ended before them\n", spoiled, rounds, ended);
		check(spoiled > rounds / 2, "most have spoiled the memory", "%d of %d have", spoiled, rounds);
	} else {
		printf("# of %d:", rounds);
		for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
			printf(" %s %d,", phases[i].name, phases[i].count);
		printf(" not in time for memory %d; the longest until the survivor knew: %" PRIu64 " us\n", late, longest);
	}
	check(late <= rounds / 4, "most victims are killed as was meant", "%d of %d are not", late, rounds);
	come_down("no memory is left", slabs, of_slabs);
	come_down("no board is left", boards, of_boards);
	come_down("no descriptor is left", descriptors, fds);
	kill(watching, SIGKILL);
	MUST(waitpid(watching, NULL, 0) == watching);
	must_event(events, RDMA_CM_EVENT_DISCONNECTED);
	seen_over = true;
	pthread_join(thread, NULL);
	rdma_disconnect(seen.side.id);
	close_end(&seen);
	come_down("no memory of the witness is left", slabs, 0);
	free(into);
	rdma_destroy_id(listener);
	rdma_destroy_event_channel(events);
	rdma_destroy_event_channel(listening);
	return failures ? 1 : 0;
}

int main(int argc, char **argv)
{
	MUST(argc >= 4);
	address = argv[1];
	if (argc == 7) {
		book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[4]), 0);
		MUST(book != MAP_FAILED);
		close(atoi(argv[4]));
		shape = (enum shape)atoi(argv[5]);
		seed = strtoull(argv[6], NULL, 10) | 1;
		return (strcmp(argv[2], "witness") ? victim : witness)((uint32_t)atoi(argv[3]));
	}
	seed = argc > 4 ? strtoull(argv[4], NULL, 10) : now_us();
	seed |= 1;
	printf("# seed %" PRIu64 "\n", seed);
	return survivor(atoi(argv[3]), !strcmp(argv[2], "scribble"));
}
