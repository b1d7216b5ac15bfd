/* Registered memory that the program has unmapped: the work request at hand fails, the connection ends,
 * and the process and its other connections live. The program's own faults are its own. */
#include "common.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define SIZE (1u << 20)

static void *new_area(void)
{
	void *area = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MUST(area != MAP_FAILED);
	return area;
}

/* What one connection has for a test: good memory at both ends, and a region whose memory is gone. */
struct scene {
	struct pair p;
	void *good[2];
	struct ibv_mr *mr[2];
	struct ibv_mr *gone;
};

static void scene_open(struct scene *s, bool at_server)
{
	void *area = new_area();

	pair_open(&s->p);
	for (int i = 0; i < 2; i++) {
		s->good[i] = new_area();
		s->mr[i] = ibv_reg_mr(i ? s->p.s.pd : s->p.c.pd, s->good[i], SIZE, REMOTE_ALL);
		MUST(s->mr[i]);
	}
	MUST(s->gone = ibv_reg_mr(at_server ? s->p.s.pd : s->p.c.pd, area, SIZE, REMOTE_ALL));
	/* Not unmapped, for the address might be given to somebody else. */
	MUST(mprotect(area, SIZE, PROT_NONE) == 0);
}

/* Both ends hear of the end, everything can be released. */
static void scene_close(struct scene *s, const char *name)
{
	bool c = take_event(s->p.c.ch).event == RDMA_CM_EVENT_DISCONNECTED;
	bool d = take_event(s->p.s.ch).event == RDMA_CM_EVENT_DISCONNECTED;

	check(c && d, name, "client %d, server %d", c, d);
	MUST(ibv_dereg_mr(s->gone) == 0);
	for (int i = 0; i < 2; i++)
		MUST(ibv_dereg_mr(s->mr[i]) == 0);
	pair_close(&s->p);
	munmap(s->good[0], SIZE);
	munmap(s->good[1], SIZE);
}

static const size_t sizes[] = { 64, 9000, SIZE };
#define EACH_SIZE(i) for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)

static void exchange(struct scene *s)
{
	struct ibv_sge from = sge_of(s->mr[0], 0, 64), to = sge_of(s->mr[1], 0, 64);

	MUST(post_recv(&s->p.s, &to, 1, 1) == 0);
	MUST(post(&s->p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &from, 1, 0, 0, 2) == 0);
	MUST(poll_one(s->p.c.scq).status == IBV_WC_SUCCESS);
	MUST(poll_one(s->p.s.rcq).status == IBV_WC_SUCCESS);
}

static void all_ways(void)
{
	EACH_SIZE(i) {
		struct scene s;
		struct ibv_sge local, sge;

		scene_open(&s, false);
		local = sge_of(s.gone, 0, sizes[i]);
		MUST(post(&s.p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &local, 1, 0, 0, 1) == 0);
		want_wc(s.p.c.scq, IBV_WC_LOC_PROT_ERR, "a Send from it");
		scene_close(&s, "a Send from it ends the connection");

		scene_open(&s, false);
		local = sge_of(s.gone, 0, sizes[i]);
		MUST(post(&s.p.c, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &local, 1, (uintptr_t)s.good[1], s.mr[1]->rkey,
			  1) == 0);
		want_wc(s.p.c.scq, IBV_WC_LOC_PROT_ERR, "an RDMA Read into it");
		scene_close(&s, "an RDMA Read into it ends the connection");

		scene_open(&s, true);
		sge = sge_of(s.mr[0], 0, sizes[i]);
		local = sge_of(s.gone, 0, sizes[i]);
		MUST(post_recv(&s.p.s, &local, 1, 1) == 0);
		MUST(post(&s.p.c, IBV_WR_SEND, 0, &sge, 1, 0, 0, 1) == 0);
		want_wc(s.p.s.rcq, IBV_WC_LOC_PROT_ERR, "a receive into it");
		scene_close(&s, "a receive into it ends the connection");

		scene_open(&s, true);
		sge = sge_of(s.mr[0], 0, sizes[i]);
		MUST(post(&s.p.c, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)s.gone->addr, s.gone->rkey,
			  1) == 0);
		want_wc(s.p.c.scq, IBV_WC_REM_OP_ERR, "a peer's RDMA Read of it");
		scene_close(&s, "a peer's RDMA Read of it ends the connection");

		scene_open(&s, true);
		sge = sge_of(s.mr[0], 0, sizes[i]);
		MUST(post(&s.p.c, IBV_WR_RDMA_WRITE, 0, &sge, 1, (uintptr_t)s.gone->addr, s.gone->rkey, 1) == 0);
		scene_close(&s, "a peer's RDMA Write into it ends the connection");
	}
}

/* While others lose their connections, this one works. */
static void gone(void)
{
	struct scene bystander;

	scene_open(&bystander, true);
	exchange(&bystander);
	all_ways();
	exchange(&bystander);
	check(true, "another connection works all the time", "");
	MUST(rdma_disconnect(bystander.p.c.id) == 0);
	scene_close(&bystander, "and ends as always");
}

static sigjmp_buf back;
static void *volatile fault_at;

static void on_fault(int sig, siginfo_t *info, void *context)
{
	(void)context;
	siglongjmp(back, sig == SIGSEGV && info->si_addr == fault_at ? 1 : 2);
}

static int fault(void)
{
	int way = sigsetjmp(back, 1);

	if (way)
		return way;
	fault_at = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*(volatile char *)fault_at = 1;
	return 0;
}

/* A handler that was there first. */
static void handler(void)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
	int got;

	MUST(sigaction(SIGSEGV, &action, NULL) == 0);
	gone();
	for (int i = 0; i < 3; i++) {
		got = fault();
		check(got == 1, "the program's handler gets the program's fault", "%d", got);
	}
	all_ways();
}

/* No handler. */
static void action(void)
{
	struct rlimit none = { 0 };
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		struct scene s;

		setrlimit(RLIMIT_CORE, &none);
		scene_open(&s, true);
		*(volatile char *)s.gone->addr = 1;
		_exit(0);
	}
	MUST(pid > 0 && waitpid(pid, &status, 0) == pid);
	check(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "a fault of the program's ends it", "status %#x", status);
}

static const struct group groups[] = { { "gone", gone }, { "handler", handler }, { "action", action } };

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
