/* What the scripted attacker of tests/hostile.rs talks to: a server that accepts whoever comes, with every
 * kind of memory region between guard pages, and says after each connection what became of it.
 *
 *	victim serve [spin]		commands on standard input, answers and reports on standard output
 *	victim innocent PORT		an honest client of the same server: "rounds N" on standard input
 *
 * Every byte the server maps for its peers is 0xa5 until somebody writes it; after each connection it says
 * which bytes changed and paints them again. A page without any access lies on both sides of every region,
 * so that a byte beyond it is a signal, and within the region's own pages the paint tells. */
#include "common.h"
#include "victim_memory.h"

#define INNOCENT (64u << 10)

/* ------------------------------------------------------------- connections */

struct conn {
	struct conn *next;
	struct rdma_cm_id *id;
	struct ibv_cq *scq, *rcq;
	bool innocent, client, established, broken;
	unsigned int posted, events;
	char async[64], recvs[512], sends[512];
	unsigned char *buffers;		/* an innocent one's, SLOTS of them, and the region behind them */
	struct ibv_mr *mr, *region;
};

/* What the next connection gets. */
static struct {
	unsigned int recvs, recvlen, reads, readlen, sends, sendlen, atomics, hold, cqe;
	unsigned int qp_access, rnr, timer, depth, stranger;
} profile;

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener;
static struct ibv_comp_channel *completions;
static struct conn *conns;
static struct rdma_cm_id *held;
static unsigned long requests, ended, open_conns;
static bool spin;

static void default_profile(void)
{
	memset(&profile, 0, sizeof profile);
	profile.recvs = 2;
	profile.recvlen = 64;
	profile.readlen = 64;
	profile.sendlen = 16;
	profile.cqe = 64;
	profile.qp_access = LOCAL | READ | WRITE | IBV_ACCESS_REMOTE_ATOMIC;
	profile.rnr = 7;
	profile.depth = 4;
}

static struct conn *conn_of_qp(const struct ibv_qp *qp)
{
	struct conn *c = conns;

	while (c && c->id->qp != qp)
		c = c->next;
	return c;
}

static struct conn *conn_of_cq(const struct ibv_cq *cq)
{
	struct conn *c = conns;

	while (c && c->scq != cq && c->rcq != cq)
		c = c->next;
	return c;
}

static void note(char *list, size_t size, const char *format, ...)
{
	size_t at = strlen(list);
	va_list ap;

	if (at + 24 > size)
		return;
	if (at)
		list[at++] = ',';
	va_start(ap, format);
	vsnprintf(list + at, size - at, format, ap);
	va_end(ap);
}

static void post_receives(struct conn *c, unsigned int n)
{
	struct region *r = region("recv");

	while (n--) {
		struct ibv_sge sge = { (uintptr_t)r->at + c->posted % SLOTS * SLOT, profile.recvlen, r->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = c->posted, .sg_list = &sge, .num_sge = 1 }, *bad;

		MUST(ibv_post_recv(c->id->qp, &wr, &bad) == 0);
		c->posted++;
	}
}

static void post_work(struct conn *c)
{
	struct region *sink = region("sink"), *local = region("local");

	for (unsigned int i = 0; i < profile.reads; i++) {
		struct ibv_sge sge = { (uintptr_t)sink->at + i * profile.readlen, profile.readlen, sink->mr->lkey };
		struct ibv_send_wr wr = {
			.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
			.send_flags = IBV_SEND_SIGNALED, .wr.rdma = { 0x1000, 0x01010101 },
		}, *bad;

		(void)ibv_post_send(c->id->qp, &wr, &bad);
	}
	for (unsigned int i = 0; i < profile.atomics; i++) {
		struct ibv_sge sge = { (uintptr_t)sink->at + i * 8, 8, sink->mr->lkey };
		struct ibv_send_wr wr = {
			.wr_id = 200 + i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
			.send_flags = IBV_SEND_SIGNALED, .wr.atomic = { 0x1000, 1, 0, 0x01010101 },
		}, *bad;
		int refused = ibv_post_send(c->id->qp, &wr, &bad);

		if (refused)
			note(c->sends, sizeof c->sends, "%s", refused == EOPNOTSUPP ? "unsupported" : "refused");
	}
	for (unsigned int i = 0; i < profile.sends; i++) {
		struct ibv_sge sge = { (uintptr_t)local->at, profile.sendlen, local->mr->lkey };
		struct ibv_send_wr wr = {
			.wr_id = 100 + i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
			.send_flags = IBV_SEND_SIGNALED,
		}, *bad;

		(void)ibv_post_send(c->id->qp, &wr, &bad);
	}
}

