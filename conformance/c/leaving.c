/* Threads that leave a call in which they wait for an event: cancelled, or by a jump out of the handler of
 * a signal.
 *
 *	leaving [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE /* pthread_timedjoin_np */
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <sys/time.h>

#include <rdma/rdma_verbs.h>

#include "common.h"

#define ROUNDS 40

static volatile int waiting;

static void *await_cm_event(void *channel)
{
	struct rdma_cm_event *event;

	waiting = 1;
	if (rdma_get_cm_event(channel, &event) == 0)
		rdma_ack_cm_event(event);
	return NULL;
}

static void *await_cq_event(void *channel)
{
	struct ibv_cq *cq;
	void *context;

	waiting = 1;
	if (ibv_get_cq_event(channel, &cq, &context) == 0)
		ibv_ack_cq_events(cq, 1);
	return NULL;
}

/* Waits in a thread, cancels it `after` so many microseconds, and has `happen` bring an event about only
 * then. Says whether the thread was cancelled. */
static bool cancelled(void *(*wait)(void *), void *on, unsigned after, void (*happen)(struct pair *), struct pair *p)
{
	struct timespec until;
	pthread_t thread;
	void *result = NULL;
	int rc;

	waiting = 0;
	MUST(pthread_create(&thread, NULL, wait, on) == 0);
	while (!waiting)
		usleep(100);
	usleep(after);
	MUST(pthread_cancel(thread) == 0);
	happen(p);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += LIMIT_MS / 1000;
	rc = pthread_timedjoin_np(thread, &result, &until);
	if (rc)
		die("a cancelled thread does not end: %s", strerror(rc));
	return result == PTHREAD_CANCELED;
}

static char sent[] = "what comes too late for one", received[64];
static struct ibv_mr *from, *into;

/* A receive of the server completes, which its channel tells. */
static void message(struct pair *p)
{
	struct ibv_sge sge = sge_of(from, 0, sizeof sent);

	MUST(post(&p->c, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 2) == 0);
}

/* The client's id gets an event. */
static void cm_event(struct pair *p)
{
	MUST(rdma_disconnect(p->s.id) == 0);
}

