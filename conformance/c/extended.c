/* Verbs that verbs.h calls through the context: extended completion queues and times of completions,
 * thread and parent domains, buffers of others, advice; and what this device does not offer.
 *
 *	extended [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE
#include <linux/udmabuf.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "ends.h"

#define TIMES (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

static struct ibv_cq_ex *cq_ex(uint64_t flags)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 64, .wc_flags = flags };

	return ibv_create_cq_ex(context, &attr);
}

/* Starts a poll that finds something. */
static void start_poll(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };
	uint64_t end = now_ms() + LIMIT_MS;
	int rc;

	while ((rc = ibv_start_poll(cq, &attr)) == ENOENT && now_ms() < end)
		sched_yield();
	if (rc)
		die("ibv_start_poll gives %d", rc);
}

static uint64_t clock_ns(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

static uint64_t raw_clock(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };

	MUST(ibv_query_rt_values_ex(context, &values) == 0);
	return (uint64_t)values.raw_clock.tv_nsec;
}

static void reading(void)
{
	struct end a = { 0 }, b = { 0 };
	struct ibv_cq_ex *cq;
	struct ibv_poll_cq_attr bad = { .comp_mask = 1 };

	open_device();
	MUST(cq = cq_ex(IBV_WC_STANDARD_FLAGS));
	b.rcq = ibv_cq_ex_to_cq(cq);
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	check(ibv_start_poll(cq, &bad) == EINVAL, "unknown attributes of a poll: EINVAL", "not");
	check(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){ 0 }) == ENOENT, "nothing to poll: ENOENT", "not");
	end_receive(&b, 11, 100);
	end_receive(&b, 12, 100);
	end_receive(&b, 13, 100);
	end_submit(&a, &b, IBV_WR_SEND_WITH_IMM, 1, 40);
	end_submit(&a, &b, IBV_WR_RDMA_WRITE_WITH_IMM, 2, 30);
	end_submit(&a, &b, IBV_WR_SEND, 3, 20);
	for (int i = 0; i < 3; i++)
		MUST(poll_one(a.scq).status == IBV_WC_SUCCESS);
	start_poll(cq);
	check(cq->wr_id == 11 && cq->status == IBV_WC_SUCCESS, "start_poll gives the first completion", "%lu, %d",
	      cq->wr_id, cq->status);
	check(ibv_wc_read_opcode(cq) == IBV_WC_RECV, "its opcode", "%d", ibv_wc_read_opcode(cq));
	check(ibv_wc_read_byte_len(cq) == 40, "its length", "%u", ibv_wc_read_byte_len(cq));
	check(ibv_wc_read_wc_flags(cq) == IBV_WC_WITH_IMM, "its flags", "%u", ibv_wc_read_wc_flags(cq));
	check(ibv_wc_read_imm_data(cq) == htonl(0x01020304), "its immediate data", "%x", ibv_wc_read_imm_data(cq));
	check(ibv_wc_read_qp_num(cq) == b.qp->qp_num, "its queue pair", "%u", ibv_wc_read_qp_num(cq));
	check(ibv_wc_read_vendor_err(cq) == 0 && ibv_wc_read_slid(cq) == 0 && ibv_wc_read_sl(cq) == 0 &&
	      ibv_wc_read_dlid_path_bits(cq) == 0, "fields without a meaning here are zero", "not");
	check(ibv_next_poll(cq) == 0 && cq->wr_id == 12, "next_poll gives the second", "%lu", cq->wr_id);
	check(ibv_wc_read_opcode(cq) == IBV_WC_RECV_RDMA_WITH_IMM && ibv_wc_read_byte_len(cq) == 30,
	      "a Write with immediate data", "%d, %u", ibv_wc_read_opcode(cq), ibv_wc_read_byte_len(cq));
	check(ibv_next_poll(cq) == 0 && cq->wr_id == 13 && ibv_wc_read_wc_flags(cq) == 0, "and the third", "%lu",
	      cq->wr_id);
	check(ibv_next_poll(cq) == ENOENT, "after the last one: ENOENT", "not");
	ibv_end_poll(cq);
	/* The plain shape of the same queue. */
	end_receive(&b, 14, 100);
	end_submit(&a, &b, IBV_WR_SEND, 4, 20);
	check(poll_one(b.rcq).wr_id == 14, "ibv_poll_cq works on it, too", "not");
	/* Errors are read the same way. */
	end_receive(&b, 15, 100);
	MUST(to(b.qp, IBV_QPS_ERR) == 0);
	start_poll(cq);
	check(cq->wr_id == 15 && cq->status == IBV_WC_WR_FLUSH_ERR, "a flushed receive", "%lu, %d", cq->wr_id, cq->status);
	ibv_end_poll(cq);
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

