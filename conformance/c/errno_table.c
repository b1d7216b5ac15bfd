/* A program's own mistakes with verbs, and the errno or completion status that rdma-core's man pages name
 * for them; what queries must say.
 *
 *	errno_table [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * Mistakes with rdma_cm are in errno_cm.c, what notification and acknowledgement must do in completions.c. */
#include <sys/mman.h>

#include "common.h"

static char area[1 << 16];

static struct ibv_mr *reg(struct side *side, void *addr, size_t length, int access)
{
	struct ibv_mr *mr;

	MUST(mr = ibv_reg_mr(side->pd, addr, length, access));
	return mr;
}

/* The next asynchronous event of this queue pair, of any type; -1 when none comes. Others are acknowledged
 * and forgotten: both ends of a connection share the context here. */
static int qp_event(struct ibv_qp *qp, int ms)
{
	uint64_t end = now_ms() + (uint64_t)ms;
	uint64_t now;

	while ((now = now_ms()) < end && readable(qp->context->async_fd, (int)(end - now))) {
		struct ibv_async_event event;

		MUST(ibv_get_async_event(qp->context, &event) == 0);
		ibv_ack_async_event(&event);
		switch (event.event_type) {
		case IBV_EVENT_QP_FATAL:
		case IBV_EVENT_QP_REQ_ERR:
		case IBV_EVENT_QP_ACCESS_ERR:
		case IBV_EVENT_SQ_DRAINED:
			if (event.element.qp == qp)
				return (int)event.event_type;
			break;
		default:
			break;
		}
	}
	return -1;
}

static bool is_error_event(int type)
{
	return type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR;
}

/* ------------------------------------------------------------------ objects */

static void device(void)
{
	struct ibv_device **list;
	struct ibv_context *ctx;
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	union ibv_gid gid;
	int n;

	MUST(list = ibv_get_device_list(&n));
	check(n >= 1 && list[n] == NULL, "device list is NULL-terminated and counted", "n %d", n);
	MUST(n >= 1 && (ctx = ibv_open_device(list[0])));
	check(strcmp(ibv_get_device_name(list[0]), ibv_get_device_name(ctx->device)) == 0,
	      "the context names its device", "%s", ibv_get_device_name(ctx->device));
	ibv_free_device_list(list);
	check_errno(ibv_query_device(ctx, &attr), 0, "query_device");
	check(attr.max_qp > 0 && attr.max_qp_wr > 0 && attr.max_sge > 0 && attr.max_cq > 0 && attr.max_cqe > 0 &&
	      attr.max_mr > 0 && attr.max_pd > 0 && attr.max_qp_rd_atom > 0 && attr.max_mr_size > 0 &&
	      attr.max_ah > 0 && attr.max_mcast_grp > 0 && attr.max_mcast_qp_attach > 0 && attr.max_mw > 0 &&
	      attr.phys_port_cnt == 1, "no limit is zero", "qp %d wr %d sge %d cq %d cqe %d", attr.max_qp,
	      attr.max_qp_wr, attr.max_sge, attr.max_cq, attr.max_cqe);
	check_errno(ibv_query_port(ctx, 1, &port), 0, "query_port 1");
	check(port.state == IBV_PORT_ACTIVE, "the port is active", "state %d", port.state);
	check(port.gid_tbl_len >= 1, "there is a GID", "gid_tbl_len %d", port.gid_tbl_len);
	check_errno(ibv_query_port(ctx, 0, &port), EINVAL, "query_port 0");
	check_errno(ibv_query_port(ctx, 2, &port), EINVAL, "query_port beyond the last");
	check(ibv_query_gid(ctx, 1, 0, &gid) == 0, "query_gid 0", "%m");
	check(ibv_query_gid(ctx, 1, 1 << 20, &gid) != 0, "query_gid beyond the table fails", "it succeeds");
	MUST(fcntl(ctx->async_fd, F_SETFL, O_NONBLOCK) == 0);
	errno = 0;
	check_failed(ibv_get_async_event(ctx, &(struct ibv_async_event){ 0 }) == -1, EAGAIN,
		     "get_async_event on a non-blocking descriptor");
	check_errno(ibv_close_device(ctx), 0, "close_device");
}

