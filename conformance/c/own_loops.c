/* Programs that are event loops: completion channels whose descriptors do not block, in an epoll instance of
 * the program. Each group is a server and a client, two processes.
 *
 *	own_loops [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * UWARP is the command, and LINK is the link that `uwarp stat` must show for each connection at both ends. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/resource.h>

#include "links.h"

#define MOST 64
#define DEPTH 4
#define LARGE (1 << 20)

struct conn {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	char *memory;			/* what is received, what is sent */
	unsigned int round;
};

/* One end of all connections. */
struct end {
	struct rdma_event_channel *ch;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channels[MOST];
	struct ibv_cq *cqs[MOST];
	struct conn conns[MOST];
	int count, channel_count, epfd;
	size_t size;
	bool edges, server, over;
	unsigned int until, sum;	/* rounds: of each connection, of all so far */
	unsigned long vain;
};

static struct end end;
static int to_client[2], to_server[2];

static void say(int pipe[2], int value)
{
	MUST(write(pipe[1], &value, sizeof value) == sizeof value);
}

static int hear(int pipe[2])
{
	int value = -1;

	if (!readable(pipe[0], LIMIT_MS) || read(pipe[0], &value, sizeof value) != sizeof value)
		die("the other end says nothing");
	return value;
}

static void watch(int fd, uint32_t number)
{
	struct epoll_event e = { .events = EPOLLIN | (end.edges ? EPOLLET : 0), .data.u32 = number };

	MUST(epoll_ctl(end.epfd, EPOLL_CTL_ADD, fd, &e) == 0);
}

static void receive(int i)
{
	struct ibv_sge sge = { (uintptr_t)end.conns[i].memory, (uint32_t)end.size, end.conns[i].mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(end.conns[i].id->qp, &wr, &bad) == 0);
}

