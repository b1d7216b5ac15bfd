/* Threads that are cancelled: by a cancellation that is pending while they post and poll, which are no
 * cancellation points (pthreads(7)), and by one that is asynchronous while they wait for an event.
 *
 *	cancels [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE /* pthread_timedjoin_np, unshare */
#include <dirent.h>
#include <net/if.h>
#include <pthread.h>
#include <sys/ioctl.h>

#include "common.h"

#define ROUNDS 100

static char memory[2][4096];
static struct ibv_mr *of_client, *of_server;

static void open_pair(struct pair *p)
{
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

	pair_open_with(p, (struct options){ .send_ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ });
	MUST(of_client = ibv_reg_mr(p->c.pd, memory[0], sizeof memory[0], rights));
	MUST(of_server = ibv_reg_mr(p->s.pd, memory[1], sizeof memory[1], rights));
}

static void close_pair(struct pair *p)
{
	MUST(ibv_dereg_mr(of_client) == 0 && ibv_dereg_mr(of_server) == 0);
	pair_close(p);
}

/* What one thread does while its cancellation is pending, and what the main thread does meanwhile. */
struct scene {
	const char *name;
	void (*run)(struct pair *p);		/* in the thread that is cancelled: hot calls only */
	void (*beside)(struct pair *p);		/* in the main thread, until it returns; NULL: nothing */
	const char *variable, *value;		/* of the environment; NULL: none */
};

static volatile bool ready, beside_done, got_through;
static struct pair pair;

static void *pending(void *arg)
{
	const struct scene *scene = arg;

	MUST(pthread_cancel(pthread_self()) == 0);
	ready = true;
	scene->run(&pair);
	got_through = true;
	for (;;)
		pthread_testcancel();
	return NULL;
}

static void play(const struct scene *scene)
{
	pthread_t thread;
	void *result = NULL;

	if (scene->variable)
		MUST(setenv(scene->variable, scene->value, 1) == 0);
	open_pair(&pair);
	MUST(pthread_create(&thread, NULL, pending, (void *)scene) == 0);
	while (!ready)
		sched_yield();
	if (scene->beside)
		scene->beside(&pair);
	beside_done = true;
	MUST(pthread_join(thread, &result) == 0);
	_exit(result == PTHREAD_CANCELED && got_through ? 0 : 1);
}

