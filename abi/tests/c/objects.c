/* What can be seen without a connection. */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>
#include "check.h"

static char memory[8192];

static struct ibv_qp_init_attr rc(struct ibv_cq *cq)
{
	return (struct ibv_qp_init_attr){
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.qp_context = memory,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2 },
	};
}

static int move_to(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state, .port_num = 1 };

	return ibv_modify_qp(qp, &attr,
			     state == IBV_QPS_INIT ?
				     IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS :
				     IBV_QP_STATE);
}

static void regions(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context), *other = ibv_alloc_pd(context);
	struct ibv_mw *mw;
	struct ibv_mr *mr, *all;
	void *read_only = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint32_t key;

	CHECK(pd && other && read_only != MAP_FAILED);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr && mr->pd == pd && mr->context == context && mr->addr == memory && mr->length == sizeof(memory));
	CHECK(ibv_dealloc_pd(pd) == EBUSY);
	key = mr->rkey;
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION, other, memory, 10, 0) == 0);
	CHECK(mr->pd == other && mr->length == 10 && mr->rkey != key && mr->lkey == mr->rkey);
	CHECK(ibv_dealloc_pd(other) == EBUSY);
	CHECK(ibv_dealloc_pd(pd) == 0);
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE) ==
	      IBV_REREG_MR_ERR_CMD && errno == EINVAL);
	CHECK(ibv_rereg_mr(mr, 1 << 20, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	pd = mr->pd;
	CHECK(ibv_dereg_mr(mr) == 0);

	REFUSED(ibv_reg_mr(pd, memory, 1, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(pd, memory, 1, 1 << 15), EINVAL);
	REFUSED(ibv_reg_mr(pd, read_only, 4096, IBV_ACCESS_LOCAL_WRITE), EFAULT);
	REFUSED(ibv_reg_mr(pd, NULL, 4096, 0), EFAULT);
	REFUSED(ibv_reg_mr(NULL, memory, 1, 0), EINVAL);
	REFUSED(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, 0), EBADF);
	CHECK((mr = ibv_reg_mr(pd, read_only, 4096, IBV_ACCESS_REMOTE_READ)) && ibv_dereg_mr(mr) == 0);
	CHECK((mr = ibv_reg_mr(pd, NULL, 0, IBV_ACCESS_LOCAL_WRITE)) && ibv_dereg_mr(mr) == 0);
	CHECK((mr = ibv_reg_mr(pd, memory, 8, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING)) &&
	      ibv_dereg_mr(mr) == 0);
	CHECK((mr = ibv_reg_mr_iova(pd, memory, 8, 0x1000, IBV_ACCESS_LOCAL_WRITE)) && ibv_dereg_mr(mr) == 0);
	CHECK((all = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND)));
	CHECK(ibv_dereg_mr(all) == 0);
	REFUSED(ibv_alloc_null_mr(pd), EOPNOTSUPP);
	CHECK((mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2)) && ibv_dealloc_mw(mw) == 0);
	REFUSED(ibv_create_ah(pd, &(struct ibv_ah_attr){ 0 }), EINVAL);
	REFUSED(ibv_create_srq(pd, &(struct ibv_srq_init_attr){ 0 }), EINVAL);
	CHECK(ibv_dealloc_pd(pd) == 0);
	munmap(read_only, 4096);
}

static struct ibv_cq *waited_for;
static atomic_int destroyed;

static void *destroy(void *unused)
{
	CHECK(ibv_destroy_cq(waited_for) == 0);
	destroyed = 1;
	return unused;
}