static void times(void)
{
	struct ibv_values_ex values = { .comp_mask = 2 };
	struct ibv_device_attr_ex device = { 0 };
	struct end a = { 0 }, b = { 0 };
	struct ibv_cq_ex *cq;
	uint64_t before, wall_before, first, second, wall, polled;

	open_device();
	MUST(ibv_query_device_ex(context, NULL, &device) == 0);
	check(device.completion_timestamp_mask == UINT64_MAX && device.hca_core_clock == 1000000,
	      "the device's clock has nanoseconds and 64 bits", "%lu kHz", device.hca_core_clock);
	check_errno(ibv_query_rt_values_ex(context, &values), EINVAL, "unknown values: EINVAL");
	before = raw_clock();
	check(raw_clock() >= before && before, "the clock goes on", "not");
	MUST(cq = cq_ex(IBV_WC_STANDARD_FLAGS | TIMES));
	b.rcq = ibv_cq_ex_to_cq(cq);
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	before = raw_clock();
	wall_before = clock_ns(CLOCK_REALTIME);
	for (int i = 0; i < 2; i++) {
		end_receive(&b, 1, 100);
		end_submit(&a, &b, IBV_WR_SEND, 2, 10);
		MUST(poll_one(a.scq).status == IBV_WC_SUCCESS);
	}
	/* Placed, so complete. What follows is not in their times. */
	usleep(50000);
	polled = raw_clock();
	start_poll(cq);
	first = ibv_wc_read_completion_ts(cq);
	wall = ibv_wc_read_completion_wallclock_ns(cq);
	check(first == ibv_wc_read_completion_ts(cq), "read twice, a time is the same", "not");
	MUST(ibv_next_poll(cq) == 0);
	second = ibv_wc_read_completion_ts(cq);
	ibv_end_poll(cq);
	check(before <= first && first <= second, "times of completions are in order", "%lu, %lu, %lu", before, first, second);
	check(second + 40000000 < polled, "and of the completions, not of the poll", "%lu before it", polled - second);
	check(wall >= wall_before && wall <= clock_ns(CLOCK_REALTIME), "the time of day", "%lu, %lu", wall_before, wall);
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

static void creating(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 16 };
	struct ibv_modify_cq_attr moderation = { .attr_mask = IBV_CQ_ATTR_MODERATE };
	struct ibv_cq_ex *cq;

	open_device();
	attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
	attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
	MUST(cq = ibv_create_cq_ex(context, &attr));
	check(ibv_start_poll(cq, &(struct ibv_poll_cq_attr){ 0 }) == ENOENT, "a queue for one thread", "not");
	check_errno(ibv_modify_cq(ibv_cq_ex_to_cq(cq), &moderation), EOPNOTSUPP, "moderation of events: EOPNOTSUPP");
	MUST(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
	attr.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
	check_failed(!ibv_create_cq_ex(context, &attr), EOPNOTSUPP, "ignoring overruns: EOPNOTSUPP");
	attr.flags = 1 << 10;
	check_failed(!ibv_create_cq_ex(context, &attr), EINVAL, "unknown flags: EINVAL");
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 16, .comp_mask = 1 << 10 };
	check_failed(!ibv_create_cq_ex(context, &attr), EINVAL, "unknown members: EINVAL");
	check_failed(!cq_ex(IBV_WC_EX_WITH_CVLAN), EOPNOTSUPP, "VLANs: EOPNOTSUPP");
	check_failed(!cq_ex(IBV_WC_EX_WITH_FLOW_TAG), EOPNOTSUPP, "flow tags: EOPNOTSUPP");
	check_failed(!cq_ex(IBV_WC_EX_WITH_TM_INFO), EOPNOTSUPP, "tag matching: EOPNOTSUPP");
	attr = (struct ibv_cq_init_attr_ex){ .cqe = 0 };
	check_failed(!ibv_create_cq_ex(context, &attr), EINVAL, "no entries: EINVAL");
	MUST(ibv_close_device(context) == 0);
}

