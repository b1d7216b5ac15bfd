/* What the replicas of adapters (tests/adapters) set up a connection with: one connection, in either role,
 * then data in both directions, and the end.
 *
 *	adapter_peer listen [NAME=VALUE ...]	prints "port N", then what it sees
 *	adapter_peer connect PORT [NAME=VALUE ...]
 *
 *	data=TEXT	private data of the request or of the answer
 *	reject=TEXT	reject the request, with this private data
 *	ird=N ord=N	responder_resources and initiator_depth (4)
 *	close=self	disconnect; otherwise the replica ends the connection
 *	first=yes	the program sends before it has received anything
 *
 * Every line is for the replica to compare: the request, each event, and the end with the state of the queue
 * pair and the completions that were left. */
#include "common.h"

/* The replica knows them, too. */
#define MESSAGE 64
#define LENGTH 3000
#define TARGET_LENGTH (2 * LENGTH)

struct settings {
	const char *data, *reject;
	unsigned int ird, ord;
	bool close, first;
};

static struct rdma_event_channel *channel;
static unsigned int flushed;
static struct side side;
static unsigned char messages[4][MESSAGE], target[TARGET_LENGTH], source[LENGTH], sink[LENGTH], outgoing[MESSAGE];
static struct ibv_mr *messages_mr, *target_mr, *source_mr, *sink_mr, *outgoing_mr;

/* Content of kind "seed"; the replica computes the same. */
static unsigned char content(unsigned int seed, size_t i)
{
	return (unsigned char)(i * 7 + i / 251 + seed * 59);
}

static void fill(unsigned char *at, size_t length, unsigned int seed)
{
	for (size_t i = 0; i < length; i++)
		at[i] = content(seed, i);
}

static bool holds(const unsigned char *at, size_t length, unsigned int seed)
{
	for (size_t i = 0; i < length; i++)
		if (at[i] != content(seed, i))
			return false;
	return true;
}

static void show_private_data(const struct rdma_cm_event *event)
{
	const unsigned char *at = event->param.conn.private_data;

	for (unsigned int i = 0; at && i < event->param.conn.private_data_len; i++)
		printf("%02x", at[i]);
}

static enum rdma_cm_event_type next_event(struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	if (!readable(channel->fd, LIMIT_MS))
		die("no event in %d ms", LIMIT_MS);
	MUST(rdma_get_cm_event(channel, &event) == 0);
	type = event->event;
	if (type != RDMA_CM_EVENT_ADDR_RESOLVED && type != RDMA_CM_EVENT_ROUTE_RESOLVED) {
		printf("event %s status=%d ird=%d ord=%d data=", rdma_event_str(type) + strlen("RDMA_CM_EVENT_"),
		       event->status, event->param.conn.responder_resources, event->param.conn.initiator_depth);
		show_private_data(event);
		printf("\n");
		fflush(stdout);
	}
	if (id)
		*id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	return type;
}

