/* Shared receive queues: what the man pages of ibv_create_srq, ibv_modify_srq, ibv_query_srq,
 * ibv_post_srq_recv, ibv_get_async_event and rdma_create_srq promise, with several queue pairs on one.
 *
 *	shared [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#include <pthread.h>
#include <rdma/rdma_verbs.h>

#include "common.h"

#define PAIRS 3
#define SLOT 4096

/* The server's end of all pairs: one protection domain, one queue for receives, one for their completions. */
static struct hub {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct pair pairs[PAIRS];
	struct ibv_mr *client_mr[PAIRS];
	int count;
} hub;

static char slots[64 * SLOT], out[3 * PAIRS * SLOT];

static struct ibv_srq *make_srq(struct ibv_pd *pd, uint32_t max_wr, uint32_t max_sge)
{
	struct ibv_srq_init_attr init = { .srq_context = &hub, .attr = { .max_wr = max_wr, .max_sge = max_sge } };

	return ibv_create_srq(pd, &init);
}

static int post_slots(struct ibv_srq *srq, int from, int count)
{
	for (int n = from; n < from + count; n++) {
		struct ibv_sge sge = sge_of(hub.mr, (size_t)n * SLOT, SLOT);
		struct ibv_recv_wr wr = { .wr_id = (uint64_t)n, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
		int error = ibv_post_srq_recv(srq, &wr, &bad);

		if (error)
			return error;
	}
	return 0;
}

static struct ibv_context *device_context(struct pair *p)
{
	memset(p, 0, sizeof *p);
	listen_somewhere(p);
	resolve(p);
	return p->c.id->verbs;
}

/* Connects one more queue pair on the shared queue. */
static struct pair *join(void)
{
	struct rdma_conn_param param = { .rnr_retry_count = 7, .retry_count = 7 };
	struct pair *p = &hub.pairs[hub.count];
	struct options none = { 0 };
	struct ibv_qp_init_attr attr = {
		/* Sizes for receives are to be ignored. */
		.cap = { .max_send_wr = 4, .max_send_sge = 1, .max_recv_wr = UINT32_MAX, .max_recv_sge = UINT32_MAX },
		.qp_type = IBV_QPT_RC,
	};

	device_context(p);
	if (!hub.pd) {
		MUST(hub.pd = ibv_alloc_pd(p->c.id->verbs));
		MUST(hub.cq = ibv_create_cq(p->c.id->verbs, 64, NULL, NULL, 0));
		MUST(hub.srq = make_srq(hub.pd, 32, 2));
		MUST(hub.mr = ibv_reg_mr(hub.pd, slots, sizeof slots, IBV_ACCESS_LOCAL_WRITE));
	}
	side_resources(&p->c, &none);
	MUST(hub.client_mr[hub.count] = ibv_reg_mr(p->c.pd, out, sizeof out, 0));
	MUST(rdma_connect(p->c.id, &param) == 0);
	p->s.id = must_event(p->s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	attr.send_cq = attr.recv_cq = hub.cq;
	attr.srq = hub.srq;
	MUST(rdma_create_qp(p->s.id, hub.pd, &attr) == 0);
	p->s.qp = p->s.id->qp;
	p->s.cap = attr.cap;
	MUST(rdma_accept(p->s.id, &param) == 0);
	must_event(p->c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p->s.ch, RDMA_CM_EVENT_ESTABLISHED);
	hub.count++;
	return p;
}

static void post_from(int n, int slot, char fill, size_t length)
{
	struct ibv_sge sge = sge_of(hub.client_mr[n], (size_t)slot * SLOT, length);

	memset(out + slot * SLOT, fill, length);
	MUST(post(&hub.pairs[n].c, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 1) == 0);
}

static void send_from(int n, char fill, size_t length)
{
	post_from(n, n, fill, length);
	MUST(poll_one(hub.pairs[n].c.scq).status == IBV_WC_SUCCESS);
}

static int pair_of(uint32_t qp_num)
{
	for (int n = 0; n < hub.count; n++)
		if (hub.pairs[n].s.qp && hub.pairs[n].s.qp->qp_num == qp_num)
			return n;
	return -1;
}

static bool filled(uint64_t slot, char fill, size_t length)
{
	for (size_t n = 0; n < length; n++)
		if (slots[slot * SLOT + n] != fill)
			return false;
	return true;
}

static bool quiet(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	return !poll_within(cq, &wc, QUIET_MS);
}

static void leave(void)
{
	for (int n = 0; n < hub.count; n++) {
		struct pair *p = &hub.pairs[n];

		MUST(ibv_dereg_mr(hub.client_mr[n]) == 0);
		rdma_destroy_qp(p->s.id);
		p->s.qp = NULL;
		pair_close(p);
	}
	check_errno(ibv_destroy_srq(hub.srq), 0, "destroy_srq when the queue pairs are gone");
	MUST(ibv_dereg_mr(hub.mr) == 0);
	MUST(ibv_destroy_cq(hub.cq) == 0);
	MUST(ibv_dealloc_pd(hub.pd) == 0);
}

static void creating(void)
{
	struct pair p;
	struct ibv_context *context = device_context(&p);
	struct ibv_device_attr device;
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 10, .max_sge = 3, .srq_limit = 4711 } };
	struct ibv_srq_init_attr_ex ex;
	struct ibv_srq_attr attr;
	struct ibv_pd *pd;
	struct ibv_srq *srq, *most;
	uint32_t number;

	MUST(ibv_query_device(context, &device) == 0);
	check(device.max_srq > 0 && device.max_srq_wr > 0 && device.max_srq_sge > 0, "the device has shared receive queues",
	      "%d, %d, %d", device.max_srq, device.max_srq_wr, device.max_srq_sge);
	MUST(pd = ibv_alloc_pd(context));
	MUST(srq = ibv_create_srq(pd, &init));
	check(init.attr.max_wr >= 10 && init.attr.max_sge >= 3, "create_srq tells the real sizes", "%u, %u",
	      init.attr.max_wr, init.attr.max_sge);
	check(srq->context == context && srq->pd == pd && srq->srq_context == NULL, "its members are set", "%p",
	      (void *)srq->pd);
	check_errno(ibv_query_srq(srq, &attr), 0, "query_srq");
	check(attr.max_wr == init.attr.max_wr && attr.max_sge == init.attr.max_sge, "query_srq tells the same", "%u, %u",
	      attr.max_wr, attr.max_sge);
	check(attr.srq_limit == 0, "srq_limit is irrelevant for create_srq", "%u", attr.srq_limit);
	check_errno(ibv_dealloc_pd(pd), EBUSY, "dealloc_pd under a shared receive queue");

	most = make_srq(pd, (uint32_t)device.max_srq_wr, (uint32_t)device.max_srq_sge);
	check(most != NULL, "as large as the device says", "errno %d", errno);
	MUST(!most || ibv_destroy_srq(most) == 0);
	check_failed(!make_srq(pd, (uint32_t)device.max_srq_wr + 1, 1), EINVAL, "more than max_srq_wr");
	check_failed(!make_srq(pd, 1, (uint32_t)device.max_srq_sge + 1), EINVAL, "more than max_srq_sge");
	check_failed(!make_srq(pd, 0, 1), EINVAL, "no work requests");

	ex = (struct ibv_srq_init_attr_ex){
		.attr = { .max_wr = 4, .max_sge = 1 }, .pd = pd, .srq_type = IBV_SRQT_BASIC,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
	};
	most = ibv_create_srq_ex(context, &ex);
	check(most && ex.attr.max_wr >= 4, "create_srq_ex of the basic type", "errno %d", errno);
	MUST(!most || ibv_destroy_srq(most) == 0);
	ex.srq_type = IBV_SRQT_XRC;
	check_failed(!ibv_create_srq_ex(context, &ex), EOPNOTSUPP, "XRC");
	ex.srq_type = IBV_SRQT_TM;
	check_failed(!ibv_create_srq_ex(context, &ex), EOPNOTSUPP, "tag matching");
	ex.comp_mask = 1u << 20;
	check_failed(!ibv_create_srq_ex(context, &ex), EINVAL, "unknown members");
	check_errno(ibv_get_srq_num(srq, &number), EOPNOTSUPP, "get_srq_num is for XRC");
	check_errno(ibv_destroy_srq(srq), 0, "destroy_srq");
	check_errno(ibv_dealloc_pd(pd), 0, "dealloc_pd afterwards");
}

