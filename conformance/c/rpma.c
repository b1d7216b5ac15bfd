/* Remote memory through librpma: what is written and flushed is in the server's memory, and can be read back.
 *
 *	rpma server ADDRESS PORT
 *	rpma client ADDRESS PORT
 *
 * What librpma's examples do, with ordinary memory for persistent memory, and each byte checked by the
 * server's program and by reading back. One line per step: "ok name" or "FAIL name: what was seen". */
#include <inttypes.h>
#include <librpma.h>

#include "common.h"

#define REGION (4u << 20)
#define MANY 48u		/* Writes behind one flush */
#define DEPTH 64u

enum what {
	PATTERN,		/* [offset, length) holds the pattern of the seed */
	BYE,
};

struct request {
	uint32_t what, seed, offset, length;
};

struct answer {
	uint32_t good, at, seen;
};

#define RPMA(call) do { int got_ = (call); if (got_) die("%s: %s", #call, rpma_err_2str(got_)); } while (0)

static unsigned char pattern(uint32_t seed, uint32_t i)
{
	return (unsigned char)(seed * 31 + i * 7 + (i >> 8) * 13 + (i >> 16) * 5);
}

static void fill(unsigned char *bytes, uint32_t seed, uint32_t offset, uint32_t length)
{
	for (uint32_t i = offset; i < offset + length; i++)
		bytes[i] = pattern(seed, i);
}

/* The offset of the first byte that is not the pattern's, or the end. */
static uint32_t matches(const unsigned char *bytes, uint32_t seed, uint32_t offset, uint32_t length)
{
	uint32_t i = offset;

	while (i < offset + length && bytes[i] == pattern(seed, i))
		i++;
	return i;
}

static void *memory(size_t length)
{
	void *all = NULL;

	MUST(posix_memalign(&all, 4096, length) == 0);
	memset(all, 0, length);
	return all;
}

/* What both ends have. */
struct end {
	struct rpma_peer *peer;
	struct rpma_conn_cfg *cfg;
	struct rpma_conn *conn;
	struct rpma_cq *cq;
	unsigned char *region;
	struct rpma_mr_local *region_mr;
	union { struct request q; struct answer a; } *in, *out;
	struct rpma_mr_local *in_mr, *out_mr;
};

static void prepare(struct end *e, const char *at, enum rpma_util_ibv_context_type type, int usage)
{
	struct ibv_context *context;

	RPMA(rpma_utils_get_ibv_context(at, type, &context));
	RPMA(rpma_peer_new(context, &e->peer));
	RPMA(rpma_conn_cfg_new(&e->cfg));
	RPMA(rpma_conn_cfg_set_timeout(e->cfg, LIMIT_MS));
	RPMA(rpma_conn_cfg_set_sq_size(e->cfg, DEPTH));
	RPMA(rpma_conn_cfg_set_cq_size(e->cfg, 2 * DEPTH));
	e->region = memory(REGION);
	RPMA(rpma_mr_reg(e->peer, e->region, REGION, usage, &e->region_mr));
	e->in = memory(sizeof *e->in);
	RPMA(rpma_mr_reg(e->peer, e->in, sizeof *e->in, RPMA_MR_USAGE_RECV, &e->in_mr));
	e->out = memory(sizeof *e->out);
	RPMA(rpma_mr_reg(e->peer, e->out, sizeof *e->out, RPMA_MR_USAGE_SEND, &e->out_mr));
}

static void give_back(struct end *e)
{
	RPMA(rpma_conn_delete(&e->conn));
	RPMA(rpma_mr_dereg(&e->region_mr));
	RPMA(rpma_mr_dereg(&e->in_mr));
	RPMA(rpma_mr_dereg(&e->out_mr));
	RPMA(rpma_conn_cfg_delete(&e->cfg));
	RPMA(rpma_peer_delete(&e->peer));
	free(e->region);
	free(e->in);
	free(e->out);
}

static void event(struct end *e, enum rpma_conn_event wanted)
{
	enum rpma_conn_event got = RPMA_CONN_UNDEFINED;

	RPMA(rpma_conn_next_event(e->conn, &got));
	if (got != wanted)
		die("event %s, want %s", rpma_utils_conn_event_2str(got), rpma_utils_conn_event_2str(wanted));
}

/* Sleeps until there is a completion, which must be a success. */
static struct ibv_wc completion(struct end *e)
{
	struct ibv_wc wc;
	int got;