static void *no_memory(struct ibv_pd *pd, void *pd_context, size_t size, size_t alignment, uint64_t type)
{
	(void)pd, (void)pd_context, (void)size, (void)alignment, (void)type;
	return NULL;
}

static void domains(void)
{
	struct ibv_td_init_attr td_attr = { 0 };
	struct ibv_parent_domain_init_attr attr = { 0 };
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_pd *pd, *parent, *other;
	struct ibv_context *second;
	struct ibv_td *td;
	struct ibv_cq_ex *cq;
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct end a = { 0 }, b = { 0 };

	open_device();
	MUST(pd = ibv_alloc_pd(context));
	MUST(td = ibv_alloc_td(context, &td_attr));
	td_attr.comp_mask = 1;
	check_failed(!ibv_alloc_td(context, &td_attr), EOPNOTSUPP, "a thread domain with unknown members: EOPNOTSUPP");
	check_failed(!ibv_alloc_parent_domain(context, &attr), EINVAL, "a parent domain of nothing: EINVAL");
	attr.pd = pd;
	attr.td = td;
	attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	attr.alloc = no_memory;
	check_failed(!ibv_alloc_parent_domain(context, &attr), EOPNOTSUPP, "with allocators: EOPNOTSUPP");
	attr.comp_mask = 0;
	MUST(parent = ibv_alloc_parent_domain(context, &attr));
	attr.pd = parent;
	check_failed(!ibv_alloc_parent_domain(context, &attr), EINVAL, "a parent domain of a parent domain: EINVAL");
	MUST(second = ibv_open_device(context->device));
	MUST(other = ibv_alloc_pd(second));
	attr.pd = other;
	check_failed(!ibv_alloc_parent_domain(context, &attr), EINVAL, "of another context's domain: EINVAL");
	attr.pd = pd;
	attr.td = NULL;
	MUST(other = ibv_alloc_parent_domain(context, &attr));
	check(ibv_dealloc_pd(other) == 0, "one without a thread domain", "not");
	check_errno(ibv_dealloc_pd(pd), EBUSY, "the domain in it is in use: EBUSY");
	check_errno(ibv_dealloc_td(td), EBUSY, "so is the thread domain: EBUSY");
	/* One end in the parent domain, the other end's region in the domain itself. */
	cq_attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
	cq_attr.parent_domain = pd;
	check_failed(!ibv_create_cq_ex(context, &cq_attr), EINVAL, "a completion queue in what is no parent domain: EINVAL");
	cq_attr.parent_domain = parent;
	MUST(cq = ibv_create_cq_ex(context, &cq_attr));
	a.scq = ibv_cq_ex_to_cq(cq);
	a.pd = parent;
	end_open(&a);
	end_open(&b);
	MUST(mr = ibv_reg_mr(pd, a.buffer, ROOM, IBV_ACCESS_LOCAL_WRITE));
	MUST(srq = ibv_create_srq(parent, &srq_attr));
	check(a.mr->pd == parent && a.qp->pd == parent && srq->pd == parent, "objects name the parent domain", "not");
	ends_connect(&a, &b);
	end_receive(&b, 1, 64);
	end_submit(&a, &b, IBV_WR_SEND, 2, 64);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS, "a Send from a parent domain's region", "not");
	struct ibv_sge sge = { (uintptr_t)a.buffer, 64, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	end_receive(&b, 3, 64);
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS, "and from a region of the domain in it", "not");
	check_errno(ibv_dealloc_pd(parent), EBUSY, "a parent domain in use: EBUSY");
	MUST(ibv_destroy_srq(srq) == 0 && ibv_dereg_mr(mr) == 0);
	end_close(&a);
	end_close(&b);
	check(ibv_dealloc_td(td) == 0 && ibv_dealloc_pd(pd) == 0, "then both can go", "not");
	MUST(ibv_close_device(second) == 0 && ibv_close_device(context) == 0);
}

