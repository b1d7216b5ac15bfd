/* Atomic operations (RFC 7306) through the C interfaces: values, statuses, and sums that are exact whoever
 * else changes the word.
 *
 *	atomics ADDRESS [GROUP]
 */
#include <pthread.h>

#include "common.h"

#define WORDS 64

static struct pair p;
static uint64_t words[WORDS], values[WORDS];
static struct ibv_mr *words_mr, *values_mr;

static void enter_with(struct options o)
{
	pair_open_with(&p, o);
	memset(words, 0, sizeof words);
	memset(values, 0xee, sizeof values);
	MUST(words_mr = ibv_reg_mr(p.s.pd, words, sizeof words, REMOTE_ALL | IBV_ACCESS_REMOTE_ATOMIC));
	MUST(values_mr = ibv_reg_mr(p.c.pd, values, sizeof values, IBV_ACCESS_LOCAL_WRITE));
}

static void leave(void)
{
	MUST(ibv_dereg_mr(words_mr) == 0 && ibv_dereg_mr(values_mr) == 0);
	pair_close(&p);
}

static int post_atomic(struct ibv_qp *qp, enum ibv_wr_opcode op, struct ibv_sge sge, const void *at, uint32_t rkey,
		       uint64_t compare_add, uint64_t swap)
{
	struct ibv_send_wr wr = {
		.wr_id = compare_add, .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED,
	}, *bad;

	wr.wr.atomic.remote_addr = (uint64_t)(uintptr_t)at;
	wr.wr.atomic.rkey = rkey;
	wr.wr.atomic.compare_add = compare_add;
	wr.wr.atomic.swap = swap;
	return ibv_post_send(qp, &wr, &bad);
}

static int add(size_t word, uint64_t n)
{
	return post_atomic(p.c.qp, IBV_WR_ATOMIC_FETCH_AND_ADD, sge_of(values_mr, 0, 8), &words[word], words_mr->rkey, n, 0);
}

static int swap(size_t word, uint64_t from, uint64_t to)
{
	return post_atomic(p.c.qp, IBV_WR_ATOMIC_CMP_AND_SWP, sge_of(values_mr, 0, 8), &words[word], words_mr->rkey, from, to);
}

static void numbers(void)
{
	struct ibv_wc wc;

	enter_with((struct options){ 0 });
	words[1] = 0xfffffffffffffffe;
	check_errno(add(1, 3), 0, "ATOMIC_FETCH_AND_ADD");
	wc = want_wc(p.c.scq, IBV_WC_SUCCESS, "fetch and add");
	check(wc.opcode == IBV_WC_FETCH_ADD && wc.byte_len == 8, "completes as FETCH_ADD of 8 bytes", "%d, %u", wc.opcode, wc.byte_len);
	check(words[1] == 1 && values[0] == 0xfffffffffffffffe, "the sum wraps, the old value is back", "%#llx %#llx",
	      (unsigned long long)words[1], (unsigned long long)values[0]);
	check_errno(swap(1, 1, 77), 0, "ATOMIC_CMP_AND_SWP");
	wc = want_wc(p.c.scq, IBV_WC_SUCCESS, "compare and swap");
	check(wc.opcode == IBV_WC_COMP_SWAP && words[1] == 77 && values[0] == 1, "swaps what is equal", "%d", wc.opcode);
	MUST(swap(1, 1, 99) == 0);
	want_wc(p.c.scq, IBV_WC_SUCCESS, "compare and swap of another value");
	check(words[1] == 77 && values[0] == 77, "does not swap what is not", "%llu", (unsigned long long)words[1]);
	check(words[0] == 0 && words[2] == 0 && values[1] == 0xeeeeeeeeeeeeeeee, "nothing beside it has changed", "it has");
	check_errno(post_atomic(p.c.qp, IBV_WR_ATOMIC_FETCH_AND_ADD, sge_of(values_mr, 0, 4), words, words_mr->rkey, 1, 0),
		    EINVAL, "a place of four bytes for the value");
	leave();
}

static void attributes(void)
{
	struct ibv_device_attr attr;
	struct ibv_device_attr_ex ex;

	enter_with((struct options){ 0 });
	MUST(ibv_query_device(p.c.id->verbs, &attr) == 0 && ibv_query_device_ex(p.c.id->verbs, NULL, &ex) == 0);
	check(attr.atomic_cap == (as_iwarp() ? IBV_ATOMIC_NONE : IBV_ATOMIC_HCA), "atomic_cap", "%d", attr.atomic_cap);
	check(ex.orig_attr.atomic_cap == attr.atomic_cap, "the same of query_device_ex", "%d", ex.orig_attr.atomic_cap);
	check(ex.pci_atomic_caps.fetch_add == 0 && ex.pci_atomic_caps.compare_swap == 0, "no atomics over PCI", "some");
	/* They work in every view between two ends of this library. */
	MUST(add(0, 1) == 0);
	want_wc(p.c.scq, IBV_WC_SUCCESS, "an atomic operation");
	leave();
}

