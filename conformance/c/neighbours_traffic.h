/* The traffic of neighbours.c: what a survivor, its victims and its witness post, and what may become of it. */
#ifndef UWARP_CONFORMANCE_NEIGHBOURS_TRAFFIC_H
#define UWARP_CONFORMANCE_NEIGHBOURS_TRAFFIC_H

#include <inttypes.h>
#include <stdatomic.h>

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
	_Atomic uint64_t closing;		/* when the victim began to disconnect */
	_Atomic uint32_t quiet;			/* both ends post nothing more */
	_Atomic uint64_t heard, told;		/* by the victim's program: receives, and its Sends with success */
	_Atomic uint64_t scribbled;		/* how often it has spoiled the memory */
	uint64_t target[2], key[2];		/* of the victim's memory below */
	unsigned char written[SLOTS][SLOT];	/* by Writes; read by Reads */
	unsigned char received[RECEIVES][MESSAGE];
};

static struct book *book;
static enum shape shape;

/* In the iwarp view, so many messages may complete before they are placed (docs/adr/009). */
#define LEAD 192
/* Messages whose numbers are remembered: more than may be in flight and ahead. */
#define REMEMBERED 512

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
	uint64_t flushed;			/* receives */
	uint64_t since_none, most;		/* receives with success since there were no completions */
	bool failed;
	bool left;				/* it has disconnected */
	/* Messages as the peer counts them: Sends and Writes, and the first frame of who has connected. */
	uint64_t messages, succeeded, denied;	/* posted, the last with success, the first without; 0: none */
	bool read_denied;			/* the first work request without success is a Read */
	enum ibv_wc_status why;			/* of that */
	uint64_t failed_at;			/* when that was, us */
	struct message { bool write; uint64_t nth; } log[REMEMBERED];
	uint64_t of[REMEMBERED];		/* the message of a work request */
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

/* The next work request is this message. */
static void remember(struct end *e, bool write, uint64_t nth)
{
	e->log[++e->messages % REMEMBERED] = (struct message){ write, nth };
	e->of[e->posted % REMEMBERED] = e->messages;
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
	else
		remember(e, false, number);
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
	else
		remember(e, true, number);
}

static void post_read(struct end *e)
{
	unsigned char *to = e->memory + SLOTS * SLOT + RECEIVES * MESSAGE;
	struct ibv_sge sge = { (uintptr_t)to, SLOT, e->mr->lkey };

	if (post(&e->side, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, e->remote + 2 * SLOT, e->rkey,
		 READ | ++e->posted))
		e->posted--, e->failed = true;
}

/* A work request of the survivor's has no success; what its view promises of that is checked when all have
 * completed. */
static void denied(struct end *e, uint64_t number, uint64_t kind, enum ibv_wc_status why)
{
	if (shape == SCRIBBLE || e == &seen) {
		e->failed = true;
		return;
	}
	if (!e->failed_at) {
		e->failed_at = now_us();
		e->why = why;
		e->read_denied = kind == READ;
		e->denied = e->read_denied ? 0 : e->of[number % REMEMBERED];
		/* ADR 011: an RNIC flushes. With InfiniBand's verbs the oldest fails, unless the program leaves. */
		if (why != IBV_WC_WR_FLUSH_ERR && (as_iwarp() || why != IBV_WC_RETRY_EXC_ERR))
			die("request %" PRIu64 ": %s", number, ibv_wc_status_str(why));
		if (why == IBV_WC_WR_FLUSH_ERR && !as_iwarp() && !e->left)
			die("request %" PRIu64 " is flushed before the program has disconnected", number);
	} else if (why != IBV_WC_WR_FLUSH_ERR) {
		die("request %" PRIu64 " behind one that failed: %s", number, ibv_wc_status_str(why));
	}
	e->failed = true;
}

/* Takes what has completed; each work request once, in order. Returns whether there was anything. */
static bool take(struct end *e)
{
	struct ibv_wc wc[16];
	int n = ibv_poll_cq(e->side.scq, 16, wc);

	MUST(n >= 0);
	if (n == 0)
		e->since_none = 0;
	for (int i = 0; i < n; i++) {
		uint64_t number = wc[i].wr_id & ~KIND;

		if ((wc[i].wr_id & KIND) == RECEIVE) {
			const unsigned char *at = e->into + number * MESSAGE;

			if (wc[i].status) {
				e->flushed++;
				if (shape == SCRIBBLE || e == &seen)
					continue;
				if (wc[i].status != IBV_WC_WR_FLUSH_ERR)
					die("a receive: %s", ibv_wc_status_str(wc[i].status));
				if (!as_iwarp() && !e->left && !e->failed)
					die("a receive is flushed before the program has disconnected");
				continue;
			}
			e->came++;
			e->most = ++e->since_none > e->most ? e->since_none : e->most;
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
			denied(e, number, wc[i].wr_id & KIND, wc[i].status);
		} else if (e->failed) {
			die("request %" PRIu64 " succeeds behind one that failed", number);
		} else if ((wc[i].wr_id & KIND) == SEND) {
			e->sent++;
			e->succeeded = e->of[number % REMEMBERED];
		} else if ((wc[i].wr_id & KIND) == WRITE) {
			e->placed++;
			e->succeeded = e->of[number % REMEMBERED];
		}
	}
	return n > 0;
}

/* Posts as this shape of traffic wants. */
static void traffic(struct end *e)
{
	/* For the ring to go round it must not be empty; and it must not be full. */
	uint64_t depth = shape == EMPTY || shape == ASLEEP ? 1 : shape == WRAP ? 6 : DEPTH;

	if (book->quiet)
		return;
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

/* How long a work request waits for a peer that is gone, by the numbers that the program sees: timeout times
 * (retry_cnt + 1), at least 100 ms, at most 2 s (docs/adr/011). */
static uint64_t retried_for(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { 0 };
	struct ibv_qp_init_attr init = { 0 };
	uint64_t us;

	MUST(ibv_query_qp(qp, &attr, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT, &init) == 0);
	us = attr.timeout ? 4096ull * (1ull << attr.timeout) * (attr.retry_cnt + 1ull) / 1000 : 2000000;
	return us < 100000 ? 100000 : us > 2000000 ? 2000000 : us;
}

/* An id with its route resolved. */
static void resolve_to(struct end *e, struct rdma_event_channel *ch, uint32_t port)
{
	struct sockaddr_storage ss = sockaddr_of(address, (uint16_t)port);

	e->side.ch = ch;
	e->messages = 1;
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

#endif