static void modifying(void)
{
	struct pair p;
	struct ibv_context *context = device_context(&p);
	struct ibv_device_attr device;
	struct ibv_srq_attr attr = { 0 };
	struct ibv_srq *srq;

	MUST(ibv_query_device(context, &device) == 0);
	check(device.device_cap_flags & IBV_DEVICE_SRQ_RESIZE, "the device says that they can be resized", "%x",
	      device.device_cap_flags);
	MUST(hub.pd = ibv_alloc_pd(context));
	MUST(hub.mr = ibv_reg_mr(hub.pd, slots, sizeof slots, IBV_ACCESS_LOCAL_WRITE));
	MUST(srq = make_srq(hub.pd, 4, 1));
	MUST(post_slots(srq, 0, 4) == 0);
	attr.max_wr = 8;
	check_errno(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR), 0, "growing");
	MUST(ibv_query_srq(srq, &attr) == 0);
	check(attr.max_wr >= 8, "query_srq tells the new size", "%u", attr.max_wr);
	check_errno(post_slots(srq, 4, 4), 0, "posting as many");
	attr.max_wr = 7;
	check_errno(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR), EINVAL, "shrinking below what is posted");
	attr.max_wr = (uint32_t)device.max_srq_wr + 1;
	check_errno(ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR), EINVAL, "growing beyond max_srq_wr");
	attr.srq_limit = 9;
	check_errno(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), EINVAL, "a limit above max_wr");
	attr.srq_limit = 2;
	attr.max_wr = 7;
	check_errno(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT | IBV_SRQ_MAX_WR), EINVAL, "one good, one bad");
	MUST(ibv_query_srq(srq, &attr) == 0);
	check(attr.max_wr == 8 && attr.srq_limit == 0, "then nothing is modified", "%u, %u", attr.max_wr, attr.srq_limit);
	attr.srq_limit = 9;
	attr.max_wr = 16;
	check_errno(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT | IBV_SRQ_MAX_WR), 0, "both");
	MUST(ibv_query_srq(srq, &attr) == 0);
	check(attr.max_wr == 16 && attr.srq_limit == 9, "then both are", "%u, %u", attr.max_wr, attr.srq_limit);
	check_errno(ibv_modify_srq(srq, &attr, 0), 0, "a mask of 0");
	check_errno(ibv_modify_srq(srq, &attr, 1 << 7), EINVAL, "an unknown bit of the mask");
	check_errno(ibv_destroy_srq(srq), 0, "destroy_srq with receives in it");
}