static void make_qp(struct conn *c)
{
	struct ibv_comp_channel *cc = c->innocent ? completions : NULL;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp_attr change = { .qp_access_flags = (unsigned int)profile.qp_access };

	MUST(c->scq = ibv_create_cq(context, (int)profile.cqe, NULL, cc, 0));
	MUST(c->rcq = ibv_create_cq(context, (int)profile.cqe, NULL, cc, 0));
	attr.send_cq = c->scq;
	attr.recv_cq = c->rcq;
	MUST(rdma_create_qp(c->id, profile.stranger && !c->innocent ? other_pd : pd, &attr) == 0);
	if (!c->innocent)
		MUST(ibv_modify_qp(c->id->qp, &change, IBV_QP_ACCESS_FLAGS) == 0);
	if (profile.timer) {
		change.min_rnr_timer = (uint8_t)profile.timer;
		MUST(ibv_modify_qp(c->id->qp, &change, IBV_QP_MIN_RNR_TIMER) == 0);
	}
}

static struct conn *new_conn(struct rdma_cm_id *id)
{
	struct conn *c = calloc(1, sizeof *c);

	MUST(c);
	c->id = id;
	id->context = c;
	c->next = conns;
	conns = c;
	open_conns++;
	return c;
}

static void note_completion(char *list, size_t size, const struct ibv_wc *wc)
{
	if (wc->status == IBV_WC_SUCCESS)
		note(list, size, "ok%u", wc->byte_len);
	else
		note(list, size, "e%d", wc->status);
}

static void drain(struct ibv_cq *cq, char *list, size_t size)
{
	struct ibv_wc wc;
	int n;

	while ((n = ibv_poll_cq(cq, 1, &wc)) == 1)
		note_completion(list, size, &wc);
	if (n < 0)
		note(list, size, "poll%d", n);
}

static void take_async(void)
{
	struct ibv_async_event event;

	while (readable(context->async_fd, 0) && ibv_get_async_event(context, &event) == 0) {
		struct conn *c = NULL;

		switch (event.event_type) {
		case IBV_EVENT_CQ_ERR:
			c = conn_of_cq(event.element.cq);
			break;
		case IBV_EVENT_QP_FATAL:
		case IBV_EVENT_QP_REQ_ERR:
		case IBV_EVENT_QP_ACCESS_ERR:
		case IBV_EVENT_COMM_EST:
		case IBV_EVENT_SQ_DRAINED:
		case IBV_EVENT_QP_LAST_WQE_REACHED:
			c = conn_of_qp(event.element.qp);
			break;
		/* An address of this machine has come or gone. */
		case IBV_EVENT_GID_CHANGE:
			ibv_ack_async_event(&event);
			continue;
		default:
			break;
		}
		if (c)
			note(c->async, sizeof c->async, "%d", event.event_type);
		else
			printf("stray async %d\n", event.event_type);
		ibv_ack_async_event(&event);
	}
}

