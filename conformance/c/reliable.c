/* Queue pairs of reliable datagrams (uwarpdv_create_qp(3)), between two processes and within one.
 *
 *	reliable ADDRESS [GROUP]	the address is not used */
#define _GNU_SOURCE
#include "reliable.h"

/* Messages of these lengths: none, less than a packet, packets, and many of them. */
static const uint32_t lengths[] = { 0, 1, 64, 1300, 1401, 1500, 4096, 65536, 262144, 1000003 };
#define LENGTHS (sizeof lengths / sizeof *lengths)

static unsigned char byte_of(uint32_t seed, size_t at)
{
	return (unsigned char)(at * 7 + at / 251 + seed * 31);
}

static void fill(unsigned char *at, uint32_t length, uint32_t seed)
{
	for (uint32_t i = 0; i < length; i++)
		at[i] = byte_of(seed, i);
}

static size_t first_wrong(const unsigned char *at, uint32_t length, uint32_t seed)
{
	size_t i = 0;

	while (i < length && at[i] == byte_of(seed, i))
		i++;
	return i;
}

/* One after the other, each whole, both ways. */
static void exchange(struct end *e, int fd, bool begins)
{
	uint32_t peer;

	say(fd, e->qp->qp_num);
	peer = hear(fd);
	for (unsigned turn = 0; turn < 2 * LENGTHS; turn++) {
		uint32_t length = lengths[turn / 2];
		struct ibv_wc wc;

		if ((turn % 2 == 0) == begins) {
			hear(fd);
			fill(outgoing(e), length, turn);
			send_to(e, peer, turn, 0, length);
			wc = poll_one(e->scq);
			if (wc.status != IBV_WC_SUCCESS || wc.wr_id != turn)
				check(false, "a Send completes", "%s", ibv_wc_status_str(wc.status));
			say(fd, turn);
		} else {
			memset(e->memory, 0, length + 1);
			receive_at(e, turn, 0, length + 1);
			say(fd, turn);
			wc = poll_one(e->rcq);
			if (wc.status != IBV_WC_SUCCESS || wc.byte_len != length || wc.src_qp != peer || wc.wr_id != turn)
				check(false, "a receive completes", "%s, %u bytes of %u", ibv_wc_status_str(wc.status), wc.byte_len, length);
			if (first_wrong(e->memory, length, turn) != length || e->memory[length])
				check(false, "with its bytes", "byte %zu of %u", first_wrong(e->memory, length, turn), length);
			hear(fd);
		}
	}
	check(!failures, "messages of 0 to 1,000,003 bytes", "see above");
}

static void exchanges(int fd)
{
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	exchange(&e, fd, false);
	end_close(&e);
}

static void lengths_both_ways(void)
{
	struct other other = start(exchanges);
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	exchange(&e, other.fd, true);
	join(other, "the other end, too");
	end_close(&e);
}

#define MANY 5000
#define WINDOW 128
#define SMALL 200

/* Counts how many of the messages came behind a later one; each has its number and its length from it. */
static void take_many(int fd, uint64_t order)
{
	uint32_t late = 0, wrong = 0, last = 0;
	static unsigned char seen[MANY];
	struct end e;

	open_device();
	end_open(&e, (struct how){ .order = order });
	for (unsigned i = 0; i < WINDOW; i++)
		receive_at(&e, i, i * SMALL, SMALL);
	say(fd, e.qp->qp_num);
	for (unsigned i = 0; i < MANY; i++) {
		struct ibv_wc wc = poll_one(e.rcq);
		uint32_t number;

		memcpy(&number, e.memory + wc.wr_id * SMALL, sizeof number);
		wrong += wc.status != IBV_WC_SUCCESS || number >= MANY || wc.byte_len != 4 + number % (SMALL - 4);
		if (number < MANY)
			wrong += seen[number]++;
		late += number < last;
		last = number;
		receive_at(&e, wc.wr_id, wc.wr_id * SMALL, SMALL);
	}
	check(!wrong, "each of 5,000 messages comes once, with its length", "%u are wrong", wrong);
	if (order)
		check(!late, "in the order of the posts", "%u come behind a later one", late);
	say(fd, 0);
	hear(fd);
	end_close(&e);
}

static void take_ordered(int fd)
{
	take_many(fd, UWARPDV_ORDER_ALL);
}

static void take_unordered(int fd)
{
	take_many(fd, 0);
}

