/* Data integrity between two processes: what is written, read and sent arrives whole, where it belongs, in
 * order, and nothing else changes.
 *
 *	verify [ADDRESS [STEP]]
 *
 * The client (a child process) does one thing, then tells the server by a Send what must be true at its
 * side; as a Send arrives after what was posted before it, the server's look is a test of ordering too.
 * Connections are made with rdma_create_ep and the synchronous calls. One line per step: "ok name" or
 * "FAIL name: what was seen". */
#include <rdma/rdma_verbs.h>

#include "common.h"

#define REGION (9u << 20)		/* what the peer may reach */
#define GUARD 4096u			/* what it may not, on either side */
#define BLANK 0xa5			/* everything that nobody wrote */
#define SGES 6				/* every provider has that many */
#define DEPTH 64
#define INLINE 64

enum what {
	PATTERN = 1,	/* [offset, length) holds the pattern of seed, all else is blank; then it is blanked */
	FILL,		/* fill [offset, length) with the pattern of seed */
	RECEIVE,	/* take one message of length bytes into sges pieces, compare, send it back gathered */
	EXPOSE,		/* register something for the client to invalidate; its rkey comes back */
	INVALIDATED,	/* take one empty message, which must have invalidated that */
	BLAST,		/* write count times length bytes to the client while it does the same */
	BYE,
};

struct request {
	uint32_t what, seed, offset, length, sges, count, rkey;
	uint64_t remote;
};

struct answer {
	uint32_t good, rkey;
	char seen[80];
};

struct offer {
	uint64_t addr;
	uint32_t rkey;
};

struct end {
	struct rdma_cm_id *id;
	unsigned char *all, *region;	/* guards included, and without */
	struct ibv_mr *mr;		/* the region */
	unsigned char *local;		/* for what is sent and what sinks */
	struct ibv_mr *local_mr;
	union { struct request q; struct answer a; } in, out;
	struct ibv_mr *in_mr, *out_mr;
	struct offer peer;
	uint32_t max_inline, read_sges;
};

static unsigned char pattern(uint32_t seed, uint32_t i)
{
	return (unsigned char)(seed * 31 + i * 7 + (i >> 8) * 13 + (i >> 16) * 5);
}

static void paint(unsigned char *p, uint32_t seed, uint32_t length)
{
	for (uint32_t i = 0; i < length; i++)
		p[i] = pattern(seed, i);
}

/* The first byte that is not the pattern's, or -1. */
static long differs(const unsigned char *p, uint32_t seed, uint32_t length)
{
	for (uint32_t i = 0; i < length; i++)
		if (p[i] != pattern(seed, i))
			return (long)i;
	return -1;
}

static bool blank(const unsigned char *p, size_t length)
{
	return length == 0 || (p[0] == BLANK && memcmp(p, p + 1, length - 1) == 0);
}

static uint32_t rng = 12345;

static uint32_t random_below(uint32_t n)
{
	rng ^= rng << 13;
	rng ^= rng >> 17;
	rng ^= rng << 5;
	return n ? rng % n : 0;
}

/* ------------------------------------------------------------- both ends */

static void memory(struct end *e)
{
	MUST(e->all = malloc(REGION + 2 * GUARD + 3));
	/* Three bytes off any alignment. */
	e->all += 3;
	e->region = e->all + GUARD;
	memset(e->all, BLANK, REGION + 2 * GUARD);
	MUST(e->local = malloc(REGION));
	memset(e->local, BLANK, REGION);
	MUST(e->mr = ibv_reg_mr(e->id->pd, e->region, REGION, REMOTE_ALL));
	MUST(e->local_mr = rdma_reg_msgs(e->id, e->local, REGION));
	MUST(e->in_mr = rdma_reg_msgs(e->id, &e->in, sizeof e->in));
	MUST(e->out_mr = rdma_reg_msgs(e->id, &e->out, sizeof e->out));
}

static bool all_blank(const struct end *e)
{
	return blank(e->all, REGION + 2 * GUARD);
}

/* Cuts [addr, addr + length) into n pieces of odd sizes, some of them empty. */
static void cut(struct ibv_sge *sge, uint32_t n, uint64_t addr, uint32_t length, uint32_t lkey)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t piece = i + 1 == n ? length : length / (n - i) | 1;

		if (piece > length || (i == 1 && n > 3))
			piece = i + 1 == n ? length : 0;
		sge[i] = (struct ibv_sge){ addr, piece, lkey };
		addr += piece;
		length -= piece;
	}
}

