/* RDMA Write-Records (uwarpdv_create_qp(3)), over unreliable and over reliable datagrams: between two processes, of one user
 * and of two, and within one.
 *
 *	records ADDRESS [GROUP]	the address is not used */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>

#include "reliable.h"

#define JOB 0x0123456789abcdefull
#define RECORDS 64u

static __typeof__(uwarpdv_wr_rdma_write_record) *write_record;
static __typeof__(uwarpdv_wr_set_job_key) *set_job_key;
static __typeof__(uwarpdv_allow_source) *allow_source;
static __typeof__(uwarpdv_get_record) *get_record;
static __typeof__(uwarpdv_free_record) *free_record;

/* Which service the group that runs is about. */
static bool reliable;

/* Of all that is written. */
static unsigned send_flags;

/* Memory of another queue pair, as its program tells it. */
struct target {
	uint32_t qpn, rkey;
	uint64_t addr;
};

static void open_all(void)
{
	open_device();
#define FIND(name) MUST(name = (__typeof__(name))dlvsym(RTLD_DEFAULT, "uwarpdv_" #name, "UWARPDV_1.0"))
	MUST(write_record = (__typeof__(write_record))dlvsym(RTLD_DEFAULT, "uwarpdv_wr_rdma_write_record", "UWARPDV_1.0"));
	MUST(set_job_key = (__typeof__(set_job_key))dlvsym(RTLD_DEFAULT, "uwarpdv_wr_set_job_key", "UWARPDV_1.0"));
	FIND(allow_source);
	FIND(get_record);
	FIND(free_record);
}

