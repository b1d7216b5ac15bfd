/* What uwarp stat counts, done on purpose:
 *
 *   counted ADDRESS
 *
 * Two connections; in the first the client does wrong, in the second the server. Each prints for both of
 * its queue pairs what they must have counted, by number; at last "waiting", and then the queue pairs stay
 * as they are until the program is killed. */
#include "common.h"

#define MUCH (32u << 20)
#define AFTER 2
#define RECEIVES 3

static uint8_t *memory[2];

/* What has come to both of a side's completion queues, `want` of it: how much of it failed, and how much
 * was flushed. */
static void take(struct side *side, int want, int *failed, int *flushed)
{
	uint64_t end = now_ms() + LIMIT_MS;
	struct ibv_wc wc;

	while (want && now_ms() < end) {
		if (ibv_poll_cq(side->scq, 1, &wc) != 1 && ibv_poll_cq(side->rcq, 1, &wc) != 1) {
			sched_yield();
			continue;
		}
		want--;
		*flushed += wc.status == IBV_WC_WR_FLUSH_ERR;
		*failed += wc.status != IBV_WC_SUCCESS && wc.status != IBV_WC_WR_FLUSH_ERR;
	}
	if (want)
		die("%d completions are missing", want);
}

static void tell(const struct side *side, int stalls, int room, int sent, int received, int failed, int flushed)
{
	printf("queue pair %u: receive_stalls %d room_stalls %d terminates_sent %d terminates_received %d failed %d "
	       "flushed %d\n", side->qp->qp_num, stalls, room, sent, received, failed, flushed);
}

static void wrong(struct side *doer, struct side *other)
{
	struct ibv_mr *from, *to;
	struct ibv_sge sge, place;
	struct ibv_wc wc;
	int failed = 0, flushed = 0;

	MUST(from = ibv_reg_mr(doer->pd, memory[0], MUCH, REMOTE_ALL));
	MUST(to = ibv_reg_mr(other->pd, memory[1], MUCH, REMOTE_ALL));
	/* A Send that waits: looking for what it brings finds it without a receive. Behind it more than the
	 * sockets hold. */
	sge = sge_of(from, 0, 64);
	place = sge_of(to, 0, 64);
	MUST(post(doer, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 1) == 0);
	MUST(!poll_within(other->rcq, &wc, QUIET_MS));
	sge = sge_of(from, 0, MUCH);
	MUST(post(doer, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)memory[1], to->rkey, 2) == 0);
	MUST(!poll_within(doer->scq, &wc, QUIET_MS));
	MUST(post_recv(other, &place, 1, 3) == 0);
	MUST(poll_one(other->rcq).status == IBV_WC_SUCCESS);
	MUST(poll_one(doer->scq).status == IBV_WC_SUCCESS && poll_one(doer->scq).status == IBV_WC_SUCCESS);
	/* A Write that may not be: the peer says so, and all that is posted is flushed. */
	sge = sge_of(from, 0, 64);
	for (int n = 0; n < RECEIVES; n++)
		MUST(post_recv(other, &place, 1, 4) == 0);
	MUST(post_recv(doer, &sge, 1, 5) == 0);
	MUST(post(doer, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)memory[1], to->rkey ^ 1, 6) == 0);
	for (int n = 0; n < AFTER; n++)
		MUST(post(doer, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)memory[1], to->rkey, 7) == 0);
	take(doer, 1 + AFTER + 1, &failed, &flushed);
	check(failed == 1, "one work request fails", "%d, and %d are flushed", failed, flushed);
	tell(doer, 0, 1, 0, 1, failed, flushed);
	failed = flushed = 0;
	take(other, RECEIVES, &failed, &flushed);
	check(failed == 0 && flushed == RECEIVES, "the receives are flushed", "%d, and %d fail", flushed, failed);
	tell(other, 1, 0, 1, 0, failed, flushed);
}

int main(int argc, char **argv)
{
	struct pair p[2];

	if (argc > 1)
		address = argv[1];
	MUST((memory[0] = calloc(1, MUCH)) && (memory[1] = calloc(1, MUCH)));
	pair_open(&p[0]);
	pair_open(&p[1]);
	wrong(&p[0].c, &p[0].s);
	wrong(&p[1].s, &p[1].c);
	printf("waiting\n");
	fflush(stdout);
	while (!failures)
		pause();
	return 1;
}
