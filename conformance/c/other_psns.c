/* Two queue pairs that their program connects by number, with packet sequence numbers that do not fit: the
 * Write that one of them posts fails. */
#include "ends.h"

int main(void)
{
	static struct end ends[2];
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = 5, .max_rd_atomic = 4,
	};

	open_device();
	end_open(&ends[0]);
	end_open(&ends[1]);
	end_to_rtr(&ends[0], &ends[1]);
	end_to_rtr(&ends[1], &ends[0]);
	for (int n = 0; n < 2; n++)
		MUST(ibv_modify_qp(ends[n].qp, &rts, RTS_MASK) == 0);
	end_submit(&ends[0], &ends[1], IBV_WR_RDMA_WRITE, 1, 64);
	want_wc(ends[0].scq, IBV_WC_RETRY_EXC_ERR, "a Write between ends whose numbers do not fit");
	return failures > 0;
}
