/* What the C programs share: two queue pairs connected through rdma_cm inside one process, waiting with a
 * time limit, and one line of output per statement that was checked.
 *
 * Written against rdma-core's headers and man pages only. */
#ifndef UWARP_CONFORMANCE_COMMON_H
#define UWARP_CONFORMANCE_COMMON_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* Time limit of one wait, in milliseconds. It only bounds a hang, and a machine may be busy with much else. */
#define LIMIT_MS 60000
/* And of a group of statements, in seconds. */
#define GROUP_LIMIT 150
/* How long nothing must happen where nothing may happen. */
#define QUIET_MS 150

static const char *address = "127.0.0.1";
static int failures;

/* One line per statement: "ok name", or "FAIL name: " and what was seen instead. */
static inline bool check(bool good, const char *name, const char *got, ...)
{
	va_list ap;

	if (good) {
		printf("ok %s\n", name);
	} else {
		printf("FAIL %s: ", name);
		va_start(ap, got);
		vprintf(got, ap);
		va_end(ap);
		printf("\n");
		failures++;
	}
	fflush(stdout);
	return good;
}

static inline void die(const char *what, ...)
{
	va_list ap;

	printf("FAIL set-up: ");
	va_start(ap, what);
	vprintf(what, ap);
	va_end(ap);
	printf(" (errno %d, %s)\n", errno, strerror(errno));
	fflush(stdout);
	_exit(2);
}

#define MUST(call) do { if (!(call)) die("%s:%d %s", __FILE__, __LINE__, #call); } while (0)

/* The value must be this errno. */
static inline void check_errno(int got, int want, const char *name)
{
	check(got == want, name, "got %d (%s), want %d (%s)", got, strerror(got), want, strerror(want));
}

/* A call that returns NULL or -1 and sets errno: pass whether it failed, and look at errno. */
static inline void check_failed(bool failed, int want, const char *name)
{
	int got = errno;

	check(failed && got == want, name, "%s, errno %d (%s), want %d (%s)", failed ? "failed" : "succeeded", got,
	      strerror(got), want, strerror(want));
}

static inline uint64_t now_us(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}

static inline uint64_t now_ms(void)
{
	return now_us() / 1000;
}

static inline bool readable(int fd, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, ms) == 1;
}

/* Polls one completion. False when none comes in time. */
static inline bool poll_within(struct ibv_cq *cq, struct ibv_wc *wc, int ms)
{
	uint64_t end = now_ms() + (uint64_t)ms;
	int n;

	do {
		n = ibv_poll_cq(cq, 1, wc);
		if (n < 0)
			die("ibv_poll_cq gives %d", n);
		if (n == 1)
			return true;
		sched_yield();
	} while (now_ms() < end);
	return false;
}

static inline struct ibv_wc poll_one(struct ibv_cq *cq)
{
	struct ibv_wc wc;

	if (!poll_within(cq, &wc, LIMIT_MS))
		die("no completion in %d ms", LIMIT_MS);
	return wc;
}

/* Polls one completion and checks its status. */
static inline struct ibv_wc want_wc(struct ibv_cq *cq, enum ibv_wc_status status, const char *name)
{
	struct ibv_wc wc = { .status = IBV_WC_GENERAL_ERR };
	bool came = poll_within(cq, &wc, LIMIT_MS);

	check(came && wc.status == status, name, "%s, want %s", came ? ibv_wc_status_str(wc.status) : "no completion",
	      ibv_wc_status_str(status));
	return wc;
}

/* The next event of a channel, which must be of this type; it is acknowledged, its parameters are returned. */
static inline struct rdma_cm_event take_event(struct rdma_event_channel *ch)
{
	struct rdma_cm_event *event, copy;

	if (!readable(ch->fd, LIMIT_MS))
		die("no rdma_cm event in %d ms", LIMIT_MS);
	MUST(rdma_get_cm_event(ch, &event) == 0);
	copy = *event;
	MUST(rdma_ack_cm_event(event) == 0);
	return copy;
}

