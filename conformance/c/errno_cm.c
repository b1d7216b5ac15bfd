/* A program's own mistakes with rdma_cm, the errno they must give, and what events must carry.
 *
 *	errno_cm [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#include <ifaddrs.h>
#include <net/if.h>
#include <pthread.h>

#include "common.h"

static struct rdma_cm_id *new_id(struct rdma_event_channel *ch)
{
	struct rdma_cm_id *id;

	MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	return id;
}

/* Calls that come too early. */
static void order(void)
{
	struct rdma_event_channel *ch;
	struct rdma_conn_param param = { .retry_count = 7 };
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	struct pair p = { 0 };

	MUST(ch = rdma_create_event_channel());
	MUST(fcntl(ch->fd, F_SETFL, O_NONBLOCK) == 0);
	errno = 0;
	check_failed(rdma_get_cm_event(ch, &event) == -1, EAGAIN, "get_cm_event on a non-blocking descriptor");
	id = new_id(ch);
	check(id->channel == ch && id->ps == RDMA_PS_TCP && !id->verbs && !id->qp, "a new id is empty", "verbs %p",
	      (void *)id->verbs);
	errno = 0;
	check_failed(rdma_resolve_route(id, 1000) == -1, EINVAL, "resolve_route before resolve_addr");
	errno = 0;
	check_failed(rdma_connect(id, &param) == -1, EINVAL, "connect before resolve_route");
	errno = 0;
	check_failed(rdma_accept(id, &param) == -1, EINVAL, "accept of no request");
	errno = 0;
	check_failed(rdma_reject(id, NULL, 0) == -1, EINVAL, "reject of no request");
	errno = 0;
	check_failed(rdma_disconnect(id) == -1, EINVAL, "disconnect of what is not connected");
	check(rdma_get_src_port(id) == 0 && rdma_get_dst_port(id) == 0, "an unbound id has no ports", "it has");
	check(rdma_destroy_id(id) == 0, "destroy_id of a new id", "%m");
	rdma_destroy_event_channel(ch);

	listen_somewhere(&p);
	errno = 0;
	check_failed(rdma_listen(p.listener, 4) == -1, EINVAL, "listen twice");
	resolve(&p);
	errno = 0;
	check_failed(rdma_listen(p.c.id, 4) == -1, EINVAL, "listen on an id that was resolved");
	errno = 0;
	check_failed(rdma_disconnect(p.c.id) == -1, EINVAL, "disconnect before connect");
	MUST(rdma_destroy_id(p.c.id) == 0 && rdma_destroy_id(p.listener) == 0);
}

/* An IPv4 address of an interface other than loopback, port 0, if the host has one. */
static bool own_address(struct sockaddr_storage *ss)
{
	struct ifaddrs *all, *one;
	bool found = false;

	MUST(getifaddrs(&all) == 0);
	for (one = all; one && !found; one = one->ifa_next) {
		found = one->ifa_addr && one->ifa_addr->sa_family == AF_INET && one->ifa_flags & IFF_UP &&
			!(one->ifa_flags & IFF_LOOPBACK);
		if (found)
			memcpy(ss, one->ifa_addr, sizeof(struct sockaddr_in));
	}
	freeifaddrs(all);
	return found;
}

