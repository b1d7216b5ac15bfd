/* Two processes over UCX's libucp. They send patterns by tag, stream, active message, Put, Get and atomic
 * operations, both ways, and verify each byte; or the server is killed in the middle of something, and the client
 * must be called back with an error.
 *
 *	ucx ROLE ADDRESS PORT HOW [FAULT]
 *
 * ROLE is server or client. The server listens on a TCP port, over which both agree on what comes next. HOW says how
 * the endpoints find each other: "address" exchanges the workers' addresses over that socket, "listener" connects to
 * a listener of UCX, that is, through rdma_cm. FAULT is one of the names in faults[]. */
#include <sys/socket.h>

#include <ucp/api/ucp.h>

#include "common.h"

/* What a byte of message `seed` at `i` must be. */
static unsigned char pattern(uint32_t seed, size_t i)
{
	return (unsigned char)(seed * 131 + i * 7 + (i >> 8) * 13 + (i >> 16) * 29);
}

/* Around every size at which UCX 1.13 changes its way: inline, one segment of UD and RC, copied, by rendezvous. */
static const size_t sizes[] = { 1, 8, 63, 64, 65, 1000, 1017, 4096, 8191, 8257, 30000, 100001, 1048579 };
#define SIZES (sizeof sizes / sizeof *sizes)
#define ROOM ((size_t)1 << 21)

static bool server;
static int control = -1;
static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h ep;
static ucp_conn_request_h requested;
static ucs_status_t ep_status = UCS_OK;
static unsigned char *out, *in;

static void progress(void)
{
	if (!ucp_worker_progress(worker))
		sched_yield();
}

/* Bytes over the control socket. Progress is made meanwhile: the peer may need this end's. */
static void control_send(const void *data, size_t length)
{
	MUST(send(control, data, length, MSG_NOSIGNAL) == (ssize_t)length);
}

static bool control_try(void *data, size_t length)
{
	ssize_t n = recv(control, data, length, MSG_DONTWAIT | MSG_PEEK);

	if (n == 0)
		die("the peer is gone");
	return n == (ssize_t)length && recv(control, data, length, 0) == n;
}

static void control_receive(void *data, size_t length)
{
	for (uint64_t end = now_ms() + LIMIT_MS; !control_try(data, length); progress())
		if (now_ms() > end)
			die("nothing on the control socket in %d ms", LIMIT_MS);
}

/* Both ends have come here. */
static void meet(void)
{
	char byte = 'm';

	control_send(&byte, 1);
	control_receive(&byte, 1);
}

static void on_error(void *arg, ucp_ep_h failed, ucs_status_t status)
{
	(void)arg, (void)failed;
	ep_status = status;
}

/* Of a request, or of what was given instead of one. */
static ucs_status_t finish(ucs_status_ptr_t request)
{
	ucs_status_t status;
	uint64_t end = now_ms() + LIMIT_MS;

	if (!UCS_PTR_IS_PTR(request))
		return UCS_PTR_STATUS(request);
	while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
		if (now_ms() > end)
			die("a request is not complete in %d ms", LIMIT_MS);
		progress();
	}
	ucp_request_free(request);
	return status;
}

static void must_finish(ucs_status_ptr_t request, const char *what)
{
	ucs_status_t status = finish(request);

	if (status != UCS_OK)
		die("%s: %s", what, ucs_status_string(status));
}

/* --- set-up */

static void control_connect(uint16_t port)
{
	struct sockaddr_storage ss = sockaddr_of(address, port);
	socklen_t length = ss.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
	int one = 1, fd = socket(ss.ss_family, SOCK_STREAM, 0);

	MUST(fd >= 0);
	if (server) {
		MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
		MUST(bind(fd, (struct sockaddr *)&ss, length) == 0 && listen(fd, 1) == 0);
		MUST((control = accept(fd, NULL, NULL)) >= 0);
		close(fd);
	} else {
		MUST(connect(fd, (struct sockaddr *)&ss, length) == 0);
		control = fd;
	}
}

