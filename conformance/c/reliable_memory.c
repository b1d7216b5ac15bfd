/* RDMA without connections: Writes, Reads and atomic operations of reliable datagrams (uwarpdv_create_qp(3)), between two
 * processes and within one.
 *
 *	reliable_memory ADDRESS [GROUP]	the address is not used */
#define _GNU_SOURCE
#include "reliable.h"

#define JOB 0x0123456789abcdefull
#define REMOTE (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

static const struct how plain = { .job_key = JOB, .access = REMOTE };
static __typeof__(uwarpdv_wr_set_job_key) *set_job_key;
static __typeof__(uwarpdv_allow_source) *allow_source;

static const uint32_t lengths[] = { 0, 1, 64, 1300, 1401, 1500, 4096, 65536, 262144, 1000003 };
#define LENGTHS (sizeof lengths / sizeof *lengths)

/* What to do, and to which memory. */
struct op {
	enum ibv_wr_opcode code;
	uint32_t rkey;
	uint64_t addr, operand, swap, job_key;	/* 0: the queue pair's own key */
	uint64_t id;
	size_t at;			/* in the upper half of the own memory */
	uint32_t length, imm;
	unsigned flags;
};

/* Memory of another queue pair, as its program tells it. */
struct target {
	uint32_t qpn, rkey;
	uint64_t addr;
};

static struct target target_of(const struct end *e)
{
	return (struct target){ .qpn = e->qp->qp_num, .rkey = e->mr->rkey, .addr = (uintptr_t)e->memory };
}

static void open_both(void)
{
	open_device();
	MUST(set_job_key = (__typeof__(set_job_key))dlvsym(RTLD_DEFAULT, "uwarpdv_wr_set_job_key", "UWARPDV_1.0"));
	MUST(allow_source = (__typeof__(allow_source))dlvsym(RTLD_DEFAULT, "uwarpdv_allow_source", "UWARPDV_1.0"));
}

static void tell(int fd, struct target target)
{
	MUST(write(fd, &target, sizeof target) == sizeof target);
}

static struct target told(int fd)
{
	struct target target;

	if (read(fd, &target, sizeof target) != sizeof target)
		die("the other process says nothing");
	return target;
}

static void start_op(struct end *e, struct target to, struct op op)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(e->qp);
	int error;

	ibv_wr_start(ex);
	ex->wr_id = op.id;
	ex->wr_flags = IBV_SEND_SIGNALED | op.flags;
	switch (op.code) {
	case IBV_WR_RDMA_WRITE:
		ibv_wr_rdma_write(ex, op.rkey, op.addr);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		ibv_wr_rdma_write_imm(ex, op.rkey, op.addr, htonl(op.imm));
		break;
	case IBV_WR_RDMA_READ:
		ibv_wr_rdma_read(ex, op.rkey, op.addr);
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		ibv_wr_atomic_fetch_add(ex, op.rkey, op.addr, op.operand);
		break;
	default:
		ibv_wr_atomic_cmp_swp(ex, op.rkey, op.addr, op.operand, op.swap);
	}
	if (op.job_key)
		set_job_key(ex, op.job_key);
	ibv_wr_set_ud_addr(ex, e->ah, to.qpn, QKEY);
	ibv_wr_set_sge(ex, e->mr->lkey, (uintptr_t)(outgoing(e) + op.at), op.length);
	error = ibv_wr_complete(ex);
	if (error)
		die("post: %d", error);
}

static struct ibv_wc result(struct end *e, struct target to, struct op op)
{
	start_op(e, to, op);
	return poll_one(e->scq);
}

static void must_be(struct ibv_wc wc, enum ibv_wc_status status, const char *name)
{
	check(wc.status == status, name, "%s", ibv_wc_status_str(wc.status));
}

static void pattern(unsigned char *at, uint32_t length, uint32_t seed)
{
	for (uint32_t i = 0; i < length; i++)
		at[i] = (unsigned char)(i * 7 + i / 251 + seed * 31);
}