static void posting(void)
{
	struct pair *p = join();
	struct ibv_sge sge[3] = { sge_of(hub.mr, 0, 8), sge_of(hub.mr, 8, 8), sge_of(hub.mr, 16, 8) };
	struct ibv_recv_wr second = { .wr_id = 2, .sg_list = sge, .num_sge = 3 };
	struct ibv_recv_wr first = { .wr_id = 1, .sg_list = sge, .num_sge = 2, .next = &second }, *bad = NULL;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_srq_attr now;

	check_errno(ibv_post_srq_recv(hub.srq, &first, &bad), EINVAL, "more elements than max_sge");
	check(bad == &second, "bad_recv_wr is the one that failed", "%p", (void *)bad);
	second.num_sge = 2;
	bad = NULL;
	check_errno(ibv_post_recv(p->s.qp, &first, &bad), EINVAL, "post_recv to a queue pair with a shared queue");
	check(bad == &first, "bad_wr is the first", "%p", (void *)bad);
	MUST(ibv_query_srq(hub.srq, &now) == 0);
	/* One was posted above. */
	check_errno(post_slots(hub.srq, 0, (int)now.max_wr - 1), 0, "posting as many as it holds");
	bad = NULL;
	check_errno(ibv_post_srq_recv(hub.srq, &first, &bad), ENOMEM, "posting to a full queue");
	check(bad == &first, "bad_recv_wr then", "%p", (void *)bad);
	check_errno(ibv_destroy_srq(hub.srq), EBUSY, "destroy_srq under a queue pair");

	MUST(ibv_query_qp(p->s.qp, &attr, IBV_QP_CAP, &init) == 0);
	check(init.srq == hub.srq && p->s.qp->srq == hub.srq, "query_qp tells the shared queue", "%p", (void *)init.srq);
	check(p->s.cap.max_recv_wr == 0, "and no receives of its own", "%u", p->s.cap.max_recv_wr);
	send_from(0, 'x', 16);
	check(poll_one(hub.cq).wr_id == 1 && !memcmp(slots, out, 16), "the list's first part was posted", "%s", slots);
	leave();
}