/* The connection is over: everything that is told of it must have been told by now. */
static void end(struct conn *c, const char *how)
{
	struct conn **at = &conns;
	const char *state;

	/* As programs answer DISCONNECTED. A queue pair whose peer has gone is in RTS until then. */
	rdma_disconnect(c->id);
	state = state_name(state_of(c->id->qp));
	take_async();
	drain(c->scq, c->sends, sizeof c->sends);
	drain(c->rcq, c->recvs, sizeof c->recvs);
	printf("%s how=%s est=%d state=%s async=%s recv=%s send=%s", c->innocent ? "gone" : "ended", how, c->established, state,
	       c->async, c->recvs, c->sends);
	print_changes();
	printf("\n");
	while (*at != c)
		at = &(*at)->next;
	*at = c->next;
	rdma_destroy_qp(c->id);
	if (c->events)
		ibv_ack_cq_events(c->rcq, c->events);
	MUST(ibv_destroy_cq(c->scq) == 0);
	MUST(ibv_destroy_cq(c->rcq) == 0);
	if (c->mr) {
		MUST(ibv_dereg_mr(c->mr) == 0);
		MUST(ibv_dereg_mr(c->region) == 0);
		munmap(c->buffers - PAGE, SLOTS * PAGE + INNOCENT + 2 * PAGE);
	}
	MUST(rdma_destroy_id(c->id) == 0);
	free(c);
	open_conns--;
	ended++;
}

/* ------------------------------------------------------------- the innocent one */

struct offer {
	uint64_t addr;
	uint32_t rkey, length;
};

static void innocent_receive(struct conn *c, uint64_t slot)
{
	struct ibv_sge sge = { (uintptr_t)c->buffers + slot * PAGE, PAGE, c->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	if (ibv_post_recv(c->id->qp, &wr, &bad))
		c->broken = true;
}

static void innocent_setup(struct conn *c, struct rdma_conn_param *param, struct offer *offer)
{
	c->buffers = guarded(SLOTS * PAGE + INNOCENT);
	MUST(c->mr = ibv_reg_mr(pd, c->buffers, SLOTS * PAGE, LOCAL));
	MUST(c->region = ibv_reg_mr(pd, c->buffers + SLOTS * PAGE, INNOCENT, LOCAL | READ | WRITE));
	for (uint64_t slot = 0; slot < SLOTS; slot++)
		innocent_receive(c, slot);
	MUST(ibv_req_notify_cq(c->rcq, 0) == 0);
	offer->addr = (uintptr_t)c->region->addr;
	offer->rkey = c->region->rkey;
	offer->length = INNOCENT;
	param->private_data = offer;
	param->private_data_len = sizeof *offer;
}

/* Sends back what came. */
static void innocent_serve(struct conn *c)
{
	struct ibv_wc wc;

	MUST(ibv_req_notify_cq(c->rcq, 0) == 0);
	while (ibv_poll_cq(c->rcq, 1, &wc) == 1) {
		struct ibv_sge sge = { (uintptr_t)c->buffers + wc.wr_id * PAGE, wc.byte_len, c->mr->lkey };
		struct ibv_send_wr wr = {
			.wr_id = wc.wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
			.send_flags = IBV_SEND_SIGNALED,
		}, *bad;

		if (wc.status != IBV_WC_SUCCESS || ibv_post_send(c->id->qp, &wr, &bad))
			return;
		while (!poll_within(c->scq, &wc, LIMIT_MS))
			die("the echo does not complete");
		if (wc.status != IBV_WC_SUCCESS)
			return;
		innocent_receive(c, wc.wr_id);
	}
}

/* ------------------------------------------------------------- rdma_cm */

static void accept_request(struct rdma_cm_id *id, bool innocent)
{
	struct rdma_conn_param param = {
		.responder_resources = (uint8_t)profile.depth, .initiator_depth = (uint8_t)profile.depth,
		.retry_count = 7, .rnr_retry_count = (uint8_t)profile.rnr,
	};
	struct conn *c = new_conn(id);
	struct offer offer;

	c->innocent = innocent;
	make_qp(c);
	if (innocent)
		innocent_setup(c, &param, &offer);
	else
		post_receives(c, profile.recvs);
	if (rdma_accept(id, &param))
		end(c, "accept");
}

static void handle_event(void)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	enum rdma_cm_event_type type;
	bool innocent;
	struct conn *c;

	MUST(rdma_get_cm_event(channel, &event) == 0);
	id = event->id;
	type = event->event;
	innocent = event->param.conn.private_data_len >= 8 && event->param.conn.private_data &&
		!memcmp(event->param.conn.private_data, "innocent", 8);
	MUST(rdma_ack_cm_event(event) == 0);
	c = type == RDMA_CM_EVENT_CONNECT_REQUEST ? NULL : id->context;
	switch (type) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		requests++;
		if (!innocent && profile.hold) {
			if (held) {
				rdma_reject(held, NULL, 0);
				rdma_destroy_id(held);
			}
			held = id;
			printf("held\n");
		} else {
			accept_request(id, innocent);
		}
		break;
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		MUST(rdma_resolve_route(id, 2000) == 0);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED: {
		struct rdma_conn_param param = {
			.responder_resources = 4, .initiator_depth = (uint8_t)profile.depth, .retry_count = 7,
			.rnr_retry_count = (uint8_t)profile.rnr,
			.private_data = "victim", .private_data_len = 6,
		};

		make_qp(c);
		post_receives(c, profile.recvs);
		if (rdma_connect(id, &param))
			end(c, "connect");
		break;
	}
	case RDMA_CM_EVENT_ESTABLISHED:
		c->established = true;
		if (!c->innocent)
			post_work(c);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
	case RDMA_CM_EVENT_CONNECT_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_REJECTED:
		end(c, rdma_event_str(type) + strlen("RDMA_CM_EVENT_"));
		break;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		break;
	default:
		die("event %s", rdma_event_str(type));
	}
}