	while ((got = rpma_cq_get_wc(e->cq, 1, &wc, NULL)) == RPMA_E_NO_COMPLETION) {
		got = rpma_cq_wait(e->cq);
		if (got && got != RPMA_E_NO_COMPLETION)
			die("rpma_cq_wait: %s", rpma_err_2str(got));
	}
	RPMA(got);
	if (wc.status != IBV_WC_SUCCESS)
		die("completion %s of opcode %d", ibv_wc_status_str(wc.status), wc.opcode);
	return wc;
}

static void serve(const char *at, const char *port)
{
	struct end e = { 0 };
	struct rpma_ep *ep;
	struct rpma_conn_req *request;
	unsigned char descriptor[256];
	size_t length;
	bool going = true;

	prepare(&e, at, RPMA_UTIL_IBV_CONTEXT_LOCAL,
		RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY);
	RPMA(rpma_mr_get_descriptor_size(e.region_mr, &length));
	MUST(length <= sizeof descriptor);
	RPMA(rpma_mr_get_descriptor(e.region_mr, descriptor));
	RPMA(rpma_ep_listen(e.peer, at, port, &ep));
	RPMA(rpma_ep_next_conn_req(ep, e.cfg, &request));
	RPMA(rpma_conn_req_recv(request, e.in_mr, 0, sizeof *e.in, NULL));
	struct rpma_conn_private_data data = { descriptor, (uint8_t)length };
	RPMA(rpma_conn_req_connect(&request, &data, &e.conn));
	RPMA(rpma_conn_get_cq(e.conn, &e.cq));
	event(&e, RPMA_CONN_ESTABLISHED);
	while (going) {
		struct ibv_wc wc = completion(&e);

		if (!(wc.opcode & IBV_WC_RECV))
			continue;
		struct request q = e.in->q;
		/* A Write with immediate data brings no request: its number is the seed. */
		if (wc.wc_flags & IBV_WC_WITH_IMM)
			q = (struct request){ PATTERN, ntohl(wc.imm_data), 0, wc.byte_len };
		going = q.what != BYE;
		if (!going)
			break;
		uint32_t end = matches(e.region, q.seed, q.offset, q.length);
		e.out->a = (struct answer){ end == q.offset + q.length, end, end < REGION ? e.region[end] : 0 };
		RPMA(rpma_recv(e.conn, e.in_mr, 0, sizeof *e.in, NULL));
		RPMA(rpma_send(e.conn, e.out_mr, 0, sizeof e.out->a, RPMA_F_COMPLETION_ALWAYS, NULL));
	}
	event(&e, RPMA_CONN_CLOSED);
	RPMA(rpma_conn_disconnect(e.conn));
	RPMA(rpma_ep_shutdown(&ep));
	give_back(&e);
	printf("ok served\n");
}

/* Waits for the server's answer and what else has completed before it. */
static void answered(struct end *e, const char *name)
{
	while (!(completion(e).opcode & IBV_WC_RECV))
		;
	check(e->in->a.good, name, "byte %" PRIu32 " at the server is %#" PRIx32, e->in->a.at, e->in->a.seen);
}

/* Asks the server's program what it sees. */
static void seen_there(struct end *e, const char *name, uint32_t seed, uint32_t offset, uint32_t length)
{
	e->out->q = (struct request){ PATTERN, seed, offset, length };
	RPMA(rpma_recv(e->conn, e->in_mr, 0, sizeof *e->in, NULL));
	RPMA(rpma_send(e->conn, e->out_mr, 0, sizeof e->out->q, RPMA_F_COMPLETION_ALWAYS, NULL));
	answered(e, name);
}

/* Waits for the one completion of an operation with this context. */
static void done(struct end *e, const void *context)
{
	MUST(completion(e).wr_id == (uintptr_t)context);
}

static void read_back(struct end *e, struct rpma_mr_remote *there, const char *name, uint32_t seed, uint32_t offset,
		      uint32_t length)
{
	memset(e->region + offset, 0, length);
	RPMA(rpma_read(e->conn, e->region_mr, offset, there, offset, length, RPMA_F_COMPLETION_ALWAYS, e->region));
	done(e, e->region);
	uint32_t end = matches(e->region, seed, offset, length);
	check(end == offset + length, name, "byte %" PRIu32 " read back is %#x", end, end < REGION ? e->region[end] : 0);
}

