/* Memory that the library allocates: buffers (rdma-core 64's ibv_alloc_buf) and device memory.
 *
 *	buffers [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "ends.h"

/* Newer than Debian 12's header. */
struct ibv_buf;
struct mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah;
	struct ibv_buf *buf;
};
enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_FD_OFFSET = 8, MASK_BUF = 32, MASK_UNKNOWN = 1 << 20 };

static void *(*alloc_buf)(struct ibv_pd *, size_t, struct ibv_buf **);
static void (*free_buf)(struct ibv_buf *);
static struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, struct ibv_buf *, void *, size_t, int);
static struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct mr_init_attr *);
static int (*export_buf)(struct ibv_buf *);

static void *newer(const char *name, const char *version)
{
	void *found = dlvsym(RTLD_DEFAULT, name, version);

	if (!found)
		die("no %s@%s", name, version);
	return found;
}

/* A Write of `length` bytes from `mr` at `from` to the other end's received half, and whether they came. */
static bool written(struct end *a, struct end *b, struct ibv_mr *mr, void *from, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)from, length, mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { (uintptr_t)b->buffer + ROOM, b->mr->rkey },
	}, *bad;

	MUST(ibv_post_send(a->qp, &wr, &bad) == 0);
	return poll_one(a->scq).status == IBV_WC_SUCCESS;
}