/* ------------------------------------------------------------- windows */

static struct window {
	char name[16];
	struct ibv_mw *mw;
} windows[16];
#define WINDOWS (sizeof windows / sizeof *windows)

/* The window of this name, or a free place for it. */
static struct window *window(const char *name)
{
	struct window *w = windows;

	while (w < windows + WINDOWS && !(w->mw && !strcmp(w->name, name)))
		w++;
	for (size_t i = 0; w == windows + WINDOWS && i < WINDOWS; i++)
		if (!windows[i].mw)
			w = &windows[i];
	MUST(w < windows + WINDOWS);
	return w;
}

static void free_window(struct window *w)
{
	MUST(w->mw && ibv_dealloc_mw(w->mw) == 0);
	w->mw = NULL;
}

static struct conn *latest(void)
{
	struct conn *c = conns;

	while (c && c->innocent)
		c = c->next;
	return c;
}

/* The latest connection, when it takes work requests. */
static struct conn *established(void)
{
	while (!latest() || !latest()->established) {
		MUST(readable(channel->fd, LIMIT_MS));
		handle_event();
	}
	return latest();
}

/* A work request on windows has been posted with this number. Waits until it has succeeded. */
static void done_with(struct conn *c, uint64_t number)
{
	struct ibv_wc wc;

	do {
		MUST(poll_within(c->scq, &wc, LIMIT_MS));
		if (wc.wr_id != number || wc.status != IBV_WC_SUCCESS)
			note_completion(c->sends, sizeof c->sends, &wc);
	} while (wc.wr_id != number);
}

#define WINDOW_WORK 1000

/* Binds a window by the latest connection: NAME TYPE REGION OFFSET LENGTH ACCESS [KEY]. A length of 0 unbinds
 * one of type 1. The last byte of a type 2 key is KEY. */