static void complete(struct rdma_cm_id *id, enum ibv_wc_opcode opcode, uint64_t wr_id)
{
	struct ibv_wc wc = poll_one(id->send_cq);

	if (wc.status || wc.opcode != opcode || wc.wr_id != wr_id)
		die("completion: %s, opcode %d, wr_id %d; want opcode %d, wr_id %d", ibv_wc_status_str(wc.status), wc.opcode,
		    (int)wc.wr_id, opcode, (int)wr_id);
}

static int send_wr(struct end *e, enum ibv_wr_opcode op, unsigned int flags, struct ibv_sge *sge, uint32_t n,
		   uint32_t offset, uint64_t wr_id)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id, .sg_list = sge, .num_sge = (int)n, .opcode = op, .send_flags = flags,
		.wr.rdma = { .remote_addr = e->peer.addr + offset, .rkey = e->peer.rkey },
	}, *bad;

	return ibv_post_send(e->id->qp, &wr, &bad);
}

static void take(struct end *e)
{
	MUST(rdma_post_recv(e->id, NULL, &e->in, sizeof e->in, e->in_mr) == 0);
}

/* Blocks in rdma_get_recv_comp. */
static struct ibv_wc received(struct end *e)
{
	struct ibv_wc wc;

	MUST(rdma_get_recv_comp(e->id, &wc) == 1);
	if (wc.status)
		die("receive: %s", ibv_wc_status_str(wc.status));
	return wc;
}

static void put(struct end *e, size_t length)
{
	MUST(rdma_post_send(e->id, (void *)7, &e->out, length, e->out_mr, IBV_SEND_SIGNALED) == 0);
	complete(e->id, IBV_WC_SEND, 7);
}

/* Writes count times length bytes, as many outstanding as the queue takes. */
static void blast(struct end *e, struct offer to, uint32_t length, uint32_t count)
{
	struct ibv_sge sge = { (uintptr_t)e->local, length, e->local_mr->lkey };
	struct offer kept = e->peer;
	uint32_t posted = 0, done = 0;

	e->peer = to;
	paint(e->local, 77, length);
	while (done < count) {
		while (posted < count && posted - done < DEPTH / 2) {
			MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, 0, posted) == 0);
			posted++;
		}
		complete(e->id, IBV_WC_RDMA_WRITE, done);
		done++;
	}
	e->peer = kept;
}

/* ---------------------------------------------------------------- server */

static void answer(struct end *e, bool good, const char *seen, ...)
{
	va_list ap;

	e->out.a.good = good;
	va_start(ap, seen);
	vsnprintf(e->out.a.seen, sizeof e->out.a.seen, seen, ap);
	va_end(ap);
	put(e, sizeof e->out.a);
}

static void look(struct end *e, const struct request *q)
{
	long bad = differs(e->region + q->offset, q->seed, q->length);

	memset(e->region + q->offset, BLANK, q->length);
	if (bad >= 0)
		answer(e, false, "byte %ld of %u at %u is wrong", bad, q->length, q->offset);
	else if (!all_blank(e))
		answer(e, false, "something outside of %u bytes at %u has changed", q->length, q->offset);
	else
		answer(e, true, "");
}

static void receive(struct end *e, const struct request *q)
{
	struct ibv_sge sge[SGES];
	struct ibv_recv_wr wr = { .wr_id = 99, .sg_list = sge, .num_sge = (int)q->sges }, *bad;
	struct ibv_wc wc;
	long at;

	cut(sge, q->sges, (uintptr_t)e->region + q->offset, q->length, e->mr->lkey);
	MUST(ibv_post_recv(e->id->qp, &wr, &bad) == 0);
	/* The client may send when it has this. */
	answer(e, true, "");
	wc = received(e);
	at = differs(e->region + q->offset, q->seed, q->length);
	if (wc.wr_id != 99 || wc.byte_len != q->length || wc.opcode != IBV_WC_RECV || wc.qp_num != e->id->qp->qp_num)
		at = -2;
	MUST(send_wr(e, IBV_WR_SEND, IBV_SEND_SIGNALED, sge, q->sges, 0, 8) == 0);
	complete(e->id, IBV_WC_SEND, 8);
	memset(e->region + q->offset, BLANK, q->length);
	take(e);
	answer(e, at == -1 && all_blank(e), "byte %ld (-2: completion; -1: guards); byte_len %u of %u", at, wc.byte_len,
	       q->length);
}

