/* What programs share whose groups are two processes: messages, connections, and the processes. */
#ifndef UWARP_CONFORMANCE_PROCESSES_H
#define UWARP_CONFORMANCE_PROCESSES_H

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "chance.h"
#include "links.h"

/* Memory that the processes of a group have in common. */
static inline void *in_common(size_t length)
{
	void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	MUST(memory != MAP_FAILED);
	return memory;
}

/* ------------------------------------------------------------------ what messages hold */

static inline uint64_t word_of(uint64_t message, uint64_t place)
{
	return (message + 1) * 0x9e3779b97f4a7c15 + place * 0xc2b2ae3d27d4eb4f;
}

static inline unsigned char byte_of(uint64_t message, uint64_t place)
{
	return (unsigned char)(word_of(message, place / 8) >> place % 8 * 8);
}

static inline void fill(unsigned char *at, size_t length, uint64_t message)
{
	size_t words = length / 8;

	for (size_t i = 0; i < words; i++) {
		uint64_t word = word_of(message, i);

		memcpy(at + 8 * i, &word, 8);
	}
	for (size_t i = 8 * words; i < length; i++)
		at[i] = byte_of(message, i);
}

static inline void must_hold(const unsigned char *at, size_t length, uint64_t message, const char *what)
{
	for (size_t i = 0; i < length / 8; i++) {
		uint64_t word;

		memcpy(&word, at + 8 * i, 8);
		if (word != word_of(message, i))
			die("%s: bytes from %zu on of %zu are wrong: %" PRIx64, what, 8 * i, length, word);
	}
	for (size_t i = length / 8 * 8; i < length; i++)
		if (at[i] != byte_of(message, i))
			die("%s: byte %zu of %zu is wrong: %x", what, i, length, at[i]);
}

/* ------------------------------------------------------------------ connections */

static inline bool over_memory(void)
{
	const char *link = getenv("LINK");

	return link && !strcmp(link, "memory");
}

struct conn {
	struct rdma_cm_id *id;
	struct ibv_comp_channel *channel;	/* of messages that come */
	struct ibv_cq *sent, *came;
};

static struct rdma_event_channel *events;
static struct ibv_pd *domain;
static struct ibv_mr *mr;
static struct rdma_conn_param param = {
	.responder_resources = 16, .initiator_depth = 16, .rnr_retry_count = 7, .retry_count = 7,
};

static inline void resources(struct conn *c, uint32_t depth, uint32_t pieces)
{
	struct ibv_qp_init_attr init = {
		.cap = { depth, depth, pieces, pieces, 0 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};

	if (!domain)
		MUST(domain = ibv_alloc_pd(c->id->verbs));
	if (!c->channel)
		MUST(c->channel = ibv_create_comp_channel(c->id->verbs));
	MUST(c->sent = ibv_create_cq(c->id->verbs, (int)depth, c, NULL, 0));
	MUST(c->came = ibv_create_cq(c->id->verbs, (int)depth, c, c->channel, 0));
	MUST(ibv_req_notify_cq(c->came, 0) == 0);
	init.send_cq = c->sent;
	init.recv_cq = c->came;
	MUST(rdma_create_qp(c->id, domain, &init) == 0);
}

/* A listener on a port that the library chooses. */
static inline struct rdma_cm_id *listener_on(struct rdma_event_channel *ch)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	struct rdma_cm_id *listener;

	MUST(rdma_create_id(ch, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0 && rdma_listen(listener, 16) == 0);
	return listener;
}

static inline struct rdma_cm_id *resolve_to(uint16_t port)
{
	struct sockaddr_storage ss = sockaddr_of(address, port);
	struct rdma_cm_id *id;

	MUST(rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	must_event(events, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(id, 2000) == 0);
	must_event(events, RDMA_CM_EVENT_ROUTE_RESOLVED);
	return id;
}

static inline int submit(struct conn *c, enum ibv_wr_opcode op, struct ibv_sge *list, int count, uint64_t wr_id,
		  uint64_t remote, uint32_t rkey)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id, .sg_list = list, .num_sge = count, .opcode = op, .wr.rdma = { remote, rkey },
	}, *bad;

	return ibv_post_send(c->id->qp, &wr, &bad);
}

static inline int receive(struct conn *c, struct ibv_sge *list, int count, uint64_t wr_id)
{
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = list, .num_sge = count }, *bad;

	return ibv_post_recv(c->id->qp, &wr, &bad);
}

/* Whether there is a completion; it must be of success. */
static inline bool take(struct ibv_cq *cq, struct ibv_wc *wc)
{
	int n = ibv_poll_cq(cq, 1, wc);

	MUST(n >= 0);
	if (n && wc->status != IBV_WC_SUCCESS)
		die("a work request ends with %s", ibv_wc_status_str(wc->status));
	return n > 0;
}

/* ------------------------------------------------------------------ two processes */

static bool server;
static void (*at_first)(void);	/* what each process does before it uses the library */
static int other;		/* a socket to the other process */
static uint16_t other_port;	/* what it listens on */

static inline void tell(const void *what, size_t length)
{
	MUST(write(other, what, length) == (ssize_t)length);
}

static inline void hear(void *what, size_t length)
{
	if (!readable(other, LIMIT_MS) || read(other, what, length) != (ssize_t)length)
		die("the other process says nothing");
}

static inline void both_are_here(void)
{
	char word = 0;

	tell(&word, 1);
	hear(&word, 1);
}

/* One more connection with the other process. */
static inline void meet(struct conn *c, uint32_t depth, uint32_t pieces)
{
	if (server) {
		c->id = must_event(events, RDMA_CM_EVENT_CONNECT_REQUEST).id;
		resources(c, depth, pieces);
		MUST(rdma_accept(c->id, &param) == 0);
	} else {
		c->id = resolve_to(other_port);
		resources(c, depth, pieces);
		MUST(rdma_connect(c->id, &param) == 0);
	}
	must_event(events, RDMA_CM_EVENT_ESTABLISHED);
	both_are_here();
}

/* Runs this in two processes, which then have so many connections. */
static inline void two(void (*run)(void), int conns)
{
	int fds[2], status;
	pid_t child;

	MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
	MUST((child = fork()) >= 0);
	server = child == 0;
	MUST(!server || prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
	other = fds[server];
	close(fds[!server]);
	alarm(GROUP_LIMIT);
	seed += server;
	if (at_first)
		at_first();
	MUST(events = rdma_create_event_channel());
	if (server) {
		other_port = ntohs(rdma_get_src_port(listener_on(events)));
		tell(&other_port, sizeof other_port);
	} else {
		hear(&other_port, sizeof other_port);
	}
	run();
	both_are_here();
	check_links(server ? "the server's" : "the client's", conns);
	both_are_here();
	if (server)
		_exit(failures ? 1 : 0);
	MUST(waitpid(child, &status, 0) == child);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the server ends as it should", "status %x",
	      status);
}

#endif