static void send_many(void (*takes)(int), uint64_t order)
{
	struct other other = start(takes);
	uint32_t peer, posted = 0, bad = 0;
	struct end e;

	open_device();
	end_open(&e, (struct how){ .order = order });
	peer = hear(other.fd);
	for (unsigned done = 0; done < MANY; done++) {
		struct ibv_wc wc = { .wr_id = posted };

		if (posted < WINDOW) {
			done--;
		} else {
			wc = poll_one(e.scq);
			bad += wc.status != IBV_WC_SUCCESS;
		}
		/* In the place of the one that is done, which need not be the oldest. */
		if (posted < MANY) {
			size_t at = wc.wr_id * SMALL;

			memcpy(outgoing(&e) + at, &posted, sizeof posted);
			send_to(&e, peer, wc.wr_id, at, 4 + posted % (SMALL - 4));
			posted++;
		}
	}
	check(!bad, "5,000 messages, 128 at a time, all succeed", "%u failed", bad);
	hear(other.fd);
	say(other.fd, 0);
	join(other, "the other end is content");
	end_close(&e);
}

static void ordered(void)
{
	send_many(take_ordered, UWARPDV_ORDER_ALL);
}

static void unordered(void)
{
	send_many(take_unordered, 0);
}

/* Has a queue pair, and does what it is told: post a receive of so many bytes; 0: leave. */
static void obeys(int fd)
{
	uint32_t length;
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	say(fd, e.qp->qp_num);
	while ((length = hear(fd))) {
		receive_at(&e, length, 0, length);
		say(fd, length);
	}
	end_close(&e);
}

static void told(struct other other, uint32_t length)
{
	say(other.fd, length);
	if (length)
		hear(other.fd);
}

static void no_receive(void)
{
	struct other other = start(obeys);
	struct end once, patient;
	struct ibv_wc wc;
	uint32_t peer;

	open_device();
	end_open(&once, (struct how){ .rnr_retry = -1 });
	end_open(&patient, (struct how){ 0 });
	peer = hear(other.fd);
	send_to(&once, peer, 1, 0, 100);
	want_wc(once.scq, IBV_WC_RNR_RETRY_EXC_ERR, "without a receive and without retries");
	send_to(&patient, peer, 2, 0, 100);
	usleep(QUIET_MS * 1000);
	check(ibv_poll_cq(patient.scq, 1, &wc) == 0, "with retries without limit it waits", "a completion");
	told(other, 1000);
	want_wc(patient.scq, IBV_WC_SUCCESS, "until there is a receive");
	told(other, 1000);
	send_to(&once, peer, 3, 0, 100);
	want_wc(once.scq, IBV_WC_SUCCESS, "the queue pair that failed goes on");
	told(other, 0);
	join(other, "the other end");
	end_close(&once);
	end_close(&patient);
}

static void refusals(void)
{
	struct other other = start(obeys);
	struct ibv_qp_ex *ex;
	struct ibv_mr *gone;
	struct end e;
	uint32_t peer;

	open_device();
	end_open(&e, (struct how){ 0 });
	ex = ibv_qp_to_qp_ex(e.qp);
	peer = hear(other.fd);
	told(other, 1000);
	send_to(&e, peer, 1, 0, 1001);
	want_wc(e.scq, IBV_WC_REM_INV_REQ_ERR, "a byte more than the receive has");
	send_to(&e, peer, 2, 0, 1000);
	want_wc(e.scq, IBV_WC_SUCCESS, "which stays for the next message");
	send_to(&e, peer + 1, 3, 0, 10);
	want_wc(e.scq, IBV_WC_REM_INV_RD_REQ_ERR, "a number that no queue pair has");
	ibv_wr_start(ex);
	ex->wr_id = 4;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, e.ah, peer, QKEY + 1);
	ibv_wr_set_sge(ex, e.mr->lkey, (uintptr_t)e.memory, 10);
	MUST(ibv_wr_complete(ex) == 0);
	want_wc(e.scq, IBV_WC_REM_INV_RD_REQ_ERR, "another Q_Key");
	MUST(gone = ibv_reg_mr(pd, e.memory, 4096, 0));
	ibv_wr_start(ex);
	ex->wr_id = 5;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, e.ah, peer, QKEY);
	ibv_wr_set_sge(ex, gone->lkey + 1000, (uintptr_t)e.memory, 10);
	MUST(ibv_wr_complete(ex) == 0);
	want_wc(e.scq, IBV_WC_LOC_PROT_ERR, "memory that has no such key");
	/* No receive is there: it waits, and its memory goes. */
	ibv_wr_start(ex);
	ex->wr_id = 6;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, e.ah, peer, QKEY);
	ibv_wr_set_sge(ex, gone->lkey, (uintptr_t)e.memory, 10);
	MUST(ibv_wr_complete(ex) == 0);
	usleep(20000);
	MUST(ibv_dereg_mr(gone) == 0);
	want_wc(e.scq, IBV_WC_LOC_PROT_ERR, "memory that is deregistered before a repetition");
	/* One for a copy that was under way when the memory went: it may find a receive. */
	told(other, 1000);
	told(other, 1000);
	send_to(&e, peer, 7, 0, 1000);
	want_wc(e.scq, IBV_WC_SUCCESS, "after all that the queue pair sends");
	told(other, 0);
	join(other, "the other end");
	end_close(&e);
}