static void serve(struct end *e)
{
	struct ibv_mr *exposed = NULL;

	for (;;) {
		struct request q;

		received(e);
		q = e->in.q;
		if (q.what == BYE)
			break;
		if (q.what != RECEIVE && q.what != INVALIDATED)
			take(e);
		switch (q.what) {
		case PATTERN:
			look(e, &q);
			break;
		case FILL:
			paint(e->region + q.offset, q.seed, q.length);
			answer(e, true, "");
			break;
		case RECEIVE:
			receive(e, &q);
			break;
		case EXPOSE:
			MUST(exposed = ibv_reg_mr(e->id->pd, e->region, 4096, REMOTE_ALL));
			e->out.a.rkey = exposed->rkey;
			answer(e, true, "");
			break;
		case INVALIDATED: {
			struct ibv_wc wc;

			take(e);
			answer(e, true, "");
			wc = received(e);
			take(e);
			answer(e, exposed && (wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey == exposed->rkey &&
			       wc.byte_len == 0, "flags %x, rkey %x", wc.wc_flags, wc.invalidated_rkey);
			MUST(ibv_dereg_mr(exposed) == 0);
			break;
		}
		case BLAST:
			blast(e, (struct offer){ q.remote, q.rkey }, q.length, q.count);
			answer(e, true, "");
			break;
		default:
			die("request %u", q.what);
		}
	}
}

/* ---------------------------------------------------------------- client */

static const char *step = "connecting";
static bool step_good;

/* Asks; the receive for the answer is posted first. */
static void tell(struct end *e, struct request q)
{
	take(e);
	e->out.q = q;
	put(e, sizeof q);
}

/* Waits for the answer to what was asked. */
static void hear(struct end *e)
{
	received(e);
	if (!e->in.a.good && step_good) {
		check(false, step, "%.*s", (int)sizeof e->in.a.seen, e->in.a.seen);
		step_good = false;
	}
}

static void ask(struct end *e, struct request q)
{
	tell(e, q);
	hear(e);
}

static void want(bool good, const char *seen, long a, long b)
{
	if (!good && step_good) {
		check(false, step, "%s (%ld, %ld)", seen, a, b);
		step_good = false;
	}
}

static const uint32_t lengths[] = {
	0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 127, 255, 256, 1000, 1439, 1440, 1441, 1447, 1448, 1449, 1459, 1460,
	1461, 4095, 4096, 4097, 8191, 8192, 8193, 16383, 16384, 16385, 32767, 32768, 32769, 64767, 64768, 64769, 65535,
	65536, 65537, 131071, 131073, 1u << 20, (1u << 20) + 1, 3u << 20, 8u << 20,
};
#define EACH(i) size_t i = 0; i < sizeof lengths / sizeof *lengths; i++

static void writes(struct end *e)
{
	for (EACH(i)) {
		struct ibv_sge sge[SGES];
		uint32_t n = 1 + (uint32_t)i % SGES, offset = (uint32_t)i * 37 % 4096;

		paint(e->local + i, (uint32_t)i, lengths[i]);
		cut(sge, n, (uintptr_t)e->local + i, lengths[i], e->local_mr->lkey);
		MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, sge, n, offset, i) == 0);
		complete(e->id, IBV_WC_RDMA_WRITE, i);
		ask(e, (struct request){ .what = PATTERN, .seed = (uint32_t)i, .offset = offset, .length = lengths[i] });
	}
}

