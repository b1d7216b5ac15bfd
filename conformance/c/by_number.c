/* Queue pairs that their program moves up itself, toward a number and a GID, as programs for InfiniBand
 * and RoCE do that have a socket of their own: every order, ends that come late or never, RESET and again,
 * many at once, wrong arguments, peers that die.
 *
 *	by_number [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#include <pthread.h>
#include <sys/socket.h>

#define ROOM (1 << 20)
#include "ends.h"

/* Numbers of attributes that are read back. */
#define TIMEOUT 12
#define RETRIES 2

/* Where a queue pair is; sent as it is from one process to another. */
struct name {
	union ibv_gid gid;
	uint32_t qpn, rkey;
	uint64_t buffer;
};

/* Asynchronous events are looked for, and not waited for. */
static void open_without_waiting(void)
{
	open_device();
	MUST(fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK) == 0);
}

static void end_begin(struct end *end, struct ibv_srq *srq)
{
	memset(end, 0, sizeof *end);
	end_open_with(end, srq);
}

static struct name name_of(const struct end *end)
{
	return (struct name){ own_gid, end->qp->qp_num, end->mr->rkey, (uint64_t)(uintptr_t)end->buffer };
}

static struct ibv_qp_attr rtr_attr(const struct name *peer)
{
	return (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qpn, .rq_psn = 0x123,
		.max_dest_rd_atomic = 3, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .sl = 2, .grh = { .dgid = peer->gid, .hop_limit = 7 } },
	};
}

static int rtr(struct ibv_qp *qp, const struct name *peer)
{
	struct ibv_qp_attr attr = rtr_attr(peer);

	return ibv_modify_qp(qp, &attr, RTR_MASK);
}

static int rts_with(struct ibv_qp *qp, uint8_t timeout, uint8_t retries)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS, .timeout = timeout, .retry_cnt = retries, .rnr_retry = 7, .sq_psn = 0x123,
		.max_rd_atomic = 5,
	};

	return ibv_modify_qp(qp, &attr, RTS_MASK);
}

/* With about half a second for a peer that is not there, and as long for each try as programs give. */
static int rts(struct ibv_qp *qp)
{
	return rts_with(qp, 18, 7);
}

static void up(struct end *end, const struct name *peer)
{
	MUST(init(end->qp) == 0);
	MUST(rtr(end->qp, peer) == 0);
	MUST(rts(end->qp) == 0);
}

static int receive(struct end *end, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)end->buffer + ROOM, length, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad;

	return ibv_post_recv(end->qp, &wr, &bad);
}

static int submit(struct end *end, enum ibv_wr_opcode op, uint32_t length, uint32_t imm, const struct name *peer)
{
	struct ibv_sge sge = { (uintptr_t)end->buffer, length, end->mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = imm, .sg_list = &sge, .num_sge = 1, .opcode = op, .imm_data = htonl(imm),
	}, *bad;

	if (peer) {
		wr.wr.rdma.remote_addr = peer->buffer + (op == IBV_WR_RDMA_READ ? 0 : ROOM);
		wr.wr.rdma.rkey = peer->rkey;
	}
	return ibv_post_send(end->qp, &wr, &bad);
}

static int send_imm(struct end *end, uint32_t length, uint32_t imm)
{
	return submit(end, IBV_WR_SEND_WITH_IMM, length, imm, NULL);
}

/* Whether a message from one arrives at the other, whole. */
static bool says(struct end *from, struct end *to, uint32_t length, uint32_t imm)
{
	struct ibv_wc wc;

	memset(from->buffer, (int)imm & 0x7f, length);
	memset(to->buffer + ROOM, 0, length);
	if (receive(to, length) || send_imm(from, length, imm))
		return false;
	if (!poll_within(to->rcq, &wc, LIMIT_MS) || wc.status || ntohl(wc.imm_data) != imm || wc.byte_len != length)
		return false;
	if (memcmp(from->buffer, to->buffer + ROOM, length))
		return false;
	return poll_within(from->scq, &wc, LIMIT_MS) && !wc.status && wc.wr_id == imm;
}

static void open_two(struct end *a, struct end *b, struct name *to_a, struct name *to_b)
{
	end_begin(a, NULL);
	end_begin(b, NULL);
	*to_a = name_of(a);
	*to_b = name_of(b);
}

static bool no_event(void)
{
	struct ibv_async_event event;

	return ibv_get_async_event(context, &event) == -1 && errno == EAGAIN;
}