static bool has_pattern(const unsigned char *at, uint32_t length, uint32_t seed)
{
	for (uint32_t i = 0; i < length; i++)
		if (at[i] != (unsigned char)(i * 7 + i / 251 + seed * 31))
			return false;
	return true;
}

/* Shows its memory until the other process has done what it wants. */
static void offers(int fd)
{
	struct end e;

	open_both();
	end_open(&e, plain);
	pattern(e.memory, ROOM, 1);
	tell(fd, target_of(&e));
	hear(fd);
	end_close(&e);
}

/* Each length into the other's memory and back from there. */
static void write_and_read(struct end *e, struct target to)
{
	for (unsigned i = 0; i < LENGTHS && !failures; i++) {
		uint32_t length = lengths[i];
		struct op op = { .code = IBV_WR_RDMA_WRITE, .rkey = to.rkey, .addr = to.addr + 5, .length = length, .id = i };
		struct ibv_wc wc;

		pattern(outgoing(e), length, i);
		wc = result(e, to, op);
		if (wc.status != IBV_WC_SUCCESS || wc.wr_id != i || wc.opcode != IBV_WC_RDMA_WRITE)
			check(false, "a Write completes", "%s, %u bytes", ibv_wc_status_str(wc.status), length);
		memset(outgoing(e), 0, length + 1);
		op.code = IBV_WR_RDMA_READ;
		wc = result(e, to, op);
		if (wc.status != IBV_WC_SUCCESS || wc.opcode != IBV_WC_RDMA_READ || wc.byte_len != length)
			check(false, "a Read completes", "%s, %u bytes of %u", ibv_wc_status_str(wc.status), wc.byte_len, length);
		if (!has_pattern(outgoing(e), length, i) || outgoing(e)[length])
			check(false, "with its bytes", "not of %u", length);
	}
	check(!failures, "Writes and Reads of 0 to 1,000,003 bytes", "see above");
}

static void both_ways(void)
{
	struct other other = start(offers);
	struct end e;

	open_both();
	end_open(&e, plain);
	write_and_read(&e, told(other.fd));
	say(other.fd, 0);
	join(other, "the target, too");
	end_close(&e);
}

#define ROUNDS 300

/* Spins on the last byte of what comes: all before it is there, and so is the message before. */
static void sees_flags(int fd)
{
	struct end e;
	uint32_t wrong = 0;

	open_both();
	end_open(&e, (struct how){ .order = UWARPDV_ORDER_ALL, .job_key = JOB, .access = REMOTE });
	memset(e.memory, 0, ROOM);
	tell(fd, target_of(&e));
	for (uint32_t turn = 1; turn <= ROUNDS; turn++) {
		volatile unsigned char *flag = e.memory + 20000;
		uint32_t length = 1 + turn * 37 % 9000;
		uint64_t until = now_ms() + LIMIT_MS;
		struct ibv_wc wc;

		while (*flag != (unsigned char)turn) {
			MUST(ibv_poll_cq(e.rcq, 1, &wc) == 0);
			if (now_ms() > until)
				die("flag %u does not come", turn);
		}
		wrong += !has_pattern(e.memory, length, turn);
		say(fd, turn);
	}
	check(!wrong, "each flag comes behind its data", "%u before", wrong);
	end_close(&e);
}

static void flags(void)
{
	struct other other = start(sees_flags);
	struct target to;
	struct end e;

	open_both();
	end_open(&e, (struct how){ .order = UWARPDV_ORDER_ALL, .job_key = JOB });
	to = told(other.fd);
	for (uint32_t turn = 1; turn <= ROUNDS; turn++) {
		struct op data = { .code = IBV_WR_RDMA_WRITE, .rkey = to.rkey, .addr = to.addr, .length = 1 + turn * 37 % 9000 };
		struct op flag = { .code = IBV_WR_RDMA_WRITE, .rkey = to.rkey, .addr = to.addr + 20000, .at = 20000, .length = 1 };

		pattern(outgoing(&e), data.length, turn);
		outgoing(&e)[flag.at] = (unsigned char)turn;
		start_op(&e, to, data);
		start_op(&e, to, flag);
		if (poll_one(e.scq).status != IBV_WC_SUCCESS || poll_one(e.scq).status != IBV_WC_SUCCESS)
			die("Write %u", turn);
		hear(other.fd);
	}
	join(other, "all of them");
	end_close(&e);
}

