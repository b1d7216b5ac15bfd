/* Immediate data through the C interfaces: ibv_post_send and ibv_poll_cq, ibv_wr_* and the extended
 * completion queue.
 *
 *	immediate ADDRESS [GROUP]
 */
#include "common.h"

#define SIZE 4096
#define IMM 0xdeadbeefu

static struct pair p;
static unsigned char source[SIZE], place[SIZE];
static struct ibv_mr *source_mr, *place_mr;

static void enter_with(struct options o)
{
	pair_open_with(&p, o);
	memset(source, 0x77, sizeof source);
	memset(place, 0, sizeof place);
	MUST(source_mr = ibv_reg_mr(p.c.pd, source, sizeof source, IBV_ACCESS_LOCAL_WRITE));
	MUST(place_mr = ibv_reg_mr(p.s.pd, place, sizeof place, REMOTE_ALL));
}

static void enter(void)
{
	enter_with((struct options){ 0 });
}

static void leave(void)
{
	MUST(ibv_dereg_mr(source_mr) == 0 && ibv_dereg_mr(place_mr) == 0);
	pair_close(&p);
}

static int post_imm(enum ibv_wr_opcode op, unsigned int flags, uint32_t length, uint32_t imm)
{
	struct ibv_sge sge = sge_of(source_mr, 0, length);
	struct ibv_send_wr wr = {
		.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED | flags,
		.imm_data = htonl(imm),
	}, *bad;

	wr.wr.rdma.remote_addr = (uint64_t)(uintptr_t)place;
	wr.wr.rdma.rkey = place_mr->rkey;
	return ibv_post_send(p.c.qp, &wr, &bad);
}

static void receive(uint64_t wr_id, size_t at, size_t length)
{
	struct ibv_sge sge = sge_of(place_mr, at, length);

	MUST(post_recv(&p.s, &sge, 1, wr_id) == 0);
}

static void writing(void)
{
	struct ibv_wc wc;

	enter();
	for (uint32_t length = 0; length <= 1000; length += 500) {
		memset(place, 0, sizeof place);
		receive(length, 2000, 8);
		check_errno(post_imm(IBV_WR_RDMA_WRITE_WITH_IMM, 0, length, IMM + length), 0, "RDMA_WRITE_WITH_IMM");
		wc = want_wc(p.s.rcq, IBV_WC_SUCCESS, "the receive");
		check(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && wc.wr_id == length, "completes as RECV_RDMA_WITH_IMM", "%d",
		      wc.opcode);
		check((wc.wc_flags & IBV_WC_WITH_IMM) && ntohl(wc.imm_data) == IMM + length, "with the immediate data", "%#x",
		      ntohl(wc.imm_data));
		check(wc.byte_len == length, "byte_len is the Write's", "%u", wc.byte_len);
		check(!memcmp(place, source, length) && place[length] == 0 && place[2000] == 0, "the Write's bytes are there, and no others",
		      "%u %u", place[0], place[2000]);
		wc = want_wc(p.c.scq, IBV_WC_SUCCESS, "the Write");
		check(wc.opcode == IBV_WC_RDMA_WRITE && wc.wr_id == 7, "completes as RDMA_WRITE", "%d", wc.opcode);
	}
	leave();
}

static void sending(void)
{
	struct ibv_wc wc;

	enter();
	receive(1, 0, 100);
	receive(2, 0, 100);
	check_errno(post_imm(IBV_WR_SEND_WITH_IMM, 0, 100, 0), 0, "SEND_WITH_IMM of zero");
	wc = want_wc(p.s.rcq, IBV_WC_SUCCESS, "the receive");
	check(wc.opcode == IBV_WC_RECV && wc.byte_len == 100, "completes as RECV", "%d", wc.opcode);
	check((wc.wc_flags & IBV_WC_WITH_IMM) && wc.imm_data == 0, "zero is immediate data too", "%#x", wc.imm_data);
	check(!memcmp(place, source, 100) && place[100] == 0, "the bytes", "%u", place[0]);
	check_errno(post_imm(IBV_WR_SEND, 0, 100, IMM), 0, "a SEND with something in imm_data");
	wc = want_wc(p.s.rcq, IBV_WC_SUCCESS, "the receive");
	check(!(wc.wc_flags & IBV_WC_WITH_IMM), "carries none", "%#x", wc.imm_data);
	for (int n = 0; n < 2; n++) {
		wc = want_wc(p.c.scq, IBV_WC_SUCCESS, "the Send");
		check(wc.opcode == IBV_WC_SEND, "completes as SEND", "%d", wc.opcode);
	}
	leave();
}