static void reads(struct end *e)
{
	memset(e->local, BLANK, REGION);
	for (EACH(i)) {
		struct ibv_sge sge[SGES];
		uint32_t n = 1 + (uint32_t)i % e->read_sges, offset = (uint32_t)i * 41 % 4096, into = (uint32_t)i * 53 % 4096;
		long at;

		ask(e, (struct request){ .what = FILL, .seed = (uint32_t)i, .offset = offset, .length = lengths[i] });
		cut(sge, n, (uintptr_t)e->local + into, lengths[i], e->local_mr->lkey);
		MUST(send_wr(e, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, sge, n, offset, i) == 0);
		complete(e->id, IBV_WC_RDMA_READ, i);
		at = differs(e->local + into, (uint32_t)i, lengths[i]);
		memset(e->local + into, BLANK, lengths[i]);
		want(at < 0, "byte, length", at, lengths[i]);
		want(blank(e->local, REGION), "outside of the sink; length", lengths[i], 0);
		ask(e, (struct request){ .what = PATTERN, .seed = (uint32_t)i, .offset = offset, .length = lengths[i] });
	}
}

/* A message there and, gathered from the same pieces, back. */
static void exchange(struct end *e, uint32_t seed, uint32_t length, uint32_t n, unsigned int flags)
{
	struct request q = { .what = RECEIVE, .seed = seed, .offset = seed * 29 % 4096, .length = length, .sges = n };
	struct ibv_sge sge[SGES], back[SGES];
	struct ibv_recv_wr rwr = { .wr_id = 98, .sg_list = back, .num_sge = (int)n }, *bad;
	unsigned char *second = e->local + REGION / 2 - 8192;
	struct ibv_wc wc;
	long at;

	/* Messages over half of the region would overlap with their echo: compare the echo in the region instead. */
	if (length > REGION / 2 - 16384)
		second = e->region;
	ask(e, q);
	cut(back, n, (uintptr_t)second, length, second == e->region ? e->mr->lkey : e->local_mr->lkey);
	MUST(ibv_post_recv(e->id->qp, &rwr, &bad) == 0);
	take(e);	/* for the answer behind the echo */
	paint(e->local + 1, seed, length);
	cut(sge, n, (uintptr_t)e->local + 1, length, e->local_mr->lkey);
	MUST(send_wr(e, IBV_WR_SEND, IBV_SEND_SIGNALED | flags, sge, n, 0, seed) == 0);
	if (flags & IBV_SEND_INLINE)
		memset(e->local + 1, 0xff, length);	/* the buffer is ours again at once */
	complete(e->id, IBV_WC_SEND, seed);
	wc = received(e);
	at = differs(second, seed, length);
	want(wc.wr_id == 98 && wc.byte_len == length, "echo: byte_len, length", wc.byte_len, length);
	want(at < 0, "echo: byte, length", at, length);
	memset(second, BLANK, length);
	hear(e);
}

static void sends(struct end *e)
{
	for (EACH(i))
		exchange(e, (uint32_t)i, lengths[i], 1 + (uint32_t)i % SGES, i % 3 ? 0 : IBV_SEND_SOLICITED);
}

static void inlined(struct end *e)
{
	for (uint32_t length = 0; length <= e->max_inline; length += 1 + length / 8) {
		struct ibv_sge sge[SGES];
		uint32_t n = 1 + length % SGES;
		unsigned char onstack[1024];

		if (length > sizeof onstack)
			break;
		/* Inline data needs no registration: the lkey is not looked at. */
		paint(onstack, length, length);
		cut(sge, n, (uintptr_t)onstack, length, 0);
		MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED | IBV_SEND_INLINE, sge, n, 5, length) == 0);
		memset(onstack, 0xff, sizeof onstack);
		complete(e->id, IBV_WC_RDMA_WRITE, length);
		ask(e, (struct request){ .what = PATTERN, .seed = length, .offset = 5, .length = length });
		exchange(e, length, length, n, IBV_SEND_INLINE);
	}
}

/* One completion for every sixteen; each write has a place of its own. */
static void unsignalled(struct end *e)
{
	enum { COUNT = 1600, SIZE = 1001 };

	paint(e->local, 3, COUNT * SIZE);
	for (uint32_t i = 0; i < COUNT; i++) {
		struct ibv_sge sge = { (uintptr_t)e->local + i * SIZE, SIZE, e->local_mr->lkey };
		unsigned int flags = i % 16 == 15 ? IBV_SEND_SIGNALED : 0;

		MUST(send_wr(e, IBV_WR_RDMA_WRITE, flags, &sge, 1, i * SIZE, i) == 0);
		if (flags)
			complete(e->id, IBV_WC_RDMA_WRITE, i);
	}
	ask(e, (struct request){ .what = PATTERN, .seed = 3, .length = COUNT * SIZE });
}