/* Every order of both ends' calls, with and without time between them. */
static void orders(void)
{
	/* Whose call is next; each end goes to RTR first. */
	static const char *const all[] = { "aabb", "abab", "abba", "baab", "baba", "bbaa" };

	for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
		for (unsigned int pause = 0; pause <= 40000; pause += 40000) {
			char text[64];
			struct end end[2];
			struct name name[2];
			int calls[2] = { 0 };

			open_two(&end[0], &end[1], &name[0], &name[1]);
			MUST(init(end[0].qp) == 0 && init(end[1].qp) == 0);
			for (const char *who = all[n]; *who; who++) {
				int me = *who - 'a';

				MUST((calls[me]++ ? rts(end[me].qp) : rtr(end[me].qp, &name[!me])) == 0);
				usleep(pause);
			}
			snprintf(text, sizeof text, "%s, %u ms between", all[n], pause / 1000);
			check(says(&end[0], &end[1], 4000, 1) && says(&end[1], &end[0], 4000, 2), text, "no message");
			end_close(&end[0]);
			end_close(&end[1]);
		}
	}
	check(no_event(), "no asynchronous event", "one came");
}

/* A receiver stays in RTR. */
static void receiving(void)
{
	struct end a, b;
	struct name to_a, to_b;

	open_two(&a, &b, &to_a, &to_b);
	for (int round = 0; round < 2; round++) {
		/* The listener and the connector, whichever is which. */
		struct end *rx = round ? &a : &b, *tx = round ? &b : &a;
		char name[64];

		MUST(init(rx->qp) == 0 && rtr(rx->qp, round ? &to_b : &to_a) == 0);
		up(tx, round ? &to_a : &to_b);
		snprintf(name, sizeof name, "round %d: a queue pair in RTR receives", round);
		check(says(tx, rx, 1000, 1) && says(tx, rx, 50, 2), name, "no message");
		snprintf(name, sizeof name, "round %d: and stays in RTR", round);
		check(state_of(rx->qp) == IBV_QPS_RTR, name, "%s", state_name(state_of(rx->qp)));
		snprintf(name, sizeof name, "round %d: it sends nothing", round);
		check_errno(send_imm(rx, 1, 1), EINVAL, name);
		snprintf(name, sizeof name, "round %d: until it is in RTS", round);
		check(rts(rx->qp) == 0 && says(rx, tx, 1000, 3), name, "no message");
		MUST(to(a.qp, IBV_QPS_RESET) == 0 && to(b.qp, IBV_QPS_RESET) == 0);
	}
	end_close(&a);
	end_close(&b);
}

/* The peer is there and never moves, or is nobody at all. */
static void alone(void)
{
	struct end a, b;
	struct name to_a, to_b;

	open_two(&a, &b, &to_a, &to_b);
	for (int round = 0; round < 6; round++) {
		struct end *end = round & 1 ? &a : &b;
		struct name peer = round & 1 ? to_b : to_a;
		char name[80];
		static const char *const why[] = { "it stays in RESET", "another number", "another GID" };

		if (round / 2 == 1)
			peer.qpn ^= 0x40;
		if (round / 2 == 2)
			peer.gid.raw[15] ^= 0x40;
		MUST(init(end->qp) == 0 && rtr(end->qp, &peer) == 0 && rts_with(end->qp, TIMEOUT, RETRIES) == 0);
		MUST(receive(end, 1) == 0 && send_imm(end, 1, 1) == 0 && send_imm(end, 1, 2) == 0);
		snprintf(name, sizeof name, "%s, round %d: the first fails", why[round / 2], round & 1);
		struct ibv_wc first = want_wc(end->scq, IBV_WC_RETRY_EXC_ERR, name);
		struct ibv_wc second = want_wc(end->scq, IBV_WC_WR_FLUSH_ERR, "the next is flushed");

		check(first.wr_id == 1 && second.wr_id == 2, "in their order", "%d, %d", (int)first.wr_id, (int)second.wr_id);
		want_wc(end->rcq, IBV_WC_WR_FLUSH_ERR, "the receive, too");
		check(state_of(end->qp) == IBV_QPS_ERR, "in ERR", "%s", state_name(state_of(end->qp)));
		MUST(to(end->qp, IBV_QPS_RESET) == 0);
	}
	check(no_event(), "no asynchronous event", "one came");
	/* Neither has lost anything by it. */
	up(&a, &to_b);
	up(&b, &to_a);
	check(says(&a, &b, 10, 1) && says(&b, &a, 10, 2), "both meet after that", "no message");
	end_close(&a);
	end_close(&b);
}

