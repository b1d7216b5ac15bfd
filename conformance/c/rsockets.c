/* rsockets (rsocket(7)) beside what the man pages of the kernel's sockets say: states and their errno, readiness,
 * half-closed streams, peers that go, mapped buffers, sets of descriptors, and data in both directions at once. */
#define _GNU_SOURCE
#include "common.h"

#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <rdma/rsocket.h>

static struct sockaddr_storage listening;
static socklen_t length;

static int family(void)
{
	return strchr(address, ':') ? AF_INET6 : AF_INET;
}

static struct sockaddr *sa(void)
{
	return (struct sockaddr *)&listening;
}

/* A listening socket; `listening` is its address. */
static int listener(int type, int backlog)
{
	int rs;

	listening = sockaddr_of(address, 0);
	length = family() == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	MUST((rs = rsocket(family(), SOCK_STREAM | type, 0)) >= 0);
	MUST(rbind(rs, sa(), length) == 0);
	MUST(rlisten(rs, backlog) == 0);
	length = sizeof listening;
	MUST(rgetsockname(rs, sa(), &length) == 0);
	return rs;
}

static int client(void)
{
	int rs;

	MUST((rs = rsocket(family(), SOCK_STREAM, 0)) >= 0);
	return rs;
}

static int connected(void)
{
	int rs = client();

	MUST(rconnect(rs, sa(), length) == 0);
	return rs;
}

/* Two connected sockets. */
static void pair_of(int rs[2])
{
	int l = listener(0, 4);

	rs[0] = connected();
	MUST((rs[1] = raccept(l, NULL, NULL)) >= 0);
	MUST(rclose(l) == 0);
}

static void set_nonblocking(int rs)
{
	MUST(rfcntl(rs, F_SETFL, rfcntl(rs, F_GETFL) | O_NONBLOCK) == 0);
}

/* What rpoll says at once, or within the limit if it must not be nothing. */
static int events_of(int rs, short events, int ms)
{
	struct pollfd p = { .fd = rs, .events = events };

	return rpoll(&p, 1, ms) < 0 ? -1 : p.revents;
}

static void check_events(int rs, short events, int want, const char *name)
{
	int got = events_of(rs, events, want ? LIMIT_MS : QUIET_MS);

	check(got == want, name, "events %#x, want %#x", got, want);
}

static int option(int rs, int level, int name)
{
	int value = -1;
	socklen_t len = sizeof value;

	return rgetsockopt(rs, level, name, &value, &len) ? -2 : value;
}

static void states(void)
{
	struct sockaddr_storage other = sockaddr_of(address, 1);
	char byte = 0;
	int rs, l;

	check_failed(rsocket(AF_UNIX, SOCK_STREAM, 0) < 0, EOPNOTSUPP, "a family other than IP");
	check_failed(rsocket(family(), SOCK_RAW, 0) < 0, EOPNOTSUPP, "a raw socket");
	check_failed(rsend(12345, &byte, 1, 0) < 0, EBADF, "sending on a descriptor that is none");
	check_failed(rrecv(0, &byte, 1, 0) < 0, EBADF, "receiving on a descriptor of the kernel");
	check_failed(rclose(12345) < 0, EBADF, "closing a descriptor that is none");
	rs = client();
	check_failed(rsend(rs, &byte, 1, 0) < 0, ENOTCONN, "sending before connecting");
	check_failed(rrecv(rs, &byte, 1, 0) < 0, ENOTCONN, "receiving before connecting");
	check_failed(rshutdown(rs, SHUT_WR) < 0, ENOTCONN, "shutting down before connecting");
	check_failed(raccept(rs, NULL, NULL) < 0, EINVAL, "accepting on a socket that does not listen");
	length = sizeof listening;
	check_failed(rgetpeername(rs, sa(), &length) < 0, ENOTCONN, "the peer of a socket without one");
	check_failed(rshutdown(rs, 9) < 0, EINVAL, "shutting down an unknown direction");
	check_failed(rconnect(rs, (struct sockaddr *)&other, sizeof other) < 0, ECONNREFUSED, "nobody listens");
	check(option(rs, SOL_SOCKET, SO_ERROR) == 0, "the error was reported by the call", "it was not");
	l = listener(0, 4);
	check(rconnect(rs, sa(), length) == 0, "a socket connects after a failed attempt", "errno %d", errno);
	check_failed(rconnect(rs, sa(), length) < 0, EISCONN, "connecting twice");
	check_failed(rbind(rs, sa(), length) < 0, EINVAL, "binding a connected socket");
	check_failed(rsendto(rs, &byte, 1, 0, sa(), length) < 0, EISCONN, "sending to an address");
	check_failed(rsend(rs, &byte, 1, MSG_OOB) < 0, EOPNOTSUPP, "urgent data");
	check_failed(rsend(rs, (void *)16, 100, 0) < 0, EFAULT, "sending from an address that is not mapped");
	check_failed(rrecv(l, &byte, 1, 0) < 0, ENOTCONN, "receiving on a listening socket");
	MUST(rclose(rs) == 0 && rclose(l) == 0);
	check_failed(rsend(rs, &byte, 1, 0) < 0, EBADF, "sending on a closed socket");
}