/* A list of work requests in one call, mixed, unsignalled but for the last. */
static void listed(struct end *e)
{
	enum { COUNT = 32, SIZE = 777 };
	struct ibv_send_wr wr[COUNT] = { 0 }, *bad;
	struct ibv_sge sge[COUNT];

	paint(e->local, 4, COUNT * SIZE);
	for (uint32_t i = 0; i < COUNT; i++) {
		sge[i] = (struct ibv_sge){ (uintptr_t)e->local + i * SIZE, SIZE, e->local_mr->lkey };
		wr[i] = (struct ibv_send_wr){
			.wr_id = i, .next = i + 1 < COUNT ? &wr[i + 1] : NULL, .sg_list = &sge[i], .num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE, .send_flags = i + 1 < COUNT ? 0 : IBV_SEND_SIGNALED,
			.wr.rdma = { e->peer.addr + i * SIZE, e->peer.rkey },
		};
	}
	MUST(ibv_post_send(e->id->qp, wr, &bad) == 0);
	complete(e->id, IBV_WC_RDMA_WRITE, COUNT - 1);
	ask(e, (struct request){ .what = PATTERN, .seed = 4, .length = COUNT * SIZE });
}

/* What was read goes back by a fenced write, posted at once: unfenced it could overtake the read. */
static void fenced(struct end *e)
{
	for (uint32_t i = 0; i < 40; i++) {
		uint32_t length = 1 + random_below(200000), there = 4u << 20;
		struct ibv_sge sge = { (uintptr_t)e->local, length, e->local_mr->lkey };

		ask(e, (struct request){ .what = FILL, .seed = i, .offset = 0, .length = length });
		memset(e->local, BLANK, length);
		MUST(send_wr(e, IBV_WR_RDMA_READ, i % 2 ? IBV_SEND_SIGNALED : 0, &sge, 1, 0, 2 * i) == 0);
		MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED | IBV_SEND_FENCE, &sge, 1, there, 2 * i + 1) == 0);
		if (i % 2)
			complete(e->id, IBV_WC_RDMA_READ, 2 * i);
		complete(e->id, IBV_WC_RDMA_WRITE, 2 * i + 1);
		/* Two places to look at: the first look must not mind the second. */
		memset(e->local, BLANK, length);
		MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, 0, 1) == 0);
		complete(e->id, IBV_WC_RDMA_WRITE, 1);
		ask(e, (struct request){ .what = PATTERN, .seed = i, .offset = there, .length = length });
	}
}

/* A read behind a write of the same place gives what was written. */
static void read_after_write(struct end *e)
{
	for (uint32_t i = 0; i < 40; i++) {
		uint32_t length = 1 + random_below(100000);
		struct ibv_sge from = { (uintptr_t)e->local, length, e->local_mr->lkey };
		struct ibv_sge into = { (uintptr_t)e->local + (1u << 20), length, e->local_mr->lkey };

		paint(e->local, i, length);
		MUST(send_wr(e, IBV_WR_RDMA_WRITE, 0, &from, 1, 0, 1) == 0);
		MUST(send_wr(e, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &into, 1, 0, 2) == 0);
		complete(e->id, IBV_WC_RDMA_READ, 2);
		want(differs(e->local + (1u << 20), i, length) < 0, "round, length", i, length);
		ask(e, (struct request){ .what = PATTERN, .seed = i, .length = length });
	}
}

/* Far more reads than the peer answers at once: they wait, none is refused, and completions keep their order. */
static void many_reads(struct end *e)
{
	enum { COUNT = 60, SIZE = 30011 };

	ask(e, (struct request){ .what = FILL, .seed = 9, .length = COUNT * SIZE });
	memset(e->local, BLANK, REGION);
	for (uint32_t i = 0; i < COUNT; i++) {
		struct ibv_sge sge = { (uintptr_t)e->local + i * SIZE, SIZE, e->local_mr->lkey };

		MUST(send_wr(e, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, i * SIZE, i) == 0);
	}
	for (uint32_t i = 0; i < COUNT; i++)
		complete(e->id, IBV_WC_RDMA_READ, i);
	want(differs(e->local, 9, COUNT * SIZE) < 0, "byte", differs(e->local, 9, COUNT * SIZE), 0);
	ask(e, (struct request){ .what = PATTERN, .seed = 9, .length = COUNT * SIZE });
}

