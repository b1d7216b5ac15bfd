/* One queue pair of a program that brings it up by number, on command: both ends of an honest pair are such
 * processes, so one of them can be killed and its ports taken (tests/hostile/by_number.rs).
 *
 *	named ADDRESS		commands on standard input
 *
 * Commands, each answered with "done ERRNO": "rtr QPN ADDRESS RQ_PSN", "rts SQ_PSN TIMEOUT RETRIES",
 * "send TEXT", "reset" (and INIT). Numbers are decimal. It prints "name QPN" first, then "sent STATUS" and
 * "received TEXT" when they complete. Two receives are posted after each reset. */
#include "ends.h"
#include "told.h"

static struct end end;
static uint8_t sgid_index;

static int rtr(uint32_t qpn, const char *peer, uint32_t psn)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn, .rq_psn = psn,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = sgid_index, .hop_limit = 7 } },
	};

	attr.ah_attr.grh.dgid = gid_of(peer);
	return ibv_modify_qp(end.qp, &attr, RTR_MASK);
}

static int rts(uint32_t psn, unsigned int timeout, unsigned int retries)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS, .timeout = (uint8_t)timeout, .retry_cnt = (uint8_t)retries, .rnr_retry = 7,
		.sq_psn = psn, .max_rd_atomic = 4,
	};

	return ibv_modify_qp(end.qp, &attr, RTS_MASK);
}

static int reset(void)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	int error = ibv_modify_qp(end.qp, &attr, IBV_QP_STATE);

	if (!error)
		error = init(end.qp);
	for (int n = 0; n < 2 && !error; n++)
		end_receive(&end, 1, 200);
	return error;
}

static void command(char *line)
{
	unsigned int a, b, c;
	char text[100];
	int error = 0;

	if (sscanf(line, "rtr %u %99s %u", &a, text, &b) == 3) {
		error = rtr(a, text, b);
	} else if (sscanf(line, "rts %u %u %u", &a, &b, &c) == 3) {
		error = rts(a, b, c);
	} else if (sscanf(line, "send %99s", text) == 1) {
		memset(end.buffer, 0, 200);
		strcpy(end.buffer, text);
		end_submit(&end, &end, IBV_WR_SEND, 2, 200);
	} else if (!strcmp(line, "reset")) {
		error = reset();
	} else {
		die("no command: %s", line);
	}
	printf("done %d\n", error);
}

static void take(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) == 1) {
		if (cq == end.scq)
			printf("sent %d\n", wc.status);
		else if (wc.status == IBV_WC_SUCCESS)
			printf("received %s\n", end.buffer + ROOM);
	}
}

static void completions(void)
{
	take(end.scq);
	take(end.rcq);
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	setvbuf(stdout, NULL, _IOLBF, 0);
	open_device();
	sgid_index = gid_index_of(context, argv[1]);
	end_open_with(&end, NULL);
	MUST(reset() == 0);
	printf("name %u\n", end.qp->qp_num);
	serve_lines(command, completions);
}