static void addresses(void)
{
	struct sockaddr_storage one = { 0 }, two = { 0 }, from = { 0 };
	socklen_t len = sizeof one, len2 = sizeof two, from_len = sizeof from;
	int rs[2], l = listener(0, 4), other;

	rs[0] = connected();
	MUST((rs[1] = raccept(l, (struct sockaddr *)&from, &from_len)) >= 0);
	MUST(rgetpeername(rs[0], (struct sockaddr *)&one, &len) == 0);
	check(len == length && !memcmp(&one, &listening, len), "the client's peer is the listener's address", "it is not");
	len = sizeof one;
	MUST(rgetsockname(rs[0], (struct sockaddr *)&one, &len) == 0);
	MUST(rgetpeername(rs[1], (struct sockaddr *)&two, &len2) == 0);
	check(len == len2 && !memcmp(&one, &two, len), "the server's peer is the client's address", "it is not");
	check(from_len == len && !memcmp(&one, &from, len), "raccept gives it, too", "it does not");
	len = 4;
	memset(&one, 0xee, sizeof one);
	MUST(rgetpeername(rs[0], (struct sockaddr *)&one, &len) == 0);
	check(len == length && ((unsigned char *)&one)[4] == 0xee, "a short buffer is filled only to its end", "%u", len);
	other = client();
	check_failed(rbind(other, sa(), length) < 0, EADDRINUSE, "binding to a port that is taken");
	MUST(rclose(other) == 0 && rclose(rs[0]) == 0 && rclose(rs[1]) == 0 && rclose(l) == 0);
}