static void invalidates(struct end *e)
{
	for (int solicited = 0; solicited < 2; solicited++) {
		struct ibv_send_wr wr = { .wr_id = 6, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED }, *bad;

		if (solicited)
			wr.send_flags |= IBV_SEND_SOLICITED;
		ask(e, (struct request){ .what = EXPOSE });
		wr.invalidate_rkey = e->in.a.rkey;
		ask(e, (struct request){ .what = INVALIDATED });
		take(e);
		MUST(ibv_post_send(e->id->qp, &wr, &bad) == 0);
		complete(e->id, IBV_WC_SEND, 6);
		hear(e);
	}
}

/* The key of a region over the whole address space, for memory that nobody registered: heap and stack. */
static void everything(struct end *e)
{
	struct ibv_mr *all = ibv_reg_mr(e->id->pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	struct ibv_mr *kept = e->local_mr;
	unsigned char *heap = malloc(2u << 20), stack[777];

	MUST(heap);
	want(all, "ibv_reg_mr; errno", errno, 0);
	if (!all)
		return;
	for (EACH(i)) {
		struct ibv_sge sge[SGES + 1] = { { (uintptr_t)stack, sizeof stack, all->lkey } };
		uint32_t length = lengths[i], n = 1 + (uint32_t)i % (e->read_sges - 1), seed = (uint32_t)i;

		if (length < sizeof stack || length > 1u << 20)
			continue;
		/* The first of it from the stack, the rest from the heap. */
		paint(heap, seed, length);
		memcpy(stack, heap, sizeof stack);
		memset(heap, BLANK, sizeof stack);
		cut(sge + 1, n, (uintptr_t)heap + sizeof stack, length - sizeof stack, all->lkey);
		MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, sge, n + 1, 0, i) == 0);
		complete(e->id, IBV_WC_RDMA_WRITE, i);
		ask(e, (struct request){ .what = PATTERN, .seed = seed, .length = length });

		ask(e, (struct request){ .what = FILL, .seed = seed + 1, .length = length });
		cut(sge + 1, n, (uintptr_t)heap + sizeof stack, length - sizeof stack, all->lkey);
		MUST(send_wr(e, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, sge, n + 1, 0, i) == 0);
		complete(e->id, IBV_WC_RDMA_READ, i);
		memcpy(heap, stack, sizeof stack);
		want(differs(heap, seed + 1, length) < 0, "a Read: byte, length", differs(heap, seed + 1, length), length);
		ask(e, (struct request){ .what = PATTERN, .seed = seed + 1, .length = length });

		/* A Send, and a receive for its echo. */
		e->local_mr = all;
		exchange(e, seed, length, n, 0);
		e->local_mr = kept;
	}
	MUST(ibv_dereg_mr(all) == 0);
	free(heap);
}

/* Both ends write as fast as they can: neither may wait for the other to read. */
static void both_ways(struct end *e)
{
	enum { SIZE = 300007, COUNT = 200 };

	tell(e, (struct request){ .what = BLAST, .length = SIZE, .count = COUNT, .remote = (uintptr_t)e->region,
				  .rkey = e->mr->rkey });
	blast(e, e->peer, SIZE, COUNT);
	hear(e);
	want(differs(e->region, 77, SIZE) < 0, "what the server wrote: byte", differs(e->region, 77, SIZE), 0);
	memset(e->region, BLANK, SIZE);
	want(all_blank(e), "outside of what the server wrote", 0, 0);
	ask(e, (struct request){ .what = PATTERN, .seed = 77, .length = SIZE });
}