static void is_asked_in_order(int fd)
{
	struct end e;

	open_both();
	end_open(&e, (struct how){ .order = UWARPDV_ORDER_ALL, .job_key = JOB, .access = REMOTE });
	memset(e.memory, 0, ROOM);
	tell(fd, target_of(&e));
	hear(fd);
	end_close(&e);
}

/* Reads and atomic operations behind Writes and atomic operations of the same place, all posted together. */
static void in_order(void)
{
	struct other other = start(is_asked_in_order);
	uint32_t stale = 0, uncounted = 0, unseen = 0;
	struct target to;
	struct end e;

	open_both();
	end_open(&e, (struct how){ .order = UWARPDV_ORDER_RDMA_RAW, .job_key = JOB });
	to = told(other.fd);
	for (uint64_t turn = 1; turn <= ROUNDS; turn++) {
		const size_t back = 100000, words = 200000;
		uint32_t length = 8 + (uint32_t)turn * 37 % 9000;
		uint64_t count = to.addr + 40000, flag = count + 8, *own = (uint64_t *)(outgoing(&e) + words);

		pattern(outgoing(&e), length, (uint32_t)turn);
		memset(outgoing(&e) + back, 0, length);
		own[0] = turn * 10;
		own[1] = own[2] = own[3] = 0;
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_WRITE, .rkey = to.rkey, .addr = to.addr, .length = length });
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .at = back, .length = length });
		start_op(&e, to, (struct op){ .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .rkey = to.rkey, .addr = count, .operand = 1,
					      .at = words + 8, .length = 8 });
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = count, .at = words + 16, .length = 8 });
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_WRITE, .rkey = to.rkey, .addr = flag, .at = words, .length = 8 });
		start_op(&e, to, (struct op){ .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .rkey = to.rkey, .addr = flag, .operand = 1,
					      .at = words + 24, .length = 8 });
		for (int i = 0; i < 6; i++)
			if (poll_one(e.scq).status != IBV_WC_SUCCESS)
				die("turn %u", (unsigned)turn);
		stale += !has_pattern(outgoing(&e) + back, length, (uint32_t)turn);
		uncounted += own[1] != turn - 1 || own[2] != turn;
		unseen += own[3] != turn * 10;
	}
	check(!stale, "a Read returns what was written before it", "%u of %d others", stale, ROUNDS);
	check(!uncounted, "and what was added before it", "%u of %d others", uncounted, ROUNDS);
	check(!unseen, "an atomic operation finds what was written before it", "%u of %d others", unseen, ROUNDS);
	say(other.fd, 0);
	join(other, "all of them");
	end_close(&e);
}

static void takes_immediates(int fd)
{
	uint32_t wrong = 0;
	struct end e;

	open_both();
	end_open(&e, plain);
	tell(fd, target_of(&e));
	for (unsigned i = 0; i < LENGTHS; i++) {
		struct ibv_wc wc;

		/* The second one waits for its receive. */
		if (i == 1)
			usleep(2000);
		MUST(ibv_post_recv(e.qp, &(struct ibv_recv_wr){ .wr_id = i }, &(struct ibv_recv_wr *){ NULL }) == 0);
		wc = poll_one(e.rcq);
		wrong += wc.status != IBV_WC_SUCCESS || wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM || wc.wr_id != i ||
			 !(wc.wc_flags & IBV_WC_WITH_IMM) || ntohl(wc.imm_data) != 1000 + i || wc.byte_len != lengths[i] ||
			 !has_pattern(e.memory, lengths[i], i);
		say(fd, i);
	}
	check(!wrong, "Writes with immediate data take a receive each, of any length", "%u are wrong", wrong);
	end_close(&e);
}

