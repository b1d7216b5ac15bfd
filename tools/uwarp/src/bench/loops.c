/* A server that is one event loop, and a client that has all connections in one event loop, too: on each it
 * keeps one request in flight. Both are processes of their own, on 127.0.0.1 or in two network namespaces, whose files are
 * named, and the server's address.
 *
 *	loops tcp|send|write one|many CONNECTIONS BYTES SECONDS [ADDRESS SERVERS CLIENTS]
 *
 * Over a TCP socket for each connection; or over queue pairs, with requests by Send, and replies by Send or by
 * Write with immediate data, and one completion channel for all or one for each. Each end prints a line:
 *
 *	end requests seconds processor-seconds sleeps system-calls-or-minus-one */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <netinet/tcp.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 1024
#define DEPTH 8
#define MUST(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, strerror(errno)); _exit(1); } } while (0)

/* Where the client has its reply written. */
struct request {
	uint64_t address;
	uint32_t key;
};

static int count, size, epfd, counter = -1, ports[2];
static const char *address = "127.0.0.1";
static bool many, server, over, by_write;
static double seconds, began;
static struct rusage before;
static unsigned long requests;
static char *space;		/* for each connection: what is received, and what is sent */

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double cpu(const struct rusage *u)
{
	return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
	       (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec) / 1e6;
}

/* Counts the system calls of this process and of threads that it starts later, where the system permits it. */
static void count_calls(void)
{
	struct perf_event_attr attr = { .type = PERF_TYPE_TRACEPOINT, .size = sizeof attr, .inherit = 1 };
	FILE *id = fopen("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id", "r");
	unsigned long number;

	if (!id)
		return;
	if (fscanf(id, "%lu", &number) == 1) {
		attr.config = number;
		counter = (int)syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
	}
	fclose(id);
}

static long long calls(void)
{
	long long value;

	return counter >= 0 && read(counter, &value, sizeof value) == sizeof value ? value : -1;
}

static long long calls_before;

static void start(void)
{
	requests = 0;
	getrusage(RUSAGE_SELF, &before);
	calls_before = calls();
	began = now();
}

static bool time_is_up(void)
{
	return !server && now() - began >= seconds;
}

static void report(void)
{
	double took = now() - began;
	long long made = calls();
	struct rusage u;

	getrusage(RUSAGE_SELF, &u);
	printf("%s %lu %f %f %ld %lld\n", server ? "server" : "client", requests, took, cpu(&u) - cpu(&before),
	       u.ru_nvcsw - before.ru_nvcsw, made < 0 ? -1 : made - calls_before);
	fflush(stdout);
	_exit(0);
}

static void watch(int fd, uint32_t number)
{
	struct epoll_event e = { .events = EPOLLIN, .data.u32 = number };

	MUST(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e) == 0);
}

static void tell_port(const void *at)
{
	uint16_t port = ((const struct sockaddr_in *)at)->sin_port;

	MUST(write(ports[1], &port, sizeof port) == sizeof port);
}

static struct sockaddr_in told_port(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET };

	MUST(inet_pton(AF_INET, address, &at.sin_addr) == 1);
	if (!server)
		MUST(read(ports[0], &at.sin_port, sizeof at.sin_port) == sizeof at.sin_port);
	return at;
}

static void loop(void (*ready)(uint32_t))
{
	for (;;) {
		struct epoll_event events[64];
		int n = epoll_wait(epfd, events, 64, 1000);

		for (int i = 0; i < n; i++)
			ready(events[i].data.u32);
		if (over || time_is_up())
			report();
	}
}

/* --- TCP */
static int fds[MOST];

static void tcp_ready(uint32_t i)
{
	int got = 0;

	while (got < size) {
		ssize_t n = recv(fds[i], space + got, (size_t)(size - got), 0);

		if (n == 0 || (n < 0 && errno == ECONNRESET))
			report();
		if (n < 0 && errno == EAGAIN && got == 0)
			return;
		MUST(n > 0 || errno == EAGAIN);
		got += n > 0 ? (int)n : 0;
	}
	requests++;
	if (!time_is_up() && send(fds[i], space, (size_t)size, MSG_NOSIGNAL) != size)
		report();
}

