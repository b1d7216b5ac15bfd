/* What queue pairs do first when their program has moved them up itself, and others that it takes back before they are
 * up. The stream of a pair may move to memory meanwhile, and begins anew there.
 *
 *	first_words [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#define ROOM 4096
#include "ends.h"

static struct end ends[2];

static void receive_from(struct end *end, const struct end *peer)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp->qp_num, .rq_psn = 0x123,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid, .hop_limit = 7 } },
	};

	MUST(init(end->qp) == 0);
	MUST(ibv_modify_qp(end->qp, &rtr, RTR_MASK) == 0);
}

static void send_from(struct end *end, uint8_t rnr_retry)
{
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = rnr_retry, .sq_psn = 0x123,
		.max_rd_atomic = 1,
	};

	MUST(ibv_modify_qp(end->qp, &rts, RTS_MASK) == 0);
}

static void pair_begin(uint8_t rnr_retry)
{
	memset(ends, 0, sizeof ends);
	for (int i = 0; i < 2; i++)
		end_open_with(&ends[i], NULL);
	for (int i = 0; i < 2; i++)
		receive_from(&ends[i], &ends[!i]);
	for (int i = 0; i < 2; i++)
		send_from(&ends[i], rnr_retry);
}

static void pair_end(void)
{
	for (int i = 0; i < 2; i++)
		end_close(&ends[i]);
}

static void write_to(struct end *from, const struct end *to, uint32_t lkey)
{
	struct ibv_sge sge = { (uintptr_t)from->buffer, 8, lkey };
	struct ibv_send_wr wr = {
		.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)to->buffer, to->mr->rkey },
	}, *bad;

	MUST(ibv_post_send(from->qp, &wr, &bad) == 0);
}

/* Each end tells the other how often it tries again, whichever of them has opened the stream. */
static void retries(void)
{
	open_device();
	for (int from = 0; from < 2; from++) {
		struct ibv_sge sge;
		struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

		pair_begin(2);
		sge = (struct ibv_sge){ (uintptr_t)ends[from].buffer, 8, ends[from].mr->lkey };
		MUST(ibv_post_send(ends[from].qp, &wr, &bad) == 0);
		want_wc(ends[from].scq, IBV_WC_RNR_RETRY_EXC_ERR, from ? "from the later queue pair" : "from the earlier one");
		pair_end();
	}
}

/* A local error is no business of the peer's. */
static void own_errors(void)
{
	int touched = 0;

	open_device();
	for (int i = 0; i < 20; i++) {
		struct end *from = &ends[i % 2], *to = &ends[!(i % 2)];
		struct ibv_sge sge;
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
		struct ibv_wc wc;

		pair_begin(7);
		sge = (struct ibv_sge){ (uintptr_t)to->buffer, 8, to->mr->lkey };
		MUST(ibv_post_recv(to->qp, &wr, &bad) == 0);
		write_to(from, to, 0xdead);
		MUST(poll_one(from->scq).status == IBV_WC_LOC_PROT_ERR);
		touched += poll_within(to->rcq, &wc, 100) || state_of(to->qp) != IBV_QPS_RTS;
		pair_end();
	}
	check(touched == 0, "its queue pair is as it was", "%d of 20 are not", touched);
}

/* Queue pairs that leave while memory is asked for do not keep others from it. */
static void taken_back(void)
{
	int failed = 0;

	MUST(setenv("UWARP_LINK", "memory", 1) == 0);
	open_device();
	for (int i = 0; i < 80; i++) {
		pair_begin(7);
		usleep((unsigned)rand() % 300);
		for (int k = 0; k < 2; k++)
			MUST(to(ends[k].qp, IBV_QPS_RESET) == 0);
		pair_end();
	}
	/* Longer than a process waits for an answer, and less than it asks nothing more afterwards. */
	sleep(3);
	for (int i = 0; i < 5; i++) {
		pair_begin(7);
		write_to(&ends[0], &ends[1], ends[0].mr->lkey);
		failed += poll_one(ends[0].scq).status != IBV_WC_SUCCESS;
		pair_end();
	}
	check(failed == 0, "others have memory afterwards", "%d of 5 have not", failed);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "retries", retries },
		{ "own_errors", own_errors },
		{ "taken_back", taken_back },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