static void arguments(void)
{
	struct end a, b;
	struct name to_a, to_b;
	struct ibv_qp_attr attr, bad;
	struct ibv_qp_init_attr init_attr;
	struct ibv_port_attr port;

	open_two(&a, &b, &to_a, &to_b);
	MUST(ibv_query_port(context, 1, &port) == 0);
	MUST(init(a.qp) == 0);
	attr = rtr_attr(&to_b);
	bad = attr;
	bad.ah_attr.grh.sgid_index = (uint8_t)port.gid_tbl_len;
	check_errno(ibv_modify_qp(a.qp, &bad, RTR_MASK), EINVAL, "sgid_index beyond the table");
	bad = attr;
	bad.ah_attr.is_global = 0;
	check_errno(ibv_modify_qp(a.qp, &bad, RTR_MASK), EINVAL, "without a GID");
	bad = attr;
	memset(&bad.ah_attr.grh.dgid, 0, 16);
	check_errno(ibv_modify_qp(a.qp, &bad, RTR_MASK), EINVAL, "the zero GID");
	bad = attr;
	memset(&bad.ah_attr.grh.dgid, 0x20, 16);
	check_errno(ibv_modify_qp(a.qp, &bad, RTR_MASK), EINVAL, "a GID of the other family");
	bad = attr;
	bad.ah_attr.port_num = 2;
	check_errno(ibv_modify_qp(a.qp, &bad, RTR_MASK), EINVAL, "another port");
	bad = attr;
	bad.dest_qp_num = 1 << 24;
	check_errno(ibv_modify_qp(a.qp, &bad, RTR_MASK), EINVAL, "a number of 25 bits");
	check(state_of(a.qp) == IBV_QPS_INIT, "still in INIT", "%s", state_name(state_of(a.qp)));
	MUST(ibv_modify_qp(a.qp, &attr, RTR_MASK) == 0);
	up(&b, &to_a);
	MUST(rts_with(a.qp, TIMEOUT, RETRIES) == 0);
	/* The end that has few retries sends when the stream is there. */
	check(says(&b, &a, 10, 1) && says(&a, &b, 10, 2), "and then it works", "no message");

	MUST(ibv_query_qp(a.qp, &attr, RTR_MASK | RTS_MASK | IBV_QP_ACCESS_FLAGS, &init_attr) == 0);
	check(attr.qp_state == IBV_QPS_RTS && attr.cur_qp_state == IBV_QPS_RTS, "state", "%d", attr.qp_state);
	check(attr.path_mtu == IBV_MTU_1024, "path_mtu", "%d", attr.path_mtu);
	check(attr.dest_qp_num == to_b.qpn, "dest_qp_num", "%x", attr.dest_qp_num);
	check(attr.rq_psn == 0x123 && attr.sq_psn == 0x123, "PSNs", "%x, %x", attr.rq_psn, attr.sq_psn);
	check(attr.max_rd_atomic == 5 && attr.max_dest_rd_atomic == 3, "read depths", "%d, %d", attr.max_rd_atomic,
	      attr.max_dest_rd_atomic);
	check(attr.timeout == TIMEOUT && attr.retry_cnt == RETRIES && attr.rnr_retry == 7, "retries", "%d, %d, %d",
	      attr.timeout, attr.retry_cnt, attr.rnr_retry);
	check(attr.min_rnr_timer == 12, "min_rnr_timer", "%d", attr.min_rnr_timer);
	check(attr.qp_access_flags == REMOTE_ALL, "rights", "%x", attr.qp_access_flags);
	check(attr.ah_attr.is_global == 1 && attr.ah_attr.sl == 2 && attr.ah_attr.grh.hop_limit == 7 &&
	      attr.ah_attr.port_num == 1 && !memcmp(&attr.ah_attr.grh.dgid, &to_b.gid, 16), "address vector", "differs");
	end_close(&a);
	end_close(&b);
}