static void immediates(void)
{
	struct other other = start(takes_immediates);
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	for (unsigned i = 0; i < LENGTHS; i++) {
		struct op op = { .code = IBV_WR_RDMA_WRITE_WITH_IMM, .rkey = to.rkey, .addr = to.addr, .length = lengths[i],
				 .imm = 1000 + i };
		struct ibv_wc wc;

		pattern(outgoing(&e), lengths[i], i);
		wc = result(&e, to, op);
		if (wc.status != IBV_WC_SUCCESS || wc.opcode != IBV_WC_RDMA_WRITE)
			check(false, "a Write with immediate data completes", "%s", ibv_wc_status_str(wc.status));
		hear(other.fd);
	}
	join(other, "at the target");
	end_close(&e);
}

#define MANY_READS 200

static void many_reads(void)
{
	struct other other = start(offers);
	uint32_t wrong = 0;
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	for (uint64_t i = 0; i < MANY_READS; i++)
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr + 251 * i, .id = i,
					      .at = 5000 * i, .length = (uint32_t)(i * 25) });
	for (unsigned i = 0; i < MANY_READS; i++) {
		struct ibv_wc wc = poll_one(e.scq);

		wrong += wc.status != IBV_WC_SUCCESS || wc.byte_len != wc.wr_id * 25;
		for (uint32_t at = 0; at < wc.wr_id * 25; at++)
			wrong += outgoing(&e)[5000 * wc.wr_id + at] !=
				 (unsigned char)((251 * wc.wr_id + at) * 7 + (251 * wc.wr_id + at) / 251 + 31);
	}
	check(!wrong, "200 Reads that are posted at once", "%u wrong", wrong);
	say(other.fd, 0);
	join(other, "from the other process");
	end_close(&e);
}

#define DEEP 250
#define ALL_READS 5000

/* More than a process answers at a time: whoever waits must not take the numbers that the answers need. */
static void reads_deep(struct end *e, int fd)
{
	unsigned posted = 0, wrong = 0;
	struct target to;

	tell(fd, target_of(e));
	to = told(fd);
	for (unsigned done = 0; done < ALL_READS; done++) {
		struct ibv_wc wc;

		for (; posted < ALL_READS && posted - done < DEEP; posted++)
			start_op(e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .length = 1000 });
		wc = poll_one(e->scq);
		wrong += wc.status != IBV_WC_SUCCESS;
	}
	check(!wrong, "5,000 Reads each way, 250 at a time", "%u fail", wrong);
	say(fd, 0);
	hear(fd);
	end_close(e);
}

static void reads_back(int fd)
{
	struct end e;

	open_both();
	end_open(&e, plain);
	reads_deep(&e, fd);
}

static void deep(void)
{
	struct other other = start(reads_back);
	struct end e;

	open_both();
	end_open(&e, plain);
	reads_deep(&e, other.fd);
	join(other, "both");
}

#define ADDS 2000

/* Adds to the counter of another process until it has done its share. */
static void adds(int fd)
{
	struct target to;
	uint32_t wrong = 0, posted = 0, done = 0;
	uint64_t last = 0;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(fd);
	while (done < ADDS) {
		while (posted < ADDS && posted - done < 32) {
			start_op(&e, to, (struct op){ .code = IBV_WR_ATOMIC_FETCH_AND_ADD, .rkey = to.rkey, .addr = to.addr + 64,
						      .operand = 3, .at = 8 * (posted % 32), .length = 8, .id = posted % 32 });
			posted++;
		}
		struct ibv_wc wc = poll_one(e.scq);
		uint64_t before;

		memcpy(&before, outgoing(&e) + 8 * wc.wr_id, 8);
		wrong += wc.status != IBV_WC_SUCCESS || wc.opcode != IBV_WC_FETCH_ADD || before % 3 || before > 3 * 3 * ADDS;
		last = before > last ? before : last;
		done++;
	}
	check(!wrong, "2,000 fetch-and-adds", "%u wrong", wrong);
	say(fd, (uint32_t)last);
	end_close(&e);
}

