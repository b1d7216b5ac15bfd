/* Queue pairs of unreliable connections (IBV_QPT_UC), by number: what may be set when, what may be posted, messages
 * inside one process and between two, what is dropped without a word, errors of the program's own, and another
 * user's process that knows everything there is to know.
 *
 *	unreliable [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#include <sys/socket.h>

#include "common.h"

#define ROOM (1u << 20)
#define DEPTH 64
#define PSN_OF_A 0x111111u
#define PSN_OF_B 0x222222u

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static union ibv_gid own_gid;

/* Received messages come into the lower half of its memory, what is sent stands in the upper one. */
struct end {
	struct ibv_qp *qp;
	struct ibv_cq *scq, *rcq;
	struct ibv_mr *mr;
	unsigned char *memory;
	uint32_t psn;			/* with which it sends */
};

/* Where a queue pair is; sent as it is from one process to another. */
struct name {
	uint32_t qpn, rkey, psn;
	uint64_t memory;
};

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0] && (ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(pd = ibv_alloc_pd(ctx));
	MUST(ibv_query_gid(ctx, 1, 0, &own_gid) == 0);
}

static struct name name_of(const struct end *e)
{
	return (struct name){ e->qp->qp_num, e->mr->rkey, e->psn, (uintptr_t)e->memory };
}

static void begin_with(struct end *e, uint32_t psn, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
		.qp_type = IBV_QPT_UC, .srq = srq,
	};

	e->psn = psn;
	MUST(e->scq = init.send_cq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0));
	MUST(e->rcq = init.recv_cq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0));
	MUST(e->memory = calloc(2, ROOM));
	MUST(e->mr = ibv_reg_mr(pd, e->memory, 2 * ROOM, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	MUST(e->qp = ibv_create_qp(pd, &init));
}

static void begin(struct end *e, uint32_t psn)
{
	begin_with(e, psn, NULL);
}

#define INIT_MASK (IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define RTR_MASK (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)
#define RTS_MASK (IBV_QP_STATE | IBV_QP_SQ_PSN)

static struct ibv_qp_attr init_attr(void)
{
	return (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
}

static struct ibv_qp_attr rtr_attr(uint32_t qpn, uint32_t psn)
{
	return (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn, .rq_psn = psn,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid, .hop_limit = 7 } },
	};
}

static void up_to_rtr(struct end *e, struct name peer)
{
	struct ibv_qp_attr attr = init_attr();

	MUST(ibv_modify_qp(e->qp, &attr, INIT_MASK) == 0);
	attr = rtr_attr(peer.qpn, peer.psn);
	MUST(ibv_modify_qp(e->qp, &attr, RTR_MASK) == 0);
}

static void up(struct end *e, struct name peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .sq_psn = e->psn };

	up_to_rtr(e, peer);
	MUST(ibv_modify_qp(e->qp, &attr, RTS_MASK) == 0);
}

static void open_two(struct end *a, struct end *b)
{
	begin(a, PSN_OF_A);
	begin(b, PSN_OF_B);
	up(a, name_of(b));
	up(b, name_of(a));
}

static void end_close(struct end *e)
{
	MUST(ibv_destroy_qp(e->qp) == 0);
	MUST(ibv_dereg_mr(e->mr) == 0);
	MUST(ibv_destroy_cq(e->scq) == 0 && ibv_destroy_cq(e->rcq) == 0);
	free(e->memory);
}

static struct ibv_sge at(const struct end *e, size_t offset, uint32_t length)
{
	return (struct ibv_sge){ .addr = (uintptr_t)e->memory + offset, .length = length, .lkey = e->mr->lkey };
}