static void bind_window(const char *words)
{
	struct conn *c = established();
	char name[16], over[16];
	unsigned int type, access, key = 0x77;
	unsigned long offset, length;
	struct ibv_mw_bind_info info;
	struct window *w;

	MUST(sscanf(words, "%15s %u %15s %lu %lu %u %u", name, &type, over, &offset, &length, &access, &key) >= 6);
	w = window(name);
	strcpy(w->name, name);
	if (!w->mw)
		MUST(w->mw = ibv_alloc_mw(c->id->qp->pd, type == 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2));
	info = (struct ibv_mw_bind_info){
		.mr = region(over)->mr, .addr = (uintptr_t)region(over)->at + offset, .length = length,
		.mw_access_flags = access,
	};
	if (type == 1) {
		struct ibv_mw_bind bind = { .wr_id = WINDOW_WORK, .send_flags = IBV_SEND_SIGNALED, .bind_info = info };

		MUST(ibv_bind_mw(c->id->qp, w->mw, &bind) == 0);
	} else {
		struct ibv_send_wr wr = {
			.wr_id = WINDOW_WORK, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
			.bind_mw = { w->mw, (w->mw->rkey & ~0xFFu) | key, info },
		}, *bad;

		MUST(ibv_post_send(c->id->qp, &wr, &bad) == 0);
		w->mw->rkey = wr.bind_mw.rkey;
	}
	done_with(c, WINDOW_WORK);
	printf("region %s %u %" PRIu64 " %lu\n", name, w->mw->rkey, access & IBV_ACCESS_ZERO_BASED ? 0 : info.addr,
	       length);
}

static void invalidate_window(const char *name)
{
	struct conn *c = established();
	struct ibv_send_wr wr = {
		.wr_id = WINDOW_WORK, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
		.invalidate_rkey = window(name)->mw->rkey,
	}, *bad;

	MUST(ibv_post_send(c->id->qp, &wr, &bad) == 0);
	done_with(c, WINDOW_WORK);
}

/* ------------------------------------------------------------- commands */