/* A thread that is unwound in our frames ends its process: so each scene has a process of its own. */
static void scene_of(const struct scene *scene)
{
	pid_t child = fork();
	int status = 0;

	MUST(child >= 0);
	if (child == 0)
		play(scene);
	MUST(waitpid(child, &status, 0) == child);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, scene->name, "%s %d",
	      WIFSIGNALED(status) ? "signal" : "exit", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

static void message(struct pair *p, enum ibv_wr_opcode op)
{
	struct ibv_sge from = sge_of(of_client, 0, 64), into = sge_of(of_server, 0, 64);
	struct ibv_wc wc;

	if (op == IBV_WR_SEND)
		MUST(post_recv(&p->s, &into, 1, 1) == 0);
	MUST(ibv_req_notify_cq(p->s.rcq, 0) == 0);
	MUST(post(&p->c, op, IBV_SEND_SIGNALED, &from, 1, (uintptr_t)memory[1], of_server->rkey, 2) == 0);
	MUST(poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS);
	if (op == IBV_WR_SEND)
		MUST(poll_within(p->s.rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS);
}

/* More than one fetch of random numbers lasts for. */
static void messages(struct pair *p)
{
	for (int n = 0; n < 200; n++) {
		message(p, IBV_WR_RDMA_READ);
		message(p, IBV_WR_SEND);
		message(p, IBV_WR_RDMA_WRITE);
	}
}

/* Work requests that are built one by one. */
static void built(struct pair *p)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(p->c.qp);
	struct ibv_sge into = sge_of(of_server, 0, 64);
	struct ibv_wc wc;

	MUST(ex);
	for (int n = 0; n < 200; n++) {
		MUST(post_recv(&p->s, &into, 1, 1) == 0);
		ibv_wr_start(ex);
		ex->wr_id = (uint64_t)n;
		ex->wr_flags = 0;
		ibv_wr_rdma_write(ex, of_server->rkey, (uintptr_t)memory[1]);
		ibv_wr_set_sge(ex, of_client->lkey, (uintptr_t)memory[0], 64);
		ibv_wr_rdma_read(ex, of_server->rkey, (uintptr_t)memory[1]);
		ibv_wr_set_sge(ex, of_client->lkey, (uintptr_t)memory[0], 64);
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(ex);
		ibv_wr_set_sge(ex, of_client->lkey, (uintptr_t)memory[0], 64);
		MUST(ibv_wr_complete(ex) == 0);
		MUST(poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS);
		MUST(poll_within(p->s.rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS);
	}
}

static void poll_on(struct pair *p)
{
	struct ibv_wc wc;

	while (!beside_done) {
		MUST(ibv_poll_cq(p->c.scq, 1, &wc) == 0);
		MUST(ibv_poll_cq(p->s.rcq, 1, &wc) == 0);
	}
}

/* They connect, say nothing or nonsense, and go. */
static void strangers(struct pair *p)
{
	struct sockaddr_storage to = sockaddr_of(address, ntohs(rdma_get_src_port(p->listener)));

	for (int n = 0; n < 200; n++) {
		int s = socket(to.ss_family, SOCK_STREAM, 0);

		MUST(s >= 0);
		MUST(connect(s, (struct sockaddr *)&to, to.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) :
								   sizeof(struct sockaddr_in)) == 0);
		if (n % 2)
			MUST(write(s, "GET / HTTP/1.1\r\n\r\n and so on, longer than a request", 50) == 50);
		usleep(1000);
		close(s);
	}
	usleep(50000);
}

/* Connections are made and end. */
static void connections(struct pair *p)
{
	(void)p;
	for (int n = 0; n < 30; n++) {
		struct pair other;

		pair_open(&other);
		MUST(rdma_disconnect(n % 2 ? other.c.id : other.s.id) == 0);
		must_event(other.c.ch, RDMA_CM_EVENT_DISCONNECTED);
		pair_close(&other);
	}
}

/* The stream ends while the thread posts and polls: its work requests are flushed. */
static void end_of_stream(struct pair *p)
{
	struct ibv_sge from = sge_of(of_client, 0, 64);
	struct ibv_wc wc = { .status = IBV_WC_SUCCESS };

	while (wc.status == IBV_WC_SUCCESS) {
		MUST(post(&p->c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &from, 1, (uintptr_t)memory[1], of_server->rkey,
			  2) == 0);
		MUST(poll_within(p->c.scq, &wc, LIMIT_MS));
	}
	for (uint64_t end = now_ms() + 200; now_ms() < end;)
		MUST(ibv_poll_cq(p->s.rcq, 1, &wc) >= 0);
}

static void disconnect(struct pair *p)
{
	usleep(20000);
	MUST(rdma_disconnect(p->s.id) == 0);
}

/* A Write that the peer refuses: a Terminate, and asynchronous events. */
static void refused(struct pair *p)
{
	struct ibv_sge from = sge_of(of_client, 0, 64);
	struct ibv_wc wc;

	MUST(post(&p->c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &from, 1, (uintptr_t)memory[1], ~of_server->rkey, 2) == 0);
	MUST(poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status != IBV_WC_SUCCESS);
	MUST(post(&p->c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, &from, 1, 0, 0, 2) == 0);
	MUST(poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_WR_FLUSH_ERR);
	for (uint64_t end = now_ms() + 200; now_ms() < end;)
		MUST(ibv_poll_cq(p->s.rcq, 1, &wc) >= 0);
}

/* The port changes, which is read from netlink. */
static void port_changes(struct pair *p)
{
	struct ifreq request = { .ifr_name = "lo" };
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	(void)p;
	MUST(s >= 0);
	for (int n = 0; n < 200; n++) {
		request.ifr_mtu = 20000 + n;
		MUST(ioctl(s, SIOCSIFMTU, &request) == 0);
		usleep(500);
	}
	close(s);
	usleep(50000);
}

/* In a network namespace of its own; `false`: none can be made here. */
static bool alone(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP };
	int s;

	if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
		return false;
	MUST((s = socket(AF_INET, SOCK_DGRAM, 0)) >= 0);
	MUST(ioctl(s, SIOCSIFFLAGS, &request) == 0);
	close(s);
	return true;
}

/* Neither ibv_post_send nor ibv_poll_cq nor anything below them is a cancellation point: a thread with a
 * cancellation that is pending gets through all of this, and ends where it says so. */