static void receive(struct end *e, uint64_t id, size_t offset, uint32_t length)
{
	struct ibv_sge sge = at(e, offset, length);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

struct op {
	enum ibv_wr_opcode code;
	uint32_t length, imm;
	uint64_t id, memory;
	uint32_t rkey;
	int flags;
	uint32_t lkey;			/* if not the right one */
};

/* Bytes from the start of the upper half. */
static int submit(struct end *e, struct op op)
{
	struct ibv_sge sge = at(e, ROOM, op.length);
	struct ibv_send_wr wr = {
		.wr_id = op.id, .sg_list = &sge, .num_sge = 1, .opcode = op.code, .imm_data = htonl(op.imm),
		.send_flags = (unsigned)op.flags | IBV_SEND_SIGNALED, .wr.rdma = { .remote_addr = op.memory, .rkey = op.rkey },
	}, *bad;

	if (op.lkey)
		sge.lkey = op.lkey;
	return ibv_post_send(e->qp, &wr, &bad);
}

static bool leaves(struct end *e, struct op op)
{
	struct ibv_wc wc;

	MUST(submit(e, op) == 0);
	return poll_within(e->scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS && wc.wr_id == op.id;
}

static void fill(unsigned char *memory, uint32_t length, unsigned seed)
{
	for (uint32_t i = 0; i < length; i++)
		memory[i] = (unsigned char)(i * 7 + i / 251 + seed);
}

static bool is_filled(const unsigned char *memory, uint32_t length, unsigned seed)
{
	for (uint32_t i = 0; i < length; i++)
		if (memory[i] != (unsigned char)(i * 7 + i / 251 + seed))
			return false;
	return true;
}

static bool nothing_comes(struct end *e)
{
	struct ibv_wc wc;

	return !poll_within(e->rcq, &wc, QUIET_MS);
}

static void attributes(void)
{
	const int optional = IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct end a;

	open_device();
	begin(&a, PSN_OF_A);
	attr = init_attr();
	for (int bit = IBV_QP_PKEY_INDEX; bit; bit = bit == IBV_QP_PKEY_INDEX ? IBV_QP_PORT : bit == IBV_QP_PORT ? IBV_QP_ACCESS_FLAGS : 0)
		check_errno(ibv_modify_qp(a.qp, &attr, INIT_MASK & ~bit), EINVAL, "INIT without one of its attributes");
	check_errno(ibv_modify_qp(a.qp, &attr, INIT_MASK | IBV_QP_QKEY), EINVAL, "INIT with a Q_Key");
	check_errno(ibv_modify_qp(a.qp, &attr, INIT_MASK), 0, "INIT");
	attr = rtr_attr(a.qp->qp_num, PSN_OF_B);
	for (int bit = 1; bit <= IBV_QP_DEST_QPN; bit <<= 1)
		if (bit & RTR_MASK & ~IBV_QP_STATE)
			check_errno(ibv_modify_qp(a.qp, &attr, RTR_MASK & ~bit), EINVAL, "RTR without one of its attributes");
	check_errno(ibv_modify_qp(a.qp, &attr, RTR_MASK | IBV_QP_MIN_RNR_TIMER), EINVAL, "RTR with a timer of RC's");
	check_errno(ibv_modify_qp(a.qp, &attr, RTR_MASK | IBV_QP_MAX_DEST_RD_ATOMIC), EINVAL, "RTR with Reads");
	attr.rq_psn = 1 << 24;
	check_errno(ibv_modify_qp(a.qp, &attr, RTR_MASK), EINVAL, "a PSN of 25 bits");
	attr.rq_psn = PSN_OF_B;
	attr.ah_attr.is_global = 0;
	check_errno(ibv_modify_qp(a.qp, &attr, RTR_MASK), EINVAL, "an address vector that names nobody");
	attr.ah_attr.is_global = 1;
	check_errno(ibv_modify_qp(a.qp, &attr, RTR_MASK | optional), 0, "RTR, with what may be set");
	check_errno(submit(&a, (struct op){ .code = IBV_WR_SEND }), EINVAL, "a Send in RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = PSN_OF_A };
	check_errno(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE), EINVAL, "RTS without its PSN");
	check_errno(ibv_modify_qp(a.qp, &attr, RTS_MASK | IBV_QP_TIMEOUT), EINVAL, "RTS with a timeout");
	check_errno(ibv_modify_qp(a.qp, &attr, RTS_MASK), 0, "RTS");
	MUST(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init) == 0);
	check(attr.qp_state == IBV_QPS_RTS && init.qp_type == IBV_QPT_UC, "what a query says of state and type", "%d, %d",
	      attr.qp_state, init.qp_type);
	check(attr.sq_psn == PSN_OF_A && attr.rq_psn == PSN_OF_B && attr.dest_qp_num == a.qp->qp_num, "and of the peer",
	      "%#x %#x %#x", attr.sq_psn, attr.rq_psn, attr.dest_qp_num);
	check(memcmp(&attr.ah_attr.grh.dgid, &own_gid, sizeof own_gid) == 0 && attr.path_mtu == IBV_MTU_1024, "and of the path", "?");
	check_errno(submit(&a, (struct op){ .code = IBV_WR_RDMA_READ, .length = 8 }), EINVAL, "a Read");
	check_errno(submit(&a, (struct op){ .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .length = 8 }), EINVAL, "an atomic operation");
	check_errno(submit(&a, (struct op){ .code = IBV_WR_SEND_WITH_INV }), EINVAL, "a Send with Invalidate");
	check_errno(to(a.qp, IBV_QPS_RTR), EINVAL, "no way back");
	check_errno(to(a.qp, IBV_QPS_SQD) || to(a.qp, IBV_QPS_RTS) || to(a.qp, IBV_QPS_ERR) || to(a.qp, IBV_QPS_RESET), 0,
		    "SQD, RTS, ERR, RESET");
	end_close(&a);
}

/* The functions that build work requests one by one. */
static void extended(void)
{
	struct ibv_qp_init_attr_ex init = {
		.cap = { DEPTH, DEPTH, 2, 2, 64 }, .qp_type = IBV_QPT_UC, .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ,
	};
	struct ibv_qp_ex *ex;
	struct end a, b;
	struct ibv_wc wc;

	open_device();
	begin(&a, PSN_OF_A);
	begin(&b, PSN_OF_B);
	MUST(ibv_destroy_qp(a.qp) == 0);
	init.pd = pd;
	init.send_cq = a.scq;
	init.recv_cq = a.rcq;
	check_failed(!ibv_create_qp_ex(ctx, &init), EOPNOTSUPP, "with Reads");
	init.send_ops_flags &= ~(uint64_t)IBV_QP_EX_WITH_RDMA_READ;
	MUST(a.qp = ibv_create_qp_ex(ctx, &init));
	MUST(ex = ibv_qp_to_qp_ex(a.qp));
	up(&a, name_of(&b));
	up(&b, name_of(&a));
	receive(&b, 5, 0, 100);
	fill(a.memory + ROOM, 200, 9);
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.memory + 500);
	ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.memory + ROOM, 200);
	ex->wr_id = 2;
	ibv_wr_send_imm(ex, htonl(33));
	ibv_wr_set_inline_data(ex, "inline", 6);
	MUST(ibv_wr_complete(ex) == 0);
	wc = poll_one(b.rcq);
	check(wc.status == IBV_WC_SUCCESS && ntohl(wc.imm_data) == 33 && memcmp(b.memory, "inline", 6) == 0, "a Send", "?");
	check(is_filled(b.memory + 500, 200, 9), "behind a Write", "?");
	check(poll_one(a.scq).wr_id == 1 && poll_one(a.scq).wr_id == 2, "both have left", "?");
	end_close(&a);
	end_close(&b);
}