static void set_profile(char *words)
{
	static const struct { const char *name; unsigned int *value; } names[] = {
		{ "recvs", &profile.recvs }, { "recvlen", &profile.recvlen }, { "reads", &profile.reads },
		{ "readlen", &profile.readlen }, { "sends", &profile.sends }, { "sendlen", &profile.sendlen },
		{ "atomics", &profile.atomics },
		{ "hold", &profile.hold }, { "cqe", &profile.cqe }, { "access", &profile.qp_access },
		{ "rnr", &profile.rnr }, { "timer", &profile.timer }, { "depth", &profile.depth },
		{ "stranger", &profile.stranger },
	};
	char *word, *save = NULL;

	default_profile();
	for (word = strtok_r(words, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
		char *value = strchr(word, '=');
		bool known = false;

		MUST(value);
		*value++ = 0;
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			if (!strcmp(names[i].name, word)) {
				*names[i].value = (unsigned int)strtoul(value, NULL, 0);
				known = true;
			}
		if (!known)
			die("no setting %s", word);
	}
}

static void connect_to(int port)
{
	struct sockaddr_storage ss = sockaddr_of(address, (uint16_t)port);
	struct rdma_cm_id *id;

	MUST(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	new_conn(id)->client = true;
	MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0);
}

static void command(char *line)
{
	char *rest = strchr(line, ' ');

	if (rest)
		*rest++ = 0;
	else
		rest = line + strlen(line);
	if (!strcmp(line, "profile")) {
		set_profile(rest);
	} else if (!strcmp(line, "sync")) {
		while (readable(channel->fd, 0))
			handle_event();
		printf("synced %lu %lu %lu\n", requests, ended, open_conns);
		return;
	} else if (!strcmp(line, "accept")) {
		MUST(held);
		accept_request(held, false);
		held = NULL;
	} else if (!strcmp(line, "reject")) {
		MUST(held);
		rdma_reject(held, "no", 2);
		MUST(rdma_destroy_id(held) == 0);
		held = NULL;
	} else if (!strcmp(line, "drop")) {
		MUST(held && rdma_destroy_id(held) == 0);
		held = NULL;
	} else if (!strcmp(line, "post")) {
		if (latest())
			post_receives(latest(), (unsigned int)atoi(rest));
	} else if (!strcmp(line, "work")) {
		if (latest())
			post_work(latest());
	} else if (!strcmp(line, "disconnect")) {
		if (latest())
			rdma_disconnect(latest()->id);
	} else if (!strcmp(line, "window")) {
		bind_window(rest);
	} else if (!strcmp(line, "invalidate")) {
		invalidate_window(rest);
	} else if (!strcmp(line, "dealloc")) {
		free_window(window(rest));
	} else if (!strcmp(line, "renew")) {
		for (size_t i = 0; i < WINDOWS; i++)
			if (windows[i].mw)
				free_window(&windows[i]);
		register_all();
	} else if (!strcmp(line, "retire")) {
		/* The key is taken back and the memory is gone the moment after: whoever is late meets a signal. */
		struct region *r = region(rest);

		MUST(ibv_dereg_mr(r->mr) == 0);
		r->mr = NULL;
		MUST(mprotect(r->at - r->before, body_of(r), PROT_NONE) == 0);
	} else if (!strcmp(line, "connect")) {
		connect_to(atoi(rest));
	} else if (!strcmp(line, "quit")) {
		exit(0);
	} else {
		die("command %s", line);
	}
	printf("done\n");
}

/* Reads what there is and carries out the whole lines. */
static void take_commands(void)
{
	static char buffer[4096];
	static size_t have;
	ssize_t n = read(0, buffer + have, sizeof buffer - 1 - have);
	char *line = buffer, *newline;

	if (n <= 0)
		exit(0);
	have += (size_t)n;
	buffer[have] = 0;
	while ((newline = strchr(line, '\n'))) {
		*newline = 0;
		command(line);
		line = newline + 1;
	}
	have -= (size_t)(line - buffer);
	memmove(buffer, line, have);
}

static void take_completions(void)
{
	struct ibv_cq *cq;
	void *cookie;
	struct conn *c;

	if (ibv_get_cq_event(completions, &cq, &cookie))
		return;
	c = conn_of_cq(cq);
	MUST(c);
	c->events++;
	innocent_serve(c);
}

static _Noreturn void serve(void)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	struct ibv_context **devices;
	struct pollfd fds[4];

	default_profile();
	MUST(devices = rdma_get_devices(NULL));
	MUST(context = devices[0]);
	MUST(pd = ibv_alloc_pd(context));
	MUST(other_pd = ibv_alloc_pd(context));
	MUST(completions = ibv_create_comp_channel(context));
	MUST(fcntl(completions->fd, F_SETFL, O_NONBLOCK) == 0);
	MUST(channel = rdma_create_event_channel());
	MUST(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0);
	MUST(rdma_listen(listener, 0) == 0);
	register_all();
	printf("port %u\n", ntohs(rdma_get_src_port(listener)));
	fflush(stdout);
	fds[0] = (struct pollfd){ .fd = 0, .events = POLLIN };
	fds[1] = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
	fds[2] = (struct pollfd){ .fd = completions->fd, .events = POLLIN };
	fds[3] = (struct pollfd){ .fd = context->async_fd, .events = POLLIN };
	for (;;) {
		MUST(poll(fds, 4, spin ? 0 : -1) >= 0 || errno == EINTR);
		if (fds[3].revents)
			take_async();
		if (fds[2].revents)
			take_completions();
		if (fds[1].revents)
			handle_event();
		else if (fds[0].revents)
			take_commands();
		if (spin) {
			for (struct conn *c = conns; c; c = c->next) {
				if (!c->scq || c->innocent)
					continue;
				drain(c->scq, c->sends, sizeof c->sends);
				drain(c->rcq, c->recvs, sizeof c->recvs);
			}
			sched_yield();
		}
		fflush(stdout);
	}
}

