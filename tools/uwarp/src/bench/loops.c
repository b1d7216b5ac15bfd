/* A server that is one event loop, and clients that send requests and wait for the replies.
 *
 *	loops tcp|verbs one|many CONNECTIONS SIZE SECONDS [ADDRESS]
 *
 * One process is the server, another one has all clients in one event loop, too: each keeps one request in flight.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MUST(x) do { if (!(x)) { fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #x, strerror(errno)); exit(1); } } while (0)
#define MOST 512

static int count, size;
static bool many, server;
static double seconds;
static const char *address = "127.0.0.1";
static int epfd;
static unsigned long requests, events, vain;

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static struct rusage before;
static double began;

static void report(const char *who)
{
	struct rusage u;
	double cpu, took = now() - began;

	getrusage(RUSAGE_SELF, &u);
	cpu = (u.ru_utime.tv_sec - before.ru_utime.tv_sec) + (u.ru_utime.tv_usec - before.ru_utime.tv_usec) / 1e6 +
	      (u.ru_stime.tv_sec - before.ru_stime.tv_sec) + (u.ru_stime.tv_usec - before.ru_stime.tv_usec) / 1e6;
	printf("%-6s %9.0f requests/s  %6.2f us cpu  %6.3f sleeps  %6.3f switches forced each; epoll %.3f in vain %.3f\n", who,
	       requests / took, cpu * 1e6 / requests, (double)(u.ru_nvcsw - before.ru_nvcsw) / requests,
	       (double)(u.ru_nivcsw - before.ru_nivcsw) / requests, (double)events / requests, (double)vain / requests);
	fflush(stdout);
}

static void start(void)
{
	getrusage(RUSAGE_SELF, &before);
	began = now();
	requests = events = vain = 0;
}

static void watch(int fd, uint32_t i)
{
	struct epoll_event e = { .events = EPOLLIN, .data.u32 = i };
	MUST(epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e) == 0);
}

/* --- TCP */
static int fds[MOST];
static char *space;

static void tcp_one(int fd)
{
	int got = 0;
	while (got < size) {
		ssize_t n = recv(fd, space + got, size - got, 0);
		if (n <= 0) { if (n < 0 && errno == EAGAIN && got) continue; if (n < 0 && errno == EAGAIN) return; if (server) { report("server"); exit(0); } MUST(n > 0); }
		got += n;
	}
	requests++;
	if (!server && now() - began >= seconds) return;
	MUST(send(fd, space, size, MSG_NOSIGNAL) == size);
}