/* A long seeded mix, against a copy of what the server's region must hold. */
static void mixture(struct end *e)
{
	enum { HALF = 4u << 20, ROUNDS = 3000 };
	unsigned char *shadow = malloc(HALF), *source = e->local, *sink = e->local + HALF;
	struct { bool signalled, read; uint32_t length, offset, into; } slot[DEPTH];
	uint32_t posted = 0, done = 0, since = 0;

	MUST(shadow);
	ask(e, (struct request){ .what = FILL, .seed = 11, .length = HALF });
	paint(shadow, 11, HALF);
	paint(source, 12, HALF);
	while (done < ROUNDS) {
		while (posted < ROUNDS && posted - done < DEPTH - 16) {
			uint32_t limit = 1u << random_below(17), length = random_below(limit);
			bool read = random_below(3) == 0;
			uint32_t n = 1 + random_below(read ? e->read_sges : SGES);
			uint32_t s = posted % DEPTH, from = random_below(HALF - length), offset = random_below(HALF - length);
			struct ibv_sge sge[SGES];
			/* A sink of its own for each slot, so that no two outstanding reads share bytes. */
			uint32_t into = s * (1u << 16);

			slot[s].read = read;
			slot[s].length = length;
			slot[s].offset = offset;
			slot[s].into = into;
			slot[s].signalled = read || random_below(2) || ++since > 8 || posted + 1 == ROUNDS;
			if (slot[s].signalled)
				since = 0;
			cut(sge, n, (uintptr_t)(read ? sink + into : source + from), length, e->local_mr->lkey);
			MUST(send_wr(e, read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
				     (slot[s].signalled ? IBV_SEND_SIGNALED : 0) |
				     (random_below(4) ? 0 : IBV_SEND_FENCE), sge, n, offset, posted) == 0);
			posted++;
			if (!read)
				memcpy(shadow + offset, source + from, length);
			else
				break;	/* a later write might be placed before it reads; and the shadow moves on */
		}
		while (done < posted) {
			uint32_t s = done % DEPTH;

			if (slot[s].signalled)
				complete(e->id, slot[s].read ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE, done);
			else if (done + 1 == posted)
				break;	/* its successor's completion will tell */
			if (slot[s].read)
				want(memcmp(sink + slot[s].into, shadow + slot[s].offset, slot[s].length) == 0,
				     "a read in the mixture: number, length", done, slot[s].length);
			done++;
		}
	}
	for (uint32_t at = 0; at < HALF; at += 1u << 20) {
		struct ibv_sge sge = { (uintptr_t)sink + at, 1u << 20, e->local_mr->lkey };

		MUST(send_wr(e, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, at, at) == 0);
		complete(e->id, IBV_WC_RDMA_READ, at);
	}
	want(memcmp(sink, shadow, HALF) == 0, "the region after the mixture differs", 0, 0);
	/* Leave the server's region blank, which it checks, guards and all. */
	paint(source, 13, HALF);
	MUST(send_wr(e, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED,
		     &(struct ibv_sge){ (uintptr_t)source, HALF, e->local_mr->lkey }, 1, 0, 1) == 0);
	complete(e->id, IBV_WC_RDMA_WRITE, 1);
	ask(e, (struct request){ .what = PATTERN, .seed = 13, .length = HALF });
	free(shadow);
}

/* ---------------------------------------------------------------- set-up */

static struct rdma_addrinfo *resolved(const char *port, int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *res;

	if (rdma_getaddrinfo(address, port, &hints, &res))
		die("rdma_getaddrinfo %s %s", address, port);
	return res;
}

static struct ibv_qp_init_attr queue_sizes(void)
{
	return (struct ibv_qp_init_attr){
		.qp_type = IBV_QPT_RC,
		.cap = {
			.max_send_wr = DEPTH, .max_recv_wr = 8, .max_send_sge = SGES, .max_recv_sge = SGES,
			.max_inline_data = INLINE,
		},
	};
}

static int server(int port_out)
{
	struct ibv_qp_init_attr attr = queue_sizes();
	struct rdma_addrinfo *res = resolved("0", RAI_PASSIVE | RAI_NUMERICHOST);
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };
	struct rdma_cm_id *listener;
	struct end e = { 0 };
	struct offer offer;
	char port[8];

	MUST(rdma_create_ep(&listener, res, NULL, &attr) == 0);
	MUST(rdma_listen(listener, 1) == 0);
	snprintf(port, sizeof port, "%u", ntohs(rdma_get_src_port(listener)));
	MUST(write(port_out, port, sizeof port) == sizeof port);
	MUST(rdma_get_request(listener, &e.id) == 0);
	memory(&e);
	take(&e);
	offer = (struct offer){ (uintptr_t)e.region, e.mr->rkey };
	param.private_data = &offer;
	param.private_data_len = sizeof offer;
	MUST(rdma_accept(e.id, &param) == 0);
	serve(&e);
	MUST(rdma_disconnect(e.id) == 0);
	MUST(ibv_dereg_mr(e.mr) == 0 && rdma_dereg_mr(e.local_mr) == 0 && rdma_dereg_mr(e.in_mr) == 0 &&
	     rdma_dereg_mr(e.out_mr) == 0);
	rdma_destroy_ep(e.id);
	rdma_destroy_ep(listener);
	rdma_freeaddrinfo(res);
	return 0;
}