static void tcp(void)
{
	struct sockaddr_in at = told_port();
	socklen_t length = sizeof at;
	int listener = -1, on = 1;

	if (server) {
		MUST((listener = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
		MUST(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, MOST) == 0);
		MUST(getsockname(listener, (void *)&at, &length) == 0);
		tell_port(&at);
	}
	for (int i = 0; i < count; i++) {
		if (server)
			MUST((fds[i] = accept(listener, NULL, NULL)) >= 0);
		else
			MUST((fds[i] = socket(AF_INET, SOCK_STREAM, 0)) >= 0 && connect(fds[i], (void *)&at, sizeof at) == 0);
		setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
		fcntl(fds[i], F_SETFL, O_NONBLOCK);
		watch(fds[i], (uint32_t)i);
	}
	start();
	for (int i = 0; i < count && !server; i++)
		MUST(send(fds[i], space, (size_t)size, 0) == size);
	loop(tcp_ready);
}

/* --- verbs */
static struct rdma_cm_id *ids[MOST];
static struct ibv_comp_channel *channels[MOST];
static struct ibv_cq *cqs[MOST];
static struct ibv_pd *pd;
static struct ibv_mr *mr;

static char *received(int i)
{
	return space + (size_t)(2 * i) * (size_t)size;
}

static char *sent(int i)
{
	return received(i) + size;
}

static void post_receive(int i)
{
	struct ibv_sge sge = { (uintptr_t)received(i), (uint32_t)size, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(ids[i]->qp, &wr, &bad) == 0);
}

static void post_send(int i)
{
	struct ibv_sge sge = { (uintptr_t)sent(i), (uint32_t)size, mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	struct request request = { (uintptr_t)received(i), mr->rkey };

	if (server && by_write) {
		memcpy(&request, received(i), sizeof request);
		wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr.wr.rdma.remote_addr = request.address;
		wr.wr.rdma.rkey = request.key;
	} else {
		memcpy(sent(i), &request, sizeof request);
	}
	MUST(ibv_post_send(ids[i]->qp, &wr, &bad) == 0);
}

static void drain(struct ibv_cq *cq)
{
	struct ibv_wc wc[16];
	int n;

	while ((n = ibv_poll_cq(cq, 16, wc)) > 0)
		for (int k = 0; k < n; k++) {
			int i = (int)wc[k].wr_id;

			if (wc[k].status != IBV_WC_SUCCESS) {
				over = true;
				return;
			}
			if (!(wc[k].opcode & IBV_WC_RECV))
				continue;
			requests++;
			/* A reply by Write lies where the next request is not received. */
			if (server)
				post_send(i);
			post_receive(i);
			if (!server && !time_is_up())
				post_send(i);
		}
}

static void verbs_ready(uint32_t i)
{
	struct ibv_cq *cq;
	void *context;

	if (i == MOST)
		report();
	if (ibv_get_cq_event(channels[i], &cq, &context)) {
		MUST(errno == EAGAIN);
		return;
	}
	ibv_ack_cq_events(cq, 1);
	MUST(ibv_req_notify_cq(cq, 0) == 0);
	drain(cq);
}

static void set_up(int i, struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .cap = { DEPTH, DEPTH, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	int c = many ? i : 0;

	ids[i] = id;
	if (!pd) {
		MUST(pd = ibv_alloc_pd(id->verbs));
		MUST(mr = ibv_reg_mr(pd, space, (size_t)2 * (size_t)count * (size_t)size,
				     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	}
	if (!channels[c]) {
		MUST(channels[c] = ibv_create_comp_channel(id->verbs));
		fcntl(channels[c]->fd, F_SETFL, O_NONBLOCK);
		MUST(cqs[c] = ibv_create_cq(id->verbs, 2 * DEPTH * (many ? 1 : count), NULL, channels[c], 0));
		MUST(ibv_req_notify_cq(cqs[c], 0) == 0);
		watch(channels[c]->fd, (uint32_t)c);
	}
	init.send_cq = init.recv_cq = cqs[c];
	MUST(rdma_create_qp(id, pd, &init) == 0);
	post_receive(i);
}

static struct rdma_cm_id *next(struct rdma_event_channel *ch, enum rdma_cm_event_type want)
{
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;

	MUST(rdma_get_cm_event(ch, &e) == 0);
	if (e->event != want) {
		fprintf(stderr, "%s, not %s\n", rdma_event_str(e->event), rdma_event_str(want));
		_exit(1);
	}
	id = e->id;
	rdma_ack_cm_event(e);
	return id;
}

static void verbs(void)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct sockaddr_in at = told_port();
	struct rdma_conn_param p = { .rnr_retry_count = 7, .retry_count = 7 };
	struct rdma_cm_id *id;

	MUST(ch);
	if (server) {
		MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0 && rdma_bind_addr(id, (void *)&at) == 0);
		MUST(rdma_listen(id, MOST) == 0);
		tell_port(rdma_get_local_addr(id));
	}
	for (int i = 0; i < count; i++) {
		if (server) {
			set_up(i, id = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST));
			MUST(rdma_accept(id, &p) == 0);
		} else {
			MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
			MUST(rdma_resolve_addr(id, NULL, (void *)&at, 2000) == 0);
			next(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
			MUST(rdma_resolve_route(id, 2000) == 0);
			next(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
			set_up(i, id);
			MUST(rdma_connect(id, &p) == 0);
		}
		next(ch, RDMA_CM_EVENT_ESTABLISHED);
	}
	watch(ch->fd, MOST);
	start();
	for (int i = 0; i < count && !server; i++)
		post_send(i);
	loop(verbs_ready);
}

static void enter(const char *namespace)
{
	int fd = open(namespace, O_RDONLY | O_CLOEXEC);

	MUST(fd >= 0 && setns(fd, CLONE_NEWNET) == 0 && close(fd) == 0);
}

int main(int argc, char **argv)
{
	int status = 0;
	pid_t child;

	MUST(argc == 6 || argc == 9);
	by_write = strcmp(argv[1], "write") == 0;
	many = strcmp(argv[2], "many") == 0;
	count = atoi(argv[3]);
	size = atoi(argv[4]);
	seconds = atof(argv[5]);
	MUST(count > 0 && count < MOST && size >= (int)sizeof(struct request));
	MUST(space = calloc(2 * (size_t)count, (size_t)size));
	MUST(pipe2(ports, O_CLOEXEC) == 0);
	MUST((child = fork()) >= 0);
	server = child == 0;
	if (!server) {
		/* This process waits for both. */
		pid_t client = fork();

		MUST(client >= 0);
		if (client) {
			int other;

			close(ports[1]);
			MUST(waitpid(client, &status, 0) == client && waitpid(child, &other, 0) == child);
			return status || other;
		}
	}
	if (argc == 9) {
		address = argv[6];
		enter(argv[server ? 7 : 8]);
	}
	/* Nobody waits for an end that hangs, or for the port of one that has failed. */
	alarm((unsigned int)seconds + 30);
	MUST(server || close(ports[1]) == 0);
	count_calls();
	MUST((epfd = epoll_create1(EPOLL_CLOEXEC)) >= 0);
	(strcmp(argv[1], "tcp") ? verbs : tcp)();
}