static void steps(struct end *e, struct rpma_mr_remote *there)
{
	static const uint32_t lengths[] = { 1, 8, 4095, 4096, 65537, 1u << 20, REGION - 777 };
	char name[80];
	uint32_t seed = 1;

	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++, seed++) {
		uint32_t length = lengths[i], offset = i % 2 ? 0 : 777;

		fill(e->region, seed, offset, length);
		RPMA(rpma_write(e->conn, there, offset, e->region_mr, offset, length, RPMA_F_COMPLETION_ON_ERROR, NULL));
		RPMA(rpma_flush(e->conn, there, offset, length, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, there));
		done(e, there);
		snprintf(name, sizeof name, "%" PRIu32 " bytes written and flushed are there", length);
		seen_there(e, name, seed, offset, length);
		snprintf(name, sizeof name, "%" PRIu32 " bytes are read back", length);
		read_back(e, there, name, seed, offset, length);
	}

	fill(e->region, seed, 0, MANY * 5000);
	for (uint32_t i = 0; i < MANY; i++)
		RPMA(rpma_write(e->conn, there, i * 5000, e->region_mr, i * 5000, 5000, RPMA_F_COMPLETION_ON_ERROR, NULL));
	RPMA(rpma_flush(e->conn, there, 0, MANY * 5000, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, there));
	done(e, there);
	seen_there(e, "many Writes behind one flush are there", seed, 0, MANY * 5000);
	read_back(e, there, "and are read back", seed, 0, MANY * 5000);

	/* A log: the data, a flush, and then the pointer to it in one piece. */
	seed++;
	fill(e->region, seed, 4096, 10000);
	RPMA(rpma_write(e->conn, there, 4096, e->region_mr, 4096, 10000, RPMA_F_COMPLETION_ON_ERROR, NULL));
	RPMA(rpma_flush(e->conn, there, 4096, 10000, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ON_ERROR, NULL));
	fill(e->region, seed, 64, 8);
	RPMA(rpma_atomic_write(e->conn, there, 64, (const char *)e->region + 64, RPMA_F_COMPLETION_ON_ERROR, NULL));
	RPMA(rpma_flush(e->conn, there, 64, 8, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS, there));
	done(e, there);
	seen_there(e, "eight bytes written in one piece are there", seed, 64, 8);
	seen_there(e, "and what was written before them", seed, 4096, 10000);

	seed++;
	fill(e->region, seed, 0, 100000);
	RPMA(rpma_recv(e->conn, e->in_mr, 0, sizeof *e->in, NULL));
	RPMA(rpma_write_with_imm(e->conn, there, 0, e->region_mr, 0, 100000, RPMA_F_COMPLETION_ON_ERROR, seed, NULL));
	answered(e, "a Write with immediate data is there when it is announced");
}

static void use(const char *at, const char *port)
{
	struct end e = { 0 };
	struct rpma_conn_req *request;
	struct rpma_conn_private_data data;
	struct rpma_mr_remote *there;
	size_t size;

	prepare(&e, at, RPMA_UTIL_IBV_CONTEXT_REMOTE, RPMA_MR_USAGE_READ_DST | RPMA_MR_USAGE_WRITE_SRC);
	RPMA(rpma_conn_req_new(e.peer, at, port, e.cfg, &request));
	RPMA(rpma_conn_req_connect(&request, NULL, &e.conn));
	event(&e, RPMA_CONN_ESTABLISHED);
	RPMA(rpma_conn_get_cq(e.conn, &e.cq));
	RPMA(rpma_conn_get_private_data(e.conn, &data));
	RPMA(rpma_mr_remote_from_descriptor(data.ptr, data.len, &there));
	RPMA(rpma_mr_remote_get_size(there, &size));
	check(size == REGION, "the server's memory has its size", "%zu", size);
	steps(&e, there);
	e.out->q = (struct request){ .what = BYE };
	RPMA(rpma_send(e.conn, e.out_mr, 0, sizeof e.out->q, RPMA_F_COMPLETION_ALWAYS, e.out));
	done(&e, e.out);
	RPMA(rpma_conn_disconnect(e.conn));
	event(&e, RPMA_CONN_CLOSED);
	check(true, "closed", "");
	RPMA(rpma_mr_remote_delete(&there));
	give_back(&e);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		die("rpma server|client ADDRESS PORT");
	if (strcmp(argv[1], "server") == 0)
		serve(argv[2], argv[3]);
	else
		use(argv[2], argv[3]);
	return failures != 0;
}