static void atomics(void)
{
	struct other others[3];
	uint64_t *counter, swapped, misaligned;
	uint32_t largest = 0;
	struct target own;
	struct op swap;
	struct end e;

	for (int i = 0; i < 3; i++)
		others[i] = start(adds);
	open_both();
	end_open(&e, plain);
	own = target_of(&e);
	counter = (uint64_t *)(e.memory + 64);
	for (int i = 0; i < 3; i++)
		tell(others[i].fd, own);
	for (int i = 0; i < 3; i++) {
		uint32_t last = hear(others[i].fd);

		largest = last > largest ? last : largest;
		join(others[i], "one adder");
	}
	check(*counter == 3ull * 3 * ADDS && largest == *counter - 3, "add up", "%llu, the last saw %u", (unsigned long long)*counter,
	      largest);
	swap = (struct op){ .code = IBV_WR_ATOMIC_CMP_AND_SWP, .rkey = own.rkey, .addr = own.addr + 64, .operand = 1, .swap = 7,
			    .length = 8 };
	must_be(result(&e, own, swap), IBV_WC_SUCCESS, "a compare-and-swap of its own memory");
	memcpy(&swapped, outgoing(&e), 8);
	check(swapped == 3ull * 3 * ADDS && *counter == swapped, "changes nothing where another value is", "%llu",
	      (unsigned long long)swapped);
	swap.operand = swapped;
	must_be(result(&e, own, swap), IBV_WC_SUCCESS, "with the right value");
	check(*counter == 7, "swaps", "%llu", (unsigned long long)*counter);
	swap.addr += 4;
	misaligned = *counter;
	must_be(result(&e, own, swap), IBV_WC_REM_INV_REQ_ERR, "an address that is not a multiple of 8 is refused");
	check(*counter == misaligned, "and changes nothing", "%llu", (unsigned long long)*counter);
	end_close(&e);
}

/* From now on another user of the host, where this process may become one. */
static void become_nobody(void)
{
	const unsigned nobody = 65534, was = geteuid();

	if (was == 0)
		MUST(setgid(nobody) == 0 && setuid(nobody) == 0);
	printf("# the target is of user %u, who attacks it is user %u\n", was, geteuid());
}

