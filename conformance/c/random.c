/* Random work in both directions at once, every byte of it checked at the other end.
 *
 *	random server|client ADDRESS PORT poll|block|sleep [SEED [COUNT]]
 *
 * Both ends do the same. Each has SLOTS operations outstanding: RDMA Writes, RDMA Reads, Sends and Sends
 * with Invalidate of random sizes, at random offsets, gathered and scattered in random pieces. A Write and
 * a Send are told to the peer with their checksum, by a message that is posted right behind the Write and
 * right before the Send; the peer checks them where they have landed, checks that nothing around them has
 * changed, and answers. What a Read must bring is known from the seed. The ends' seeds differ in the last
 * bit; the server may leave it to the client's.
 *
 * poll: spins on the completion queue. block: waits in ibv_get_cq_event. sleep: blocks, sleeps before it
 * looks, and posts too few receives, so that the peer's Sends have to wait for them. */
#include <rdma/rdma_verbs.h>

#include "common.h"

#define SLOTS 4u
#define LARGEST (3u << 20)
#define MARGIN 128u				/* looked at on either side of what was placed */
#define ROOM (LARGEST + 4096u)			/* memory of a slot */
#define SGES 6u
#define RECEIVES (3 * SLOTS)			/* a message and what announces it, for each slot, and answers */
#define BLANK 0xa5
#define SECONDS 150

enum kind { WRITTEN, SENT, ANSWER, DONE };

/* What is sent inline. */
struct notice {
	uint32_t kind, slot, offset, length, invalidates, spare;
	uint64_t sum;
};

/* Private data of request and reply. */
struct hello {
	uint64_t in, store, seed;
	uint32_t in_key, store_key, spare[SLOTS];
};

struct slot {
	bool busy, read;
	uint32_t completions;			/* that are still to come */
	bool answered;
	uint32_t offset, length;		/* of a Read: in the sink, and its length */
	uint32_t from;				/* and in the peer's store */
};

static struct {
	struct rdma_cm_id *id;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	unsigned char *out, *in, *sink, *store, *inbox;	/* SLOTS rooms each; inbox: RECEIVES */
	struct ibv_mr *out_mr, *in_mr, *sink_mr, *store_mr, *inbox_mr, *spare[SLOTS];
	unsigned char *expected;		/* the peer's store */
	struct hello mine, peer;
	struct slot slots[SLOTS];
	uint32_t count, started, finished, read_sges, in_flight;
	struct notice announced;		/* the next message is this one */
	bool is_announced, said, heard;
	uint32_t posted_receives, receives_owed[RECEIVES], owed;
	uint64_t bytes[4], done[4];		/* Writes, Reads, Sends, with Invalidate */
} me;

static enum { POLL, BLOCK, SLEEP } mode;
static uint64_t rng;

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static uint32_t below(uint32_t n)
{
	return (uint32_t)((next(&rng) >> 11) % n);
}

static void wrong(const char *what, ...)
{
	va_list ap;

	printf("FAIL ");
	va_start(ap, what);
	vprintf(what, ap);
	va_end(ap);
	printf(" (after %u operations)\n", me.finished);
	fflush(stdout);
	_exit(1);
}

static void fill(unsigned char *p, uint32_t length, uint64_t seed)
{
	uint64_t word = seed | 1;

	for (; length >= 8; p += 8, length -= 8) {
		next(&word);
		memcpy(p, &word, 8);
	}
	next(&word);
	memcpy(p, &word, length);
}

/* Depends on the order of all bytes. */
static uint64_t checksum(const unsigned char *p, uint32_t length)
{
	uint64_t sum = length, word;

	for (; length >= 8; p += 8, length -= 8) {
		memcpy(&word, p, 8);
		sum = ((sum << 5 | sum >> 59) ^ word) * 0x9e3779b97f4a7c15u;
	}
	word = 0;
	memcpy(&word, p, length);
	return ((sum << 5 | sum >> 59) ^ word) * 0x9e3779b97f4a7c15u;
}

static bool blank(const unsigned char *p, size_t length)
{
	return length == 0 || (p[0] == BLANK && memcmp(p, p + 1, length - 1) == 0);
}

