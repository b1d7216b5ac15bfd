/* Work about keys of this end, which needs no peer.
 *
 *	local_work [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen" */
#include "ends.h"

static struct end a, b;
static struct ibv_mr *place;
static struct ibv_mw *mw;

static int bind_mw(uint32_t rkey, uint64_t wr_id)
{
	struct ibv_send_wr wr = { .wr_id = wr_id, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = rkey;
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
		.mr = place, .addr = (uint64_t)(uintptr_t)a.buffer, .length = 64, .mw_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	return ibv_post_send(a.qp, &wr, &bad);
}

static int invalidate(uint32_t rkey, uint64_t wr_id)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey,
	}, *bad;

	return ibv_post_send(a.qp, &wr, &bad);
}

static void completes(const char *name, uint64_t wr_id, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc = { .status = IBV_WC_GENERAL_ERR };

	check(poll_within(a.scq, &wc, 5000) && wc.wr_id == wr_id && wc.status == IBV_WC_SUCCESS && wc.opcode == opcode, name,
	      "%s, %lu", ibv_wc_status_str(wc.status), wc.wr_id);
}

static void enter(void)
{
	open_device();
	end_open(&a);
	end_open(&b);
	MUST(place = ibv_reg_mr(a.pd, a.buffer, ROOM, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	MUST(mw = ibv_alloc_mw(a.pd, IBV_MW_TYPE_2));
}

static void leave(void)
{
	MUST(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(place) == 0);
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

/* The peer is named, and comes later. */
static void before_the_peer(void)
{
	uint32_t rkey;
	struct ibv_wc wc;

	enter();
	end_to_rtr(&a, &b);
	end_to_rts(&a);
	rkey = ibv_inc_rkey(mw->rkey);
	MUST(bind_mw(rkey, 1) == 0);
	completes("C13 a bind completes before the peer is up", 1, IBV_WC_BIND_MW);
	MUST(invalidate(rkey, 2) == 0);
	completes("C13 and so does a local invalidation", 2, IBV_WC_LOCAL_INV);
	/* Behind a Send, it waits for its turn. */
	end_receive(&b, 9, 64);
	end_submit(&a, &b, IBV_WR_SEND, 3, 8);
	rkey = ibv_inc_rkey(rkey);
	MUST(bind_mw(rkey, 4) == 0);
	check(!poll_within(a.scq, &wc, QUIET_MS), "behind a Send that waits for the peer, it waits", "not");
	end_to_rtr(&b, &a);
	end_to_rts(&b);
	completes("the Send", 3, IBV_WC_SEND);
	completes("the bind behind it", 4, IBV_WC_BIND_MW);
	MUST(poll_one(b.rcq).wr_id == 9);
	struct ibv_sge sge = { (uintptr_t)b.buffer, 8, b.mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .wr.rdma = { (uintptr_t)a.buffer, rkey },
	}, *bad;

	MUST(ibv_post_send(b.qp, &wr, &bad) == 0);
	check(poll_one(b.scq).status == IBV_WC_SUCCESS, "a Write through the window", "not");
	leave();
}

/* A wrong one fails, and what is behind it is flushed, without a peer as with one. */
static void wrong(void)
{
	enter();
	end_to_rtr(&a, &b);
	end_to_rts(&a);
	MUST(invalidate(0x12345678, 1) == 0);
	struct ibv_wc wc = poll_one(a.scq);

	check(wc.wr_id == 1 && wc.status == IBV_WC_MW_BIND_ERR, "C13 an invalidation of nothing fails before the peer is up", "%s",
	      ibv_wc_status_str(wc.status));
	end_submit(&a, &b, IBV_WR_SEND, 2, 8);
	wc = poll_one(a.scq);
	check(wc.wr_id == 2 && wc.status == IBV_WC_WR_FLUSH_ERR, "what follows is flushed", "%s", ibv_wc_status_str(wc.status));
	leave();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = { { "before_the_peer", before_the_peer }, { "wrong", wrong } };

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
