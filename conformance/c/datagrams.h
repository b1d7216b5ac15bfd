/* What the C programs of datagrams share: queue pairs of one process with memory of their own. */
#ifndef UWARP_CONFORMANCE_DATAGRAMS_H
#define UWARP_CONFORMANCE_DATAGRAMS_H

#include "common.h"

#define QKEY 0x11111111u
#define GRH 40
#define LARGEST 4096
#define SLOT (GRH + LARGEST)
#define SLOTS 64

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static int sgid_index;
static union ibv_gid own_gid;

/* A datagram queue pair with memory of its own: received messages in the lower half, sent ones in the upper. */
struct end {
	struct ibv_qp *qp;
	struct ibv_comp_channel *cc;
	struct ibv_cq *scq, *rcq;
	struct ibv_mr *mr;
	unsigned char *memory;
	struct ibv_ah *ah;
};

static inline void open_device(void)
{
	struct ibv_device **list;

	MUST(list = ibv_get_device_list(NULL));
	MUST(list[0] && (ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(pd = ibv_alloc_pd(ctx));
	MUST(ibv_query_gid(ctx, 1, sgid_index, &own_gid) == 0);
}

static inline void close_device(void)
{
	MUST(ibv_dealloc_pd(pd) == 0);
	MUST(ibv_close_device(ctx) == 0);
}

/* The handle of this host, at the GID that is in use. */
static inline struct ibv_ah_attr way_home(void)
{
	return (struct ibv_ah_attr){
		.is_global = 1, .port_num = 1,
		.grh = { .dgid = own_gid, .sgid_index = (uint8_t)sgid_index, .hop_limit = 64 },
	};
}

static inline int ud_to_init(struct ibv_qp *qp, uint32_t qkey)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = qkey };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
}

static inline int to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .sq_psn = 0x123456 };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

static inline void up(struct ibv_qp *qp, uint32_t qkey)
{
	MUST(ud_to_init(qp, qkey) == 0);
	MUST(to(qp, IBV_QPS_RTR) == 0);
	MUST(to_rts(qp) == 0);
}

static inline void end_resources(struct end *e)
{
	struct ibv_ah_attr home = way_home();

	memset(e, 0, sizeof *e);
	MUST(e->cc = ibv_create_comp_channel(ctx));
	MUST(e->scq = ibv_create_cq(ctx, 256, NULL, NULL, 0));
	MUST(e->rcq = ibv_create_cq(ctx, 256, e, e->cc, 0));
	MUST(e->memory = calloc(2 * SLOTS, SLOT));
	MUST(e->mr = ibv_reg_mr(pd, e->memory, 2 * SLOTS * SLOT, IBV_ACCESS_LOCAL_WRITE));
	MUST(e->ah = ibv_create_ah(pd, &home));
}

static inline void end_open_with(struct end *e, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 128 },
		.qp_type = IBV_QPT_UD, .srq = srq,
	};

	end_resources(e);
	init.send_cq = e->scq;
	init.recv_cq = e->rcq;
	MUST(e->qp = ibv_create_qp(pd, &init));
	up(e->qp, QKEY);
}

static inline void end_open(struct end *e)
{
	end_open_with(e, NULL);
}

static inline void end_close(struct end *e)
{
	MUST(!e->qp || ibv_destroy_qp(e->qp) == 0);
	MUST(ibv_destroy_ah(e->ah) == 0);
	MUST(ibv_dereg_mr(e->mr) == 0);
	MUST(ibv_destroy_cq(e->scq) == 0 && ibv_destroy_cq(e->rcq) == 0);
	MUST(ibv_destroy_comp_channel(e->cc) == 0);
	free(e->memory);
}

static inline unsigned char *outgoing(struct end *e)
{
	return e->memory + SLOTS * SLOT;
}

static inline int receive_into(struct end *e, int slot, uint32_t length)
{
	struct ibv_sge sge = sge_of(e->mr, (size_t)slot * SLOT, length);
	struct ibv_recv_wr wr = { .wr_id = (uint64_t)slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_recv(e->qp, &wr, &bad);
}

static inline void receive(struct end *e, int slot)
{
	MUST(receive_into(e, slot, SLOT) == 0);
}

/* A signalled Send of the first bytes that the end has to send. */
static inline struct ibv_send_wr request(struct end *from, struct end *to, struct ibv_sge *sge, uint32_t length)
{
	struct ibv_send_wr wr = {
		.wr_id = length, .sg_list = sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
	};

	*sge = sge_of(from->mr, SLOTS * SLOT, length);
	wr.wr.ud.ah = from->ah;
	wr.wr.ud.remote_qpn = to->qp->qp_num;
	wr.wr.ud.remote_qkey = QKEY;
	return wr;
}

static inline int post_wr(struct end *from, struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;

	return ibv_post_send(from->qp, &wr, &bad);
}

static inline void send_to(struct end *from, struct end *to, uint32_t length)
{
	struct ibv_sge sge;

	MUST(post_wr(from, request(from, to, &sge, length)) == 0);
	if (poll_one(from->scq).status != IBV_WC_SUCCESS)
		die("a Send fails");
}

/* The next message has this length. */
static inline struct ibv_wc want_message(struct end *at, uint32_t length, const char *name)
{
	struct ibv_wc wc = want_wc(at->rcq, IBV_WC_SUCCESS, name);

	check(wc.byte_len == GRH + length, name, "byte_len %u, want %u", wc.byte_len, GRH + length);
	return wc;
}

/* Returns when everything that was sent before has been received or dropped: the queue pairs of a process
 * share a socket. */
static inline void settle(struct end *e)
{
	receive(e, SLOTS - 1);
	send_to(e, e, 0);
	if (poll_one(e->rcq).status != IBV_WC_SUCCESS)
		die("a message to itself fails");
}

static inline void nothing_more(struct end *at, const char *name)
{
	struct ibv_wc wc;

	check(ibv_poll_cq(at->rcq, 1, &wc) == 0, name, "a completion");
}

#endif