/* An RNIC has no such service. */
static void as_rnic(void)
{
	struct ibv_qp_init_attr init = { .cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_UC };
	struct ibv_qp *qp;

	open_device();
	MUST(init.send_cq = init.recv_cq = ibv_create_cq(ctx, 4, NULL, NULL, 0));
	qp = ibv_create_qp(pd, &init);
	if (as_iwarp()) {
		check_failed(!qp, EOPNOTSUPP, "refused where the device passes for an RNIC");
	} else {
		check(qp, "made where it passes for an adapter of InfiniBand or RoCE", "errno %d", errno);
		MUST(ibv_destroy_qp(qp) == 0);
	}
}

static struct end cancelled[2];

static void last_words(void *lost)
{
	struct name to_b = name_of(&cancelled[1]);

	for (unsigned i = 0; i < 200; i++) {
		struct op op = { .code = i % 2 ? IBV_WR_SEND : IBV_WR_RDMA_WRITE_WITH_IMM, .length = i * 300, .id = i,
				 .memory = to_b.memory, .rkey = to_b.rkey };
		struct ibv_wc wc;

		receive(&cancelled[1], i, 0, ROOM);
		MUST(leaves(&cancelled[0], op));
		*(unsigned *)lost += !poll_within(cancelled[1].rcq, &wc, LIMIT_MS);
	}
}