static inline struct rdma_cm_event must_event(struct rdma_event_channel *ch, enum rdma_cm_event_type type)
{
	struct rdma_cm_event event = take_event(ch);

	if (event.event != type)
		die("event %s (status %d), want %s", rdma_event_str(event.event), event.status, rdma_event_str(type));
	return event;
}

/* Whether the device passes for an RNIC, not for InfiniBand or RoCE. */
static inline bool as_iwarp(void)
{
	const char *view = getenv("UWARP_VIEW");

	return view && strcmp(view, "iwarp") == 0;
}

/* One end of a connection. */
struct side {
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *cc;
	struct ibv_cq *scq, *rcq;
	struct ibv_qp *qp;
	struct ibv_qp_cap cap;		/* as created */
};

/* What a pair is made with; zero means the default in the comment. */
struct options {
	int send_wr, recv_wr;		/* 16 */
	int send_sge, recv_sge;		/* 4 */
	int inline_data;		/* 0 */
	int cqe;			/* 64, for each of the four CQs */
	int read_depth;			/* 4, both ways at both ends */
	int sq_sig_all;			/* 0 */
	int retry;			/* 7: what the client gives */
	int rnr_retry;			/* 7; -1 for none: what the client gives */
	int server_rnr_retry;		/* as the client's; -1 for none */
	uint64_t send_ops;		/* none: without the ibv_wr_* functions and the extended receive CQ */
};

struct pair {
	struct rdma_cm_id *listener;
	struct side c, s;		/* client, server */
	struct rdma_conn_param request;	/* as the server's CONNECT_REQUEST showed it */
};

static inline int or(int value, int other)
{
	return value ? value : other;
}

static inline void side_resources(struct side *side, const struct options *o)
{
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = (uint32_t)or(o->send_wr, 16),
			.max_recv_wr = (uint32_t)or(o->recv_wr, 16),
			.max_send_sge = (uint32_t)or(o->send_sge, 4),
			.max_recv_sge = (uint32_t)or(o->recv_sge, 4),
			.max_inline_data = (uint32_t)o->inline_data,
		},
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = o->sq_sig_all,
	};

	MUST(side->id->verbs);
	MUST(side->pd = ibv_alloc_pd(side->id->verbs));
	MUST(side->cc = ibv_create_comp_channel(side->id->verbs));
	MUST(side->scq = ibv_create_cq(side->id->verbs, or(o->cqe, 64), side, side->cc, 0));
	if (o->send_ops) {
		struct ibv_cq_init_attr_ex cq = {
			.cqe = (uint32_t)or(o->cqe, 64), .cq_context = side, .channel = side->cc,
			.wc_flags = IBV_WC_STANDARD_FLAGS,
		};
		struct ibv_cq_ex *ex;

		MUST(ex = ibv_create_cq_ex(side->id->verbs, &cq));
		side->rcq = ibv_cq_ex_to_cq(ex);
	} else {
		MUST(side->rcq = ibv_create_cq(side->id->verbs, or(o->cqe, 64), side, side->cc, 0));
	}
	attr.send_cq = side->scq;
	attr.recv_cq = side->rcq;
	if (o->send_ops) {
		struct ibv_qp_init_attr_ex ex = {
			.cap = attr.cap, .qp_type = attr.qp_type, .send_cq = attr.send_cq, .recv_cq = attr.recv_cq,
			.sq_sig_all = attr.sq_sig_all, .pd = side->pd, .send_ops_flags = o->send_ops,
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		};

		MUST(rdma_create_qp_ex(side->id, &ex) == 0);
		attr.cap = ex.cap;
	} else {
		MUST(rdma_create_qp(side->id, side->pd, &attr) == 0);
	}
	side->qp = side->id->qp;
	side->cap = attr.cap;
}

/* A numeric address as a sockaddr with a port. */
static inline struct sockaddr_storage sockaddr_of(const char *host, uint16_t port)
{
	struct sockaddr_storage ss = { 0 };
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST }, *res;

	if (getaddrinfo(host, NULL, &hints, &res))
		die("getaddrinfo %s", host);
	memcpy(&ss, res->ai_addr, res->ai_addrlen);
	freeaddrinfo(res);
	if (ss.ss_family == AF_INET6)
		((struct sockaddr_in6 *)&ss)->sin6_port = htons(port);
	else
		((struct sockaddr_in *)&ss)->sin_port = htons(port);
	return ss;
}

