/* Datagram queue pairs beside each other: receives they share, threads and processes that use them, the
 * other interfaces to them, draining, and their end.
 *
 *	datagram_life ADDRESS [GROUP]	the address is not used
 */
#include <pthread.h>

#include "datagrams.h"

static void sharing(void)
{
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 16, .max_sge = 2 } };
	struct ibv_srq *srq;
	struct ibv_recv_wr recv = { .num_sge = 1 }, *bad;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct end a, b, c;

	open_device();
	end_open(&a);
	MUST(srq = ibv_create_srq(pd, &srq_attr));
	end_open_with(&b, srq);
	end_open_with(&c, srq);
	check_errno(receive_into(&b, 0, SLOT), EINVAL, "post_recv to a queue pair with a shared receive queue");
	recv.sg_list = &sge;
	sge = sge_of(b.mr, 0, GRH + 50);
	recv.wr_id = 1;
	MUST(ibv_post_srq_recv(srq, &recv, &bad) == 0);
	send_to(&a, &b, 51);
	send_to(&a, &c, 50);
	wc = want_message(&c, 50, "a message that is too long for one queue pair leaves the receive to the other one");
	check(wc.wr_id == 1, "the only one", "%d", (int)wc.wr_id);
	send_to(&a, &b, 1);
	settle(&a);
	nothing_more(&b, "without a receive nothing arrives");
	for (int i = 0; i < 8; i++) {
		sge = sge_of(b.mr, (size_t)i * SLOT, SLOT);
		recv.wr_id = (uint64_t)i;
		MUST(ibv_post_srq_recv(srq, &recv, &bad) == 0);
	}
	for (int i = 0; i < 8; i++)
		send_to(&a, i % 2 ? &b : &c, (uint32_t)i);
	for (int i = 0; i < 8; i++) {
		wc = want_message(i % 2 ? &b : &c, (uint32_t)i, "a message into the shared queue");
		check(wc.wr_id == (uint64_t)i, "in the order of arrival", "receive %d, want %d", (int)wc.wr_id, i);
	}
	send_to(&a, &b, 9);
	settle(&a);
	nothing_more(&b, "the shared queue is empty");
	/* What one queue pair could not take is not lost with it. */
	sge = sge_of(b.mr, 0, GRH + 5);
	MUST(ibv_post_srq_recv(srq, &recv, &bad) == 0);
	send_to(&a, &b, 6);
	settle(&a);
	MUST(ibv_destroy_qp(b.qp) == 0);
	b.qp = NULL;
	send_to(&a, &c, 5);
	want_message(&c, 5, "a destroyed queue pair takes no receive with it");
	end_close(&a);
	end_close(&b);
	end_close(&c);
	check_errno(ibv_destroy_srq(srq), 0, "destroy_srq");
	close_device();
}

static void many(void)
{
	enum { COUNT = 40 };
	static struct end from[COUNT];
	uint64_t seen = 0;
	struct end a;

	open_device();
	end_open(&a);
	receive(&a, 0);
	send_to(&a, &a, 7);
	want_message(&a, 7, "a queue pair reaches itself");
	for (int i = 0; i < COUNT; i++) {
		end_open(&from[i]);
		receive(&a, i);
	}
	for (int i = 0; i < COUNT; i++)
		send_to(&from[i], &a, (uint32_t)i);
	for (int i = 0; i < COUNT; i++) {
		struct ibv_wc wc = want_wc(a.rcq, IBV_WC_SUCCESS, "one of many senders");
		uint32_t n = wc.byte_len - GRH;

		if (check(n < COUNT && wc.src_qp == from[n].qp->qp_num, "is named", "%u %#x", n, wc.src_qp))
			seen |= 1ull << n;
	}
	check(seen == (1ull << COUNT) - 1, "each arrives once", "%llx", (unsigned long long)seen);
	for (int i = 0; i < COUNT; i++)
		end_close(&from[i]);
	end_close(&a);
	close_device();
}

/* ------------------------------------------------------------------ other interfaces */