/* Posting and polling are no cancellation points (pthreads(7)). */
static void cancelling(void)
{
	unsigned lost = 0;

	open_device();
	open_two(&cancelled[0], &cancelled[1]);
	check(gets_through(last_words, &lost) && !lost, "a cancelled thread sends and writes, and ends after it", "%u lost", lost);
	last_words(&lost);
	check(!lost, "another thread then uses the queue pairs", "%u lost", lost);
	end_close(&cancelled[0]);
	end_close(&cancelled[1]);
}

/* All kinds of messages, with completions at both ends. */
static void talk(struct end *a, struct end *b, struct name to_b)
{
	static const uint32_t sizes[] = { 0, 1, 64, 1000, 1500, 9000, 70000, ROOM };
	uint32_t bad = 0;
	struct ibv_wc wc;

	for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		uint32_t size = sizes[i];

		fill(a->memory + ROOM, size, i);
		memset(b->memory, 0, size);
		receive(b, i, 0, size);
		if (!leaves(a, (struct op){ .code = IBV_WR_SEND, .length = size, .id = i }))
			die("a Send of %u bytes does not leave", size);
		wc = poll_one(b->rcq);
		bad += wc.status || wc.opcode != IBV_WC_RECV || wc.byte_len != size || wc.wr_id != i || wc.wc_flags ||
		       wc.qp_num != b->qp->qp_num || !is_filled(b->memory, size, i);
		receive(b, i, 0, size);
		if (!leaves(a, (struct op){ .code = IBV_WR_SEND_WITH_IMM, .length = size, .id = i, .imm = 77 }))
			die("a Send of %u bytes does not leave", size);
		wc = poll_one(b->rcq);
		bad += wc.status || wc.wc_flags != IBV_WC_WITH_IMM || ntohl(wc.imm_data) != 77 || wc.byte_len != size;
		/* The second Write says when the first has come. */
		memset(b->memory, 0, size);
		receive(b, i, 0, 0);
		struct op write = { .code = IBV_WR_RDMA_WRITE, .length = size, .id = i, .memory = to_b.memory, .rkey = to_b.rkey };
		if (!leaves(a, write))
			die("a Write of %u bytes does not leave", size);
		write.code = IBV_WR_RDMA_WRITE_WITH_IMM;
		write.length = 0;
		write.imm = 78;
		if (!leaves(a, write))
			die("a Write with an immediate does not leave");
		wc = poll_one(b->rcq);
		bad += wc.status || wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM || ntohl(wc.imm_data) != 78 || wc.byte_len != 0 ||
		       !is_filled(b->memory, size, i);
	}
	check(bad == 0, "Sends and Writes of eight sizes, with and without immediate", "%u of 24 are wrong", bad);
	memcpy(a->memory + ROOM, "inline", 6);
	receive(b, 1, 0, 64);
	MUST(submit(a, (struct op){ .code = IBV_WR_SEND, .length = 6, .flags = IBV_SEND_INLINE }) == 0);
	memcpy(a->memory + ROOM, "other.", 6);
	wc = poll_one(b->rcq);
	check(wc.byte_len == 6 && memcmp(b->memory, "inline", 6) == 0, "inline bytes are those of the post", "%.6s", b->memory);
	MUST(poll_one(a->scq).status == IBV_WC_SUCCESS);
	for (unsigned i = 0; i < DEPTH; i++)
		receive(b, i, 0, 4);
	for (uint32_t i = 0; i < DEPTH; i++)
		MUST(submit(a, (struct op){ .code = IBV_WR_SEND_WITH_IMM, .length = 4, .id = i, .imm = i }) == 0);
	for (uint32_t i = 0; i < DEPTH; i++) {
		wc = poll_one(a->scq);
		bad += wc.status || wc.wr_id != i;
		wc = poll_one(b->rcq);
		bad += wc.status || wc.wr_id != i || ntohl(wc.imm_data) != i;
	}
	check(bad == 0, "a full queue, in the order of the posts at both ends", "%u of them are not", bad);
}

static void itself(void)
{
	struct end a, b;

	open_device();
	open_two(&a, &b);
	talk(&a, &b, name_of(&b));
	talk(&b, &a, name_of(&a));
	end_close(&a);
	end_close(&b);
	/* One that is its own peer. */
	begin(&a, PSN_OF_A);
	up(&a, name_of(&a));
	talk(&a, &a, name_of(&a));
	end_close(&a);
}

