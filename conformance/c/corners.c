/* What programs do at the edges of the interface: a device that is closed with objects left, threads with the smallest stack, errno
 * behind calls that succeed, a process without /dev.
 *
 *	corners [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE /* unshare */
#include <dirent.h>
#include <limits.h>
#include <pthread.h>

#include "common.h"

static struct ibv_context *opened(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;

	if (list)
		ibv_free_device_list(list);
	return context;
}

static int descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int count = 0;

	MUST(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

/* The kernel frees all that belongs to a device's descriptor when that is closed. */
static void left_objects(void)
{
	struct ibv_context *context, *first = opened();
	struct ibv_comp_channel *channel;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	int before;

	/* Now what the process has once is there. */
	MUST(first);
	before = descriptors();
	MUST((context = opened()) && (pd = ibv_alloc_pd(context)) && (channel = ibv_create_comp_channel(context)));
	MUST((cq = ibv_create_cq(context, 8, NULL, channel, 0)));
	check(ibv_close_device(context) == 0, "a device with objects left is closed", "errno %d", errno);
	/* The channel, of two descriptors, is the program's to close. */
	check(descriptors() == before + 2, "and no descriptor of its own is left", "%d, %d before", descriptors(), before);
	check(ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0 && ibv_dealloc_pd(pd) == 0,
	      "what was left can be destroyed", "errno %d", errno);
	check(descriptors() == before, "then nothing is left", "%d, %d before", descriptors(), before);
	MUST(ibv_close_device(first) == 0);
}

static struct pair small;
static const char *where;

/* With bytes that it has not read. */
static void *destroy(void *data)
{
	(void)data;
	where = "ibv_destroy_qp";
	rdma_destroy_qp(small.s.id);
	rdma_destroy_qp(small.c.id);
	return NULL;
}

static void small_stack(void)
{
	static char bytes[1 << 16];
	struct ibv_mr *mr;
	struct ibv_sge sge;
	pthread_attr_t attr;
	pthread_t thread;

	pair_open(&small);
	MUST(mr = ibv_reg_mr(small.c.pd, bytes, sizeof bytes, 0));
	sge = sge_of(mr, 0, sizeof bytes);
	for (int n = 0; n < 8; n++)
		MUST(post(&small.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 1) == 0);
	MUST(pthread_attr_init(&attr) == 0 && pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN) == 0);
	MUST(pthread_create(&thread, &attr, destroy, NULL) == 0 && pthread_join(thread, NULL) == 0);
	check(true, "a thread with the smallest stack destroys queue pairs", "");
	small.c.qp = small.s.qp = NULL;
	MUST(ibv_dereg_mr(mr) == 0);
	pair_close(&small);
}

/* A call that succeeds leaves errno as it was. */
static void errno_stays(void)
{
	struct ibv_context *context = opened();
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_UD, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR }, rts = { .qp_state = IBV_QPS_RTS };
	static char bytes[128];
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 1 } };
	struct ibv_sge sge = { .addr = (uintptr_t)bytes, .length = sizeof bytes };
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr *bad_send;
	struct ibv_pd *pd;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	int got = 0;

	MUST(context && (pd = ibv_alloc_pd(context)) && (mr = ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_LOCAL_WRITE)));
	MUST(attr.send_cq = attr.recv_cq = ibv_create_cq(context, 8, NULL, NULL, 0));
	MUST(qp = ibv_create_qp(pd, &attr));
	MUST(ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_QKEY) == 0);
	MUST(ibv_modify_qp(qp, &rtr, IBV_QP_STATE) == 0);
	MUST(ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	MUST(ibv_query_gid(context, 1, 0, &to.grh.dgid) == 0 && (ah = ibv_create_ah(pd, &to)));
	sge.lkey = mr->lkey;
	sge.length = sizeof bytes;
	errno = 0;
	MUST(ibv_post_recv(qp, &recv, &bad_recv) == 0);
	send.wr.ud.ah = ah;
	send.wr.ud.remote_qpn = qp->qp_num;
	send.wr.ud.remote_qkey = 7;
	sge.length = 16;
	MUST(ibv_post_send(qp, &send, &bad_send) == 0);
	check(errno == 0, "a datagram is posted, and errno stays", "%d", errno);
	errno = 0;
	for (uint64_t end = now_ms() + LIMIT_MS; got < 2 && now_ms() < end;) {
		int n = ibv_poll_cq(attr.send_cq, 1, &wc);

		MUST(n >= 0);
		got += n;
	}
	for (int n = 0; n < 10000; n++)
		MUST(ibv_poll_cq(attr.send_cq, 1, &wc) == 0);
	check(got == 2 && errno == 0, "and polled, and errno stays", "%d completions, errno %d", got, errno);
	MUST(ibv_destroy_ah(ah) == 0 && ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(attr.send_cq) == 0);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}

/* As in a bare chroot. */
static void no_devices(void)
{
	char place[] = "/tmp/uwarp-corners-XXXXXX";
	int status;
	pid_t child;

	MUST(mkdtemp(place) && (child = fork()) >= 0);
	if (child == 0) {
		if (chroot(place) && (unshare(CLONE_NEWUSER) || chroot(place)))
			_exit(77);
		_exit(chdir("/") || !opened());
	}
	MUST(waitpid(child, &status, 0) == child && rmdir(place) == 0);
	check(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77),
	      "a process without /dev/null opens the device", "status %x", status);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "left_objects", left_objects }, { "small_stack", small_stack }, { "errno_stays", errno_stays },
		{ "no_devices", no_devices },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