static void itself(void)
{
	struct end end;
	struct name me;
	bool same;

	end_begin(&end, NULL);
	me = name_of(&end);
	for (int round = 0; round < 3; round++) {
		up(&end, &me);
		check(says(&end, &end, 1, 1) && says(&end, &end, ROOM, 2), "Sends to itself", "no message");
		memset(end.buffer, 0x31, ROOM);
		memset(end.buffer + ROOM, 0, ROOM);
		MUST(submit(&end, IBV_WR_RDMA_WRITE, ROOM, 3, &me) == 0);
		want_wc(end.scq, IBV_WC_SUCCESS, "Writes");
		same = !memcmp(end.buffer, end.buffer + ROOM, ROOM);
		check(same, "every byte", "another one");
		/* Where it reads to is where it reads from. */
		MUST(submit(&end, IBV_WR_RDMA_READ, ROOM, 4, &me) == 0);
		want_wc(end.scq, IBV_WC_SUCCESS, "Reads");
		MUST(receive(&end, 0) == 0 && submit(&end, IBV_WR_RDMA_WRITE_WITH_IMM, 100, 5, &me) == 0);
		struct ibv_wc wc = want_wc(end.rcq, IBV_WC_SUCCESS, "Writes with immediate data");

		check(ntohl(wc.imm_data) == 5 && wc.byte_len == 100, "their data", "%x, %u", ntohl(wc.imm_data), wc.byte_len);
		want_wc(end.scq, IBV_WC_SUCCESS, "their completion");
		MUST(to(end.qp, IBV_QPS_RESET) == 0);
	}
	end_close(&end);
}

/* RESET and up again, with work under way, with the same peer and with others. */
static void again(void)
{
	enum { ENDS = 4, ROUNDS = 60 };
	struct end end[ENDS];
	struct name name[ENDS];
	int bad = 0;

	for (int n = 0; n < ENDS; n++) {
		end_begin(&end[n], NULL);
		name[n] = name_of(&end[n]);
	}
	for (int round = 0; round < ROUNDS && !bad; round++) {
		/* 0-1 2-3, 0-2 1-3, 0-3 1-2. */
		int mask = 1 + round / 2 % 3;

		for (int n = 0; n < ENDS; n++) {
			int me = round & 1 ? ENDS - 1 - n : n;

			up(&end[me], &name[me ^ mask]);
		}
		for (int n = 0; n < ENDS; n++)
			bad += !says(&end[n], &end[n ^ mask], 3000, (uint32_t)round);
		/* What is under way now is lost, and nothing of it may come out later. */
		for (int n = 0; n < ENDS; n++)
			for (int i = 0; i < 3; i++)
				MUST(receive(&end[n], ROOM) == 0 && send_imm(&end[n], round % 4 ? 20000 : ROOM, 99) == 0);
		for (int n = 0; n < ENDS; n++) {
			MUST(to(end[n].qp, IBV_QPS_RESET) == 0);
			if (round % 3 == 0)
				usleep(500);
		}
	}
	check(!bad, "every two meet again after RESET", "%d messages missing", bad);
	for (int n = 0; n < ENDS; n++)
		end_close(&end[n]);
}

/* One end begins anew before the other one has seen anything of the first time. */
static void impatient(void)
{
	struct end a, b;
	struct name to_a, to_b;
	int bad = 0;

	open_two(&a, &b, &to_a, &to_b);
	for (int round = 0; round < 20; round++) {
		struct end *early = round & 1 ? &a : &b, *late = round & 1 ? &b : &a;
		struct name *to_early = round & 1 ? &to_a : &to_b, *to_late = round & 1 ? &to_b : &to_a;

		MUST(init(late->qp) == 0);
		for (int i = 0; i < 3; i++) {
			up(early, to_late);
			if (i == 1)
				usleep(2000);
			MUST(to(early->qp, IBV_QPS_RESET) == 0);
		}
		MUST(rtr(late->qp, to_early) == 0 && rts(late->qp) == 0);
		up(early, to_late);
		bad += !says(&a, &b, 100, 1) || !says(&b, &a, 100, 2);
		MUST(to(a.qp, IBV_QPS_RESET) == 0 && to(b.qp, IBV_QPS_RESET) == 0);
	}
	check(!bad, "the last attempt counts", "%d of 20 rounds failed", bad);
	end_close(&a);
	end_close(&b);
}

static void *thread_of_many(void *argument)
{
	enum { PAIRS = 40 };
	static __thread struct end a[PAIRS], b[PAIRS];
	int *bad = argument;

	for (int round = 0; round < 3; round++) {
		for (int n = 0; n < PAIRS; n++) {
			struct name to_a, to_b;

			open_two(&a[n], &b[n], &to_a, &to_b);
			MUST(init(b[n].qp) == 0 && rtr(b[n].qp, &to_a) == 0);
			up(&a[n], &to_b);
		}
		for (int n = 0; n < PAIRS; n++) {
			MUST(rts(b[n].qp) == 0);
			*bad += !says(&a[n], &b[n], 500, 1) || !says(&b[n], &a[n], 500, 2);
		}
		for (int n = 0; n < PAIRS; n++) {
			end_close(&a[n]);
			end_close(&b[n]);
		}
	}
	return NULL;
}