static void shared_receives(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	struct ibv_sge sge;
	struct ibv_recv_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct end a[2], b[2];
	struct ibv_srq *srq;
	struct ibv_wc wc;

	open_device();
	MUST(srq = ibv_create_srq(pd, &attr));
	for (int i = 0; i < 2; i++) {
		begin(&a[i], PSN_OF_A + (uint32_t)i);
		begin_with(&b[i], PSN_OF_B + (uint32_t)i, srq);
		up(&a[i], name_of(&b[i]));
		up(&b[i], name_of(&a[i]));
	}
	for (int round = 0; round < 10; round++) {
		struct end *from = &a[round % 2], *there = &b[round % 2];

		sge = at(&b[0], 0, 1000);
		MUST(ibv_post_srq_recv(srq, &wr, &bad) == 0);
		fill(from->memory + ROOM, 1000, (unsigned)round);
		MUST(leaves(from, (struct op){ .code = IBV_WR_SEND, .length = 1000 }));
		wc = poll_one(there->rcq);
		MUST(wc.status == IBV_WC_SUCCESS && wc.wr_id == 5 && wc.qp_num == there->qp->qp_num);
		MUST(is_filled(b[0].memory, 1000, (unsigned)round));
	}
	check(true, "two queue pairs with shared receives", "?");
	for (int i = 0; i < 2; i++) {
		end_close(&a[i]);
		end_close(&b[i]);
	}
	MUST(ibv_destroy_srq(srq) == 0);
}

static void tell(int fd, struct name name)
{
	MUST(write(fd, &name, sizeof name) == sizeof name);
}

static struct name told(int fd)
{
	struct name name;

	if (read(fd, &name, sizeof name) != sizeof name)
		die("the other process says nothing");
	return name;
}

/* Starts a process that runs `what` and exits. Before the device is opened. */
static pid_t start(void (*what)(int fd), int *fd)
{
	int fds[2];
	pid_t pid;

	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	fflush(stdout);
	MUST((pid = fork()) >= 0);
	if (pid == 0) {
		close(fds[0]);
		what(fds[1]);
		exit(failures ? 1 : 0);
	}
	close(fds[1]);
	*fd = fds[0];
	return pid;
}

static void join(pid_t pid)
{
	int status;

	MUST(waitpid(pid, &status, 0) == pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the other process ends well", "status %#x", status);
}

/* Messages come back as they came, with other bytes. */
static void echoes(int fd)
{
	struct name peer;
	struct ibv_wc wc;
	struct end e;
	char byte;

	open_device();
	begin(&e, PSN_OF_B);
	peer = told(fd);
	up(&e, peer);
	for (unsigned i = 0; i < DEPTH; i++)
		receive(&e, i, 0, ROOM);
	tell(fd, name_of(&e));
	for (;;) {
		if (poll_within(e.rcq, &wc, 1)) {
			struct op op = { .code = IBV_WR_SEND_WITH_IMM, .length = wc.byte_len, .imm = ntohl(wc.imm_data) };

			MUST(wc.status == IBV_WC_SUCCESS);
			for (uint32_t i = 0; i < wc.byte_len; i++)
				e.memory[ROOM + i] = e.memory[i] ^ 0xFF;
			receive(&e, wc.wr_id, 0, ROOM);
			if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
				op = (struct op){ .code = IBV_WR_RDMA_WRITE_WITH_IMM, .length = wc.byte_len, .memory = peer.memory,
						  .rkey = peer.rkey, .imm = op.imm };
			}
			MUST(leaves(&e, op));
		}
		if (recv(fd, &byte, 1, MSG_DONTWAIT) == 1)
			break;
	}
	end_close(&e);
}