static void worker_open(void)
{
	ucp_params_t params = {
		.field_mask = UCP_PARAM_FIELD_FEATURES,
		.features = UCP_FEATURE_TAG | UCP_FEATURE_STREAM | UCP_FEATURE_AM | UCP_FEATURE_RMA |
			    UCP_FEATURE_AMO32 | UCP_FEATURE_AMO64,
	};
	ucp_worker_params_t wp = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE,
	};

	MUST(ucp_init(&params, NULL, &context) == UCS_OK);
	MUST(ucp_worker_create(context, &wp, &worker) == UCS_OK);
	MUST((out = malloc(ROOM)) && (in = malloc(ROOM)));
}

static void ep_open(ucp_ep_params_t params)
{
	params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
	params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
	params.err_handler.cb = on_error;
	MUST(ucp_ep_create(worker, &params, &ep) == UCS_OK);
}

static void by_address(void)
{
	ucp_address_t *own;
	size_t length, theirs;
	char peer[4096];

	MUST(ucp_worker_get_address(worker, &own, &length) == UCS_OK);
	control_send(&length, sizeof length);
	control_send(own, length);
	control_receive(&theirs, sizeof theirs);
	MUST(theirs <= sizeof peer);
	control_receive(peer, theirs);
	ucp_worker_release_address(worker, own);
	ep_open((ucp_ep_params_t){
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t *)peer,
	});
}

static void on_request(ucp_conn_request_h request, void *arg)
{
	(void)arg;
	requested = request;
}

static void by_listener(void)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	socklen_t length = sizeof ss;
	ucp_listener_h listener;
	ucp_listener_params_t params = {
		.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
		.sockaddr = { (struct sockaddr *)&ss, length }, .conn_handler = { on_request, NULL },
	};
	ucp_listener_attr_t attr = { .field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR };

	if (!server) {
		control_receive(&ss, sizeof ss);
		ep_open((ucp_ep_params_t){
			.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
			.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER, .sockaddr = { (struct sockaddr *)&ss, length },
		});
		return;
	}
	MUST(ucp_listener_create(worker, &params, &listener) == UCS_OK);
	MUST(ucp_listener_query(listener, &attr) == UCS_OK);
	control_send(&attr.sockaddr, sizeof attr.sockaddr);
	for (uint64_t end = now_ms() + LIMIT_MS; !requested; progress())
		if (now_ms() > end)
			die("no connection request in %d ms", LIMIT_MS);
	ep_open((ucp_ep_params_t){
		.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST, .conn_request = requested,
	});
	ucp_listener_destroy(listener);
}

/* --- messages: each kind has a way to send `out`, and one to receive into `in` */

static ucp_request_param_t plain;

static ucs_status_ptr_t tag_send(size_t size, uint32_t seed)
{
	return ucp_tag_send_nbx(ep, out, size, seed, &plain);
}

static ucs_status_ptr_t sync_send(size_t size, uint32_t seed)
{
	return ucp_tag_send_sync_nbx(ep, out, size, seed, &plain);
}

static ucs_status_ptr_t tag_receive(size_t size, uint32_t seed)
{
	return ucp_tag_recv_nbx(worker, in, size, seed, UINT64_MAX, &plain);
}

/* In three pieces of the same memory. */
static ucp_dt_iov_t pieces[3];

static ucp_request_param_t in_pieces(unsigned char *data, size_t size)
{
	size_t first = size / 3, second = size / 2 - first;

	pieces[0] = (ucp_dt_iov_t){ data, first };
	pieces[1] = (ucp_dt_iov_t){ data + first, second };
	pieces[2] = (ucp_dt_iov_t){ data + first + second, size - first - second };
	return (ucp_request_param_t){
		.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE, .datatype = ucp_dt_make_iov(),
	};
}

static ucs_status_ptr_t pieces_send(size_t size, uint32_t seed)
{
	ucp_request_param_t param = in_pieces(out, size);

	return ucp_tag_send_nbx(ep, pieces, 3, seed, &param);
}