static void threads(void)
{
	enum { THREADS = 4 };
	pthread_t thread[THREADS];
	int bad[THREADS] = { 0 }, sum = 0;

	for (int n = 0; n < THREADS; n++)
		MUST(pthread_create(&thread[n], NULL, thread_of_many, &bad[n]) == 0);
	for (int n = 0; n < THREADS; n++) {
		MUST(pthread_join(thread[n], NULL) == 0);
		sum += bad[n];
	}
	check(sum == 0, "480 pairs of four threads", "%d failed", sum);
}

/* Names of queue pairs, over a socket. */
static void tell(int fd, const void *what, size_t length)
{
	MUST(write(fd, what, length) == (ssize_t)length);
}

static void hear(int fd, void *what, size_t length)
{
	for (size_t got = 0; got < length;) {
		ssize_t n = read(fd, (char *)what + got, length - got);

		MUST(n > 0);
		got += (size_t)n;
	}
}

enum { PROCESSES = 4, EACH = 12 };

/* One of several processes, each joined with each other one by many queue pairs. */
static int one_of_all(int me, int fd)
{
	static struct end end[PROCESSES][EACH];
	static struct name mine[PROCESSES][EACH], all[PROCESSES][PROCESSES][EACH];
	struct ibv_wc wc;
	char done;

	open_without_waiting();
	for (int peer = 0; peer < PROCESSES; peer++) {
		for (int n = 0; n < EACH; n++) {
			end_begin(&end[peer][n], NULL);
			mine[peer][n] = name_of(&end[peer][n]);
		}
	}
	tell(fd, mine, sizeof mine);
	hear(fd, all, sizeof all);
	for (int n = 0; n < EACH; n++) {
		for (int i = 0; i < PROCESSES; i++) {
			/* Everybody in another order. */
			int peer = (me + i * (me & 1 ? 1 : PROCESSES - 1)) % PROCESSES;

			MUST(init(end[peer][n].qp) == 0 && receive(&end[peer][n], 2000) == 0);
			MUST(rtr(end[peer][n].qp, &all[peer][me][n]) == 0 && rts(end[peer][n].qp) == 0);
			MUST(send_imm(&end[peer][n], 2000, (uint32_t)(me * 100 + n)) == 0);
		}
	}
	for (int n = 0; n < EACH; n++) {
		for (int peer = 0; peer < PROCESSES; peer++) {
			if (!poll_within(end[peer][n].rcq, &wc, LIMIT_MS) || wc.status ||
			    ntohl(wc.imm_data) != (uint32_t)(peer * 100 + n))
				return 1;
			if (!poll_within(end[peer][n].scq, &wc, LIMIT_MS) || wc.status)
				return 2;
		}
	}
	/* Nobody goes before all have received. */
	tell(fd, "x", 1);
	hear(fd, &done, 1);
	for (int n = 0; n < EACH; n++)
		for (int peer = 0; peer < PROCESSES; peer++)
			end_close(&end[peer][n]);
	return 0;
}

/* A process of its own that runs this, with a socket to the caller's; its id. */
static pid_t begin(int (*run)(int, int), int me, int *fd)
{
	int both[2];
	pid_t pid;

	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, both) == 0);
	fflush(stdout);
	MUST((pid = fork()) >= 0);
	if (pid == 0) {
		close(both[0]);
		alarm(GROUP_LIMIT);
		_exit(run(me, both[1]));
	}
	close(both[1]);
	*fd = both[0];
	return pid;
}

static int end_of(pid_t pid)
{
	int status;

	MUST(waitpid(pid, &status, 0) == pid);
	return status;
}

static void processes(void)
{
	static struct name all[PROCESSES][PROCESSES][EACH];
	int fd[PROCESSES];
	pid_t pid[PROCESSES];
	char done[PROCESSES];

	for (int n = 0; n < PROCESSES; n++)
		pid[n] = begin(one_of_all, n, &fd[n]);
	for (int n = 0; n < PROCESSES; n++)
		hear(fd[n], all[n], sizeof all[n]);
	for (int n = 0; n < PROCESSES; n++)
		tell(fd[n], all, sizeof all);
	for (int n = 0; n < PROCESSES; n++)
		if (read(fd[n], done, 1) != 1)
			break;
	for (int n = 0; n < PROCESSES; n++) {
		char name[40];
		int status;

		(void)!write(fd[n], "x", 1);
		status = end_of(pid[n]);
		snprintf(name, sizeof name, "process %d of %d, 12 queue pairs each", n, PROCESSES);
		check(status == 0, name, "status %x", status);
	}
}

