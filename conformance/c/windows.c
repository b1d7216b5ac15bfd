/* Memory windows of both types through the C interfaces, with traffic through them.
 *
 *	windows ADDRESS [GROUP]
 */
#include "common.h"

#define SIZE 4096
#define AT 1024
#define LENGTH 512

static struct pair p;
static unsigned char source[SIZE], place[SIZE];
static struct ibv_mr *source_mr, *place_mr;
static struct ibv_mw *mw;

static void enter_with(struct options o, enum ibv_mw_type type)
{
	pair_open_with(&p, o);
	memset(source, 0x77, sizeof source);
	memset(place, 0, sizeof place);
	MUST(source_mr = ibv_reg_mr(p.c.pd, source, sizeof source, IBV_ACCESS_LOCAL_WRITE));
	/* No right for peers but through a window. */
	MUST(place_mr = ibv_reg_mr(p.s.pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	MUST(mw = ibv_alloc_mw(p.s.pd, type));
}

static void enter(enum ibv_mw_type type)
{
	enter_with((struct options){ 0 }, type);
}

static void leave(void)
{
	if (mw)
		MUST(ibv_dealloc_mw(mw) == 0);
	mw = NULL;
	MUST(ibv_dereg_mr(source_mr) == 0 && ibv_dereg_mr(place_mr) == 0);
	pair_close(&p);
}

static struct ibv_mw_bind_info part(unsigned int access)
{
	return (struct ibv_mw_bind_info){
		.mr = place_mr, .addr = (uint64_t)(uintptr_t)place + AT, .length = LENGTH, .mw_access_flags = access,
	};
}

static int bind_1(struct ibv_mw_bind_info info)
{
	struct ibv_mw_bind bind = { .wr_id = 5, .send_flags = IBV_SEND_SIGNALED, .bind_info = info };

	return ibv_bind_mw(p.s.qp, mw, &bind);
}

static int bind_2(uint32_t rkey, struct ibv_mw_bind_info info)
{
	struct ibv_send_wr wr = { .wr_id = 6, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = rkey;
	wr.bind_mw.bind_info = info;
	return ibv_post_send(p.s.qp, &wr, &bad);
}

static void bound(const char *what)
{
	struct ibv_wc wc = want_wc(p.s.scq, IBV_WC_SUCCESS, what);

	check(wc.opcode == IBV_WC_BIND_MW, "completes as BIND_MW", "%d", wc.opcode);
}

static void access_with(enum ibv_wr_opcode op, uint64_t at, uint32_t rkey, size_t length, enum ibv_wc_status status,
			const char *name)
{
	struct ibv_sge sge = sge_of(source_mr, 0, length);
	struct ibv_send_wr wr = {
		.wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED,
	}, *bad;

	wr.wr.rdma.remote_addr = at;
	wr.wr.rdma.rkey = rkey;
	MUST(ibv_post_send(p.c.qp, &wr, &bad) == 0);
	want_wc(p.c.scq, status, name);
}

static void type_1(void)
{
	uint64_t at = (uint64_t)(uintptr_t)place + AT;
	uint32_t first;

	enter(IBV_MW_TYPE_1);
	check_errno(bind_1(part(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)), 0, "bind_mw");
	bound("the bind");
	first = mw->rkey;
	access_with(IBV_WR_RDMA_WRITE, at, first, LENGTH, IBV_WC_SUCCESS, "a Write through the window");
	access_with(IBV_WR_RDMA_READ, at, first, LENGTH, IBV_WC_SUCCESS, "a Read through it");
	check(place[AT - 1] == 0 && place[AT] == 0x77 && place[AT + LENGTH - 1] == 0x77 && place[AT + LENGTH] == 0,
	      "it wrote there and nowhere else", "it did not");
	check_errno(ibv_dereg_mr(place_mr), EBUSY, "dereg_mr of a region with a window");
	check_errno(ibv_dealloc_pd(p.s.pd), EBUSY, "dealloc_pd of a domain with a window");
	check_errno(bind_1(part(IBV_ACCESS_REMOTE_WRITE)), 0, "bind_mw of a window that is bound");
	bound("the second bind");
	check(mw->rkey != first, "gives it another key", "the same");
	access_with(IBV_WR_RDMA_WRITE, at, mw->rkey, 8, IBV_WC_SUCCESS, "a Write through the second binding");
	access_with(IBV_WR_RDMA_WRITE, at, first, 8, IBV_WC_REM_ACCESS_ERR, "a Write with the first key");
	leave();

	enter(IBV_MW_TYPE_1);
	MUST(bind_1(part(IBV_ACCESS_REMOTE_READ)) == 0);
	bound("a bind for Reads");
	access_with(IBV_WR_RDMA_WRITE, at, mw->rkey, 8, IBV_WC_REM_ACCESS_ERR, "a Write through a window for Reads");
	leave();

	enter(IBV_MW_TYPE_1);
	MUST(bind_1(part(IBV_ACCESS_REMOTE_WRITE)) == 0);
	bound("a bind for Writes");
	access_with(IBV_WR_RDMA_WRITE, at + LENGTH - 4, mw->rkey, 8, IBV_WC_REM_ACCESS_ERR, "a Write that leaves the window");
	check(place[AT + LENGTH] == 0, "nothing is written behind it", "%u", place[AT + LENGTH]);
	leave();

	enter(IBV_MW_TYPE_1);
	MUST(bind_1(part(IBV_ACCESS_REMOTE_WRITE)) == 0);
	bound("a bind");
	first = mw->rkey;
	check_errno(bind_1((struct ibv_mw_bind_info){ .mr = place_mr }), 0, "bind_mw of no bytes");
	bound("the bind of no bytes");
	access_with(IBV_WR_RDMA_WRITE, at, first, 8, IBV_WC_REM_ACCESS_ERR, "a Write through an unbound window");
	leave();
}

static void type_2(void)
{
	uint64_t at = (uint64_t)(uintptr_t)place + AT;
	struct ibv_send_wr inv = { .wr_id = 7, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_sge sge;
	struct ibv_wc wc;
	uint32_t rkey;

	enter(IBV_MW_TYPE_2);
	rkey = ibv_inc_rkey(mw->rkey);
	check_errno(bind_2(rkey, part(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ZERO_BASED)), 0, "IBV_WR_BIND_MW");
	bound("the bind");
	access_with(IBV_WR_RDMA_WRITE, 8, rkey, 8, IBV_WC_SUCCESS, "a Write at an offset from zero");
	check(place[AT + 7] == 0 && place[AT + 8] == 0x77, "it counts from the window's start", "it does not");
	inv.invalidate_rkey = rkey;
	check_errno(ibv_post_send(p.s.qp, &inv, &bad), 0, "IBV_WR_LOCAL_INV of a window");
	wc = want_wc(p.s.scq, IBV_WC_SUCCESS, "the invalidation");
	check(wc.opcode == IBV_WC_LOCAL_INV, "completes as LOCAL_INV", "%d", wc.opcode);
	rkey = ibv_inc_rkey(rkey);
	MUST(bind_2(rkey, part(IBV_ACCESS_REMOTE_WRITE)) == 0);
	bound("a bind with the next key");
	access_with(IBV_WR_RDMA_WRITE, at, rkey, 8, IBV_WC_SUCCESS, "a Write at an address");

	/* Its peer takes it away. */
	sge = sge_of(place_mr, 0, 64);
	MUST(post_recv(&p.s, &sge, 1, 3) == 0);
	sge = sge_of(source_mr, 0, 8);
	inv = (struct ibv_send_wr){
		.opcode = IBV_WR_SEND_WITH_INV, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
		.invalidate_rkey = rkey,
	};
	MUST(ibv_post_send(p.c.qp, &inv, &bad) == 0);
	wc = want_wc(p.s.rcq, IBV_WC_SUCCESS, "a Send with Invalidate");
	check((wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey == rkey, "names the window", "%#x", wc.invalidated_rkey);
	want_wc(p.c.scq, IBV_WC_SUCCESS, "its sender's");
	check_errno(ibv_dereg_mr(place_mr), 0, "dereg_mr of the region, which has no window any more");
	MUST(place_mr = ibv_reg_mr(p.s.pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	access_with(IBV_WR_RDMA_WRITE, at, rkey, 8, IBV_WC_REM_ACCESS_ERR, "a Write with the key that is gone");
	leave();

	enter(IBV_MW_TYPE_2);
	rkey = ibv_inc_rkey(mw->rkey);
	MUST(bind_2(rkey, part(IBV_ACCESS_REMOTE_WRITE)) == 0);
	bound("a bind");
	check_errno(ibv_dealloc_mw(mw), 0, "dealloc_mw of a window that is bound");
	mw = NULL;
	access_with(IBV_WR_RDMA_WRITE, at, rkey, 8, IBV_WC_REM_ACCESS_ERR, "a Write through a window that was deallocated");
	leave();
}

/* Another queue pair of the same domain has no part in a window of type 2. */
static void of_one_queue_pair(void)
{
	struct pair other;
	struct ibv_mw *second;
	struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	uint32_t rkey;

	enter(IBV_MW_TYPE_2);
	pair_open(&other);
	MUST(second = ibv_alloc_mw(other.s.pd, IBV_MW_TYPE_2));
	wr.bind_mw.mw = second;
	wr.bind_mw.rkey = second->rkey;
	wr.bind_mw.bind_info = part(IBV_ACCESS_REMOTE_WRITE);
	MUST(ibv_post_send(other.s.qp, &wr, &bad) == 0);
	want_wc(other.s.scq, IBV_WC_MW_BIND_ERR, "a bind to another domain's region");
	MUST(ibv_dealloc_mw(second) == 0);
	pair_close(&other);
	rkey = ibv_inc_rkey(mw->rkey);
	MUST(bind_2(rkey, part(IBV_ACCESS_REMOTE_WRITE)) == 0);
	bound("a bind");
	/* RESET takes it away. */
	MUST(to(p.s.qp, IBV_QPS_RESET) == 0);
	check_errno(ibv_dereg_mr(place_mr), 0, "dereg_mr after RESET of the queue pair");
	MUST(place_mr = ibv_reg_mr(p.s.pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE));
	leave();
}

static void wrong(void)
{
	struct ibv_mw_bind bind = { .bind_info = { 0 } };
	struct ibv_mr *plain;
	uint32_t rkey;

	enter(IBV_MW_TYPE_2);
	rkey = ibv_inc_rkey(mw->rkey);
	check_failed(!ibv_alloc_mw(p.s.pd, 7), EINVAL, "alloc_mw of another type");
	check_errno(ibv_bind_mw(p.s.qp, mw, &bind), EINVAL, "bind_mw of a window of type 2");
	check_errno(bind_2(rkey, part(1u << 15)), EINVAL, "rights that there are not");
	MUST(bind_2(rkey, part(IBV_ACCESS_REMOTE_READ)) == 0);
	bound("a bind");
	check_errno(bind_2(ibv_inc_rkey(rkey), part(IBV_ACCESS_REMOTE_READ)), 0, "a second bind is posted");
	want_wc(p.s.scq, IBV_WC_MW_BIND_ERR, "and fails: the window is bound");
	leave();

	enter(IBV_MW_TYPE_2);
	MUST(plain = ibv_reg_mr(p.s.pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE));
	MUST(bind_2(ibv_inc_rkey(mw->rkey), (struct ibv_mw_bind_info){
		.mr = plain, .addr = (uint64_t)(uintptr_t)place, .length = 8, .mw_access_flags = IBV_ACCESS_REMOTE_READ,
	}) == 0);
	want_wc(p.s.scq, IBV_WC_MW_BIND_ERR, "a bind to a region without IBV_ACCESS_MW_BIND");
	MUST(ibv_dereg_mr(plain) == 0);
	leave();

	enter(IBV_MW_TYPE_1);
	check_errno(bind_2(mw->rkey, part(IBV_ACCESS_REMOTE_READ)), EINVAL, "IBV_WR_BIND_MW of a window of type 1");
	leave();
}

/* What adapters and rxe take, though the specification does not have it. */
static void as_adapters(void)
{
	uint64_t at = (uint64_t)(uintptr_t)place + AT;
	struct ibv_mw_bind bind = { .wr_id = 5, .send_flags = IBV_SEND_SIGNALED };
	struct pair other;
	struct ibv_mw *foreign;
	struct ibv_mr *mr;
	uint32_t rkey;

	enter(IBV_MW_TYPE_1);
	check_errno(bind_1(part(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)), 0,
		    "C15 bind_mw with IBV_ACCESS_LOCAL_WRITE among the rights");
	bound("the bind");
	access_with(IBV_WR_RDMA_WRITE, at, mw->rkey, 8, IBV_WC_SUCCESS, "a Write through this window");
	leave();

	enter(IBV_MW_TYPE_2);
	rkey = ibv_inc_rkey(mw->rkey);
	check_errno(bind_2(rkey ^ 0x5a5a5a00, part(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)), 0,
		    "C15 of the new key of IBV_WR_BIND_MW the low byte counts alone");
	bound("the bind");
	access_with(IBV_WR_RDMA_WRITE, at, rkey, 8, IBV_WC_SUCCESS, "a Write with the window's key and this byte");
	leave();

	enter(IBV_MW_TYPE_1);
	pair_open(&other);
	MUST(foreign = ibv_alloc_mw(other.s.pd, IBV_MW_TYPE_1));
	MUST(mr = ibv_reg_mr(other.s.pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND));
	bind.bind_info = part(IBV_ACCESS_REMOTE_WRITE);
	bind.bind_info.mr = mr;
	check_errno(ibv_bind_mw(p.s.qp, foreign, &bind), 0, "C15 bind_mw of another domain's window is posted");
	want_wc(p.s.scq, IBV_WC_MW_BIND_ERR, "and fails");
	MUST(ibv_dealloc_mw(foreign) == 0 && ibv_dereg_mr(mr) == 0);
	pair_close(&other);
	leave();

	enter(IBV_MW_TYPE_1);
	MUST(mr = ibv_reg_mr(p.s.pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE));
	check(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE) == IBV_REREG_MR_ERR_CMD &&
	      errno == EINVAL, "C15 rereg_mr with rights that do not fit: IBV_REREG_MR_ERR_CMD", "not, %m");
	check(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_CMD, "nor to no domain", "not");
	check(ibv_rereg_mr(mr, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_CMD && errno == EINVAL, "nor nothing at all: EINVAL", "not, %m");
	check(ibv_rereg_mr(mr, 0, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == IBV_REREG_MR_ERR_INPUT,
	      "rights that are not to change: IBV_REREG_MR_ERR_INPUT", "not");
	MUST(ibv_dereg_mr(mr) == 0);
	leave();
}

static void extended(void)
{
	struct ibv_device_attr attr;
	struct ibv_mw_bind_info info;
	struct ibv_qp_ex *qp;
	uint32_t rkey;

	enter_with((struct options){ .send_ops = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV }, IBV_MW_TYPE_2);
	MUST(ibv_query_device(p.c.id->verbs, &attr) == 0);
	check(attr.max_mw > 0 && (attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW) &&
	      (attr.device_cap_flags & IBV_DEVICE_MEM_WINDOW_TYPE_2B), "the device has windows of both types", "%#x",
	      attr.device_cap_flags);
	MUST(qp = ibv_qp_to_qp_ex(p.s.qp));
	info = part(IBV_ACCESS_REMOTE_WRITE);
	rkey = ibv_inc_rkey(mw->rkey);
	ibv_wr_start(qp);
	qp->wr_id = 1;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_bind_mw(qp, mw, rkey, &info);
	check_errno(ibv_wr_complete(qp), 0, "wr_complete of a bind");
	bound("the bind");
	access_with(IBV_WR_RDMA_WRITE, (uint64_t)(uintptr_t)place + AT, rkey, 8, IBV_WC_SUCCESS, "a Write through the window");
	ibv_wr_start(qp);
	qp->wr_id = 2;
	ibv_wr_local_inv(qp, rkey);
	check_errno(ibv_wr_complete(qp), 0, "wr_complete of an invalidation");
	want_wc(p.s.scq, IBV_WC_SUCCESS, "the invalidation");
	leave();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "type_1", type_1 }, { "type_2", type_2 }, { "of_one_queue_pair", of_one_queue_pair }, { "wrong", wrong },
		{ "as_adapters", as_adapters }, { "extended", extended },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
