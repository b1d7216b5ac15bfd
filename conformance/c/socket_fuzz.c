/* Random sequences of socket calls, the same for each way in which sockets can be had: what the kernel's sockets do is recorded,
 * and compared with what others do.
 *
 * Each step of a sequence is a function of the seed and its number, so steps can be left out. A step that could wait for ever, or
 * whose result TCP leaves open, is not taken. Both ends of each connection are in this process, so it knows which bytes are on
 * their way, and looks at each of them. What differs on purpose (docs/sockets.md) is not looked at: see `hard` and `same_events`.
 *
 *	socket_fuzz kernel|mode|rsockets
 *
 * Commands on standard input: "record SIMPLE SEED STEPS LEFT_OUT...", which prints a trace, and "check SIMPLE SEED STEPS
 * LEFT_OUT...", followed by that trace. Each ends with "end". A check prints "same", or the first line that differs. SIMPLE is 1
 * for steps that all ways have, and 0 for those of unmodified programs, too. */
#define _GNU_SOURCE
#include "socket_fuzz.h"

/* ---------------------------------------------------------------- calls */

static int new_conn(int listener)
{
	struct conn *c = &conns[conn_count];

	if (conn_count == CONNS)
		die("too many connections");
	*c = (struct conn){ .refs = { 1, 1 } };
	slots[listener].waiting[slots[listener].count++] = conn_count;
	return conn_count++;
}

/* Both ends, when the second one is accepted. */
static void both_in_mode(const struct slot *first, int second)
{
	int fds[2] = { first->fd, second };
	bool was = conns[first->conn].nonblocking[0];

	upgrade(fds);
	set_nonblocking(first->fd, was);
}

static void step_socket(int a)
{
	int type = SOCK_STREAM | (draw(3) == 0 ? SOCK_NONBLOCK : 0);
	struct slot *s = &slots[a];

	if (s->fd >= 0)
		return;
	*s = (struct slot){ .is = FRESH, .nonblocking = type & SOCK_NONBLOCK };
	s->fd = OF(socket, AF_INET, type, 0);
	say("%d: socket%s", a, type & SOCK_NONBLOCK ? " nonblocking" : "");
	MUST(s->fd >= 0);
	done();
}

static void step_listen(int a, int b)
{
	struct slot *s = &slots[a];
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof s->at;

	if (s->fd < 0 || (simple && s->is != FRESH))
		return;
	if (s->is == CONNECTED || s->is == LISTENING || s->is == FAILED) {
		if (is_hard(s) || peer_is_gone(s) || s->is == FAILED)
			return;
		say("%d: listen again", a);
		say_result(listen(s->fd, 8));
		return done();
	}
	if (!simple && slots[b].fd >= 0 && slots[b].is == LISTENING) {
		say("%d: bind to the address of %d", a, b);
		say_result(bind(s->fd, (struct sockaddr *)&slots[b].at, sizeof slots[b].at));
		return done();
	}
	MUST(OF(bind, s->fd, (struct sockaddr *)&at, sizeof at) == 0);
	say("%d: listen", a);
	say_result(OF(listen, s->fd, 8));
	MUST(OF(getsockname, s->fd, (struct sockaddr *)&s->at, &len) == 0 && s->at.sin_port != 0);
	s->is = LISTENING;
	done();
}

static void wait_writable(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };

	MUST(OF(poll, &p, 1, LIMIT_MS) == 1);
}

