/* Traffic between two processes whose every byte is checked, while somebody does something to the network
 * or to a peer.
 *
 *   traffic server ADDRESS PORT
 *   traffic client ADDRESS PORT FILE whole|broken|quiet
 *
 * The server sends back what it receives. The client sends messages of many sizes, compares what comes
 * back, and writes to the server's memory and reads it back at the same time, until FILE exists. "whole":
 * nothing may fail until then. "broken": the connection must end before. "quiet": it must end afterwards,
 * when nothing is under way any more. */
#include "common.h"

#define DEPTH 8
#define LARGEST (192 * 1024)
#define AREA (96 * 1024)
/* How long the end of a connection may take to be told when the network is gone: twice what the library says. */
#define END_MS 100000
/* How long the client goes on where nothing tells it to stop. */
#define LONGEST_MS 1000000

enum { SENT = 1, RECEIVED, WRITTEN, READ };

struct end {
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *cc;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	uint8_t *memory;
	unsigned int outstanding, flushed;
	enum ibv_wc_status status;	/* the first that was no success */
	bool disconnected;
};

/* Memory: DEPTH buffers to send from, DEPTH to receive into, one to write from or to be written, one to
 * read into. */
static size_t out_at(uint64_t i) { return i % DEPTH * LARGEST; }
static size_t in_at(uint64_t i) { return (DEPTH + i % DEPTH) * LARGEST; }
#define AREA_AT (2 * DEPTH * LARGEST)
#define BACK_AT (AREA_AT + AREA)
#define MEMORY (BACK_AT + AREA)

static uint64_t mix(uint64_t x)
{
	x += 0x9E3779B97F4A7C15u;
	x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
	x = (x ^ x >> 27) * 0x94D049BB133111EBu;
	return x ^ x >> 31;
}

static uint32_t length_of(uint64_t i)
{
	uint64_t r = mix(i);

	switch (r % 4) {
	case 0: return 1 + r / 4 % 256;
	case 1: return 1 + r / 4 % 8192;
	default: return 1 + r / 4 % LARGEST;
	}
}

static void fill(uint8_t *at, size_t len, uint64_t seed)
{
	for (size_t i = 0; i < len; i += 8) {
		uint64_t word = mix(seed * 1000003 + i);

		memcpy(at + i, &word, len - i < 8 ? len - i : 8);
	}
}

static bool same(const uint8_t *at, size_t len, uint64_t seed)
{
	for (size_t i = 0; i < len; i += 8) {
		uint64_t word = mix(seed * 1000003 + i);

		if (memcmp(at + i, &word, len - i < 8 ? len - i : 8))
			return false;
	}
	return true;
}

static void resources(struct end *e)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4 * DEPTH, .max_recv_wr = 2 * DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};

	MUST(e->memory = calloc(1, MEMORY));
	MUST(e->pd = ibv_alloc_pd(e->id->verbs));
	MUST(e->cc = ibv_create_comp_channel(e->id->verbs));
	MUST(fcntl(e->cc->fd, F_SETFL, O_NONBLOCK) == 0);
	MUST(e->cq = ibv_create_cq(e->id->verbs, 8 * DEPTH, NULL, e->cc, 0));
	MUST(e->mr = ibv_reg_mr(e->pd, e->memory, MEMORY, REMOTE_ALL));
	attr.send_cq = attr.recv_cq = e->cq;
	MUST(rdma_create_qp(e->id, e->pd, &attr) == 0);
}

static void receive(struct end *e, uint64_t i)
{
	struct ibv_sge sge = sge_of(e->mr, in_at(i), LARGEST);
	struct ibv_recv_wr wr = { .wr_id = i << 8 | RECEIVED, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(e->id->qp, &wr, &bad) == 0);
	e->outstanding++;
}

static void request(struct end *e, enum ibv_wr_opcode op, uint64_t id, size_t at, size_t len, uint64_t remote, uint32_t rkey)
{
	struct ibv_sge sge = sge_of(e->mr, at, len);
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = op }, *bad;

	wr.wr.rdma.remote_addr = remote;
	wr.wr.rdma.rkey = rkey;
	MUST(ibv_post_send(e->id->qp, &wr, &bad) == 0);
	e->outstanding++;
}

