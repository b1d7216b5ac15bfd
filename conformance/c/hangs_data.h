/* The groups of hangs_others with unusual messages: in many pieces, and behind or beside large ones. */
#ifndef UWARP_CONFORMANCE_HANGS_DATA_H
#define UWARP_CONFORMANCE_HANGS_DATA_H

#include "processes.h"

/* ------------------------------------------------------------------ vectors */

#define OPS 120
#define PIECES 30
#define IN_FLIGHT 16
#define UNTOUCHED 0xee

struct list {
	int count;
	uint32_t at[PIECES], length[PIECES];	/* in the memory of an end */
};

static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
static const char *const op_names[] = { "Send", "Write", "Read" };
enum { SEND, WRITE, READ };

static struct op {
	int kind;
	uint32_t bytes;
	struct list own;	/* at the end that posts it */
	struct list into;	/* of a Send, at the other end */
	uint32_t there;		/* of a Write or Read, at the other end */
} ops[2][OPS];			/* of the client, of the server */

static uint32_t used[2];
static unsigned char *memory, *want;

/* Room in the memory of an end, of which nothing else is, at an offset that is often odd. */
static uint32_t place(int end, uint32_t length)
{
	uint32_t at = used[end] + 1 + (uint32_t)any(16);

	used[end] = at + length;
	return at;
}

static void add(struct list *list, int end, uint32_t length)
{
	list->length[list->count] = length;
	list->at[list->count++] = place(end, length);
}

static uint32_t odd_length(bool tiny)
{
	return any(8) ? 1 + 2 * (uint32_t)any(tiny ? 16 : 2500) : 0;
}

/* What both ends do, before they are two processes. */
static void plan(int end, int n)
{
	struct op *op = &ops[end][n];
	bool tiny = any(4) == 0;
	int count = 1 + (int)any(PIECES);

	op->kind = n == OPS - 1 ? SEND : (int)any(3);
	while (op->own.count < count) {
		add(&op->own, end, odd_length(tiny));
		op->bytes += op->own.length[op->own.count - 1];
	}
	if (op->kind != SEND) {
		op->there = place(!end, op->bytes);
		return;
	}
	/* The pieces that it is received into are others. */
	for (uint32_t rest = op->bytes; rest || !op->into.count;) {
		uint32_t length = odd_length(tiny);

		if (op->into.count == PIECES - 1 && length < rest)
			length = rest;
		add(&op->into, !end, length);
		rest -= length < rest ? length : rest;
	}
}

static uint64_t message_of(int end, int n)
{
	return (uint64_t)(2 * n + end);
}

/* The bytes of a request in these pieces; of the last one, not more than there are. */
static void write_pieces(unsigned char *to, const struct list *list, const struct op *op, uint64_t message)
{
	uint32_t place = 0;

	for (int i = 0; i < list->count; i++)
		for (uint32_t k = 0; k < list->length[i] && place < op->bytes; k++)
			to[list->at[i] + k] = byte_of(message, place++);
}

/* What the memory of this end must become, and what of it is there at the beginning. */
static void prepare(int me)
{
	memset(memory, UNTOUCHED, used[me]);
	memset(want, UNTOUCHED, used[me]);
	for (int n = 0; n < OPS; n++) {
		const struct op *mine = &ops[me][n], *theirs = &ops[!me][n];

		write_pieces(want, &mine->own, mine, message_of(me, n));
		if (mine->kind != READ)
			write_pieces(memory, &mine->own, mine, message_of(me, n));
		if (theirs->kind == SEND)
			write_pieces(want, &theirs->into, theirs, message_of(!me, n));
		else
			fill(want + theirs->there, theirs->bytes, message_of(!me, n));
		if (theirs->kind == READ)
			fill(memory + theirs->there, theirs->bytes, message_of(!me, n));
	}
}

static void must_be(uint32_t at, uint32_t length, int end, int n)
{
	for (uint32_t i = at; i < at + length; i++)
		if (memory[i] != want[i])
			die("%s %d of the %s, of %u bytes: byte %u of a piece of %u is %x, not %x",
			    op_names[ops[end][n].kind], n, end ? "server" : "client", ops[end][n].bytes,
			    i - at, length, memory[i], want[i]);
}

static void pieces_must_be(const struct list *list, int end, int n)
{
	for (int i = 0; i < list->count; i++)
		must_be(list->at[i], list->length[i], end, n);
}

static int elements(const struct list *list, struct ibv_sge *sges)
{
	for (int i = 0; i < list->count; i++)
		sges[i] = sge_of(mr, list->at[i], list->length[i]);
	return list->count;
}