static void regions(void)
{
	struct pair p;
	struct ibv_mr *mr, *other;
	struct ibv_pd *pd;
	uint32_t lkey, rkey;

	pair_open(&p);
	pd = p.c.pd;
	errno = 0;
	mr = ibv_reg_mr(pd, area, 64, IBV_ACCESS_REMOTE_WRITE);
	check_failed(!mr, EINVAL, "reg_mr with remote write but not local write");
	errno = 0;
	mr = ibv_reg_mr(pd, area, 64, IBV_ACCESS_REMOTE_ATOMIC);
	check_failed(!mr, EINVAL, "reg_mr with remote atomic but not local write");
	errno = 0;
	mr = ibv_reg_mr(pd, (void *)(UINTPTR_MAX - 100), 4096, 0);
	/* A kernel that pins pages says EFAULT, one that looks at the sum first EINVAL. */
	check(!mr && (errno == EINVAL || errno == EFAULT), "reg_mr past the end of the address space", "%m");
	mr = ibv_reg_mr(pd, area, 0, IBV_ACCESS_LOCAL_WRITE);
	if (check(mr, "reg_mr of no bytes", "%m"))
		ibv_dereg_mr(mr);
	mr = reg(&p.c, area, 64, REMOTE_ALL);
	other = reg(&p.c, area, 64, REMOTE_ALL);
	check(mr->addr == area && mr->length == 64 && mr->pd == pd && mr->context == pd->context,
	      "a region knows what it was made of", "addr %p length %zu", mr->addr, mr->length);
	check(mr->lkey != other->lkey && mr->rkey != other->rkey, "two regions over one buffer have different keys",
	      "%x and %x", mr->rkey, other->rkey);
	check_errno(ibv_dealloc_pd(pd), EBUSY, "dealloc_pd with regions");
	check(ibv_rereg_mr(mr, 1 << 20, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT, "rereg_mr with unknown flags",
	      "another result, %m");
	check(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT,
	      "rereg_mr to nothing", "another result, %m");
	lkey = mr->lkey;
	rkey = mr->rkey;
	check_errno(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE), 0,
		    "rereg_mr to fewer rights");
	check(mr->lkey == lkey && mr->rkey == rkey, "which keeps the keys", "%x, was %x", mr->rkey, rkey);
	check_errno(ibv_dereg_mr(mr), 0, "dereg_mr");
	check_errno(ibv_dereg_mr(other), 0, "dereg_mr of the other");
	pair_close(&p);
}

static void queues(void)
{
	struct pair p;
	struct ibv_context *ctx;
	struct ibv_comp_channel *cc;
	struct ibv_cq *cq;
	struct ibv_pd *pd;
	struct ibv_qp *qp;
	struct ibv_qp_init_attr attr, base;

	pair_open(&p);
	ctx = p.c.id->verbs;
	check(p.s.id->verbs == ctx, "rdma_cm opens a device once", "two contexts");
	errno = 0;
	check_failed(!ibv_create_cq(ctx, 0, NULL, NULL, 0), EINVAL, "create_cq of no entries");
	errno = 0;
	check_failed(!ibv_create_cq(ctx, 16, NULL, NULL, ctx->num_comp_vectors), EINVAL,
		     "create_cq on a vector that is not there");
	MUST(cc = ibv_create_comp_channel(ctx));
	MUST(cq = ibv_create_cq(ctx, 33, &p, cc, 0));
	check(cq->cqe >= 33 && cq->cq_context == &p && cq->channel == cc, "a CQ has at least the size asked for",
	      "cqe %d", cq->cqe);
	check_errno(ibv_destroy_comp_channel(cc), EBUSY, "destroy_comp_channel with a CQ");
	MUST(pd = ibv_alloc_pd(ctx));
	base = (struct ibv_qp_init_attr){
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 5, .max_recv_wr = 3, .max_send_sge = 2, .max_recv_sge = 1 },
	};
	attr = base;
	MUST(qp = ibv_create_qp(pd, &attr));
	check(attr.cap.max_send_wr >= 5 && attr.cap.max_recv_wr >= 3 && attr.cap.max_send_sge >= 2 &&
	      attr.cap.max_recv_sge >= 1, "create_qp returns at least what was asked for", "wr %u %u sge %u %u",
	      attr.cap.max_send_wr, attr.cap.max_recv_wr, attr.cap.max_send_sge, attr.cap.max_recv_sge);
	check(state_of(qp) == IBV_QPS_RESET, "a new queue pair is in RESET", "%s", state_name(state_of(qp)));
	check_errno(ibv_destroy_cq(cq), EBUSY, "destroy_cq with a queue pair");
	check_errno(ibv_dealloc_pd(pd), EBUSY, "dealloc_pd with a queue pair");
	check_errno(ibv_destroy_qp(qp), 0, "destroy_qp in RESET");
	attr = base;
	attr.cap.max_inline_data = 1 << 30;
	errno = 0;
	check_failed(!ibv_create_qp(pd, &attr), EINVAL, "create_qp with a gigabyte inline");
	attr = base;
	attr.send_cq = NULL;
	errno = 0;
	check_failed(!ibv_create_qp(pd, &attr), EINVAL, "create_qp without a send CQ");
	check_errno(ibv_destroy_cq(cq), 0, "destroy_cq when its queue pair is gone");
	check_errno(ibv_destroy_comp_channel(cc), 0, "destroy_comp_channel when its CQ is gone");
	check_errno(ibv_dealloc_pd(pd), 0, "dealloc_pd when its queue pair is gone");
	pair_close(&p);
}