static void extended(void)
{
	struct ibv_cq_init_attr_ex cq_attr = {
		.cqe = 64,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP |
			    IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_DLID_PATH_BITS,
	};
	struct ibv_qp_init_attr_ex init = {
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
		.qp_type = IBV_QPT_UD, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM,
	};
	struct ibv_data_buf pieces[2];
	struct ibv_poll_cq_attr none = { 0 };
	struct ibv_sge list[2];
	struct ibv_cq_ex *cq;
	struct ibv_qp_ex *ex;
	struct end a, b;

	open_device();
	end_resources(&a);
	end_open(&b);
	MUST(cq = ibv_create_cq_ex(ctx, &cq_attr));
	init.pd = pd;
	init.send_cq = a.scq;
	init.recv_cq = ibv_cq_ex_to_cq(cq);
	errno = 0;
	init.send_ops_flags |= IBV_QP_EX_WITH_RDMA_WRITE;
	check_failed(!ibv_create_qp_ex(ctx, &init), EOPNOTSUPP, "create_qp_ex with Writes");
	init.send_ops_flags &= ~(uint64_t)IBV_QP_EX_WITH_RDMA_WRITE;
	MUST(a.qp = ibv_create_qp_ex(ctx, &init));
	MUST(ex = ibv_qp_to_qp_ex(a.qp));
	up(a.qp, QKEY);
	for (int i = 0; i < 3; i++)
		receive(&b, i);
	memcpy(outgoing(&a), "0123456789", 10);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, a.ah, b.qp->qp_num, QKEY);
	ibv_wr_set_sge(ex, a.mr->lkey, (uint64_t)(uintptr_t)outgoing(&a), 10);
	ex->wr_id = 2;
	ibv_wr_send_imm(ex, htonl(7));
	ibv_wr_set_ud_addr(ex, a.ah, b.qp->qp_num, QKEY);
	pieces[0] = (struct ibv_data_buf){ "abc", 3 };
	pieces[1] = (struct ibv_data_buf){ "de", 2 };
	ibv_wr_set_inline_data_list(ex, 2, pieces);
	ex->wr_id = 3;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, a.ah, b.qp->qp_num, QKEY);
	list[0] = sge_of(a.mr, SLOTS * SLOT, 2);
	list[1] = sge_of(a.mr, SLOTS * SLOT + 5, 2);
	ibv_wr_set_sge_list(ex, 2, list);
	check_errno(ibv_wr_complete(ex), 0, "three requests by ibv_wr_complete");
	for (uint64_t i = 1; i <= 3; i++) {
		struct ibv_wc wc = want_wc(a.scq, IBV_WC_SUCCESS, "each completes");

		check(wc.wr_id == i, "in order", "%d", (int)wc.wr_id);
	}
	want_message(&b, 10, "elements");
	check(!memcmp(b.memory + GRH, "0123456789", 10), "whole", "other bytes");
	check(ntohl(want_message(&b, 5, "inline data with immediate data").imm_data) == 7, "and it", "another one");
	check(!memcmp(b.memory + SLOT + GRH, "abcde", 5), "whole", "other bytes");
	want_message(&b, 4, "a list");
	check(!memcmp(b.memory + 2 * SLOT + GRH, "0156", 4), "whole", "other bytes");
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, a.mr->lkey, (uint64_t)(uintptr_t)outgoing(&a), 10);
	check_errno(ibv_wr_complete(ex), EINVAL, "a request that goes nowhere");
	/* A good one does not go either, if one behind it is wrong. */
	receive(&b, 0);
	for (int i = 0; i < 2; i++) {
		ibv_wr_start(ex);
		ibv_wr_send(ex);
		ibv_wr_set_ud_addr(ex, a.ah, b.qp->qp_num, QKEY);
		ibv_wr_set_sge(ex, a.mr->lkey, (uint64_t)(uintptr_t)outgoing(&a), 20);
		ibv_wr_send(ex);
		ibv_wr_set_ud_addr(ex, a.ah, b.qp->qp_num, QKEY);
		ibv_wr_set_sge_list(ex, 3, (struct ibv_sge[3]){ list[0], list[0], list[0] });
		check_errno(ibv_wr_complete(ex), EINVAL, "a good request before a wrong one");
		if (i == 0)
			MUST(to(a.qp, IBV_QPS_SQD) == 0);
	}
	MUST(to(a.qp, IBV_QPS_RTS) == 0);
	settle(&b);
	nothing_more(&b, "is not posted");
	check(ibv_poll_cq(a.scq, 1, &(struct ibv_wc){ 0 }) == 0, "and does not complete", "it does");
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, a.ah, b.qp->qp_num, QKEY);
	ibv_wr_abort(ex);
	/* What the extended completion queue tells. */
	receive(&a, 0);
	send_to(&b, &a, 33);
	for (uint64_t end = now_ms() + LIMIT_MS; ibv_start_poll(cq, &none);)
		MUST(now_ms() < end);
	check(ibv_wc_read_opcode(cq) == IBV_WC_RECV && ibv_wc_read_byte_len(cq) == GRH + 33, "a receive by ibv_start_poll", "%d %u",
	      ibv_wc_read_opcode(cq), ibv_wc_read_byte_len(cq));
	check(ibv_wc_read_src_qp(cq) == b.qp->qp_num && ibv_wc_read_qp_num(cq) == a.qp->qp_num, "names both queue pairs", "%#x",
	      ibv_wc_read_src_qp(cq));
	check(ibv_wc_read_wc_flags(cq) == IBV_WC_GRH && ibv_wc_read_slid(cq) == 0 && (ibv_wc_read_sl(cq) & 7) == 2 &&
	      ibv_wc_read_dlid_path_bits(cq) == 0, "and a GRH of IPv4, and no LID", "flags %#x, LID %u, SL %u",
	      ibv_wc_read_wc_flags(cq), ibv_wc_read_slid(cq), ibv_wc_read_sl(cq));
	ibv_end_poll(cq);
	MUST(ibv_destroy_qp(a.qp) == 0);
	a.qp = NULL;
	MUST(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
	end_close(&a);
	end_close(&b);
	close_device();
}