/* What another process must not do with it. */
static void guards(int fd)
{
	union ibv_gid nobody = { .raw = { 0xfd, 1 } };
	struct end open, none, listed, read_only;
	struct ibv_mr *unreadable;
	unsigned char *memory;
	struct target to;

	open_both();
	end_open(&open, plain);
	end_open(&none, (struct how){ .access = REMOTE });
	end_open(&listed, plain);
	end_open(&read_only, (struct how){ .job_key = JOB, .access = IBV_ACCESS_REMOTE_READ });
	MUST(allow_source(listed.qp, &nobody, 64, UWARPDV_ANY_QPN) == 0);
	check_errno(allow_source(listed.qp, &nobody, 129, UWARPDV_ANY_QPN), EINVAL, "a prefix of 129 bits");
	MUST(memory = calloc(1, 4096));
	MUST(unreadable = ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	tell(fd, target_of(&open));
	tell(fd, target_of(&none));
	tell(fd, target_of(&listed));
	tell(fd, target_of(&read_only));
	to = (struct target){ .qpn = open.qp->qp_num, .rkey = unreadable->rkey, .addr = (uintptr_t)memory };
	tell(fd, to);
	hear(fd);
	MUST(allow_source(listed.qp, &own_gid, 128, UWARPDV_ANY_QPN) == 0);
	say(fd, 0);
	hear(fd);
	check(!open.memory[0] && !none.memory[0] && !read_only.memory[0] && !memory[0], "no byte of it was changed", "one was");
	check(listed.memory[0] == 0x5a, "but by the source that is named", "%#x", listed.memory[0]);
	MUST(ibv_dereg_mr(unreadable) == 0);
	free(memory);
	end_close(&open);
	end_close(&none);
	end_close(&listed);
	end_close(&read_only);
}

static void rights(void)
{
	struct other other = start(guards);
	struct target open, none, listed, read_only, unreadable;
	struct op write = { .code = IBV_WR_RDMA_WRITE, .length = 8 }, op;
	struct end e;

	become_nobody();
	open_both();
	end_open(&e, plain);
	memset(outgoing(&e), 0x5a, 64);
	open = told(other.fd);
	none = told(other.fd);
	listed = told(other.fd);
	read_only = told(other.fd);
	unreadable = told(other.fd);
	write.rkey = open.rkey;
	write.addr = open.addr;
	op = write;
	op.job_key = JOB + 1;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "a Write with another job key");
	op.code = IBV_WR_RDMA_READ;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "a Read");
	op.code = IBV_WR_ATOMIC_FETCH_AND_ADD;
	op.operand = 1;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "an atomic operation");
	op = write;
	op.rkey ^= 0x55;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "another key of a region");
	op = write;
	op.addr += 2 * ROOM - 7;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "beyond the region");
	op.length = 1u << 20;
	op.addr = open.addr + 2 * ROOM - (1u << 20) + 1;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "a long Write of which the last byte is beyond it");
	op = write;
	op.rkey = none.rkey;
	op.addr = none.addr;
	must_be(result(&e, none, op), IBV_WC_REM_INV_REQ_ERR, "a queue pair without a job key");
	op.rkey = read_only.rkey;
	op.addr = read_only.addr;
	must_be(result(&e, read_only, op), IBV_WC_REM_ACCESS_ERR, "a Write of memory that may only be read");
	op.code = IBV_WR_RDMA_READ;
	op.at = 64;
	must_be(result(&e, read_only, op), IBV_WC_SUCCESS, "which a Read does");
	op.rkey = unreadable.rkey;
	op.addr = unreadable.addr;
	must_be(result(&e, open, op), IBV_WC_REM_ACCESS_ERR, "a Read of memory that may only be written");
	op = write;
	op.rkey = listed.rkey;
	op.addr = listed.addr;
	must_be(result(&e, listed, op), IBV_WC_REM_ACCESS_ERR, "a source that is not named");
	say(other.fd, 0);
	hear(other.fd);
	must_be(result(&e, listed, op), IBV_WC_SUCCESS, "one that is");
	say(other.fd, 0);
	join(other, "the guarded end");
	end_close(&e);
}

/* A peer that guesses keys is refused for a while, whatever it knows. */
static void guesses(void)
{
	struct other other = start(offers);
	struct target to;
	struct op op = { .code = IBV_WR_RDMA_READ, .length = 8 };
	struct end e;

	become_nobody();
	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	op.addr = to.addr;
	for (uint32_t i = 1; i <= 16; i++) {
		op.rkey = to.rkey + (i << 8);
		if (result(&e, to, op).status != IBV_WC_REM_ACCESS_ERR)
			die("guess %u", i);
	}
	op.rkey = to.rkey;
	must_be(result(&e, to, op), IBV_WC_REM_ACCESS_ERR, "after 16 guesses, the right key is refused, too");
	sleep(2);
	must_be(result(&e, to, op), IBV_WC_SUCCESS, "and taken again later");
	say(other.fd, 0);
	join(other, "the target");
	end_close(&e);
}