/* A dma-buf of this memfd, from the driver that makes them of ordinary memory; -1 where there is none. */
static int dma_buf_of(int memfd, uint64_t size)
{
	struct udmabuf_create create = { .memfd = (uint32_t)memfd, .flags = UDMABUF_FLAGS_CLOEXEC, .size = size };
	int device = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), buffer;

	if (device < 0)
		return -1;
	MUST(fcntl(memfd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
	MUST((buffer = ioctl(device, UDMABUF_CREATE, &create)) >= 0);
	close(device);
	return buffer;
}

static void buffers(void)
{
	long page = sysconf(_SC_PAGESIZE);
	int memfd = memfd_create("buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING), ends[2], fd;
	struct end a = { 0 }, b = { 0 };
	struct ibv_mr *mr;
	char *view;

	open_device();
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	MUST(memfd >= 0 && ftruncate(memfd, 8 * page) == 0 && pipe(ends) == 0);
	MUST((view = mmap(NULL, 8 * (size_t)page, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0)) != MAP_FAILED);
#define IOVA 0x10064		/* at 100 in its page */
#define REG(offset, length, fd, access) \
	ibv_reg_dmabuf_mr(b.pd, (uint64_t)(offset), (size_t)(length), IOVA - 100 + (uint64_t)(offset) % 4096, fd, access)
	check_failed(!REG(0, page, -1, 0), EBADF, "no descriptor: EBADF");
	check_failed(!REG(0, page, 1000, 0), EBADF, "a descriptor that is not open: EBADF");
	check_failed(!REG(0, page, ends[0], 0), EINVAL, "a pipe: EINVAL");
	check_failed(!REG(0, page, memfd, IBV_ACCESS_LOCAL_WRITE), EINVAL, "C17 a memfd, which is no dma-buf: EINVAL");
	if ((fd = dma_buf_of(memfd, 8 * (uint64_t)page)) < 0) {
		printf("not tried: dma-bufs, as there is no /dev/udmabuf\n");
		goto out;
	}
	check_failed(!REG(8 * page, 1, fd, 0), EINVAL, "beyond the end: EINVAL");
	check_failed(!REG(page, 8 * page, fd, 0), EINVAL, "longer than the buffer: EINVAL");
	check_failed(!REG(-1, 8 * page, fd, 0), EINVAL, "an offset that wraps: EINVAL");
	check_failed(!REG(0, 0, fd, 0), EINVAL, "no bytes: EINVAL");
	check_failed(!ibv_reg_dmabuf_mr(b.pd, 100, (size_t)page, 0x10000, fd, 0), EINVAL, "an iova with another place in its page: EINVAL");
	check_failed(!REG(0, page, fd, IBV_ACCESS_REMOTE_WRITE), EINVAL, "remote write without local write: EINVAL");
	MUST(mr = REG(page + 100, 2 * page, fd, REMOTE_ALL));
	close(fd);
	check(mr->length == 2 * (size_t)page && mr->pd == b.pd, "a region of a buffer, whose descriptor is then closed", "not");
	struct ibv_sge sge = { (uintptr_t)a.buffer, 6, a.mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.wr.rdma = { IOVA + 50, mr->rkey },
	}, *bad;

	memcpy(a.buffer, "buffer", 6);
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS && memcmp(view + page + 150, "buffer", 6) == 0,
	      "a Write comes where offset and iova say", "%.6s", view + page + 150);
	wr.opcode = IBV_WR_RDMA_READ;
	sge.addr += 1000;
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_SUCCESS && memcmp(a.buffer + 1000, "buffer", 6) == 0, "a Read gets it back",
	      "not");
	check_errno(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == -1 ? errno : 0, EINVAL,
		    "registered again: EINVAL");
	wr.wr.rdma.remote_addr = IOVA + 2 * (uint64_t)page - 3;
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	check(poll_one(a.scq).status == IBV_WC_REM_ACCESS_ERR, "beyond its end: a remote access error", "not");
	MUST(ibv_dereg_mr(mr) == 0);
out:
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

static int advise(struct ibv_pd *pd, enum ib_uverbs_advise_mr_advice advice, uint32_t lkey, void *at, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)at, length, lkey };

	return ibv_advise_mr(pd, advice, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1);
}