static bool woken(struct end *e, int ms)
{
	struct ibv_cq *cq;
	void *context;

	if (!readable(e->cc->fd, ms))
		return false;
	MUST(ibv_get_cq_event(e->cc, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	return cq == e->rcq && context == e;
}

static void soliciting(void)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b;

	open_device();
	end_open(&a);
	end_open(&b);
	for (int i = 0; i < 4; i++)
		receive(&b, i);
	MUST(ibv_req_notify_cq(b.rcq, 1) == 0);
	send_to(&a, &b, 1);
	check(!woken(&b, QUIET_MS), "a plain message does not wake one who waits for solicited ones", "it does");
	wr = request(&a, &b, &sge, 2);
	wr.send_flags |= IBV_SEND_SOLICITED;
	MUST(post_wr(&a, wr) == 0);
	check(woken(&b, LIMIT_MS), "a solicited one does", "it does not");
	want_message(&b, 1, "the plain one");
	want_message(&b, 2, "the solicited one");
	MUST(ibv_req_notify_cq(b.rcq, 0) == 0);
	send_to(&a, &b, 3);
	check(woken(&b, LIMIT_MS), "a plain message wakes one who waits for any", "it does not");
	want_message(&b, 3, "it");
	/* Nobody polls, nobody sleeps: what came is there later. */
	send_to(&a, &b, 4);
	usleep(QUIET_MS * 1000);
	want_message(&b, 4, "what came while nobody looked");
	want_wc(a.scq, IBV_WC_SUCCESS, "the solicited Send");
	end_close(&a);
	end_close(&b);
	close_device();
}

/* ------------------------------------------------------------------ life */

static void draining(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	struct ibv_async_event event;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct end a, b;

	open_device();
	end_open(&a);
	end_open(&b);
	receive(&a, 0);
	receive(&b, 0);
	check_errno(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0, "RTS to SQD");
	if (check(readable(ctx->async_fd, LIMIT_MS), "an event when it has drained", "none")) {
		MUST(ibv_get_async_event(ctx, &event) == 0);
		check(event.event_type == IBV_EVENT_SQ_DRAINED && event.element.qp == a.qp, "SQ_DRAINED", "%s",
		      ibv_event_type_str(event.event_type));
		ibv_ack_async_event(&event);
	}
	wr = request(&a, &b, &sge, 5);
	check_errno(post_wr(&a, wr), 0, "post_send in SQD");
	send_to(&b, &a, 6);
	want_message(&a, 6, "in SQD it receives");
	check(ibv_poll_cq(a.scq, 1, &wc) == 0 && ibv_poll_cq(b.rcq, 1, &wc) == 0, "and sends nothing", "it does");
	check_errno(to(a.qp, IBV_QPS_RTS), 0, "SQD to RTS");
	want_wc(a.scq, IBV_WC_SUCCESS, "what was posted in between");
	want_message(&b, 5, "is sent");
	end_close(&a);
	end_close(&b);
	close_device();
}

static void resetting(void)
{
	struct ibv_wc wc;
	struct end a, b;

	open_device();
	end_open(&a);
	end_open(&b);
	for (int round = 0; round < 3; round++) {
		receive(&b, 0);
		receive(&b, 1);
		send_to(&a, &b, 1);
		MUST(to(b.qp, round == 1 ? IBV_QPS_ERR : IBV_QPS_RESET) == 0 && to(b.qp, IBV_QPS_RESET) == 0);
		check(ibv_poll_cq(b.rcq, 1, &wc) == 0, "RESET takes completions back", "one is left");
		send_to(&a, &b, 2);
		settle(&a);
		nothing_more(&b, "in RESET it receives nothing");
		up(b.qp, QKEY);
		receive(&b, 2);
		send_to(&a, &b, 3);
		wc = want_message(&b, 3, "after RESET only new messages, into new receives");
		check(wc.wr_id == 2, "into the new one", "%d", (int)wc.wr_id);
		MUST(to(a.qp, IBV_QPS_RESET) == 0);
		up(a.qp, QKEY);
	}
	end_close(&a);
	end_close(&b);
	close_device();
}

static void destroying(void)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b, c;

	open_device();
	end_open(&a);
	for (int round = 0; round < 20; round++) {
		end_open(&b);
		end_open(&c);
		receive(&c, 0);
		for (int i = 0; i < 30; i++) {
			receive(&b, i);
			wr = request(&a, &b, &sge, 1000);
			wr.send_flags = i % 8 == 7 ? IBV_SEND_SIGNALED : 0;
			MUST(post_wr(&a, wr) == 0);
		}
		/* Datagrams are in the socket that it shares with others. */
		end_close(&b);
		for (int i = 0; i < 3; i++)
			MUST(poll_one(a.scq).status == IBV_WC_SUCCESS);
		send_to(&a, &c, 5);
		want_message(&c, 5, "what comes behind messages for a destroyed queue pair");
		end_close(&c);
	}
	end_close(&a);
	close_device();
}