static void processes(void)
{
	static const uint32_t sizes[] = { 0, 1, 64, 1400, 9000, 70000, ROOM };
	struct ibv_wc wc;
	struct name peer;
	unsigned bad = 0;
	struct end e;
	pid_t pid;
	int fd;

	pid = start(echoes, &fd);
	open_device();
	begin(&e, PSN_OF_A);
	tell(fd, name_of(&e));
	peer = told(fd);
	up(&e, peer);
	for (unsigned round = 0; round < 200; round++) {
		uint32_t size = sizes[round % 7], imm = round;
		struct op op = { .code = IBV_WR_SEND_WITH_IMM, .length = size, .imm = imm, .memory = peer.memory, .rkey = peer.rkey };

		if (round % 2)
			op.code = IBV_WR_RDMA_WRITE_WITH_IMM;
		fill(e.memory + ROOM, size, round);
		memset(e.memory, 0, size);
		receive(&e, round, 0, ROOM);
		if (!leaves(&e, op))
			die("message %u does not leave", round);
		wc = poll_one(e.rcq);
		for (uint32_t i = 0; i < size; i++)
			e.memory[i] ^= 0xFF;
		bad += wc.status || wc.byte_len != size || ntohl(wc.imm_data) != imm || !is_filled(e.memory, size, round);
	}
	check(bad == 0, "200 messages of up to 1 MiB come back", "%u are wrong", bad);
	MUST(write(fd, "", 1) == 1);
	join(pid);
	/* Sends to who is not there succeed. */
	MUST(leaves(&e, (struct op){ .code = IBV_WR_SEND, .length = 64 }));
	end_close(&e);
}

/* What is not taken: the sender hears nothing, the receiver completes nothing, no byte moves. */
static void dropped(void)
{
	struct op send = { .code = IBV_WR_SEND, .length = 100 }, write = { .code = IBV_WR_RDMA_WRITE, .length = 100 };
	struct ibv_qp_attr attr = { .qp_access_flags = 0 };
	struct end a, b, c;
	struct ibv_mr *read_only;

	open_device();
	begin(&a, PSN_OF_A);
	begin(&b, PSN_OF_B);
	begin(&c, PSN_OF_A);
	up(&a, name_of(&b));
	fill(a.memory + ROOM, 100, 1);
	fill(c.memory + ROOM, 100, 1);
	MUST(read_only = ibv_reg_mr(pd, b.memory, ROOM, 0));
	write.memory = (uintptr_t)b.memory;
	write.rkey = b.mr->rkey;
	check(leaves(&a, send) && nothing_comes(&b), "before RTR", "a completion");
	up_to_rtr(&b, name_of(&a));
	check(leaves(&a, send) && nothing_comes(&b), "without a receive", "a completion");
	receive(&b, 1, 0, 99);
	check(leaves(&a, send) && nothing_comes(&b), "longer than its receive", "a completion");
	send.length = 99;
	fill(a.memory + ROOM, 100, 2);
	check(leaves(&a, send) && poll_one(b.rcq).wr_id == 1 && is_filled(b.memory, 99, 2), "which the next one takes, in RTR", "?");
	memset(b.memory, 0, 100);
	receive(&b, 2, 500, 100);
	/* Another queue pair of the same process, with the right PSN. */
	up(&c, name_of(&b));
	check(leaves(&c, send) && leaves(&c, write) && nothing_comes(&b), "of another queue pair", "a completion");
	write.rkey = read_only->rkey;
	check(leaves(&a, write) && nothing_comes(&b), "a Write to memory without the right", "a completion");
	write.rkey = b.mr->rkey ^ 0x100;
	check(leaves(&a, write) && nothing_comes(&b), "a Write with another key", "a completion");
	write.rkey = b.mr->rkey;
	write.memory = (uintptr_t)b.memory + 2 * ROOM - 50;
	check(leaves(&a, write) && nothing_comes(&b), "a Write beyond the end of memory", "a completion");
	write.memory = (uintptr_t)b.memory;
	MUST(ibv_modify_qp(b.qp, &attr, IBV_QP_ACCESS_FLAGS) == EINVAL);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = b.psn };
	MUST(ibv_modify_qp(b.qp, &attr, RTS_MASK | IBV_QP_ACCESS_FLAGS) == 0);
	check(leaves(&a, write) && nothing_comes(&b), "a Write where the queue pair grants none", "a completion");
	/* Another life of the peer. */
	MUST(to(a.qp, IBV_QPS_RESET) == 0);
	a.psn++;
	up(&a, name_of(&b));
	check(leaves(&a, send) && nothing_comes(&b), "with another PSN", "a completion");
	for (unsigned i = 0; i < 600; i++)
		if (b.memory[i])
			die("byte %u was written", i);
	check(true, "no byte of all that was written", "?");
	MUST(ibv_dereg_mr(read_only) == 0);
	end_close(&a);
	end_close(&b);
	end_close(&c);
}