static ucs_status_ptr_t pieces_receive(size_t size, uint32_t seed)
{
	ucp_request_param_t param = in_pieces(in, size);

	return ucp_tag_recv_nbx(worker, pieces, 3, seed, UINT64_MAX, &param);
}

static ucs_status_ptr_t stream_send(size_t size, uint32_t seed)
{
	(void)seed;
	return ucp_stream_send_nbx(ep, out, size, &plain);
}

static ucs_status_ptr_t stream_receive(size_t size, uint32_t seed)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_STREAM_RECV_FLAG_WAITALL,
	};
	size_t length;

	(void)seed;
	return ucp_stream_recv_nbx(ep, in, size, &length, &param);
}

/* An active message has its seed and size for a header. */
struct header { uint32_t seed; uint64_t size; };

static struct header am_header;
static bool am_came;
static ucs_status_ptr_t am_request;

static ucs_status_t on_message(void *arg, const void *header, size_t header_length, void *data, size_t length,
			       const ucp_am_recv_param_t *param)
{
	(void)arg;
	if (header_length != sizeof am_header || length > ROOM)
		die("an active message with a header of %zu bytes and %zu of data", header_length, length);
	memcpy(&am_header, header, sizeof am_header);
	am_came = true;
	am_request = NULL;
	if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
		am_request = ucp_am_recv_data_nbx(worker, data, in, length, &plain);
		return UCS_INPROGRESS;
	}
	memcpy(in, data, length);
	return UCS_OK;
}

static ucs_status_ptr_t am_send(size_t size, uint32_t seed)
{
	static struct header header;

	header = (struct header){ seed, size };
	return ucp_am_send_nbx(ep, 7, &header, sizeof header, out, size, &plain);
}

static ucs_status_ptr_t am_receive(size_t size, uint32_t seed)
{
	for (uint64_t end = now_ms() + LIMIT_MS; !am_came; progress())
		if (now_ms() > end)
			die("no active message in %d ms", LIMIT_MS);
	am_came = false;
	if (am_header.seed != seed || am_header.size != size)
		die("the header of message %u, %zu bytes says %u, %zu", seed, size, am_header.seed,
		    (size_t)am_header.size);
	return am_request;
}

static const struct kind {
	const char *name;
	ucs_status_ptr_t (*send)(size_t, uint32_t);
	ucs_status_ptr_t (*receive)(size_t, uint32_t);
} kinds[] = {
	{ "tag", tag_send, tag_receive },
	{ "tag, synchronous", sync_send, tag_receive },
	{ "tag, in pieces", pieces_send, pieces_receive },
	{ "tag, received in pieces", tag_send, pieces_receive },
	{ "stream", stream_send, stream_receive },
	{ "active message", am_send, am_receive },
};

/* The first byte that is wrong, or `size`. */
static size_t first_wrong(const unsigned char *data, size_t size, uint32_t seed)
{
	size_t i = 0;

	while (i < size && data[i] == pattern(seed, i))
		i++;
	return i;
}

static void fill(unsigned char *data, size_t size, uint32_t seed)
{
	for (size_t i = 0; i < size; i++)
		data[i] = pattern(seed, i);
}

/* All sizes of a kind, from this end or to it; the byte behind the message must stay. An active message is written
 * into the buffer when it comes, which may be while this end waits for the other one: so no message is sent before the
 * buffer is ready for it, or before the one in front of it has been looked at. */
static void one_way(const struct kind *kind, bool send, uint32_t seed)
{
	char name[80];

	for (size_t i = 0; i < SIZES; i++, seed++) {
		size_t size = sizes[i], wrong;

		if (send) {
			fill(out, size, seed);
			meet();
			must_finish(kind->send(size, seed), kind->name);
			meet();
			continue;
		}
		memset(in, 0xa5, size + 1);
		meet();
		must_finish(kind->receive(size, seed), kind->name);
		wrong = first_wrong(in, size, seed);
		if (wrong == size && in[size] == 0xa5) {
			meet();
			continue;
		}
		snprintf(name, sizeof name, "%s, %zu bytes", kind->name, size);
		check(false, name, "byte %zu is %#x", wrong, in[wrong]);
		return;
	}
	if (!send)
		check(true, kind->name, " ");
}