static void sharing(void)
{
	struct ibv_wc wc;
	int seen[PAIRS] = { 0 }, rounds = 0;

	for (int n = 0; n < PAIRS; n++)
		join();
	MUST(post_slots(hub.srq, 0, 4) == 0);
	for (int n = 0; n < 4; n++) {
		int from = n % PAIRS;

		send_from(from, (char)('a' + n), 100 + (size_t)n);
		wc = want_wc(hub.cq, IBV_WC_SUCCESS, "a receive");
		check(wc.wr_id == (uint64_t)n && wc.opcode == IBV_WC_RECV, "receives are taken in order", "%llu",
		      (unsigned long long)wc.wr_id);
		check(pair_of(wc.qp_num) == from, "qp_num tells who took it", "%d", pair_of(wc.qp_num));
		check(wc.byte_len == 100 + (uint32_t)n && filled(wc.wr_id, (char)('a' + n), wc.byte_len), "the bytes", "%u",
		      wc.byte_len);
	}
	/* Now there are none: three Sends of each wait, and as RoCE so do their completions. */
	for (int round = 0; round < 3; round++)
		for (int n = 0; n < PAIRS; n++)
			post_from(n, n + PAIRS * round, (char)('A' + n + PAIRS * round), 1000);
	check(quiet(hub.cq), "without receives nothing completes", "a completion");
	for (int round = 0; round < 3; round++) {
		bool each = true;

		MUST(post_slots(hub.srq, PAIRS * round, PAIRS) == 0);
		for (int n = 0; n < PAIRS; n++) {
			int from;

			wc = poll_one(hub.cq);
			from = pair_of(wc.qp_num);
			MUST(from >= 0 && wc.status == IBV_WC_SUCCESS);
			each = each && seen[from] == round && filled(wc.wr_id, (char)('A' + from + PAIRS * round), 1000);
			seen[from]++;
		}
		rounds += each;
	}
	check(rounds == 3, "each refill serves each one that waits, in the order of its Sends", "%d of 3 rounds", rounds);
	check(quiet(hub.cq), "and no more", "a completion");
	for (int n = 0; n < 3 * PAIRS; n++)
		MUST(poll_one(hub.pairs[n % PAIRS].c.scq).status == IBV_WC_SUCCESS);
	leave();
}

/* The next asynchronous event; -1 when none comes. It is not acknowledged. */
static int event_within(struct ibv_context *context, struct ibv_async_event *event, int ms)
{
	if (!readable(context->async_fd, ms))
		return -1;
	MUST(ibv_get_async_event(context, event) == 0);
	return (int)event->event_type;
}