static void errors(void)
{
	struct op send = { .code = IBV_WR_SEND, .length = 100, .id = 1, .lkey = 0x77 };
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct end a, b;

	open_device();
	open_two(&a, &b);
	receive(&a, 9, 0, 100);
	receive(&b, 9, 0, 100);
	MUST(submit(&a, send) == 0);
	want_wc(a.scq, IBV_WC_LOC_PROT_ERR, "a Send from memory with a wrong key");
	MUST(ibv_query_qp(a.qp, &attr, IBV_QP_STATE, &init) == 0);
	check(attr.qp_state == IBV_QPS_SQE, "leads to SQE", "state %d", attr.qp_state);
	send.lkey = 0;
	MUST(submit(&a, send) == 0);
	want_wc(a.scq, IBV_WC_WR_FLUSH_ERR, "where Sends are flushed");
	check(leaves(&b, send) && poll_one(a.rcq).wr_id == 9, "and messages arrive", "?");
	check_errno(to(a.qp, IBV_QPS_RTS), 0, "RTS again");
	check(leaves(&a, send) && poll_one(b.rcq).wr_id == 9, "and Sends leave", "?");
	receive(&a, 10, 0, 100);
	check_errno(to(a.qp, IBV_QPS_ERR), 0, "ERR");
	want_wc(a.rcq, IBV_WC_WR_FLUSH_ERR, "its receive is flushed");
	MUST(submit(&a, send) == 0);
	want_wc(a.scq, IBV_WC_WR_FLUSH_ERR, "and its Sends");
	MUST(to(a.qp, IBV_QPS_RESET) == 0);
	up(&a, name_of(&b));
	receive(&b, 11, 0, 100);
	check(leaves(&a, send) && poll_one(b.rcq).wr_id == 11, "a new life", "?");
	/* The memory of a receive. */
	struct ibv_sge sge = { .addr = (uintptr_t)b.memory, .length = 100, .lkey = 0x77 };
	struct ibv_recv_wr wr = { .wr_id = 12, .sg_list = &sge, .num_sge = 1 }, *bad;
	MUST(ibv_post_recv(b.qp, &wr, &bad) == 0);
	MUST(leaves(&a, send));
	want_wc(b.rcq, IBV_WC_LOC_PROT_ERR, "a receive into memory with a wrong key");
	MUST(ibv_query_qp(b.qp, &attr, IBV_QP_STATE, &init) == 0);
	check(attr.qp_state == IBV_QPS_ERR, "leads to ERR", "state %d", attr.qp_state);
	end_close(&a);
	end_close(&b);
}

/* From now on another user of the host, where this process may become one. */
/* Says, when asked, how many messages its two queue pairs have received. */
static void counts(int fd)
{
	struct end e[2];
	uint32_t got = 0;
	struct ibv_wc wc;
	char word;

	open_device();
	for (int k = 0; k < 2; k++) {
		struct name peer = told(fd);

		begin(&e[k], PSN_OF_B);
		up(&e[k], peer);
		for (uint32_t i = 0; i < DEPTH; i++)
			receive(&e[k], i, 0, ROOM);
		tell(fd, name_of(&e[k]));
	}
	for (;;) {
		for (int k = 0; k < 2; k++)
			if (ibv_poll_cq(e[k].rcq, 1, &wc) == 1)
				got += wc.status == IBV_WC_SUCCESS;
		if (recv(fd, &word, 1, MSG_DONTWAIT) != 1)
			continue;
		if (word == 'q')
			exit(0);
		MUST(write(fd, &got, sizeof got) == sizeof got);
	}
}

static uint32_t counted(int fd)
{
	uint32_t got;

	MUST(write(fd, "?", 1) == 1 && read(fd, &got, sizeof got) == sizeof got);
	return got;
}

/* A good message, and behind it one that cannot be read: both would travel in one packet. */
static void post_good_and_bad(struct end *e, uint32_t length)
{
	struct ibv_sge sge[2] = { at(e, ROOM, length), at(e, ROOM, 100) };
	struct ibv_send_wr wr[2] = {
		{ .wr_id = 1, .sg_list = &sge[0], .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED, .next = &wr[1] },
		{ .wr_id = 2, .sg_list = &sge[1], .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED },
	}, *bad;

	sge[1].lkey = 0x77;
	MUST(ibv_post_send(e->qp, wr, &bad) == 0);
}