/* Between queue pairs of one process. */
static void itself(void)
{
	struct end a, b, once;
	struct ibv_wc wc;

	open_device();
	end_open(&a, (struct how){ .order = UWARPDV_ORDER_ALL });
	end_open(&b, (struct how){ .flags = UWARPDV_QP_GRH });
	end_open(&once, (struct how){ .rnr_retry = -1 });
	for (unsigned i = 0; i < LENGTHS; i++) {
		fill(outgoing(&a), lengths[i], i);
		receive_at(&b, i, 0, 40 + lengths[i]);
		send_to(&a, b.qp->qp_num, i, 0, lengths[i]);
		wc = poll_one(b.rcq);
		if (wc.status != IBV_WC_SUCCESS || wc.byte_len != 40 + lengths[i] || !(wc.wc_flags & IBV_WC_GRH) ||
		    first_wrong(b.memory + 40, lengths[i], i) != lengths[i])
			check(false, "a message", "%u bytes", lengths[i]);
		want_wc(a.scq, IBV_WC_SUCCESS, "a message to another queue pair");
	}
	receive_at(&a, 50, 0, 100);
	send_to(&a, a.qp->qp_num, 51, 0, 100);
	want_wc(a.rcq, IBV_WC_SUCCESS, "a message to the same queue pair");
	want_wc(a.scq, IBV_WC_SUCCESS, "completes");
	send_to(&once, b.qp->qp_num, 52, 0, 100);
	want_wc(once.scq, IBV_WC_RNR_RETRY_EXC_ERR, "without a receive");
	for (unsigned i = 0; i < 3; i++)
		send_to(&a, b.qp->qp_num, i, 0, i);
	check(ibv_poll_cq(a.scq, 1, &wc) == 0, "three wait for a receive", "a completion");
	for (unsigned i = 0; i < 3; i++)
		receive_at(&b, i, 0, 200);
	for (unsigned i = 0; i < 3; i++) {
		wc = want_wc(b.rcq, IBV_WC_SUCCESS, "then they come");
		check(wc.byte_len == 40 + i, "in their order", "%u bytes", wc.byte_len);
	}
	end_close(&once);
	end_close(&a);
	end_close(&b);
}

/* Sends what the parent waits for, and exits at once. */
static void says_and_leaves(int fd)
{
	struct end e;
	uint32_t peer;

	open_device();
	end_open(&e, (struct how){ 0 });
	peer = hear(fd);
	fill(outgoing(&e), 100000, 5);
	send_to(&e, peer, 1, 0, 100000);
}

static void exits(void)
{
	struct other other = start(says_and_leaves);
	struct ibv_wc wc;
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	receive_at(&e, 1, 0, 100000);
	say(other.fd, e.qp->qp_num);
	wc = want_wc(e.rcq, IBV_WC_SUCCESS, "the last words of a process that exits");
	check(wc.byte_len == 100000 && first_wrong(e.memory, 100000, 5) == 100000, "all of them", "%u bytes", wc.byte_len);
	join(other, "which has exited");
	end_close(&e);
}

/* Receives one message, then stands still. */
static void is_killed(int fd)
{
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	receive_at(&e, 1, 0, 100);
	say(fd, e.qp->qp_num);
	poll_one(e.rcq);
	say(fd, 0);
	for (;;)
		pause();
}