/* Sizes around those at which something changes (staging, direct placement, segments, the paths'
 * segments), and others. */
static uint32_t some_length(void)
{
	static const uint32_t edges[] = { 64, 1440, 1448, 4096, 8192, 8940, 16384, 32768, 64768, 65536, 2 * 64768, 1u << 20 };

	switch (below(8)) {
	case 0:
	case 1:
		return 1 + below(64);
	case 2:
	case 3:
	case 4:
		return edges[below(sizeof edges / sizeof *edges)] - 3 + below(7);
	case 5:
	case 6:
		return 1 + below(1u << (1 + below(16)));
	default:
		return 1 + below(LARGEST >> below(6));
	}
}

/* Cuts [addr, addr + length) into pieces at random places; some may be empty. */
static uint32_t cut(struct ibv_sge *sge, uint32_t most, void *addr, uint32_t length, uint32_t lkey)
{
	uint32_t n = 1 + below(most), at = 0;

	for (uint32_t i = 0; i < n; i++) {
		uint32_t piece = i + 1 == n ? length - at : below(length - at + 1);

		sge[i] = (struct ibv_sge){ (uintptr_t)addr + at, piece, lkey };
		at += piece;
	}
	return n;
}

static void post_receive(uint32_t which)
{
	struct ibv_sge sge[SGES];
	struct ibv_recv_wr wr = { .wr_id = RECEIVES * SLOTS + which, .sg_list = sge }, *bad;
	unsigned char *at = me.inbox + (size_t)which * ROOM;

	wr.num_sge = (int)cut(sge, SGES, at + MARGIN, LARGEST, me.inbox_mr->lkey);
	MUST(ibv_post_recv(me.id->qp, &wr, &bad) == 0);
	me.posted_receives++;
}

/* In sleep mode receives come late, when fewer than SLOTS are left. */
static void give_back(uint32_t which)
{
	me.receives_owed[me.owed++] = which;
	if (mode == SLEEP && me.posted_receives >= SLOTS)
		return;
	while (me.owed)
		post_receive(me.receives_owed[--me.owed]);
}

static void post_wr(struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;
	int ret;

	wr.send_flags |= IBV_SEND_SIGNALED;
	ret = ibv_post_send(me.id->qp, &wr, &bad);
	if (ret)
		wrong("post_send: %s", strerror(ret));
	me.in_flight++;
}

/* slot: SLOTS for what belongs to none. */
static void tell(struct notice notice, uint32_t slot)
{
	struct ibv_sge sge = { (uintptr_t)&notice, sizeof notice, 0 };

	post_wr((struct ibv_send_wr){ .wr_id = slot, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				      .send_flags = IBV_SEND_INLINE });
}

static void begin(uint32_t s)
{
	struct slot *slot = &me.slots[s];
	uint32_t what = below(4), length = some_length(), offset = MARGIN + below(ROOM - 2 * MARGIN - length);
	unsigned char *source = me.out + (size_t)s * ROOM + below(ROOM - length);
	struct ibv_sge sge[SGES];
	struct ibv_send_wr wr = { .wr_id = s, .sg_list = sge };

	*slot = (struct slot){ .busy = true, .length = length, .offset = offset, .read = what == 1 };
	me.started++;
	me.bytes[what] += length;
	me.done[what]++;
	if (slot->read) {
		slot->from = below(ROOM - length);
		wr.num_sge = (int)cut(sge, me.read_sges, me.sink + (size_t)s * ROOM + offset, length, me.sink_mr->lkey);
		wr.opcode = IBV_WR_RDMA_READ;
		wr.wr.rdma.remote_addr = me.peer.store + slot->from;
		wr.wr.rdma.rkey = me.peer.store_key;
		slot->completions = 1;
		slot->answered = true;
		post_wr(wr);
		return;
	}
	fill(source, length, next(&rng));
	wr.num_sge = (int)cut(sge, SGES, source, length, me.out_mr->lkey);
	struct notice notice = { .kind = SENT, .slot = s, .length = length, .sum = checksum(source, length) };

	slot->completions = 2;
	switch (what) {
	case 0:
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = me.peer.in + (uint64_t)s * ROOM + offset;
		wr.wr.rdma.rkey = me.peer.in_key;
		post_wr(wr);
		notice.kind = WRITTEN;
		notice.offset = offset;
		tell(notice, s);
		break;
	case 2:
		tell(notice, s);
		wr.opcode = IBV_WR_SEND;
		post_wr(wr);
		break;
	default:
		notice.invalidates = me.peer.spare[s];
		tell(notice, s);
		wr.opcode = IBV_WR_SEND_WITH_INV;
		wr.invalidate_rkey = me.peer.spare[s];
		post_wr(wr);
	}
}

