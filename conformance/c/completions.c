/* What the man pages say of completions and events: when they come, whom they wake, and what acknowledging
 * them means.
 *
 *	completions [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#include <pthread.h>

#include "common.h"

static void flushing(void)
{
	struct pair p;

	pair_open(&p);
	for (uint64_t n = 0; n < 5; n++)
		MUST(post_recv(&p.s, NULL, 0, n) == 0);
	MUST(rdma_disconnect(p.s.id) == 0);
	for (uint64_t n = 0; n < 5; n++) {
		struct ibv_wc wc = poll_one(p.s.rcq);

		if (wc.status != IBV_WC_WR_FLUSH_ERR || wc.wr_id != n)
			check(false, "a disconnect flushes receives in order", "status %d wr_id %d", wc.status,
			      (int)wc.wr_id);
	}
	check_terminated(&p, "disconnect");
	check_errno(post_recv(&p.s, NULL, 0, 9), 0, "post_recv after a disconnect");
	want_wc(p.s.rcq, IBV_WC_WR_FLUSH_ERR, "it is flushed");
	check_errno(post(&p.s, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 9), 0, "post_send after a disconnect");
	want_wc(p.s.scq, IBV_WC_WR_FLUSH_ERR, "it is flushed too");
	pair_close(&p);
}

/* Whether an event comes; if so it must be this CQ's, and is acknowledged. */
static bool cq_event(struct side *side, struct ibv_cq *cq, int ms)
{
	struct ibv_cq *got;
	void *context;

	/* A descriptor that does not block may be readable without an event. */
	do {
		if (!readable(side->cc->fd, ms))
			return false;
	} while (ibv_get_cq_event(side->cc, &got, &context) != 0 && errno == EAGAIN);
	MUST(got == cq && context == side);
	ibv_ack_cq_events(got, 1);
	return true;
}

static void send_empty(struct pair *p, unsigned int flags)
{
	MUST(post_recv(&p->s, NULL, 0, 0) == 0);
	MUST(post(&p->c, IBV_WR_SEND, IBV_SEND_SIGNALED | flags, NULL, 0, 0, 0, 0) == 0);
	MUST(poll_one(p->c.scq).status == IBV_WC_SUCCESS);
}

static void notifying(void)
{
	struct pair p;
	struct ibv_cq *cq;
	void *context;

	pair_open(&p);
	MUST(fcntl(p.s.cc->fd, F_SETFL, O_NONBLOCK) == 0);
	errno = 0;
	check_failed(ibv_get_cq_event(p.s.cc, &cq, &context) == -1, EAGAIN,
		     "get_cq_event on a non-blocking descriptor");
	send_empty(&p, 0);
	check(!cq_event(&p.s, p.s.rcq, QUIET_MS), "no event without req_notify_cq", "an event");
	poll_one(p.s.rcq);
	check_errno(ibv_req_notify_cq(p.s.rcq, 0), 0, "req_notify_cq");
	send_empty(&p, 0);
	check(cq_event(&p.s, p.s.rcq, LIMIT_MS), "a completion after req_notify_cq is an event", "none");
	poll_one(p.s.rcq);
	send_empty(&p, 0);
	check(!cq_event(&p.s, p.s.rcq, QUIET_MS), "req_notify_cq is one shot", "a second event");
	poll_one(p.s.rcq);
	/* UCX polls until nothing is there, arms, and waits. */
	send_empty(&p, 0);
	check_errno(ibv_req_notify_cq(p.s.rcq, 0), 0, "req_notify_cq behind a completion that made no event");
	check(cq_event(&p.s, p.s.rcq, LIMIT_MS), "it makes one now", "none");
	check_errno(ibv_req_notify_cq(p.s.rcq, 0), 0, "req_notify_cq behind a completion that made one");
	check(!cq_event(&p.s, p.s.rcq, QUIET_MS), "it makes no other", "an event");
	poll_one(p.s.rcq);
	send_empty(&p, 0);
	check(cq_event(&p.s, p.s.rcq, LIMIT_MS), "but the next completion does", "none");
	poll_one(p.s.rcq);
	check_errno(ibv_req_notify_cq(p.s.rcq, 1), 0, "req_notify_cq, solicited only");
	send_empty(&p, 0);
	check(!cq_event(&p.s, p.s.rcq, QUIET_MS), "a plain Send does not meet solicited only", "an event");
	send_empty(&p, IBV_SEND_SOLICITED);
	check(cq_event(&p.s, p.s.rcq, LIMIT_MS), "a Send with Solicited Event does", "none");
	poll_one(p.s.rcq);
	poll_one(p.s.rcq);
	MUST(post_recv(&p.s, NULL, 0, 0) == 0);
	check_errno(ibv_req_notify_cq(p.s.rcq, 1), 0, "req_notify_cq, solicited only, again");
	MUST(rdma_disconnect(p.s.id) == 0);
	check(cq_event(&p.s, p.s.rcq, LIMIT_MS), "an error completion meets solicited only", "none");
	poll_one(p.s.rcq);
	must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	pair_close(&p);
}