static void tcp(int port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	int on = 1;

	inet_pton(AF_INET, address, &at.sin_addr);
	if (server) {
		int l = socket(AF_INET, SOCK_STREAM, 0);
		setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
		MUST(bind(l, (void *)&at, sizeof at) == 0 && listen(l, MOST) == 0);
		for (int i = 0; i < count; i++)
			MUST((fds[i] = accept(l, NULL, NULL)) >= 0);
	} else {
		for (int i = 0; i < count; i++) {
			int tries = 0;
			for (;;) {
				MUST((fds[i] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
				if (connect(fds[i], (void *)&at, sizeof at) == 0) break;
				close(fds[i]); usleep(20000); MUST(tries++ < 200);
			}
		}
	}
	for (int i = 0; i < count; i++) {
		setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
		fcntl(fds[i], F_SETFL, O_NONBLOCK);
		watch(fds[i], i);
	}
	start();
	if (!server)
		for (int i = 0; i < count; i++)
			MUST(send(fds[i], space, size, 0) == size);
	for (;;) {
		struct epoll_event ev[64];
		int n = epoll_wait(epfd, ev, 64, 1000);
		events++;
		for (int i = 0; i < n; i++)
			tcp_one(fds[ev[i].data.u32]);
		if (!server && now() - began >= seconds) { report("client"); return; }
	}
}

/* --- verbs */
static struct rdma_cm_id *ids[MOST];
static struct ibv_comp_channel *channels[MOST];
static struct ibv_cq *cqs[MOST];
static struct ibv_mr *mr;
static struct ibv_pd *pd;

static void post_receive(int i)
{
	struct ibv_sge sge = { (uintptr_t)space + (size_t)(2 * i) * size, size, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;
	MUST(ibv_post_recv(ids[i]->qp, &wr, &bad) == 0);
}

static void post_send(int i)
{
	struct ibv_sge sge = { (uintptr_t)space + (size_t)(2 * i + 1) * size, size, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	MUST(ibv_post_send(ids[i]->qp, &wr, &bad) == 0);
}

static bool over;

static void drain(struct ibv_cq *cq)
{
	struct ibv_wc wc[16];
	int n;
	while ((n = ibv_poll_cq(cq, 16, wc)) > 0)
		for (int k = 0; k < n; k++) {
			if (wc[k].status) { over = true; return; }
			if (wc[k].opcode != IBV_WC_RECV) continue;
			requests++;
			post_receive(wc[k].wr_id);
			if (server || now() - began < seconds) post_send(wc[k].wr_id);
		}
}

static void set_up(int i, struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = { .cap = { 8, 8, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	int c = many ? i : 0;

	ids[i] = id;
	id->context = (void *)(uintptr_t)i;
	if (!pd) {
		MUST(pd = ibv_alloc_pd(id->verbs));
		MUST(mr = ibv_reg_mr(pd, space, (size_t)2 * count * size, IBV_ACCESS_LOCAL_WRITE));
	}
	if (!channels[c]) {
		MUST(channels[c] = ibv_create_comp_channel(id->verbs));
		fcntl(channels[c]->fd, F_SETFL, O_NONBLOCK);
		MUST(cqs[c] = ibv_create_cq(id->verbs, many ? 32 : 32 * count, (void *)(uintptr_t)c, channels[c], 0));
		MUST(ibv_req_notify_cq(cqs[c], 0) == 0);
		watch(channels[c]->fd, c);
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
	if (e->event != want) { fprintf(stderr, "%s, not %s\n", rdma_event_str(e->event), rdma_event_str(want)); exit(1); }
	id = e->id;
	rdma_ack_cm_event(e);
	return id;
}

static void verbs(int port)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct rdma_conn_param p = { .rnr_retry_count = 7 };

	inet_pton(AF_INET, address, &at.sin_addr);
	if (server) {
		struct rdma_cm_id *l;
		MUST(rdma_create_id(ch, &l, NULL, RDMA_PS_TCP) == 0 && rdma_bind_addr(l, (void *)&at) == 0 && rdma_listen(l, MOST) == 0);
		for (int i = 0; i < count; i++) {
			struct rdma_cm_id *id = next(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
			set_up(i, id);
			MUST(rdma_accept(id, &p) == 0);
			next(ch, RDMA_CM_EVENT_ESTABLISHED);
		}
	} else {
		usleep(500000);
		for (int i = 0; i < count; i++) {
			struct rdma_cm_id *id;
			MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
			MUST(rdma_resolve_addr(id, NULL, (void *)&at, 2000) == 0);
			next(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
			MUST(rdma_resolve_route(id, 2000) == 0);
			next(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
			set_up(i, id);
			MUST(rdma_connect(id, &p) == 0);
			next(ch, RDMA_CM_EVENT_ESTABLISHED);
		}
	}
	if (server)
		watch(ch->fd, MOST);
	start();
	if (!server)
		for (int i = 0; i < count; i++)
			post_send(i);
	while (!over) {
		struct epoll_event ev[64];
		int n = epoll_wait(epfd, ev, 64, 1000);
		events++;
		for (int i = 0; i < n; i++) {
			if (ev[i].data.u32 == MOST) { over = true; continue; }
			struct ibv_comp_channel *c = channels[ev[i].data.u32];
			struct ibv_cq *cq;
			void *ctx;
			if (ibv_get_cq_event(c, &cq, &ctx)) { MUST(errno == EAGAIN); vain++; continue; }
			ibv_ack_cq_events(cq, 1);
			MUST(ibv_req_notify_cq(cq, 0) == 0);
			drain(cq);
		}
		if (!server && now() - began >= seconds) break;
	}
	report(server ? "server" : "client");
	if (!server) _exit(0);
}

int main(int argc, char **argv)
{
	bool over_tcp;
	int port = 20000 + getpid() % 20000;
	pid_t child;

	MUST(argc >= 6);
	over_tcp = !strcmp(argv[1], "tcp");
	many = !strcmp(argv[2], "many");
	count = atoi(argv[3]);
	size = atoi(argv[4]);
	seconds = atof(argv[5]);
	if (argc > 6) address = argv[6];
	alarm(seconds + 20);
	MUST(count <= MOST);
	MUST(space = calloc(2 * count, size));
	child = fork();
	server = child == 0;
	MUST((epfd = epoll_create1(0)) >= 0);
	(over_tcp ? tcp : verbs)(port);
	if (child) { fflush(stdout); exit(0); }
	return 0;
}