static void post_receives(void)
{
	for (uint64_t i = 0; i < 4; i++) {
		struct ibv_sge sge = { (uintptr_t)messages[i], MESSAGE, messages_mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;

		MUST(ibv_post_recv(side.qp, &wr, &bad) == 0);
	}
}

static void prepare(struct rdma_cm_id *id)
{
	struct options options = { 0 };
	int both = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

	side.id = id;
	side_resources(&side, &options);
	MUST(messages_mr = ibv_reg_mr(side.pd, messages, sizeof messages, IBV_ACCESS_LOCAL_WRITE));
	MUST(target_mr = ibv_reg_mr(side.pd, target, sizeof target, both));
	MUST(source_mr = ibv_reg_mr(side.pd, source, sizeof source, 0));
	/* As iWARP demands of the sink of a Read; harmless elsewhere. */
	MUST(sink_mr = ibv_reg_mr(side.pd, sink, sizeof sink, both));
	MUST(outgoing_mr = ibv_reg_mr(side.pd, outgoing, sizeof outgoing, 0));
	post_receives();
}

static void work(enum ibv_wr_opcode opcode, struct ibv_mr *mr, uint32_t length, uint32_t rkey, uint64_t at)
{
	struct ibv_sge sge = { (uintptr_t)mr->addr, length, mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = opcode, .sg_list = &sge, .num_sge = 1, .opcode = opcode,
		.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { at, rkey },
	}, *bad;
	struct ibv_wc wc;

	MUST(ibv_post_send(side.qp, &wr, &bad) == 0);
	wc = poll_one(side.scq);
	if (wc.status != IBV_WC_SUCCESS)
		die("opcode %d: %s", (int)opcode, ibv_wc_status_str(wc.status));
}

static uint64_t number(const unsigned char *at, int bytes)
{
	uint64_t value = 0;

	while (bytes--)
		value = value << 8 | *at++;
	return value;
}

static void put(unsigned char *at, uint64_t value, int bytes)
{
	while (bytes--) {
		at[bytes] = (unsigned char)value;
		value >>= 8;
	}
}

/* False: the connection has ended. */
static bool receive(unsigned int slot, unsigned int seed)
{
	struct ibv_wc wc;
	uint64_t end = now_ms() + LIMIT_MS;

	while (!poll_within(side.rcq, &wc, 0)) {
		if (readable(channel->fd, 0))
			return false;
		if (now_ms() > end)
			die("nothing received in %d ms", LIMIT_MS);
	}
	if (wc.status == IBV_WC_WR_FLUSH_ERR) {
		flushed++;
		return false;
	}
	if (wc.status != IBV_WC_SUCCESS || wc.wr_id != slot || wc.byte_len != MESSAGE)
		die("receive %u: %s, slot %d, %u bytes", slot, ibv_wc_status_str(wc.status), (int)wc.wr_id, wc.byte_len);
	if (!holds(messages[slot] + 16, MESSAGE - 16, seed))
		die("message %u has other content", slot);
	return true;
}

/* The replica's Send names its memory; ours names ours. It writes the first half of that and reads the second. */
static void exchange(const struct settings *s)
{
	uint32_t rkey;
	uint64_t at;

	if (s->first) {
		fill(outgoing, MESSAGE, 8);
		work(IBV_WR_SEND, outgoing_mr, MESSAGE, 0, 0);
	}
	if (!receive(0, 1))
		return;
	rkey = (uint32_t)number(messages[0], 4);
	at = number(messages[0] + 4, 8);
	fill(source, LENGTH, 2);
	work(IBV_WR_RDMA_WRITE, source_mr, LENGTH, rkey, at);
	if (messages[0][12]) {
		work(IBV_WR_RDMA_READ, sink_mr, LENGTH, rkey, at + LENGTH);
		if (!holds(sink, LENGTH, 3))
			die("the Read has other content");
	}
	fill(target + LENGTH, LENGTH, 4);
	put(outgoing, target_mr->rkey, 4);
	put(outgoing + 4, (uintptr_t)target, 8);
	fill(outgoing + 16, MESSAGE - 16, 5);
	work(IBV_WR_SEND, outgoing_mr, MESSAGE, 0, 0);
	if (!receive(1, 6))
		return;
	if (!holds(target, LENGTH, 7))
		die("the replica's Write has other content");
	printf("data good\n");
	fflush(stdout);
}

static void end(void)
{
	struct ibv_wc wc;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	unsigned int other = 0;

	rdma_disconnect(side.id);
	while (ibv_poll_cq(side.rcq, 1, &wc) == 1 || ibv_poll_cq(side.scq, 1, &wc) == 1) {
		if (wc.status == IBV_WC_WR_FLUSH_ERR)
			flushed++;
		else
			other++;
	}
	MUST(ibv_query_qp(side.qp, &attr, IBV_QP_STATE, &init) == 0);
	printf("end state=%s flushed=%u other=%u\n", attr.qp_state == IBV_QPS_ERR ? "ERR" : "?", flushed, other);
	fflush(stdout);
}

/* From the first event of a connection to its end. */
static void live(const struct settings *s)
{
	if (next_event(NULL) != RDMA_CM_EVENT_ESTABLISHED)
		return;
	exchange(s);
	if (s->close)
		rdma_disconnect(side.id);
	next_event(NULL);
	end();
}

static void serve(const struct settings *s)
{
	struct rdma_conn_param param = {
		.responder_resources = (uint8_t)s->ird, .initiator_depth = (uint8_t)s->ord, .rnr_retry_count = 7,
		.private_data = s->data, .private_data_len = (uint8_t)strlen(s->data),
	};
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	struct rdma_cm_id *listener, *id;

	MUST(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0);
	MUST(rdma_listen(listener, 8) == 0);
	printf("port %d\n", ntohs(rdma_get_src_port(listener)));
	fflush(stdout);
	MUST(next_event(&id) == RDMA_CM_EVENT_CONNECT_REQUEST);
	if (s->reject) {
		MUST(rdma_reject(id, s->reject, (uint8_t)strlen(s->reject)) == 0);
		MUST(rdma_destroy_id(id) == 0);
		return;
	}
	prepare(id);
	MUST(rdma_accept(id, &param) == 0);
	live(s);
}

static void call(const struct settings *s, uint16_t port)
{
	struct rdma_conn_param param = {
		.responder_resources = (uint8_t)s->ird, .initiator_depth = (uint8_t)s->ord, .retry_count = 7,
		.rnr_retry_count = 7, .private_data = s->data, .private_data_len = (uint8_t)strlen(s->data),
	};
	struct sockaddr_storage ss = sockaddr_of(address, port);
	struct rdma_cm_id *id;

	MUST(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	MUST(next_event(NULL) == RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(id, 2000) == 0);
	MUST(next_event(NULL) == RDMA_CM_EVENT_ROUTE_RESOLVED);
	prepare(id);
	MUST(rdma_connect(id, &param) == 0);
	live(s);
}

int main(int argc, char **argv)
{
	struct settings s = { .data = "", .ird = 4, .ord = 4 };
	bool listens = argc > 1 && !strcmp(argv[1], "listen");
	int first = listens ? 2 : 3;

	if (!listens && argc < 3)
		die("usage");
	for (int i = first; i < argc; i++) {
		char *value = strchr(argv[i], '=');

		if (!value)
			die("%s", argv[i]);
		*value++ = 0;
		if (!strcmp(argv[i], "data"))
			s.data = value;
		else if (!strcmp(argv[i], "reject"))
			s.reject = value;
		else if (!strcmp(argv[i], "ird"))
			s.ird = (unsigned int)atoi(value);
		else if (!strcmp(argv[i], "ord"))
			s.ord = (unsigned int)atoi(value);
		else if (!strcmp(argv[i], "close"))
			s.close = !strcmp(value, "self");
		else if (!strcmp(argv[i], "first"))
			s.first = !strcmp(value, "yes");
		else
			die("%s", argv[i]);
	}
	MUST(channel = rdma_create_event_channel());
	if (listens)
		serve(&s);
	else
		call(&s, (uint16_t)atoi(argv[2]));
	return failures ? 1 : 0;
}