/* Its memory, of ROOM bytes twice, may be written by peers: no receive is ever posted there. */
static void open_end(struct end *e, uint64_t job_key, uint32_t records, int access, bool sleeps)
{
	struct uwarpdv_qp_init_attr attr = { .driver_qp_type = reliable ? UWARPDV_QPT_RD : 0, .job_key = job_key,
					     .max_records = records };
	struct ibv_comp_channel *channel = sleeps ? ibv_create_comp_channel(ctx) : NULL;
	struct ibv_qp_init_attr_ex init;

	memset(e, 0, sizeof *e);
	MUST(e->scq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0));
	MUST(e->rcq = ibv_create_cq(ctx, 2 * DEPTH, e, channel, 0));
	MUST(e->memory = calloc(2, ROOM));
	MUST(e->mr = ibv_reg_mr(pd, e->memory, 2 * ROOM, IBV_ACCESS_LOCAL_WRITE | access));
	MUST(e->ah = handle_of(own_gid));
	init = init_of(e->scq, e->rcq);
	if (!reliable) {
		init.qp_type = IBV_QPT_UD;
		init.send_ops_flags = IBV_QP_EX_WITH_SEND;
	}
	MUST(e->qp = create_qp(ctx, &init, &attr, sizeof attr));
	if (reliable) {
		up(e->qp, 7);
	} else {
		struct ibv_qp_attr ud = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };

		MUST(ibv_modify_qp(e->qp, &ud, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
		ud.qp_state = IBV_QPS_RTR;
		MUST(ibv_modify_qp(e->qp, &ud, IBV_QP_STATE) == 0);
		ud.qp_state = IBV_QPS_RTS;
		MUST(ibv_modify_qp(e->qp, &ud, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	}
}

static void open_usual(struct end *e)
{
	open_end(e, JOB, RECORDS, IBV_ACCESS_REMOTE_WRITE, false);
}

static void tell(int fd, const struct end *e)
{
	struct target target = { .qpn = e->qp->qp_num, .rkey = e->mr->rkey, .addr = (uintptr_t)e->memory };

	MUST(write(fd, &target, sizeof target) == sizeof target);
}

static struct target told(int fd)
{
	struct target target;

	if (read(fd, &target, sizeof target) != sizeof target)
		die("the other process says nothing");
	return target;
}

/* Writes bytes of the own upper half. */
static int start_write(struct end *e, struct target to, uint64_t offset, uint32_t length, uint32_t imm, uint64_t job_key)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(e->qp);

	ibv_wr_start(ex);
	ex->wr_id = imm;
	ex->wr_flags = IBV_SEND_SIGNALED | send_flags;
	write_record(ex, to.rkey, to.addr + offset, htonl(imm));
	if (job_key)
		set_job_key(ex, job_key);
	ibv_wr_set_ud_addr(ex, e->ah, to.qpn, QKEY);
	ibv_wr_set_sge(ex, e->mr->lkey, (uintptr_t)outgoing(e), length);
	return ibv_wr_complete(ex);
}

static enum ibv_wc_status written(struct end *e, struct target to, uint64_t offset, uint32_t length, uint32_t imm, uint64_t job_key)
{
	struct ibv_wc wc;
	int error = start_write(e, to, offset, length, imm, job_key);

	if (error)
		die("post: %d", error);
	wc = poll_one(e->scq);
	if (wc.status == IBV_WC_SUCCESS && (wc.opcode != IBV_WC_RDMA_WRITE || wc.wr_id != imm))
		die("another completion: opcode %d, wr_id %lu", wc.opcode, (unsigned long)wc.wr_id);
	return wc.status;
}

static unsigned char byte_of(uint32_t i, uint32_t seed)
{
	return (unsigned char)((i * 7 + i / 251 + seed * 31) | 1);
}

static void pattern(unsigned char *at, uint32_t length, uint32_t seed)
{
	for (uint32_t i = 0; i < length; i++)
		at[i] = byte_of(i, seed);
}

/* A byte has been written if and only if it is valid. */
static bool is_true(const struct end *e, const struct uwarpdv_record *record, const struct uwarpdv_range *ranges, uint32_t count,
		    uint32_t seed)
{
	const unsigned char *at = (unsigned char *)(uintptr_t)record->addr;
	uint32_t next = 0;

	if (at < e->memory || at + record->length > e->memory + ROOM)
		return false;
	for (uint32_t i = 0; i < record->length; i++) {
		while (next < count && i >= ranges[next].offset + ranges[next].length)
			next++;
		bool valid = next < count && i >= ranges[next].offset;

		if (at[i] != (valid ? byte_of(i, seed) : 0))
			return false;
	}
	return true;
}

/* Takes a record that a completion names, and frees it. */
static struct uwarpdv_record take(struct end *e, struct ibv_wc wc, struct uwarpdv_range *ranges, uint32_t *count)
{
	struct uwarpdv_record record;

	if (wc.status != IBV_WC_SUCCESS || wc.opcode != UWARPDV_WC_RECORD || !(wc.wc_flags & IBV_WC_WITH_IMM))
		die("no record: %s, opcode %d", ibv_wc_status_str(wc.status), wc.opcode);
	*count = UWARPDV_RANGES_MOST;
	MUST(get_record(e->qp, wc.wr_id, &record, sizeof record, ranges, count) == 0);
	if (record.imm_data != wc.imm_data || record.remote_qpn != wc.src_qp ||
	    memcmp(&record.remote_gid, &own_gid, sizeof own_gid))
		die("the record is another one than its completion");
	MUST(free_record(e->qp, wc.wr_id) == 0);
	return record;
}

static const uint32_t lengths[] = { 0, 1, 64, 1300, 1394, 1395, 4096, 15557, 15558, 65536, 262144, 1000003, 1 << 20 };
#define LENGTHS (sizeof lengths / sizeof *lengths)

static void takes_all(int fd)
{
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct end e;

	open_all();
	open_usual(&e);
	tell(fd, &e);
	for (uint32_t i = 0; i < LENGTHS;) {
		uint32_t count, length = lengths[i];
		struct ibv_wc wc = poll_one(e.rcq);
		struct uwarpdv_record record = take(&e, wc, ranges, &count);
		bool is_whole = wc.byte_len == length;

		if (record.length != length || is_whole == (wc.vendor_err == 1) || ntohl(record.imm_data) != i ||
		    record.rkey != e.mr->rkey || record.addr != (uintptr_t)e.memory + 5)
			check(false, "a record says what was written", "%u bytes of %u", wc.byte_len, record.length);
		if (is_whole && (count != (length > 0) || (count && (ranges[0].offset || ranges[0].length != length))))
			check(false, "all of its bytes are valid", "of %u", length);
		if (!is_true(&e, &record, ranges, count, i) || e.memory[5 + length])
			check(false, "what is valid was written, and no more", "of %u", length);
		/* Unreliable datagrams may be lost where a socket has no room for so many. */
		if (!is_whole && reliable)
			check(false, "all of it comes", "of %u", length);
		memset(e.memory, 0, length + 10);
		i += is_whole;
		say(fd, is_whole);
	}
	check(!failures, "records of 0 to 1,048,576 bytes", "see above");
	end_close(&e);
}

/* Of each length one, without a receive. */
static void whole(void)
{
	struct other other = start(takes_all);
	struct target to;
	struct end e;

	open_all();
	open_usual(&e);
	to = told(other.fd);
	for (uint32_t i = 0, tries = 0; i < LENGTHS && tries < 1000; tries++) {
		pattern(outgoing(&e), lengths[i], i);
		if (written(&e, to, 5, lengths[i], i, 0) != IBV_WC_SUCCESS)
			die("%u bytes", lengths[i]);
		i += hear(other.fd);
	}
	join(other, "the target, too");
	end_close(&e);
}

/* Shows memory that is registered, and not there any more. */
static void shows_unmapped(int fd)
{
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct ibv_mr *gone;
	struct target to;
	struct ibv_wc wc;
	unsigned char *memory;
	uint32_t count;
	struct end e;

	open_all();
	open_end(&e, JOB, 4, IBV_ACCESS_REMOTE_WRITE, false);
	memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(memory != MAP_FAILED);
	MUST(gone = ibv_reg_mr(pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	MUST(munmap(memory, 8192) == 0);
	to = (struct target){ .qpn = e.qp->qp_num, .rkey = gone->rkey, .addr = (uintptr_t)memory };
	MUST(write(fd, &to, sizeof to) == sizeof to);
	tell(fd, &e);
	for (uint32_t i = 0; reliable && i < 4; i++)
		receive_at(&e, i, i * 8, 8);
	say(fd, 0);
	for (int i = 0; i < 4; i++) {
		wc = poll_one(e.rcq);
		take(&e, wc, ranges, &count);
	}
	for (int i = 0; reliable && i < 4; i++)
		check(poll_one(e.rcq).opcode == IBV_WC_RECV, "all receives are left for Sends", "receive %d", i);
	check(!ibv_poll_cq(e.rcq, 1, &wc), "only what was written makes records", "%u", wc.byte_len);
	hear(fd);
	MUST(ibv_dereg_mr(gone) == 0);
	end_close(&e);
}

/* What cannot be written takes no record: those that follow find all of them. */
static void unmapped(void)
{
	struct other other = start(shows_unmapped);
	struct target gone, to;
	struct end e;

	open_all();
	open_usual(&e);
	gone = told(other.fd);
	to = told(other.fd);
	pattern(outgoing(&e), 5000, 0);
	for (uint32_t i = 0; i < 8; i++) {
		enum ibv_wc_status status = written(&e, gone, 0, 5000, i, 0);

		if (status != (reliable ? IBV_WC_REM_OP_ERR : IBV_WC_SUCCESS))
			check(false, "memory that is gone", "%s", ibv_wc_status_str(status));
	}
	hear(other.fd);
	for (uint32_t i = 0; reliable && i < 8; i++) {
		struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(e.qp);

		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write_imm(ex, gone.rkey, gone.addr, htonl(i));
		ibv_wr_set_ud_addr(ex, e.ah, to.qpn, QKEY);
		ibv_wr_set_sge(ex, e.mr->lkey, (uintptr_t)outgoing(&e), 8);
		MUST(ibv_wr_complete(ex) == 0);
		if (poll_one(e.scq).status != IBV_WC_REM_OP_ERR)
			check(false, "a Write with an immediate to it", "another status");
	}
	for (uint32_t i = 0; i < 4; i++)
		MUST(written(&e, to, 6000 * i, 5000, i, 0) == IBV_WC_SUCCESS);
	for (uint32_t i = 0; reliable && i < 4; i++) {
		send_to(&e, to.qpn, i, 0, 8);
		MUST(poll_one(e.scq).status == IBV_WC_SUCCESS);
	}
	say(other.fd, 0);
	join(other, "the target, too");
	end_close(&e);
}

static void holds_records(int fd)
{
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct ibv_wc wc[4], more;
	uint32_t count;
	struct end e;

	open_all();
	open_end(&e, JOB, 4, IBV_ACCESS_REMOTE_WRITE, false);
	tell(fd, &e);
	for (int i = 0; i < 4; i++)
		wc[i] = poll_one(e.rcq);
	hear(fd);
	check(!poll_within(e.rcq, &more, 50) && !e.memory[400], "a fifth message finds no room", "it was taken");
	for (int i = 0; i < 4; i++)
		take(&e, wc[i], ranges, &count);
	say(fd, 0);
	more = poll_one(e.rcq);
	check(take(&e, more, ranges, &count).addr == (uintptr_t)e.memory + 400 && e.memory[400], "then there is some", "another one");
	end_close(&e);
}

/* Records that the program does not free: messages are lost over unreliable datagrams, and wait over reliable ones. */
static void full(void)
{
	struct other other = start(holds_records);
	struct target to;
	struct ibv_wc wc;
	struct end e;

	open_all();
	open_usual(&e);
	to = told(other.fd);
	pattern(outgoing(&e), 100, 0);
	for (uint32_t i = 0; i < 4; i++)
		MUST(written(&e, to, i * 100, 100, i, 0) == IBV_WC_SUCCESS);
	MUST(start_write(&e, to, 400, 100, 4, 0) == 0);
	if (!reliable)
		MUST(poll_one(e.scq).status == IBV_WC_SUCCESS);
	else
		check(!poll_within(e.scq, &wc, 50), "a sender waits for room", "%s", ibv_wc_status_str(wc.status));
	say(other.fd, 0);
	hear(other.fd);
	if (!reliable)
		MUST(written(&e, to, 400, 100, 5, 0) == IBV_WC_SUCCESS);
	else
		MUST(poll_one(e.scq).status == IBV_WC_SUCCESS);
	join(other, "the target, too");
	end_close(&e);
}

/* Another user of the host attacks the memory. */
static void guards(int fd)
{
	union ibv_gid elsewhere = { .raw = { 0xfd, 1 } };
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct end open, none, listed, unwritable, plain;
	struct ibv_wc wc;
	uint32_t count;

	open_all();
	open_usual(&open);
	open_end(&none, 0, RECORDS, IBV_ACCESS_REMOTE_WRITE, false);
	open_usual(&listed);
	open_end(&unwritable, JOB, RECORDS, IBV_ACCESS_REMOTE_READ, false);
	open_end(&plain, JOB, 0, IBV_ACCESS_REMOTE_WRITE, false);
	MUST(allow_source(listed.qp, &elsewhere, 64, UWARPDV_ANY_QPN) == 0);
	tell(fd, &open);
	tell(fd, &none);
	tell(fd, &listed);
	tell(fd, &unwritable);
	tell(fd, &plain);
	hear(fd);
	for (size_t i = 0; i < ROOM; i++)
		if (open.memory[i] | none.memory[i] | listed.memory[i] | unwritable.memory[i] | plain.memory[i])
			die("a byte was written at %zu", i);
	check(!ibv_poll_cq(open.rcq, 1, &wc) && !ibv_poll_cq(listed.rcq, 1, &wc) && !ibv_poll_cq(none.rcq, 1, &wc),
	      "nothing was written, and no record made", "there is a record");
	say(fd, 0);
	wc = poll_one(open.rcq);
	take(&open, wc, ranges, &count);
	check(count == 1 && open.memory[0], "who may, does", "%u ranges", count);
	end_close(&open);
	end_close(&none);
	end_close(&listed);
	end_close(&unwritable);
	end_close(&plain);
}

static void refused(struct end *e, struct target to, uint64_t offset, uint32_t length, uint64_t job_key, const char *name)
{
	enum ibv_wc_status status = written(e, to, offset, length, 1, job_key);

	/* A sender of unreliable datagrams learns nothing. */
	if (reliable)
		check(status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR, name, "%s", ibv_wc_status_str(status));
	else
		MUST(status == IBV_WC_SUCCESS);
}

static void rights(void)
{
	struct other other = start(guards);
	struct target open, none, listed, unwritable, plain, to;
	const unsigned nobody = 65534, was = geteuid();
	struct end e;

	if (was == 0)
		MUST(setgid(nobody) == 0 && setuid(nobody) == 0);
	printf("# the target is of user %u, who attacks it is user %u\n", was, geteuid());
	open_all();
	open_usual(&e);
	pattern(outgoing(&e), 1 << 20, 0);
	open = told(other.fd);
	none = told(other.fd);
	listed = told(other.fd);
	unwritable = told(other.fd);
	plain = told(other.fd);
	refused(&e, open, 0, 8, JOB + 1, "another job key");
	refused(&e, none, 0, 8, JOB, "a queue pair without a job key");
	refused(&e, listed, 0, 8, JOB, "a source that is not named");
	refused(&e, unwritable, 0, 8, JOB, "a region that may only be read");
	refused(&e, plain, 0, 8, JOB, "a queue pair without records");
	to = open;
	to.rkey ^= 0x55;
	refused(&e, to, 0, 8, JOB, "another key of a region");
	refused(&e, open, 2 * ROOM - 7, 8, JOB, "beyond the region");
	refused(&e, open, 2 * ROOM - (1 << 20) + 1, 1 << 20, JOB, "beyond it with the last byte");
	to = open;
	to.rkey = none.rkey;
	to.addr = none.addr;
	usleep(100000);
	say(other.fd, 0);
	hear(other.fd);
	MUST(written(&e, open, 0, 8, 2, JOB) == IBV_WC_SUCCESS);
	join(other, "the target, too");
	end_close(&e);
}

#define MESSAGES 40u
#define ROUNDS 8u

/* Of each round another one: what is lost must not always end with a message. */
static uint32_t length_in(uint32_t round)
{
	return (1 << 20) - round * 100003;
}

/* Is stopped while messages pour in, and looks then what has come. */
static void sleeps_through_it(int fd)
{
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	uint32_t count, partly = 0, all = 0;
	struct ibv_wc wc;
	struct end e;

	open_all();
	open_usual(&e);
	tell(fd, &e);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		uint32_t last = 0;

		hear(fd);
		/* Each message goes to the same place as the one before. */
		while (last < round * 1000 + MESSAGES) {
			uint32_t valid = 0;
			struct uwarpdv_record record;

			wc = poll_one(e.rcq);
			record = take(&e, wc, ranges, &count);
			for (uint32_t i = 0; i < count; i++) {
				for (uint32_t k = 0; k < ranges[i].length; k++)
					if (e.memory[ranges[i].offset + k] != byte_of(ranges[i].offset + k, 0))
						die("byte %u is valid, and another one", ranges[i].offset + k);
				valid += ranges[i].length;
			}
			if (valid != wc.byte_len || (valid < record.length) != (wc.vendor_err == 1))
				die("%u bytes are valid, and the completion says %u of %u", valid, wc.byte_len, record.length);
			partly += wc.vendor_err == 1;
			all++;
			last = ntohl(record.imm_data);
		}
		say(fd, 0);
	}
	printf("# %u records, %u of which are of a part\n", all, partly);
	check(all < ROUNDS * MESSAGES, "messages are lost", "none of %u", all);
	check(partly > 0, "some come in part", "none of %u", all);
	end_close(&e);
}

static void partly(void)
{
	struct other other;
	struct target to;
	struct end e;

	/* In memory, little would be lost. */
	MUST(setenv("UWARP_LINK", "tcp", 1) == 0);
	other = start(sleeps_through_it);
	open_all();
	open_usual(&e);
	to = told(other.fd);
	pattern(outgoing(&e), 1 << 20, 0);
	for (uint32_t round = 0; round < ROUNDS; round++) {
		char word;

		MUST(kill(other.pid, SIGSTOP) == 0);
		for (uint32_t i = 1; i < MESSAGES; i++)
			MUST(written(&e, to, 0, length_in(round), round * 1000 + i, 0) == IBV_WC_SUCCESS);
		MUST(kill(other.pid, SIGCONT) == 0);
		say(other.fd, 0);
		/* There is room in its socket only when it has read some of that. */
		while (recv(other.fd, &word, 1, MSG_PEEK | MSG_DONTWAIT) < 0) {
			MUST(written(&e, to, 0, 64, round * 1000 + MESSAGES, 0) == IBV_WC_SUCCESS);
			usleep(10000);
		}
		hear(other.fd);
	}
	join(other, "the target, too");
	end_close(&e);
}

static void sleeps(int fd)
{
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct ibv_cq *cq;
	struct ibv_wc wc;
	uint32_t count;
	void *context;
	struct end e;

	open_all();
	open_end(&e, JOB, RECORDS, IBV_ACCESS_REMOTE_WRITE, true);
	tell(fd, &e);
	for (uint32_t i = 0; i < 20; i++) {
		MUST(ibv_req_notify_cq(e.rcq, i % 2) == 0);
		while (ibv_poll_cq(e.rcq, 1, &wc) == 0) {
			say(fd, i);
			MUST(ibv_get_cq_event(e.rcq->channel, &cq, &context) == 0);
			ibv_ack_cq_events(cq, 1);
			MUST(ibv_req_notify_cq(e.rcq, i % 2) == 0);
		}
		if (take(&e, wc, ranges, &count).length != 1000 * i || wc.vendor_err)
			check(false, "a record wakes who sleeps", "another one");
	}
	check(!failures, "records wake who sleeps", "see above");
	end_close(&e);
}

/* The target sleeps until a record has come. */
static void events(void)
{
	struct other other = start(sleeps);
	struct target to;
	struct end e;

	open_all();
	open_usual(&e);
	to = told(other.fd);
	for (uint32_t i = 0; i < 20; i++) {
		pattern(outgoing(&e), 1000 * i, i);
		/* Every other time it wants to be woken by a solicited one only. */
		send_flags = i % 2 ? IBV_SEND_SOLICITED : 0;
		hear(other.fd);
		usleep(2000);
		MUST(written(&e, to, 0, 1000 * i, i, 0) == IBV_WC_SUCCESS);
	}
	join(other, "the target, too");
	end_close(&e);
}

/* One queue pair writes to another one of its process, and to itself. */
static void itself(void)
{
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct end a, b;
	uint32_t count;

	open_all();
	open_usual(&a);
	open_usual(&b);
	for (int own = 0; own < 2; own++) {
		struct end *e = own ? &a : &b;
		struct target to = { .qpn = e->qp->qp_num, .rkey = e->mr->rkey, .addr = (uintptr_t)e->memory };

		for (uint32_t i = 0; i < LENGTHS; i++) {
			struct uwarpdv_record record;

			pattern(outgoing(&a), lengths[i], i);
			MUST(written(&a, to, 3, lengths[i], i, 0) == IBV_WC_SUCCESS);
			record = take(e, poll_one(e->rcq), ranges, &count);
			if (record.length != lengths[i] || !is_true(e, &record, ranges, count, i))
				check(false, "a record of its own", "%u bytes", lengths[i]);
			memset(e->memory, 0, lengths[i] + 3);
		}
	}
	check(!failures, "records within a process", "see above");
	end_close(&a);
	end_close(&b);
}

/* What is wrong is refused, and said so. */
static void errors(void)
{
	struct uwarpdv_qp_init_attr attr = { .driver_qp_type = reliable ? UWARPDV_QPT_RD : 0, .job_key = JOB };
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	struct uwarpdv_record record;
	struct target to;
	struct ibv_qp_init_attr_ex init;
	struct ibv_wc wc;
	struct end e, keyless;
	uint32_t count;
	uint64_t name;

	open_all();
	open_usual(&e);
	open_end(&keyless, 0, 0, 0, false);
	to = (struct target){ .qpn = e.qp->qp_num, .rkey = e.mr->rkey, .addr = (uintptr_t)e.memory };
	init = init_of(e.scq, e.rcq);
	if (!reliable) {
		init.qp_type = IBV_QPT_UD;
		init.send_ops_flags = IBV_QP_EX_WITH_SEND;
	}
	attr.max_records = 1025;
	check_errno(create_qp(ctx, &init, &attr, sizeof attr) ? 0 : errno, EINVAL, "more records than 1,024");
	attr.max_records = 1;
	attr.reserved = 1;
	check_errno(create_qp(ctx, &init, &attr, sizeof attr) ? 0 : errno, EINVAL, "reserved is not 0");
	attr.reserved = 0;
	attr.driver_qp_type = reliable ? 0 : UWARPDV_QPT_RD;
	check_errno(create_qp(ctx, &init, &attr, sizeof attr) ? 0 : errno, reliable ? EOPNOTSUPP : EINVAL, "another driver_qp_type");
	init.qp_type = IBV_QPT_RC;
	check_errno(create_qp(ctx, &init, &attr, sizeof attr) ? 0 : errno, EINVAL, "a connected queue pair");
	if (!reliable)
		check_errno(start_write(&keyless, to, 0, 8, 0, 0), EINVAL, "no job key at all");
	pattern(outgoing(&e), 1 << 20, 0);
	MUST(written(&e, to, 0, 100, 7, 0) == IBV_WC_SUCCESS);
	wc = poll_one(e.rcq);
	name = wc.wr_id;
	count = 0;
	check_errno(get_record(e.qp, name, &record, sizeof record, ranges, &count), ENOSPC, "no room for the ranges");
	check(count == 1, "then it says how many there are", "%u", count);
	check_errno(get_record(e.qp, name, &record, sizeof record - 1, ranges, &count), EINVAL, "inlen is too short");
	check_errno(get_record(e.qp, name + 1, &record, sizeof record, ranges, &count), ENOENT, "no such record");
	check_errno(get_record(keyless.qp, name, &record, sizeof record, ranges, &count), ENOENT, "one of another queue pair");
	check_errno(free_record(keyless.qp, name), ENOENT, "which cannot free it");
	check_errno(get_record(e.qp, name, NULL, sizeof record, ranges, &count), EINVAL, "record is NULL");
	check_errno(free_record(e.qp, name), 0, "it is freed");
	check_errno(free_record(e.qp, name), ENOENT, "once");
	if (!reliable) {
		enum ibv_wc_status status = written(&e, to, 0, (1 << 20) + 1, 7, 0);

		check(status == IBV_WC_LOC_LEN_ERR, "more than 1 MiB over UD", "%s", ibv_wc_status_str(status));
	}
	end_close(&e);
	end_close(&keyless);
}

#define BOTH(group)                            \
	static void ud_##group(void)           \
	{                                      \
		reliable = false;              \
		group();                       \
	}                                      \
	static void rd_##group(void)           \
	{                                      \
		reliable = true;               \
		group();                       \
	}

BOTH(whole)
BOTH(full)
BOTH(unmapped)
BOTH(rights)
BOTH(events)
BOTH(itself)
BOTH(errors)

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "ud_whole", ud_whole }, { "rd_whole", rd_whole }, { "ud_full", ud_full }, { "rd_full", rd_full },
		{ "ud_unmapped", ud_unmapped }, { "rd_unmapped", rd_unmapped }, { "ud_rights", ud_rights }, { "rd_rights", rd_rights }, { "ud_events", ud_events }, { "rd_events", rd_events },
		{ "ud_itself", ud_itself }, { "rd_itself", rd_itself }, { "ud_errors", ud_errors }, { "rd_errors", rd_errors },
		{ "partly", partly },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