static void allocated(void)
{
	struct end a = { 0 }, b = { 0 };
	size_t page = (size_t)sysconf(_SC_PAGESIZE), size = 3 * page + 100;
	struct ibv_buf *buf = NULL, *other = NULL;
	struct ibv_mr *mr;
	struct ibv_pd *pd;
	char *memory;

	*(void **)&alloc_buf = newer("ibv_alloc_buf", "IBVERBS_1.17");
	*(void **)&free_buf = newer("ibv_free_buf", "IBVERBS_1.17");
	*(void **)&reg_buf_mr = newer("ibv_reg_buf_mr", "IBVERBS_1.17");
	*(void **)&reg_mr_ex = newer("ibv_reg_mr_ex", "IBVERBS_1.15");
	*(void **)&export_buf = newer("ibv_export_buf_dmabuf_fd", "IBVERBS_1.18");
	open_device();
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	memory = alloc_buf(a.pd, size, &buf);
	check(memory && buf && (uintptr_t)memory % page == 0, "C20 alloc_buf gives memory that begins with a page", "%p, %s",
	      memory, strerror(errno));
	if (!memory)
		return;
	memset(memory, 0x5a, size);
	check_failed(export_buf(buf) == -1, ENODATA, "it is no dma-buf: ENODATA");
	MUST(pd = ibv_alloc_pd(context));
	check_failed(!reg_buf_mr(pd, buf, memory, size, 0), EINVAL, "its region in another domain: EINVAL");
	check_failed(!reg_buf_mr(a.pd, buf, memory, size + 1, 0), EINVAL, "a region that leaves it: EINVAL");
	check_failed(!reg_buf_mr(a.pd, buf, memory - 1, 1, 0), EINVAL, "one before it: EINVAL");
	mr = reg_buf_mr(a.pd, buf, memory + page, page, IBV_ACCESS_LOCAL_WRITE);
	check(mr && mr->addr == memory + page && mr->length == page, "a region of a part", "%s", strerror(errno));
	check(mr && written(&a, &b, mr, memory + page, 64) && b.buffer[ROOM] == 0x5a && b.buffer[ROOM + 63] == 0x5a,
	      "a Write from it", "not");
	MUST(ibv_dereg_mr(mr) == 0);
	struct mr_init_attr attr = { .length = size, .access = IBV_ACCESS_LOCAL_WRITE, .comp_mask = MASK_BUF, .buf = buf };

	check_failed(!reg_mr_ex(a.pd, &attr), EINVAL, "reg_mr_ex of a buffer without an address: EINVAL");
	attr.comp_mask |= MASK_ADDR;
	attr.addr = memory;
	mr = reg_mr_ex(a.pd, &attr);
	check(mr && mr->length == size, "reg_mr_ex of a buffer", "%s", strerror(errno));
	MUST(ibv_dereg_mr(mr) == 0);
	attr.comp_mask |= MASK_FD;
	check_failed(!reg_mr_ex(a.pd, &attr), EINVAL, "of a buffer and a descriptor: EINVAL");
	attr.comp_mask = MASK_FD | MASK_FD_OFFSET;
	check_failed(!reg_mr_ex(a.pd, &attr), EINVAL, "of a descriptor without an iova: EINVAL");
	attr.comp_mask = MASK_FD | MASK_IOVA;
	check_failed(!reg_mr_ex(a.pd, &attr), EINVAL, "nor without an offset: EINVAL");
	attr.comp_mask = MASK_ADDR | MASK_UNKNOWN;
	check_failed(!reg_mr_ex(a.pd, &attr), EOPNOTSUPP, "with a member that is not known: EOPNOTSUPP");
	check(alloc_buf(a.pd, 0, &other) && other, "a buffer of no bytes", "%s", strerror(errno));
	free_buf(other);
	check_failed(!alloc_buf(a.pd, SIZE_MAX - page, &other), ENOMEM, "more than there is: ENOMEM");
	free_buf(buf);
	end_close(&a);
	end_close(&b);
	MUST(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}

static struct ibv_dm *dm_of(size_t length, uint32_t log_align)
{
	struct ibv_alloc_dm_attr attr = { .length = length, .log_align_req = log_align };

	return ibv_alloc_dm(context, &attr);
}

static void device_memory(void)
{
	struct ibv_alloc_dm_attr unknown = { .length = 64, .comp_mask = 1 };
	struct ibv_device_attr_ex device = { 0 };
	struct end a = { 0 }, b = { 0 };
	struct ibv_context *second;
	struct ibv_dm *dm, *rest;
	struct ibv_pd *other;
	struct ibv_mr *mr;
	char bytes[64] = { 0 };

	open_device();
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	MUST(ibv_query_device_ex(context, NULL, &device) == 0);
	check(device.max_dm_size >= 65536, "C18 the device has memory of its own", "%lu bytes", device.max_dm_size);
	dm = dm_of(4096, 6);
	check(dm != NULL, "C18 alloc_dm", "%s", strerror(errno));
	if (!dm)
		return;
	check_failed(!dm_of(device.max_dm_size, 0), ENOMEM, "more than is left: ENOMEM");
	check_failed(!dm_of(device.max_dm_size + 1, 0), EINVAL, "more than there is: EINVAL");
	check_failed(!dm_of(0, 0), EINVAL, "no bytes: EINVAL");
	check_failed(!dm_of(64, 63), EINVAL, "an alignment that cannot be: EINVAL");
	check_failed(!ibv_alloc_dm(context, &unknown), EOPNOTSUPP, "unknown members: EOPNOTSUPP");
	check(ibv_memcpy_to_dm(dm, 100, "device", 6) == 0 && ibv_memcpy_from_dm(bytes, dm, 99, 8) == 0 &&
	      memcmp(bytes, "\0device\0", 8) == 0, "copies to it and from it", "%.8s", bytes);
	check_errno(ibv_memcpy_to_dm(dm, 4093, "device", 6), EFAULT, "a copy beyond its end: EFAULT");
	check_errno(ibv_memcpy_from_dm(bytes, dm, UINT64_MAX, 2), EFAULT, "one from an offset that wraps: EFAULT");
	check_failed(!ibv_reg_dm_mr(b.pd, dm, 0, 64, REMOTE_ALL), EINVAL, "a region that does not count from zero: EINVAL");
	check_failed(!ibv_reg_dm_mr(b.pd, dm, 4090, 7, REMOTE_ALL | IBV_ACCESS_ZERO_BASED), EINVAL, "beyond the end: EINVAL");
	check_failed(!ibv_reg_dm_mr(b.pd, dm, 0, 64, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND), EINVAL, "on demand: EINVAL");
	MUST(second = ibv_open_device(context->device));
	MUST(other = ibv_alloc_pd(second));
	check_failed(!ibv_reg_dm_mr(other, dm, 0, 64, IBV_ACCESS_ZERO_BASED), EINVAL, "in another context: EINVAL");
	MUST(ibv_dealloc_pd(other) == 0 && ibv_close_device(second) == 0);
	mr = ibv_reg_dm_mr(b.pd, dm, 96, 1000, REMOTE_ALL | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_ZERO_BASED);
	check(mr && mr->length == 1000, "a region of it", "%s", strerror(errno));
	if (!mr)
		return;
	check_errno(ibv_free_dm(dm), EBUSY, "free_dm with a region: EBUSY");
	check(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == IBV_REREG_MR_ERR_INPUT,
	      "which cannot be registered again", "it can");
	/* A peer reads, writes and counts in it; the program sends from it. */
	struct ibv_sge sge = { (uintptr_t)a.buffer, 6, a.mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .wr.rdma = { 4, mr->rkey },
	}, *bad;

	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS && memcmp(a.buffer, "device", 6) == 0, "a Read from it", "%.6s", a.buffer);
	wr.opcode = IBV_WR_RDMA_WRITE;
	wr.wr.rdma.remote_addr = 200;
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS && ibv_memcpy_from_dm(bytes, dm, 296, 6) == 0 &&
	      memcmp(bytes, "device", 6) == 0, "a Write into it", "%.6s", bytes);
	struct ibv_qp_attr atomic = { .qp_access_flags = REMOTE_ALL | IBV_ACCESS_REMOTE_ATOMIC };

	MUST(ibv_modify_qp(b.qp, &atomic, IBV_QP_ACCESS_FLAGS) == 0);
	sge.length = 8;
	wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
	wr.wr.atomic.remote_addr = 400;
	wr.wr.atomic.compare_add = 5;
	wr.wr.atomic.rkey = mr->rkey;
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS && ibv_memcpy_from_dm(bytes, dm, 496, 8) == 0 && bytes[0] == 5,
	      "an atomic operation in it", "%d", bytes[0]);
	end_receive(&a, 3, 64);
	sge = (struct ibv_sge){ 4, 6, mr->lkey };
	wr.opcode = IBV_WR_SEND;
	MUST(ibv_post_send(b.qp, &wr, &bad) == 0);
	check(poll_one(b.scq).status == IBV_WC_SUCCESS && poll_one(a.rcq).byte_len == 6 &&
	      memcmp(a.buffer + ROOM, "device", 6) == 0, "a Send from it", "%.6s", a.buffer + ROOM);
	sge.addr = 996;
	MUST(ibv_post_send(b.qp, &wr, &bad) == 0);
	check(poll_one(b.scq).status == IBV_WC_LOC_PROT_ERR, "one beyond the region: a local protection error", "not");
	check(ibv_dereg_mr(mr) == 0 && ibv_free_dm(dm) == 0, "then it can go", "not");
	MUST(rest = dm_of(device.max_dm_size, 0));
	check(ibv_free_dm(rest) == 0, "and its room comes back", "not");
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

/* What programs and vendor libraries of older distributions bind to when they are loaded. */
static void versions(void)
{
	static const char *nodes[] = { "17", "25", "33", "34", "57", "59", "64", "65" };
	char node[32], name[64], what[96];

	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		snprintf(node, sizeof node, "IBVERBS_PRIVATE_%s", nodes[i]);
		snprintf(name, sizeof name, "verbs_register_driver_%s", nodes[i]);
		snprintf(what, sizeof what, "C21 the private names of version %s", nodes[i]);
		check(dlvsym(RTLD_DEFAULT, "ibv_query_gid_type", node) && dlvsym(RTLD_DEFAULT, name, node), what, "not all");
	}
	check(dlvsym(RTLD_DEFAULT, "ibv_cmd_query_device", "IBVERBS_PRIVATE_25") != NULL, "and those that later went", "not");
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "allocated", allocated }, { "device_memory", device_memory }, { "versions", versions },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