/* ibv_resize_cq(3): at least as many entries as are not polled. */
static void resize_below_what_waits(struct side *side)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct side lone = { 0 };
	struct ibv_cq *cq;
	int size;

	MUST(cq = ibv_create_cq(side->id->verbs, 8, NULL, NULL, 0));
	size = cq->cqe;
	attr.send_cq = attr.recv_cq = cq;
	MUST(lone.qp = ibv_create_qp(side->pd, &attr));
	MUST(to_init(lone.qp) == 0);
	for (uint64_t n = 0; n < 5; n++)
		MUST(post_recv(&lone, NULL, 0, n) == 0);
	/* Flushed: five completions are there at once. */
	MUST(to(lone.qp, IBV_QPS_ERR) == 0);
	check_errno(ibv_resize_cq(cq, 4), EINVAL, "resize_cq below what waits");
	check(cq->cqe == size, "which changes nothing", "cqe %d, before %d", cq->cqe, size);
	check_errno(ibv_resize_cq(cq, 5), 0, "resize_cq to what waits");
	for (uint64_t n = 0; n < 5; n++) {
		struct ibv_wc wc = poll_one(cq);

		if (wc.wr_id != n || wc.status != IBV_WC_WR_FLUSH_ERR)
			check(false, "a refused resize_cq loses nothing", "wr_id %d status %d", (int)wc.wr_id, wc.status);
	}
	check_errno(ibv_resize_cq(cq, 1), 0, "resize_cq when all is polled");
	MUST(ibv_destroy_qp(lone.qp) == 0 && ibv_destroy_cq(cq) == 0);
}

static void resize(void)
{
	struct pair p;
	int before;

	pair_open_with(&p, (struct options){ .cqe = 8, .send_wr = 16 });
	for (uint64_t n = 0; n < 6; n++)
		MUST(post(&p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, NULL, 0, 0, 0, n) == 0);
	/* The sixth is there when it can be peeked at: resizing must wait for no more than that. */
	usleep(100000);
	before = p.c.scq->cqe;
	check_errno(ibv_resize_cq(p.c.scq, 200), 0, "resize_cq to more");
	check(p.c.scq->cqe >= 200, "cqe is the new size", "%d, before %d", p.c.scq->cqe, before);
	for (uint64_t n = 0; n < 6; n++) {
		struct ibv_wc wc = poll_one(p.c.scq);

		if (wc.wr_id != n || wc.status)
			check(false, "resize_cq keeps completions in order", "wr_id %d status %d", (int)wc.wr_id,
			      wc.status);
	}
	check_errno(ibv_resize_cq(p.c.scq, 4), 0, "resize_cq to less");
	check_errno(ibv_resize_cq(p.c.scq, 0), EINVAL, "resize_cq to nothing");
	check_errno(ibv_resize_cq(p.c.scq, INT32_MAX), EINVAL, "resize_cq beyond max_cqe");
	resize_below_what_waits(&p.c);
	pair_close(&p);
}

/* ------------------------------------------------------- queue pair states */