static void step_connect(int a, int b)
{
	struct slot *s = &slots[a], *l = &slots[b];
	bool refused = draw(12) == 0;
	struct sockaddr_in to = l->at;
	long n;

	if (s->fd < 0 || s->is == FAILED || is_hard(s) || peer_is_gone(s) || (simple && s->is != FRESH))
		return;
	if (s->is != FRESH) {
		if (l->fd < 0 || l->is != LISTENING)
			return;
		say("%d: connect again", a);
		say_result(connect(s->fd, (struct sockaddr *)&to, sizeof to));
		return done();
	}
	if (refused) {
		struct sockaddr_in nobody = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
		socklen_t len = sizeof nobody;
		int holder = socket(AF_INET, SOCK_STREAM, 0);

		/* A port that is bound, and where nobody listens. */
		MUST(bind(holder, (struct sockaddr *)&nobody, sizeof nobody) == 0);
		MUST(getsockname(holder, (struct sockaddr *)&nobody, &len) == 0);
		say("%d: connect to nobody", a);
		say_result(OF(connect, s->fd, (struct sockaddr *)&nobody, sizeof nobody));
		if (s->nonblocking)
			wait_writable(s->fd);
		s->is = FAILED;
		done();
		MUST(close(holder) == 0);
		return;
	}
	if (l->fd < 0 || l->is != LISTENING || l->count == 4)
		return;
	say("%d: connect to %d", a, b);
	n = OF(connect, s->fd, (struct sockaddr *)&to, sizeof to);
	say_result(n);
	if (n < 0 && errno == EINPROGRESS) {
		wait_writable(s->fd);
		if (way == RSOCKETS)
			MUST(rconnect(s->fd, (struct sockaddr *)&to, sizeof to) == 0);
	}
	s->conn = new_conn(b);
	s->end = 0;
	conns[s->conn].nonblocking[0] = s->nonblocking;
	s->is = CONNECTED;
	done();
}

static void step_accept(int a, int b)
{
	struct slot *s = &slots[a], *l = &slots[b];
	int flags = draw(3) == 0 ? SOCK_NONBLOCK : 0, fd;
	struct pollfd p = { .fd = l->fd, .events = POLLIN };

	if (s->fd >= 0 || l->fd < 0 || is_hard(l) || peer_is_gone(l) || l->is == FAILED)
		return;
	if (l->is == LISTENING && l->count == 0 && !l->nonblocking)
		return;
	if (simple && (l->is != LISTENING || l->count == 0))
		return;
	if (l->is == LISTENING && l->count > 0)
		MUST(OF(poll, &p, 1, LIMIT_MS) == 1);
	say("%d: accept from %d%s", a, b, flags ? " nonblocking" : "");
	fd = simple ? OF(accept, l->fd, NULL, NULL) : accept4(l->fd, NULL, NULL, flags);
	if (fd < 0) {
		say_result(fd);
		return done();
	}
	*s = (struct slot){ .fd = fd, .is = CONNECTED, .end = 1 };
	s->conn = l->waiting[0];
	memmove(l->waiting, l->waiting + 1, sizeof l->waiting - sizeof *l->waiting);
	l->count--;
	conns[s->conn].taken = true;
	conns[s->conn].nonblocking[1] = !simple && flags;
	/* An rsocket inherits the listener's. */
	if (simple)
		OF(fcntl, fd, F_SETFL, 0);
	if (way == MODE)
		for (int i = 0; i < SLOTS; i++)
			if (is_connected(&slots[i]) && slots[i].conn == s->conn && slots[i].end == 0)
				both_in_mode(&slots[i], fd);
	done();
}

static bool may_send(const struct slot *s, unsigned bytes)
{
	const struct conn *c = &conns[s->conn];

	if (s->is != CONNECTED)
		return !simple && s->is != FAILED;
	/* TCP takes bytes for a peer that has closed, and then says that it has. */
	return !is_hard(s) && !peer_is_gone(s) && !c->shut_read[!s->end] && (c->taken || !simple) &&
	       c->sent[s->end] - c->got[s->end] + bytes <= ROOM;
}