static void messages(void)
{
	ucp_am_handler_param_t handler = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB, .id = 7, .cb = on_message,
	};

	MUST(ucp_worker_set_am_recv_handler(worker, &handler) == UCS_OK);
	meet();
	for (uint32_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		one_way(&kinds[i], !server, 100 * i);
		one_way(&kinds[i], server, 100 * i + 50);
	}
}

/* Many messages at once, received in the opposite order: none is expected when it comes. */
#define MANY 200

static void many(bool send)
{
	ucs_status_ptr_t requests[MANY];
	size_t offset = 0, good = 0;

	for (uint32_t i = 0; i < MANY; i++) {
		uint32_t which = send ? i : MANY - 1 - i;
		size_t size = 1 + which * 37;

		if (send) {
			fill(out + offset, size, which);
			requests[i] = ucp_tag_send_nbx(ep, out + offset, size, 5000 + which, &plain);
		} else {
			requests[i] = ucp_tag_recv_nbx(worker, in + offset, size, 5000 + which, UINT64_MAX, &plain);
		}
		offset += size;
	}
	offset = 0;
	for (uint32_t i = 0; i < MANY; i++) {
		size_t size = 1 + (MANY - 1 - i) * 37;

		must_finish(requests[i], "one of many");
		good += !send && first_wrong(in + offset, size, MANY - 1 - i) == size;
		offset += size;
	}
	if (!send)
		check(good == MANY, "many messages at once", "%zu of %d are right", good, MANY);
	meet();
}

/* --- remote memory */

static unsigned char *region;
static ucp_mem_h mapped;
static uint64_t remote;
static ucp_rkey_h rkey;

static void map_region(void)
{
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH, .length = ROOM,
	};
	void *packed;
	size_t length, theirs;
	char peer[1024];
	uint64_t own;

	MUST(posix_memalign((void **)&region, 4096, ROOM) == 0);
	memset(region, 0xa5, ROOM);
	params.address = region;
	MUST(ucp_mem_map(context, &params, &mapped) == UCS_OK);
	MUST(ucp_rkey_pack(context, mapped, &packed, &length) == UCS_OK);
	own = (uintptr_t)region;
	control_send(&own, sizeof own);
	control_send(&length, sizeof length);
	control_send(packed, length);
	ucp_rkey_buffer_release(packed);
	control_receive(&remote, sizeof remote);
	control_receive(&theirs, sizeof theirs);
	MUST(theirs <= sizeof peer);
	control_receive(peer, theirs);
	MUST(ucp_ep_rkey_unpack(ep, peer, &rkey) == UCS_OK);
}

static void flush(void)
{
	must_finish(ucp_ep_flush_nbx(ep, &plain), "flush");
}

/* From this end into the peer's region, or from there into this one; nothing around it changes. */
static void puts_of(bool send)
{
	const size_t offset = 777;
	size_t wrong = 0;

	for (uint32_t i = 0; i < SIZES; i++) {
		size_t size = sizes[i];

		if (send) {
			fill(out, size, 300 + i);
			must_finish(ucp_put_nbx(ep, out, size, remote + offset, rkey, &plain), "put");
			flush();
			meet();
		} else {
			meet();
			wrong += first_wrong(region + offset, size, 300 + i) != size;
			wrong += region[offset - 1] != 0xa5 || region[offset + size] != 0xa5;
			memset(region, 0xa5, ROOM);
		}
		meet();
	}
	if (!send)
		check(wrong == 0, "put", "%zu are wrong", wrong);
}

static void gets_of(bool receive)
{
	size_t wrong = 0;

	fill(region, ROOM, server);
	meet();
	for (uint32_t i = 0; receive && i < SIZES; i++) {
		memset(in, 0xa5, sizes[i] + 1);
		must_finish(ucp_get_nbx(ep, in, sizes[i], remote, rkey, &plain), "get");
		wrong += first_wrong(in, sizes[i], !server) != sizes[i] || in[sizes[i]] != 0xa5;
	}
	if (receive)
		check(wrong == 0, "get", "%zu are wrong", wrong);
	meet();
}