/* The other process in `killed`. */
static int victim(int late, int fd)
{
	struct end end;
	struct name peer, me;

	open_without_waiting();
	end_begin(&end, NULL);
	me = name_of(&end);
	tell(fd, &me, sizeof me);
	hear(fd, &peer, sizeof peer);
	if (!late) {
		up(&end, &peer);
		for (int n = 0; n < 4; n++)
			MUST(receive(&end, 1000) == 0);
		MUST(send_imm(&end, 1000, 1) == 0 && poll_one(end.scq).status == 0);
		tell(fd, "x", 1);
		poll_one(end.rcq);
		tell(fd, "x", 1);
	}
	pause();
	return 0;
}

static void killed_at(bool late, pid_t pid, int fd)
{
	struct end end;
	struct name peer, me;
	struct ibv_wc wc = { 0 };
	char name[80], x;

	end_begin(&end, NULL);
	me = name_of(&end);
	hear(fd, &peer, sizeof peer);
	tell(fd, &me, sizeof me);
	MUST(init(end.qp) == 0 && rtr(end.qp, &peer) == 0 && rts_with(end.qp, TIMEOUT, RETRIES) == 0);
	if (!late) {
		MUST(receive(&end, 1000) == 0);
		/* The peer has reached us: few retries are enough now. */
		hear(fd, &x, 1);
		MUST(send_imm(&end, 1000, 1) == 0 && poll_one(end.scq).status == 0);
		hear(fd, &x, 1);
	} else {
		usleep(50000);
	}
	MUST(kill(pid, SIGKILL) == 0);
	end_of(pid);
	/* The one or the other may have been under way still. */
	for (int n = 0; n < 10 && !wc.status; n++) {
		MUST(send_imm(&end, 1000, 2) == 0);
		wc = poll_one(end.scq);
		usleep(20000);
	}
	snprintf(name, sizeof name, "the peer was killed %s", late ? "before it came" : "in the middle");
	check(wc.status == IBV_WC_RETRY_EXC_ERR, name, "%s", ibv_wc_status_str(wc.status));
	check(state_of(end.qp) == IBV_QPS_ERR, "in ERR", "%s", state_name(state_of(end.qp)));
	end_close(&end);
	close(fd);
}

static void killed(void)
{
	int fd[2];
	/* Before there is a device: a child has none. */
	pid_t pid[2] = { begin(victim, 0, &fd[0]), begin(victim, 1, &fd[1]) };

	open_without_waiting();
	for (int late = 0; late < 2; late++)
		killed_at(late, pid[late], fd[late]);
}

/* Ends that are destroyed before they were ever joined. */
static void destroyed(void)
{
	struct end a, b, c;
	struct name to_a, to_b, to_c;

	for (int round = 0; round < 8; round++) {
		open_two(&a, &b, &to_a, &to_b);
		end_begin(&c, NULL);
		to_c = name_of(&c);
		struct end *goes = round & 1 ? &a : &b, *stays = round & 1 ? &b : &a;
		struct name *to_goes = round & 1 ? &to_a : &to_b, *to_stays = round & 1 ? &to_b : &to_a;

		if (round & 2)
			MUST(init(stays->qp) == 0 && rtr(stays->qp, to_goes) == 0);
		if (round & 4)
			MUST(init(goes->qp) == 0 && rtr(goes->qp, to_stays) == 0);
		end_close(goes);
		if (!(round & 2))
			MUST(init(stays->qp) == 0 && rtr(stays->qp, to_goes) == 0);
		MUST(rts_with(stays->qp, TIMEOUT, RETRIES) == 0);
		MUST(send_imm(stays, 1, 1) == 0);
		want_wc(stays->scq, IBV_WC_RETRY_EXC_ERR, "the peer was destroyed");
		MUST(to(stays->qp, IBV_QPS_RESET) == 0);
		up(stays, &to_c);
		up(&c, to_stays);
		check(says(stays, &c, 10, 1), "another one is there", "no message");
		end_close(stays);
		end_close(&c);
	}
}