static void finish(uint32_t s)
{
	struct slot *slot = &me.slots[s];

	if (!slot->busy || slot->completions || !slot->answered)
		return;
	if (slot->read) {
		unsigned char *p = me.sink + (size_t)s * ROOM + slot->offset;

		if (checksum(p, slot->length) != checksum(me.expected + slot->from, slot->length))
			wrong("Read of %u bytes at %u into %u: the checksum differs", slot->length, slot->from, slot->offset);
		if (!blank(p - MARGIN, MARGIN) || !blank(p + slot->length, MARGIN))
			wrong("Read of %u bytes into %u: something around them has changed", slot->length, slot->offset);
		memset(p, BLANK, slot->length);
	}
	slot->busy = false;
	me.finished++;
}

/* What the peer has placed: it must be this, and nothing else around it. */
static void look(const struct notice *n, const char *what, unsigned char *p)
{
	if (checksum(p, n->length) != n->sum)
		wrong("%s of %u bytes at %u of slot %u: the checksum differs", what, n->length, n->offset, n->slot);
	if (!blank(p - MARGIN, MARGIN) || !blank(p + n->length, MARGIN))
		wrong("%s of %u bytes at %u of slot %u: something around them has changed", what, n->length, n->offset, n->slot);
	memset(p, BLANK, n->length);
}

static void expose(uint32_t s)
{
	MUST(me.spare[s] = ibv_reg_mr(me.id->pd, me.store + s * 4096u, 4096, REMOTE_ALL));
	me.mine.spare[s] = me.spare[s]->rkey;
}

static void received(const struct ibv_wc *wc, uint32_t which)
{
	unsigned char *p = me.inbox + (size_t)which * ROOM + MARGIN;
	struct notice n;

	me.posted_receives--;
	if (me.is_announced) {
		n = me.announced;
		me.is_announced = false;
		if (wc->byte_len != n.length)
			wrong("a Send of %u bytes has byte_len %u", n.length, wc->byte_len);
		if (!!(wc->wc_flags & IBV_WC_WITH_INV) != !!n.invalidates ||
		    (n.invalidates && wc->invalidated_rkey != n.invalidates))
			wrong("a Send that invalidates %x: flags %x, invalidated %x", n.invalidates, wc->wc_flags,
			      wc->invalidated_rkey);
		look(&n, "Send", p);
		if (n.invalidates) {
			MUST(ibv_dereg_mr(me.spare[n.slot]) == 0);
			expose(n.slot);
		}
		give_back(which);
		tell((struct notice){ .kind = ANSWER, .slot = n.slot, .spare = me.mine.spare[n.slot] }, SLOTS);
		return;
	}
	if (wc->byte_len != sizeof n)
		wrong("a notice has byte_len %u", wc->byte_len);
	memcpy(&n, p, sizeof n);
	memset(p, BLANK, sizeof n);
	give_back(which);
	if (n.slot >= SLOTS || n.length > LARGEST || n.offset > ROOM - MARGIN - n.length)
		wrong("a notice is garbled");
	switch (n.kind) {
	case WRITTEN:
		look(&n, "Write", me.in + (size_t)n.slot * ROOM + n.offset);
		tell((struct notice){ .kind = ANSWER, .slot = n.slot, .spare = me.mine.spare[n.slot] }, SLOTS);
		break;
	case SENT:
		me.announced = n;
		me.is_announced = true;
		break;
	case ANSWER:
		me.peer.spare[n.slot] = n.spare;
		me.slots[n.slot].answered = true;
		finish(n.slot);
		break;
	case DONE:
		me.heard = true;
		break;
	default:
		wrong("a notice is garbled");
	}
}

