/* Queue pairs that are joined with themselves: UCX has one for what a rank sends to itself, NCCL for its flushes.
 *
 *	to_itself [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * UWARP is the command, and LINK is the link that `uwarp stat` must show for each. */
#define _GNU_SOURCE
#define ROOM (1 << 20)			/* more than a ring has */
#include "ends.h"
#include "links.h"

static void begin(struct end *end)
{
	memset(end, 0, sizeof *end);
	end_open(end);
	end_to_rtr(end, end);
	end_to_rts(end);
}

/* Without waiting: the next round moves it to INIT again. */
static void again(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };

	MUST(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == 0 && init(end->qp) == 0);
	end_to_rtr(end, end);
	end_to_rts(end);
}

static struct ibv_wc take(struct ibv_comp_channel *channel, struct ibv_cq *cq)
{
	struct ibv_wc wc = { .status = IBV_WC_GENERAL_ERR };
	struct ibv_cq *of;
	void *context;

	if (!channel) {
		if (!poll_within(cq, &wc, LIMIT_MS))
			die("no completion");
		return wc;
	}
	while (ibv_poll_cq(cq, 1, &wc) == 0) {
		MUST(ibv_req_notify_cq(cq, 0) == 0);
		if (ibv_poll_cq(cq, 1, &wc) == 1)
			break;
		MUST(readable(channel->fd, LIMIT_MS) && ibv_get_cq_event(channel, &of, &context) == 0);
		ibv_ack_cq_events(of, 1);
	}
	return wc;
}

/* Operations of one kind, four at a time, of this length; every byte. */
static bool moves(struct end *end, struct ibv_comp_channel *channel, enum ibv_wr_opcode op, uint32_t length)
{
	enum { COUNT = 4 };
	static unsigned int round;
	uint32_t each = length / COUNT;
	struct ibv_wc wc;
	bool good = true;

	round++;
	for (uint32_t i = 0; i < length; i++)
		end->buffer[i] = (char)(i * 31 + i / 255 + round);
	memset(end->buffer + ROOM, 0, length);
	for (uint32_t i = 0; i < COUNT; i++) {
		uintptr_t from = (uintptr_t)end->buffer + i * each, to = from + ROOM;
		struct ibv_sge sge = { op == IBV_WR_RDMA_READ ? to : from, each, end->mr->lkey };
		struct ibv_sge into = { to, each, end->mr->lkey };
		struct ibv_recv_wr recv = { .sg_list = &into, .num_sge = 1 }, *bad_recv;
		struct ibv_send_wr send = {
			.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = op,
			.wr.rdma = { op == IBV_WR_RDMA_READ ? from : to, end->mr->rkey },
		}, *bad;

		if (op == IBV_WR_SEND)
			MUST(ibv_post_recv(end->qp, &recv, &bad_recv) == 0);
		MUST(ibv_post_send(end->qp, &send, &bad) == 0);
	}
	for (uint32_t i = 0; i < COUNT; i++) {
		wc = take(channel, end->scq);
		good &= wc.status == IBV_WC_SUCCESS && wc.wr_id == i;
		if (op == IBV_WR_SEND) {
			wc = take(channel, end->rcq);
			good &= wc.status == IBV_WC_SUCCESS && wc.byte_len == each;
		}
	}
	return good && !memcmp(end->buffer, end->buffer + ROOM, COUNT * each);
}

static void all_moves(struct end *end, struct ibv_comp_channel *channel)
{
	static const uint32_t lengths[] = { 4, 256, 4000, 16384, 65540, 300004, ROOM };
	int bad[3] = { 0 };

	for (unsigned int round = 0; round < 5; round++)
		for (unsigned int i = 0; i < sizeof lengths / sizeof *lengths; i++) {
			bad[0] += !moves(end, channel, IBV_WR_RDMA_WRITE, lengths[i]);
			bad[1] += !moves(end, channel, IBV_WR_RDMA_READ, lengths[i]);
			bad[2] += !moves(end, channel, IBV_WR_SEND, lengths[i]);
		}
	check(!bad[0], "Writes", "%d went wrong", bad[0]);
	check(!bad[1], "Reads", "%d went wrong", bad[1]);
	check(!bad[2], "Sends", "%d went wrong", bad[2]);
}

static void polled(void)
{
	struct end end;

	open_device();
	begin(&end);
	all_moves(&end, NULL);
	check_links("its", 1);
	end_close(&end);
	MUST(ibv_close_device(context) == 0);
}