static void forking(void)
{
	struct end a, b;
	struct name to_a, to_b;
	pid_t pid;

	MUST(ibv_fork_init() == 0);
	open_two(&a, &b, &to_a, &to_b);
	up(&a, &to_b);
	MUST(init(b.qp) == 0 && rtr(b.qp, &to_a) == 0);
	MUST((pid = fork()) >= 0);
	if (pid == 0)
		_exit(0);
	check(end_of(pid) == 0, "a child ends", "otherwise");
	MUST(rts(b.qp) == 0);
	check(says(&a, &b, ROOM, 1) && says(&b, &a, ROOM, 2), "its parent goes on", "no message");
	end_close(&a);
	end_close(&b);
}

static void sharing(void)
{
	enum { PAIRS = 8 };
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 64, .max_sge = 1 } };
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_srq *srq;
	struct end server[PAIRS], client[PAIRS];
	struct ibv_wc wc;
	int got = 0;

	MUST(pd && (srq = ibv_create_srq(pd, &attr)));
	for (int n = 0; n < PAIRS; n++) {
		struct name to_server, to_client;

		end_begin(&server[n], srq);
		end_begin(&client[n], NULL);
		to_server = name_of(&server[n]);
		to_client = name_of(&client[n]);
		up(&client[n], &to_server);
		MUST(send_imm(&client[n], 300, (uint32_t)n) == 0);
		up(&server[n], &to_client);
	}
	for (int n = 0; n < PAIRS; n++) {
		struct ibv_sge sge = { (uintptr_t)server[0].buffer, 300, server[0].mr->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

		MUST(ibv_post_srq_recv(srq, &wr, &bad) == 0);
	}
	for (int n = 0; n < PAIRS; n++)
		got += poll_within(server[n].rcq, &wc, LIMIT_MS) && !wc.status && ntohl(wc.imm_data) == (uint32_t)n &&
		       wc.qp_num == server[n].qp->qp_num;
	check(got == PAIRS, "each takes its message from the shared receive queue", "%d of %d", got, PAIRS);
	for (int n = 0; n < PAIRS; n++) {
		end_close(&server[n]);
		end_close(&client[n]);
	}
	MUST(ibv_destroy_srq(srq) == 0 && ibv_dealloc_pd(pd) == 0);
}

/* Beside an id whose request nobody has answered yet, and beside connections of rdma_cm's. */
static void mixed(void)
{
	struct pair p, q;
	struct end a, b;
	struct name to_a, to_b;
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct options none = { 0 };
	struct rdma_cm_event event;

	pair_open(&q);
	memset(&p, 0, sizeof p);
	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &none);
	MUST(rdma_connect(p.c.id, &param) == 0);
	event = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	open_two(&a, &b, &to_a, &to_b);
	up(&a, &to_b);
	up(&b, &to_a);
	check(says(&a, &b, 10, 1) && says(&b, &a, 10, 2), "beside a pending request", "no message");
	p.s.id = event.id;
	side_resources(&p.s, &none);
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	check(says(&a, &b, 10, 3), "and after it", "no message");
	pair_close(&p);
	pair_close(&q);
	check(says(&b, &a, 10, 4), "and after rdma_cm's connections", "no message");
	end_close(&a);
	end_close(&b);
}

/* Connections of this host to one port that are established, as the end that began them sees it. */
static int connected_to(unsigned int port)
{
	static const char *const tables[] = { "/proc/self/net/tcp", "/proc/self/net/tcp6" };
	unsigned int remote, state;
	char line[512];
	int count = 0;

	for (int i = 0; i < 2; i++) {
		FILE *table = fopen(tables[i], "r");

		while (table && fgets(line, sizeof line, table))
			count += sscanf(line, "%*d: %*[0-9A-F]:%*X %*[0-9A-F]:%X %X", &remote, &state) == 2 &&
				 remote == port && state == 1;
		if (table)
			fclose(table);
	}
	return count;
}

static bool becomes(unsigned int port, int count, int ms)
{
	for (uint64_t end = now_ms() + ms; connected_to(port) != count; usleep(500))
		if (now_ms() > end)
			return false;
	return true;
}

/* The device of one end is closed while the other one is not ready: what was begun for its queue pair is
 * given up. (The attempt went on for a minute; a request that had come early waited for half a minute.) */