/* Takes its memory away and shows it again while it is read. */
static void withdraws(int fd)
{
	struct end e;

	open_both();
	end_open(&e, plain);
	tell(fd, target_of(&e));
	while (readable(fd, 3) == 0) {
		MUST(ibv_rereg_mr(e.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == 0);
		usleep(500);
		MUST(ibv_rereg_mr(e.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE | REMOTE) == 0);
	}
	hear(fd);
	end_close(&e);
}

static void withdrawn(void)
{
	struct other other = start(withdraws);
	unsigned good = 0, refused = 0, wrong = 0;
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	/* After 16 refusals, more would follow whatever the memory is. */
	for (unsigned i = 0; i < 300 && refused < 14; i++) {
		struct op op = { .code = i % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, .rkey = to.rkey, .addr = to.addr,
				 .length = 300000 };
		struct ibv_wc wc = result(&e, to, op);

		good += wc.status == IBV_WC_SUCCESS;
		refused += wc.status == IBV_WC_REM_ACCESS_ERR;
		wrong += wc.status != IBV_WC_SUCCESS && wc.status != IBV_WC_REM_ACCESS_ERR;
	}
	check(!wrong && good + refused > 13, "each ends while the memory comes and goes", "%u, %u, %u", good, refused, wrong);
	say(other.fd, 0);
	join(other, "the target");
	end_close(&e);
}

/* The own memory goes while answers are awaited: all requests end, those that waited for a place, too. */
static void sink_gone(void)
{
	struct other other = start(offers);
	unsigned good = 0, local = 0;
	struct target to;
	struct ibv_mr *sink;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	MUST(sink = ibv_reg_mr(pd, outgoing(&e), ROOM, IBV_ACCESS_LOCAL_WRITE));
	for (uint64_t i = 0; i < 100; i++) {
		struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(e.qp);

		ibv_wr_start(ex);
		ex->wr_id = i;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_read(ex, to.rkey, to.addr);
		ibv_wr_set_ud_addr(ex, e.ah, to.qpn, QKEY);
		ibv_wr_set_sge(ex, sink->lkey, (uintptr_t)outgoing(&e), 1u << 20);
		MUST(ibv_wr_complete(ex) == 0);
	}
	MUST(ibv_dereg_mr(sink) == 0);
	for (unsigned i = 0; i < 100; i++) {
		enum ibv_wc_status status = poll_one(e.scq).status;

		good += status == IBV_WC_SUCCESS;
		local += status == IBV_WC_LOC_PROT_ERR;
	}
	check(good + local == 100 && local, "Reads into memory that is deregistered end", "%u succeed, %u fail", good, local);
	must_be(result(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .length = 64 }),
		IBV_WC_SUCCESS, "and the queue pair goes on");
	say(other.fd, 0);
	join(other, "the target, too");
	end_close(&e);
}

/* Names memory of the other process wrongly, and is then read by it. */
static void guesses_first(int fd)
{
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	pattern(e.memory, 4096, 3);
	to = told(fd);
	for (uint32_t i = 1; i <= 20; i++)
		result(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey + (i << 8), .addr = to.addr, .length = 8 });
	tell(fd, target_of(&e));
	hear(fd);
	end_close(&e);
}

static void answers_count_under_a_penalty(void)
{
	struct other other = start(guesses_first);
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	tell(other.fd, target_of(&e));
	to = told(other.fd);
	must_be(result(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .length = 4096 }),
		IBV_WC_SUCCESS, "a peer that has guessed too often still answers");
	check(has_pattern(outgoing(&e), 4096, 3), "with its bytes", "others");
	say(other.fd, 0);
	join(other, "the other one");
	end_close(&e);
}

/* Is killed while it is read, or ends its queue pair. */
static void leaves(int fd)
{
	struct end e;

	open_both();
	end_open(&e, plain);
	tell(fd, target_of(&e));
	hear(fd);
	kill(getpid(), SIGKILL);
}

static void killed(void)
{
	struct other other = start(leaves);
	unsigned ended = 0, failed = 0;
	int status;
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	for (uint64_t i = 0; i < 100; i++)
		start_op(&e, to, (struct op){ .code = i % 3 ? IBV_WR_RDMA_READ : IBV_WR_ATOMIC_FETCH_AND_ADD, .rkey = to.rkey,
					      .addr = to.addr, .length = i % 3 ? 100000 : 8, .id = i });
	say(other.fd, 0);
	MUST(waitpid(other.pid, &status, 0) == other.pid);
	while (ended < 100) {
		struct ibv_wc wc;

		if (!poll_within(e.scq, &wc, 30000))
			die("only %u of 100 requests end", ended);
		failed += wc.status == IBV_WC_RETRY_EXC_ERR;
		if (wc.status != IBV_WC_SUCCESS && wc.status != IBV_WC_RETRY_EXC_ERR)
			check(false, "a request to a process that is killed", "%s", ibv_wc_status_str(wc.status));
		ended++;
	}
	check(true, "all requests to a process that is killed end", "%u fail", failed);
	close(other.fd);
	end_close(&e);
}