/* The program sleeps until something is complete: another thread of the library is woken for that. */
static void sleeping(void)
{
	struct ibv_comp_channel *channel;
	struct end end;

	open_device();
	memset(&end, 0, sizeof end);
	MUST(channel = ibv_create_comp_channel(context));
	MUST(end.scq = end.rcq = ibv_create_cq(context, 4 * DEPTH, NULL, channel, 0));
	MUST(end.pd = ibv_alloc_pd(context));
	end_open(&end);
	end_to_rtr(&end, &end);
	end_to_rts(&end);
	for (unsigned int i = 0; i < 200; i++)
		MUST(moves(&end, channel, i & 1 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, i & 2 ? 64 : ROOM));
	check(true, "every byte", "not");
	check_links("its", 1);
	MUST(ibv_destroy_qp(end.qp) == 0 && ibv_destroy_cq(end.scq) == 0 && ibv_destroy_comp_channel(channel) == 0);
	MUST(ibv_dereg_mr(end.mr) == 0 && ibv_dealloc_pd(end.pd) == 0 && ibv_close_device(context) == 0);
}

/* More of them than a slab has lanes, and again when half of them are gone. */
static void many(void)
{
	enum { MANY = 70 };
	struct end *ends = calloc(MANY, sizeof *ends);
	int bad = 0;

	open_device();
	for (int i = 0; i < MANY; i++)
		begin(&ends[i]);
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < MANY; i++)
			bad += !moves(&ends[i], NULL, IBV_WR_RDMA_WRITE, 1000) || !moves(&ends[i], NULL, IBV_WR_SEND, 40000);
		check_links("all their", MANY);
		for (int i = round; i < MANY; i += 2) {
			end_close(&ends[i]);
			begin(&ends[i]);
		}
	}
	check(!bad, "each has its own bytes", "%d have not", bad);
	for (int i = 0; i < MANY; i++)
		end_close(&ends[i]);
	MUST(ibv_close_device(context) == 0);
	free(ends);
}

/* Work under way when it is moved to RESET or ERR, or destroyed: what it leaves in the lane is nobody's. */
static void in_flight(void)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct end end;
	struct ibv_wc wc;
	int bad = 0;

	open_device();
	begin(&end);
	for (unsigned int round = 0; round < 60; round++) {
		for (uint64_t i = 0; i < 8; i++)
			end_submit(&end, &end, i & 1 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, i, 100000 + round);
		switch (round % 3) {
		case 0:
			again(&end);
			/* What was complete before may be there. */
			while (ibv_poll_cq(end.scq, 1, &wc) > 0)
				;
			break;
		case 1:
			MUST(ibv_modify_qp(end.qp, &error, IBV_QP_STATE) == 0);
			for (uint64_t i = 0; i < 8; i++) {
				wc = take(NULL, end.scq);
				bad += wc.wr_id != i || (wc.status && wc.status != IBV_WC_WR_FLUSH_ERR);
			}
			again(&end);
			break;
		default:
			end_close(&end);
			begin(&end);
		}
		bad += !moves(&end, NULL, IBV_WR_SEND, 2000);
	}
	check(!bad, "each round begins anew", "%d went wrong", bad);
	end_close(&end);
	MUST(ibv_close_device(context) == 0);
}

/* A child has its own. */
static void forked(void)
{
	struct end end;
	int status = -1;
	pid_t child;

	open_device();
	begin(&end);
	MUST(moves(&end, NULL, IBV_WR_SEND, 2000));
	MUST((child = fork()) >= 0);
	if (child == 0) {
		open_device();
		begin(&end);
		_exit(!moves(&end, NULL, IBV_WR_RDMA_WRITE, ROOM) || !moves(&end, NULL, IBV_WR_SEND, 2000));
	}
	check(moves(&end, NULL, IBV_WR_RDMA_READ, ROOM), "the parent goes on", "not");
	MUST(waitpid(child, &status, 0) == child);
	check(status == 0, "the child has its own", "status %x", status);
	check(moves(&end, NULL, IBV_WR_SEND, 300000), "and when the child is gone", "not");
	check_links("its", 1);
	end_close(&end);
	MUST(ibv_close_device(context) == 0);
}

static const struct group groups[] = {
	{ "polled", polled },
	{ "sleeping", sleeping },
	{ "many", many },
	{ "in_flight", in_flight },
	{ "forked", forked },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