static void soliciting(void)
{
	struct ibv_cq *cq;
	void *context;

	enter();
	for (int n = 0; n < 4; n++)
		receive((uint64_t)n, 0, 100);
	MUST(ibv_req_notify_cq(p.s.rcq, 1) == 0);
	MUST(post_imm(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 8, IMM) == 0);
	poll_one(p.s.rcq);
	check(!readable(p.s.cc->fd, QUIET_MS), "unsolicited, it wakes nobody", "an event");
	MUST(post_imm(IBV_WR_RDMA_WRITE_WITH_IMM, IBV_SEND_SOLICITED, 8, IMM) == 0);
	check(readable(p.s.cc->fd, LIMIT_MS), "solicited, it makes an event", "none");
	MUST(ibv_get_cq_event(p.s.cc, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	leave();
}

static void waiting(void)
{
	struct ibv_wc wc;

	enter();
	MUST(post_imm(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 64, IMM) == 0);
	check(!poll_within(p.s.rcq, &wc, QUIET_MS), "without a receive nothing completes", "something");
	receive(3, 0, 0);
	wc = want_wc(p.s.rcq, IBV_WC_SUCCESS, "a receive posted later");
	check(wc.byte_len == 64 && ntohl(wc.imm_data) == IMM, "has length and immediate data", "%u", wc.byte_len);
	leave();
}

/* Toward a peer that is not known to be uwarp, neither is posted, and the connection goes on. */
static void strangers(void)
{
	struct ibv_qp_ex *qp;

	MUST(setenv("UWARP_PEER", "off", 1) == 0);
	enter_with((struct options){ .send_ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM });
	check_errno(post_imm(IBV_WR_RDMA_WRITE_WITH_IMM, 0, 8, IMM), EOPNOTSUPP, "RDMA_WRITE_WITH_IMM to a stranger");
	check_errno(post_imm(IBV_WR_SEND_WITH_IMM, 0, 8, IMM), EOPNOTSUPP, "SEND_WITH_IMM to a stranger");
	MUST(qp = ibv_qp_to_qp_ex(p.c.qp));
	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send_imm(qp, htonl(IMM));
	ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 8);
	check_errno(ibv_wr_complete(qp), EOPNOTSUPP, "wr_send_imm to a stranger");
	receive(1, 0, 8);
	check_errno(post_imm(IBV_WR_SEND, 0, 8, 0), 0, "a Send afterwards");
	want_wc(p.s.rcq, IBV_WC_SUCCESS, "arrives");
	want_wc(p.c.scq, IBV_WC_SUCCESS, "and completes");
	leave();
}

/* Both through the extended interfaces. */
static void extended(void)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_qp_ex *qp;
	struct ibv_cq_ex *cq;

	enter_with((struct options){ .send_ops = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND_WITH_IMM });
	MUST(qp = ibv_qp_to_qp_ex(p.c.qp));
	cq = (struct ibv_cq_ex *)p.s.rcq;
	for (uint64_t n = 0; n < 2; n++)
		receive(n, 0, 100);
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write_imm(qp, place_mr->rkey, (uint64_t)(uintptr_t)place, htonl(IMM));
	ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 50);
	qp->wr_id = 2;
	ibv_wr_send_imm(qp, htonl(IMM + 1));
	ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 60);
	check_errno(ibv_wr_complete(qp), 0, "wr_complete of a Write and a Send with immediate data");
	for (uint32_t n = 0; n < 2; n++) {
		static const enum ibv_wc_opcode opcodes[] = { IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_RECV };
		uint64_t end = now_ms() + LIMIT_MS;
		int ret;

		while ((ret = ibv_start_poll(cq, &attr)) == ENOENT && now_ms() < end)
			sched_yield();
		MUST(ret == 0);
		check(cq->status == IBV_WC_SUCCESS && cq->wr_id == n, "a receive", "%d", cq->status);
		check(ibv_wc_read_opcode(cq) == opcodes[n], "wc_read_opcode", "%d", ibv_wc_read_opcode(cq));
		check(ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM, "wc_read_wc_flags", "%#x", ibv_wc_read_wc_flags(cq));
		check(ntohl(ibv_wc_read_imm_data(cq)) == IMM + n, "wc_read_imm_data", "%#x", ntohl(ibv_wc_read_imm_data(cq)));
		check(ibv_wc_read_byte_len(cq) == 50 + 10 * n, "wc_read_byte_len", "%u", ibv_wc_read_byte_len(cq));
		ibv_end_poll(cq);
	}
	for (uint64_t n = 1; n < 3; n++)
		check(want_wc(p.c.scq, IBV_WC_SUCCESS, "its sender's").wr_id == n, "in order", "not");
	leave();
}