static void open_pair(struct pair *p)
{
	pair_open(p);
	MUST(from = ibv_reg_mr(p->c.pd, sent, sizeof sent, 0));
	MUST(into = ibv_reg_mr(p->s.pd, received, sizeof received, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
}

static void close_pair(struct pair *p)
{
	MUST(ibv_dereg_mr(from) == 0 && ibv_dereg_mr(into) == 0);
	pair_close(p);
}

/* A thread that is cancelled before an event comes leaves it to others, at whatever moment that is. */
static void cancelling(void)
{
	int kept = 0, ends = 0, told = 0;
	struct pair p;

	open_pair(&p);
	for (int n = 0; n < ROUNDS; n++) {
		struct ibv_sge sge = sge_of(into, 0, sizeof received);
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;

		MUST(post_recv(&p.s, &sge, 1, 1) == 0);
		MUST(ibv_req_notify_cq(p.s.rcq, 0) == 0);
		/* Before, while and after the thread serves the connections itself. */
		ends += cancelled(await_cq_event, p.s.cc, (unsigned)(n + 1) * 300, message, &p);
		if (!readable(p.s.cc->fd, LIMIT_MS))
			break;
		told++;
		MUST(ibv_get_cq_event(p.s.cc, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
		kept += cq == p.s.rcq && poll_within(p.s.rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS;
		MUST(poll_within(p.c.scq, &wc, LIMIT_MS));
	}
	check(ends == ROUNDS, "threads in ibv_get_cq_event are cancelled", "%d of %d", ends, ROUNDS);
	check(told == ROUNDS, "the event that comes then is told by the channel's descriptor", "%d of %d", told, ROUNDS);
	check(kept == ROUNDS, "and taken by another thread", "%d of %d", kept, ROUNDS);
	close_pair(&p);
	kept = ends = 0;
	for (int n = 0; n < ROUNDS; n++) {
		open_pair(&p);
		ends += cancelled(await_cm_event, p.c.ch, (unsigned)(n + 1) * 300, cm_event, &p);
		must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
		kept++;
		close_pair(&p);
	}
	check(ends == ROUNDS, "so are threads in rdma_get_cm_event", "%d of %d", ends, ROUNDS);
	check(kept == ROUNDS, "and their events stay", "%d of %d", kept, ROUNDS);
}

static sigjmp_buf back;

static void jump(int signal)
{
	(void)signal;
	siglongjmp(back, 1);
}

static void alarm_in(long microseconds)
{
	struct itimerval time = { .it_value = { .tv_usec = microseconds } };

	MUST(setitimer(ITIMER_REAL, &time, NULL) == 0);
}

/* A program that jumps out of a call is served afterwards, although it makes no further one. */
static void jumping(void)
{
	/* While the thread sleeps on the sockets, and after that. */
	static const long moments[] = { 2500, 2500, 25000, 2500, 25000 };
	enum { LEAST = sizeof moments / sizeof *moments, MOST = 8 * LEAST };
	struct sigaction action = { .sa_handler = jump };
	volatile int rounds = 0, read = 0, told = 0, open_to_cancel = 0, state;
	struct pair p;

	open_pair(&p);
	MUST(sigaction(SIGALRM, &action, NULL) == 0);
	strcpy(received, "what the server has");
	/* On a busy machine a signal may come before the thread sleeps: then there are more rounds. */
	for (; rounds < LEAST || (open_to_cancel <= 2 && rounds < MOST); rounds++) {
		static volatile char sink[64];
		struct ibv_mr *mr = ibv_reg_mr(p.c.pd, (void *)sink, sizeof sink, IBV_ACCESS_LOCAL_WRITE);
		struct ibv_sge sge;
		struct ibv_wc wc;
		struct ibv_cq *cq;
		void *context;

		MUST(mr);
		memset((void *)sink, 0, sizeof sink);
		if (sigsetjmp(back, 1) == 0) {
			alarm_in(moments[rounds % LEAST]);
			ibv_get_cq_event(p.c.cc, &cq, &context);
			die("ibv_get_cq_event returns");
		}
		MUST(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, (int *)&state) == 0);
		open_to_cancel += state == PTHREAD_CANCEL_ENABLE;
		/* Both ends of the Read are this process's; nobody calls anything until the last byte is there. */
		sge = sge_of(mr, 0, sizeof sink);
		MUST(ibv_req_notify_cq(p.c.scq, 0) == 0);
		MUST(post(&p.c, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)received, into->rkey, 3) == 0);
		for (int ms = 0; ms < LIMIT_MS && strcmp((char *)sink, received); ms++)
			usleep(1000);
		read += strcmp((char *)sink, received) == 0;
		/* The thread's next call finds what came meanwhile. */
		if (readable(p.c.cc->fd, LIMIT_MS)) {
			MUST(ibv_get_cq_event(p.c.cc, &cq, &context) == 0);
			ibv_ack_cq_events(cq, 1);
			told++;
		}
		MUST(poll_within(p.c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS);
		MUST(ibv_dereg_mr(mr) == 0);
	}
	signal(SIGALRM, SIG_DFL);
	check(open_to_cancel > 2, "a thread that jumps out of its sleep on the sockets can be cancelled", "%d of %d",
	      open_to_cancel, rounds);
	check(read == rounds, "peers are served after a jump out of ibv_get_cq_event", "%d of %d", read, rounds);
	check(told == rounds, "and events are told", "%d of %d", told, rounds);
	close_pair(&p);
}

#define JUMPS 1000

static timer_t timer;

/* A signal for the calling thread, once. */
static void signal_in(long microseconds)
{
	struct itimerspec time = { .it_value = { .tv_nsec = microseconds * 1000 } };

	MUST(timer_settime(timer, 0, &time, NULL) == 0);
}

static void timer_of_this_thread(void)
{
	struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGALRM };

	event._sigev_un._tid = gettid();
	MUST(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
}

/* Of the thread that jumps. */
static sigset_t alarms;

/* Takes an event of the channel. `got` is what was taken and not acknowledged; a jump leaves it so. */
static void take_cq_event(struct side *side, struct ibv_cq *volatile *got)
{
	void *context;

	MUST(ibv_get_cq_event(side->cc, (struct ibv_cq **)got, &context) == 0);
	MUST(pthread_sigmask(SIG_BLOCK, &alarms, NULL) == 0);
	ibv_ack_cq_events(*got, 1);
	*got = NULL;
	MUST(pthread_sigmask(SIG_UNBLOCK, &alarms, NULL) == 0);
}

/* A message and a Read each way: with events, or by polling alone. Earlier ones that were left may have been
 * posted or not, and their completions taken or not: any receive will do, and there is always one. */
static void exchange(struct pair *p, struct ibv_mr *mrs[2], struct ibv_cq *volatile *got, bool events, uint64_t id)
{
	struct side *ends[] = { &p->c, &p->s };

	for (int n = 0; n < 2; n++) {
		struct side *a = ends[n], *b = ends[!n];
		struct ibv_sge to = sge_of(mrs[!n], 0, 64), from = sge_of(mrs[n], 64, 64);
		struct ibv_wc wc = { 0 };
		int rc;

		if (events)
			MUST(ibv_req_notify_cq(b->rcq, 0) == 0);
		rc = post_recv(b, &to, 1, id);
		MUST(rc == 0 || rc == ENOMEM);
		MUST(post(a, IBV_WR_SEND, IBV_SEND_SIGNALED, &from, 1, 0, 0, 0) == 0);
		MUST(post(a, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &from, 1, (uintptr_t)mrs[!n]->addr, mrs[!n]->rkey, id) == 0);
		while (events && ibv_poll_cq(b->rcq, 1, &wc) == 0) {
			take_cq_event(b, got);
			MUST(ibv_req_notify_cq(b->rcq, 0) == 0);
		}
		if (!events)
			MUST(poll_within(b->rcq, &wc, LIMIT_MS));
		MUST(wc.status == IBV_WC_SUCCESS);
		for (wc.wr_id = 0; wc.wr_id != id;)
			MUST(poll_within(a->scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS);
	}
}

/* Takes what is there. */
static void drain(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) > 0)
		MUST(wc.status == IBV_WC_SUCCESS);
}

/* What a thread exchanges over a connection of its own. */
struct talk {
	struct pair pair;
	char memory[2][256];
	struct ibv_mr *mrs[2];
	struct ibv_cq *volatile got;
	bool events;
	volatile long rounds;
};

static volatile bool over;

static void open_talk(struct talk *t)
{
	struct side *ends[] = { &t->pair.c, &t->pair.s };

	pair_open_with(&t->pair, (struct options){ .send_wr = 64, .recv_wr = 64, .cqe = 512 });
	for (int n = 0; n < 2; n++)
		MUST(t->mrs[n] = ibv_reg_mr(ends[n]->pd, t->memory[n], sizeof t->memory[n],
					    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ));
}

static void close_talk(struct talk *t)
{
	MUST(ibv_dereg_mr(t->mrs[0]) == 0 && ibv_dereg_mr(t->mrs[1]) == 0);
	pair_close(&t->pair);
}

static void *talk(void *arg)
{
	struct talk *t = arg;

	while (!over) {
		exchange(&t->pair, t->mrs, &t->got, t->events, (uint64_t)++t->rounds);
		usleep(200);
	}
	return NULL;
}

/* A program that jumps out of whatever it calls while it exchanges messages goes on, and so do its other
 * threads. What it asked for in a call that it left may or may not have been done. */
static void posting_and_polling(void)
{
	static struct talk own, others[2] = { { .events = false }, { .events = true } };
	struct sigaction action = { .sa_handler = jump };
	static volatile uint64_t id;
	static volatile int jumps;
	pthread_t threads[2];
	long before[2];

	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	MUST(sigaction(SIGALRM, &action, NULL) == 0);
	MUST(pthread_sigmask(SIG_BLOCK, &alarms, NULL) == 0);
	open_talk(&own);
	for (int n = 0; n < 2; n++) {
		open_talk(&others[n]);
		MUST(pthread_create(&threads[n], NULL, talk, &others[n]) == 0);
	}
	timer_of_this_thread();
	MUST(pthread_sigmask(SIG_UNBLOCK, &alarms, NULL) == 0);
	srand(1);
	for (jumps = 0; jumps < JUMPS; jumps++) {
		own.events = jumps % 2;
		if (sigsetjmp(back, 1) == 0) {
			signal_in(20 + rand() % 300);
			for (;;)
				exchange(&own.pair, own.mrs, &own.got, own.events, ++id);
		}
		if (own.got) {
			ibv_ack_cq_events(own.got, 1);
			own.got = NULL;
		}
		exchange(&own.pair, own.mrs, &own.got, false, ++id);
		drain(own.pair.c.rcq);
		drain(own.pair.s.rcq);
	}
	check(true, "a program jumps out of its calls a thousand times", "");
	for (int n = 0; n < 2; n++) {
		before[n] = others[n].rounds;
		for (int ms = 0; ms < LIMIT_MS && others[n].rounds < before[n] + 20; ms++)
			usleep(1000);
		check(others[n].rounds >= before[n] + 20, n ? "so does one that waits for events" :
		      "another thread, which polls, goes on", "%ld rounds, %ld before", others[n].rounds, before[n]);
	}
	over = true;
	for (int n = 0; n < 2; n++) {
		MUST(pthread_join(threads[n], NULL) == 0);
		close_talk(&others[n]);
	}
	exchange(&own.pair, own.mrs, &own.got, false, ++id);
	close_talk(&own);
	timer_delete(timer);
	open_talk(&own);
	exchange(&own.pair, own.mrs, &own.got, true, ++id);
	close_talk(&own);
	check(true, "everything is closed, and a new connection works", "");
}

/* How often the threads of this process have gone to sleep so far, this one excepted. */
static long switches(void)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *task;
	long sum = 0;

	MUST(tasks);
	while ((task = readdir(tasks))) {
		char path[300], line[128];
		long n;
		FILE *file;

		if (atoi(task->d_name) <= 0 || atoi(task->d_name) == getpid())
			continue;
		snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
		MUST(file = fopen(path, "r"));
		while (fgets(line, sizeof line, file))
			if (sscanf(line, "voluntary_ctxt_switches: %ld", &n) == 1)
				sum += n;
		fclose(file);
	}
	closedir(tasks);
	return sum;
}

/* Threads that wait, and the one that serves the connections, sleep as long as nothing comes. */
static void sleeping(void)
{
	pthread_t threads[2];
	struct pair p;
	void *result;
	long before, woken = 3;

	open_pair(&p);
	MUST(pthread_create(&threads[0], NULL, await_cq_event, p.s.cc) == 0);
	MUST(pthread_create(&threads[1], NULL, await_cm_event, p.c.ch) == 0);
	/* On a busy machine the threads reach their sleep late. What wakes them without need does so each time. */
	for (int n = 0; n < 10 && woken > 2; n++) {
		usleep(500000);
		before = switches();
		usleep(3000000);
		woken = switches() - before;
	}
	/* A look at an idle connection may be due. */
	check(woken <= 2, "nobody wakes without need", "%ld times in three seconds", woken);
	for (int n = 0; n < 2; n++) {
		MUST(pthread_cancel(threads[n]) == 0);
		MUST(pthread_join(threads[n], &result) == 0 && result == PTHREAD_CANCELED);
	}
	close_pair(&p);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "cancelling", cancelling }, { "jumping", jumping },
		{ "posting_and_polling", posting_and_polling }, { "sleeping", sleeping },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