static void advising(void)
{
	size_t length = 64 * 4096;
	char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned char resident[64] = { 0 };
	struct ibv_mr *mr, *readable_mr;
	struct ibv_pd *pd, *other;

	open_device();
	MUST(pd = ibv_alloc_pd(context));
	MUST(other = ibv_alloc_pd(context));
	MUST(mr = ibv_reg_mr(pd, memory, length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
	MUST(readable_mr = ibv_reg_mr(pd, memory, length, IBV_ACCESS_ON_DEMAND));
	MUST(mincore(memory, length, resident) == 0);
	check(!(resident[3] & 1), "on-demand memory has no pages at first", "it has");
	check_errno(advise(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, mr->lkey, memory + 4096, 4 * 4096), 0, "a prefetch");
	MUST(mincore(memory, length, resident) == 0);
	check((resident[1] & 1) && (resident[4] & 1) && !(resident[5] & 1), "then these have, and no others", "not");
	check_errno(advise(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, mr->lkey + 0x100, memory, 4096), EFAULT, "an unknown key: EFAULT");
	check_errno(advise(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, mr->lkey, memory + length - 1, 2), EFAULT, "beyond the end: EFAULT");
	check_errno(advise(other, IBV_ADVISE_MR_ADVICE_PREFETCH, mr->lkey, memory, 1), EPERM, "another domain's: EPERM");
	check_errno(advise(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, readable_mr->lkey, memory, 1), EPERM,
		    "to write what is read-only: EPERM");
	check_errno(advise(pd, 99, mr->lkey, memory, 1), EOPNOTSUPP, "unknown advice: EOPNOTSUPP");
	check_errno(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 4, NULL, 0), EINVAL, "unknown flags: EINVAL");
	MUST(ibv_dereg_mr(mr) == 0 && ibv_dereg_mr(readable_mr) == 0);
	MUST(ibv_dealloc_pd(pd) == 0 && ibv_dealloc_pd(other) == 0 && ibv_close_device(context) == 0);
}

static void refused(void)
{
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT };
	struct ibv_srq_init_attr_ex srq = {
		.attr = { .max_wr = 8, .max_sge = 1 }, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
	};
	struct ibv_device_attr_ex device = { 0 };
	struct ibv_qp_init_attr init = { .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_flow_attr flow = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof flow, .port = 1 };
	struct ibv_wq_init_attr wq = { .wq_type = IBV_WQT_RQ, .max_wr = 4, .max_sge = 1 };
	struct ibv_qp_rate_limit_attr rate = { .rate_limit = 1000 };
	struct ibv_qp_attr attr = { .rate_limit = 1000 };
	struct ibv_rwq_ind_table_init_attr table = { .log_ind_tbl_size = 0 };
	struct ibv_counters_init_attr counters = { 0 };
	struct ibv_ece ece = { 0 };
	struct end a = { 0 };

	open_device();
	end_open(&a);
	init.send_cq = init.recv_cq = a.scq;
	MUST(ibv_query_device_ex(context, NULL, &device) == 0);
	check(!(device.orig_attr.device_cap_flags & (IBV_DEVICE_XRC | IBV_DEVICE_MANAGED_FLOW_STEERING | IBV_DEVICE_MEM_WINDOW_TYPE_2A)),
	      "no XRC and no flow steering are advertised", "%x", device.orig_attr.device_cap_flags);
	check(!device.packet_pacing_caps.supported_qpts && !device.cq_mod_caps.max_cq_count && !device.tso_caps.max_tso &&
	      !device.max_wq_type_rq && !device.raw_packet_caps, "nor pacing, moderation, offloads", "not");
	check_failed(!ibv_open_xrcd(context, &xrcd), EOPNOTSUPP, "an XRC domain: EOPNOTSUPP");
	srq.pd = a.pd;
	srq.srq_type = IBV_SRQT_XRC;
	check_failed(!ibv_create_srq_ex(context, &srq), EOPNOTSUPP, "an XRC shared receive queue: EOPNOTSUPP");
	srq.srq_type = IBV_SRQT_TM;
	check_failed(!ibv_create_srq_ex(context, &srq), EOPNOTSUPP, "one with tag matching: EOPNOTSUPP");
	init.qp_type = IBV_QPT_RAW_PACKET;
	check_failed(!ibv_create_qp(a.pd, &init), EOPNOTSUPP, "a raw packet queue pair: EOPNOTSUPP");
	init.qp_type = IBV_QPT_XRC_SEND;
	check_failed(!ibv_create_qp(a.pd, &init), EOPNOTSUPP, "an XRC queue pair: EOPNOTSUPP");
	init.qp_type = IBV_QPT_DRIVER;
	check_failed(!ibv_create_qp(a.pd, &init), EOPNOTSUPP, "a vendor's queue pair: EOPNOTSUPP");
	init.qp_type = 77;
	check_failed(!ibv_create_qp(a.pd, &init), EINVAL, "an unknown kind of queue pair: EINVAL");
	check_failed(!ibv_create_flow(a.qp, &flow), EOPNOTSUPP, "a flow: EOPNOTSUPP");
	wq.pd = a.pd;
	wq.cq = a.scq;
	check_failed(!ibv_create_wq(context, &wq), EOPNOTSUPP, "a work queue: EOPNOTSUPP");
	check_failed(!ibv_create_rwq_ind_table(context, &table), EOPNOTSUPP, "a table of work queues: EOPNOTSUPP");
	check_failed(!ibv_create_counters(context, &counters), EOPNOTSUPP, "counters: EOPNOTSUPP");
	check_failed(!ibv_alloc_null_mr(a.pd), EOPNOTSUPP, "a null region: EOPNOTSUPP");
	check_errno(ibv_modify_qp_rate_limit(a.qp, &rate), EOPNOTSUPP, "a rate limit: EOPNOTSUPP");
	check_errno(ibv_modify_qp(a.qp, &attr, IBV_QP_RATE_LIMIT), EOPNOTSUPP, "a rate limit by ibv_modify_qp: EOPNOTSUPP");
	check_errno(ibv_query_ece(a.qp, &ece), EOPNOTSUPP, "ECE is queried: EOPNOTSUPP");
	check_errno(ibv_set_ece(a.qp, &ece), EOPNOTSUPP, "ECE is set: EOPNOTSUPP");
	check(ibv_query_qp_data_in_order(a.qp, IBV_WR_RDMA_WRITE, 0) == 0, "data in order is not promised", "it is");
	check_failed(!ibv_import_device(0), EOPNOTSUPP, "importing a device: EOPNOTSUPP");
	check_failed(!ibv_import_pd(context, 1), EOPNOTSUPP, "importing a domain: EOPNOTSUPP");
	check_failed(!ibv_import_mr(a.pd, 1), EOPNOTSUPP, "importing a region: EOPNOTSUPP");
	end_close(&a);
	MUST(ibv_close_device(context) == 0);
}