static void limit(void)
{
	struct ibv_srq_attr attr = { .srq_limit = 3 };
	struct ibv_async_event event;
	struct ibv_context *context;
	int type;

	join();
	context = hub.srq->context;
	MUST(post_slots(hub.srq, 0, 5) == 0);
	MUST(ibv_modify_srq(hub.srq, &attr, IBV_SRQ_LIMIT) == 0);
	MUST(ibv_query_srq(hub.srq, &attr) == 0);
	check(attr.srq_limit == 3, "query_srq tells the limit", "%u", attr.srq_limit);
	for (int n = 0; n < 2; n++)
		send_from(0, 'x', 8);
	for (int n = 0; n < 2; n++)
		poll_one(hub.cq);
	check(event_within(context, &event, QUIET_MS) == -1, "with as many left as the limit there is no event", "one");
	send_from(0, 'x', 8);
	poll_one(hub.cq);
	type = event_within(context, &event, LIMIT_MS);
	if (check(type == IBV_EVENT_SRQ_LIMIT_REACHED, "with fewer there is", "%d", type)) {
		check(event.element.srq == hub.srq, "it names the queue", "%p", (void *)event.element.srq);
		ibv_ack_async_event(&event);
	}
	MUST(ibv_query_srq(hub.srq, &attr) == 0);
	check(attr.srq_limit == 0, "the limit is 0 then", "%u", attr.srq_limit);
	send_from(0, 'x', 8);
	poll_one(hub.cq);
	check(event_within(context, &event, QUIET_MS) == -1, "and there is no second event", "one");
	/* One is left. Armed anew, taking it is below the limit. */
	attr.srq_limit = 1;
	MUST(ibv_modify_srq(hub.srq, &attr, IBV_SRQ_LIMIT) == 0);
	send_from(0, 'x', 8);
	poll_one(hub.cq);
	type = event_within(context, &event, LIMIT_MS);
	check(type == IBV_EVENT_SRQ_LIMIT_REACHED, "until it is armed anew", "%d", type);
	if (type != -1)
		ibv_ack_async_event(&event);
	leave();
}

static void last_wqe(void)
{
	struct ibv_qp_attr to_err = { .qp_state = IBV_QPS_ERR };
	struct ibv_async_event event;
	struct ibv_wc wc;
	int type;

	join();
	join();
	MUST(post_slots(hub.srq, 0, 4) == 0);
	MUST(ibv_modify_qp(hub.pairs[0].s.qp, &to_err, IBV_QP_STATE) == 0);
	type = event_within(hub.srq->context, &event, LIMIT_MS);
	if (check(type == IBV_EVENT_QP_LAST_WQE_REACHED, "to ERR: LAST_WQE_REACHED", "%d", type)) {
		check(event.element.qp == hub.pairs[0].s.qp, "it names the queue pair", "%p", (void *)event.element.qp);
		ibv_ack_async_event(&event);
	}
	check(quiet(hub.cq), "the shared receives are not flushed", "a completion");
	send_from(1, 'y', 8);
	wc = want_wc(hub.cq, IBV_WC_SUCCESS, "another queue pair takes them");
	check(wc.wr_id == 0 && pair_of(wc.qp_num) == 1, "from the first on", "%llu", (unsigned long long)wc.wr_id);
	/* A message that is too long uses up its receive. */
	struct ibv_sge sge[2] = { sge_of(hub.client_mr[1], 0, SLOT), sge_of(hub.client_mr[1], 0, 1) };
	MUST(post(&hub.pairs[1].c, IBV_WR_SEND, IBV_SEND_SIGNALED, sge, 2, 0, 0, 1) == 0);
	wc = want_wc(hub.cq, IBV_WC_LOC_LEN_ERR, "a message longer than its receive");
	check(wc.wr_id == 1, "costs that receive", "%llu", (unsigned long long)wc.wr_id);
	do {
		type = event_within(hub.srq->context, &event, LIMIT_MS);
		if (type != -1)
			ibv_ack_async_event(&event);
	} while (type != -1 && !(type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == hub.pairs[1].s.qp));
	check(type != -1, "and the queue pair, which says so", "no event");
	check(quiet(hub.cq), "and no other", "a completion");
	leave();
}

static volatile int destroyed;

static void *destroy_srq(void *arg)
{
	destroyed = ibv_destroy_srq(arg) == 0 ? 1 : -1;
	return NULL;
}