/* One operation on the word of this width at the peer; what it was before, if `fetch`. */
static uint64_t atomic(ucp_atomic_op_t op, size_t width, uint64_t value, uint64_t other, bool fetch)
{
	union { uint32_t word; uint64_t wide; } operand, reply = { .wide = 0 };
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE | (fetch ? UCP_OP_ATTR_FIELD_REPLY_BUFFER : 0),
		.datatype = ucp_dt_make_contig(width), .reply_buffer = &reply,
	};

	operand.wide = 0;
	memcpy(&operand, &value, width);
	/* Of a compare and swap, the reply's memory has the value to be stored. */
	memcpy(&reply, &other, width);
	must_finish(ucp_atomic_op_nbx(ep, op, &operand, 1, remote, rkey, &param), "atomic operation");
	if (!fetch) {
		flush();
		return 0;
	}
	return width == 4 ? reply.word : reply.wide;
}

#define ADDS 100

/* Each end works on a word of the other's, at the same time. */
static void atomics_of(size_t width)
{
	const uint64_t all = width == 4 ? UINT32_MAX : UINT64_MAX, big = all - 40;
	uint64_t last = 0, wrong = 0;
	char name[80];

	memset(region, 0, 64);
	memcpy(region, &big, width);
	meet();
	for (uint64_t i = 0; i < ADDS; i++)
		wrong += atomic(UCP_ATOMIC_OP_ADD, width, 1, 0, true) != ((big + i) & all);
	for (uint64_t i = 0; i < ADDS; i++)
		atomic(UCP_ATOMIC_OP_ADD, width, 3, 0, false);
	meet();
	memcpy(&last, region, width);
	snprintf(name, sizeof name, "atomic add, %zu bits", 8 * width);
	check(wrong == 0 && last == ((big + 4 * ADDS) & all) && region[width] == 0, name, "%zu fetched wrong, end %#zx",
	      (size_t)wrong, (size_t)last);
	meet();
	wrong += atomic(UCP_ATOMIC_OP_SWAP, width, 77, 0, true) != ((big + 4 * ADDS) & all);
	wrong += atomic(UCP_ATOMIC_OP_CSWAP, width, 78, 99, true) != 77;
	wrong += atomic(UCP_ATOMIC_OP_CSWAP, width, 77, 0xf0f0, true) != 77;
	wrong += atomic(UCP_ATOMIC_OP_AND, width, 0xff00, 0, true) != 0xf0f0;
	wrong += atomic(UCP_ATOMIC_OP_OR, width, 0x000f, 0, true) != 0xf000;
	wrong += atomic(UCP_ATOMIC_OP_XOR, width, 0x00ff, 0, true) != 0xf00f;
	meet();
	last = 0;
	memcpy(&last, region, width);
	snprintf(name, sizeof name, "atomic swap, compare and swap, and, or, xor, %zu bits", 8 * width);
	check(wrong == 0 && last == 0xf0f0, name, "%zu fetched wrong, end %#zx", (size_t)wrong, (size_t)last);
	meet();
}

static void remote_memory(void)
{
	map_region();
	puts_of(!server);
	puts_of(server);
	gets_of(!server);
	gets_of(server);
	atomics_of(4);
	atomics_of(8);
	ucp_rkey_destroy(rkey);
	meet();
	MUST(ucp_mem_unmap(context, mapped) == UCS_OK);
}

/* --- the peer is killed */