/* ------------------------------------------------------------- an honest client */

static uint32_t rng = 2463534242u;

static uint32_t below(uint32_t n)
{
	rng ^= rng << 13;
	rng ^= rng >> 17;
	rng ^= rng << 5;
	return rng % n;
}

static void innocent_post(struct rdma_cm_id *id, enum ibv_wr_opcode op, struct ibv_mr *mr, size_t at, uint32_t length,
			  const struct offer *offer, uint32_t offset)
{
	struct ibv_sge sge = sge_of(mr, at, length);
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { offer->addr + offset, offer->rkey },
	}, *bad;
	struct ibv_wc wc;

	MUST(ibv_post_send(id->qp, &wr, &bad) == 0);
	if (!poll_within(id->send_cq, &wc, 3 * LIMIT_MS) || wc.status != IBV_WC_SUCCESS)
		die("the innocent one's work request %d: %s", op, ibv_wc_status_str(wc.status));
}

static void innocent_round(struct rdma_cm_id *id, unsigned char *memory, struct ibv_mr *mr, const struct offer *offer)
{
	uint32_t length = 1 + below(PAGE), bulk = 1 + below(INNOCENT), offset = below(INNOCENT - bulk + 1);
	unsigned char *out = memory, *in = memory + INNOCENT;
	struct ibv_sge sge = sge_of(mr, INNOCENT, PAGE);
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_wc wc;

	for (uint32_t i = 0; i < INNOCENT; i++)
		out[i] = (unsigned char)(i * 7 + rng);
	memset(in, 0, INNOCENT);
	MUST(ibv_post_recv(id->qp, &recv, &bad) == 0);
	innocent_post(id, IBV_WR_SEND, mr, 0, length, offer, 0);
	if (!poll_within(id->recv_cq, &wc, 3 * LIMIT_MS) || wc.status != IBV_WC_SUCCESS || wc.byte_len != length)
		die("the echo: %s", ibv_wc_status_str(wc.status));
	if (memcmp(out, in, length))
		die("the echo is not what was sent");
	innocent_post(id, IBV_WR_RDMA_WRITE, mr, 0, bulk, offer, offset);
	innocent_post(id, IBV_WR_RDMA_READ, mr, INNOCENT, bulk, offer, offset);
	if (memcmp(out, in, bulk))
		die("what was read is not what was written");
}

static int be_innocent(const char *port)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct rdma_conn_param param = {
		.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7,
		.private_data = "innocent", .private_data_len = 8,
	};
	struct rdma_cm_id *id;
	struct offer offer;
	unsigned char *memory = guarded(2 * INNOCENT);
	struct ibv_mr *mr;
	char line[64];

	MUST(rdma_getaddrinfo(address, port, &hints, &found) == 0);
	MUST(rdma_create_ep(&id, found, NULL, &attr) == 0);
	MUST(rdma_connect(id, &param) == 0);
	MUST(id->event->param.conn.private_data_len >= sizeof offer);
	memcpy(&offer, id->event->param.conn.private_data, sizeof offer);
	MUST(mr = ibv_reg_mr(id->pd, memory, 2 * INNOCENT, LOCAL));
	printf("connected\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		int rounds = atoi(line + strlen("rounds "));

		for (int i = 0; i < rounds; i++)
			innocent_round(id, memory, mr, &offer);
		printf("rounds %d\n", rounds);
		fflush(stdout);
	}
	return 0;
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOFBF, 1 << 16);
	if (argc >= 2 && !strcmp(argv[1], "serve")) {
		spin = argc > 2 && !strcmp(argv[2], "spin");
		serve();
	}
	if (argc == 3 && !strcmp(argv[1], "innocent"))
		return be_innocent(argv[2]);
	fprintf(stderr, "victim serve [spin] | victim innocent PORT\n");
	return 2;
}