/* A listener on a port the library chooses. */
static inline void listen_somewhere(struct pair *p)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);

	MUST(p->s.ch = rdma_create_event_channel());
	MUST(rdma_create_id(p->s.ch, &p->listener, p, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(p->listener, (struct sockaddr *)&ss) == 0);
	MUST(rdma_listen(p->listener, 8) == 0);
	MUST(rdma_get_src_port(p->listener));
}

/* The client's id with its route resolved. */
static inline void resolve(struct pair *p)
{
	struct sockaddr_storage ss = sockaddr_of(address, ntohs(rdma_get_src_port(p->listener)));

	MUST(p->c.ch = rdma_create_event_channel());
	MUST(rdma_create_id(p->c.ch, &p->c.id, p, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(p->c.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	must_event(p->c.ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(p->c.id, 2000) == 0);
	must_event(p->c.ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static inline uint8_t rnr_retries(int option)
{
	return (uint8_t)(option < 0 ? 0 : or(option, 7));
}

static inline void pair_open_with(struct pair *p, struct options o)
{
	struct rdma_conn_param param = {
		.responder_resources = (uint8_t)or(o.read_depth, 4),
		.initiator_depth = (uint8_t)or(o.read_depth, 4),
		.retry_count = (uint8_t)or(o.retry, 7),
		.rnr_retry_count = rnr_retries(o.rnr_retry),
	};
	struct rdma_cm_event event;

	memset(p, 0, sizeof *p);
	listen_somewhere(p);
	resolve(p);
	side_resources(&p->c, &o);
	MUST(rdma_connect(p->c.id, &param) == 0);
	event = must_event(p->s.ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	p->request = event.param.conn;
	p->s.id = event.id;
	side_resources(&p->s, &o);
	param.rnr_retry_count = rnr_retries(or(o.server_rnr_retry, o.rnr_retry));
	MUST(rdma_accept(p->s.id, &param) == 0);
	must_event(p->c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p->s.ch, RDMA_CM_EVENT_ESTABLISHED);
}

static inline void pair_open(struct pair *p)
{
	pair_open_with(p, (struct options){ 0 });
}

static inline void side_close(struct side *side)
{
	if (side->qp)
		rdma_destroy_qp(side->id);
	MUST(!side->scq || ibv_destroy_cq(side->scq) == 0);
	MUST(!side->rcq || ibv_destroy_cq(side->rcq) == 0);
	MUST(!side->cc || ibv_destroy_comp_channel(side->cc) == 0);
	MUST(!side->pd || ibv_dealloc_pd(side->pd) == 0);
	MUST(rdma_destroy_id(side->id) == 0);
}

/* Everything in the order the man pages ask for. Memory regions must be gone. */
static inline void pair_close(struct pair *p)
{
	side_close(&p->c);
	side_close(&p->s);
	MUST(rdma_destroy_id(p->listener) == 0);
	rdma_destroy_event_channel(p->c.ch);
	rdma_destroy_event_channel(p->s.ch);
}

/* One work request on the send queue. */
static inline int post(struct side *side, enum ibv_wr_opcode op, unsigned int flags, struct ibv_sge *sge, int num_sge,
		       uint64_t remote, uint32_t rkey, uint64_t wr_id)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id, .sg_list = sge, .num_sge = num_sge, .opcode = op, .send_flags = flags,
	}, *bad = NULL;

	if (op == IBV_WR_SEND_WITH_INV) {
		wr.invalidate_rkey = rkey;
	} else {
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = rkey;
	}
	return ibv_post_send(side->qp, &wr, &bad);
}

static inline int post_recv(struct side *side, struct ibv_sge *sge, int num_sge, uint64_t wr_id)
{
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = sge, .num_sge = num_sge }, *bad = NULL;

	return ibv_post_recv(side->qp, &wr, &bad);
}

static inline struct ibv_sge sge_of(const struct ibv_mr *mr, size_t offset, size_t length)
{
	return (struct ibv_sge){ (uint64_t)(uintptr_t)mr->addr + offset, (uint32_t)length, mr->lkey };
}

static inline enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { 0 };
	struct ibv_qp_init_attr init = { 0 };

	MUST(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
	return attr.qp_state;
}

static inline const char *state_name(enum ibv_qp_state state)
{
	static const char *const names[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };

	return (unsigned int)state < 7 ? names[state] : "?";
}

static inline int to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static inline int to(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

/* Waits until the queue pair is in ERR. */
static inline bool in_err(struct ibv_qp *qp)
{
	for (uint64_t end = now_ms() + LIMIT_MS; now_ms() < end; usleep(2000))
		if (state_of(qp) == IBV_QPS_ERR)
			return true;
	return false;
}

/* Both ends learn that the connection is over, and no longer work once the programs have answered that.
 * (The queue pair of an end that did nothing wrong stays in RTS until then.) */
static inline void check_terminated(struct pair *p, const char *what)
{
	char name[128];
	struct rdma_cm_event event;

	snprintf(name, sizeof name, "%s: client sees DISCONNECTED", what);
	event = take_event(p->c.ch);
	check(event.event == RDMA_CM_EVENT_DISCONNECTED, name, "%s", rdma_event_str(event.event));
	snprintf(name, sizeof name, "%s: server sees DISCONNECTED", what);
	event = take_event(p->s.ch);
	check(event.event == RDMA_CM_EVENT_DISCONNECTED, name, "%s", rdma_event_str(event.event));
	MUST(rdma_disconnect(p->c.id) == 0 && rdma_disconnect(p->s.id) == 0);
	snprintf(name, sizeof name, "%s: both queue pairs are in ERR", what);
	check(in_err(p->c.qp) && in_err(p->s.qp), name, "%s and %s", state_name(state_of(p->c.qp)),
	      state_name(state_of(p->s.qp)));
}

#define REMOTE_ALL (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)

/* What a thread does while its cancellation is pending. */
struct last_words {
	void (*run)(void *arg);
	void *arg;
	volatile bool got_through;
};

static inline void *say_last_words(void *data)
{
	struct last_words *words = data;

	MUST(pthread_cancel(pthread_self()) == 0);
	words->run(words->arg);
	words->got_through = true;
	for (;;)
		pthread_testcancel();
	return NULL;
}

/* Whether a thread gets through `run`, which calls nothing that is a cancellation point (pthreads(7)), with a
 * cancellation that is pending, and ends behind it. (A thread that is unwound inside the library ends the process.) */
static inline bool gets_through(void (*run)(void *arg), void *arg)
{
	struct last_words words = { run, arg, false };
	pthread_t thread;
	void *result = NULL;

	MUST(pthread_create(&thread, NULL, say_last_words, &words) == 0 && pthread_join(thread, &result) == 0);
	return result == PTHREAD_CANCELED && words.got_through;
}

/* A group of statements that runs in a process of its own: a crash or a hang costs only that group. */
struct group {
	const char *name;
	void (*run)(void);
};

/* Runs the groups whose name begins with argv[2] (all without it); argv[1] is the address to connect over. */
static inline int run_groups(int argc, char **argv, const struct group *groups, size_t count)
{
	int bad = 0;

	if (argc > 1)
		address = argv[1];
	for (size_t i = 0; i < count; i++) {
		int status;
		pid_t pid;

		if (argc > 2 && strncmp(groups[i].name, argv[2], strlen(argv[2])))
			continue;
		printf("# %s\n", groups[i].name);
		fflush(stdout);
		pid = fork();
		if (pid == 0) {
			alarm(GROUP_LIMIT);
			groups[i].run();
			_exit(failures ? 1 : 0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) != pid) {
			perror("fork");
			return 2;
		}
		if (WIFSIGNALED(status)) {
			printf("FAIL %s: killed by signal %d (%s)\n", groups[i].name, WTERMSIG(status),
			       WTERMSIG(status) == SIGALRM ? "it hung" : strsignal(WTERMSIG(status)));
			fflush(stdout);
		}
		bad += !WIFEXITED(status) || WEXITSTATUS(status);
	}
	return bad ? 1 : 0;
}

#endif