static void states(void)
{
	struct pair p;
	struct side lone = { 0 };
	struct ibv_sge sge;
	struct ibv_mr *mr;
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr qa = { .qp_state = IBV_QPS_INIT, .port_num = 9 };

	pair_open(&p);
	mr = reg(&p.c, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	sge = sge_of(mr, 0, 64);
	attr.send_cq = p.c.scq;
	attr.recv_cq = p.c.rcq;
	MUST(lone.qp = ibv_create_qp(p.c.pd, &attr));
	check_errno(post_recv(&lone, &sge, 1, 1), EINVAL, "post_recv in RESET");
	check_errno(post(&lone, IBV_WR_SEND, 0, &sge, 1, 0, 0, 1), EINVAL, "post_send in RESET");
	check_errno(to(lone.qp, IBV_QPS_RTR), EINVAL, "modify_qp RESET to RTR");
	check_errno(to(lone.qp, IBV_QPS_RTS), EINVAL, "modify_qp RESET to RTS");
	check_errno(to(lone.qp, IBV_QPS_SQD), EINVAL, "modify_qp RESET to SQD");
	check_errno(to(lone.qp, IBV_QPS_INIT), EINVAL, "modify_qp RESET to INIT without the required attributes");
	check_errno(ibv_modify_qp(lone.qp, &qa, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
		    EINVAL, "modify_qp to a port that is not there");
	check(state_of(lone.qp) == IBV_QPS_RESET, "a refused modify_qp changes nothing", "%s",
	      state_name(state_of(lone.qp)));
	check_errno(to_init(lone.qp), 0, "modify_qp RESET to INIT");
	check_errno(to_init(lone.qp), 0, "modify_qp INIT to INIT");
	check_errno(to(lone.qp, IBV_QPS_RTS), EINVAL, "modify_qp INIT to RTS");
	check_errno(to(lone.qp, IBV_QPS_RTR), EINVAL, "modify_qp INIT to RTR without the required attributes");
	check_errno(post(&lone, IBV_WR_SEND, 0, &sge, 1, 0, 0, 1), EINVAL, "post_send in INIT");
	check_errno(post_recv(&lone, &sge, 1, 7), 0, "post_recv in INIT");
	check_errno(to(lone.qp, IBV_QPS_ERR), 0, "modify_qp INIT to ERR");
	check(want_wc(p.c.rcq, IBV_WC_WR_FLUSH_ERR, "ERR flushes the receive").wr_id == 7,
	      "the flushed receive has its wr_id", "another");
	check_errno(post_recv(&lone, &sge, 1, 8), 0, "post_recv in ERR");
	want_wc(p.c.rcq, IBV_WC_WR_FLUSH_ERR, "a receive posted in ERR is flushed");
	check_errno(post(&lone, IBV_WR_SEND, 0, &sge, 1, 0, 0, 9), 0, "post_send in ERR");
	check(want_wc(p.c.scq, IBV_WC_WR_FLUSH_ERR, "a send posted in ERR is flushed, unsignalled or not").wr_id == 9,
	      "the flushed send has its wr_id", "another");
	check_errno(to(lone.qp, IBV_QPS_RTS), EINVAL, "modify_qp ERR to RTS");
	check_errno(to_init(lone.qp), EINVAL, "modify_qp ERR to INIT");
	check_errno(to(lone.qp, IBV_QPS_RESET), 0, "modify_qp ERR to RESET");
	check_errno(to_init(lone.qp), 0, "modify_qp RESET to INIT again");
	check_errno(ibv_destroy_qp(lone.qp), 0, "destroy_qp in INIT");
	check_errno(to(p.c.qp, IBV_QPS_RTR), EINVAL, "modify_qp RTS to RTR");
	check_errno(to_init(p.c.qp), EINVAL, "modify_qp RTS to INIT");
	check_errno(ibv_dereg_mr(mr), 0, "dereg_mr");
	pair_close(&p);
}

/* The same with a Send under way, which completes when the peer has a receive for it. */
static void drain_under_way(struct pair *p)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	struct ibv_qp_init_attr init;
	struct ibv_wc wc;
	int type;

	MUST(post(&p->c, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 6) == 0);
	check_errno(ibv_modify_qp(p->c.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0,
		    "modify_qp to SQD with a Send under way");
	MUST(post(&p->c, IBV_WR_SEND, IBV_SEND_SIGNALED, NULL, 0, 0, 0, 7) == 0);
	type = qp_event(p->c.qp, QUIET_MS);
	check(type == -1, "it is not drained", "event %d", type);
	MUST(ibv_query_qp(p->c.qp, &attr, IBV_QP_STATE, &init) == 0);
	check(attr.qp_state == IBV_QPS_SQD && attr.sq_draining, "query_qp says so", "%s, draining %d",
	      state_name(attr.qp_state), attr.sq_draining);
	MUST(post_recv(&p->s, NULL, 0, 8) == 0);
	MUST(post_recv(&p->s, NULL, 0, 9) == 0);
	check(want_wc(p->c.scq, IBV_WC_SUCCESS, "the Send under way completes in SQD").wr_id == 6, "and no other",
	      "another");
	type = qp_event(p->c.qp, LIMIT_MS);
	check(type == IBV_EVENT_SQ_DRAINED, "then SQ_DRAINED comes", "event %d", type);
	MUST(ibv_query_qp(p->c.qp, &attr, IBV_QP_STATE, &init) == 0);
	check(!attr.sq_draining, "query_qp says that too", "draining %d", attr.sq_draining);
	check(!poll_within(p->c.scq, &wc, QUIET_MS), "what was posted behind it waits", "a completion");
	check_errno(to(p->c.qp, IBV_QPS_RTS), 0, "modify_qp to RTS when it is drained");
	check(want_wc(p->c.scq, IBV_WC_SUCCESS, "which sends it").wr_id == 7, "with its wr_id", "another");
	poll_one(p->s.rcq);
	poll_one(p->s.rcq);
}

/* Send queue drained: nothing new is executed until RTS, and the event says when the old is done. */
static void drain(void)
{
	struct pair p;
	struct ibv_mr *mr, *target;
	struct ibv_sge sge;
	struct ibv_wc wc;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	int type;

	pair_open(&p);
	mr = reg(&p.c, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	target = reg(&p.s, area + 8192, 4096, REMOTE_ALL);
	sge = sge_of(mr, 0, 64);
	check_errno(ibv_modify_qp(p.c.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY), 0, "modify_qp RTS to SQD");
	type = qp_event(p.c.qp, LIMIT_MS);
	check(type == IBV_EVENT_SQ_DRAINED, "SQD reports SQ_DRAINED", "event %d", type);
	check_errno(post(&p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)area + 8192, target->rkey, 5), 0,
		    "post_send in SQD");
	check(!poll_within(p.c.scq, &wc, QUIET_MS), "nothing is sent in SQD", "a completion");
	check_errno(to(p.c.qp, IBV_QPS_RTS), 0, "modify_qp SQD to RTS");
	want_wc(p.c.scq, IBV_WC_SUCCESS, "RTS sends what SQD held");
	drain_under_way(&p);
	ibv_dereg_mr(mr);
	ibv_dereg_mr(target);
	pair_close(&p);
}

static void queries(void)
{
	struct pair p;
	struct ibv_qp_attr attr = { 0 };
	struct ibv_qp_init_attr init = { 0 };
	struct ibv_sge sge;
	struct ibv_mr *mr;

	pair_open_with(&p, (struct options){ .send_wr = 7, .recv_wr = 9, .read_depth = 3, .sq_sig_all = 1,
					     .retry = 6, .rnr_retry = 5, .server_rnr_retry = 2 });
	check_errno(ibv_query_qp(p.c.qp, &attr, IBV_QP_STATE | IBV_QP_CAP | IBV_QP_MAX_QP_RD_ATOMIC |
				 IBV_QP_MAX_DEST_RD_ATOMIC, &init), 0, "query_qp");
	check(attr.qp_state == IBV_QPS_RTS, "connected means RTS", "%s", state_name(attr.qp_state));
	check(init.send_cq == p.c.scq && init.recv_cq == p.c.rcq && init.srq == NULL && init.qp_type == IBV_QPT_RC,
	      "query_qp returns queues and type", "type %d", init.qp_type);
	check(init.sq_sig_all == 1, "query_qp returns sq_sig_all", "%d", init.sq_sig_all);
	check(memcmp(&init.cap, &p.c.cap, sizeof init.cap) == 0, "query_qp returns the capacities of creation",
	      "wr %u %u", init.cap.max_send_wr, init.cap.max_recv_wr);
	check(attr.max_rd_atomic == 3 && attr.max_dest_rd_atomic == 3, "query_qp returns the read depths agreed on",
	      "%u and %u", attr.max_rd_atomic, attr.max_dest_rd_atomic);
	check(p.request.initiator_depth == 3 && p.request.responder_resources == 3,
	      "CONNECT_REQUEST shows the read depths asked for", "%u and %u", p.request.initiator_depth,
	      p.request.responder_resources);
	for (int server = 0; server < 2; server++) {
		struct side *side = server ? &p.s : &p.c, *peer = server ? &p.c : &p.s;
		const char *end = server ? "server" : "client";
		char name[64];

		MUST(ibv_query_qp(side->qp, &attr, IBV_QP_DEST_QPN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				  IBV_QP_RNR_RETRY, &init) == 0);
		snprintf(name, sizeof name, "query_qp returns the peer's number, %s", end);
		check(attr.dest_qp_num == peer->qp->qp_num, name, "%#x, want %#x", attr.dest_qp_num, peer->qp->qp_num);
		/* How often this end's messages are retried is what the peer's program wishes. */
		snprintf(name, sizeof name, "and its retries without a receive, %s", end);
		check(attr.rnr_retry == (server ? 5 : 2), name, "%u", attr.rnr_retry);
		snprintf(name, sizeof name, "and a time limit and retries, %s", end);
		check(attr.timeout > 0 && attr.timeout < 32 && attr.retry_cnt == (server ? 7 : 6), name, "%u, %u",
		      attr.timeout, attr.retry_cnt);
	}
	mr = reg(&p.c, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	sge = sge_of(mr, 0, 0);
	MUST(post(&p.c, IBV_WR_RDMA_WRITE, 0, &sge, 1, 0, 0, 3) == 0);
	want_wc(p.c.scq, IBV_WC_SUCCESS, "sq_sig_all signals what was not flagged");
	ibv_dereg_mr(mr);
	pair_close(&p);
}

/* ------------------------------------------------------------------ posting */

static void posting(void)
{
	struct pair p;
	struct ibv_mr *mr;
	struct ibv_sge *sges, sge;
	struct ibv_send_wr wr[2] = { 0 }, *bad = NULL;
	struct ibv_recv_wr rwr[2] = { 0 }, *rbad = NULL;
	uint32_t n, many;
	int ret;

	pair_open_with(&p, (struct options){ .send_wr = 8, .recv_wr = 8, .inline_data = 64, .cqe = 256 });
	mr = reg(&p.c, area, 8192, IBV_ACCESS_LOCAL_WRITE);
	sge = sge_of(mr, 0, 8);
	many = (p.c.cap.max_send_sge > p.c.cap.max_recv_sge ? p.c.cap.max_send_sge : p.c.cap.max_recv_sge) + 1;
	MUST(sges = calloc(many, sizeof *sges));
	for (n = 0; n < many; n++)
		sges[n] = sge;
	check_errno(post(&p.c, IBV_WR_SEND, 0, sges, (int)p.c.cap.max_send_sge + 1, 0, 0, 1), EINVAL,
		    "post_send with too many sge");
	check_errno(post_recv(&p.c, sges, (int)p.c.cap.max_recv_sge + 1, 1), EINVAL, "post_recv with too many sge");
	check_errno(post(&p.c, (enum ibv_wr_opcode)99, 0, &sge, 1, 0, 0, 1), EINVAL, "post_send with an unknown opcode");
	check_errno(post(&p.c, IBV_WR_RDMA_READ, IBV_SEND_INLINE, &sge, 1, 0, 0, 1), EINVAL,
		    "post_send of an inline RDMA Read");
	check(p.c.cap.max_inline_data >= 64, "create_qp grants the inline size asked for", "%u",
	      p.c.cap.max_inline_data);
	if (p.c.cap.max_inline_data < 8192) {
		sges[0] = sge_of(mr, 0, p.c.cap.max_inline_data + 1);
		ret = post(&p.c, IBV_WR_SEND, IBV_SEND_INLINE, sges, 1, 0, 0, 1);
		/* Providers differ between these two, and the man page names neither. */
		check(ret == EINVAL || ret == ENOMEM, "post_send of more inline than fits", "%d", ret);
	}
	/* A list with a fault in the middle: what stands before it is posted, and bad_wr points at it. */
	wr[0] = (struct ibv_send_wr){ .wr_id = 10, .next = &wr[1], .opcode = IBV_WR_RDMA_WRITE,
				      .send_flags = IBV_SEND_SIGNALED };
	wr[1] = (struct ibv_send_wr){ .wr_id = 11, .opcode = (enum ibv_wr_opcode)99, .send_flags = IBV_SEND_SIGNALED };
	check_errno(ibv_post_send(p.c.qp, &wr[0], &bad), EINVAL, "post_send of a list with a fault");
	check(bad == &wr[1], "bad_wr is the faulty send", "%p", (void *)bad);
	check(want_wc(p.c.scq, IBV_WC_SUCCESS, "what stands before the fault is sent").wr_id == 10,
	      "it has its wr_id", "another");
	rwr[0] = (struct ibv_recv_wr){ .wr_id = 20, .next = &rwr[1], .sg_list = &sge, .num_sge = 1 };
	rwr[1] = (struct ibv_recv_wr){ .wr_id = 21, .sg_list = sges, .num_sge = (int)many + 1000 };
	check_errno(ibv_post_recv(p.c.qp, &rwr[0], &rbad), EINVAL, "post_recv of a list with a fault");
	check(rbad == &rwr[1], "bad_wr is the faulty receive", "%p", (void *)rbad);
	/* Full queues. Nothing leaves the send queue in SQD; providers differ in whether a slot is free again
	 * when its work request completes or when the completion is polled. */
	MUST(to(p.c.qp, IBV_QPS_SQD) == 0);
	for (n = 0; n < p.c.cap.max_send_wr; n++)
		MUST(post(&p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, NULL, 0, 0, 0, n) == 0);
	check_errno(post(&p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, NULL, 0, 0, 0, n), ENOMEM,
		    "post_send to a full queue");
	MUST(to(p.c.qp, IBV_QPS_RTS) == 0);
	for (n = 0; n < p.c.cap.max_send_wr; n++)
		MUST(poll_one(p.c.scq).status == IBV_WC_SUCCESS);
	check_errno(post(&p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, NULL, 0, 0, 0, n), 0,
		    "post_send when completions have been polled");
	want_wc(p.c.scq, IBV_WC_SUCCESS, "and it completes");
	for (n = 0; n < p.s.cap.max_recv_wr; n++)
		MUST(post_recv(&p.s, NULL, 0, n) == 0);
	check_errno(post_recv(&p.s, NULL, 0, n), ENOMEM, "post_recv to a full queue");
	free(sges);
	ibv_dereg_mr(mr);
	pair_close(&p);
}

/* --------------------------------------------------------------- protection */

/* One bad local scatter/gather entry; each costs its queue pair. */
static void local_fault(const char *what, int fault)
{
	struct pair p;
	struct ibv_mr *good, *foreign, *readonly, *target;
	struct ibv_sge sge, ok;
	enum ibv_wr_opcode op = IBV_WR_SEND;
	char name[128];
	struct ibv_wc wc;

	pair_open(&p);
	good = reg(&p.c, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	readonly = reg(&p.c, area, 4096, 0);
	foreign = reg(&p.s, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	target = reg(&p.s, area + 8192, 4096, REMOTE_ALL);
	ok = sge_of(good, 0, 64);
	sge = ok;
	switch (fault) {
	case 0: sge.lkey ^= 0x5a5a5a5a; break;
	case 1: sge.lkey = foreign->lkey; break;
	case 2: sge.addr += 4096 - 63; break;
	case 3: sge.addr -= 1; break;
	case 4: sge.addr = UINT64_MAX - 10; break;
	case 5: op = IBV_WR_RDMA_READ; sge.lkey = readonly->lkey; break;
	case 6: op = IBV_WR_RDMA_WRITE; sge.lkey ^= 0x5a5a5a5a; break;
	case 7: ibv_dereg_mr(good); good = NULL; break;
	}
	MUST(post_recv(&p.c, NULL, 0, 30) == 0);
	snprintf(name, sizeof name, "%s is accepted when posted", what);
	check_errno(post(&p.c, op, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)area + 8192, target->rkey, 1), 0, name);
	snprintf(name, sizeof name, "%s completes with LOC_PROT_ERR", what);
	wc = want_wc(p.c.scq, IBV_WC_LOC_PROT_ERR, name);
	snprintf(name, sizeof name, "%s: wr_id and qp_num are right", what);
	check(wc.wr_id == 1 && wc.qp_num == p.c.qp->qp_num, name, "%d of %x", (int)wc.wr_id, wc.qp_num);
	snprintf(name, sizeof name, "%s: the receive is flushed", what);
	want_wc(p.c.rcq, IBV_WC_WR_FLUSH_ERR, name);
	check_terminated(&p, what);
	if (good)
		ibv_dereg_mr(good);
	ibv_dereg_mr(readonly);
	ibv_dereg_mr(foreign);
	ibv_dereg_mr(target);
	pair_close(&p);
}

static void local_protection(void)
{
	local_fault("a send with a wrong lkey", 0);
	local_fault("a send with another PD's lkey", 1);
	local_fault("a send beyond its region", 2);
	local_fault("a send from before its region", 3);
	local_fault("a send that wraps", 4);
	local_fault("a read into a region without local write", 5);
	local_fault("a write with a wrong lkey", 6);
	local_fault("a send from a deregistered region", 7);
}

/* A receive that cannot take the message. */
static void receive_fault(const char *what, int fault, enum ibv_wc_status status)
{
	struct pair p;
	struct ibv_mr *from, *into;
	struct ibv_sge sge, rsge;
	char name[128];

	pair_open(&p);
	from = reg(&p.c, area, 4096, 0);
	into = reg(&p.s, area + 8192, 4096, fault == 1 ? 0 : IBV_ACCESS_LOCAL_WRITE);
	memset(area + 8192, 0xee, 4096);
	sge = sge_of(from, 0, 64);
	rsge = sge_of(into, 0, fault == 2 ? 63 : 64);
	if (fault == 0)
		rsge.lkey ^= 0x5a5a5a5a;
	MUST(post_recv(&p.s, &rsge, 1, 40) == 0);
	MUST(post_recv(&p.s, NULL, 0, 41) == 0);
	MUST(post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 1) == 0);
	snprintf(name, sizeof name, "%s: completes with %s", what, ibv_wc_status_str(status));
	check(want_wc(p.s.rcq, status, name).wr_id == 40, "it is the oldest receive", "another");
	snprintf(name, sizeof name, "%s: the next receive is flushed", what);
	want_wc(p.s.rcq, IBV_WC_WR_FLUSH_ERR, name);
	snprintf(name, sizeof name, "%s: nothing behind the buffer is touched", what);
	check((unsigned char)area[8192 + (fault == 2 ? 63 : 0)] == 0xee, name, "changed");
	check_terminated(&p, what);
	ibv_dereg_mr(from);
	ibv_dereg_mr(into);
	pair_close(&p);
}

static void receive_protection(void)
{
	receive_fault("a receive with a wrong lkey", 0, IBV_WC_LOC_PROT_ERR);
	receive_fault("a receive into a region without local write", 1, IBV_WC_LOC_PROT_ERR);
	receive_fault("a receive smaller than the message", 2, IBV_WC_LOC_LEN_ERR);
}

/* A read or write of what the peer does not offer. */
static void remote_fault(enum ibv_wr_opcode op, const char *what, int fault)
{
	bool is_read = op == IBV_WR_RDMA_READ;
	const char *verb = is_read ? "read" : "write";
	struct pair p;
	struct ibv_mr *local, *target, *foreign, *less;
	struct ibv_sge sge;
	uint64_t remote = (uintptr_t)area + 8192 + 1024;
	uint32_t rkey;
	size_t offset, changed = 0;
	char name[128];
	int type;

	pair_open(&p);
	memset(area, 0x11, 4096);
	memset(area + 8192, 0xee, 4096);
	local = reg(&p.c, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	target = reg(&p.s, area + 8192 + 1024, 1024, REMOTE_ALL);
	foreign = reg(&p.c, area + 8192 + 1024, 1024, REMOTE_ALL);
	less = reg(&p.s, area + 8192 + 1024, 1024,
		   IBV_ACCESS_LOCAL_WRITE | (is_read ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ));
	rkey = target->rkey;
	switch (fault) {
	case 0: rkey ^= 0x5a5a5a5a; break;
	case 1: rkey = foreign->rkey; break;
	case 2: remote += 1024 - 63; break;
	case 3: remote -= 1; break;
	case 4: remote = UINT64_MAX - 10; break;
	case 5: rkey = less->rkey; break;
	case 6: ibv_dereg_mr(target); target = NULL; break;
	case 7: MUST(ibv_rereg_mr(target, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == 0); break;
	}
	sge = sge_of(local, 0, 64);
	MUST(post_recv(&p.c, NULL, 0, 50) == 0);
	MUST(post_recv(&p.s, NULL, 0, 51) == 0);
	MUST(post(&p.c, op, IBV_SEND_SIGNALED, &sge, 1, remote, rkey, 1) == 0);
	if (is_read) {
		snprintf(name, sizeof name, "read %s: the reader's completion is REM_ACCESS_ERR", what);
		want_wc(p.c.scq, IBV_WC_REM_ACCESS_ERR, name);
	}
	snprintf(name, sizeof name, "%s %s: the target has an asynchronous event", verb, what);
	type = qp_event(p.s.qp, LIMIT_MS);
	check(is_error_event(type), name, "event %d", type);
	snprintf(name, sizeof name, "%s %s: the receive of either end is flushed", verb, what);
	want_wc(p.c.rcq, IBV_WC_WR_FLUSH_ERR, name);
	want_wc(p.s.rcq, IBV_WC_WR_FLUSH_ERR, name);
	snprintf(name, sizeof name, "%s %s", verb, what);
	check_terminated(&p, name);
	for (offset = 0; offset < 4096; offset++)
		changed += (unsigned char)area[8192 + offset] != 0xee || area[offset] != 0x11;
	snprintf(name, sizeof name, "%s %s: no byte changed at either end", verb, what);
	check(changed == 0, name, "%zu bytes", changed);
	ibv_dereg_mr(local);
	if (target)
		ibv_dereg_mr(target);
	ibv_dereg_mr(foreign);
	ibv_dereg_mr(less);
	pair_close(&p);
}

static void remote_faults(enum ibv_wr_opcode op)
{
	remote_fault(op, "with a wrong rkey", 0);
	remote_fault(op, "with another PD's rkey", 1);
	remote_fault(op, "beyond the region", 2);
	remote_fault(op, "from before the region", 3);
	remote_fault(op, "that wraps", 4);
	remote_fault(op, "without the right", 5);
	remote_fault(op, "of a deregistered region", 6);
	remote_fault(op, "after rereg_mr took the right away", 7);
}

static void remote_reads(void)
{
	remote_faults(IBV_WR_RDMA_READ);
}

static void remote_writes(void)
{
	remote_faults(IBV_WR_RDMA_WRITE);
}

/* Send with Invalidate: the region is named in the receive's completion and cannot be reached any more; an
 * STag that is not the peer's to invalidate ends the connection. */
static void invalidation(void)
{
	struct pair p;
	struct ibv_mr *local, *target, *foreign;
	struct ibv_sge sge;
	struct ibv_wc wc;
	int type;

	pair_open(&p);
	local = reg(&p.c, area, 4096, IBV_ACCESS_LOCAL_WRITE);
	target = reg(&p.s, area + 8192, 4096, REMOTE_ALL);
	sge = sge_of(local, 0, 64);
	MUST(post_recv(&p.s, NULL, 0, 60) == 0);
	check_errno(post(&p.c, IBV_WR_SEND_WITH_INV, IBV_SEND_SIGNALED, NULL, 0, 0, target->rkey, 1), 0,
		    "post_send of Send with Invalidate");
	wc = want_wc(p.s.rcq, IBV_WC_SUCCESS, "Send with Invalidate arrives");
	check((wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey == target->rkey,
	      "the completion names the invalidated rkey", "flags %x rkey %x", wc.wc_flags, wc.invalidated_rkey);
	want_wc(p.c.scq, IBV_WC_SUCCESS, "and completes at the sender");
	MUST(post(&p.c, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)area + 8192, target->rkey, 2) == 0);
	want_wc(p.c.scq, IBV_WC_REM_ACCESS_ERR, "a read of an invalidated rkey is REM_ACCESS_ERR");
	check_terminated(&p, "read of an invalidated rkey");
	check_errno(ibv_dereg_mr(target), 0, "dereg_mr of an invalidated region");
	ibv_dereg_mr(local);
	pair_close(&p);

	pair_open(&p);
	foreign = reg(&p.c, area, 4096, REMOTE_ALL);
	MUST(post_recv(&p.s, NULL, 0, 61) == 0);
	MUST(post(&p.c, IBV_WR_SEND_WITH_INV, IBV_SEND_SIGNALED, NULL, 0, 0, foreign->rkey, 1) == 0);
	type = qp_event(p.s.qp, LIMIT_MS);
	check(is_error_event(type), "invalidating another PD's rkey is an asynchronous event", "event %d", type);
	check_terminated(&p, "invalidating another PD's rkey");
	ibv_dereg_mr(foreign);
	pair_close(&p);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "device", device }, { "regions", regions }, { "queues", queues }, { "resize", resize },
		{ "states", states }, { "drain", drain }, { "queries", queries }, { "posting", posting },
		{ "local_protection", local_protection }, { "receive_protection", receive_protection },
		{ "remote_reads", remote_reads }, { "remote_writes", remote_writes },
		{ "invalidation", invalidation },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