static void options_of(void)
{
	int rs = client(), l, value = 40000, one = 1, two[2], *p;
	struct linger linger = { 1, 3 };
	struct tcp_info info = { 0 };
	socklen_t len = sizeof linger;

	MUST(rsetsockopt(rs, SOL_SOCKET, SO_SNDBUF, &value, sizeof value) == 0);
	check(option(rs, SOL_SOCKET, SO_SNDBUF) == 80000, "a buffer is twice what is set", "it is not");
	MUST(rsetsockopt(rs, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
	check(option(rs, IPPROTO_TCP, TCP_NODELAY) == 1, "TCP_NODELAY is kept", "it is not");
	MUST(rsetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	linger.l_onoff = linger.l_linger = 0;
	MUST(rgetsockopt(rs, SOL_SOCKET, SO_LINGER, &linger, &len) == 0);
	check(linger.l_onoff == 1 && linger.l_linger == 3, "SO_LINGER is kept", "it is not");
	check(option(rs, SOL_RDMA, RDMA_SQSIZE) == 384, "RDMA_SQSIZE is 384", "it is not");
	value = 100;
	MUST(rsetsockopt(rs, SOL_RDMA, RDMA_RQSIZE, &value, sizeof value) == 0);
	check(option(rs, SOL_RDMA, RDMA_RQSIZE) == 100, "RDMA_RQSIZE is kept", "it is not");
	check_failed(rsetsockopt(rs, SOL_SOCKET, 9999, &value, sizeof value) < 0, EOPNOTSUPP, "an unknown option");
	check_failed(rsetsockopt(rs, SOL_SOCKET, SO_SNDBUF, &value, 1) < 0, EINVAL, "an option that is too short");
	value = 0;
	check_failed(rsetsockopt(rs, IPPROTO_TCP, TCP_KEEPIDLE, &value, sizeof value) < 0, EINVAL, "a time of zero");
	check(option(rs, SOL_SOCKET, SO_TYPE) == SOCK_STREAM, "SO_TYPE", "it is not");
	l = listener(0, 1);
	check(option(l, SOL_SOCKET, SO_ACCEPTCONN) == 1, "SO_ACCEPTCONN", "it is not");
	MUST(rconnect(rs, sa(), length) == 0);
	check_failed(rsetsockopt(rs, SOL_RDMA, RDMA_SQSIZE, &one, sizeof one) < 0, EINVAL, "a size after connecting");
	len = sizeof info;
	MUST(rgetsockopt(rs, IPPROTO_TCP, TCP_INFO, &info, &len) == 0);
	check(info.tcpi_state == TCP_ESTABLISHED, "TCP_INFO says established", "%d", info.tcpi_state);
	check(rfcntl(rs, F_GETFL) == O_RDWR, "F_GETFL", "%#x", rfcntl(rs, F_GETFL));
	set_nonblocking(rs);
	check(rfcntl(rs, F_GETFL) == (O_RDWR | O_NONBLOCK), "F_GETFL with O_NONBLOCK", "%#x", rfcntl(rs, F_GETFL));
	p = two;
	check_failed(rfcntl(rs, F_GETLK, p) < 0, EOPNOTSUPP, "a lock");
	MUST(rclose(rs) == 0 && rclose(l) == 0);
}

/* Connecting and accepting without waiting. */
static void nonblocking(void)
{
	struct sockaddr_storage nobody;
	int l = listener(SOCK_NONBLOCK, 4), rs = client(), s, late;
	char byte = 'x';

	check_failed(raccept(l, NULL, NULL) < 0, EAGAIN, "nobody has connected");
	check_events(l, POLLIN, 0, "a listening socket without a connection is not ready");
	set_nonblocking(rs);
	check_failed(rconnect(rs, sa(), length) < 0, EINPROGRESS, "rconnect does not wait");
	check(events_of(rs, POLLOUT, LIMIT_MS) == POLLOUT, "rpoll waits for the connection", "it does not");
	check(option(rs, SOL_SOCKET, SO_ERROR) == 0, "there is no error", "there is");
	check(rconnect(rs, sa(), length) == 0, "rconnect says once that it is connected", "errno %d", errno);
	check_failed(rconnect(rs, sa(), length) < 0, EISCONN, "and then that it was");
	check_events(l, POLLIN, POLLIN, "the listening socket is ready");
	MUST((s = raccept(l, NULL, NULL)) >= 0);
	check(rfcntl(s, F_GETFL) & O_NONBLOCK, "the new socket inherits O_NONBLOCK", "it does not");
	check_failed(rrecv(s, &byte, 1, 0) < 0, EAGAIN, "nothing to read");
	check_events(s, POLLIN | POLLOUT, POLLOUT, "it can be written and not read");
	check(rsend(rs, &byte, 1, 0) == 1, "a byte is sent", "errno %d", errno);
	check_events(s, POLLIN, POLLIN, "and can be read");
	check(rrecv(s, &byte, 1, MSG_PEEK) == 1 && rrecv(s, &byte, 1, 0) == 1, "peeked at, and read", "errno %d", errno);
	MUST(rclose(rs) == 0 && rclose(s) == 0 && rclose(l) == 0);

	nobody = listening;
	rs = client();
	set_nonblocking(rs);
	check_failed(rconnect(rs, (struct sockaddr *)&nobody, length) < 0, EINPROGRESS, "to nobody");
	late = events_of(rs, POLLOUT, LIMIT_MS);
	check((late & (POLLOUT | POLLERR)) == (POLLOUT | POLLERR), "rpoll tells of the failure", "%#x", late);
	check(option(rs, SOL_SOCKET, SO_ERROR) == ECONNREFUSED, "SO_ERROR says which", "it does not");
	check(option(rs, SOL_SOCKET, SO_ERROR) == 0, "once", "twice");
	MUST(rclose(rs) == 0);
}

/* A writer that nobody reads for stops, and goes on when there is room. */
static void backpressure(void)
{
	static char chunk[30000];
	size_t sent = 0, got = 0;
	ssize_t n;
	int rs[2];

	pair_of(rs);
	set_nonblocking(rs[0]);
	while ((n = rsend(rs[0], chunk, sizeof chunk, 0)) > 0 || events_of(rs[0], POLLOUT, QUIET_MS) == POLLOUT)
		sent += n > 0 ? (size_t)n : 0;
	check_failed(n < 0, EAGAIN, "a writer stops when the peer's ring is full");
	check(sent == 262144, "which is as large as the default says", "%zu", sent);
	check_events(rs[0], POLLOUT, 0, "it is not ready for writing");
	while (got < sent) {
		MUST((n = rrecv(rs[1], chunk, sizeof chunk, 0)) > 0);
		got += (size_t)n;
	}
	check_events(rs[0], POLLOUT, POLLOUT, "until the peer has read");
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

static void vectors(void)
{
	char a[3], b[5], c[4];
	struct iovec out[3] = { { "abc", 3 }, { NULL, 0 }, { "defgh", 5 } };
	struct iovec in[2] = { { a, sizeof a }, { b, sizeof b } };
	struct msghdr msg = { .msg_iov = in, .msg_iovlen = 2 };
	int rs[2];

	pair_of(rs);
	check(rwritev(rs[0], out, 3) == 8, "a gathered write", "errno %d", errno);
	struct iovec most[3] = { { a, SSIZE_MAX }, { a, SSIZE_MAX }, { a, 10 } };
	check_failed(rwritev(rs[0], most, 3) < 0, EINVAL, "more bytes than a call can return");
	check(rrecvmsg(rs[1], &msg, MSG_WAITALL) == 8 && !memcmp(a, "abc", 3) && !memcmp(b, "defgh", 5),
	      "fills all vectors", "it does not");
	check(rwrite(rs[0], "wxyz", 4) == 4 && rread(rs[1], c, 2) == 2 && rread(rs[1], c + 2, 2) == 2 && !memcmp(c, "wxyz", 4),
	      "a message is read in pieces", "it is not");
	msg.msg_iovlen = 2;
	msg.msg_iov = out;
	check(rsendmsg(rs[0], &msg, 0) == 3, "rsendmsg", "errno %d", errno);
	in[0].iov_len = 1;
	check(rreadv(rs[1], in, 2) == 3 && a[0] == 'a' && b[0] == 'b', "rreadv", "errno %d", errno);
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

static void half_closed(void)
{
	char buffer[16];
	int rs[2];

	pair_of(rs);
	MUST(rsend(rs[0], "last", 4, 0) == 4);
	MUST(rshutdown(rs[0], SHUT_WR) == 0);
	check_failed(rsend(rs[0], "x", 1, 0) < 0, EPIPE, "sending after shutting down");
	check(rrecv(rs[1], buffer, 16, 0) == 4 && !memcmp(buffer, "last", 4), "what was sent before is there", "it is not");
	check_events(rs[1], POLLIN | POLLRDHUP, POLLIN | POLLRDHUP, "the peer is told");
	check(rrecv(rs[1], buffer, 16, 0) == 0, "then the end", "errno %d", errno);
	check(rsend(rs[1], "answer", 6, 0) == 6, "the other direction works", "errno %d", errno);
	check(rrecv(rs[0], buffer, 16, 0) == 6, "both ways", "errno %d", errno);
	MUST(rshutdown(rs[1], SHUT_WR) == 0);
	check(rrecv(rs[0], buffer, 16, 0) == 0, "and ends, too", "errno %d", errno);
	check_events(rs[0], POLLIN, POLLIN | POLLHUP, "then both directions are done");
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);

	pair_of(rs);
	MUST(rsend(rs[0], "left", 4, 0) == 4);
	MUST(rclose(rs[0]) == 0);
	check(rrecv(rs[1], buffer, 2, 0) == 2 && rrecv(rs[1], buffer + 2, 9, 0) == 2 && !memcmp(buffer, "left", 4),
	      "what a peer sent before it closed is there", "it is not");
	check(rrecv(rs[1], buffer, 9, 0) == 0, "then the end", "errno %d", errno);
	check_failed(rsend(rs[1], "x", 1, 0) < 0, ECONNRESET, "sending to a peer that has closed");
	MUST(rclose(rs[1]) == 0);

	pair_of(rs);
	MUST(rclose(rs[0]) == 0);
	usleep(QUIET_MS * 1000);
	check_failed(rsend(rs[1], "x", 1, 0) < 0, ECONNRESET, "also without a look at it before");
	MUST(rclose(rs[1]) == 0);
}

/* A peer that has come and gone before this end's first call on the connection. */
static void come_and_gone(void)
{
	int l = listener(0, 4), c, s;
	char buffer[9];

	c = connected();
	MUST(rsend(c, "hello", 5, 0) == 5 && rclose(c) == 0);
	usleep(QUIET_MS * 1000);
	MUST((s = raccept(l, NULL, NULL)) >= 0);
	check(rrecv(s, buffer, 9, 0) == 5 && !memcmp(buffer, "hello", 5), "what a client sent before raccept is there",
	      "errno %d", errno);
	check(rrecv(s, buffer, 9, 0) == 0, "then the end", "errno %d", errno);
	MUST(rclose(s) == 0);
	c = client();
	set_nonblocking(c);
	MUST(rconnect(c, sa(), length) < 0 && errno == EINPROGRESS);
	MUST((s = raccept(l, NULL, NULL)) >= 0);
	MUST(rsend(s, "hello", 5, 0) == 5 && rclose(s) == 0);
	usleep(QUIET_MS * 1000);
	check(rconnect(c, sa(), length) == 0, "a client was connected, although its server has closed", "errno %d", errno);
	check(rrecv(c, buffer, 9, 0) == 5 && rrecv(c, buffer, 9, 0) == 0, "and gets what the server sent", "errno %d", errno);
	MUST(rclose(c) == 0 && rclose(l) == 0);
}

/* A peer process that is killed in the middle. */
static void killed(void)
{
	int ready[2], rs, l, status, got;
	char buffer[1000];
	ssize_t n;
	pid_t pid;

	MUST(pipe(ready) == 0);
	pid = fork();
	if (pid == 0) {
		alarm(GROUP_LIMIT);
		l = listener(0, 4);
		MUST(write(ready[1], &listening, sizeof listening) == sizeof listening);
		MUST((rs = raccept(l, NULL, NULL)) >= 0);
		MUST(rsend(rs, "hello", 5, 0) == 5);
		for (;;)
			pause();
	}
	MUST(read(ready[0], &listening, sizeof listening) == sizeof listening);
	length = family() == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	rs = connected();
	MUST(rrecv(rs, buffer, 5, MSG_WAITALL) == 5);
	kill(pid, SIGKILL);
	MUST(waitpid(pid, &status, 0) == pid);
	n = rrecv(rs, buffer, sizeof buffer, 0);
	check(n == 0 || (n < 0 && errno == ECONNRESET), "a reader learns that the peer was killed", "%zd, errno %d", n, errno);
	got = events_of(rs, POLLIN | POLLOUT, LIMIT_MS);
	check(got & POLLHUP, "and so does rpoll", "%#x", got);
	check_failed(rsend(rs, buffer, 1, 0) < 0, ECONNRESET, "and a writer");
	MUST(rclose(rs) == 0);
}

#define TOTAL (24 << 20)

static unsigned char pattern(size_t at, int seed)
{
	return (unsigned char)((at * 131 + at / 4093) ^ (size_t)seed);
}

struct flow {
	int rs, seed;
	bool good;
};

static void *sends(void *arg)
{
	struct flow *flow = arg;
	unsigned char buffer[70001];
	size_t at = 0;

	while (at < TOTAL) {
		size_t want = 1 + (at * 7919) % sizeof buffer;
		ssize_t n;

		want = want < TOTAL - at ? want : TOTAL - at;
		for (size_t i = 0; i < want; i++)
			buffer[i] = pattern(at + i, flow->seed);
		n = rsend(flow->rs, buffer, want, 0);
		if (n <= 0)
			return NULL;
		at += (size_t)n;
	}
	flow->good = true;
	return NULL;
}

static void *receives(void *arg)
{
	struct flow *flow = arg;
	unsigned char buffer[50021];
	size_t at = 0;

	while (at < TOTAL) {
		ssize_t n = rrecv(flow->rs, buffer, 1 + (at * 104729) % sizeof buffer, 0);

		if (n <= 0)
			return NULL;
		for (ssize_t i = 0; i < n; i++)
			if (buffer[i] != pattern(at + (size_t)i, flow->seed))
				return NULL;
		at += (size_t)n;
	}
	flow->good = true;
	return NULL;
}

/* Four threads on two sockets, in both directions at once. */
static void both_ways(void)
{
	int rs[2];

	pair_of(rs);
	struct flow flows[4] = { { rs[0], 1, false }, { rs[1], 1, false }, { rs[1], 2, false }, { rs[0], 2, false } };
	pthread_t threads[4];

	for (int i = 0; i < 4; i++)
		MUST(pthread_create(&threads[i], NULL, i % 2 ? receives : sends, &flows[i]) == 0);
	for (int i = 0; i < 4; i++)
		MUST(pthread_join(threads[i], NULL) == 0);
	for (int i = 0; i < 4; i++)
		check(flows[i].good, i % 2 ? "every byte is right" : "everything was sent", "%d: it is not", i);
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

#define MANY 60

/* Many connections; more than the backlog wait for a place. rpoll and a descriptor of the kernel together. */
static void many(void)
{
	struct pollfd fds[MANY + 1];
	int clients[MANY], l = listener(0, 5), ready[2], rs;
	char byte = 'a';

	for (int i = 0; i < MANY; i++) {
		clients[i] = client();
		set_nonblocking(clients[i]);
		MUST(rconnect(clients[i], sa(), length) < 0 && errno == EINPROGRESS);
	}
	for (int i = 0; i < MANY; i++) {
		MUST((fds[i].fd = raccept(l, NULL, NULL)) >= 0);
		fds[i].events = POLLIN;
	}
	check(true, "all were accepted", "");
	MUST(pipe(ready) == 0);
	fds[MANY] = (struct pollfd){ .fd = ready[0], .events = POLLIN };
	check(rpoll(fds, MANY + 1, QUIET_MS) == 0, "nothing is ready", "it is");
	for (int i = 0; i < MANY; i++) {
		MUST(events_of(clients[i], POLLOUT, LIMIT_MS) == POLLOUT);
		MUST(rsend(clients[i], &byte, 1, 0) == 1);
	}
	for (int i = 0; i < MANY; i++)
		MUST(events_of(fds[i].fd, POLLIN, LIMIT_MS) == POLLIN);
	rs = rpoll(fds, MANY + 1, LIMIT_MS);
	check(rs == MANY, "all sockets are ready", "%d", rs);
	MUST(write(ready[1], &byte, 1) == 1);
	rs = rpoll(fds, MANY + 1, LIMIT_MS);
	check(rs == MANY + 1 && fds[MANY].revents == POLLIN, "and so is the pipe", "%d", rs);
	for (int i = 0; i < MANY; i++)
		MUST(rrecv(fds[i].fd, &byte, 1, 0) == 1);
	rs = rpoll(fds, MANY + 1, LIMIT_MS);
	check(rs == 1, "then only the pipe", "%d", rs);
	for (int i = 0; i < MANY; i++)
		MUST(rclose(clients[i]) == 0 && rclose(fds[i].fd) == 0);
	MUST(rclose(l) == 0);
}

/* A thread that waits for a socket in rpoll, beside a descriptor of the kernel, is woken by either. */
static void *later(void *arg)
{
	usleep(100000);
	return (void *)(intptr_t)(rsend(*(int *)arg, "x", 1, 0) == 1);
}

static void *later_write(void *arg)
{
	usleep(100000);
	return (void *)(intptr_t)(write(*(int *)arg, "x", 1) == 1);
}

static void waking(void)
{
	int rs[2], fds[2], n;
	fd_set in, out;
	pthread_t thread;
	struct timeval none = { 0, 0 };
	char byte;

	pair_of(rs);
	MUST(pipe(fds) == 0);
	struct pollfd p[2] = { { .fd = rs[1], .events = POLLIN }, { .fd = fds[0], .events = POLLIN } };
	MUST(pthread_create(&thread, NULL, later, &rs[0]) == 0);
	check(rpoll(p, 2, LIMIT_MS) == 1 && p[0].revents == POLLIN && !p[1].revents, "woken by the socket", "it is not");
	MUST(pthread_join(thread, NULL) == 0 && rrecv(rs[1], &byte, 1, 0) == 1);
	MUST(pthread_create(&thread, NULL, later_write, &fds[1]) == 0);
	check(rpoll(p, 2, LIMIT_MS) == 1 && p[1].revents == POLLIN && !p[0].revents, "woken by the pipe", "it is not");
	MUST(pthread_join(thread, NULL) == 0 && read(fds[0], &byte, 1) == 1);
	MUST(pthread_create(&thread, NULL, later, &rs[0]) == 0);
	check(rpoll(p, 1, LIMIT_MS) == 1 && p[0].revents == POLLIN, "woken without the pipe, too", "it is not");
	MUST(pthread_join(thread, NULL) == 0);
	FD_ZERO(&in);
	FD_ZERO(&out);
	FD_SET(rs[1], &in);
	FD_SET(fds[0], &in);
	FD_SET(rs[0], &out);
	n = rselect(64, &in, &out, NULL, NULL);
	check(n == 2 && FD_ISSET(rs[1], &in) && !FD_ISSET(fds[0], &in) && FD_ISSET(rs[0], &out), "rselect", "%d", n);
	MUST(rrecv(rs[1], &byte, 1, 0) == 1);
	FD_ZERO(&in);
	FD_SET(rs[1], &in);
	check(rselect(64, &in, NULL, NULL, &none) == 0 && !FD_ISSET(rs[1], &in), "rselect without an event", "it has one");
	MUST(rclose(rs[0]) == 0);
	/* The end may take its time. */
	MUST(rpoll(p, 1, LIMIT_MS) == 1);
	p[1].fd = 1000;
	check(rpoll(p, 2, LIMIT_MS) == 2 && p[1].revents == POLLNVAL, "a descriptor that is none", "%#x", p[1].revents);
	MUST(rclose(rs[1]) == 0);
}

/* Signals end a wait, as those of sockets. */
static void on_alarm(int number)
{
	(void)number;
}

static void interrupted(void)
{
	struct sigaction action = { .sa_handler = on_alarm };
	int rs[2];
	char byte;

	pair_of(rs);
	MUST(sigaction(SIGALRM, &action, NULL) == 0);
	alarm(1);
	check_failed(rrecv(rs[0], &byte, 1, 0) < 0, EINTR, "a read that waits");
	alarm(1);
	check_failed(events_of(rs[0], POLLIN, LIMIT_MS) < 0, EINTR, "an rpoll that waits");
	action.sa_flags = SA_RESTART;
	MUST(sigaction(SIGALRM, &action, NULL) == 0);
	alarm(1);
	check_failed(events_of(rs[0], POLLIN, LIMIT_MS) < 0, EINTR, "an rpoll is never restarted");
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

/* Buffers that the peer writes itself. */
static void mapped(void)
{
	static char buffer[100000], data[100000];
	int rs[2], l, entries = 4;
	char byte;
	off_t at;

	l = listener(0, 4);
	MUST(rsetsockopt(l, SOL_RDMA, RDMA_IOMAPSIZE, &entries, sizeof entries) == 0);
	rs[0] = client();
	MUST(rsetsockopt(rs[0], SOL_RDMA, RDMA_IOMAPSIZE, &entries, sizeof entries) == 0);
	check(option(rs[0], SOL_RDMA, RDMA_IOMAPSIZE) == 4, "RDMA_IOMAPSIZE", "it is not");
	MUST(rconnect(rs[0], sa(), length) == 0);
	MUST((rs[1] = raccept(l, NULL, NULL)) >= 0);
	at = riomap(rs[0], buffer, sizeof buffer, PROT_WRITE, 0, 5000);
	check(at == 5000, "riomap gives the offset", "%lld, errno %d", (long long)at, errno);
	at = riomap(rs[0], data, 100, PROT_WRITE, 0, -1);
	check(at == (off_t)(uintptr_t)data, "or the address", "%lld", (long long)at);
	check_failed(riomap(rs[0], buffer, 10, PROT_READ, 0, 0) < 0, EINVAL, "for reading");
	check_failed(riomap(rs[0], (void *)4096, 4096, PROT_WRITE, 0, 0) < 0, EFAULT, "what is not mapped");
	/* The peer learns of the mappings with the next data. */
	MUST(rsend(rs[0], "m", 1, 0) == 1 && rrecv(rs[1], &byte, 1, 0) == 1);
	for (size_t i = 0; i < sizeof data; i++)
		data[i] = (char)pattern(i, 9);
	check(riowrite(rs[1], data, 90000, 5100, 0) == 90000, "riowrite takes all", "errno %d", errno);
	MUST(rsend(rs[1], "w", 1, 0) == 1 && rrecv(rs[0], &byte, 1, 0) == 1);
	check(!memcmp(buffer + 100, data, 90000) && !buffer[99] && !buffer[90100], "it is there before the data behind it",
	      "it is not");
	check(riowrite(rs[1], data, 2000, 5000 + sizeof buffer - 500, 0) == 500, "up to the end of the mapping", "more");
	check(riowrite(rs[1], data, 10, 4999, 0) == 0, "nothing outside of it", "something");
	/* A Write that arrives after riounmap would end the connection. */
	MUST(rsend(rs[1], "w", 1, 0) == 1 && rrecv(rs[0], &byte, 1, 0) == 1);
	check(riounmap(rs[0], buffer, sizeof buffer) == 0, "riounmap", "errno %d", errno);
	check_failed(riounmap(rs[0], buffer, sizeof buffer) < 0, EINVAL, "twice");
	for (int i = 0; i < entries - 1; i++)
		MUST(riomap(rs[0], buffer + i, 10, PROT_WRITE, 0, -1) != -1);
	check_failed(riomap(rs[0], buffer, 99, PROT_WRITE, 0, 0) < 0, ENOMEM, "more than the peer has entries for");
	check(riomap(rs[0], buffer, 98, PROT_NONE, 0, 0) == 0, "for this end only", "errno %d", errno);
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0 && rclose(l) == 0);
}

/* What rdma-core 65 added; Debian's header does not have it. */
int repoll_create(int flags);
int repoll_ctl(int epfd, int op, int fd, struct epoll_event *event);
int repoll_wait(int epfd, struct epoll_event *events, int maxevents, int timeout);
#pragma weak repoll_create
#pragma weak repoll_ctl
#pragma weak repoll_wait

static void sets(void)
{
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = 77 }, got[4];
	int rs[2], fds[2], set, n;
	pthread_t thread;
	char byte;

	pair_of(rs);
	MUST(pipe(fds) == 0);
	MUST((set = repoll_create(0)) >= 0);
	check(repoll_ctl(set, EPOLL_CTL_ADD, rs[1], &event) == 0, "a socket is added", "errno %d", errno);
	check_failed(repoll_ctl(set, EPOLL_CTL_ADD, rs[1], &event) < 0, EEXIST, "twice");
	check_failed(repoll_ctl(set, EPOLL_CTL_MOD, rs[0], &event) < 0, ENOENT, "changing one that is not there");
	check_failed(repoll_ctl(set, EPOLL_CTL_ADD, set, &event) < 0, EINVAL, "the set itself");
	event.data.u64 = 78;
	MUST(repoll_ctl(set, EPOLL_CTL_ADD, fds[0], &event) == 0);
	check(repoll_wait(set, got, 4, QUIET_MS) == 0, "nothing is ready", "it is");
	MUST(pthread_create(&thread, NULL, later, &rs[0]) == 0);
	n = repoll_wait(set, got, 4, LIMIT_MS);
	check(n == 1 && got[0].data.u64 == 77 && got[0].events == EPOLLIN, "the socket is ready", "%d", n);
	MUST(pthread_join(thread, NULL) == 0);
	MUST(write(fds[1], "x", 1) == 1);
	check(repoll_wait(set, got, 4, LIMIT_MS) == 2, "both are", "not");
	check(repoll_wait(set, got, 1, LIMIT_MS) == 1, "one at a time", "not");
	MUST(rrecv(rs[1], &byte, 1, 0) == 1);
	MUST(repoll_ctl(set, EPOLL_CTL_DEL, fds[0], NULL) == 0);
	check(repoll_wait(set, got, 4, QUIET_MS) == 0, "nothing again", "something");
	event.events = EPOLLIN | EPOLLOUT;
	MUST(repoll_ctl(set, EPOLL_CTL_MOD, rs[1], &event) == 0);
	check(repoll_wait(set, got, 4, LIMIT_MS) == 1 && got[0].events == EPOLLOUT, "changed to what is ready", "not");
	check_failed(repoll_wait(set, got, 0, 0) < 0, EINVAL, "room for no event");
	check_failed(repoll_wait(rs[1], got, 4, 0) < 0, EINVAL, "a socket is no set");
	MUST(rclose(set) == 0 && rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

/* A program that closes a socket by close(2), as some do with all descriptors. The number is the next one's. */
static void closed_wrongly(void)
{
	int rs[2], next, file, others[16], count = 0;

	pair_of(rs);
	MUST(close(rs[0]) == 0);
	/* Other numbers are free, too. */
	while ((next = rsocket(family(), SOCK_STREAM, 0)) != rs[0]) {
		MUST(next >= 0 && count < 16);
		others[count++] = next;
	}
	file = open("/dev/null", O_RDONLY);
	check(file != next, "the new socket keeps its number", "%d", file);
	MUST(rclose(next) == 0);
	check(fcntl(file, F_GETFD) >= 0, "and its end closes nothing else", "errno %d", errno);
	MUST(rclose(rs[1]) == 0 && close(file) == 0);
	while (count > 0)
		MUST(rclose(others[--count]) == 0);
}

/* A thread that waits for a socket which another one closes. */
static void *reads(void *arg)
{
	char byte;

	return (void *)(intptr_t)(rrecv(*(int *)arg, &byte, 1, 0) < 0 ? errno : 0);
}

static void closing(void)
{
	char byte;
	int rs[2], l;
	void *result;
	pthread_t thread;

	pair_of(rs);
	MUST(pthread_create(&thread, NULL, reads, &rs[0]) == 0);
	usleep(100000);
	check_failed(rrecv(rs[0], &byte, 1, MSG_DONTWAIT) < 0, EAGAIN, "a second reader that must not wait does not");
	pthread_cancel(thread);
	MUST(rclose(rs[0]) == 0);
	MUST(pthread_join(thread, &result) == 0);
	check((intptr_t)result == EBADF, "a reader returns when its socket is closed, with EBADF", "%d", (int)(intptr_t)result);
	MUST(rclose(rs[1]) == 0);
	/* A listening socket with connections that nobody took. */
	l = listener(0, 4);
	rs[0] = connected();
	MUST(rclose(l) == 0);
	check(events_of(rs[0], POLLIN, LIMIT_MS) & POLLIN, "their clients learn that it was closed", "not");
	MUST(rclose(rs[0]) == 0);
}

/* A child cannot use what it has a copy of, and does no harm to it. */
static void forking(void)
{
	enum { FILES = 40 };
	int rs[2], ends[2], status, written = 0;
	char byte = 0;
	pid_t pid;

	pair_of(rs);
	MUST(rsend(rs[0], "w", 1, 0) == 1 && rrecv(rs[1], &byte, 1, MSG_WAITALL) == 1 && events_of(rs[0], POLLIN, 50) == 0);
	pid = fork();
	if (pid == 0) {
		bool refused = rsend(rs[0], &byte, 1, 0) < 0 && errno == ENODEV;

		_exit(refused && rclose(rs[0]) == 0 && rclose(rs[1]) == 0 ? 0 : 1);
	}
	MUST(waitpid(pid, &status, 0) == pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child is refused, and may close", "%#x", status);
	MUST(pipe(ends) == 0 && (pid = fork()) >= 0);
	if (pid == 0) {
		/* Written by exit, after the end of what the thread had in its parent: some of these have numbers of that. */
		for (int n = 0; n < FILES; n++) {
			FILE *file = fdopen(dup(ends[1]), "w");

			MUST(file && fputc('x', file) == 'x');
		}
		exit(0);
	}
	MUST(close(ends[1]) == 0 && waitpid(pid, &status, 0) == pid);
	while (read(ends[0], &byte, 1) == 1)
		written++;
	check(written == FILES && WIFEXITED(status), "what a child has opened is open until it has ended", "%d of %d", written, FILES);
	MUST(close(ends[0]) == 0);
	check(rsend(rs[0], "p", 1, 0) == 1 && rrecv(rs[1], &byte, 1, 0) == 1 && byte == 'p', "the parent goes on", "not");
	MUST(rclose(rs[0]) == 0 && rclose(rs[1]) == 0);
}

/* Datagrams: the first by UDP, the others between queue pairs. */
static int datagram_socket(struct sockaddr_storage *at)
{
	socklen_t len = family() == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	int rs;

	*at = sockaddr_of(address, 0);
	MUST((rs = rsocket(family(), SOCK_DGRAM, 0)) >= 0);
	MUST(rbind(rs, (struct sockaddr *)at, len) == 0);
	len = sizeof *at;
	MUST(rgetsockname(rs, (struct sockaddr *)at, &len) == 0);
	length = len;
	return rs;
}

static void datagrams(void)
{
	struct sockaddr_storage one, two, from;
	struct sockaddr *to_one = (struct sockaddr *)&one, *to_two = (struct sockaddr *)&two;
	static char big[4096], got[4096];
	socklen_t len = sizeof from;
	int a = datagram_socket(&one), b = datagram_socket(&two), c;
	bool good = true;

	check_failed(rrecv(a, got, 1, MSG_DONTWAIT) < 0, EAGAIN, "nothing has come");
	check_failed(rsend(a, "x", 1, 0) < 0, EDESTADDRREQ, "sending to nobody");
	check_failed(rlisten(a, 1) < 0, EOPNOTSUPP, "listening");
	check_failed(rgetpeername(a, to_one, &len) < 0, ENOTCONN, "the peer of a socket without one");
	check(rsendto(a, "first", 5, 0, to_two, length) == 5, "the first datagram", "errno %d", errno);
	check_events(b, POLLIN, POLLIN, "rpoll tells of it");
	len = sizeof from;
	check(rrecvfrom(b, got, sizeof got, 0, (struct sockaddr *)&from, &len) == 5 && !memcmp(got, "first", 5), "arrives",
	      "it does not");
	check(len == length && !memcmp(&from, &one, len), "from its sender's address", "it is not");
	for (int i = 0; i < 200; i++) {
		big[i] = (char)i;
		good = good && rsendto(b, big, (size_t)i + 1, 0, to_one, length) == i + 1;
		good = good && rrecvfrom(a, got, sizeof got, 0, (struct sockaddr *)&from, &len) == i + 1;
		good = good && !memcmp(got, big, (size_t)i + 1) && !memcmp(&from, &two, length);
	}
	check(good, "two hundred more, back", "they are not");
	check(rsendto(a, "longer", 6, 0, to_two, length) == 6 && rrecv(b, got, 3, 0) == 3 && !memcmp(got, "lon", 3),
	      "what does not fit is cut", "it is not");
	check(rsendto(a, "peek", 4, 0, to_two, length) == 4 && rrecv(b, got, 9, MSG_PEEK) == 4 && rrecv(b, got, 9, 0) == 4,
	      "a datagram is peeked at", "it is not");
	check_failed(rsendto(a, big, 2048, 0, to_two, length) < 0, EMSGSIZE, "more than fits");
	check(rsendto(a, big, 2000, 0, to_two, length) == 2000 && rrecv(b, got, sizeof got, 0) == 2000, "2,000 bytes", "not");
	check(rconnect(a, to_two, length) == 0 && rsend(a, "c", 1, 0) == 1 && rrecv(b, got, 1, 0) == 1, "connected", "not");
	c = datagram_socket(&from);
	MUST(rsendto(c, "s", 1, 0, to_one, length) == 1);
	MUST(rsendto(b, "b", 1, 0, to_one, length) == 1);
	check(rrecv(a, got, 1, 0) == 1 && got[0] == 'b', "a connected socket receives from its peer only", "%c", got[0]);
	check_failed(rsendto(a, (void *)16, 10, 0, to_two, length) < 0, EFAULT, "from an address that is not mapped");
	good = true;
	for (int i = 0; i < 2000; i++)
		good = good && rsendto(a, big, 9, 0, to_two, length) == 9 && rsendto(b, big, 9, 0, to_one, length) == 9;
	check(good, "two that send and do not read never stop", "errno %d", errno);
	MUST(rclose(a) == 0 && rclose(b) == 0 && rclose(c) == 0);
}

static const struct group groups[] = {
	{ "states", states },
	{ "addresses", addresses },
	{ "options", options_of },
	{ "nonblocking", nonblocking },
	{ "backpressure", backpressure },
	{ "vectors", vectors },
	{ "half_closed", half_closed },
	{ "come_and_gone", come_and_gone },
	{ "killed", killed },
	{ "both_ways", both_ways },
	{ "many", many },
	{ "waking", waking },
	{ "interrupted", interrupted },
	{ "mapped", mapped },
	{ "sets", sets },
	{ "closed_wrongly", closed_wrongly },
	{ "closing", closing },
	{ "forking", forking },
	{ "datagrams", datagrams },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