static void completed(const struct ibv_wc *wc)
{
	/* The peer has all, has said so, and has gone. */
	if (wc->status == IBV_WC_WR_FLUSH_ERR && wc->wr_id >= RECEIVES * SLOTS && me.heard && me.said)
		return;
	if (wc->status)
		wrong("completion of %d: %s", (int)wc->wr_id, ibv_wc_status_str(wc->status));
	if (wc->wr_id >= RECEIVES * SLOTS) {
		if (wc->opcode != IBV_WC_RECV)
			wrong("a receive has opcode %d", wc->opcode);
		received(wc, (uint32_t)wc->wr_id - RECEIVES * SLOTS);
		return;
	}
	me.in_flight--;
	if (wc->wr_id < SLOTS) {
		me.slots[wc->wr_id].completions--;
		finish((uint32_t)wc->wr_id);
	}
}

static void wait_for_completions(void)
{
	struct ibv_cq *cq;
	void *context;

	if (mode == POLL) {
		sched_yield();
		return;
	}
	MUST(ibv_get_cq_event(me.channel, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	MUST(ibv_req_notify_cq(cq, 0) == 0);
	if (mode == SLEEP)
		usleep(below(3000));
}

static void work(void)
{
	while (me.finished < me.count || !me.said || !me.heard || me.in_flight) {
		struct ibv_wc wc[8];
		int n;

		for (uint32_t s = 0; s < SLOTS; s++)
			if (!me.slots[s].busy && me.started < me.count)
				begin(s);
		if (me.finished == me.count && !me.said) {
			me.said = true;
			tell((struct notice){ .kind = DONE }, SLOTS);
		}
		n = ibv_poll_cq(me.cq, 8, wc);
		if (n < 0)
			wrong("poll_cq: %d", n);
		for (int i = 0; i < n; i++)
			completed(&wc[i]);
		if (n == 0)
			wait_for_completions();
	}
}

static unsigned char *memory(uint32_t rooms, struct ibv_mr **mr, int access)
{
	unsigned char *p = malloc((size_t)rooms * ROOM);

	MUST(p);
	memset(p, BLANK, (size_t)rooms * ROOM);
	MUST(*mr = ibv_reg_mr(me.id->pd, p, (size_t)rooms * ROOM, access));
	return p;
}

static void prepare(void)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 128, .max_recv_wr = RECEIVES, .max_send_sge = SGES, .max_recv_sge = SGES,
			 .max_inline_data = sizeof(struct notice) },
	};
	struct ibv_device_attr device;

	MUST(me.channel = ibv_create_comp_channel(me.id->verbs));
	MUST(me.cq = ibv_create_cq(me.id->verbs, 256, NULL, me.channel, 0));
	MUST(ibv_req_notify_cq(me.cq, 0) == 0);
	attr.send_cq = attr.recv_cq = me.cq;
	MUST(rdma_create_qp(me.id, NULL, &attr) == 0);
	MUST(ibv_query_device(me.id->verbs, &device) == 0);
	me.read_sges = device.max_sge_rd < (int)SGES ? (uint32_t)device.max_sge_rd : SGES;
	me.out = memory(SLOTS, &me.out_mr, 0);
	me.in = memory(SLOTS, &me.in_mr, REMOTE_ALL);
	me.sink = memory(SLOTS, &me.sink_mr, IBV_ACCESS_LOCAL_WRITE);
	me.inbox = memory(RECEIVES, &me.inbox_mr, IBV_ACCESS_LOCAL_WRITE);
	me.store = memory(1, &me.store_mr, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	fill(me.store, ROOM, me.mine.seed);
	for (uint32_t s = 0; s < SLOTS; s++)
		expose(s);
	for (uint32_t i = 0; i < RECEIVES; i++)
		if (mode == SLEEP && i >= SLOTS)
			me.receives_owed[me.owed++] = i;
		else
			post_receive(i);
	me.mine.in = (uintptr_t)me.in;
	me.mine.in_key = me.in_mr->rkey;
	me.mine.store = (uintptr_t)me.store;
	me.mine.store_key = me.store_mr->rkey;
}