/* The next good completion, or false when there is none for now. Failures are counted. */
static bool next(struct end *e, struct ibv_wc *wc)
{
	struct pollfd fds[] = { { .fd = e->cc->fd, .events = POLLIN }, { .fd = e->ch->fd, .events = POLLIN } };
	struct ibv_cq *cq;
	void *context;
	int n = ibv_poll_cq(e->cq, 1, wc);

	if (n == 0) {
		MUST(ibv_req_notify_cq(e->cq, 0) == 0);
		n = ibv_poll_cq(e->cq, 1, wc);
	}
	MUST(n >= 0);
	if (n == 0) {
		poll(fds, 2, 100);
		if (fds[0].revents && ibv_get_cq_event(e->cc, &cq, &context) == 0)
			ibv_ack_cq_events(cq, 1);
		if (fds[1].revents && take_event(e->ch).event == RDMA_CM_EVENT_DISCONNECTED) {
			/* Until then the receives stay posted. */
			MUST(rdma_disconnect(e->id) == 0);
			e->disconnected = true;
		}
		return false;
	}
	e->outstanding--;
	if (wc->status == IBV_WC_SUCCESS)
		return true;
	e->flushed++;
	if (e->status == IBV_WC_SUCCESS)
		e->status = wc->status;
	return false;
}

/* Everything completes and the end is told. */
static void ended(struct end *e, const char *who)
{
	uint64_t limit = now_ms() + END_MS;
	struct ibv_wc wc;

	while ((e->outstanding || !e->disconnected) && now_ms() < limit)
		next(e, &wc);
	check(!e->outstanding, "every work request completes", "%s: %u do not", who, e->outstanding);
	check(e->disconnected, "the end is told", "%s: it is not", who);
	check(state_of(e->id->qp) == IBV_QPS_ERR, "the queue pair is in the error state", "%s", who);
}

static void release(struct end *e)
{
	rdma_destroy_qp(e->id);
	MUST(ibv_dereg_mr(e->mr) == 0);
	MUST(ibv_destroy_cq(e->cq) == 0);
	MUST(ibv_destroy_comp_channel(e->cc) == 0);
	MUST(ibv_dealloc_pd(e->pd) == 0);
	MUST(rdma_destroy_id(e->id) == 0);
	rdma_destroy_event_channel(e->ch);
}

struct invitation {
	uint64_t addr;
	uint32_t rkey;
};

