/* A program of 2006: linked against version 1.0 of libibverbs' interface, whose structures were other ones.
 *
 *	old [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen" */
#include <pthread.h>

#include "common.h"

#define OLD(ret, name, ...) \
	ret old_##name(__VA_ARGS__); \
	__asm__(".symver old_" #name ",ibv_" #name "@IBVERBS_1.0")

struct old_context;
struct old_device;
struct old_pd { struct old_context *context; uint32_t handle; };
struct old_mr { struct old_context *context; struct old_pd *pd; uint32_t handle, lkey, rkey; };
struct old_ah { struct old_context *context; struct old_pd *pd; uint32_t handle; };
struct old_cq {
	struct old_context *context;
	void *cq_context;
	uint32_t handle;
	int cqe;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t comp_events_completed, async_events_completed;
};
struct old_srq {
	struct old_context *context;
	void *srq_context;
	struct old_pd *pd;
	uint32_t handle;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};
struct old_qp {
	struct old_context *context;
	void *qp_context;
	struct old_pd *pd;
	struct old_cq *send_cq, *recv_cq;
	struct old_srq *srq;
	uint32_t handle, qp_num;
	enum ibv_qp_state state;
	enum ibv_qp_type qp_type;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};
struct old_init {
	void *qp_context;
	struct old_cq *send_cq, *recv_cq;
	struct old_srq *srq;
	struct ibv_qp_cap cap;
	enum ibv_qp_type qp_type;
	int sq_sig_all;
};
struct old_send_wr {
	struct old_send_wr *next;
	uint64_t wr_id;
	struct ibv_sge *sg_list;
	int num_sge;
	enum ibv_wr_opcode opcode;
	int send_flags;
	uint32_t imm_data;
	union {
		struct { uint64_t remote_addr; uint32_t rkey; } rdma;
		struct { uint64_t remote_addr, compare_add, swap; uint32_t rkey; } atomic;
		struct { struct old_ah *ah; uint32_t remote_qpn, remote_qkey; } ud;
	} wr;
};
struct old_recv_wr {
	struct old_recv_wr *next;
	uint64_t wr_id;
	struct ibv_sge *sg_list;
	int num_sge;
};
struct old_context {
	struct old_device *device;
	struct {
		void *before[7];
		int (*poll_cq)(struct old_cq *, int, struct ibv_wc *);
		int (*req_notify_cq)(struct old_cq *, int);
		void *between[7];
		int (*post_srq_recv)(struct old_srq *, struct old_recv_wr *, struct old_recv_wr **);
		void *queue_pairs[4];
		int (*post_send)(struct old_qp *, struct old_send_wr *, struct old_send_wr **);
		int (*post_recv)(struct old_qp *, struct old_recv_wr *, struct old_recv_wr **);
		void *after[4];
	} ops;
	int cmd_fd, async_fd, num_comp_vectors;
};

OLD(struct old_device **, get_device_list, int *);
OLD(void, free_device_list, struct old_device **);
OLD(const char *, get_device_name, struct old_device *);
OLD(uint64_t, get_device_guid, struct old_device *);
OLD(struct old_context *, open_device, struct old_device *);
OLD(int, close_device, struct old_context *);
OLD(int, get_async_event, struct old_context *, struct ibv_async_event *);
OLD(void, ack_async_event, struct ibv_async_event *);
OLD(int, query_device, struct old_context *, struct ibv_device_attr *);
OLD(int, query_port, struct old_context *, uint8_t, void *);
OLD(int, query_gid, struct old_context *, uint8_t, int, union ibv_gid *);
OLD(int, query_pkey, struct old_context *, uint8_t, int, uint16_t *);
OLD(struct old_pd *, alloc_pd, struct old_context *);
OLD(int, dealloc_pd, struct old_pd *);
OLD(struct old_mr *, reg_mr, struct old_pd *, void *, size_t, int);
OLD(int, dereg_mr, struct old_mr *);
OLD(struct old_cq *, create_cq, struct old_context *, int, void *, struct ibv_comp_channel *, int);
OLD(int, resize_cq, struct old_cq *, int);
OLD(int, destroy_cq, struct old_cq *);
OLD(int, get_cq_event, struct ibv_comp_channel *, struct old_cq **, void **);
OLD(void, ack_cq_events, struct old_cq *, unsigned int);
OLD(struct old_srq *, create_srq, struct old_pd *, struct ibv_srq_init_attr *);
OLD(int, modify_srq, struct old_srq *, struct ibv_srq_attr *, int);
OLD(int, query_srq, struct old_srq *, struct ibv_srq_attr *);
OLD(int, destroy_srq, struct old_srq *);
OLD(struct old_qp *, create_qp, struct old_pd *, struct old_init *);
OLD(int, query_qp, struct old_qp *, struct ibv_qp_attr *, int, struct old_init *);
OLD(int, modify_qp, struct old_qp *, struct ibv_qp_attr *, int);
OLD(int, destroy_qp, struct old_qp *);
OLD(struct old_ah *, create_ah, struct old_pd *, struct ibv_ah_attr *);
OLD(int, destroy_ah, struct old_ah *);
OLD(int, attach_mcast, struct old_qp *, union ibv_gid *, uint16_t);
OLD(int, detach_mcast, struct old_qp *, union ibv_gid *, uint16_t);

static struct old_device **list;
static struct old_context *context;
static union ibv_gid gid;
static struct old_pd *pd;
static struct old_mr *mr;
static char buffer[8192];

static void start(void)
{
	int count = 0;

	MUST(list = old_get_device_list(&count));
	check(count == 1 && list[0] && !list[1], "a list of one device", "%d", count);
	check(!strcmp(old_get_device_name(list[0]), "uwarp0") && old_get_device_guid(list[0]), "with name and GUID", "%s",
	      old_get_device_name(list[0]));
	MUST(context = old_open_device(list[0]));
	MUST(old_query_gid(context, 1, 0, &gid) == 0);
	MUST(pd = old_alloc_pd(context));
	MUST(mr = old_reg_mr(pd, buffer, sizeof buffer, REMOTE_ALL));
	check(mr->lkey && mr->rkey && mr->pd == pd && mr->context == context, "a region with its keys", "not");
}

static void finish(void)
{
	check(old_dereg_mr(mr) == 0 && old_dealloc_pd(pd) == 0 && old_close_device(context) == 0, "all is given back", "not");
	old_free_device_list(list);
}

static struct ibv_wc one(struct old_cq *cq)
{
	uint64_t end = now_ms() + LIMIT_MS;
	struct ibv_wc wc;

	while (context->ops.poll_cq(cq, 1, &wc) != 1)
		if (now_ms() > end)
			die("no completion");
	return wc;
}

static struct old_qp *queue_pair(enum ibv_qp_type type, struct old_cq *cq, struct old_srq *srq, void *own)
{
	struct old_init init = {
		.qp_context = own, .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type, .sq_sig_all = 1,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	struct old_qp *qp;

	MUST(qp = old_create_qp(pd, &init));
	if (type == IBV_QPT_UD)
		MUST(old_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	attr.qp_access_flags = REMOTE_ALL;
	if (type == IBV_QPT_RC)
		MUST(old_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	return qp;
}

static void up(struct old_qp *qp, struct old_qp *peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp_num, .max_dest_rd_atomic = 4,
		.min_rnr_timer = 12, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 7 } },
	};

	MUST(old_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	MUST(old_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			   IBV_QP_MAX_QP_RD_ATOMIC) == 0);
}

static void connected(void)
{
	char port[128] = { 0 };
	struct ibv_device_attr device = { 0 };
	struct ibv_comp_channel *channel;
	struct old_cq *cq, *other, *told;
	struct old_qp *a, *b;
	struct old_init init;
	struct ibv_qp_attr attr;
	uint16_t pkey = 0;
	void *own;
	int mine, yours;

	start();
	check(old_query_device(context, &device) == 0 && device.max_qp > 100, "query_device", "%d", device.max_qp);
	check(old_query_port(context, 1, port) == 0 && *(enum ibv_port_state *)port == IBV_PORT_ACTIVE, "query_port", "not");
	check(old_query_pkey(context, 1, 0, &pkey) == 0 && pkey == 0xffff, "query_pkey", "%x", pkey);
	/* The same function in both versions. */
	MUST(channel = ibv_create_comp_channel((struct ibv_context *)context));
	MUST(cq = old_create_cq(context, 16, &mine, NULL, 0));
	MUST(other = old_create_cq(context, 16, &yours, channel, 0));
	check(cq->cq_context == &mine && cq->context == context && cq->cqe >= 16, "a completion queue", "not");
	check(old_resize_cq(cq, 32) == 0 && cq->cqe == 32, "that grows", "%d", cq->cqe);
	a = queue_pair(IBV_QPT_RC, cq, NULL, &mine);
	b = queue_pair(IBV_QPT_RC, other, NULL, &yours);
	up(a, b);
	up(b, a);
	check(a->state == IBV_QPS_RTS && a->qp_context == &mine, "a queue pair in RTS", "%d", a->state);
	check(old_query_qp(b, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_RTS && init.send_cq == other &&
	      init.qp_context == &yours && !init.srq, "query_qp", "%d", attr.qp_state);
	struct ibv_sge to = { (uintptr_t)buffer + 4096, 64, mr->lkey }, from = { (uintptr_t)buffer, 7, mr->lkey };
	struct old_recv_wr receive = { .wr_id = 1, .sg_list = &to, .num_sge = 1 }, *bad_receive;
	struct old_send_wr write = {
		.wr_id = 2, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { (uintptr_t)buffer + 2048, mr->rkey },
	}, send = { .next = &write, .wr_id = 3, .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .imm_data = 5 }, *bad;

	memcpy(buffer, "of 2006", 7);
	MUST(context->ops.req_notify_cq(other, 0) == 0);
	MUST(context->ops.post_recv(b, &receive, &bad_receive) == 0);
	MUST(context->ops.post_send(a, &send, &bad) == 0);
	check(one(cq).wr_id == 3 && one(cq).wr_id == 2, "a Send and a Write complete", "not");
	MUST(readable(channel->fd, LIMIT_MS) && old_get_cq_event(channel, &told, &own) == 0);
	check(told == other && own == &yours, "an event names the queue and its context", "not");
	old_ack_cq_events(told, 1);
	struct ibv_wc wc = one(other);

	check(wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS && wc.imm_data == 5, "the receive", "%lu, %d", wc.wr_id, wc.status);
	check(!memcmp(buffer + 4096, "of 2006", 7) && !memcmp(buffer + 2048, "of 2006", 7), "both brought their bytes", "not");
	write.opcode = 77;
	write.next = NULL;
	send.next = &write;
	check(context->ops.post_send(a, &send, &bad) == EINVAL && bad == &write, "the list stops at a bad one", "not");
	check(old_destroy_cq(cq) == EBUSY, "a queue in use: EBUSY", "not");
	MUST(old_destroy_qp(a) == 0 && old_destroy_qp(b) == 0 && old_destroy_cq(cq) == 0 && old_destroy_cq(other) == 0);
	MUST(ibv_destroy_comp_channel(channel) == 0);
	finish();
}

static void shared(void)
{
	struct ibv_srq_init_attr init = { .srq_context = &init, .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .srq_limit = 1 };
	struct ibv_async_event event;
	struct old_srq *srq;
	struct old_cq *cq;
	struct old_qp *a, *b;

	start();
	MUST(srq = old_create_srq(pd, &init));
	MUST(cq = old_create_cq(context, 16, NULL, NULL, 0));
	a = queue_pair(IBV_QPT_RC, cq, NULL, NULL);
	b = queue_pair(IBV_QPT_RC, cq, srq, NULL);
	up(a, b);
	up(b, a);
	struct ibv_sge sge = { (uintptr_t)buffer, 8, mr->lkey };
	struct old_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad_receive;
	struct old_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	MUST(context->ops.post_srq_recv(srq, &receive, &bad_receive) == 0);
	check(old_modify_srq(srq, &attr, IBV_SRQ_LIMIT) == 0, "modify_srq", "not");
	check(old_query_srq(srq, &attr) == 0 && attr.srq_limit == 1, "query_srq", "%u", attr.srq_limit);
	MUST(context->ops.post_send(a, &send, &bad) == 0);
	one(cq);
	one(cq);
	MUST(readable(context->async_fd, LIMIT_MS) && old_get_async_event(context, &event) == 0);
	check(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && (void *)event.element.srq == srq, "its event names it", "%d",
	      event.event_type);
	old_ack_async_event(&event);
	MUST(old_destroy_qp(a) == 0 && old_destroy_qp(b) == 0);
	check(old_destroy_srq(srq) == 0, "destroy_srq", "not");
	MUST(old_destroy_cq(cq) == 0);
	finish();
}

static void datagrams(void)
{
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
	union ibv_gid group;
	struct old_ah *ah;
	struct old_cq *cq;
	struct old_qp *qp;
	struct ibv_wc wc;

	start();
	MUST(cq = old_create_cq(context, 16, NULL, NULL, 0));
	qp = queue_pair(IBV_QPT_UD, cq, NULL, NULL);
	MUST(old_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	attr.qp_state = IBV_QPS_RTS;
	MUST(old_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	to.grh.dgid = gid;
	MUST(ah = old_create_ah(pd, &to));
	struct ibv_sge in = { (uintptr_t)buffer + 4096, 100, mr->lkey }, out = { (uintptr_t)buffer, 9, mr->lkey };
	struct old_recv_wr receive = { .wr_id = 1, .sg_list = &in, .num_sge = 1 }, *bad_receive;
	struct old_send_wr send = {
		.wr_id = 2, .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .wr.ud = { ah, qp->qp_num, 7 },
	}, *bad;

	memcpy(buffer, "datagrams", 9);
	MUST(context->ops.post_recv(qp, &receive, &bad_receive) == 0);
	MUST(context->ops.post_send(qp, &send, &bad) == 0);
	check(one(cq).wr_id == 2, "a datagram to itself", "not");
	wc = one(cq);
	check(wc.wr_id == 1 && wc.byte_len == 49 && !memcmp(buffer + 4096 + 40, "datagrams", 9), "comes", "%u", wc.byte_len);
	MUST(inet_pton(AF_INET6, "::ffff:239.55.9.9", &group) == 1);
	check(old_attach_mcast(qp, &group, 0) == 0 && old_detach_mcast(qp, &group, 0) == 0, "in a group and out of it", "%m");
	check(old_destroy_ah(ah) == 0, "destroy_ah", "not");
	MUST(old_destroy_qp(qp) == 0 && old_destroy_cq(cq) == 0);
	finish();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = { { "connected", connected }, { "shared", shared }, { "datagrams", datagrams } };

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