static void queues(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq, *got;
	struct ibv_qp_init_attr attr, init;
	struct ibv_qp_attr now;
	struct ibv_qp *qp;
	struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = 8 };
	struct ibv_recv_wr recv[3] = { { .wr_id = 1, .next = &recv[1], .sg_list = &sge, .num_sge = 1 },
				       { .wr_id = 2, .next = &recv[2], .sg_list = &sge, .num_sge = 1 },
				       { .wr_id = 3, .sg_list = &sge, .num_sge = 1 } };
	struct ibv_recv_wr *bad_recv;
	struct ibv_send_wr send[2] = { { .wr_id = 4, .next = &send[1], .opcode = IBV_WR_SEND },
				       { .wr_id = 5, .opcode = 99 } };
	struct ibv_send_wr *bad_send;
	struct ibv_wc wc[8];
	struct pollfd readable;
	pthread_t thread;
	void *cq_context;

	CHECK(pd && channel);
	REFUSED(ibv_create_cq(context, -1, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(context, 16, NULL, NULL, 1), EINVAL);
	cq = ibv_create_cq(context, 16, memory + 1, channel, 0);
	CHECK(cq && cq->cqe >= 16 && cq->channel == channel && cq->context == context);
	CHECK(ibv_destroy_comp_channel(channel) == EBUSY);
	CHECK(ibv_resize_cq(cq, 32) == 0 && cq->cqe >= 32);

	attr = rc(cq);
	attr.cap.max_send_wr = 1 << 30;
	REFUSED(ibv_create_qp(pd, &attr), EINVAL);
	attr = rc(cq);
	attr.qp_type = IBV_QPT_XRC_SEND;
	REFUSED(ibv_create_qp(pd, &attr), EOPNOTSUPP);
	attr.qp_type = 77;
	REFUSED(ibv_create_qp(pd, &attr), EINVAL);
	attr = rc(cq);
	qp = ibv_create_qp(pd, &attr);
	CHECK(qp && qp->qp_num && qp->qp_num < 0xFFFFFF && qp->state == IBV_QPS_RESET && qp->qp_context == memory);
	CHECK(attr.cap.max_send_wr >= 16 && attr.cap.max_recv_sge >= 2);
	CHECK(ibv_destroy_cq(cq) == EBUSY && ibv_dealloc_pd(pd) == EBUSY);
	CHECK(!ibv_qp_to_qp_ex(qp));

	CHECK(ibv_post_recv(qp, recv, &bad_recv) == EINVAL && bad_recv == recv);
	CHECK(move_to(qp, IBV_QPS_SQD) == EINVAL && qp->state == IBV_QPS_RESET);
	CHECK(move_to(qp, IBV_QPS_INIT) == 0 && qp->state == IBV_QPS_INIT);
	CHECK(ibv_post_send(qp, send, &bad_send) == EINVAL && bad_send == send);
	CHECK(ibv_post_recv(qp, recv, &bad_recv) == 0);
	CHECK(ibv_query_qp(qp, &now, IBV_QP_STATE, &init) == 0);
	CHECK(now.qp_state == IBV_QPS_INIT && now.port_num == 1 && now.cap.max_send_wr == attr.cap.max_send_wr);
	CHECK(init.send_cq == cq && init.qp_context == memory && init.qp_type == IBV_QPT_RC && !init.sq_sig_all);

	/* Flushed receives: completions in order, and one event. */
	CHECK(ibv_poll_cq(cq, 8, wc) == 0);
	CHECK(ibv_req_notify_cq(cq, 0) == 0);
	CHECK(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	REFUSED(ibv_get_cq_event(channel, &got, &cq_context) == 0, EAGAIN);
	readable = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
	CHECK(poll(&readable, 1, 0) == 0);
	CHECK(move_to(qp, IBV_QPS_ERR) == 0);
	CHECK(poll(&readable, 1, 10000) == 1);
	CHECK(ibv_get_cq_event(channel, &got, &cq_context) == 0 && got == cq && cq_context == memory + 1);
	CHECK(ibv_poll_cq(cq, 8, wc) == 3);
	for (int i = 0; i < 3; i++)
		CHECK(wc[i].wr_id == (uint64_t)i + 1 && wc[i].status == IBV_WC_WR_FLUSH_ERR &&
		      wc[i].qp_num == qp->qp_num);
	/* In the error state work requests are taken and flushed; an invalid one is still refused. */
	CHECK(ibv_post_send(qp, send, &bad_send) == EINVAL && bad_send == &send[1]);
	CHECK(ibv_poll_cq(cq, 8, wc) == 1 && wc[0].wr_id == 4 && wc[0].status == IBV_WC_WR_FLUSH_ERR);
	CHECK(poll(&readable, 1, 0) == 0);

	CHECK(move_to(qp, IBV_QPS_RESET) == 0 && move_to(qp, IBV_QPS_INIT) == 0);
	CHECK(ibv_destroy_qp(qp) == 0);

	/* ibv_destroy_cq waits for the acknowledgement of the event above. */
	waited_for = cq;
	CHECK(pthread_create(&thread, NULL, destroy, NULL) == 0);
	usleep(50000);
	CHECK(!destroyed);
	ibv_ack_cq_events(cq, 1);
	CHECK(pthread_join(thread, NULL) == 0 && destroyed);
	CHECK(ibv_destroy_comp_channel(channel) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
}

/* The exported ibv_query_port fills the structure of its old size. */
#undef ibv_query_port
static void old_port(struct ibv_context *context)
{
	struct ibv_port_attr port;
	size_t old = offsetof(struct ibv_port_attr, port_cap_flags2);

	memset(&port, 0x5a, sizeof(port));
	CHECK(ibv_query_port(context, 1, (struct _compat_ibv_port_attr *)&port) == 0);
	CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_ETHERNET);
	for (size_t i = old; i < sizeof(port); i++)
		CHECK(((char *)&port)[i] == 0x5a);
	memset(&port, 0x5a, sizeof(port));
	CHECK(context->ops._compat_query_port(context, 1, (struct _compat_ibv_port_attr *)&port) == 0);
	CHECK(port.gid_tbl_len > 0);
}
#define ibv_query_port(context, port_num, port_attr) ___ibv_query_port(context, port_num, port_attr)

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]), *again = ibv_open_device(list[0]);
	struct ibv_device_attr_ex attr;
	struct ibv_gid_entry gids[64];
	struct ibv_async_event event;
	struct ibv_port_attr port;
	uint16_t pkey;
	int n;

	CHECK(context && again && context != again && context->device == list[0]);
	ibv_free_device_list(list);
	CHECK(fcntl(context->cmd_fd, F_GETFD) == FD_CLOEXEC);
	CHECK(fcntl(context->async_fd, F_SETFL, O_NONBLOCK) == 0);
	REFUSED(ibv_get_async_event(context, &event) == 0, EAGAIN);
	CHECK(ibv_query_device_ex(context, NULL, &attr) == 0 && attr.orig_attr.phys_port_cnt == 1);
	CHECK(ibv_query_device_ex(context, &(struct ibv_query_device_ex_input){ .comp_mask = 1 }, &attr) == EINVAL);
	CHECK(ibv_query_port(context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE && port.gid_tbl_len > 0);
	CHECK(ibv_query_port(context, 2, &port) == EINVAL);
	n = ibv_query_gid_table(context, gids, 64, 0);
	CHECK(n == port.gid_tbl_len || (n == 0 && port.gid_tbl_len == 1));
	for (int i = 0; i < n; i++)
		CHECK(gids[i].gid_index == (uint32_t)i && gids[i].port_num == 1 && gids[i].ndev_ifindex);
	CHECK(ibv_query_gid_table(context, gids, 0, 0) == -EINVAL);
	CHECK(ibv_query_gid_ex(context, 1, 1000, gids, 0) == EINVAL);
	CHECK(ibv_query_pkey(context, 1, 0, &pkey) == 0 && pkey == 0xffff && ibv_get_pkey_index(context, 1, pkey) == 0);
	CHECK(ibv_get_pkey_index(context, 1, 1) == -1);
	REFUSED(ibv_import_device(context->cmd_fd), EOPNOTSUPP);
	old_port(context);
	regions(context);
	queues(context);
	CHECK(ibv_close_device(again) == 0);
	CHECK(ibv_close_device(context) == 0);
	return 0;
}