static void meet(const struct rdma_cm_event *event)
{
	MUST(event && event->param.conn.private_data_len >= sizeof me.peer);
	memcpy(&me.peer, event->param.conn.private_data, sizeof me.peer);
	MUST(me.expected = malloc(ROOM));
	fill(me.expected, ROOM, me.peer.seed);
}

static void connect_both(bool server, const char *port)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST | (server ? RAI_PASSIVE : 0), .ai_port_space = RDMA_PS_TCP };
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .retry_count = 7,
					 .rnr_retry_count = 7, .private_data = &me.mine, .private_data_len = sizeof me.mine };
	struct rdma_cm_id *listener = NULL;
	struct rdma_addrinfo *res;

	MUST(rdma_getaddrinfo(address, port, &hints, &res) == 0);
	if (server) {
		MUST(rdma_create_ep(&listener, res, NULL, NULL) == 0 && rdma_listen(listener, 1) == 0);
		MUST(rdma_get_request(listener, &me.id) == 0);
		meet(me.id->event);
	} else {
		MUST(rdma_create_ep(&me.id, res, NULL, NULL) == 0);
	}
	prepare();
	if (server) {
		MUST(rdma_accept(me.id, &param) == 0);
		rdma_destroy_ep(listener);
	} else {
		MUST(rdma_connect(me.id, &param) == 0);
		meet(me.id->event);
	}
	rdma_freeaddrinfo(res);
}

int main(int argc, char **argv)
{
	static const char *const names[] = { "Writes", "Reads", "Sends", "Sends with Invalidate" };
	bool server = argc > 1 && strcmp(argv[1], "server") == 0;
	bool clean = true;

	if (argc < 5)
		die("usage: random server|client ADDRESS PORT poll|block|sleep [SEED [COUNT]]");
	address = argv[2];
	mode = strcmp(argv[4], "poll") == 0 ? POLL : strcmp(argv[4], "block") == 0 ? BLOCK : SLEEP;
	me.mine.seed = argc > 5 ? strtoull(argv[5], NULL, 0) : now_ms();
	me.count = argc > 6 ? (uint32_t)strtoul(argv[6], NULL, 0) : 300;
	printf("seed %llu\n", (unsigned long long)me.mine.seed);
	fflush(stdout);
	/* Two ends with one seed must not do the same. */
	me.mine.seed = me.mine.seed * 2 + server;
	rng = me.mine.seed * 0x9e3779b97f4a7c15u | 1;
	alarm(SECONDS);
	connect_both(server, argv[3]);
	work();
	MUST(rdma_disconnect(me.id) == 0);
	for (uint32_t s = 0; s < SLOTS; s++)
		clean = clean && blank(me.in + (size_t)s * ROOM, ROOM) && blank(me.sink + (size_t)s * ROOM, ROOM);
	for (uint32_t i = 0; i < RECEIVES; i++)
		clean = clean && blank(me.inbox + (size_t)i * ROOM, ROOM);
	check(clean, "nothing was placed elsewhere", "something was");
	for (int i = 0; i < 4; i++)
		check(true, names[i], "-"), printf("#   %llu, %llu bytes\n", (unsigned long long)me.done[i],
						   (unsigned long long)me.bytes[i]);
	for (uint32_t s = 0; s < SLOTS; s++)
		MUST(ibv_dereg_mr(me.spare[s]) == 0);
	MUST(ibv_dereg_mr(me.out_mr) == 0 && ibv_dereg_mr(me.in_mr) == 0 && ibv_dereg_mr(me.sink_mr) == 0 &&
	     ibv_dereg_mr(me.store_mr) == 0 && ibv_dereg_mr(me.inbox_mr) == 0);
	rdma_destroy_qp(me.id);
	MUST(ibv_destroy_cq(me.cq) == 0 && ibv_destroy_comp_channel(me.channel) == 0);
	MUST(rdma_destroy_id(me.id) == 0);
	return failures ? 1 : 0;
}
