/* Extended completion queues, and work requests built call by call. A queue pair in the error state
 * flushes what it is given, which is enough to see it all. */
#include <infiniband/verbs.h>
#include "check.h"

static int move_to(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state, .port_num = 1 };

	return ibv_modify_qp(qp, &attr,
			     state == IBV_QPS_INIT ?
				     IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS :
				     IBV_QP_STATE);
}

int main(void)
{
	struct ibv_context *context = ibv_open_device(ibv_get_device_list(NULL)[0]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 32, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_poll_cq_attr poll_attr = { 0 };
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 4, .max_recv_sge = 1,
			 .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV |
				  IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
	};
	static char buffer[64];
	struct ibv_sge sges[2] = { { .addr = (uintptr_t)buffer, .length = 8 }, { .addr = (uintptr_t)buffer, .length = 8 } };
	struct ibv_data_buf pieces[2] = { { .addr = buffer, .length = 3 }, { .addr = buffer, .length = 4 } };
	static const enum ibv_wc_opcode order[] = { IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ, IBV_WC_SEND };
	struct ibv_cq_ex *cq;
	struct ibv_qp_ex *qpx;
	struct ibv_qp *qp;
	struct ibv_wc wc;

	CHECK(context && pd);
	cq_attr.wc_flags = IBV_WC_EX_WITH_CVLAN;
	REFUSED(ibv_create_cq_ex(context, &cq_attr), EOPNOTSUPP);
	cq_attr.wc_flags = IBV_WC_STANDARD_FLAGS;
	cq = ibv_create_cq_ex(context, &cq_attr);
	CHECK(cq && cq->cqe >= 32);
	attr.send_cq = attr.recv_cq = ibv_cq_ex_to_cq(cq);
	attr.send_ops_flags |= IBV_QP_EX_WITH_TSO;
	REFUSED(ibv_create_qp_ex(context, &attr), EOPNOTSUPP);
	attr.send_ops_flags &= ~IBV_QP_EX_WITH_TSO;
	attr.comp_mask &= ~IBV_QP_INIT_ATTR_PD;
	REFUSED(ibv_create_qp_ex(context, &attr), EINVAL);
	attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
	qp = ibv_create_qp_ex(context, &attr);
	CHECK(qp && attr.cap.max_inline_data >= 64);
	qpx = ibv_qp_to_qp_ex(qp);
	CHECK(qpx);
	CHECK(ibv_start_poll(cq, &poll_attr) == ENOENT);
	CHECK(move_to(qp, IBV_QPS_INIT) == 0 && move_to(qp, IBV_QPS_ERR) == 0);

	/* An aborted batch leaves nothing. */
	ibv_wr_start(qpx);
	qpx->wr_id = 1;
	ibv_wr_send(qpx);
	ibv_wr_abort(qpx);
	/* Nor does one with a mistake in it. */
	ibv_wr_start(qpx);
	ibv_wr_set_sge(qpx, 0, (uintptr_t)buffer, 8);
	CHECK(ibv_wr_complete(qpx) == EINVAL);
	CHECK(ibv_start_poll(cq, &poll_attr) == ENOENT);

	ibv_wr_start(qpx);
	qpx->wr_flags = IBV_SEND_SIGNALED;
	qpx->wr_id = 10;
	ibv_wr_send(qpx);
	ibv_wr_set_sge(qpx, 0, (uintptr_t)buffer, 8);
	qpx->wr_id = 11;
	ibv_wr_rdma_write(qpx, 1, 2);
	ibv_wr_set_inline_data_list(qpx, 2, pieces);
	qpx->wr_id = 12;
	ibv_wr_rdma_read(qpx, 1, 2);
	ibv_wr_set_sge_list(qpx, 2, sges);
	qpx->wr_id = 13;
	ibv_wr_send_inv(qpx, 7);
	ibv_wr_set_inline_data(qpx, buffer, 5);
	CHECK(ibv_wr_complete(qpx) == 0);

	CHECK(ibv_start_poll(cq, &poll_attr) == 0);
	for (int i = 0; i < 4; i++) {
		CHECK(cq->wr_id == 10 + (uint64_t)i && cq->status == IBV_WC_WR_FLUSH_ERR);
		CHECK(ibv_wc_read_qp_num(cq) == qp->qp_num);
		CHECK(ibv_wc_read_opcode(cq) == order[i]);
		CHECK(ibv_wc_read_wc_flags(cq) == 0 && ibv_wc_read_byte_len(cq) == 0);
		CHECK(ibv_next_poll(cq) == (i < 3 ? 0 : ENOENT));
	}
	ibv_end_poll(cq);
	CHECK(ibv_start_poll(cq, &poll_attr) == ENOENT);

	/* Both shapes work on the same objects. */
	CHECK(ibv_post_recv(qp, &(struct ibv_recv_wr){ .wr_id = 20 }, &(struct ibv_recv_wr *){ 0 }) == 0);
	CHECK(ibv_poll_cq(ibv_cq_ex_to_cq(cq), 1, &wc) == 1 && wc.wr_id == 20 && wc.opcode == IBV_WC_RECV);

	CHECK(ibv_destroy_qp(qp) == 0);
	CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0);
	CHECK(ibv_close_device(context) == 0);
	return 0;
}