/* The next Send of an end, from this request on. */
static int send_from(int end, int n)
{
	while (n < OPS && ops[end][n].kind != SEND)
		n++;
	return n;
}

static struct conn vector;
static int posted_ops, done, came, expected;	/* expected: the first Send without a receive */

static void expect(int me)
{
	const struct list *into = &ops[!me][expected].into;
	struct ibv_sge sges[PIECES];

	MUST(receive(&vector, sges, elements(into, sges), (uint64_t)expected) == 0);
	expected = send_from(!me, expected + 1);
}

/* A Send of the other end, and the Writes before it, which have been placed. */
static void vector_came(int me, const struct ibv_wc *wc)
{
	for (; came < OPS && ops[!me][came].kind != SEND; came++)
		if (ops[!me][came].kind == WRITE)
			must_be(ops[!me][came].there, ops[!me][came].bytes, !me, came);
	if (wc->wr_id != (uint64_t)came || wc->byte_len != ops[!me][came].bytes)
		die("Send %d of %u bytes is receive %d of %u", came, ops[!me][came].bytes, (int)wc->wr_id,
		    wc->byte_len);
	pieces_must_be(&ops[!me][came].into, !me, came);
	came++;
	if (expected < OPS)
		expect(me);
}

static void vectors_end(void)
{
	int me = server;
	struct { uint64_t at; uint32_t key; } mine = { 0 }, theirs;
	struct ibv_sge sges[PIECES];
	uint64_t late;

	MUST((memory = malloc(used[me])) && (want = malloc(used[me])));
	prepare(me);
	meet(&vector, IN_FLIGHT, PIECES);
	MUST(mr = ibv_reg_mr(domain, memory, used[me], REMOTE_ALL));
	mine.at = (uintptr_t)memory;
	mine.key = mr->rkey;
	expected = send_from(!me, 0);
	for (int i = 0; i < IN_FLIGHT && expected < OPS; i++)
		expect(me);
	tell(&mine, sizeof mine);
	hear(&theirs, sizeof theirs);
	late = now_ms() + LIMIT_MS;
	while (done < OPS || came < OPS) {
		struct ibv_wc wc;

		if (now_ms() > late)
			die("the %s hangs: %d of %d requests are done, and requests have come up to %d",
			    me ? "server" : "client", done, OPS, came);
		for (; posted_ops < OPS && posted_ops - done < IN_FLIGHT; posted_ops++) {
			struct op *op = &ops[me][posted_ops];

			MUST(submit(&vector, opcodes[op->kind], sges, elements(&op->own, sges),
				    (uint64_t)posted_ops, theirs.at + op->there, theirs.key) == 0);
		}
		for (; take(vector.sent, &wc); done++) {
			MUST(wc.wr_id == (uint64_t)done);
			pieces_must_be(&ops[me][done].own, me, done);
		}
		while (take(vector.came, &wc))
			vector_came(me, &wc);
		sched_yield();
	}
	both_are_here();
	check(memcmp(memory, want, used[me]) == 0, me ? "the server's memory is as it must be" :
	      "the client's memory is as it must be", "what is between pieces has changed");
}

static void vectors(void)
{
	for (int n = 0; n < 2 * OPS; n++)
		plan(n % 2, n / 2);
	two(vectors_end, 1);
}

/* ------------------------------------------------------------------ small messages behind a large one */

#define ROUNDS 2
#define SMALL 200
#define SMALL_ROOM 4096

static size_t large[2][ROUNDS];

static size_t length_of(int end, int round, int n)
{
	return n ? 1 + (size_t)(n * 2477 + round * 97 + end * 31) % SMALL_ROOM : large[end][round];
}

static uint64_t number_of(int end, int round, int n)
{
	return (uint64_t)(n * ROUNDS + round) * 2 + (uint64_t)end;
}

/* Where the message is in a half of the memory: the small ones are behind the largest one. */
static size_t room_of(int end, int n)
{
	size_t room = large[end][0];

	for (int i = 1; i < ROUNDS; i++)
		room = large[end][i] > room ? large[end][i] : room;
	return n ? room + (size_t)(n - 1) * SMALL_ROOM : 0;
}