/* Each way to be refused ends the connection, with this status. */
static void refused_with(const char *name, const void *at, uint32_t rkey, int server_access, enum ibv_wc_status status)
{
	struct ibv_qp_attr attr = { .qp_access_flags = server_access };

	if (server_access >= 0)
		MUST(ibv_modify_qp(p.s.qp, &attr, IBV_QP_ACCESS_FLAGS) == 0);
	MUST(post_atomic(p.c.qp, IBV_WR_ATOMIC_FETCH_AND_ADD, sge_of(values_mr, 0, 8), at, rkey, 1, 0) == 0);
	want_wc(p.c.scq, status, name);
	check(words[0] == 0 && words[1] == 0, "nothing has changed", "it has");
	leave();
}

static void refused(void)
{
	struct ibv_mr *reads;

	enter_with((struct options){ 0 });
	refused_with("an address that is not aligned", (char *)words + 4, words_mr->rkey, -1, IBV_WC_REM_INV_REQ_ERR);
	enter_with((struct options){ 0 });
	refused_with("behind the region", words + WORDS, words_mr->rkey, -1, IBV_WC_REM_ACCESS_ERR);
	enter_with((struct options){ 0 });
	refused_with("a queue pair that grants none", words, words_mr->rkey, REMOTE_ALL, IBV_WC_REM_ACCESS_ERR);
	enter_with((struct options){ 0 });
	MUST(reads = ibv_reg_mr(p.s.pd, words, sizeof words, REMOTE_ALL));
	MUST(post_atomic(p.c.qp, IBV_WR_ATOMIC_CMP_AND_SWP, sge_of(values_mr, 0, 8), words, reads->rkey, 0, 1) == 0);
	want_wc(p.c.scq, IBV_WC_REM_ACCESS_ERR, "a region that grants none");
	check(words[0] == 0, "nothing has changed", "it has");
	MUST(ibv_dereg_mr(reads) == 0);
	leave();
}

static void extended(void)
{
	struct ibv_qp_ex *qp;

	enter_with((struct options){
		.send_ops = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
	});
	MUST(qp = ibv_qp_to_qp_ex(p.c.qp));
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_atomic_fetch_add(qp, words_mr->rkey, (uint64_t)(uintptr_t)words, 5);
	ibv_wr_set_sge(qp, values_mr->lkey, (uint64_t)(uintptr_t)values, 8);
	qp->wr_id = 2;
	ibv_wr_atomic_cmp_swp(qp, words_mr->rkey, (uint64_t)(uintptr_t)words, 5, 6);
	ibv_wr_set_sge(qp, values_mr->lkey, (uint64_t)(uintptr_t)(values + 1), 8);
	check_errno(ibv_wr_complete(qp), 0, "wr_complete of a fetch and add and a compare and swap");
	for (uint64_t n = 1; n < 3; n++)
		check(want_wc(p.c.scq, IBV_WC_SUCCESS, "an atomic operation").wr_id == n, "in order", "not");
	check(words[0] == 6 && values[0] == 0 && values[1] == 5, "both have found and left what they should", "%llu",
	      (unsigned long long)words[0]);
	leave();
}

/* One word; both ends of three connections add to it, one of them by compare and swap, and so does the
 * processor. */
#define PAIRS 3
#define EACH 3000

static uint64_t shared __attribute__((aligned(64)));

struct user {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_mr *place_mr, *word_mr;
	uint64_t place[2];
	bool by_swapping;
	unsigned long long lost;
};

static void *by_requests(void *argument)
{
	struct user *u = argument;
	uint64_t found = 0;

	for (unsigned n = 0; n < EACH;) {
		enum ibv_wr_opcode op = u->by_swapping ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD;
		struct ibv_wc wc;

		MUST(post_atomic(u->qp, op, sge_of(u->place_mr, 0, 8), &shared, u->word_mr->rkey, u->by_swapping ? found : 1,
				 found + 1) == 0);
		wc = poll_one(u->cq);
		if (wc.status != IBV_WC_SUCCESS)
			die("an atomic operation: %s", ibv_wc_status_str(wc.status));
		if (u->by_swapping && u->place[0] != found) {
			found = u->place[0];
			u->lost++;
			continue;
		}
		found++;
		n++;
	}
	return NULL;
}

static void *by_processor(void *argument)
{
	for (unsigned n = 0; n < EACH * 10; n++) {
		__atomic_fetch_add(&shared, 1, __ATOMIC_SEQ_CST);
		if (n % 16 == 0)
			sched_yield();
	}
	return argument;
}