/* Whether requests fail and the error handler is called. */
static void check_handler(ucs_status_ptr_t request, const char *name)
{
	ucs_status_t status;

	for (uint64_t end = now_ms() + LIMIT_MS; ep_status == UCS_OK && now_ms() < end;)
		progress();
	check(ep_status != UCS_OK, name, "the error handler is not called in %d ms", LIMIT_MS);
	status = finish(request);
	check(status != UCS_OK && status != UCS_INPROGRESS, "what was outstanding fails", "%s",
	      ucs_status_string(status));
	status = finish(ucp_tag_send_nbx(ep, out, 8, 1, &plain));
	check(status != UCS_OK, "what is sent later fails", "%s", ucs_status_string(status));
}

static void while_sending(void)
{
	ucs_status_ptr_t request = NULL;

	for (uint32_t i = 0; ep_status == UCS_OK && i < 1000000; i++) {
		if (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS) {
			progress();
			continue;
		}
		if (UCS_PTR_IS_PTR(request))
			ucp_request_free(request);
		request = ucp_tag_send_nbx(ep, out, 3000, 1, &plain);
		if (UCS_PTR_IS_ERR(request))
			break;
	}
	check_handler(UCS_PTR_IS_PTR(request) ? request : UCS_STATUS_PTR(UCS_ERR_CANCELED),
		      "killed while it receives: the error handler is called");
}

/* The receive is the worker's, not the endpoint's: it stays, and is cancelled. */
static void while_waiting(void)
{
	ucs_status_ptr_t request = ucp_tag_recv_nbx(worker, in, ROOM, 1, UINT64_MAX, &plain);

	MUST(UCS_PTR_IS_PTR(request));
	for (uint64_t end = now_ms() + LIMIT_MS; ep_status == UCS_OK && now_ms() < end;)
		progress();
	ucp_request_cancel(worker, request);
	check_handler(request, "killed while nothing is sent: the error handler is called");
}

/* The peer never receives it, so it has not been read when the peer is killed. */
static void while_reading(void)
{
	check_handler(ucp_tag_send_nbx(ep, out, ROOM, 99, &plain),
		      "killed before it reads a large message: the error handler is called");
}

static const struct fault {
	const char *name;
	void (*client)(void);
} faults[] = {
	{ "sending", while_sending },
	{ "waiting", while_waiting },
	{ "reading", while_reading },
};

/* The server receives a few messages, and is gone without a word. */
static void killed(const char *name)
{
	const struct fault *fault = faults;

	while (strcmp(fault->name, name))
		MUST(++fault < faults + sizeof faults / sizeof *faults);
	for (uint32_t i = 0; i < 20; i++)
		one_way(&kinds[0], !server, 10 + i);
	meet();
	if (server) {
		for (uint64_t end = now_ms() + 300; now_ms() < end;)
			progress();
		raise(SIGKILL);
	}
	fault->client();
}

static void close_all(bool force)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = force ? UCP_EP_CLOSE_FLAG_FORCE : 0,
	};
	ucs_status_t status;

	/* Over datagrams nobody acknowledges what an endpoint that is closed has not: a last message whose acknowledgement
	 * was lost is then sent again for nothing, and the other end's close fails after 30 seconds. */
	if (!force) {
		flush();
		meet();
	}
	status = finish(ucp_ep_close_nbx(ep, &param));
	/* The peer may have closed before. */
	check(force || status == UCS_OK || status == UCS_ERR_CONNECTION_RESET, "the endpoint closes", "%s",
	      ucs_status_string(status));
	/* Over datagrams the peer's close needs this worker's answers. */
	if (!force)
		meet();
	ucp_worker_destroy(worker);
	ucp_cleanup(context);
}

int main(int argc, char **argv)
{
	MUST(argc > 4);
	server = strcmp(argv[1], "server") == 0;
	address = argv[2];
	alarm(GROUP_LIMIT);
	control_connect((uint16_t)atoi(argv[3]));
	worker_open();
	if (strcmp(argv[4], "listener") == 0)
		by_listener();
	else
		by_address();
	if (argc > 5) {
		killed(argv[5]);
	} else {
		messages();
		many(!server);
		many(server);
		remote_memory();
		check(ep_status == UCS_OK, "the error handler was not called", "%s", ucs_status_string(ep_status));
	}
	close_all(argc > 5);
	return failures ? 1 : 0;
}