static void acknowledging(void)
{
	struct ibv_srq_attr attr = { .srq_limit = 1 };
	struct ibv_async_event event;
	pthread_t thread;

	join();
	MUST(post_slots(hub.srq, 0, 1) == 0);
	MUST(ibv_modify_srq(hub.srq, &attr, IBV_SRQ_LIMIT) == 0);
	send_from(0, 'x', 8);
	poll_one(hub.cq);
	MUST(event_within(hub.srq->context, &event, LIMIT_MS) == IBV_EVENT_SRQ_LIMIT_REACHED);
	rdma_destroy_qp(hub.pairs[0].s.id);
	MUST(pthread_create(&thread, NULL, destroy_srq, hub.srq) == 0);
	usleep(QUIET_MS * 1000);
	check(destroyed == 0, "destroy_srq waits for an event that is not acknowledged", "returned %d", destroyed);
	ibv_ack_async_event(&event);
	MUST(pthread_join(thread, NULL) == 0);
	check(destroyed == 1, "and returns 0 when it is", "an error");
}

/* rdma_create_srq, rdma_post_recv on it, rdma_create_qp that takes it from the id. */
static void rdma_cm(void)
{
	struct rdma_conn_param param = { .rnr_retry_count = 7 };
	struct ibv_srq_init_attr init = { .srq_context = &hub, .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq_init_attr_ex ex = { .attr = { .max_wr = 8, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC };
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_send_sge = 1, .max_recv_wr = 8, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct options none = { 0 };
	struct pair p;
	struct ibv_mr *mr, *client_mr;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct ibv_srq *srq;

	device_context(&p);
	side_resources(&p.c, &none);
	MUST(rdma_connect(p.c.id, &param) == 0);
	p.s.id = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	check_failed(rdma_create_srq_ex(p.s.id, &ex) == -1, EINVAL, "rdma_create_srq_ex without a type");
	ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE;
	check_failed(rdma_create_srq_ex(p.s.id, &ex) == -1, EOPNOTSUPP, "rdma_create_srq_ex for XRC");
	ex.srq_type = IBV_SRQT_BASIC;
	check(rdma_create_srq_ex(p.s.id, &ex) == 0 && p.s.id->srq && p.s.id->pd, "rdma_create_srq_ex", "errno %d", errno);
	check(ex.pd == p.s.id->pd, "it tells the protection domain", "%p", (void *)ex.pd);
	rdma_destroy_srq(p.s.id);
	check(p.s.id->srq == NULL, "rdma_destroy_srq", "%p", (void *)p.s.id->srq);
	check(rdma_create_srq(p.s.id, NULL, &init) == 0 && p.s.id->srq, "rdma_create_srq", "errno %d", errno);
	srq = p.s.id->srq;
	check(srq->pd == p.s.id->pd && srq->srq_context == &hub && init.attr.max_wr >= 8, "with the id's domain", "%p",
	      (void *)srq->pd);
	MUST(mr = rdma_reg_msgs(p.s.id, slots, sizeof slots));
	MUST(rdma_create_qp(p.s.id, NULL, &attr) == 0);
	check(p.s.id->qp->srq == srq && attr.srq == srq, "rdma_create_qp takes the id's", "%p", (void *)p.s.id->qp->srq);
	check(p.s.id->recv_cq && p.s.id->qp->recv_cq == p.s.id->recv_cq, "and makes a completion queue for receives", "%p",
	      (void *)p.s.id->recv_cq);
	check(rdma_post_recv(p.s.id, (void *)7, slots, SLOT, mr) == 0, "rdma_post_recv posts to it", "errno %d", errno);
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	MUST(client_mr = ibv_reg_mr(p.c.pd, out, sizeof out, 0));
	memset(out, 'z', 64);
	sge = sge_of(client_mr, 0, 64);
	MUST(post(&p.c, IBV_WR_SEND, 0, &sge, 1, 0, 0, 1) == 0);
	check(rdma_get_recv_comp(p.s.id, &wc) == 1 && wc.wr_id == 7 && filled(0, 'z', 64), "rdma_get_recv_comp", "%llu",
	      (unsigned long long)wc.wr_id);
	check_errno(ibv_destroy_srq(srq), EBUSY, "it cannot be destroyed under the queue pair");
	rdma_destroy_qp(p.s.id);
	check(p.s.id->srq == srq, "rdma_destroy_qp leaves it", "%p", (void *)p.s.id->srq);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(client_mr) == 0);
	rdma_destroy_srq(p.s.id);
	pair_close(&p);
}

static void *connect_ep(void *id)
{
	MUST(rdma_connect(id, NULL) == 0);
	return NULL;
}

/* rdma_create_ep with a shared queue in the attributes, for every connection of a listener. */
static void endpoints(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE | RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 2, .max_send_sge = 1, .max_recv_wr = 8, .max_recv_sge = 1 }, .sq_sig_all = 1,
	};
	struct rdma_cm_id *listener, *client[2], *server[2];
	struct ibv_context *context;
	struct ibv_mr *mr, *client_mr;
	struct ibv_srq *srq;
	struct ibv_pd *pd;
	struct ibv_wc wc;
	struct pair p;
	char port[8];
	bool both = true;

	context = device_context(&p);
	MUST(pd = ibv_alloc_pd(context));
	MUST(srq = make_srq(pd, 8, 1));
	MUST(mr = ibv_reg_mr(pd, slots, sizeof slots, IBV_ACCESS_LOCAL_WRITE));
	hub.mr = mr;
	MUST(post_slots(srq, 0, 2) == 0);
	MUST(rdma_getaddrinfo(address, NULL, &hints, &res) == 0);
	attr.srq = srq;
	MUST(rdma_create_ep(&listener, res, pd, &attr) == 0);
	rdma_freeaddrinfo(res);
	MUST(rdma_listen(listener, 4) == 0);
	snprintf(port, sizeof port, "%d", ntohs(rdma_get_src_port(listener)));
	hints.ai_flags = RAI_NUMERICHOST;
	MUST(rdma_getaddrinfo(address, port, &hints, &res) == 0);
	for (int n = 0; n < 2; n++) {
		struct ibv_qp_init_attr mine = { .cap = attr.cap, .sq_sig_all = 1 };
		struct rdma_conn_param param = { .rnr_retry_count = 7 };
		pthread_t thread;

		/* rdma_connect of an endpoint blocks until the other side has accepted. */
		MUST(rdma_create_ep(&client[n], res, NULL, &mine) == 0);
		MUST(pthread_create(&thread, NULL, connect_ep, client[n]) == 0);
		MUST(rdma_get_request(listener, &server[n]) == 0);
		both = both && server[n]->qp && server[n]->qp->srq == srq;
		MUST(rdma_accept(server[n], &param) == 0);
		MUST(pthread_join(thread, NULL) == 0);
	}
	check(both, "rdma_get_request makes queue pairs on the shared queue", "other ones");
	for (int n = 0; n < 2; n++) {
		memset(out, 'k' + n, 32);
		MUST(client_mr = rdma_reg_msgs(client[n], out, sizeof out));
		MUST(rdma_post_send(client[n], NULL, out, 32, client_mr, 0) == 0);
		check(rdma_get_recv_comp(server[n], &wc) == 1 && wc.wr_id == (uint64_t)n && filled(wc.wr_id, (char)('k' + n), 32),
		      "a message on each", "%llu", (unsigned long long)wc.wr_id);
		MUST(rdma_get_send_comp(client[n], &wc) == 1);
		MUST(rdma_dereg_mr(client_mr) == 0);
	}
	for (int n = 0; n < 2; n++) {
		rdma_destroy_ep(client[n]);
		rdma_destroy_ep(server[n]);
	}
	rdma_destroy_ep(listener);
	MUST(ibv_dereg_mr(mr) == 0);
	check_errno(ibv_destroy_srq(srq), 0, "destroy_srq afterwards");
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "creating", creating }, { "modifying", modifying }, { "posting", posting }, { "sharing", sharing },
		{ "limit", limit }, { "last_wqe", last_wqe }, { "acknowledging", acknowledging }, { "rdma_cm", rdma_cm },
		{ "endpoints", endpoints },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
