/* Queue pairs that their program connects by number and GID, with memory to send and receive. */
#ifndef UWARP_CONFORMANCE_ENDS_H
#define UWARP_CONFORMANCE_ENDS_H

#include "common.h"

#ifndef ROOM
#define ROOM 65536
#endif
#define DEPTH 16

static struct ibv_context *context;
static union ibv_gid own_gid;

/* One end. What is set before end_open() stays: a domain, completion queues. */
struct end {
	struct ibv_pd *pd;
	struct ibv_cq *scq, *rcq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *buffer;			/* twice ROOM: what is sent, what is received */
};

static inline void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0]);
	MUST(context = ibv_open_device(list[0]));
	ibv_free_device_list(list);
	MUST(ibv_query_gid(context, 1, 0, &own_gid) == 0);
}

/* In RESET; with a shared receive queue, whose domain is the end's, or without. */
static inline void end_open_with(struct end *end, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1, .srq = srq,
	};

	if (!end->pd)
		MUST(end->pd = srq ? srq->pd : ibv_alloc_pd(context));
	if (!end->scq)
		MUST(end->scq = ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0));
	if (!end->rcq)
		MUST(end->rcq = ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0));
	MUST(end->buffer = calloc(2, ROOM));
	MUST(end->mr = ibv_reg_mr(end->pd, end->buffer, 2 * ROOM, REMOTE_ALL));
	init.send_cq = end->scq;
	init.recv_cq = end->rcq;
	MUST(end->qp = ibv_create_qp(end->pd, &init));
}

/* To INIT, with all rights for the peer. */
static inline int init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = REMOTE_ALL };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static inline void end_open(struct end *end)
{
	end_open_with(end, NULL);
	MUST(init(end->qp) == 0);
}

static inline void end_close(struct end *end)
{
	bool shared = end->qp->srq;

	MUST(ibv_destroy_qp(end->qp) == 0);
	MUST(ibv_destroy_cq(end->scq) == 0 && ibv_destroy_cq(end->rcq) == 0);
	MUST(ibv_dereg_mr(end->mr) == 0);
	MUST(shared || ibv_dealloc_pd(end->pd) == 0);
	free(end->buffer);
}

#define RTR_MASK (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | \
		  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define RTS_MASK (IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | \
		  IBV_QP_MAX_QP_RD_ATOMIC)

static inline void end_to_rtr(struct end *end, const struct end *peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp->qp_num, .rq_psn = 1,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid, .hop_limit = 7 } },
	};

	MUST(ibv_modify_qp(end->qp, &attr, RTR_MASK) == 0);
}

static inline void end_to_rts(struct end *end)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = 1, .max_rd_atomic = 4,
	};

	MUST(ibv_modify_qp(end->qp, &attr, RTS_MASK) == 0);
}

static inline void ends_connect(struct end *a, struct end *b)
{
	end_to_rtr(a, b);
	end_to_rtr(b, a);
	end_to_rts(a);
	end_to_rts(b);
}

static inline void end_receive(struct end *end, uint64_t wr_id, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)end->buffer + ROOM, length, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(end->qp, &wr, &bad) == 0);
}

static inline void end_submit(struct end *end, struct end *peer, enum ibv_wr_opcode op, uint64_t wr_id, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)end->buffer, length, end->mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = op, .imm_data = htonl(0x01020304),
		.wr.rdma = { (uintptr_t)peer->buffer + ROOM, peer->mr->rkey },
	}, *bad;

	MUST(ibv_post_send(end->qp, &wr, &bad) == 0);
}

#endif