static void binding(void)
{
	struct sockaddr_storage any = sockaddr_of(address, 0), ss;
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id, *other;
	uint16_t port;

	MUST(ch = rdma_create_event_channel());
	id = new_id(ch);
	check(rdma_bind_addr(id, (struct sockaddr *)&any) == 0, "bind_addr to port 0", "%m");
	port = ntohs(rdma_get_src_port(id));
	check(port != 0, "and a port is chosen", "0");
	check(!id->verbs, "an id bound to a loopback address has no device yet", "%p", (void *)id->verbs);
	errno = 0;
	check_failed(rdma_bind_addr(id, (struct sockaddr *)&any) == -1, EINVAL, "bind_addr twice");
	check(rdma_listen(id, 4) == 0, "listen", "%m");
	ss = sockaddr_of(address, port);
	other = new_id(ch);
	errno = 0;
	check_failed(rdma_bind_addr(other, (struct sockaddr *)&ss) == -1 || rdma_listen(other, 4) == -1,
		     EADDRNOTAVAIL, "a second listener on one port");
	rdma_destroy_id(other);
	MUST(rdma_destroy_id(id) == 0);
	id = new_id(ch);
	check(rdma_bind_addr(id, (struct sockaddr *)&ss) == 0 && rdma_listen(id, 4) == 0,
	      "the port is free when its listener is gone", "%m");
	MUST(rdma_destroy_id(id) == 0);
	if (own_address(&ss)) {
		id = new_id(ch);
		other = new_id(ch);
		check(rdma_bind_addr(id, (struct sockaddr *)&ss) == 0 && id->verbs && id->port_num == 1,
		      "an id bound to an address of an interface has a device", "%p, %m", (void *)id->verbs);
		errno = 0;
		check_failed(rdma_bind_addr(other, rdma_get_local_addr(id)) == -1, EADDRINUSE, "equal addresses");
		ss = sockaddr_of("0.0.0.0", ntohs(rdma_get_src_port(id)));
		errno = 0;
		check_failed(rdma_bind_addr(other, (struct sockaddr *)&ss) == -1, EADDRNOTAVAIL, "the wildcard beside it");
		rdma_destroy_id(other);
		rdma_destroy_id(id);
	}
	ss = sockaddr_of("203.0.113.1", 0);
	id = new_id(ch);
	errno = 0;
	check(rdma_bind_addr(id, (struct sockaddr *)&ss) == -1 && (errno == EADDRNOTAVAIL || errno == ENODEV),
	      "bind_addr to an address of nobody", "%m");
	rdma_destroy_id(id);
	rdma_destroy_event_channel(ch);
}

static void queue_pairs(void)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	}, again = attr;
	struct pair p = { 0 };
	struct rdma_cm_id *id;
	struct ibv_pd *pd;

	listen_somewhere(&p);
	resolve(&p);
	check(p.c.id->verbs != NULL && p.c.id->port_num == 1, "a resolved id has device and port", "port %d",
	      p.c.id->port_num);
	check(rdma_create_qp(p.c.id, NULL, &attr) == 0, "create_qp without PD and CQs", "%m");
	MUST(p.c.id->qp);
	check(p.c.id->pd && p.c.id->qp->pd == p.c.id->pd && p.c.id->send_cq && p.c.id->recv_cq &&
	      p.c.id->send_cq_channel && p.c.id->recv_cq_channel, "rdma_cm supplies PD, CQs and channels", "not all");
	check(state_of(p.c.id->qp) == IBV_QPS_INIT, "and the queue pair takes receives", "%s",
	      state_name(state_of(p.c.id->qp)));
	errno = 0;
	check_failed(rdma_create_qp(p.c.id, NULL, &again) == -1, EINVAL, "create_qp twice");
	rdma_destroy_qp(p.c.id);
	check(!p.c.id->qp && !p.c.id->send_cq, "destroy_qp takes them away", "qp %p", (void *)p.c.id->qp);
	MUST(pd = ibv_alloc_pd(p.c.id->verbs));
	id = new_id(p.c.ch);
	errno = 0;
	check_failed(rdma_create_qp(id, pd, &again) == -1, EINVAL, "create_qp on an id without a device");
	MUST(rdma_destroy_id(id) == 0);
	MUST(ibv_dealloc_pd(pd) == 0);
	MUST(rdma_destroy_id(p.c.id) == 0 && rdma_destroy_id(p.listener) == 0);
}

static const char question[] = "is anyone there? 0123456789", yes[] = "yes!", no[] = "no, thank you";

/* Connects with private data up to the CONNECT_REQUEST, which is returned unacknowledged. */
static struct rdma_cm_event *request(struct pair *p)
{
	struct rdma_conn_param param = {
		.private_data = question, .private_data_len = sizeof question, .responder_resources = 2,
		.initiator_depth = 5, .retry_count = 7, .rnr_retry_count = 7,
	};
	struct rdma_cm_event *event;