static void deferred(void)
{
	static const struct scene scenes[] = {
		{ .name = "messages and Reads", .run = messages },
		{ .name = "work requests built one by one", .run = built },
		{ .name = "with a trace", .run = messages, .variable = "UWARP_TRACE", .value = "/dev/null" },
		{ .name = "with every line logged", .run = messages, .variable = "UWARP_LOG", .value = "trace" },
		{ .name = "polls beside strangers that come and go", .run = poll_on, .beside = strangers },
		{ .name = "polls beside connections that come and go", .run = poll_on, .beside = connections },
		{ .name = "the end of the stream", .run = end_of_stream, .beside = disconnect },
		{ .name = "a Write that is refused", .run = refused },
	};
	static const struct scene port = { .name = "polls beside changes of the port", .run = poll_on,
					   .beside = port_changes };

	for (size_t n = 0; n < sizeof scenes / sizeof *scenes; n++)
		scene_of(&scenes[n]);
	/* The last one: this process has no other network any more. */
	if (alone())
		scene_of(&port);
}

static volatile int waiting;

static void wait_asynchronously(void)
{
	MUST(pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL) == 0);
	waiting = 1;
}

static void *await_cm_event(void *channel)
{
	struct rdma_cm_event *event;

	wait_asynchronously();
	rdma_get_cm_event(channel, &event);
	return NULL;
}

static void *await_cq_event(void *channel)
{
	struct ibv_cq *cq;
	void *context;

	wait_asynchronously();
	ibv_get_cq_event(channel, &cq, &context);
	return NULL;
}

static void *await_async_event(void *context)
{
	struct ibv_async_event event;

	wait_asynchronously();
	ibv_get_async_event(context, &event);
	return NULL;
}

/* How many of `ROUNDS` threads end as they must. */
static int cancel_all(struct pair *p, void *(*wait)(void *), void *on)
{
	int ended = 0;

	for (int n = 0; n < ROUNDS; n++) {
		struct timespec until;
		pthread_t thread;
		void *result = NULL;
		int rc;

		waiting = 0;
		MUST(pthread_create(&thread, NULL, wait, on) == 0);
		while (!waiting)
			sched_yield();
		/* Before, while and after it serves the connections; with messages to serve, too. */
		if (n % 4)
			usleep((unsigned)n * 60);
		if (n % 2)
			message(p, IBV_WR_RDMA_READ);
		MUST(pthread_cancel(thread) == 0);
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += LIMIT_MS / 1000;
		if ((rc = pthread_timedjoin_np(thread, &result, &until)))
			die("a cancelled thread does not end: %s", strerror(rc));
		ended += result == PTHREAD_CANCELED;
	}
	return ended;
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

static void asynchronous(void)
{
	struct ibv_sge into;
	struct pair p;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;
	int before, ended;

	open_pair(&p);
	before = descriptors();
	ended = cancel_all(&p, await_async_event, p.c.id->verbs);
	check(ended == ROUNDS, "threads in ibv_get_async_event", "%d of %d", ended, ROUNDS);
	ended = cancel_all(&p, await_cq_event, p.s.cc);
	check(ended == ROUNDS, "threads in ibv_get_cq_event", "%d of %d", ended, ROUNDS);
	ended = cancel_all(&p, await_cm_event, p.c.ch);
	check(ended == ROUNDS, "threads in rdma_get_cm_event", "%d of %d", ended, ROUNDS);
	check(descriptors() == before, "no descriptor is left", "%d, %d before", descriptors(), before);
	/* Nothing is left held: all that they waited on still works. */
	into = sge_of(of_server, 0, 64);
	MUST(ibv_poll_cq(p.s.rcq, 1, &wc) == 0 && post_recv(&p.s, &into, 1, 1) == 0);
	MUST(ibv_req_notify_cq(p.s.rcq, 0) == 0);
	into = sge_of(of_client, 0, 64);
	MUST(post(&p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &into, 1, 0, 0, 2) == 0);
	MUST(ibv_get_cq_event(p.s.cc, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	want_wc(p.s.rcq, IBV_WC_SUCCESS, "a message arrives afterwards, and its event");
	want_wc(p.c.scq, IBV_WC_SUCCESS, "and is acknowledged");
	MUST(rdma_disconnect(p.s.id) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	close_pair(&p);
	check(true, "and everything is closed", "");
}

int main(int argc, char **argv)
{
	static const struct group groups[] = { { "deferred", deferred }, { "asynchronous", asynchronous } };

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