static void one_round(struct conn *c, struct ibv_mr *from, struct ibv_mr *to, int me, int round)
{
	uint64_t late = now_ms() + LIMIT_MS, then;
	int sent = 0, came = 0, wanted = 0;
	struct ibv_sge sge;
	struct ibv_wc wc;
	char name[64];

	for (int n = 0; n <= SMALL; n++)
		fill((unsigned char *)from->addr + room_of(me, n), length_of(me, round, n),
		     number_of(me, round, n));
	for (int n = 0; n <= SMALL; n++) {
		sge = sge_of(from, room_of(me, n), length_of(me, round, n));
		MUST(submit(c, IBV_WR_SEND, &sge, 1, (uint64_t)n, 0, 0) == 0);
	}
	then = now_us() + any(20000);
	while (sent <= SMALL || came <= SMALL) {
		if (now_ms() > late)
			die("the %s hangs: behind a message of %zu bytes there are %d: %d are sent, %d came",
			    me ? "server" : "client", large[me][round], SMALL, sent, came);
		/* The first one alone, others by the dozen, all late. */
		if (wanted <= SMALL && now_us() >= then) {
			int until = wanted ? wanted + 1 + (int)any(64) : 1;

			for (; wanted < until && wanted <= SMALL; wanted++) {
				sge = sge_of(to, room_of(!me, wanted), length_of(!me, round, wanted));
				MUST(receive(c, &sge, 1, (uint64_t)wanted) == 0);
			}
			then = now_us() + any(3000);
		}
		for (; take(c->sent, &wc); sent++)
			MUST(wc.wr_id == (uint64_t)sent);
		for (; take(c->came, &wc); came++) {
			snprintf(name, sizeof name, "message %d of round %d", came, round);
			MUST(wc.wr_id == (uint64_t)came && wc.byte_len == length_of(!me, round, came));
			must_hold((unsigned char *)to->addr + room_of(!me, came), wc.byte_len,
				  number_of(!me, round, came), name);
		}
		sched_yield();
	}
}

static void small_behind_large_end(void)
{
	int me = server;
	struct conn c = { 0 };
	struct ibv_mr *mrs[2];

	meet(&c, 256, 1);
	for (int i = 0; i < 2; i++) {
		size_t length = room_of(i, SMALL + 1);
		void *memory = malloc(length);

		MUST(memory && (mrs[i] = ibv_reg_mr(domain, memory, length, IBV_ACCESS_LOCAL_WRITE)));
	}
	for (int round = 0; round < ROUNDS; round++) {
		one_round(&c, mrs[me], mrs[!me], me, round);
		/* Over TCP, an acknowledgement may be behind the next large message (docs/adr/004). */
		if (!over_memory())
			both_are_here();
	}
	check(true, me ? "the server has all messages in order" : "the client has all messages in order", "");
}

static void small_behind_large(void)
{
	for (int end = 0; end < 2; end++)
		for (int round = 0; round < ROUNDS; round++)
			large[end][round] = ((4ul << 20) << (round ? any(5) : 0)) - any(4096);
	two(small_behind_large_end, 1);
}

/* ------------------------------------------------------------------ acknowledged beside one that waits */

/* The server's message has no receive, and fills what lies between the two. The client's message is received
 * then, and so it completes. (Over TCP, more than 4 MiB would keep the acknowledgement: docs/adr/004.) */
static void acknowledged_end(void)
{
	uint32_t unread = over_memory() ? 16 << 20 : 2 << 20;
	struct conn c = { 0 };
	unsigned char *memory = calloc(1, unread);
	struct ibv_sge sge;
	struct ibv_wc wc;

	MUST(memory);
	meet(&c, 16, 1);
	MUST(mr = ibv_reg_mr(domain, memory, unread, IBV_ACCESS_LOCAL_WRITE));
	if (server) {
		sge = sge_of(mr, 0, unread);
		MUST(submit(&c, IBV_WR_SEND, &sge, 1, 0, 0, 0) == 0);
		both_are_here();
		poll_within(c.sent, &wc, 300);
		sge = sge_of(mr, 0, 8);
		MUST(receive(&c, &sge, 1, 0) == 0);
		check(poll_within(c.came, &wc, LIMIT_MS), "the client's message comes", "none");
	} else {
		sge = sge_of(mr, 0, 8);
		both_are_here();
		MUST(submit(&c, IBV_WR_SEND, &sge, 1, 0, 0, 0) == 0);
		check(poll_within(c.sent, &wc, LIMIT_MS), "a message completes though another one waits",
		      "it does not");
		sge = sge_of(mr, 0, unread);
		MUST(receive(&c, &sge, 1, 0) == 0);
		check(poll_within(c.came, &wc, LIMIT_MS), "the one that waits is received afterwards",
		      "it is not");
	}
	if (server)
		check(poll_within(c.sent, &wc, LIMIT_MS), "the server's message is sent", "it is not");
}

static void acknowledged(void)
{
	two(acknowledged_end, 1);
}

#endif