static void serve(const char *host, uint16_t port)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };
	struct sockaddr_storage ss = sockaddr_of(host, port);
	struct end e = { 0 };
	struct rdma_cm_id *listener;
	struct rdma_cm_event *event;
	struct invitation invitation;
	struct ibv_wc wc;

	MUST(e.ch = rdma_create_event_channel());
	MUST(rdma_create_id(e.ch, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0);
	MUST(rdma_listen(listener, 1) == 0);
	MUST(rdma_get_cm_event(e.ch, &event) == 0 && event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	e.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	resources(&e);
	for (uint64_t i = 0; i < DEPTH; i++)
		receive(&e, i);
	invitation = (struct invitation){ (uintptr_t)e.memory + AREA_AT, e.mr->rkey };
	param.private_data = &invitation;
	param.private_data_len = sizeof invitation;
	MUST(rdma_accept(e.id, &param) == 0);
	must_event(e.ch, RDMA_CM_EVENT_ESTABLISHED);
	while (e.status == IBV_WC_SUCCESS && !e.disconnected) {
		if (!next(&e, &wc))
			continue;
		if ((wc.wr_id & 0xFF) == RECEIVED)
			request(&e, IBV_WR_SEND, (wc.wr_id & ~0xFFull) | SENT, in_at(wc.wr_id >> 8), wc.byte_len, 0, 0);
		else
			receive(&e, (wc.wr_id >> 8) + DEPTH);
	}
	ended(&e, "server");
	release(&e);
	MUST(rdma_destroy_id(listener) == 0);
}

/* Writes to the server's memory, and reads it back behind that. */
static void write_and_read(struct end *e, const struct invitation *to, uint64_t round)
{
	fill(e->memory + AREA_AT, AREA, ~round);
	memset(e->memory + BACK_AT, 0, AREA);
	request(e, IBV_WR_RDMA_WRITE, WRITTEN, AREA_AT, AREA, to->addr, to->rkey);
	request(e, IBV_WR_RDMA_READ, READ, BACK_AT, AREA, to->addr, to->rkey);
}

static void call(const char *host, uint16_t port, const char *stop, const char *mode)
{
	struct rdma_conn_param param = { .responder_resources = 4, .initiator_depth = 4, .rnr_retry_count = 7 };
	struct sockaddr_storage ss = sockaddr_of(host, port);
	struct end e = { 0 };
	struct rdma_cm_event *event;
	struct invitation to;
	struct ibv_wc wc;
	uint64_t sent = 0, back = 0, rounds = 0, told = 0, bad = 0, end;

	MUST(e.ch = rdma_create_event_channel());
	MUST(rdma_create_id(e.ch, &e.id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(e.id, NULL, (struct sockaddr *)&ss, 5000) == 0);
	must_event(e.ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(e.id, 5000) == 0);
	must_event(e.ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	resources(&e);
	for (uint64_t i = 0; i < DEPTH; i++)
		receive(&e, i);
	MUST(rdma_connect(e.id, &param) == 0);
	MUST(rdma_get_cm_event(e.ch, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_ESTABLISHED && event->param.conn.private_data_len >= sizeof to);
	memcpy(&to, event->param.conn.private_data, sizeof to);
	MUST(rdma_ack_cm_event(event) == 0);

	end = now_ms() + LONGEST_MS;
	write_and_read(&e, &to, rounds);
	while (e.status == IBV_WC_SUCCESS && !e.disconnected) {
		/* Once it is there it stays. */
		if (now_ms() < end && access(stop, F_OK) == 0)
			end = now_ms();
		bool more = now_ms() < end;

		if (!more && back == sent)
			break;
		if (now_ms() > end + END_MS)
			break;
		while (more && sent < back + DEPTH) {
			fill(e.memory + out_at(sent), length_of(sent), sent);
			request(&e, IBV_WR_SEND, sent << 8 | SENT, out_at(sent), length_of(sent), 0, 0);
			sent++;
		}
		if (back / 16 > told) {
			told = back / 16;
			printf("flows %llu\n", (unsigned long long)back);
			fflush(stdout);
		}
		if (!next(&e, &wc))
			continue;
		switch (wc.wr_id & 0xFF) {
		case RECEIVED:
			bad += wc.byte_len != length_of(back) || !same(e.memory + in_at(back), wc.byte_len, back);
			receive(&e, back + DEPTH);
			back++;
			break;
		case READ:
			bad += !same(e.memory + BACK_AT, AREA, ~rounds);
			rounds++;
			if (more)
				write_and_read(&e, &to, rounds);
			break;
		}
	}
	check(bad == 0, "what comes back is what was sent", "%llu differences", (unsigned long long)bad);
	check(back > 0 && rounds > 0, "there was traffic", "%llu messages, %llu rounds", (unsigned long long)back,
	      (unsigned long long)rounds);
	if (strcmp(mode, "broken")) {
		check(e.status == IBV_WC_SUCCESS && !e.disconnected && back == sent, "the traffic is whole",
		      "%s, disconnected %d, %llu of %llu messages", ibv_wc_status_str(e.status), e.disconnected,
		      (unsigned long long)back, (unsigned long long)sent);
		if (!strcmp(mode, "whole"))
			rdma_disconnect(e.id);
		else
			printf("quiet\n");
		fflush(stdout);
	} else {
		check(e.status != IBV_WC_SUCCESS || e.disconnected, "the connection fails", "it does not");
	}
	ended(&e, "client");
	printf("# %llu messages, %llu rounds, %s\n", (unsigned long long)back, (unsigned long long)rounds,
	       ibv_wc_status_str(e.status));
	release(&e);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "server"))
		serve(argv[2], (uint16_t)atoi(argv[3]));
	else if (argc == 6 && !strcmp(argv[1], "client"))
		call(argv[2], (uint16_t)atoi(argv[3]), argv[4], argv[5]);
	else
		return 2;
	return failures ? 1 : 0;
}
