/* Children that are forked while their parent has the device open, as those of prefork servers, Python's multiprocessing and test
 * suites are: over adapters they open the device themselves.
 *
 *	forks [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#include <dirent.h>
#include <pthread.h>

#include "common.h"

static char memory[2][256];

/* Both ways, with memory that is registered for it. */
static bool talks(struct pair *p)
{
	struct ibv_mr *from = ibv_reg_mr(p->c.pd, memory[0], sizeof memory[0], IBV_ACCESS_LOCAL_WRITE);
	struct ibv_mr *into = ibv_reg_mr(p->s.pd, memory[1], sizeof memory[1], IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	struct ibv_sge sge;
	struct ibv_wc wc;
	bool good = from && into;

	sge = good ? sge_of(into, 0, 64) : (struct ibv_sge){ 0 };
	good = good && post_recv(&p->s, &sge, 1, 1) == 0;
	sge = good ? sge_of(from, 0, 64) : sge;
	good = good && post(&p->c, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 2) == 0;
	good = good && poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS;
	good = good && poll_within(p->s.rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS;
	good = good && post(&p->c, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)memory[1], into->rkey, 3) == 0;
	good = good && poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS;
	return good && ibv_dereg_mr(from) == 0 && ibv_dereg_mr(into) == 0;
}

static bool a_connection_of_its_own(void)
{
	struct pair own;
	bool good;

	pair_open(&own);
	good = talks(&own);
	pair_close(&own);
	return good;
}

/* The status with which a child ends; -1: by a signal. */
static int end_of(pid_t child)
{
	int status;

	MUST(child > 0 && waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static struct ibv_context *opened(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;

	if (list)
		ibv_free_device_list(list);
	return context;
}

/* Parent and child draw different keys. */
static void keys(void)
{
	enum { COUNT = 5 };
	uint32_t of_child[COUNT], of_parent[COUNT];
	struct ibv_context *context = opened();
	struct ibv_pd *pd;
	int ends[2], equal = 0;
	pid_t child;

	/* Something is drawn and given back: all that the program has is closed. */
	MUST(context && (pd = ibv_alloc_pd(context)));
	MUST(ibv_dereg_mr(ibv_reg_mr(pd, memory, sizeof memory, 0)) == 0);
	MUST(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
	MUST(pipe(ends) == 0 && (child = fork()) >= 0);
	MUST((context = opened()) && (pd = ibv_alloc_pd(context)));
	for (int n = 0; n < COUNT; n++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, 0);

		MUST(mr);
		of_parent[n] = mr->rkey;
	}
	if (child == 0)
		_exit(write(ends[1], of_parent, sizeof of_parent) != sizeof of_parent);
	MUST(read(ends[0], of_child, sizeof of_child) == sizeof of_child && end_of(child) == 0);
	for (int n = 0; n < COUNT; n++)
		for (int m = 0; m < COUNT; m++)
			equal += of_child[n] == of_parent[m];
	check(equal == 0, "a child draws other keys than its parent", "%d of %d are equal", equal, COUNT);
}

/* Everything fails on what the parent has made. Bits of what does not. */
static int wrong_with_parents(struct pair *p, struct ibv_context *context)
{
	struct rdma_conn_param param = { 0 };
	struct ibv_device_attr attr;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct ibv_qp_attr to_err = { .qp_state = IBV_QPS_ERR };
	struct ibv_recv_wr recv = { 0 }, *bad_recv = NULL;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *data;
	int wrong = 0;

	wrong |= (post(&p->c, IBV_WR_SEND, 0, NULL, 0, 0, 0, 1) == ENODEV) ? 0 : 1;
	wrong |= (ibv_post_recv(p->c.qp, &recv, &bad_recv) == ENODEV && bad_recv == &recv) ? 0 : 2;
	wrong |= (ibv_poll_cq(p->c.scq, 1, &wc) < 0) ? 0 : 4;
	wrong |= (ibv_req_notify_cq(p->c.scq, 0) == ENODEV) ? 0 : 8;
	wrong |= (ibv_query_device(context, &attr) == ENODEV && ibv_modify_qp(p->c.qp, &to_err, IBV_QP_STATE) == ENODEV) ? 0 : 16;
	wrong |= (!ibv_alloc_pd(context) && errno == ENODEV && !ibv_reg_mr(p->c.pd, memory, 1, 0) && errno == ENODEV) ? 0 : 32;
	wrong |= (ibv_get_cq_event(p->s.cc, &cq, &data) < 0 && errno == ENODEV) ? 0 : 64;
	errno = 0;
	wrong |= (rdma_get_cm_event(p->c.ch, &event) < 0 && errno == ENODEV) ? 0 : 128;
	if (wrong)
		return wrong;
	errno = 0;
	wrong |= (rdma_disconnect(p->c.id) < 0 && errno == ENODEV) ? 0 : 1;
	wrong |= (rdma_accept(p->s.id, &param) < 0 && rdma_create_id(p->c.ch, &id, NULL, RDMA_PS_TCP) < 0) ? 0 : 2;
	wrong |= (ibv_destroy_qp(p->c.qp) == ENODEV && ibv_destroy_cq(p->c.scq) == ENODEV) ? 0 : 4;
	wrong |= (rdma_destroy_id(p->c.id) < 0 && ibv_close_device(context) < 0) ? 0 : 8;
	return wrong;
}

/* A child whose parent has the device open gets one of its own, and leaves the parent's alone. */
static void device(void)
{
	struct ibv_context *context = opened();
	struct pair p;
	pid_t child;
	int end;

	MUST(context);
	pair_open(&p);
	MUST(talks(&p) && (child = fork()) >= 0);
	if (child == 0)
		exit(wrong_with_parents(&p, context));
	end = end_of(child);
	check(end == 0, "every call on its parent's objects fails in a child", "%#x", end);
	MUST((child = fork()) >= 0);
	if (child == 0)
		exit(!(a_connection_of_its_own() && wrong_with_parents(&p, context) == 0 && a_connection_of_its_own()));
	check(talks(&p), "the parent goes on while a child has a device of its own", "not");
	end = end_of(child);
	check(end == 0, "a child has connections of its own", "%d", end);
	check(talks(&p) && !readable(p.c.ch->fd, 0) && !readable(p.s.ch->fd, 0), "the parent goes on afterwards, without an event",
	      "not");
	pair_close(&p);
	MUST(ibv_close_device(context) == 0);
}

static void deeper(int levels)
{
	struct pair p;
	pid_t child;

	pair_open(&p);
	MUST(talks(&p) && (child = fork()) >= 0);
	if (child == 0) {
		alarm(GROUP_LIMIT);
		if (levels)
			deeper(levels - 1);
		exit(!a_connection_of_its_own());
	}
	MUST(talks(&p) && end_of(child) == 0 && talks(&p));
	pair_close(&p);
}

static void in_fork(void)
{
	deeper(4);
	check(true, "children of children of children have theirs", "");
}

static volatile bool enough;

static void *connects(void *unused)
{
	while (!enough)
		MUST(a_connection_of_its_own());
	return unused;
}

static void *moves(void *unused)
{
	struct pair p;

	pair_open(&p);
	while (!enough)
		MUST(talks(&p));
	pair_close(&p);
	return unused;
}

/* In calls that wait; with what comes from time to time. */
static void *waits(void *unused)
{
	struct pair p;

	pair_open(&p);
	while (!enough) {
		struct ibv_sge none = { 0 };
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *data;

		MUST(ibv_req_notify_cq(p.s.rcq, 0) == 0 && post_recv(&p.s, &none, 0, 1) == 0);
		MUST(post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &none, 0, 0, 0, 2) == 0);
		MUST(ibv_get_cq_event(p.s.cc, &cq, &data) == 0);
		ibv_ack_cq_events(cq, 1);
		MUST(poll_within(p.s.rcq, &wc, LIMIT_MS) && poll_within(p.c.scq, &wc, LIMIT_MS));
	}
	pair_close(&p);
	return unused;
}

static void *opens(void *unused)
{
	while (!enough) {
		struct ibv_context *context = opened();
		struct ibv_port_attr port;
		union ibv_gid gid;
		struct ibv_pd *pd;

		MUST(context && ibv_query_port(context, 1, &port) == 0 && ibv_query_gid(context, 1, 0, &gid) == 0);
		MUST((pd = ibv_alloc_pd(context)));
		for (int n = 0; n < 20; n++)
			MUST(ibv_dereg_mr(ibv_reg_mr(pd, memory, sizeof memory, 0)) == 0);
		MUST(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
	}
	return unused;
}

/* What a child does with its device; every so often all of it. */
static int life_of_child(int round)
{
	struct ibv_context *context = opened();
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;

	if (!context || !(pd = ibv_alloc_pd(context)) || !(mr = ibv_reg_mr(pd, memory, sizeof memory, 0)))
		return 1;
	if (!(cq = ibv_create_cq(context, 4, NULL, NULL, 0)) || ibv_destroy_cq(cq))
		return 2;
	if (ibv_dereg_mr(mr) || ibv_dealloc_pd(pd) || ibv_close_device(context))
		return 3;
	return round % 20 == 0 && !a_connection_of_its_own() ? 4 : 0;
}

/* Whatever lock another thread has at the fork. */
static void beside_threads(void)
{
	static void *(*const all[])(void *) = { connects, moves, waits, opens, connects, moves };
	enum { COUNT = sizeof all / sizeof *all, FORKS = 1000 };
	pthread_t threads[COUNT];
	int good = 0, last = 0;

	for (int n = 0; n < COUNT; n++)
		MUST(pthread_create(&threads[n], NULL, all[n], NULL) == 0);
	for (int n = 0; n < FORKS && last == 0; n++) {
		pid_t child = fork();

		MUST(child >= 0);
		if (child == 0) {
			/* One that hangs is ended. */
			alarm(LIMIT_MS / 1000);
			_exit(life_of_child(n));
		}
		last = end_of(child);
		good += last == 0;
	}
	enough = true;
	check(good == FORKS, "a thousand children that were forked at any time", "%d, then %d", good, last);
	for (int n = 0; n < COUNT; n++)
		MUST(pthread_join(threads[n], NULL) == 0);
}

static void *calls_first(void *connects)
{
	enough = true;
	if (connects) {
		MUST(a_connection_of_its_own());
	} else {
		struct ibv_context *context = opened();
		struct ibv_pd *pd;

		MUST(context && (pd = ibv_alloc_pd(context)));
		MUST(ibv_dereg_mr(ibv_reg_mr(pd, memory, sizeof memory, 0)) == 0);
	}
	return NULL;
}

/* Forks while another thread is in the first call of all; returns how many children did not live well. */
static int forks_in_first_call(int round)
{
	enum { CHILDREN = 8, SPREAD_US = 700 };
	uint64_t delay = (uint64_t)(round * 37 % SPREAD_US) * 1000, begin;
	pid_t children[CHILDREN];
	struct timespec now;
	pthread_t thread;
	int bad = 0;

	MUST(pthread_create(&thread, NULL, calls_first, round % 2 ? memory : NULL) == 0);
	while (!enough)
		;
	clock_gettime(CLOCK_MONOTONIC, &now);
	begin = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
	do
		clock_gettime(CLOCK_MONOTONIC, &now);
	while ((uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec - begin < delay);
	for (int n = 0; n < CHILDREN; n++) {
		MUST((children[n] = fork()) >= 0);
		if (children[n] == 0) {
			alarm(LIMIT_MS / 1000);
			/* All of it in every second one. */
			_exit(life_of_child(n % 2 ? 1 : 0));
		}
	}
	for (int n = 0; n < CHILDREN; n++)
		bad += end_of(children[n]) != 0;
	MUST(pthread_join(thread, NULL) == 0);
	return bad;
}

/* Each time in a process that has called nothing yet: a child found what the first call makes half made, and waited for ever for
 * its parent's thread; or the device, which that thread had opened behind the fork's handlers, without its engine's thread. */
static void first_call(void)
{
	enum { ROUNDS = 150 };
	int bad = 0, round;

	for (round = 0; round < ROUNDS && bad == 0; round++) {
		pid_t fresh = fork();

		MUST(fresh >= 0);
		if (fresh == 0)
			_exit(forks_in_first_call(round));
		bad = end_of(fresh);
	}
	check(bad == 0, "children that were forked beside a thread in the first call", "%d bad in round %d", bad, round);
}

/* How many sockets this process has beside its standard streams. */
static int sockets(void)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	int count = 0;

	MUST(dir);
	while ((entry = readdir(dir))) {
		char link[300], to[64] = "";

		snprintf(link, sizeof link, "/proc/self/fd/%s", entry->d_name);
		if (atoi(entry->d_name) > 2 && readlink(link, to, sizeof to - 1) > 0)
			count += strncmp(to, "socket:", 7) == 0;
	}
	closedir(dir);
	return count;
}

/* A request that waits for the program's answer is a connection, too: a child that kept it would keep it open when its parent is
 * killed. */
static void waiting(void)
{
	struct rdma_conn_param param = { .retry_count = 7 };
	struct options o = { 0 };
	struct rdma_cm_event event;
	struct pair p = { 0 };
	pid_t child;
	int end;

	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &o);
	MUST(rdma_connect(p.c.id, &param) == 0);
	event = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	MUST((child = fork()) >= 0);
	if (child == 0)
		_exit(sockets());
	end = end_of(child);
	check(end == 0, "a child keeps no socket while a request waits", "%d sockets", end);
	MUST(rdma_reject(event.id, NULL, 0) == 0 && rdma_destroy_id(event.id) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_REJECTED);
	side_close(&p.c);
	MUST(rdma_destroy_id(p.listener) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "keys", keys }, { "device", device }, { "in_fork", in_fork }, { "beside_threads", beside_threads },
		{ "waiting", waiting }, { "first_call", first_call },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