static void gids(void)
{
	struct ibv_gid_entry table[64], entry;
	struct ibv_port_attr port;
	union ibv_gid gid;
	ssize_t count;

	open_device();
	MUST(ibv_query_port(context, 1, &port) == 0);
	count = ibv_query_gid_table(context, table, 64, 0);
	check(count == port.gid_tbl_len, "the table is as long as the port says", "%ld and %d", (long)count, port.gid_tbl_len);
	for (ssize_t i = 0; i < count; i++) {
		MUST(ibv_query_gid_ex(context, 1, (uint32_t)i, &entry, 0) == 0 && ibv_query_gid(context, 1, (int)i, &gid) == 0);
		if (memcmp(&entry, &table[i], sizeof entry) || memcmp(&gid, &entry.gid, sizeof gid) || entry.gid_index != (uint32_t)i)
			check(false, "the three ways to ask agree", "not on entry %ld", (long)i);
	}
	check(ibv_query_gid_table(context, table, 0, 0) == -EINVAL, "without room: EINVAL", "not");
	check(ibv_query_gid_table(context, table, 64, 1) == -EOPNOTSUPP, "with flags: EOPNOTSUPP", "not");
	check_errno(ibv_query_gid_ex(context, 1, (uint32_t)count, &entry, 0), EINVAL, "beyond the end: EINVAL");
	check_errno(ibv_query_gid_ex(context, 2, 0, &entry, 0), EINVAL, "another port: EINVAL");
	check_errno(ibv_query_gid_ex(context, 1, 0, &entry, 1), EOPNOTSUPP, "flags: EOPNOTSUPP");
	MUST(ibv_close_device(context) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "reading", reading }, { "times", times }, { "creating", creating }, { "domains", domains },
		{ "buffers", buffers }, { "advising", advising }, { "refused", refused }, { "gids", gids },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