static volatile int destroyed;

static void *destroy_cq(void *cq)
{
	destroyed = ibv_destroy_cq(cq) == 0 ? 1 : -1;
	return NULL;
}

/* Starts to destroy in a thread, which has to wait. */
static pthread_t destroy_blocks(void *(*destroy)(void *), void *object, const char *name)
{
	pthread_t thread;

	destroyed = 0;
	MUST(pthread_create(&thread, NULL, destroy, object) == 0);
	usleep(QUIET_MS * 1000);
	check(destroyed == 0, name, "returned at once");
	return thread;
}

/* It returns 0 now. */
static void destroy_returns(pthread_t thread, const char *name)
{
	MUST(pthread_join(thread, NULL) == 0);
	check(destroyed == 1, name, "an error");
}

static void acknowledging(void)
{
	struct ibv_cq *cq, *got;
	struct pair p;
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct side lone = { 0 };
	void *context;
	pthread_t thread;

	pair_open(&p);
	MUST(cq = ibv_create_cq(p.c.id->verbs, 8, NULL, p.c.cc, 0));
	attr.send_cq = attr.recv_cq = cq;
	MUST(lone.qp = ibv_create_qp(p.c.pd, &attr));
	MUST(to_init(lone.qp) == 0 && to(lone.qp, IBV_QPS_ERR) == 0);
	for (int n = 0; n < 2; n++) {
		MUST(ibv_req_notify_cq(cq, 0) == 0);
		MUST(post_recv(&lone, NULL, 0, 0) == 0);
		MUST(readable(p.c.cc->fd, LIMIT_MS) && ibv_get_cq_event(p.c.cc, &got, &context) == 0 && got == cq);
		poll_one(cq);
	}
	MUST(ibv_destroy_qp(lone.qp) == 0);
	thread = destroy_blocks(destroy_cq, cq, "destroy_cq waits for events that are not acknowledged");
	ibv_ack_cq_events(cq, 1);
	usleep(QUIET_MS * 1000);
	check(destroyed == 0, "and for the second of two", "returned after one");
	if (!destroyed)
		ibv_ack_cq_events(cq, 1);
	destroy_returns(thread, "and returns 0 when all are");
	pair_close(&p);
}

static void *destroy_qp(void *qp)
{
	destroyed = ibv_destroy_qp(qp) == 0 ? 1 : -1;
	return NULL;
}

/* The next asynchronous event; it is not acknowledged. */
static struct ibv_async_event take_async(struct ibv_context *context)
{
	struct ibv_async_event event;

	if (!readable(context->async_fd, LIMIT_MS))
		die("no asynchronous event in %d ms", LIMIT_MS);
	MUST(ibv_get_async_event(context, &event) == 0);
	return event;
}