static void closing(void)
{
	struct ibv_context *of[2], *keeper;
	struct end two[2], third;
	struct name to_two[2], nobody;

	for (int listens = 0; listens < 2; listens++) {
		open_without_waiting();
		keeper = context;
		end_begin(&third, NULL);
		for (int i = 0; i < 2; i++) {
			open_without_waiting();
			of[i] = context;
			end_begin(&two[i], NULL);
			to_two[i] = name_of(&two[i]);
		}
		int low = to_two[0].qpn < to_two[1].qpn ? 0 : 1;
		unsigned int port = to_two[low].qpn >> 8;

		/* Another queue pair has the port take connections: the smaller number listens. */
		nobody = name_of(&third);
		nobody.qpn += 1 << 8;
		MUST(third.qp->qp_num >> 8 == port);
		MUST(init(third.qp) == 0 && rtr(third.qp, &nobody) == 0);
		MUST(init(two[0].qp) == 0 && init(two[1].qp) == 0);
		MUST(rtr(two[!low].qp, &to_two[low]) == 0);
		MUST(becomes(port, 1, LIMIT_MS));
		usleep(100000);
		MUST(ibv_close_device(of[listens ? low : !low]) == 0);
		check(becomes(port, 0, LIMIT_MS / 4),
		      listens ? "a request that came early is rejected" : "an attempt ends", "it is still there");
		MUST(ibv_close_device(of[listens ? !low : low]) == 0);
		MUST(ibv_close_device(keeper) == 0);
	}
}

/* Connections to the port of a queue pair that are nobody's. */
static int flood(int port, int fd)
{
	struct sockaddr_storage ss = sockaddr_of(address, (uint16_t)port);
	static const char noise[] = "MPA ID Req Frame\x40\x01\x00\x1cuQP\x01and more that is no introduction";
	struct pollfd stop = { .fd = fd, .events = POLLIN };

	if (ss.ss_family == AF_INET)
		((struct sockaddr_in *)&ss)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int n = 0; poll(&stop, 1, 0) == 0; n++) {
		int s = socket(ss.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0);

		if (s < 0) {
			/* No more descriptors: all go, and it begins again. */
			for (int i = fd + 1; i < 1000; i++)
				close(i);
			continue;
		}
		(void)!connect(s, (struct sockaddr *)&ss, sizeof ss);
		if (n % 3)
			(void)!write(s, noise, n % 3 == 1 ? sizeof noise : 12);
		if (n % 5 == 0)
			close(s);
		usleep(300);
	}
	return 0;
}

static void stranger(void)
{
	struct end a, b;
	struct name to_a, to_b;
	int fd, bad = 0;
	pid_t pid;

	/* Its port is open from the first bring-up on. */
	open_two(&a, &b, &to_a, &to_b);
	up(&a, &to_b);
	up(&b, &to_a);
	MUST(says(&a, &b, 10, 1));
	pid = begin(flood, (int)((to_a.qpn < to_b.qpn ? to_a.qpn : to_b.qpn) >> 8), &fd);
	for (int round = 0; round < 20; round++) {
		MUST(to(a.qp, IBV_QPS_RESET) == 0 && to(b.qp, IBV_QPS_RESET) == 0);
		up(round & 1 ? &a : &b, round & 1 ? &to_b : &to_a);
		usleep(30000);
		up(round & 1 ? &b : &a, round & 1 ? &to_a : &to_b);
		bad += !says(&a, &b, 1000, 1) || !says(&b, &a, 1000, 2);
	}
	tell(fd, "x", 1);
	check(end_of(pid) == 0, "the stranger did what it could", "otherwise");
	check(bad == 0, "both meet beside it", "%d of 20 rounds failed", bad);
	end_close(&a);
	end_close(&b);
}

#define ON_DEVICE(group) static void on_##group(void) { open_without_waiting(); group(); MUST(ibv_close_device(context) == 0); }
ON_DEVICE(orders)
ON_DEVICE(receiving)
ON_DEVICE(alone)
ON_DEVICE(arguments)
ON_DEVICE(itself)
ON_DEVICE(again)
ON_DEVICE(impatient)
ON_DEVICE(threads)
ON_DEVICE(destroyed)
ON_DEVICE(forking)
ON_DEVICE(sharing)
ON_DEVICE(mixed)
ON_DEVICE(stranger)

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "orders", on_orders }, { "receiving", on_receiving }, { "alone", on_alone },
		{ "arguments", on_arguments }, { "itself", on_itself }, { "again", on_again },
		{ "impatient", on_impatient }, { "threads", on_threads }, { "processes", processes },
		{ "killed", killed }, { "destroyed", on_destroyed }, { "forking", on_forking },
		{ "sharing", on_sharing }, { "mixed", on_mixed }, { "stranger", on_stranger },
		{ "closing", closing },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