static void contended(void)
{
	static struct pair pairs[PAIRS];
	static struct user users[2 * PAIRS];
	pthread_t threads[2 * PAIRS], processor;

	for (size_t n = 0; n < PAIRS; n++) {
		pair_open_with(&pairs[n], (struct options){ 0 });
		for (size_t k = 0; k < 2; k++) {
			struct side *own = k ? &pairs[n].s : &pairs[n].c, *peer = k ? &pairs[n].c : &pairs[n].s;
			struct user *u = &users[2 * n + k];
			struct ibv_qp_attr grant = { .qp_access_flags = REMOTE_ALL | IBV_ACCESS_REMOTE_ATOMIC };

			*u = (struct user){ .qp = own->qp, .cq = own->scq, .by_swapping = n == 0 && k == 0 };
			MUST(ibv_modify_qp(peer->qp, &grant, IBV_QP_ACCESS_FLAGS) == 0);
			MUST(u->place_mr = ibv_reg_mr(own->pd, u->place, sizeof u->place, IBV_ACCESS_LOCAL_WRITE));
			MUST(u->word_mr = ibv_reg_mr(peer->pd, &shared, sizeof shared, REMOTE_ALL | IBV_ACCESS_REMOTE_ATOMIC));
		}
	}
	MUST(pthread_create(&processor, NULL, by_processor, NULL) == 0);
	for (size_t n = 0; n < 2 * PAIRS; n++)
		MUST(pthread_create(&threads[n], NULL, by_requests, &users[n]) == 0);
	for (size_t n = 0; n < 2 * PAIRS; n++)
		MUST(pthread_join(threads[n], NULL) == 0);
	MUST(pthread_join(processor, NULL) == 0);
	check(shared == 2 * PAIRS * EACH + 10 * EACH, "the sum is exact", "%llu, not %d (%llu swaps were tried again)",
	      (unsigned long long)shared, 2 * PAIRS * EACH + 10 * EACH, users[0].lost);
	for (size_t n = 0; n < 2 * PAIRS; n++)
		MUST(ibv_dereg_mr(users[n].place_mr) == 0 && ibv_dereg_mr(users[n].word_mr) == 0);
	for (size_t n = 0; n < PAIRS; n++)
		pair_close(&pairs[n]);
}

#define ROUNDS 20
#define READS 3000

/* C12: the order of requests that are posted together without a fence. */
static void order(void)
{
	struct ibv_sge at[3];
	struct ibv_send_wr wr[3] = { 0 }, *bad;
	struct ibv_wc wc;
	int taken = 0, later = 0;

	enter_with((struct options){ 0 });
	for (int i = 0; i < 3; i++) {
		at[i] = sge_of(values_mr, 16 * i, 8);
		wr[i] = (struct ibv_send_wr){
			.sg_list = &at[i], .num_sge = 1, .send_flags = IBV_SEND_SIGNALED, .next = i < 2 ? &wr[i + 1] : NULL,
		};
	}
	/* A lock: looked at, taken, freed by a Write of 0. */
	wr[0].opcode = IBV_WR_RDMA_READ;
	wr[0].wr.rdma.remote_addr = (uint64_t)(uintptr_t)&words[0];
	wr[0].wr.rdma.rkey = words_mr->rkey;
	wr[1].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	wr[1].wr.atomic.remote_addr = (uint64_t)(uintptr_t)&words[0];
	wr[1].wr.atomic.rkey = words_mr->rkey;
	wr[1].wr.atomic.compare_add = 1;
	wr[2].opcode = IBV_WR_RDMA_WRITE;
	wr[2].wr.rdma.remote_addr = (uint64_t)(uintptr_t)&words[0];
	wr[2].wr.rdma.rkey = words_mr->rkey;
	values[4] = 0;
	for (int n = 0; n < ROUNDS; n++) {
		MUST(ibv_post_send(p.c.qp, wr, &bad) == 0);
		for (int i = 0; i < 3; i++)
			MUST((wc = poll_one(p.c.scq)).status == IBV_WC_SUCCESS);
		taken += words[0] != 0;
	}
	check(taken == 0, "C12 an atomic comes before the Write behind it, though a Read waits", "%d of %d locks stayed taken",
	      taken, ROUNDS);
	/* A short Read, and a Write of the same place behind it. */
	at[0] = sge_of(values_mr, 128, 64);
	at[1] = sge_of(values_mr, 256, 64);
	wr[0].next = &wr[1];
	wr[1].opcode = IBV_WR_RDMA_WRITE;
	wr[1].wr.rdma.remote_addr = wr[0].wr.rdma.remote_addr;
	wr[1].wr.rdma.rkey = words_mr->rkey;
	wr[1].next = NULL;
	for (uint64_t n = 1; n <= READS; n++) {
		words[7] = n;
		for (int i = 0; i < 8; i++)
			values[32 + i] = n + 1;
		MUST(ibv_post_send(p.c.qp, wr, &bad) == 0);
		for (int i = 0; i < 2; i++)
			MUST((wc = poll_one(p.c.scq)).status == IBV_WC_SUCCESS);
		later += values[16 + 7] != n;
	}
	check(later == 0, "C12 a short Read does not show the Write behind it", "%d of %d did", later, READS);
	leave();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "numbers", numbers }, { "attributes", attributes }, { "refused", refused }, { "extended", extended },
		{ "contended", contended }, { "order", order },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