/* What cannot be read fails alone: also of two queue pairs whose messages wait for the first contact together. */
static void unreadable(void)
{
	int fd;
	pid_t target = start(counts, &fd);
	uint32_t sent = 0;
	struct end e[2];

	open_device();
	for (int k = 0; k < 2; k++) {
		begin(&e[k], PSN_OF_A);
		tell(fd, name_of(&e[k]));
		up(&e[k], told(fd));
	}
	for (uint32_t length = 100; length < 200000; length *= 12) {
		post_good_and_bad(&e[0], length);
		post_good_and_bad(&e[1], length);
		for (int k = 0; k < 2; k++) {
			struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS };
			struct ibv_wc good = poll_one(e[k].scq), bad = poll_one(e[k].scq);

			if (good.wr_id != 1 || good.status || bad.wr_id != 2 || bad.status != IBV_WC_LOC_PROT_ERR)
				check(false, "what cannot be read fails alone", "%s, %s", ibv_wc_status_str(good.status), ibv_wc_status_str(bad.status));
			MUST(ibv_modify_qp(e[k].qp, &rts, IBV_QP_STATE) == 0);
		}
		sent += 2;
		for (int i = 0; i < 200 && counted(fd) < sent; i++)
			usleep(10000);
		check(counted(fd) == sent, "the others arrive", "%u of %u, with %u bytes", counted(fd), sent, length);
	}
	MUST(write(fd, "q", 1) == 1);
	join(target);
	end_close(&e[0]);
	end_close(&e[1]);
}

static void become_nobody(void)
{
	const unsigned nobody = 65534, was = geteuid();

	if (was == 0)
		MUST(setgid(nobody) == 0 && setuid(nobody) == 0);
	printf("# the target is of user %u, who attacks it is user %u\n", was, geteuid());
}

/* Knows number, PSN, key and address of the target, and number and PSN of its peer. */
static void attacks(int fd)
{
	struct name target;
	struct end e;

	become_nobody();
	open_device();
	target = told(fd);
	begin(&e, PSN_OF_A);
	up(&e, target);
	memset(e.memory + ROOM, 0xBA, 100);
	for (int i = 0; i < 100; i++) {
		MUST(leaves(&e, (struct op){ .code = IBV_WR_SEND, .length = 100 }));
		MUST(leaves(&e, (struct op){ .code = IBV_WR_RDMA_WRITE, .length = 100, .memory = target.memory, .rkey = target.rkey }));
		MUST(leaves(&e, (struct op){ .code = IBV_WR_RDMA_WRITE_WITH_IMM, .length = 100, .memory = target.memory,
					     .rkey = target.rkey }));
	}
	MUST(write(fd, "", 1) == 1);
	end_close(&e);
}

static void attacked(void)
{
	struct end a, b;
	pid_t pid;
	char byte;
	int fd;

	pid = start(attacks, &fd);
	open_device();
	open_two(&a, &b);
	for (unsigned i = 0; i < 8; i++)
		receive(&b, i, 1000 * i, 100);
	tell(fd, name_of(&b));
	MUST(read(fd, &byte, 1) == 1);
	check(nothing_comes(&b), "300 messages of another user's queue pair", "a completion");
	for (unsigned i = 0; i < 2 * ROOM; i++)
		if (b.memory[i])
			die("byte %u was written", i);
	check(true, "place nothing", "?");
	fill(a.memory + ROOM, 100, 3);
	check(leaves(&a, (struct op){ .code = IBV_WR_SEND, .length = 100 }) && poll_one(b.rcq).wr_id == 0 &&
	      is_filled(b.memory, 100, 3), "and the peer's arrive", "?");
	join(pid);
	end_close(&a);
	end_close(&b);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "attributes", attributes }, { "extended", extended }, { "as_rnic", as_rnic }, { "itself", itself }, { "shared_receives", shared_receives },
		{ "processes", processes }, { "dropped", dropped }, { "errors", errors }, { "unreadable", unreadable }, { "attacked", attacked },
		{ "cancelling", cancelling },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