static void killed(void)
{
	struct other other = start(is_killed), alive = start(obeys);
	uint32_t peer, living;
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	peer = hear(other.fd);
	living = hear(alive.fd);
	send_to(&e, peer, 1, 0, 100);
	want_wc(e.scq, IBV_WC_SUCCESS, "a message to a process");
	hear(other.fd);
	MUST(kill(other.pid, SIGKILL) == 0 && waitpid(other.pid, NULL, 0) == other.pid);
	send_to(&e, peer, 2, 0, 100);
	want_wc(e.scq, IBV_WC_RETRY_EXC_ERR, "one after it was killed");
	told(alive, 100);
	send_to(&e, living, 3, 0, 100);
	want_wc(e.scq, IBV_WC_SUCCESS, "one to another process");
	told(alive, 0);
	join(alive, "that one");
	end_close(&e);
}

/* From a shared receive queue, to two queue pairs. */
static void shares(int fd)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 64, .max_sge = 1 } };
	struct ibv_srq *srq;
	struct end a, b;

	open_device();
	MUST(srq = ibv_create_srq(pd, &attr));
	end_open(&a, (struct how){ .srq = srq });
	end_open(&b, (struct how){ .srq = srq });
	for (unsigned i = 0; i < 20; i++) {
		struct ibv_sge sge = sge_of(a.mr, i * 10000, 10000);
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;

		MUST(ibv_post_srq_recv(srq, &wr, &bad) == 0);
	}
	say(fd, a.qp->qp_num);
	say(fd, b.qp->qp_num);
	for (unsigned i = 0; i < 20; i++) {
		struct ibv_wc wc = poll_one(i % 2 ? b.rcq : a.rcq);

		if (wc.status != IBV_WC_SUCCESS || wc.byte_len != 10000 ||
		    first_wrong(a.memory + wc.wr_id * 10000, 10000, i % 2) != 10000)
			check(false, "a shared receive", "%s", ibv_wc_status_str(wc.status));
	}
	check(!failures, "20 messages from a shared receive queue", "see above");
	say(fd, 0);
	hear(fd);
	end_close(&a);
	end_close(&b);
	MUST(ibv_destroy_srq(srq) == 0);
}

static void shared(void)
{
	struct other other = start(shares);
	uint32_t peers[2];
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	peers[0] = hear(other.fd);
	peers[1] = hear(other.fd);
	fill(outgoing(&e), 10000, 0);
	fill(outgoing(&e) + 10000, 10000, 1);
	for (unsigned i = 0; i < 20; i++)
		send_to(&e, peers[i % 2], i, i % 2 * 10000, 10000);
	for (unsigned i = 0; i < 20; i++)
		if (poll_one(e.scq).status != IBV_WC_SUCCESS)
			check(false, "a Send", "fails");
	hear(other.fd);
	say(other.fd, 0);
	join(other, "the other end");
	end_close(&e);
}

/* Waits for events, as programs do that do not poll. */
static void sleeps(int fd)
{
	uint32_t peer;
	struct end e;

	open_device();
	end_open(&e, (struct how){ .channel = 1 });
	receive_at(&e, 0, 0, 64);
	say(fd, e.qp->qp_num);
	peer = hear(fd);
	for (unsigned i = 0; i < 50; i++) {
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;

		MUST(ibv_req_notify_cq(e.rcq, 0) == 0);
		while (ibv_poll_cq(e.rcq, 1, &wc) == 0) {
			MUST(readable(e.rcq->channel->fd, LIMIT_MS));
			MUST(ibv_get_cq_event(e.rcq->channel, &cq, &context) == 0 && context == &e);
			ibv_ack_cq_events(cq, 1);
			MUST(ibv_req_notify_cq(e.rcq, 0) == 0);
		}
		MUST(wc.status == IBV_WC_SUCCESS);
		receive_at(&e, 0, 0, 64);
		send_to(&e, peer, i, 0, 64);
		if (poll_one(e.scq).status != IBV_WC_SUCCESS)
			die("an answer fails");
	}
	check(true, "50 messages to a program that sleeps", "");
	end_close(&e);
}

static void events(void)
{
	struct other other = start(sleeps);
	uint32_t peer;
	struct end e;

	open_device();
	end_open(&e, (struct how){ 0 });
	peer = hear(other.fd);
	receive_at(&e, 0, 0, 64);
	say(other.fd, e.qp->qp_num);
	for (unsigned i = 0; i < 50; i++) {
		send_to(&e, peer, i, 0, 64);
		if (poll_one(e.scq).status != IBV_WC_SUCCESS || poll_one(e.rcq).status != IBV_WC_SUCCESS)
			die("message %u", i);
		receive_at(&e, 0, 0, 64);
	}
	join(other, "the other end");
	end_close(&e);
}