static void ends_queue_pair(int fd)
{
	struct end e;

	open_both();
	end_open(&e, plain);
	tell(fd, target_of(&e));
	hear(fd);
	MUST(ibv_destroy_qp(e.qp) == 0);
	e.qp = NULL;
	say(fd, 0);
	hear(fd);
	end_close(&e);
}

static void destroyed(void)
{
	struct other other = start(ends_queue_pair), second = start(offers);
	unsigned wrong = 0;
	struct target to;
	struct end e;

	open_both();
	end_open(&e, plain);
	to = told(other.fd);
	/* Without this, the port may be gone with its last queue pair before the two processes know each other. */
	must_be(result(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .length = 8 }), IBV_WC_SUCCESS,
		"a Read");
	for (uint64_t i = 0; i < 100; i++)
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .length = 200000, .id = i });
	say(other.fd, 0);
	for (unsigned i = 0; i < 100; i++) {
		enum ibv_wc_status status = poll_one(e.scq).status;

		wrong += status != IBV_WC_SUCCESS && status != IBV_WC_REM_ABORT_ERR && status != IBV_WC_REM_INV_RD_REQ_ERR &&
			 status != IBV_WC_REM_ACCESS_ERR;
	}
	check(!wrong, "Reads of a queue pair that is destroyed end", "%u wrongly", wrong);
	hear(other.fd);
	say(other.fd, 0);
	join(other, "the process goes on");
	/* The own queue pair, while it waits for answers. */
	to = told(second.fd);
	for (uint64_t i = 0; i < 100; i++)
		start_op(&e, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey, .addr = to.addr, .length = 200000, .id = i });
	MUST(ibv_modify_qp(e.qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_ERR }, IBV_QP_STATE) == 0);
	wrong = 0;
	for (unsigned i = 0; i < 100; i++) {
		enum ibv_wc_status status = poll_one(e.scq).status;

		wrong += status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR;
	}
	check(!wrong, "one in ERR flushes the requests that wait for answers", "%u wrong", wrong);
	say(second.fd, 0);
	join(second, "the other goes on");
	end_close(&e);
}

/* Both ends in one process, and both in one queue pair. */
static void itself(void)
{
	struct end a, b;
	struct target to;

	open_both();
	end_open(&a, plain);
	end_open(&b, plain);
	write_and_read(&a, target_of(&b));
	/* To its own lower half. */
	write_and_read(&a, target_of(&a));
	to = target_of(&b);
	for (uint64_t i = 0; i < 100; i++)
		start_op(&a, to, (struct op){ .code = i % 2 ? IBV_WR_RDMA_READ : IBV_WR_ATOMIC_FETCH_AND_ADD, .rkey = to.rkey,
					      .addr = to.addr, .operand = 1, .length = i % 2 ? 70000 : 8, .id = i });
	for (unsigned i = 0; i < 100; i++)
		if (poll_one(a.scq).status != IBV_WC_SUCCESS)
			die("request %u to itself", i);
	must_be(result(&a, to, (struct op){ .code = IBV_WR_RDMA_READ, .rkey = to.rkey + 256, .addr = to.addr, .length = 8 }),
		IBV_WC_REM_ACCESS_ERR, "another key");
	end_close(&a);
	end_close(&b);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "both_ways", both_ways }, { "flags", flags }, { "in_order", in_order }, { "immediates", immediates }, { "many_reads", many_reads }, { "deep", deep },
		{ "atomics", atomics }, { "rights", rights }, { "guesses", guesses }, { "withdrawn", withdrawn },
		{ "sink_gone", sink_gone }, { "answers_under_a_penalty", answers_count_under_a_penalty }, { "killed", killed },
		{ "destroyed", destroyed }, { "itself", itself },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