	listen_somewhere(p);
	resolve(p);
	side_resources(&p->c, &(struct options){ 0 });
	MUST(rdma_connect(p->c.id, &param) == 0);
	MUST(readable(p->s.ch->fd, LIMIT_MS) && rdma_get_cm_event(p->s.ch, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	return event;
}

static bool holds(const struct rdma_cm_event *event, const void *data, size_t length)
{
	return event->param.conn.private_data_len >= length && event->param.conn.private_data &&
	       memcmp(event->param.conn.private_data, data, length) == 0;
}

static void accepting(void)
{
	struct rdma_conn_param param = {
		.private_data = yes, .private_data_len = sizeof yes, .responder_resources = 4, .initiator_depth = 2,
		.rnr_retry_count = 7,
	};
	struct rdma_cm_event *event;
	struct pair p = { 0 };

	event = request(&p);
	check(event->listen_id == p.listener && event->id != p.listener, "CONNECT_REQUEST brings a new id", "the old");
	check(event->id->context == &p, "which has the listener's context", "%p", event->id->context);
	check(event->status == 0, "status 0", "%d", event->status);
	check(holds(event, question, sizeof question), "CONNECT_REQUEST carries the private data", "%u bytes",
	      event->param.conn.private_data_len);
	/* What the peer starts is what we must answer, and the other way round. */
	check(event->param.conn.responder_resources == 5 && event->param.conn.initiator_depth == 2,
	      "and the peer's read depths, crossed", "%u and %u", event->param.conn.responder_resources,
	      event->param.conn.initiator_depth);
	p.s.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	check(rdma_get_dst_port(p.c.id) == rdma_get_src_port(p.listener) &&
	      rdma_get_dst_port(p.s.id) == rdma_get_src_port(p.c.id), "either end knows both ports", "%u, %u",
	      ntohs(rdma_get_dst_port(p.s.id)), ntohs(rdma_get_src_port(p.c.id)));
	check(rdma_get_peer_addr(p.s.id)->sa_family == rdma_get_local_addr(p.c.id)->sa_family &&
	      rdma_get_peer_addr(p.s.id)->sa_family != AF_UNSPEC, "and the other's address", "family %d",
	      rdma_get_peer_addr(p.s.id)->sa_family);
	side_resources(&p.s, &(struct options){ 0 });
	check(rdma_accept(p.s.id, &param) == 0, "accept", "%m");
	MUST(readable(p.c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.c.ch, &event) == 0);
	check(event->event == RDMA_CM_EVENT_ESTABLISHED && event->status == 0, "the client's ESTABLISHED", "%s",
	      rdma_event_str(event->event));
	check(holds(event, yes, sizeof yes), "it carries the private data of accept", "%u bytes",
	      event->param.conn.private_data_len);
	MUST(rdma_ack_cm_event(event) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	errno = 0;
	check_failed(rdma_accept(p.s.id, &param) == -1, EINVAL, "accept twice");
	errno = 0;
	check_failed(rdma_connect(p.c.id, &param) == -1, EINVAL, "connect twice");
	/* The server hangs up this time. */
	check(rdma_disconnect(p.s.id) == 0, "disconnect by the server", "%m");
	must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	pair_close(&p);
	check(true, "both ends see DISCONNECTED and can be destroyed", "-");
}

static void rejecting(void)
{
	struct rdma_cm_event *event;
	struct pair p = { 0 };
	struct ibv_wc wc;

	event = request(&p);
	p.s.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	MUST(post_recv(&p.c, NULL, 0, 1) == 0);
	check(rdma_reject(p.s.id, no, sizeof no) == 0, "reject", "%m");
	MUST(readable(p.c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.c.ch, &event) == 0);
	/* InfiniBand's reason, IB_CM_REJ_CONSUMER_DEFINED, or an errno. */
	check(event->event == RDMA_CM_EVENT_REJECTED && event->status == (as_iwarp() ? -ECONNREFUSED : 28),
	      "the client's REJECTED, with the reason", "%s, status %d", rdma_event_str(event->event), event->status);
	check(holds(event, no, sizeof no), "it carries the private data of reject", "%u bytes",
	      event->param.conn.private_data_len);
	MUST(rdma_ack_cm_event(event) == 0);
	check(poll_within(p.c.rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_WR_FLUSH_ERR, "the client's receive is flushed",
	      "it is not");
	check(rdma_destroy_id(p.s.id) == 0, "destroy_id of what was rejected", "%m");
	side_close(&p.c);
	MUST(rdma_destroy_id(p.listener) == 0);
	check(true, "and everything else", "-");
}

static void refused(void)
{
	struct rdma_conn_param param = { .retry_count = 7 };
	struct rdma_cm_event event;
	struct pair p = { 0 };

	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &(struct options){ 0 });
	MUST(rdma_destroy_id(p.listener) == 0);
	check(rdma_connect(p.c.id, &param) == 0, "connect to a port nobody listens on is started", "%m");
	event = take_event(p.c.ch);
	/* IB_CM_REJ_INVALID_SERVICE_ID, or an errno. */
	check(event.event == RDMA_CM_EVENT_REJECTED && event.status == (as_iwarp() ? -ECONNREFUSED : 8), "and is REJECTED",
	      "%s, status %d", rdma_event_str(event.event), event.status);
	side_close(&p.c);
}

static volatile int destroyed;

static void *destroy_id(void *id)
{
	destroyed = rdma_destroy_id(id) == 0 ? 1 : -1;
	return NULL;
}

static void acknowledging(void)
{
	struct sockaddr_storage ss;
	struct rdma_cm_event *event;
	struct pair p = { 0 };
	pthread_t thread;

	listen_somewhere(&p);
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(p.listener)));
	MUST(p.c.ch = rdma_create_event_channel());
	p.c.id = new_id(p.c.ch);
	MUST(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	MUST(readable(p.c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.c.ch, &event) == 0);
	MUST(pthread_create(&thread, NULL, destroy_id, p.c.id) == 0);
	usleep(QUIET_MS * 1000);
	check(destroyed == 0, "destroy_id waits for an event that is not acknowledged", "returned at once");
	MUST(rdma_ack_cm_event(event) == 0);
	MUST(pthread_join(thread, NULL) == 0);
	check(destroyed == 1, "and returns 0 when it is", "an error");
}

static void migrating(void)
{
	struct rdma_event_channel *ch;
	struct sockaddr_storage ss;
	struct pair p = { 0 };

	listen_somewhere(&p);
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(p.listener)));
	MUST(p.c.ch = rdma_create_event_channel());
	MUST(ch = rdma_create_event_channel());
	p.c.id = new_id(p.c.ch);
	check(rdma_migrate_id(p.c.id, ch) == 0 && p.c.id->channel == ch, "migrate_id", "%m");
	MUST(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	check(readable(ch->fd, LIMIT_MS) && !readable(p.c.ch->fd, 0), "events come on the new channel", "they do not");
	must_event(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
}

static void names(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_NUMERICHOST | RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	int ret;

	ret = rdma_getaddrinfo(address, "7471", &hints, &res);
	if (check(ret == 0, "getaddrinfo, passive", "%d", ret)) {
		check(res->ai_src_addr && res->ai_src_len && !res->ai_dst_addr, "gives a source", "it does not");
		rdma_freeaddrinfo(res);
	}
	hints.ai_flags = RAI_NUMERICHOST;
	ret = rdma_getaddrinfo(address, "7471", &hints, &res);
	if (check(ret == 0, "getaddrinfo, active", "%d", ret)) {
		check(res->ai_dst_addr && res->ai_dst_len && res->ai_qp_type == IBV_QPT_RC &&
		      res->ai_port_space == RDMA_PS_TCP, "gives a destination and RC", "qp_type %d", res->ai_qp_type);
		rdma_freeaddrinfo(res);
	}
	check(rdma_getaddrinfo("not-an-address", "7471", &hints, &res) != 0, "getaddrinfo of no address fails",
	      "it succeeds");
	check(strcmp(rdma_event_str(RDMA_CM_EVENT_ESTABLISHED), "RDMA_CM_EVENT_ESTABLISHED") == 0, "event_str", "%s",
	      rdma_event_str(RDMA_CM_EVENT_ESTABLISHED));
}

/* Options: their sizes, and what they do. */
static void options(void)
{
	struct sockaddr_storage any = sockaddr_of(address, 0), ss;
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id, *other;
	uint8_t octet = 8;
	int value = 1;

	MUST(ch = rdma_create_event_channel());
	id = new_id(ch);
	check(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &octet, sizeof octet) == 0, "TOS", "%m");
	errno = 0;
	check_failed(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &value, sizeof value) == -1, EINVAL,
		     "TOS of a wrong size");
	octet = 14;
	check(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &octet, sizeof octet) == 0, "ACK_TIMEOUT", "%m");
	errno = 0;
	check_failed(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &octet, sizeof octet) == -1, EINVAL,
		     "REUSEADDR of a wrong size");
	errno = 0;
	check_failed(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &octet, sizeof octet) == -1, EINVAL,
		     "AFONLY of a wrong size");
	check(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &value, sizeof value) == 0, "AFONLY", "%m");
	errno = 0;
	check_failed(rdma_set_option(id, RDMA_OPTION_ID, 99, &value, sizeof value) == -1, ENOSYS, "an option that is none");
	check(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &value, sizeof value) == 0, "REUSEADDR", "%m");
	MUST(rdma_bind_addr(id, (struct sockaddr *)&any) == 0);
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(id)));
	other = new_id(ch);
	MUST(rdma_set_option(other, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &value, sizeof value) == 0);
	check(rdma_bind_addr(other, (struct sockaddr *)&ss) == 0, "two that reuse one address", "%m");
	MUST(rdma_destroy_id(other) == 0 && rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
}