/* ibv_wr_complete is all or nothing: what stands before a wrong request is not carried out either. */
static void together(void)
{
	struct ibv_sge too_many[16] = { 0 };
	struct ibv_qp_ex *qp;
	struct ibv_wc wc;

	enter_with((struct options){ .send_ops = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND, .send_wr = 4 });
	MUST(qp = ibv_qp_to_qp_ex(p.c.qp));
	receive(1, 0, 100);
	memset(place, 0, 8);
	memset(source, 7, 8);
	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(qp, place_mr->rkey, (uint64_t)(uintptr_t)place);
	ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 8);
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 50);
	ibv_wr_send(qp);
	ibv_wr_set_sge_list(qp, p.c.cap.max_send_sge + 1, too_many);
	MUST(p.c.cap.max_send_sge < 16);
	check_errno(ibv_wr_complete(qp), EINVAL, "wr_complete of two good requests and a wrong one");
	ibv_wr_start(qp);
	for (uint32_t i = 0; i <= p.c.cap.max_send_wr; i++) {
		ibv_wr_rdma_write(qp, place_mr->rkey, (uint64_t)(uintptr_t)place);
		ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 8);
	}
	check_errno(ibv_wr_complete(qp), ENOMEM, "of one more than the queue has room for");
	check(!poll_within(p.c.scq, &wc, QUIET_MS) && !poll_within(p.s.rcq, &wc, 0), "none of them completes", "one does");
	check(place[0] == 0, "or is carried out", "%d", place[0]);
	/* All places are free. */
	ibv_wr_start(qp);
	for (uint32_t i = 0; i < p.c.cap.max_send_wr; i++) {
		qp->wr_id = i;
		ibv_wr_rdma_write(qp, place_mr->rkey, (uint64_t)(uintptr_t)place);
		ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 8);
	}
	check_errno(ibv_wr_complete(qp), 0, "as many as it has room for");
	for (uint32_t i = 0; i < p.c.cap.max_send_wr; i++)
		check(want_wc(p.c.scq, IBV_WC_SUCCESS, "each completes").wr_id == i, "in order", "not");
	check(place[0] == 7, "and is carried out", "%d", place[0]);
	/* In the error state each is flushed. */
	MUST(to(p.c.qp, IBV_QPS_ERR) == 0);
	ibv_wr_start(qp);
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, source_mr->lkey, (uint64_t)(uintptr_t)source, 8);
	ibv_wr_send(qp);
	ibv_wr_set_sge_list(qp, p.c.cap.max_send_sge + 1, too_many);
	check_errno(ibv_wr_complete(qp), EINVAL, "a wrong one in ERR");
	check(!poll_within(p.c.scq, &wc, QUIET_MS), "none is flushed", "one is");
	leave();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "writing", writing }, { "sending", sending }, { "soliciting", soliciting }, { "waiting", waiting },
		{ "strangers", strangers }, { "extended", extended }, { "together", together },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
