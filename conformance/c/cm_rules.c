/* What the man pages of rdma_cm say happens between ids, channels, threads and processes.
 *
 *	cm_rules [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE /* pthread_timedjoin_np, environ */
#include <pthread.h>
#include <spawn.h>

#include <rdma/rdma_verbs.h>

#include "common.h"

static struct rdma_cm_id *new_id(struct rdma_event_channel *ch)
{
	struct rdma_cm_id *id;

	MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	return id;
}

static int bind_to(struct rdma_cm_id *id, const char *host, uint16_t port)
{
	struct sockaddr_storage ss = sockaddr_of(host, port);

	return rdma_bind_addr(id, (struct sockaddr *)&ss);
}

static const char *wildcard(void)
{
	return strchr(address, ':') ? "::" : "0.0.0.0";
}

/* A message from one end to the other. */
static bool message(struct side *from, struct side *to)
{
	static char out[] = "what goes on", in[64];
	struct ibv_mr *a = ibv_reg_mr(from->pd, out, sizeof out, 0);
	struct ibv_mr *b = ibv_reg_mr(to->pd, in, sizeof in, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = sge_of(b, 0, sizeof in);
	struct ibv_wc wc;
	bool good;

	MUST(a && b);
	memset(in, 0, sizeof in);
	good = post_recv(to, &sge, 1, 1) == 0;
	sge = sge_of(a, 0, sizeof out);
	good = good && post(from, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 2) == 0;
	good = good && poll_within(from->scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS;
	good = good && poll_within(to->rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS && wc.byte_len == sizeof out;
	good = good && memcmp(in, out, sizeof out) == 0;
	MUST(ibv_dereg_mr(a) == 0 && ibv_dereg_mr(b) == 0);
	return good;
}

/* rdma_migrate_id(3): without a channel calls block; with one again they answer by event. */
static void blocking(void)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
					 .rnr_retry_count = 7 };
	struct rdma_event_channel *ch;
	struct sockaddr_storage ss;
	struct pair p = { 0 };

	listen_somewhere(&p);
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(p.listener)));
	MUST(ch = p.c.ch = rdma_create_event_channel());
	p.c.id = new_id(ch);
	check(rdma_migrate_id(p.c.id, NULL) == 0, "migrate_id without a channel", "%m");
	check(p.c.id->channel && p.c.id->channel != ch, "the id gets a channel of its own", "%p", (void *)p.c.id->channel);
	errno = 0;
	check_failed(rdma_migrate_id(p.c.id, NULL) == -1, EINVAL, "and does not get another");
	check(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, 2000) == 0 && p.c.id->verbs, "resolve_addr blocks", "%m");
	check(p.c.id->event && p.c.id->event->event == RDMA_CM_EVENT_ADDR_RESOLVED, "and its event is in the id", "%p",
	      (void *)p.c.id->event);
	check(rdma_resolve_route(p.c.id, 2000) == 0 && p.c.id->event &&
	      p.c.id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED, "so does resolve_route", "%m");
	check(rdma_migrate_id(p.c.id, ch) == 0 && p.c.id->channel == ch && !p.c.id->event, "migrate_id to a channel again",
	      "%m, event %p", (void *)p.c.id->event);
	check(!readable(ch->fd, 0), "no event of before comes there", "one does");
	side_resources(&p.c, &(struct options){ 0 });
	check(rdma_connect(p.c.id, &param) == 0, "connect returns at once", "%m");
	p.s.id = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	/* The answering end blocks: in this thread, so accept may wait only for what needs no more of us. */
	side_resources(&p.s, &(struct options){ 0 });
	check(rdma_migrate_id(p.s.id, NULL) == 0, "migrate_id of an arrived request", "%m");
	check(rdma_accept(p.s.id, &param) == 0 && p.s.id->event && p.s.id->event->event == RDMA_CM_EVENT_ESTABLISHED,
	      "accept blocks until the connection stands", "%m");
	must_event(ch, RDMA_CM_EVENT_ESTABLISHED);
	check(message(&p.c, &p.s) && message(&p.s, &p.c), "messages go both ways", "they do not");
	MUST(rdma_migrate_id(p.s.id, p.s.ch) == 0);
	check(rdma_disconnect(p.c.id) == 0, "disconnect", "%m");
	must_event(ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	pair_close(&p);
}

/* rdma_reject(3) is for the listening side. */
static void rejecting_actively(void)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct pair p = { 0 };

	listen_somewhere(&p);
	errno = 0;
	check_failed(rdma_reject(p.listener, NULL, 0) == -1, EINVAL, "reject of a listener");
	resolve(&p);
	side_resources(&p.c, &(struct options){ 0 });
	MUST(rdma_connect(p.c.id, &param) == 0);
	errno = 0;
	check_failed(rdma_reject(p.c.id, NULL, 0) == -1, EINVAL, "reject of an own attempt");
	p.s.id = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	side_resources(&p.s, &(struct options){ 0 });
	check(rdma_accept(p.s.id, &param) == 0, "the attempt goes on", "%m");
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	errno = 0;
	check_failed(rdma_reject(p.c.id, NULL, 0) == -1, EINVAL, "reject of a connection, by the end that asked");
	errno = 0;
	check_failed(rdma_reject(p.s.id, NULL, 0) == -1, EINVAL, "and by the end that was asked");
	check(message(&p.c, &p.s), "which goes on", "it does not");
	pair_close(&p);
}