static const uint32_t in_last_words[] = { 0, 64, 1500, 70000, 1000000 };

/* Sends and Reads of all lengths, to another queue pair of this process. */
static void last_words(void *arg)
{
	struct end *ends = arg, *a = &ends[0], *b = &ends[1];
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a->qp);

	for (unsigned i = 0; i < 200; i++) {
		uint32_t length = in_last_words[i % 5];

		receive_at(b, i, 0, length);
		send_to(a, b->qp->qp_num, i, 0, length);
		MUST(poll_one(a->scq).status == IBV_WC_SUCCESS);
		MUST(poll_one(b->rcq).status == IBV_WC_SUCCESS);
		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_read(ex, b->mr->rkey, (uintptr_t)b->memory);
		ibv_wr_set_ud_addr(ex, a->ah, b->qp->qp_num, QKEY);
		ibv_wr_set_sge(ex, a->mr->lkey, (uintptr_t)a->memory, length);
		MUST(ibv_wr_complete(ex) == 0);
		MUST(poll_one(a->scq).status == IBV_WC_SUCCESS);
	}
}

/* Posting and polling are no cancellation points (pthreads(7)). */
static void cancelling(void)
{
	struct how how = { .access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE, .job_key = 7 };
	struct end ends[2];

	open_device();
	end_open(&ends[0], how);
	end_open(&ends[1], how);
	check(gets_through(last_words, ends), "a cancelled thread sends and reads, and ends after it", "it did not get through");
	last_words(ends);
	check(true, "another thread then uses the queue pairs", "");
	end_close(&ends[0]);
	end_close(&ends[1]);
}

static struct ibv_qp *try(struct ibv_qp_init_attr_ex init, struct uwarpdv_qp_init_attr attr, uint32_t inlen)
{
	return create_qp(ctx, &init, &attr, inlen);
}

static void creating(void)
{
	struct { struct uwarpdv_qp_init_attr attr; uint64_t later; } longer = { .attr.driver_qp_type = UWARPDV_QPT_RD };
	const struct uwarpdv_qp_init_attr good = { .driver_qp_type = UWARPDV_QPT_RD };
	struct uwarpdv_qp_init_attr attr = good;
	struct ibv_qp_init_attr_ex init;
	struct ibv_qp_attr now;
	struct ibv_qp_init_attr made;
	struct ibv_cq *cq;
	struct ibv_qp *qp;

	open_device();
	MUST(cq = ibv_create_cq(ctx, 10, NULL, NULL, 0));
	init = init_of(cq, cq);
	check((qp = try(init, good, sizeof good)), "a queue pair of reliable datagrams", "errno %d", errno);
	MUST(qp && ibv_query_qp(qp, &now, IBV_QP_STATE, &made) == 0);
	check(qp->qp_type == IBV_QPT_DRIVER && now.qp_state == IBV_QPS_RESET, "has the type DRIVER, and is in RESET", "%u, %u",
	      qp->qp_type, now.qp_state);
	check(ibv_qp_to_qp_ex(qp) != NULL, "and the extended functions", "none");
	MUST(ibv_destroy_qp(qp) == 0);
	qp = create_qp(ctx, &init, &longer.attr, sizeof longer);
	check(qp != NULL, "from a longer structure", "errno %d", errno);
	MUST(qp && ibv_destroy_qp(qp) == 0);
	longer.later = 1;
	check_failed(!create_qp(ctx, &init, &longer.attr, sizeof longer), EOPNOTSUPP, "one whose later members are not 0");
	check_failed(!try(init, good, 8), EINVAL, "a structure that ends before the type");
	attr.driver_qp_type = 2;
	check_failed(!try(init, attr, sizeof attr), EOPNOTSUPP, "another type");
	attr = good;
	attr.flags = 1u << 31;
	check_failed(!try(init, attr, sizeof attr), EINVAL, "a flag that is not known");
	attr = good;
	attr.msg_order = 1ull << 63;
	check_failed(!try(init, attr, sizeof attr), EINVAL, "an order that is not known");
	attr = good;
	attr.comp_mask = 1;
	check_failed(!try(init, attr, sizeof attr), EINVAL, "a mask that is not known");
	check_failed(!create_qp(ctx, &init, NULL, sizeof attr), EINVAL, "no attributes");
	init.qp_type = IBV_QPT_UD;
	check_failed(!try(init, good, sizeof good), EINVAL, "a type of the verbs");
	init.qp_type = IBV_QPT_DRIVER;
	init.send_ops_flags = IBV_QP_EX_WITH_LOCAL_INV;
	check_failed(!try(init, good, sizeof good), EOPNOTSUPP, "an operation that it does not have");
	check_failed(!ibv_create_qp_ex(ctx, &init), EOPNOTSUPP, "the type DRIVER without saying which");
	MUST(ibv_destroy_cq(cq) == 0);
}