/* The client writes where it may not: the server's queue pair has QP_ACCESS_ERR now, the client's a
 * completion and no event. */
static void write_wrongly(struct pair *p)
{
	static char byte;
	struct ibv_mr *mr;
	struct ibv_sge sge;

	MUST(mr = ibv_reg_mr(p->c.pd, &byte, 1, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(mr, 0, 1);
	MUST(post(&p->c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, 0, 1, 1) == 0);
	MUST(in_err(p->c.qp) && in_err(p->s.qp));
	MUST(ibv_dereg_mr(mr) == 0);
}

/* ibv_get_async_event(3): what was taken has to be acknowledged, or the destruction of its object blocks. */
static void async_acknowledging(void)
{
	struct ibv_qp_attr drain = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	struct ibv_async_event drained, first, second;
	struct ibv_context *context;
	struct pair p;
	pthread_t thread;

	pair_open(&p);
	context = p.c.qp->context;
	MUST(ibv_modify_qp(p.c.qp, &drain, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0);
	drained = take_async(context);
	MUST(drained.event_type == IBV_EVENT_SQ_DRAINED && drained.element.qp == p.c.qp);
	MUST(to(p.c.qp, IBV_QPS_RTS) == 0);
	MUST(ibv_modify_qp(p.s.qp, &drain, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0);
	second = take_async(context);
	MUST(second.event_type == IBV_EVENT_SQ_DRAINED && second.element.qp == p.s.qp);
	MUST(to(p.s.qp, IBV_QPS_RTS) == 0);
	write_wrongly(&p);
	first = take_async(context);
	check(first.event_type == IBV_EVENT_QP_ACCESS_ERR && first.element.qp == p.s.qp, "QP_ACCESS_ERR where it was found",
	      "%s", ibv_event_type_str(first.event_type));
	want_wc(p.c.scq, IBV_WC_REM_ACCESS_ERR, "a completion where it is told");
	check(!readable(context->async_fd, QUIET_MS), "and no event there", "an event");

	thread = destroy_blocks(destroy_qp, p.s.qp, "destroy_qp waits for events that are not acknowledged");
	ibv_ack_async_event(&first);
	ibv_ack_async_event(&drained);
	usleep(QUIET_MS * 1000);
	check(destroyed == 0, "and for the second of its two, whatever is acknowledged for others", "returned after one");
	ibv_ack_async_event(&second);
	destroy_returns(thread, "and returns 0 when all are");
	p.s.id->qp = p.s.qp = NULL;
	/* The client's is acknowledged already. */
	check_errno(ibv_destroy_qp(p.c.qp), 0, "destroy_qp of the other");
	p.c.id->qp = p.c.qp = NULL;
	pair_close(&p);

	/* What nobody took goes with its queue pair. */
	pair_open(&p);
	write_wrongly(&p);
	MUST(readable(context->async_fd, LIMIT_MS));
	check(ibv_destroy_qp(p.c.qp) == 0 && ibv_destroy_qp(p.s.qp) == 0, "destroy_qp waits for no event that nobody took",
	      "%m");
	p.c.id->qp = p.c.qp = p.s.id->qp = p.s.qp = NULL;
	check(!readable(context->async_fd, 0), "which are gone with it", "one is there");
	pair_close(&p);
}

static void overflow(void)
{
	struct pair p;
	struct ibv_async_event event = { 0 };
	int n, size;
	bool came = false;
	pthread_t thread;

	/* The four CQs are as small as they come; the send queue is larger than its own. */
	pair_open_with(&p, (struct options){ .cqe = 2, .send_wr = 1024 });
	size = p.c.scq->cqe;
	if (!check(size < 1024, "a CQ of 2 entries has fewer than 1024", "%d", size))
		return;
	for (n = 0; n < size + 2; n++)
		MUST(post(&p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, NULL, 0, 0, 0, (uint64_t)n) == 0);
	for (uint64_t end = now_ms() + LIMIT_MS; !came && now_ms() < end && readable(p.c.id->verbs->async_fd, LIMIT_MS);) {
		MUST(ibv_get_async_event(p.c.id->verbs, &event) == 0);
		came = event.event_type == IBV_EVENT_CQ_ERR;
		if (!came)
			ibv_ack_async_event(&event);
	}
	if (!check(came, "a CQ that overflows is the asynchronous event CQ_ERR", "event %d", event.event_type))
		return;
	check(event.element.cq == p.c.scq, "CQ_ERR names the CQ", "%p", (void *)event.element.cq);
	rdma_destroy_qp(p.c.id);
	p.c.qp = NULL;
	thread = destroy_blocks(destroy_cq, p.c.scq, "destroy_cq waits for CQ_ERR to be acknowledged");
	ibv_ack_async_event(&event);
	destroy_returns(thread, "and returns 0 when it is");
	p.c.scq = NULL;
	pair_close(&p);
}

/* What is not polled when the queue pair is destroyed or reset never is: its wr_id may point to memory
 * that was freed. */
static void purging(void)
{
	struct ibv_wc wc;
	struct pair p;

	pair_open(&p);
	for (int n = 0; n < 4; n++)
		send_empty(&p, 0);
	MUST(post_recv(&p.s, NULL, 0, 0) == 0);
	MUST(post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 0) == 0);
	/* Its completion is there once the peer's is, but is not polled. */
	for (uint64_t end = now_ms() + LIMIT_MS; now_ms() < end && poll_within(p.s.scq, &wc, QUIET_MS);)
		;
	MUST(ibv_req_notify_cq(p.s.rcq, 0) == 0);
	MUST(cq_event(&p.s, p.s.rcq, LIMIT_MS));
	MUST(ibv_req_notify_cq(p.s.rcq, 0) == 0);
	rdma_destroy_qp(p.s.id);
	p.s.qp = NULL;
	check(ibv_poll_cq(p.s.rcq, 1, &wc) == 0, "destroy_qp takes completions along", "%d", (int)wc.wr_id);
	check(!cq_event(&p.s, p.s.rcq, QUIET_MS), "and makes no event", "an event");
	MUST(to(p.c.qp, IBV_QPS_ERR) == 0 && post_recv(&p.c, NULL, 0, 7) == 0);
	MUST(to(p.c.qp, IBV_QPS_RESET) == 0);
	check(ibv_poll_cq(p.c.scq, 1, &wc) == 0 && ibv_poll_cq(p.c.rcq, 1, &wc) == 0, "so does RESET", "%d", (int)wc.wr_id);
	pair_close(&p);
}

/* The peer's rdma_disconnect flushed the receives, and the flushes overtook what a program had not read
 * yet. With InfiniBand's connection manager it is an event, and no more. */
static void leaving(void)
{
	struct ibv_wc wc;
	struct pair p;

	pair_open(&p);
	for (uint64_t n = 0; n < 3; n++)
		MUST(post_recv(&p.s, NULL, 0, n) == 0);
	MUST(post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 0) == 0);
	MUST(rdma_disconnect(p.c.id) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	want_wc(p.s.rcq, IBV_WC_SUCCESS, "what was sent before the end arrives");
	check(!poll_within(p.s.rcq, &wc, QUIET_MS), "no receive is flushed by the peer's disconnect", "one is");
	check(state_of(p.s.qp) == IBV_QPS_RTS, "the queue pair stays in RTS", "%s", state_name(state_of(p.s.qp)));
	check_errno(post_recv(&p.s, NULL, 0, 3), 0, "post_recv to a peer that is gone");
	MUST(rdma_disconnect(p.s.id) == 0);
	for (uint64_t n = 1; n < 4; n++)
		if (want_wc(p.s.rcq, IBV_WC_WR_FLUSH_ERR, "the program's own disconnect flushes").wr_id != n)
			check(false, "in order", "another");
	check(state_of(p.s.qp) == IBV_QPS_ERR, "and moves it to ERR", "%s", state_name(state_of(p.s.qp)));
	check(!readable(p.s.id->verbs->async_fd, 0), "no asynchronous event tells of an orderly end", "one does");
	pair_close(&p);

	/* Nobody answers what is posted then. */
	pair_open(&p);
	MUST(rdma_disconnect(p.c.id) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	MUST(post_recv(&p.s, NULL, 0, 0) == 0);
	for (uint64_t n = 0; n < 2; n++)
		check_errno(post(&p.s, IBV_WR_SEND, 0, NULL, 0, 0, 0, n), 0, "post_send to a peer that is gone");
	check(want_wc(p.s.scq, IBV_WC_RETRY_EXC_ERR, "the oldest fails").wr_id == 0, "and is the first", "another");
	want_wc(p.s.scq, IBV_WC_WR_FLUSH_ERR, "the next is flushed");
	want_wc(p.s.rcq, IBV_WC_WR_FLUSH_ERR, "and the receives with it");
	check(!readable(p.s.id->verbs->async_fd, QUIET_MS), "no asynchronous event tells of a requester's error", "one does");
	pair_close(&p);
}

/* A receiver whose sender ran out of retries was terminated with it. */
static void starving(void)
{
	struct ibv_wc wc;
	struct pair p;

	pair_open_with(&p, (struct options){ .server_rnr_retry = -1 });
	MUST(post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 5) == 0);
	want_wc(p.c.scq, IBV_WC_RNR_RETRY_EXC_ERR, "a Send without a receive fails at the sender");
	MUST(in_err(p.c.qp));
	check_errno(post_recv(&p.s, NULL, 0, 0), 0, "post_recv then");
	check(!poll_within(p.s.rcq, &wc, QUIET_MS) && state_of(p.s.qp) == IBV_QPS_RTS,
	      "the receiver's queue pair does not hear of it", "%s", state_name(state_of(p.s.qp)));
	check(!readable(p.s.id->verbs->async_fd, 0), "nor by an event", "one does");
	pair_close(&p);
}

/* 2,000 receives went into a queue of 16 without one poll. */
static void throttling(void)
{
	struct ibv_async_event event;
	struct ibv_wc wc;
	struct pair p;
	int rc, sent = 0, received = 0, polled = 0;

	pair_open_with(&p, (struct options){ .cqe = 16 });
	while (sent < 2000 || polled < 2000) {
		while (received < 2000 && (rc = post_recv(&p.s, NULL, 0, 0)) == 0)
			received++;
		MUST(received == 2000 || rc == ENOMEM);
		while (sent < 2000 && (rc = post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 0)) == 0)
			sent++;
		MUST(sent == 2000 || rc == ENOMEM);
		if (received - polled > 16) {
			check(false, "a receive's place is free when it was polled", "%d posted, %d polled", received, polled);
			return;
		}
		MUST(ibv_poll_cq(p.c.scq, 1, &wc) == 0 || wc.status == IBV_WC_SUCCESS);
		rc = ibv_poll_cq(p.s.rcq, 1, &wc);
		MUST(rc == 0 || (rc == 1 && wc.status == IBV_WC_SUCCESS));
		polled += rc;
	}
	check(true, "posts until ENOMEM overrun no CQ as deep as the queue", " ");
	if (readable(p.c.id->verbs->async_fd, 0)) {
		MUST(ibv_get_async_event(p.c.id->verbs, &event) == 0);
		check(false, "and make no asynchronous event", "%s", ibv_event_type_str(event.event_type));
		ibv_ack_async_event(&event);
	}
	pair_close(&p);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "flushing", flushing }, { "notifying", notifying }, { "acknowledging", acknowledging },
		{ "async_acknowledging", async_acknowledging }, { "overflow", overflow },
		{ "purging", purging }, { "throttling", throttling },
		{ "leaving", leaving }, { "starving", starving },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