static int client(const char *port, const char *only)
{
	static const struct { const char *name; void (*run)(struct end *); } steps[] = {
		{ "RDMA Writes, 0 B to 8 MiB, gathered", writes },
		{ "RDMA Reads, 0 B to 8 MiB, scattered", reads },
		{ "Sends, 0 B to 8 MiB, gathered and scattered, and back", sends },
		{ "inline Writes and Sends", inlined },
		{ "unsignalled Writes", unsignalled },
		{ "a list of Writes", listed },
		{ "a fenced Write of what was read", fenced },
		{ "a Read behind a Write", read_after_write },
		{ "more Reads than the read depth", many_reads },
		{ "Send with Invalidate, solicited and not", invalidates },
		{ "the key of the whole address space", everything },
		{ "Writes both ways at once", both_ways },
		{ "a seeded mixture", mixture },
	};
	struct ibv_qp_init_attr attr = queue_sizes(), created;
	struct rdma_addrinfo *res = resolved(port, RAI_NUMERICHOST);
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };
	struct ibv_device_attr device;
	struct ibv_qp_attr unused;
	struct end e = { 0 };

	MUST(rdma_create_ep(&e.id, res, NULL, &attr) == 0);
	memory(&e);
	MUST(ibv_query_qp(e.id->qp, &unused, IBV_QP_CAP, &created) == 0);
	e.max_inline = created.cap.max_inline_data;
	MUST(ibv_query_device(e.id->verbs, &device) == 0);
	e.read_sges = device.max_sge_rd < SGES ? (uint32_t)device.max_sge_rd : SGES;
	check(e.read_sges > 1, "a Read may have several sinks", "max_sge_rd %d", device.max_sge_rd);
	MUST(rdma_connect(e.id, &param) == 0);
	MUST(e.id->event && e.id->event->param.conn.private_data_len >= sizeof e.peer);
	memcpy(&e.peer, e.id->event->param.conn.private_data, sizeof e.peer);
	for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
		if (only && strncmp(steps[i].name, only, strlen(only)))
			continue;
		step = steps[i].name;
		step_good = true;
		steps[i].run(&e);
		if (step_good)
			check(true, step, "-");
	}
	take(&e);
	e.out.q = (struct request){ .what = BYE };
	put(&e, sizeof e.out.q);
	MUST(rdma_disconnect(e.id) == 0);
	MUST(ibv_dereg_mr(e.mr) == 0 && rdma_dereg_mr(e.local_mr) == 0 && rdma_dereg_mr(e.in_mr) == 0 &&
	     rdma_dereg_mr(e.out_mr) == 0);
	rdma_destroy_ep(e.id);
	rdma_freeaddrinfo(res);
	return failures ? 1 : 0;
}

int main(int argc, char **argv)
{
	int fd[2], status = 1, ret;
	char port[8];
	pid_t pid;

	if (argc > 1)
		address = argv[1];
	MUST(pipe(fd) == 0);
	pid = fork();
	MUST(pid >= 0);
	alarm(300);
	if (pid == 0) {
		/* Without this copy the read ends when the server does. */
		close(fd[1]);
		if (read(fd[0], port, sizeof port) != sizeof port)
			_exit(2);
		_exit(client(port, argc > 2 ? argv[2] : NULL));
	}
	ret = server(fd[1]);
	MUST(waitpid(pid, &status, 0) == pid);
	if (WIFSIGNALED(status))
		printf("FAIL client: killed by signal %d\n", WTERMSIG(status));
	check(ret == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0, "both ends end well", "client status %x", status);
	return ret || status;
}