/* A completion queue that nobody polls: one event of it, one of the queue pair, and the others go on. */
static void overflowing(void)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_UD,
	};
	struct ibv_async_event event;
	struct end a, b;
	int queues = 0, pairs = 0;

	open_device();
	end_open(&a);
	end_resources(&b);
	MUST(ibv_destroy_cq(b.rcq) == 0);
	MUST(b.rcq = ibv_create_cq(ctx, 1, NULL, NULL, 0));
	init.send_cq = b.scq;
	init.recv_cq = b.rcq;
	MUST(b.qp = ibv_create_qp(pd, &init));
	up(b.qp, QKEY);
	for (int i = 0; i < 64; i++)
		receive(&b, 0);
	for (int i = 0; i < b.rcq->cqe + 8; i++)
		send_to(&a, &b, 1);
	settle(&a);
	while (readable(ctx->async_fd, queues && pairs ? QUIET_MS : LIMIT_MS)) {
		MUST(ibv_get_async_event(ctx, &event) == 0);
		queues += event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == b.rcq;
		pairs += event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == b.qp;
		ibv_ack_async_event(&event);
	}
	check(queues == 1 && pairs == 1, "one event of the queue, one of the queue pair", "%d, %d", queues, pairs);
	end_close(&a);
	end_close(&b);
	close_device();
}