static void step_send(int a)
{
	static const unsigned sizes[] = { 0, 1, 10, 500, 3000 };
	static const char *const names[] = { "send", "write", "writev", "sendmsg", "sendto" };
	struct slot *s = &slots[a];
	unsigned bytes = sizes[draw(5)], how = draw(simple ? 2 : 5), pick = draw(4);
	int flags = how == 1 || how == 2 ? 0 : (pick & 1 ? MSG_DONTWAIT : 0) | (pick & 2 ? MSG_NOSIGNAL : 0);
	unsigned char out[ROOM];
	struct iovec parts[3] = { { out, bytes / 3 }, { out + bytes / 3, 0 }, { out + bytes / 3, bytes - bytes / 3 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 3 };
	struct conn *c = &conns[s->conn];
	long n;

	if (s->fd < 0 || !may_send(s, bytes))
		return;
	for (unsigned i = 0; i < bytes; i++)
		out[i] = pattern(s->conn, s->end, (s->is == CONNECTED ? c->sent[s->end] : 0) + i);
	say("%d: %s of %u%s%s", a, names[how], bytes, flags & MSG_DONTWAIT ? " DONTWAIT" : "", flags & MSG_NOSIGNAL ? " NOSIGNAL" : "");
	switch (how) {
	case 0:
		n = ON(send, s->fd, out, bytes, flags);
		break;
	case 1:
		n = ON(write, s->fd, out, bytes);
		break;
	case 2:
		n = writev(s->fd, parts, 3);
		break;
	case 3:
		n = sendmsg(s->fd, &message, flags);
		break;
	default:
		n = sendto(s->fd, out, bytes, flags, NULL, 0);
	}
	say_result(n);
	if (n > 0 && s->is == CONNECTED)
		c->sent[s->end] += (unsigned)n;
	done();
}

/* All bytes that were sent to it are there. */
static void arrive(const struct slot *s)
{
	unsigned want = unread(s);
	uint64_t end = now_ms() + settle_ms;
	unsigned char in[ROOM];
	int there = 0;

	if (want == 0)
		return;
	do {
		if (way == KERNEL)
			MUST(ioctl(s->fd, FIONREAD, &there) == 0);
		else
			there = (int)ON(recv, s->fd, in, sizeof in, MSG_PEEK | MSG_DONTWAIT);
		if (there == (int)want)
			return;
		usleep(100);
	} while (now_ms() < end);
	say(" (%d of %u bytes have arrived)", there, want);
}

static void step_receive(int a)
{
	static const unsigned sizes[] = { 0, 1, 2, 100, 1000, ROOM };
	static const char *const names[] = { "recv", "read", "readv", "recvmsg", "recvfrom" };
	struct slot *s = &slots[a];
	unsigned bytes = sizes[draw(6)], how = draw(simple ? 2 : 5), pick = draw(8), wrong = 0;
	int flags = how == 1 || how == 2 ? 0 : (pick & 1 ? MSG_DONTWAIT : 0) | (pick & 2 ? MSG_PEEK : 0) | (pick & 4 ? MSG_WAITALL : 0);
	unsigned char in[ROOM];
	struct iovec parts[3] = { { in, bytes / 3 }, { in + bytes / 3, 0 }, { in + bytes / 3, bytes - bytes / 3 } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 3 };
	struct conn *c = &conns[s->conn];
	bool ended;
	long n;

	/* recv(2) for no bytes: what the kernel returns depends on what it has received before. */
	if (bytes == 0 && how != 1 && how != 2)
		return;
	if (s->fd < 0 || is_hard(s) || (s->is != CONNECTED && (simple || s->is == FAILED)))
		return;
	if (s->is == CONNECTED) {
		bool waits = !(flags & MSG_DONTWAIT) && !*nonblocking(s) && !c->timed[s->end];

		ended = c->shut_write[!s->end] || peer_is_gone(s) || c->shut_read[s->end];
		if (simple && !c->taken)
			return;
		if (waits && !ended && (unread(s) == 0 || (flags & MSG_WAITALL && unread(s) < bytes)))
			return;
		arrive(s);
	}
	say("%d: %s of %u%s%s%s", a, names[how], bytes, flags & MSG_DONTWAIT ? " DONTWAIT" : "", flags & MSG_PEEK ? " PEEK" : "",
	    flags & MSG_WAITALL ? " WAITALL" : "");
	switch (how) {
	case 0:
		n = ON(recv, s->fd, in, bytes, flags);
		break;
	case 1:
		n = ON(read, s->fd, in, bytes);
		break;
	case 2:
		n = readv(s->fd, parts, 3);
		break;
	case 3:
		n = recvmsg(s->fd, &message, flags);
		break;
	default:
		n = recvfrom(s->fd, in, bytes, flags, NULL, NULL);
	}
	say_result(n);
	if (n > 0 && s->is == CONNECTED) {
		for (unsigned i = 0; i < n; i++)
			wrong += in[i] != pattern(s->conn, !s->end, c->got[!s->end] + i);
		if (wrong)
			say(" %u wrong bytes", wrong);
		if (!(flags & MSG_PEEK))
			c->got[!s->end] += (unsigned)n;
	}
	done();
}

static void step_shutdown(int a)
{
	static const char *const names[] = { "SHUT_RD", "SHUT_WR", "SHUT_RDWR" };
	struct slot *s = &slots[a];
	int how = (int)draw(5) % 3;
	struct conn *c = &conns[s->conn];

	/* One that is not connected gives ENOTCONN, and the kernel remembers the shutdown all the same. SHUT_RD: TCP keeps what comes
	 * afterwards. */
	if (!is_connected(s) || is_hard(s))
		return;
	if ((simple && !c->taken) || (how != SHUT_WR && (unread(s) || !c->shut_write[!s->end])))
		return;
	say("%d: shutdown %s", a, names[how]);
	say_result(ON(shutdown, s->fd, how));
	if (s->is == CONNECTED) {
		for (int i = 0; i < SLOTS; i++)
			slots[i].stirred |= is_connected(&slots[i]) && slots[i].conn == s->conn && slots[i].end == s->end;
		c->shut_write[s->end] |= how != SHUT_RD;
		c->shut_read[s->end] |= how != SHUT_WR;
	}
	done();
}

/* What is known of a descriptor that is about to be closed. */
static void forget(struct slot *s)
{
	if (s->in_set && set >= 0)
		(void)epoll_ctl(set, EPOLL_CTL_DEL, s->fd, NULL);
	if (s->is == LISTENING)
		for (int i = 0; i < s->count; i++) {
			conns[s->waiting[i]].refs[1] = 0;
			conns[s->waiting[i]].hard[0] = true;
		}
	if (s->is == CONNECTED) {
		struct conn *c = &conns[s->conn];

		if (--c->refs[s->end] == 0) {
			/* TCP resets what is closed with bytes unread. */
			if (unread(s) > 0 || c->abrupt[s->end] || c->hard[s->end])
				c->hard[!s->end] = true;
			c->shut_write[s->end] = true;
		}
	}
}

static int close_slot(struct slot *s)
{
	int fd = s->fd;

	forget(s);
	s->fd = -1;
	return ON(close, fd);
}

static void step_close(int a)
{
	if (slots[a].fd < 0)
		return;
	say("%d: close", a);
	say_result(close_slot(&slots[a]));
	done();
}

static void step_dup(int a, int b)
{
	struct slot *from = &slots[a], *to = &slots[b];
	unsigned how = draw(3);
	int fd;

	/* One that neither connects nor listens yet stays TCP's. */
	if (!is_connected(from) || a == b || (how < 2 && to->fd >= 0) || is_hard(from) || (to->fd >= 0 && to->is == CONNECTED &&
	    to->conn == from->conn && to->end == from->end && conns[to->conn].refs[to->end] < 2))
		return;
	if (how == 2 && to->fd >= 0) {
		say("%d: dup2 to %d", a, b);
		fd = to->fd;
		conns[from->conn].refs[from->end]++;
		forget(to);
		fd = dup2(from->fd, fd);
	} else {
		say("%d: %s to %d", a, how == 1 ? "F_DUPFD_CLOEXEC" : "dup", b);
		fd = how == 1 ? fcntl(from->fd, F_DUPFD_CLOEXEC, 0) : dup(from->fd);
		conns[from->conn].refs[from->end]++;
	}
	MUST(fd >= 0);
	*to = *from;
	to->fd = fd;
	to->in_set = false;
	done();
}

static void step_flags(int a)
{
	struct slot *s = &slots[a];
	unsigned how = draw(simple ? 1 : 4);
	int on = (int)draw(2);

	if (s->fd < 0 || is_hard(s) || s->is == FAILED || (simple && s->is == LISTENING))
		return;
	switch (how) {
	case 0:
		say("%d: F_SETFL %d", a, on);
		say_result(OF(fcntl, s->fd, F_SETFL, on ? O_NONBLOCK : 0));
		*nonblocking(s) = on;
		break;
	case 1:
		say("%d: FIONBIO %d", a, on);
		say_result(ioctl(s->fd, FIONBIO, &on));
		*nonblocking(s) = on;
		break;
	case 2:
		say("%d: F_GETFL", a);
		say_result(fcntl(s->fd, F_GETFL) & (O_NONBLOCK | O_ACCMODE));
		break;
	default:
		say("%d: F_SETFD %d", a, on);
		say_result(fcntl(s->fd, F_SETFD, on ? FD_CLOEXEC : 0));
		say_result(fcntl(s->fd, F_GETFD));
	}
	done();
}

static void step_options(int a)
{
	static const struct { int level, name; const char *text; } ints[] = {
		{ SOL_SOCKET, SO_ERROR, "SO_ERROR" }, { SOL_SOCKET, SO_TYPE, "SO_TYPE" }, { SOL_SOCKET, SO_ACCEPTCONN, "SO_ACCEPTCONN" },
		{ SOL_SOCKET, SO_KEEPALIVE, "SO_KEEPALIVE" }, { IPPROTO_TCP, TCP_NODELAY, "TCP_NODELAY" },
		{ SOL_SOCKET, SO_REUSEADDR, "SO_REUSEADDR" },
	};
	struct slot *s = &slots[a];
	unsigned which = draw(simple ? 1 : 6);
	int value = (int)draw(2);
	socklen_t len = sizeof value;

	if (s->fd < 0 || is_hard(s) || (simple && s->is == LISTENING))
		return;
	if (which >= 3) {
		say("%d: %s %d", a, ints[which].text, value);
		say_result(setsockopt(s->fd, ints[which].level, ints[which].name, &value, sizeof value));
	} else {
		say("%d: %s", a, ints[which].text);
	}
	value = -1;
	if (ON(getsockopt, s->fd, ints[which].level, ints[which].name, &value, &len) == 0)
		say(" = %d", value);
	else
		say_result(-1);
	done();
}

static void step_limits(int a)
{
	struct slot *s = &slots[a];
	unsigned how = draw(3);
	struct linger linger = { .l_onoff = how < 2, .l_linger = how };
	struct timeval time = { .tv_usec = how ? 5000 : 0 };

	if (!is_connected(s) || is_hard(s))
		return;
	if (draw(2)) {
		say("%d: SO_LINGER %d %d", a, linger.l_onoff, linger.l_linger);
		say_result(setsockopt(s->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
		conns[s->conn].abrupt[s->end] = linger.l_onoff && !linger.l_linger;
	} else {
		say("%d: SO_RCVTIMEO %ld", a, (long)time.tv_usec);
		say_result(setsockopt(s->fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
		conns[s->conn].timed[s->end] = how;
	}
	done();
}

static void step_names(int a)
{
	struct slot *s = &slots[a];
	struct sockaddr_in own = { 0 }, other = { 0 };
	socklen_t len = sizeof own;

	if (s->fd < 0 || is_hard(s) || peer_is_gone(s))
		return;
	/* TCP has forgotten the peer's when both ends are done. */
	if (s->is == CONNECTED && conns[s->conn].shut_write[0] && conns[s->conn].shut_write[1])
		return;
	say("%d: names", a);
	say_result(getsockname(s->fd, (struct sockaddr *)&own, &len));
	if (s->is != FRESH)
		say(" %x %s", ntohl(own.sin_addr.s_addr), own.sin_port ? "port" : "none");
	len = sizeof own;
	say_result(getpeername(s->fd, (struct sockaddr *)&own, &len));
	for (int i = 0; i < SLOTS && s->is == CONNECTED; i++)
		if (is_connected(&slots[i]) && slots[i].conn == s->conn && slots[i].end != s->end) {
			len = sizeof other;
			MUST(getsockname(slots[i].fd, (struct sockaddr *)&other, &len) == 0);
			say(" %s", own.sin_port == other.sin_port && own.sin_addr.s_addr == other.sin_addr.s_addr ? "its peer" : "another");
			break;
		}
	done();
}

/* ---------------------------------------------------------------- waiting */

static void look_by_select(char *to, size_t size)
{
	struct timeval none = { 0 };
	fd_set r, w;
	int most = -1, n = 0;

	FD_ZERO(&r);
	FD_ZERO(&w);
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].fd >= 0 && !is_hard(&slots[i])) {
			FD_SET(slots[i].fd, &r);
			FD_SET(slots[i].fd, &w);
			most = slots[i].fd > most ? slots[i].fd : most;
		}
	MUST(select(most + 1, &r, &w, NULL, &none) >= 0);
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].fd >= 0 && !is_hard(&slots[i]))
			n += snprintf(to + n, size - (size_t)n, " %d%s%s", i, FD_ISSET(slots[i].fd, &r) ? "r" : "",
				      FD_ISSET(slots[i].fd, &w) ? "w" : "");
}

static void step_select(void)
{
	say("select:");
	say_seen(look_by_select);
	done();
}

/* By slot: how it was entered. */
static unsigned entered[SLOTS];

static void step_control(int a)
{
	static const unsigned kinds[] = { 0, EPOLLET, EPOLLONESHOT, EPOLLET | EPOLLONESHOT };
	struct slot *s = &slots[a];
	unsigned op = draw(4), kind = kinds[draw(4)], events = 1 + draw(3);
	struct epoll_event event = { .data.u32 = (uint32_t)a };

	/* What becomes of a socket that is in a set already is reported once more. */
	if (s->fd < 0 || is_hard(s) || s->is == FRESH)
		return;
	event.events = kind | (events & 1 ? EPOLLIN | EPOLLRDHUP : 0) | (events & 2 ? EPOLLOUT : 0);
	op = op < 2 ? EPOLL_CTL_ADD : op == 2 ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
	say("%d: epoll_ctl %s %#x", a, op == EPOLL_CTL_ADD ? "add" : op == EPOLL_CTL_MOD ? "change" : "delete", event.events);
	if (epoll_ctl(set, (int)op, s->fd, &event) == 0) {
		say(" = 0");
		s->in_set = op != EPOLL_CTL_DEL;
		s->stirred = false;
		entered[a] = event.events;
	} else {
		say_result(-1);
	}
	done();
}

static unsigned seen_events[SLOTS];

static void look_by_epoll(char *to, size_t size)
{
	struct epoll_event events[SLOTS];
	int n = 0, count;

	MUST((count = epoll_wait(set, events, SLOTS, 0)) >= 0);
	/* What is reported once only counts from one look to the next. */
	for (int i = 0; i < SLOTS; i++)
		if (!(entered[i] & (EPOLLET | EPOLLONESHOT)))
			seen_events[i] = 0;
	for (int i = 0; i < count; i++)
		seen_events[events[i].data.u32] |= events[i].events;
	for (int i = 0; i < SLOTS; i++) {
		const char *want;
		char name[16];
		/* The kernel has edges without a change: one of POLLOUT when the peer is done, for example. */
		unsigned recorded_events = 0, all = seen_events[i] & ~(entered[i] & EPOLLET ? EPOLLOUT : 0u);

		if (!slots[i].in_set || slots[i].fd < 0 || is_hard(&slots[i]))
			continue;
		/* A shutdown is an edge for the kernel, also if nothing changes by it. */
		if (entered[i] & EPOLLET && slots[i].stirred)
			continue;
		/* As of `same_events`. */
		if (peer_is_gone(&slots[i]) || (is_connected(&slots[i]) && unread(&slots[i])))
			all &= ~(unsigned)EPOLLHUP;
		snprintf(name, sizeof name, " %d:", i);
		if (checking && entered[i] & EPOLLET && (want = strstr(recorded(), name)) && want < strstr(recorded(), " |"))
			sscanf(want + strlen(name), "%x", &recorded_events);
		/* Each change is an edge; and there may be more of them, as long as each is true. */
		if (checking && entered[i] & EPOLLET && (all & recorded_events) == recorded_events &&
		    (all & ~(unsigned)now_of(slots[i].fd) & (EPOLLIN | EPOLLOUT | EPOLLRDHUP)) == 0)
			all = recorded_events;
		if (all || (checking && recorded_events))
			n += snprintf(to + n, size - (size_t)n, " %d:%x", i, all);
	}
}

static void step_epoll(void)
{
	memset(seen_events, 0, sizeof seen_events);
	say("epoll_wait:");
	say_seen(look_by_epoll);
	done();
}

/* ---------------------------------------------------------------- several calls in one step */

static void nothing(int number)
{
	(void)number;
}

static void step_signal(int a)
{
	struct itimerval timer = { .it_value = { .tv_usec = 3000 }, .it_interval = { .tv_usec = 20000 } };
	struct slot *s = &slots[a];
	struct conn *c = &conns[s->conn];
	char byte;
	int n, why;

	if (!is_connected(s) || is_hard(s) || peer_is_gone(s) || unread(s) || c->shut_write[!s->end] || c->shut_read[s->end] ||
	    *nonblocking(s) || c->timed[s->end] || !c->taken)
		return;
	say("%d: recv that a signal ends", a);
	MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
	n = (int)ON(recv, s->fd, &byte, 1, 0);
	why = errno;
	memset(&timer, 0, sizeof timer);
	MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
	errno = why;
	say_result(n);
	done();
}

/* Fills the buffers of one direction, and empties them. */
static void step_fill(int a)
{
	static unsigned char block[30000];
	struct slot *s = &slots[a], *peer = NULL;
	struct conn *c = &conns[s->conn];
	unsigned wrong = 0;
	uint64_t end = now_ms() + LIMIT_MS;
	long n;

	if (!is_connected(s) || is_hard(s) || peer_is_gone(s) || !c->taken || c->shut_write[s->end] || c->shut_read[!s->end])
		return;
	for (int i = 0; i < SLOTS; i++)
		if (is_connected(&slots[i]) && slots[i].conn == s->conn && slots[i].end != s->end)
			peer = &slots[i];
	if (!peer || is_hard(peer))
		return;
	say("%d: fill", a);
	for (;;) {
		struct pollfd p = { .fd = s->fd, .events = POLLOUT };

		for (unsigned i = 0; i < sizeof block; i++)
			block[i] = pattern(s->conn, s->end, c->sent[s->end] + i);
		n = ON(send, s->fd, block, sizeof block, MSG_DONTWAIT);
		if (n > 0)
			c->sent[s->end] += (unsigned)n;
		else if (n == 0 || errno != EAGAIN || ON(poll, &p, 1, 20) == 0)
			break;
	}
	say_result(n);
	while (c->got[s->end] != c->sent[s->end] && now_ms() < end) {
		n = ON(recv, peer->fd, block, sizeof block, MSG_DONTWAIT);
		if (n < 0 && errno == EAGAIN) {
			struct pollfd p = { .fd = peer->fd, .events = POLLIN };

			MUST(ON(poll, &p, 1, LIMIT_MS) == 1);
			continue;
		}
		if (n <= 0)
			break;
		for (unsigned i = 0; i < n; i++)
			wrong += block[i] != pattern(s->conn, s->end, c->got[s->end] + i);
		c->got[s->end] += (unsigned)n;
	}
	say(" and empty%s, %u wrong bytes", c->got[s->end] == c->sent[s->end] ? "" : " not", wrong);
	done();
}

/* ---------------------------------------------------------------- sequences */

static void step(unsigned which)
{
	int a;

	if (which < 10) {
		step_socket(pick(is_none));
	} else if (which < 13) {
		a = pick(is_fresh);
		step_listen(a, pick(is_listening));
	} else if (which < 22) {
		a = pick(is_fresh);
		step_connect(a, pick(is_listening));
	} else if (which < 32) {
		a = pick(is_none);
		step_accept(a, pick(has_waiting));
	} else if (which < 48) {
		step_send(pick(is_usable));
	} else if (which < 58) {
		step_receive(pick(has_unread));
	} else if (which < 65) {
		step_receive(pick(is_connected));
	} else if (which < 68) {
		step_shutdown(pick(is_usable));
	} else if (which < 71) {
		step_close(pick(is_done));
	} else if (which < 73) {
		step_close(pick(is_connected));
	} else if (which < 76) {
		step_flags(pick(is_usable));
	} else if (which < 79) {
		step_options(pick(is_connected));
	} else if (which < 81) {
		step_signal(pick(is_usable));
	} else if (which < 82) {
		step_fill(pick(is_usable));
	} else if (simple) {
		step_receive(pick(has_unread));
	} else if (which < 84) {
		a = pick(is_usable);
		step_dup(a, pick(is_none));
	} else if (which < 86) {
		step_limits(pick(is_usable));
	} else if (which < 87) {
		step_names(pick(is_usable));
	} else if (which < 89) {
		step_select();
	} else if (which < 95) {
		step_control(pick(is_usable));
	} else {
		step_epoll();
	}
}

static void sequence(uint64_t seed, unsigned steps, const bool *left_out)
{
	memset(slots, 0, sizeof slots);
	for (int i = 0; i < SLOTS; i++)
		slots[i].fd = -1;
	conn_count = line_at = 0;
	different = false;
	if (!simple)
		MUST((set = epoll_create1(EPOLL_CLOEXEC)) >= 0);
	for (unsigned i = 0; i < steps && !different; i++) {
		if (left_out[i])
			continue;
		seed_step(seed, i);
		snprintf(said, sizeof said, "#%u ", i);
		step(draw(100));
	}
	for (int i = 0; i < SLOTS; i++)
		if (slots[i].fd >= 0)
			close_slot(&slots[i]);
	if (!simple)
		MUST(close(set) == 0);
	if (checking && !different)
		puts("same");
	puts("end");
	fflush(stdout);
}

static void broken_pipe(int number)
{
	(void)number;
	broken_pipes++;
}

int main(int argc, char **argv)
{
	static char line[1 << 16];
	static bool left_out[LINES];
	struct sigaction pipe_action = { .sa_handler = broken_pipe }, alarm_action = { .sa_handler = nothing };

	if (argc != 2)
		return 2;
	way = strcmp(argv[1], "mode") == 0 ? MODE : strcmp(argv[1], "rsockets") == 0 ? RSOCKETS : KERNEL;
	if (getenv("SETTLE_MS"))
		settle_ms = (unsigned)atoi(getenv("SETTLE_MS"));
	other_than_kernels = way != KERNEL || getenv("RULED");
	MUST(sigaction(SIGPIPE, &pipe_action, NULL) == 0 && sigaction(SIGALRM, &alarm_action, NULL) == 0);
	while (fgets(line, sizeof line, stdin)) {
		char *rest = strtok(line, " \n");
		unsigned steps;
		uint64_t seed;

		if (!rest)
			continue;
		checking = strcmp(rest, "check") == 0;
		simple = atoi(strtok(NULL, " \n"));
		seed = strtoull(strtok(NULL, " \n"), NULL, 10);
		steps = (unsigned)atoi(strtok(NULL, " \n"));
		MUST(steps <= LINES);
		memset(left_out, 0, sizeof left_out);
		while ((rest = strtok(NULL, " \n")))
			left_out[(unsigned)atoi(rest) % LINES] = true;
		for (line_count = 0; checking && fgets(lines[line_count], LINE, stdin); line_count++) {
			lines[line_count][strcspn(lines[line_count], "\n")] = 0;
			if (strcmp(lines[line_count], "end") == 0)
				break;
		}
		sequence(seed, steps, left_out);
	}
	return 0;
}