static void transmit(int i)
{
	struct conn *c = &end.conns[i];
	struct ibv_sge sge = { (uintptr_t)c->memory + end.size, (uint32_t)end.size, c->mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;

	memset(c->memory + end.size, (int)(c->round + 7 * (unsigned int)i), end.size);
	MUST(ibv_post_send(c->id->qp, &wr, &bad) == 0);
}

/* A connection that is about to begin, on the channel that is its turn. */
static void set_up(struct rdma_cm_id *id)
{
	int i = end.count++, c = i % end.channel_count;
	struct ibv_qp_init_attr init = { .cap = { DEPTH, DEPTH, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	struct conn *conn = &end.conns[i];

	if (!end.pd)
		MUST(end.pd = ibv_alloc_pd(id->verbs));
	if (!end.channels[c]) {
		MUST(end.channels[c] = ibv_create_comp_channel(id->verbs));
		MUST(fcntl(end.channels[c]->fd, F_SETFL, O_NONBLOCK) == 0);
		MUST(end.cqs[c] = ibv_create_cq(id->verbs, 2 * DEPTH * MOST, NULL, end.channels[c], 0));
		MUST(ibv_req_notify_cq(end.cqs[c], 0) == 0);
		watch(end.channels[c]->fd, (uint32_t)c);
	}
	init.send_cq = init.recv_cq = end.cqs[c];
	MUST(rdma_create_qp(id, end.pd, &init) == 0);
	MUST(conn->memory = calloc(2, end.size));
	MUST(conn->mr = ibv_reg_mr(end.pd, conn->memory, 2 * end.size, IBV_ACCESS_LOCAL_WRITE));
	conn->id = id;
	receive(i);
}

static void open_end(int channels, size_t size)
{
	end.channel_count = channels;
	end.size = size;
	MUST((end.epfd = epoll_create1(EPOLL_CLOEXEC)) >= 0);
	MUST(end.ch = rdma_create_event_channel());
}

static struct rdma_conn_param param = { .rnr_retry_count = 7, .retry_count = 7 };

static void serve(int conns)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	struct rdma_cm_id *listener;

	end.server = true;
	MUST(rdma_create_id(end.ch, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0 && rdma_listen(listener, MOST) == 0);
	say(to_client, ntohs(rdma_get_src_port(listener)));
	while (end.count < conns) {
		struct rdma_cm_event *event;

		MUST(readable(end.ch->fd, LIMIT_MS) && rdma_get_cm_event(end.ch, &event) == 0);
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
			set_up(event->id);
			MUST(rdma_accept(event->id, &param) == 0);
		} else if (event->event != RDMA_CM_EVENT_ESTABLISHED) {
			die("event %s", rdma_event_str(event->event));
		}
		MUST(rdma_ack_cm_event(event) == 0);
	}
}

static void join(int conns)
{
	struct sockaddr_storage ss = sockaddr_of(address, (uint16_t)hear(to_client));

	while (end.count < conns) {
		struct rdma_cm_id *id;

		MUST(rdma_create_id(end.ch, &id, NULL, RDMA_PS_TCP) == 0);
		MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0);
		must_event(end.ch, RDMA_CM_EVENT_ADDR_RESOLVED);
		MUST(rdma_resolve_route(id, 2000) == 0);
		must_event(end.ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
		set_up(id);
		MUST(rdma_connect(id, &param) == 0);
		must_event(end.ch, RDMA_CM_EVENT_ESTABLISHED);
	}
}

/* A message has come, whole and in its turn; it is answered, as long as there is a next round. */
static void take(int i)
{
	struct conn *c = &end.conns[i];
	char want = (char)(c->round + 7 * (unsigned int)i);

	for (size_t at = 0; at < end.size; at++)
		if (c->memory[at] != want)
			die("connection %d, round %u: byte %d is %d, not %d", i, c->round, (int)at, c->memory[at], want);
	receive(i);
	if (end.server)
		transmit(i);
	c->round++;
	end.sum++;
	if (!end.server && c->round < end.until)
		transmit(i);
}

static void drain(struct ibv_cq *cq)
{
	struct ibv_wc wc[8];
	int n;

	while ((n = ibv_poll_cq(cq, 8, wc)) > 0)
		for (int k = 0; k < n; k++) {
			if (wc[k].status != IBV_WC_SUCCESS && end.server) {
				end.over = true;
				return;
			}
			if (wc[k].status != IBV_WC_SUCCESS)
				die("a work request ends with %s", ibv_wc_status_str(wc[k].status));
			if (wc[k].opcode == IBV_WC_RECV)
				take((int)wc[k].wr_id);
		}
}

/* Takes the events of a channel: one, or all. */
static void events_of(struct ibv_comp_channel *channel, bool all)
{
	struct ibv_cq *cq;
	void *context;

	do {
		if (ibv_get_cq_event(channel, &cq, &context)) {
			MUST(errno == EAGAIN);
			end.vain++;
			return;
		}
		ibv_ack_cq_events(cq, 1);
		MUST(ibv_req_notify_cq(cq, 0) == 0);
		drain(cq);
	} while (all);
}

/* Perhaps a peer has left: ends the connection here, too, which flushes its work requests. */
static void disconnected(void)
{
	struct rdma_cm_event *event;

	MUST(rdma_get_cm_event(end.ch, &event) == 0);
	if (event->event == RDMA_CM_EVENT_DISCONNECTED)
		MUST(rdma_disconnect(event->id) == 0);
	MUST(rdma_ack_cm_event(event) == 0);
}

/* Whether all rounds are over. (The client begins none before that.) */
static bool done(void)
{
	return end.sum >= end.until * (unsigned int)end.count;
}

/* The loop, until then. */
static void loop(void)
{
	uint64_t late = now_ms() + LIMIT_MS;

	while (!done() && !end.over) {
		struct epoll_event events[16];
		int n = epoll_wait(end.epfd, events, 16, 1000);

		if (now_ms() > late)
			die("%u rounds in all, and there must be %u of %d", end.sum, end.until, end.count);
		for (int i = 0; i < n; i++)
			if (events[i].data.u32 == MOST)
				disconnected();
			else
				events_of(end.channels[events[i].data.u32], end.edges);
	}
}

/* More rounds. */
static void begin(unsigned int rounds)
{
	end.until += rounds;
	for (int i = 0; i < end.count && !end.server; i++)
		transmit(i);
}

static void check_link(void)
{
	check_links(end.server ? "the server's" : "the client's", end.count);
}

static void both_have_the_link(void)
{
	check_link();
	if (end.server) {
		say(to_client, 1);
		hear(to_server);
	} else {
		hear(to_client);
		say(to_server, 1);
	}
}

/* Runs two processes, one of them as the server of the group. */
static void two(void (*server)(void), void (*client)(void))
{
	int status;
	pid_t child;

	MUST(pipe2(to_client, O_CLOEXEC) == 0 && pipe2(to_server, O_CLOEXEC) == 0);
	fflush(stdout);
	MUST((child = fork()) >= 0);
	if (child == 0) {
		alarm(GROUP_LIMIT);
		server();
		_exit(failures ? 1 : 0);
	}
	client();
	MUST(waitpid(child, &status, 0) == child);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the server ends as it should", "status %x", status);
}

/* Connects, and exchanges all rounds. */
static void exchange(bool as_server, int conns, int channels, size_t size, unsigned int rounds)
{
	open_end(channels, size);
	(as_server ? serve : join)(conns);
	begin(rounds);
	loop();
	both_have_the_link();
}

static int conns, channels;
static size_t size;
static unsigned int rounds;

static void serves(void)
{
	exchange(true, conns, channels, size, rounds);
}

static void asks(void)
{
	exchange(false, conns, channels, size, rounds);
	check(true, "every request has its answer", "");
}

static void by(int n, int m, size_t bytes, unsigned int times)
{
	conns = n;
	channels = m;
	size = bytes;
	rounds = times;
	two(serves, asks);
}

static void one_connection(void)
{
	by(1, 1, 256, 2000);
}

static void one_channel(void)
{
	by(32, 1, 256, 200);
}

static void many_channels(void)
{
	by(32, 32, 256, 200);
}

static void few_channels(void)
{
	by(32, 3, 4096, 100);
}

static void large(void)
{
	by(4, 2, LARGE, 30);
}

static void edges(void)
{
	end.edges = true;
	by(16, 4, 1024, 200);
}

/* Where a descriptor is never writable, a loop that waits for both does not spin. */
static void no_room(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_comp_channel *channel;
	struct rdma_event_channel *ch;

	MUST(list && list[0] && (context = ibv_open_device(list[0])));
	MUST((channel = ibv_create_comp_channel(context)) && (ch = rdma_create_event_channel()));
	for (int way = 0; way < 3; way++) {
		const char *names[] = { "completion channel", "asynchronous events", "rdma_cm's events" };
		int fds[] = { channel->fd, context->async_fd, ch->fd };
		struct pollfd p = { .fd = fds[way], .events = POLLOUT };
		char name[64];

		snprintf(name, sizeof name, "%s: never room to write", names[way]);
		check(poll(&p, 1, QUIET_MS) == 0, name, "revents %x", (unsigned int)p.revents);
	}
	rdma_destroy_event_channel(ch);
	MUST(ibv_destroy_comp_channel(channel) == 0 && ibv_close_device(context) == 0);
	ibv_free_device_list(list);
}

static uint64_t spent_ms(long *switches)
{
	struct rusage u;

	MUST(getrusage(RUSAGE_SELF, &u) == 0);
	*switches = u.ru_nvcsw + u.ru_nivcsw;
	return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 +
	       (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
}

/* A loop that has nothing to do sleeps, and so does the library. */
static void idles(void)
{
	const char *who = end.server ? "the server" : "the client";
	struct epoll_event events[16];
	uint64_t until, cpu;
	long before, after;
	char name[128];
	int n;

	/* What still comes, comes first. */
	for (until = now_ms() + 300; now_ms() < until;)
		for (n = epoll_wait(end.epfd, events, 16, 50); n > 0; n--)
			events_of(end.channels[events[n - 1].data.u32], false);
	cpu = spent_ms(&before);
	until = now_ms() + 2000;
	for (n = 0; now_ms() < until; n++)
		if (epoll_wait(end.epfd, events, 16, 2000) > 0)
			events_of(end.channels[events[0].data.u32], false);
	cpu = spent_ms(&after) - cpu;
	snprintf(name, sizeof name, "%s idles: the loop is not called", who);
	check(n <= 10, name, "%d times in two seconds", n);
	snprintf(name, sizeof name, "%s idles: no thread runs again and again", who);
	check(after - before <= 100, name, "%ld times in two seconds", after - before);
	snprintf(name, sizeof name, "%s idles: no processor time", who);
	check(cpu <= 100, name, "%d of 2000 ms", (int)cpu);
}

static void idle_server(void)
{
	exchange(true, 8, 2, 256, 100);
	idles();
	both_have_the_link();
	begin(100);
	loop();
}

static void idle_client(void)
{
	exchange(false, 8, 2, 256, 100);
	idles();
	both_have_the_link();
	begin(100);
	loop();
	check(true, "and it goes on", "");
	both_have_the_link();
}

static void idle_server_to_the_end(void)
{
	idle_server();
	both_have_the_link();
}

static void idle(void)
{
	two(idle_server_to_the_end, idle_client);
}

/* The server has armed its queue and computes: it does not come back to its loop. */
static void computing_server(void)
{
	exchange(true, 4, 2, 256, 50);
	for (int i = 0; i < 20; i++) {
		hear(to_server);
		begin(1);
		loop();
		say(to_client, 2);
	}
	both_have_the_link();
}

static void asking_client(void)
{
	exchange(false, 4, 2, 256, 50);
	for (int i = 0; i < 20; i++) {
		struct ibv_wc wc;

		begin(1);
		/* In the roce view a Send completes when it is acknowledged. */
		for (int k = 0; k < end.count; k++)
			if (!poll_within(end.cqs[k % end.channel_count], &wc, LIMIT_MS) || wc.opcode != IBV_WC_SEND)
				die("round %d: no completion of a Send", i);
		say(to_server, 3);
		loop();
		hear(to_client);
	}
	check(true, "Sends complete while the receiver computes", "");
	both_have_the_link();
}

static void computing(void)
{
	two(computing_server, asking_client);
}

static void *takes_beside(void *arg)
{
	/* Events of either thread's; the connections of one queue are one thread's at a time. */
	static pthread_mutex_t *lock;

	lock = arg;
	while (!__atomic_load_n(&end.over, __ATOMIC_SEQ_CST)) {
		if (!readable(end.channels[0]->fd, 20))
			continue;
		pthread_mutex_lock(lock);
		events_of(end.channels[0], false);
		pthread_mutex_unlock(lock);
	}
	return NULL;
}

static void two_threads_end(bool as_server)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	uint64_t late = now_ms() + LIMIT_MS;
	pthread_t thread;

	open_end(1, 256);
	(as_server ? serve : join)(8);
	pthread_mutex_lock(&lock);
	MUST(pthread_create(&thread, NULL, takes_beside, &lock) == 0);
	begin(300);
	while (!done()) {
		struct epoll_event event;

		pthread_mutex_unlock(&lock);
		epoll_wait(end.epfd, &event, 1, 20);
		pthread_mutex_lock(&lock);
		events_of(end.channels[0], false);
		if (now_ms() > late)
			die("%u rounds in all", end.sum);
	}
	pthread_mutex_unlock(&lock);
	__atomic_store_n(&end.over, true, __ATOMIC_SEQ_CST);
	MUST(pthread_join(thread, NULL) == 0);
	both_have_the_link();
}

static void two_threads_server(void)
{
	two_threads_end(true);
}

static void two_threads_client(void)
{
	two_threads_end(false);
	check(true, "two threads wait for one channel: no event is lost", "");
}

static void two_threads(void)
{
	two(two_threads_server, two_threads_client);
}

/* A thread that blocks in the call, since before the descriptor was made non-blocking. */
static void *blocks(void *arg)
{
	struct ibv_cq *cq;
	void *context;
	int result = ibv_get_cq_event(end.channels[0], &cq, &context);

	(void)arg;
	if (result == 0)
		ibv_ack_cq_events(cq, 1);
	return (void *)(intptr_t)(result ? errno : 0);
}

static void blocking_server(void)
{
	uint64_t late = now_ms() + LIMIT_MS;
	pthread_t thread;
	void *result;

	open_end(1, 256);
	serve(4);
	MUST(fcntl(end.channels[0]->fd, F_SETFL, 0) == 0);
	MUST(pthread_create(&thread, NULL, blocks, NULL) == 0);
	usleep(50000);
	MUST(fcntl(end.channels[0]->fd, F_SETFL, O_NONBLOCK) == 0);
	say(to_client, 1);
	/* The thread has one of the events, and leaves the queue to this one. */
	begin(100);
	while (!done()) {
		struct epoll_event event;

		epoll_wait(end.epfd, &event, 1, 20);
		events_of(end.channels[0], false);
		MUST(ibv_req_notify_cq(end.cqs[0], 0) == 0);
		drain(end.cqs[0]);
		if (now_ms() > late)
			die("%u rounds in all", end.sum);
	}
	/* It may still wait for an event: the client goes on until it has one. */
	while (pthread_tryjoin_np(thread, &result)) {
		MUST(ibv_req_notify_cq(end.cqs[0], 0) == 0);
		drain(end.cqs[0]);
		if (now_ms() > late)
			die("the thread that blocks has no event");
		usleep(1000);
	}
	check(result == NULL, "a thread that blocks gets an event", "errno %d", (int)(intptr_t)result);
	say(to_client, 2);
	hear(to_server);
}

static void blocking_client(void)
{
	open_end(1, 256);
	join(4);
	hear(to_client);
	begin(100);
	loop();
	begin(1000000);
	while (!readable(to_client[0], 0)) {
		struct epoll_event event;

		if (epoll_wait(end.epfd, &event, 1, 20) > 0)
			events_of(end.channels[0], false);
	}
	hear(to_client);
	check_link();
	say(to_server, 1);
}

static void a_thread_that_blocks(void)
{
	two(blocking_server, blocking_client);
}

/* Children of a loop: one that does nothing, one that ends at once, one with a loop of its own. */
static void forking_server(void)
{
	pid_t children[4];
	int status;

	open_end(2, 256);
	serve(8);
	for (int i = 0; i < 4; i++) {
		MUST((children[i] = fork()) >= 0);
		if (children[i] == 0) {
			if (i == 1)
				_exit(0);
			if (i == 2)
				ibv_get_device_list(NULL);
			if (i == 3)
				for (int c = 0; c < 2; c++)
					close(end.channels[c]->fd);
			pause();
			_exit(0);
		}
		begin(100);
		loop();
	}
	both_have_the_link();
	for (int i = 0; i < 4; i++) {
		kill(children[i], SIGKILL);
		MUST(waitpid(children[i], &status, 0) == children[i]);
	}
	begin(100);
	loop();
	both_have_the_link();
}

static void client_of_forks(void)
{
	open_end(2, 256);
	join(8);
	for (int i = 0; i < 4; i++) {
		begin(100);
		loop();
	}
	both_have_the_link();
	begin(100);
	loop();
	check(true, "a loop goes on beside its children", "");
	both_have_the_link();
}

static void forked(void)
{
	two(forking_server, client_of_forks);
}

/* The client leaves: the server's loop hears of it by its completions. */
static void left_server(void)
{
	exchange(true, 8, 2, 256, 20);
	begin(1);
	watch(end.ch->fd, MOST);
	loop();
	check(end.over, "flushed work requests reach the loop", "none");
}

static void leaving_client(void)
{
	exchange(false, 8, 2, 256, 20);
	for (int i = 0; i < end.count; i++)
		MUST(rdma_disconnect(end.conns[i].id) == 0);
}

static void left(void)
{
	two(left_server, leaving_client);
}

static const struct group groups[] = {
	{ "one_connection", one_connection },
	{ "one_channel", one_channel },
	{ "many_channels", many_channels },
	{ "few_channels", few_channels },
	{ "large", large },
	{ "edges", edges },
	{ "no_room", no_room },
	{ "idle", idle },
	{ "computing", computing },
	{ "two_threads", two_threads },
	{ "a_thread_that_blocks", a_thread_that_blocks },
	{ "forked", forked },
	{ "left", left },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