static void forking(void)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b;
	int status;
	pid_t pid;

	MUST(ibv_fork_init() == 0);
	open_device();
	end_open(&a);
	end_open(&b);
	receive(&b, 0);
	receive(&b, 1);
	pid = fork();
	if (pid == 0) {
		wr = request(&a, &b, &sge, 1);
		/* A child must not use it, and must not harm it. */
		if (post_wr(&a, wr) == 0)
			_exit(1);
		ibv_destroy_qp(a.qp);
		_exit(0);
	}
	MUST(pid > 0 && waitpid(pid, &status, 0) == pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child cannot send by its parent's queue pair", "status %#x", status);
	send_to(&a, &b, 9);
	want_message(&b, 9, "the parent goes on");
	pid = fork();
	if (pid == 0) {
		usleep(QUIET_MS * 1000);
		_exit(0);
	}
	send_to(&a, &b, 10);
	want_message(&b, 10, "while a child lives, too");
	MUST(waitpid(pid, &status, 0) == pid);
	end_close(&a);
	end_close(&b);
	close_device();
}

enum { THREADS = 4, EACH = 2000 };
static struct end common;

/* Sends one, waits until it was answered, and so on. */
static void *exchange(void *argument)
{
	struct end *own = argument;

	for (int i = 0; i < EACH; i++) {
		struct ibv_wc wc;

		receive(own, 0);
		send_to(own, &common, (uint32_t)(i % 1000));
		wc = poll_one(own->rcq);
		if (wc.status != IBV_WC_SUCCESS || wc.byte_len != GRH + (uint32_t)(i % 1000))
			return "another answer";
	}
	return NULL;
}

static void threads(void)
{
	static struct end ends[THREADS];
	pthread_t running[THREADS];
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	int answered = 0;
	void *wrong;

	open_device();
	end_open(&common);
	for (int i = 0; i < SLOTS; i++)
		receive(&common, i);
	for (int i = 0; i < THREADS; i++) {
		end_open(&ends[i]);
		MUST(pthread_create(&running[i], NULL, exchange, &ends[i]) == 0);
	}
	while (answered < THREADS * EACH) {
		struct ibv_wc wc = poll_one(common.rcq);

		receive(&common, (int)wc.wr_id);
		wr = request(&common, &common, &sge, wc.byte_len - GRH);
		wr.wr.ud.remote_qpn = wc.src_qp;
		MUST(wc.status == IBV_WC_SUCCESS && post_wr(&common, wr) == 0);
		MUST(poll_one(common.scq).status == IBV_WC_SUCCESS);
		answered++;
	}
	for (int i = 0; i < THREADS; i++) {
		MUST(pthread_join(running[i], &wrong) == 0);
		check(!wrong, "every exchange of a thread", "%s", (char *)wrong);
		end_close(&ends[i]);
	}
	end_close(&common);
	close_device();
}

static struct end cancelled;
static volatile bool survived;

/* Calls nothing but verbs after its own cancellation: printing may be a cancellation point. */
static void *call_verbs(void *argument)
{
	uint64_t end = now_ms() + LIMIT_MS;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct ibv_send_wr wr = request(&cancelled, &cancelled, &sge, 100);

	(void)argument;
	pthread_cancel(pthread_self());
	receive(&cancelled, 0);
	if (post_wr(&cancelled, wr) == 0)
		while (!survived && now_ms() < end)
			survived = ibv_poll_cq(cancelled.rcq, 1, &wc) == 1 && wc.byte_len == GRH + 100;
	pthread_testcancel();
	return NULL;
}

/* Posting and polling are no cancellation points: the thread would end with the locks of the queue pair. */
static void cancelling(void)
{
	pthread_t thread;
	void *result;

	open_device();
	end_open(&cancelled);
	MUST(pthread_create(&thread, NULL, call_verbs, NULL) == 0);
	MUST(pthread_join(thread, &result) == 0);
	check(survived && result == PTHREAD_CANCELED, "a cancelled thread posts and polls, and ends after it", NULL);
	MUST(poll_one(cancelled.scq).status == IBV_WC_SUCCESS);
	receive(&cancelled, 1);
	send_to(&cancelled, &cancelled, 200);
	want_message(&cancelled, 200, "another thread then uses the queue pair");
	end_close(&cancelled);
	close_device();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "sharing", sharing }, { "many", many }, { "extended", extended }, { "soliciting", soliciting },
		{ "draining", draining }, { "resetting", resetting }, { "destroying", destroying }, { "forking", forking },
		{ "threads", threads }, { "cancelling", cancelling }, { "overflowing", overflowing },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