/* Each end has its own, set before it connects or accepts. */
static void ack_timeout(void)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	uint8_t client = 14, server = 20;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct pair p = { 0 };

	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &(struct options){ 0 });
	MUST(rdma_set_option(p.c.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &client, sizeof client) == 0);
	MUST(rdma_connect(p.c.id, &param) == 0);
	p.s.id = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	side_resources(&p.s, &(struct options){ 0 });
	MUST(rdma_set_option(p.s.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &server, sizeof server) == 0);
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	MUST(ibv_query_qp(p.c.qp, &attr, IBV_QP_TIMEOUT, &init) == 0);
	check(attr.timeout == client, "query_qp returns the client's ACK_TIMEOUT", "%u", attr.timeout);
	MUST(ibv_query_qp(p.s.qp, &attr, IBV_QP_TIMEOUT, &init) == 0);
	check(attr.timeout == server, "and the server's", "%u", attr.timeout);
	pair_close(&p);
}

/* Takes a request, and rejects it with a mark of the listener. */
static int asked(struct rdma_event_channel *ch, struct rdma_cm_id **listeners, int n)
{
	struct rdma_cm_event *event;
	int which = -1;

	MUST(readable(ch->fd, LIMIT_MS) && rdma_get_cm_event(ch, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	for (int i = 0; i < n; i++)
		if (event->listen_id == listeners[i])
			which = i;
	struct rdma_cm_id *id = event->id;
	MUST(rdma_ack_cm_event(event) == 0 && rdma_reject(id, NULL, 0) == 0 && rdma_destroy_id(id) == 0);
	return which;
}

/* Several listeners: each gets what is meant for it. */
static void listeners(void)
{
	struct rdma_conn_param param = { .retry_count = 7 };
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id[3];
	struct sockaddr_storage ss;

	MUST(ch = rdma_create_event_channel());
	for (int i = 0; i < 3; i++) {
		ss = sockaddr_of(address, 0);
		id[i] = new_id(ch);
		MUST(rdma_bind_addr(id[i], (struct sockaddr *)&ss) == 0 && rdma_listen(id[i], 4) == 0);
	}
	check(rdma_get_src_port(id[0]) != rdma_get_src_port(id[1]), "two listeners have two ports", "one");
	for (int i = 2; i >= 0; i--) {
		struct pair p = { .listener = id[i] };

		resolve(&p);
		side_resources(&p.c, &(struct options){ 0 });
		MUST(rdma_connect(p.c.id, &param) == 0);
		check(asked(ch, id, 3) == i, "a request comes to its listener", "to another");
		must_event(p.c.ch, RDMA_CM_EVENT_REJECTED);
		side_close(&p.c);
	}
	for (int i = 0; i < 3; i++)
		MUST(rdma_destroy_id(id[i]) == 0);
	rdma_destroy_event_channel(ch);
}

/* A queue pair of the program's own, known to rdma_cm by number: rdma_connect(3), rdma_establish(3),
 * rdma_init_qp_attr(3). */
static void by_number(void)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7, .private_data = question,
					 .private_data_len = sizeof question };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct rdma_cm_event *event;
	struct ibv_qp_attr attr;
	struct pair p = { 0 };
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	uint8_t timeout = 16;
	int mask;

	listen_somewhere(&p);
	resolve(&p);
	MUST(cq = ibv_create_cq(p.c.id->verbs, 16, NULL, NULL, 0));
	init.send_cq = init.recv_cq = cq;
	MUST(qp = ibv_create_qp(p.c.id->pd, &init));
	memset(&attr, 0, sizeof attr);
	attr.qp_state = IBV_QPS_INIT;
	check(rdma_init_qp_attr(p.c.id, &attr, &mask) == 0 && (mask & IBV_QP_ACCESS_FLAGS), "init_qp_attr for INIT", "%m");
	attr.pkey_index = 0;
	check_errno(ibv_modify_qp(qp, &attr, mask | IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT), 0, "it goes to INIT");
	attr.qp_state = IBV_QPS_RTR;
	MUST(rdma_init_qp_attr(p.c.id, &attr, &mask) == 0);
	check(ibv_modify_qp(qp, &attr, mask) != 0, "but not to RTR, as no connection is there", "it does");
	errno = 0;
	check_failed(rdma_connect(p.c.id, NULL) == -1, EINVAL, "connect with neither queue pair nor number");
	param.qp_num = 0xfffffe;
	errno = 0;
	check_failed(rdma_connect(p.c.id, &param) == -1, EINVAL, "connect with the number of no queue pair");
	errno = 0;
	check_failed(rdma_establish(p.c.id) == -1, EINVAL, "establish before the response");
	param.qp_num = qp->qp_num;
	MUST(rdma_set_option(p.c.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout) == 0);
	check(rdma_connect(p.c.id, &param) == 0, "connect by number", "%m");
	MUST(readable(p.s.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.s.ch, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	p.s.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	side_resources(&p.s, &(struct options){ 0 });
	MUST(rdma_accept(p.s.id, &(struct rdma_conn_param){ .rnr_retry_count = 7, .private_data = yes,
							     .private_data_len = sizeof yes }) == 0);
	MUST(readable(p.c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.c.ch, &event) == 0);
	check(event->event == RDMA_CM_EVENT_CONNECT_RESPONSE && event->status == 0, "CONNECT_RESPONSE", "%s",
	      rdma_event_str(event->event));
	check(holds(event, yes, sizeof yes), "with the private data of accept", "%u bytes",
	      event->param.conn.private_data_len);
	check(event->param.conn.qp_num == p.s.id->qp->qp_num, "and the peer's number", "%u", event->param.conn.qp_num);
	MUST(rdma_ack_cm_event(event) == 0);
	check(state_of(qp) == IBV_QPS_INIT, "the queue pair waits for the program", "%s", state_name(state_of(qp)));
	attr.qp_state = IBV_QPS_RTR;
	MUST(rdma_init_qp_attr(p.c.id, &attr, &mask) == 0);
	check_errno(ibv_modify_qp(qp, &attr, mask), 0, "RTR takes the connection");
	usleep(QUIET_MS * 1000);
	check(state_of(qp) == IBV_QPS_RTR, "and is RTR until the program asks for more", "%s", state_name(state_of(qp)));
	attr.qp_state = IBV_QPS_RTS;
	MUST(rdma_init_qp_attr(p.c.id, &attr, &mask) == 0);
	/* Told for InfiniBand's view; over iWARP the connection brings it. */
	check(!(mask & IBV_QP_TIMEOUT) || attr.timeout == timeout, "init_qp_attr for RTS has the time limit", "%u",
	      attr.timeout);
	check_errno(ibv_modify_qp(qp, &attr, mask), 0, "RTS");
	MUST(ibv_query_qp(qp, &attr, IBV_QP_TIMEOUT, &init) == 0);
	check(attr.timeout == timeout && attr.dest_qp_num == p.s.id->qp->qp_num, "and the queue pair has it", "%u",
	      attr.timeout);
	check(rdma_establish(p.c.id) == 0, "establish", "%m");
	errno = 0;
	check_failed(rdma_establish(p.c.id) == -1, EINVAL, "establish twice");
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	check(state_of(qp) == IBV_QPS_RTS, "and the queue pair is in RTS", "%s", state_name(state_of(qp)));
	check(rdma_disconnect(p.c.id) == 0, "disconnect", "%m");
	must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	check_errno(ibv_destroy_qp(qp), 0, "destroy_qp");
	MUST(ibv_destroy_cq(cq) == 0);
	side_close(&p.s);
	MUST(rdma_destroy_id(p.c.id) == 0 && rdma_destroy_id(p.listener) == 0);
}

/* As much private data as the interface can say, both ways. */
static void private_data(void)
{
	static unsigned char much[255];
	struct rdma_conn_param param = { .private_data = much, .private_data_len = sizeof much, .retry_count = 7,
					 .rnr_retry_count = 7 };
	struct rdma_cm_event *event;
	struct pair p = { 0 };

	for (unsigned int i = 0; i < sizeof much; i++)
		much[i] = (unsigned char)(i * 7 + 1);
	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &(struct options){ 0 });
	MUST(rdma_connect(p.c.id, &param) == 0);
	MUST(readable(p.s.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.s.ch, &event) == 0);
	check(event->param.conn.private_data_len == sizeof much && holds(event, much, sizeof much), "255 bytes in a request",
	      "%u bytes", event->param.conn.private_data_len);
	p.s.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	side_resources(&p.s, &(struct options){ 0 });
	MUST(rdma_accept(p.s.id, &param) == 0);
	MUST(readable(p.c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.c.ch, &event) == 0);
	check(event->event == RDMA_CM_EVENT_ESTABLISHED && holds(event, much, sizeof much), "and in a reply", "%s, %u bytes",
	      rdma_event_str(event->event), event->param.conn.private_data_len);
	MUST(rdma_ack_cm_event(event) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	check(rdma_notify(p.s.id, IBV_EVENT_COMM_EST) == 0, "notify", "%m");
	MUST(rdma_disconnect(p.c.id) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	pair_close(&p);
}

/* Devices, multicast, and options of vendors: what there is not is said so. */
static void others(void)
{
	struct ibv_ece ece = { .vendor_id = 1 };
	struct ibv_context **list;
	struct pair p = { 0 };
	int n = -1;

	list = rdma_get_devices(&n);
	if (check(list && n == 1 && list[0] && !list[1], "get_devices", "%d", n))
		rdma_free_devices(list);
	listen_somewhere(&p);
	resolve(&p);
	check(rdma_get_remote_ece(p.c.id, &ece) == 0 && ece.vendor_id == 0, "no ECE of the peer", "%u", ece.vendor_id);
	errno = 0;
	check_failed(rdma_get_remote_ece(p.c.id, NULL) == -1, EINVAL, "get_remote_ece without a place");
	errno = 0;
	check(rdma_join_multicast(p.c.id, rdma_get_peer_addr(p.c.id), NULL) == -1 && errno != 0,
	      "an id of RDMA_PS_TCP joins no multicast group", "it does");
	MUST(rdma_destroy_id(p.c.id) == 0 && rdma_destroy_id(p.listener) == 0);
}

/* Joining multicast groups, as rdma_join_multicast_ex(3) allows it. */
static void joining(void)
{
	struct sockaddr_storage ss = sockaddr_of(address, 7471), to = sockaddr_of("239.55.1.9", 0);
	struct rdma_cm_join_mc_attr_ex attr = {
		.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
		.join_flags = RDMA_MC_JOIN_FLAG_RESERVED,
		.addr = (struct sockaddr *)&to,
	};
	struct rdma_cm_id *id;

	/* Without a channel of its own: each call waits for its event. */
	MUST(rdma_create_id(NULL, &id, NULL, RDMA_PS_UDP) == 0);
	errno = 0;
	check_failed(rdma_join_multicast(id, (struct sockaddr *)&to, NULL) == -1, EINVAL, "a join without a device");
	MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0 && id->verbs);
	errno = 0;
	check_failed(rdma_join_multicast_ex(id, &attr, NULL) == -1, EINVAL, "unknown join_flags");
	attr.comp_mask |= 1U << 31;
	attr.join_flags = RDMA_MC_JOIN_FLAG_FULLMEMBER;
	errno = 0;
	check_failed(rdma_join_multicast_ex(id, &attr, NULL) == -1, EINVAL, "unknown members of the attributes");
	attr.comp_mask = RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	errno = 0;
	check_failed(rdma_join_multicast_ex(id, &attr, NULL) == -1, EINVAL, "a join without an address");
	errno = 0;
	check_failed(rdma_leave_multicast(id, (struct sockaddr *)&to) == -1, EADDRNOTAVAIL, "to leave what was not joined");
	MUST(rdma_destroy_id(id) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "order", order }, { "binding", binding }, { "queue_pairs", queue_pairs }, { "accepting", accepting },
		{ "rejecting", rejecting }, { "refused", refused }, { "acknowledging", acknowledging },
		{ "migrating", migrating }, { "names", names }, { "options", options },
		{ "ack_timeout", ack_timeout }, { "listeners", listeners },
		{ "joining", joining },
		{ "by_number", by_number }, { "private_data", private_data }, { "others", others },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