static volatile int stage;
static struct rdma_event_channel *watched;

/* Takes one event, keeps it for a while, and acknowledges it. */
static void *keep_event(void *unused)
{
	struct rdma_cm_event *event;

	(void)unused;
	stage = 1;
	MUST(rdma_get_cm_event(watched, &event) == 0);
	stage = 2;
	usleep(QUIET_MS * 1000);
	stage = 3;
	MUST(rdma_ack_cm_event(event) == 0);
	return NULL;
}

/* rdma_destroy_id(3): events have to be acknowledged first, whoever took them. */
static void destroying(void)
{
	struct sockaddr_storage ss;
	struct pair p = { 0 };
	pthread_t thread;

	listen_somewhere(&p);
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(p.listener)));
	MUST(watched = p.c.ch = rdma_create_event_channel());
	p.c.id = new_id(p.c.ch);
	MUST(pthread_create(&thread, NULL, keep_event, NULL) == 0);
	while (stage < 1)
		usleep(1000);
	usleep(QUIET_MS * 500);
	/* The thread sleeps in rdma_get_cm_event now. */
	MUST(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	while (stage < 2)
		usleep(1000);
	check(rdma_destroy_id(p.c.id) == 0, "destroy_id while another thread has an event of it", "%m");
	check(stage == 3, "returns when that one has acknowledged it", "before");
	MUST(pthread_join(thread, NULL) == 0);
	/* Nobody has taken this one: it goes with its id. */
	p.c.id = new_id(p.c.ch);
	MUST(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	check(rdma_destroy_id(p.c.id) == 0 && !readable(p.c.ch->fd, 0), "an event that nobody took goes with its id", "it stays");
	MUST(rdma_destroy_id(p.listener) == 0);
	rdma_destroy_event_channel(p.c.ch);
	rdma_destroy_event_channel(p.s.ch);
}

/* The errno of a bind, or of the listen behind it; 0 if both work. */
static int tries(const char *host, uint16_t port, bool listens)
{
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
	int error = 0;

	MUST(ch = rdma_create_event_channel());
	id = new_id(ch);
	if (bind_to(id, host, port) || (listens && rdma_listen(id, 1)))
		error = errno;
	MUST(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
	return error;
}

static int in_another_process(const char *host, uint16_t port, bool listens)
{
	char self[4096], number[8];
	ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
	int status;
	pid_t pid;

	MUST(n > 0);
	self[n] = 0;
	snprintf(number, sizeof number, "%u", port);
	MUST((pid = fork()) >= 0);
	if (pid == 0) {
		/* A forked child has no verbs: it has to be a program of its own. */
		execl(self, self, "tries", host, number, listens ? "listen" : "bind", (char *)NULL);
		_exit(255);
	}
	MUST(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* What a port gives that an equal address has: a loopback address counts as any address, as in Linux'
 * rdma_cm. */
static int taken(void)
{
	return strncmp(address, "127.", 4) && strcmp(address, "::1") ? EADDRINUSE : EADDRNOTAVAIL;
}

/* One port: who else may have it. */
static void ports(void)
{
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id, *other;
	uint16_t port;
	int yes = 1;

	MUST(ch = rdma_create_event_channel());
	/* Port 0 is a port at once. */
	id = new_id(ch);
	other = new_id(ch);
	MUST(bind_to(id, address, 0) == 0 && bind_to(other, address, 0) == 0);
	port = ntohs(rdma_get_src_port(id));
	check(port && rdma_get_src_port(other) && rdma_get_src_port(other) != rdma_get_src_port(id),
	      "two ids bound to port 0 have two ports", "%u and %u", port, ntohs(rdma_get_src_port(other)));
	check_errno(tries(address, port, false), taken(), "a bound port is nobody else's");
	check_errno(in_another_process(address, port, false), taken(), "in another process neither");
	check_errno(tries(wildcard(), port, false), EADDRNOTAVAIL, "nor the wildcard's");
	MUST(rdma_listen(id, 1) == 0);
	check(ntohs(rdma_get_src_port(id)) == port, "listen keeps the port", "%u", ntohs(rdma_get_src_port(id)));
	check_errno(tries(address, port, true), taken(), "a listener's port is nobody else's");
	check_errno(in_another_process(address, port, true), taken(), "in another process neither");
	check_errno(in_another_process(wildcard(), port, true), EADDRNOTAVAIL, "nor the wildcard's");
	MUST(rdma_destroy_id(id) == 0);
	check_errno(in_another_process(address, port, true), 0, "until it is destroyed");
	MUST(rdma_destroy_id(other) == 0);

	/* The other way round: the wildcard was there first. */
	id = new_id(ch);
	MUST(bind_to(id, wildcard(), 0) == 0 && rdma_listen(id, 1) == 0);
	port = ntohs(rdma_get_src_port(id));
	check_errno(tries(address, port, true), EADDRNOTAVAIL, "beside a wildcard's listener there is none for an address");
	check_errno(in_another_process(address, port, true), taken(), "in another process neither");
	MUST(rdma_destroy_id(id) == 0);

	/* Both reuse: both are bound, and one listens. */
	id = new_id(ch);
	other = new_id(ch);
	MUST(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes) == 0 &&
	     rdma_set_option(other, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes) == 0);
	MUST(bind_to(id, address, 0) == 0);
	port = ntohs(rdma_get_src_port(id));
	check(bind_to(other, wildcard(), port) == 0, "ids that reuse may share a port, wildcard and address", "%m");
	check_errno(tries(address, port, false), taken(), "one that does not may not bind beside them");
	errno = 0;
	check_failed(rdma_listen(id, 1) == -1, EADDRNOTAVAIL, "none of them listens while the other is bound");
	MUST(rdma_destroy_id(other) == 0);
	check(rdma_listen(id, 1) == 0, "and does when it is alone", "%m");
	MUST(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
}

/* A loopback address says nothing of the device, as in Linux' rdma_cm (cma_any_addr): the address of a
 * peer does. */
static void loopback(void)
{
	const char *local = strchr(address, ':') ? "::1" : "127.0.0.1";
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE | RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *res;
	union ibv_gid none = { .raw = { 0 } };
	struct rdma_event_channel *ch;
	struct sockaddr_storage ss;
	struct rdma_cm_id *id, *ep;
	struct pair p = { 0 };

	MUST(ch = rdma_create_event_channel());
	id = new_id(ch);
	check(bind_to(id, local, 0) == 0 && rdma_get_src_port(id), "a loopback address is bound", "%m");
	check(!id->verbs && !id->pd && !id->port_num, "without a device", "verbs %p, port %u", (void *)id->verbs, id->port_num);
	ss = sockaddr_of(local, ntohs(rdma_get_src_port(id)));
	check(memcmp(rdma_get_local_addr(id), &ss, ss.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : 8) == 0,
	      "and is the id's address", "another is");
	check(memcmp(&id->route.addr.addr.ibaddr.sgid, &none, sizeof none) == 0, "without a GID", "it has one");
	check(rdma_listen(id, 1) == 0 && !id->verbs, "a listener there has none either", "%m, %p", (void *)id->verbs);
	p.c.id = new_id(ch);
	MUST(bind_to(p.c.id, local, 0) == 0);
	check(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, LIMIT_MS) == 0, "the address of a peer is resolved", "%m");
	must_event(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	check(p.c.id->verbs && p.c.id->pd && p.c.id->port_num == 1, "which gives the id its device", "%p", (void *)p.c.id->verbs);
	MUST(rdma_resolve_route(p.c.id, LIMIT_MS) == 0);
	must_event(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	p.c.ch = ch;
	side_resources(&p.c, &(struct options){ 0 });
	MUST(rdma_connect(p.c.id, &(struct rdma_conn_param){ .retry_count = 7 }) == 0);
	p.s.id = must_event(ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	check(p.s.id->verbs == p.c.id->verbs, "a request has the device that it came by", "%p", (void *)p.s.id->verbs);
	MUST(rdma_reject(p.s.id, NULL, 0) == 0 && rdma_destroy_id(p.s.id) == 0);
	must_event(ch, RDMA_CM_EVENT_REJECTED);
	side_close(&p.c);

	/* Not to other hosts: the routing table says so. */
	p.c.id = new_id(ch);
	MUST(bind_to(p.c.id, local, 0) == 0);
	ss = sockaddr_of(strchr(address, ':') ? "2001:db8::1" : "198.51.100.1", 9);
	check(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, LIMIT_MS) == 0, "an address elsewhere", "%m");
	must_event(ch, RDMA_CM_EVENT_ADDR_ERROR);
	check(!p.c.id->verbs, "is no way to a device", "%p", (void *)p.c.id->verbs);
	MUST(rdma_destroy_id(p.c.id) == 0);

	MUST(rdma_getaddrinfo(local, NULL, &hints, &res) == 0);
	MUST(rdma_create_ep(&ep, res, NULL, NULL) == 0);
	check(!ep->verbs, "an endpoint at a loopback address has no device", "%p",
	      (void *)ep->verbs);
	rdma_destroy_ep(ep);
	rdma_freeaddrinfo(res);
	MUST(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
}

/* Descriptors that are open, by number. */
static size_t descriptors(int *list, size_t most)
{
	size_t n = 0;

	for (int fd = 0; fd < 4096 && n < most; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			list[n++] = fd;
	return n;
}

/* Every descriptor that was not there before is closed by exec. */
static void close_on_exec(const int *before, size_t n)
{
	int now[256];
	size_t count = descriptors(now, 256), made = 0, left = 0;
	char what[256] = "";

	for (size_t i = 0; i < count; i++) {
		char link[64], name[128] = "";
		bool old = false;

		for (size_t k = 0; k < n; k++)
			old |= before[k] == now[i];
		made += !old;
		if (old || fcntl(now[i], F_GETFD) & FD_CLOEXEC)
			continue;
		left++;
		snprintf(link, sizeof link, "/proc/self/fd/%d", now[i]);
		if (readlink(link, name, sizeof name - 1) > 0)
			snprintf(what + strlen(what), sizeof what - strlen(what), " %s", name);
	}
	/* Two ends' sockets, a listener, two event channels, two completion channels, and what makes progress. */
	check(made >= 8, "a connection has descriptors", "%zu", made);
	check(left == 0, "each of which exec closes", "%zu are left:%s", left, what);
}

/* A child shares nothing with the device: its calls on the parent's objects fail, and what it does leaves the
 * parent's connection alone. */
static void forking(void)
{
	static char *const shell[] = {
		"sh", "-c", "! ls -l /proc/self/fd | grep -Eq 'socket|eventpoll|eventfd|timerfd'", NULL,
	};
	struct pair p;
	int status, before[256];
	size_t n = descriptors(before, 256);
	pid_t pid;

	pair_open(&p);
	check(message(&p.c, &p.s), "a message before the fork", "-");
	close_on_exec(before, n);
	/* Runs no handlers of fork, which would close the descriptors before exec does. */
	MUST(posix_spawn(&pid, "/bin/sh", NULL, NULL, shell, environ) == 0);
	MUST(waitpid(pid, &status, 0) == pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "nothing of ours is open in a program that is spawned", "status %x",
	      status);
	check(message(&p.c, &p.s) && message(&p.s, &p.c), "and the connection goes on", "it does not");
	MUST((pid = fork()) >= 0);
	if (pid == 0) {
		struct rdma_cm_id *id;
		struct ibv_wc wc;
		int wrong = 0;

		wrong |= post(&p.c, IBV_WR_SEND, 0, NULL, 0, 0, 0, 1) == 0;
		wrong |= (ibv_poll_cq(p.c.scq, 1, &wc) > 0) << 1;
		wrong |= (rdma_disconnect(p.c.id) == 0) << 2;
		wrong |= (rdma_create_id(p.c.ch, &id, NULL, RDMA_PS_TCP) == 0) << 3;
		/* Runs the exit handlers, as programs do. */
		exit(wrong);
	}
	MUST(waitpid(pid, &status, 0) == pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child's verbs on them fail", "status %x (bits: post, poll, disconnect, create an id)",
	      status);
	check(message(&p.c, &p.s) && message(&p.s, &p.c), "the parent's connection goes on", "it does not");
	MUST((pid = fork()) >= 0);
	if (pid == 0) {
		execv("/bin/sh", shell);
		_exit(127);
	}
	MUST(waitpid(pid, &status, 0) == pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "nothing of ours is open behind exec", "status %x", status);
	check(message(&p.c, &p.s) && message(&p.s, &p.c), "and the connection goes on", "it does not");
	check(!readable(p.c.ch->fd, 0) && !readable(p.s.ch->fd, 0), "without an event", "one came");
	pair_close(&p);
}

enum { THREADS = 4, CONNECTIONS = 40 };
static int seen[CONNECTIONS][16];
static volatile int done;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Drives whatever connection the next event is of. */
static void *drive(void *unused)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	(void)unused;
	while (done < CONNECTIONS) {
		struct rdma_cm_event *event;
		struct rdma_cm_id *id;
		int which;

		if (!readable(watched->fd, 100) || rdma_get_cm_event(watched, &event))
			continue;
		id = event->id;
		which = (int)(intptr_t)id->context;
		pthread_mutex_lock(&lock);
		seen[which][event->event]++;
		pthread_mutex_unlock(&lock);
		switch (event->event) {
		case RDMA_CM_EVENT_ADDR_RESOLVED:
			MUST(rdma_resolve_route(id, 2000) == 0);
			break;
		case RDMA_CM_EVENT_ROUTE_RESOLVED:
			MUST(rdma_create_qp(id, NULL, &attr) == 0 && rdma_connect(id, &param) == 0);
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			MUST(rdma_disconnect(id) == 0);
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
			__atomic_fetch_add(&done, 1, __ATOMIC_SEQ_CST);
			break;
		default:
			die("%s", rdma_event_str(event->event));
		}
		MUST(rdma_ack_cm_event(event) == 0);
	}
	return NULL;
}

static void *serve(void *channel)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	int gone = 0;

	while (gone < CONNECTIONS) {
		struct rdma_cm_event event = take_event(channel);
		struct ibv_qp_init_attr attr = {
			.qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
		};

		if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST)
			MUST(rdma_create_qp(event.id, NULL, &attr) == 0 && rdma_accept(event.id, &param) == 0);
		if (event.event == RDMA_CM_EVENT_DISCONNECTED) {
			rdma_destroy_qp(event.id);
			MUST(rdma_destroy_id(event.id) == 0);
			gone++;
		}
	}
	return NULL;
}

/* Threads that share a channel: each event comes to one of them, and none is lost. */
static void threads(void)
{
	static const enum rdma_cm_event_type wanted[] = {
		RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_ESTABLISHED,
		RDMA_CM_EVENT_DISCONNECTED,
	};
	struct rdma_cm_id *ids[CONNECTIONS];
	pthread_t thread[THREADS], server;
	struct sockaddr_storage ss;
	struct pair p = { 0 };
	bool once = true;

	listen_somewhere(&p);
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(p.listener)));
	MUST(watched = rdma_create_event_channel());
	/* As programs do that share a channel: look whether there is one, and lose the race to another thread. */
	MUST(fcntl(watched->fd, F_SETFL, O_NONBLOCK) == 0);
	MUST(pthread_create(&server, NULL, serve, p.s.ch) == 0);
	for (int i = 0; i < THREADS; i++)
		MUST(pthread_create(&thread[i], NULL, drive, NULL) == 0);
	for (intptr_t i = 0; i < CONNECTIONS; i++) {
		MUST(rdma_create_id(watched, &ids[i], (void *)i, RDMA_PS_TCP) == 0);
		MUST(rdma_resolve_addr(ids[i], NULL, (struct sockaddr *)&ss, 2000) == 0);
	}
	for (int i = 0; i < THREADS; i++)
		MUST(pthread_join(thread[i], NULL) == 0);
	MUST(pthread_join(server, NULL) == 0);
	for (int i = 0; i < CONNECTIONS; i++) {
		for (size_t j = 0; j < sizeof wanted / sizeof *wanted; j++)
			once = once && seen[i][wanted[j]] == 1;
		rdma_destroy_qp(ids[i]);
		MUST(rdma_destroy_id(ids[i]) == 0);
	}
	check(once, "each event of 40 connections comes to one of four threads, once", "some do not");
	MUST(rdma_destroy_id(p.listener) == 0);
}

static unsigned char told[255];

/* One connection attempt with so much private data: what arrived of it at the other end; -1 for anything
 * else. */
static int carried(struct pair *p, unsigned int length, bool accepted)
{
	struct rdma_conn_param param = { .private_data = length ? told : NULL, .private_data_len = (uint8_t)length,
					 .retry_count = 7, .rnr_retry_count = 7 };
	struct rdma_cm_event *event;
	bool good;

	resolve(p);
	side_resources(&p->c, &(struct options){ 0 });
	MUST(rdma_connect(p->c.id, &param) == 0);
	MUST(readable(p->s.ch->fd, LIMIT_MS) && rdma_get_cm_event(p->s.ch, &event) == 0);
	good = event->param.conn.private_data_len == length &&
	       (length == 0 || memcmp(event->param.conn.private_data, told, length) == 0);
	p->s.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	if (accepted) {
		side_resources(&p->s, &(struct options){ 0 });
		MUST(rdma_accept(p->s.id, &param) == 0);
		must_event(p->s.ch, RDMA_CM_EVENT_ESTABLISHED);
	} else {
		MUST(rdma_reject(p->s.id, param.private_data, (uint8_t)length) == 0);
	}
	MUST(readable(p->c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p->c.ch, &event) == 0);
	good = good && event->event == (accepted ? RDMA_CM_EVENT_ESTABLISHED : RDMA_CM_EVENT_REJECTED) &&
	       event->param.conn.private_data_len == length &&
	       (length == 0 || memcmp(event->param.conn.private_data, told, length) == 0);
	MUST(rdma_ack_cm_event(event) == 0);
	side_close(&p->c);
	if (accepted)
		must_event(p->s.ch, RDMA_CM_EVENT_DISCONNECTED);
	side_close(&p->s);
	rdma_destroy_event_channel(p->c.ch);
	p->s = (struct side){ .ch = p->s.ch };
	p->c = (struct side){ 0 };
	return good;
}

/* iWARP carries what it was given and no more: no padding, up to the 255 that the interface can say. */
static void private_data(void)
{
	static const unsigned int lengths[] = { 0, 1, 56, 57, 148, 196, 254, 255 };
	struct pair p = { 0 };

	for (unsigned int i = 0; i < sizeof told; i++)
		told[i] = (unsigned char)(i * 11 + 3);
	listen_somewhere(&p);
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		char name[64];

		snprintf(name, sizeof name, "%u bytes of private data, accepted", lengths[i]);
		check(carried(&p, lengths[i], true), name, "changed on the way");
		snprintf(name, sizeof name, "%u bytes of private data, rejected", lengths[i]);
		check(carried(&p, lengths[i], false), name, "changed on the way");
	}
	MUST(rdma_destroy_id(p.listener) == 0);
}

/* Appends the events that are there, as names. */
static void note(struct rdma_event_channel *ch, char *into, size_t room, struct rdma_cm_id **id, int wait)
{
	struct rdma_cm_event *event;

	while (readable(ch->fd, wait)) {
		MUST(rdma_get_cm_event(ch, &event) == 0);
		strncat(into, rdma_event_str(event->event) + strlen("RDMA_CM_EVENT_"), room - strlen(into) - 1);
		strncat(into, event->status ? "! " : " ", room - strlen(into) - 1);
		if (id && event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			*id = event->id;
		MUST(rdma_ack_cm_event(event) == 0);
		wait = 0;
	}
}

/* A connection's whole life, as rdma_cm(7) tells it; hung up by the client, by the server, by both. */
static void life(void)
{
	static const char *const ends[] = { "hung up by the client", "by the server", "by both" };

	for (int who = 0; who < 3; who++) {
		struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
		char client[256] = "", server[256] = "", name[128];
		struct sockaddr_storage ss;
		struct pair p = { 0 };

		listen_somewhere(&p);
		ss = sockaddr_of(address, ntohs(rdma_get_src_port(p.listener)));
		MUST(p.c.ch = rdma_create_event_channel());
		p.c.id = new_id(p.c.ch);
		MUST(rdma_resolve_addr(p.c.id, NULL, (struct sockaddr *)&ss, 2000) == 0);
		note(p.c.ch, client, sizeof client, NULL, LIMIT_MS);
		MUST(rdma_resolve_route(p.c.id, 2000) == 0);
		note(p.c.ch, client, sizeof client, NULL, LIMIT_MS);
		side_resources(&p.c, &(struct options){ 0 });
		MUST(rdma_connect(p.c.id, &param) == 0);
		note(p.s.ch, server, sizeof server, &p.s.id, LIMIT_MS);
		MUST(p.s.id);
		side_resources(&p.s, &(struct options){ 0 });
		MUST(rdma_accept(p.s.id, &param) == 0);
		note(p.c.ch, client, sizeof client, NULL, LIMIT_MS);
		note(p.s.ch, server, sizeof server, NULL, LIMIT_MS);
		MUST(message(&p.c, &p.s) && message(&p.s, &p.c));
		if (who != 1)
			MUST(rdma_disconnect(p.c.id) == 0);
		if (who != 0)
			MUST(rdma_disconnect(p.s.id) == 0);
		note(p.c.ch, client, sizeof client, NULL, LIMIT_MS);
		note(p.s.ch, server, sizeof server, NULL, LIMIT_MS);
		/* rdma_disconnect(3): both ends should call it; the second call changes nothing. */
		MUST(rdma_disconnect(p.c.id) == 0 && rdma_disconnect(p.s.id) == 0);
		note(p.c.ch, client, sizeof client, NULL, QUIET_MS);
		note(p.s.ch, server, sizeof server, NULL, QUIET_MS);
		printf("#   client: %s\n#   server: %s\n", client, server);
		snprintf(name, sizeof name, "the client's events, %s", ends[who]);
		check(strcmp(client, "ADDR_RESOLVED ROUTE_RESOLVED ESTABLISHED DISCONNECTED ") == 0, name, "%s", client);
		snprintf(name, sizeof name, "the server's events, %s", ends[who]);
		check(strcmp(server, "CONNECT_REQUEST ESTABLISHED DISCONNECTED ") == 0, name, "%s", server);
		pair_close(&p);
	}
}

/* Over InfiniBand the end of a connection is followed by TIMEWAIT_EXIT, at both ends, as long as the id is
 * not destroyed. */
static void timewait(void)
{
	const char *expected = as_iwarp() ? "DISCONNECTED " : "DISCONNECTED TIMEWAIT_EXIT ";
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	char client[256] = "", server[256] = "";
	/* 4.096 us << 8, which is a millisecond. */
	uint8_t timeout = 8;
	struct pair p = { 0 };

	listen_somewhere(&p);
	resolve(&p);
	MUST(rdma_set_option(p.c.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout) == 0);
	side_resources(&p.c, &(struct options){ 0 });
	MUST(rdma_connect(p.c.id, &param) == 0);
	p.s.id = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	MUST(rdma_set_option(p.s.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout) == 0);
	side_resources(&p.s, &(struct options){ 0 });
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	check(message(&p.c, &p.s), "a message", "-");
	MUST(rdma_disconnect(p.c.id) == 0);
	for (int n = 0; n < 2; n++) {
		note(p.c.ch, client, sizeof client, NULL, n && as_iwarp() ? QUIET_MS : LIMIT_MS);
		if (strcmp(client, expected) == 0 && !as_iwarp())
			break;
	}
	MUST(rdma_disconnect(p.s.id) == 0);
	for (int n = 0; n < 2; n++) {
		note(p.s.ch, server, sizeof server, NULL, n && as_iwarp() ? QUIET_MS : LIMIT_MS);
		if (strcmp(server, expected) == 0 && !as_iwarp())
			break;
	}
	check(strcmp(client, expected) == 0, "the end of a connection at the client", "%s", client);
	check(strcmp(server, expected) == 0, "and at the server", "%s", server);
	pair_close(&p);
	/* One that is destroyed meanwhile hears of nothing, and nothing is left of it. */
	pair_open(&p);
	MUST(rdma_disconnect(p.c.id) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	pair_close(&p);
}

/* InfiniBand's connection manager names the queue pair in every request and reply; an RNIC names none in
 * the request. */
static void peer_number(void)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 5, .private_data = "hello", .private_data_len = 5 };
	struct rdma_cm_event *event;
	struct pair p = { 0 };
	uint32_t expected;

	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &(struct options){ 0 });
	expected = as_iwarp() ? 0 : p.c.id->qp->qp_num;
	MUST(rdma_connect(p.c.id, &param) == 0);
	MUST(readable(p.s.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.s.ch, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	check(event->param.conn.qp_num == expected, "CONNECT_REQUEST has the number of the client's queue pair", "%#x, not %#x",
	      event->param.conn.qp_num, expected);
	check(event->param.conn.private_data_len == 5 && memcmp(event->param.conn.private_data, "hello", 5) == 0,
	      "and the client's private data alone", "%u bytes", event->param.conn.private_data_len);
	p.s.id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
	side_resources(&p.s, &(struct options){ 0 });
	MUST(rdma_accept(p.s.id, &param) == 0);
	MUST(readable(p.c.ch->fd, LIMIT_MS) && rdma_get_cm_event(p.c.ch, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_ESTABLISHED);
	check(event->param.conn.qp_num == p.s.id->qp->qp_num, "ESTABLISHED has that of the server's", "%#x, not %#x",
	      event->param.conn.qp_num, p.s.id->qp->qp_num);
	MUST(rdma_ack_cm_event(event) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	check(message(&p.c, &p.s) && message(&p.s, &p.c), "messages", "-");
	pair_close(&p);
}

static void *await_cm_event(void *channel)
{
	struct rdma_cm_event *event;

	rdma_get_cm_event(channel, &event);
	return NULL;
}

static void *await_cq_event(void *channel)
{
	struct ibv_cq *cq;
	void *context;

	ibv_get_cq_event(channel, &cq, &context);
	return NULL;
}

static void *await_async_event(void *context)
{
	struct ibv_async_event event;

	ibv_get_async_event(context, &event);
	return NULL;
}

static void *await_request(void *listener)
{
	struct rdma_cm_id *id;

	rdma_get_request(listener, &id);
	return NULL;
}

/* rping cancels its threads while they wait. Elsewhere they wait in read(2), which is a cancellation point. */
static void cancelling(void)
{
	struct pair p = { 0 };
	struct rdma_event_channel *quiet;
	struct rdma_cm_id *listener;
	struct sockaddr_storage ss = sockaddr_of(address, 0);

	pair_open(&p);
	MUST(quiet = rdma_create_event_channel());
	MUST(rdma_create_id(NULL, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0 && rdma_listen(listener, 1) == 0);
	{
		const struct {
			const char *name;
			void *(*wait)(void *);
			void *on;
		} calls[] = {
			{ "rdma_get_cm_event", await_cm_event, quiet },
			{ "ibv_get_cq_event", await_cq_event, p.s.cc },
			{ "ibv_get_async_event", await_async_event, p.c.id->verbs },
			{ "rdma_get_request", await_request, listener },
		};
		pthread_t waiting[4];
		struct timespec until;
		void *result;
		int rc;

		for (int i = 0; i < 4; i++)
			MUST(pthread_create(&waiting[i], NULL, calls[i].wait, calls[i].on) == 0);
		usleep(QUIET_MS * 1000);
		for (int i = 0; i < 4; i++)
			MUST(pthread_cancel(waiting[i]) == 0);
		/* One of them serves the sockets, the end of this connection among them, though it is cancelled. */
		pair_close(&p);
		for (int i = 0; i < 4; i++) {
			clock_gettime(CLOCK_REALTIME, &until);
			until.tv_sec += LIMIT_MS / 1000;
			rc = pthread_timedjoin_np(waiting[i], &result, &until);
			check(rc == 0 && result == PTHREAD_CANCELED, calls[i].name, "join says %d", rc);
		}
	}
	memset(&p, 0, sizeof p);
	pair_open(&p);
	check(message(&p.c, &p.s) && message(&p.s, &p.c), "afterwards messages go both ways", "they do not");
	pair_close(&p);
	MUST(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(quiet);
}

static void *asleep_in_request(void *listener)
{
	struct rdma_cm_id *id;

	return (void *)(intptr_t)(rdma_get_request(listener, &id) ? errno : 0);
}

static void *asleep_in_connect(void *id)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };

	return (void *)(intptr_t)(rdma_connect(id, &param) ? errno : 0);
}

/* A thread that sleeps in a call of a synchronous id, while another one destroys the id. */
static void wake_by_destroying(struct rdma_cm_id *id, void *(*call)(void *), const char *name)
{
	struct timespec until;
	pthread_t thread;
	void *result = NULL;
	int rc;

	MUST(pthread_create(&thread, NULL, call, id) == 0);
	usleep(QUIET_MS * 1000);
	MUST(rdma_destroy_id(id) == 0);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += LIMIT_MS / 1000;
	rc = pthread_timedjoin_np(thread, &result, &until);
	check(rc == 0 && (intptr_t)result == EBADF, name, "join says %d, the call %d", rc, (int)(intptr_t)result);
}

static void asleep(void)
{
	struct sockaddr_storage ss = sockaddr_of(address, 0);
	struct rdma_cm_id *listeners[2], *id;
	struct side client = { 0 };

	for (int n = 0; n < 2; n++) {
		MUST(rdma_create_id(NULL, &listeners[n], NULL, RDMA_PS_TCP) == 0);
		MUST(rdma_bind_addr(listeners[n], (struct sockaddr *)&ss) == 0 && rdma_listen(listeners[n], 1) == 0);
	}
	ss = sockaddr_of(address, ntohs(rdma_get_src_port(listeners[0])));
	MUST(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, LIMIT_MS) == 0);
	MUST(rdma_resolve_route(id, LIMIT_MS) == 0);
	client.id = id;
	side_resources(&client, &(struct options){ 0 });
	wake_by_destroying(id, asleep_in_connect, "rdma_connect returns when its id is destroyed, with EBADF");
	wake_by_destroying(listeners[1], asleep_in_request, "and rdma_get_request");
}

/* What a thread read that waits in poll(2) and then takes the event, with a pause between the two. */
struct told {
	struct rdma_event_channel *ch;
	enum rdma_cm_event_type last;
	int count;
};

static void *poll_then_get(void *arg)
{
	struct told *told = arg;
	struct rdma_cm_event *event;

	do {
		MUST(readable(told->ch->fd, -1));
		usleep(10 * 1000);
		MUST(rdma_get_cm_event(told->ch, &event) == 0);
		told->last = event->event;
		told->count++;
		MUST(rdma_ack_cm_event(event) == 0);
	} while (told->last != RDMA_CM_EVENT_DISCONNECTED);
	return NULL;
}

/* rping from rdma-core 60 on: a thread was told of DISCONNECTED by poll(2), and the main thread destroys the id
 * before that thread takes the event. */
static void polled(void)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct told told = { 0 };
	struct pair p = { 0 };
	struct timespec until;
	pthread_t thread;
	int rc;

	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &(struct options){ 0 });
	told.ch = p.c.ch;
	MUST(pthread_create(&thread, NULL, poll_then_get, &told) == 0);
	MUST(rdma_connect(p.c.id, &param) == 0);
	p.s.id = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	side_resources(&p.s, &(struct options){ 0 });
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	for (uint64_t end = now_ms() + LIMIT_MS; !__atomic_load_n(&told.count, __ATOMIC_ACQUIRE) && now_ms() < end;)
		usleep(1000);
	check(told.last == RDMA_CM_EVENT_ESTABLISHED, "a thread that polls takes ESTABLISHED", "%s", rdma_event_str(told.last));
	MUST(rdma_disconnect(p.s.id) == 0);
	MUST(readable(told.ch->fd, LIMIT_MS));
	side_close(&p.c);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 5;
	rc = pthread_timedjoin_np(thread, NULL, &until);
	check(rc == 0 && told.last == RDMA_CM_EVENT_DISCONNECTED,
	      "and DISCONNECTED, although the id is destroyed between poll and rdma_get_cm_event", "join says %d", rc);
	if (rc == 0) {
		side_close(&p.s);
		MUST(rdma_destroy_id(p.listener) == 0);
		rdma_destroy_event_channel(p.c.ch);
		rdma_destroy_event_channel(p.s.ch);
	}
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "blocking", blocking }, { "rejecting_actively", rejecting_actively }, { "destroying", destroying },
		{ "ports", ports }, { "loopback", loopback }, { "forking", forking }, { "threads", threads }, { "private_data", private_data },
		{ "life", life }, { "timewait", timewait }, { "peer_number", peer_number }, { "cancelling", cancelling },
		{ "polled", polled }, { "asleep", asleep },
	};

	if (argc == 5 && strcmp(argv[1], "tries") == 0)
		return tries(argv[2], (uint16_t)atoi(argv[3]), strcmp(argv[4], "listen") == 0);
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