/* What the queue pairs of reliable datagrams say that they guarantee can be had, and what they do not say cannot. */
static void semantics(void)
{
	__typeof__(uwarpdv_query_qp_semantics) *query;
	struct { struct uwarpdv_qp_semantics own; uint32_t later[3]; } longer;
	struct uwarpdv_qp_semantics said = { 0 };
	struct ibv_qp_init_attr_ex init;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	uint32_t behind_a_read = UWARPDV_ORDER_RDMA_RAR | UWARPDV_ORDER_RDMA_WAR | UWARPDV_ORDER_SAR | UWARPDV_ORDER_RAR |
				 UWARPDV_ORDER_WAR;

	open_device();
	MUST(query = (__typeof__(query))dlvsym(RTLD_DEFAULT, "uwarpdv_query_qp_semantics", "UWARPDV_1.0"));
	check_errno(query(ctx, UWARPDV_QPT_RD, &said, sizeof said), 0, "semantics are told");
	check(said.comp_mask == 0x7f, "all members", "%#x", said.comp_mask);
	check((said.msg_order | behind_a_read) == 0x3ffff && !(said.msg_order & behind_a_read),
	      "all is ordered but what is behind a Read", "%#x", said.msg_order);
	check(said.max_rdma_raw_size == INT32_MAX && said.max_rdma_waw_size == INT32_MAX && said.max_rdma_war_size == 0,
	      "of messages of every length", "%u, %u, %u", said.max_rdma_raw_size, said.max_rdma_waw_size, said.max_rdma_war_size);
	check(said.max_pdu == 0 && said.imm_data_size == 32 && said.usage_flags == UWARPDV_QP_USAGE_IMM_DATA_RQ,
	      "and the rest of it", "%u, %u, %#x", said.max_pdu, said.imm_data_size, said.usage_flags);
	MUST(cq = ibv_create_cq(ctx, 16, NULL, NULL, 0));
	init = init_of(cq, cq);
	for (int bit = 0; bit < 18; bit++) {
		struct uwarpdv_qp_init_attr attr = { .driver_qp_type = UWARPDV_QPT_RD, .msg_order = 1u << bit };

		qp = create_qp(ctx, &init, &attr, sizeof attr);
		if (!!qp != !!(said.msg_order & 1u << bit) || (!qp && errno != EINVAL))
			die("order %#x: said %d, had %d, %s", 1u << bit, !!(said.msg_order & 1u << bit), !!qp, strerror(errno));
		MUST(!qp || ibv_destroy_qp(qp) == 0);
	}
	/* Shorter and longer structures, of other versions. */
	memset(&said, 0xee, sizeof said);
	check_errno(query(ctx, UWARPDV_QPT_RD, &said, 14), 0, "a shorter structure");
	check(said.comp_mask == 3 && said.max_rdma_raw_size == INT32_MAX && said.max_rdma_war_size == 0xeeeeeeee,
	      "has as many members as it has room for", "%#x, %#x", said.comp_mask, said.max_rdma_war_size);
	memset(&longer, 0xee, sizeof longer);
	check_errno(query(ctx, UWARPDV_QPT_RD, &longer.own, sizeof longer), 0, "a longer structure");
	check(longer.own.comp_mask == 0x7f && !longer.later[0] && !longer.later[2], "is 0 behind what is known", "%#x", longer.later[0]);
	check_errno(query(ctx, UWARPDV_QPT_RD, &said, 4), EINVAL, "without room for an order");
	check_errno(query(ctx, UWARPDV_QPT_RD, NULL, sizeof said), EINVAL, "no structure");
	check_errno(query(ctx, 99, &said, sizeof said), EOPNOTSUPP, "another type");
	MUST(ibv_destroy_cq(cq) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "lengths", lengths_both_ways }, { "ordered", ordered }, { "unordered", unordered }, { "no_receive", no_receive },
		{ "refusals", refusals }, { "itself", itself }, { "exits", exits }, { "killed", killed }, { "shared", shared },
		{ "events", events }, { "cancelling", cancelling }, { "creating", creating },
		{ "semantics", semantics },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
