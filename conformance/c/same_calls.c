/* Sequences of socket calls, for plain kernel sockets and for the same calls under `uwarp run --sockets`: results,
 * errno and readiness must be the same. What differs has its reason beside it (`ruled`). */
#define _GNU_SOURCE
#include "common.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <setjmp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>

#define ALL (POLLIN | POLLOUT | POLLRDHUP)

/* A peer that has closed, with nothing unread. The kernel learns that the peer does not receive any more when it sends;
 * rsockets say so at once. */
#define CLOSED (POLLIN | POLLOUT | POLLRDHUP | (ruled ? POLLHUP : 0))

/* A rule makes these sockets iWARP's. */
static bool ruled;
/* It does so when they are connected. */
static bool upgraded;
static struct sockaddr_in listening;

static struct sockaddr *sa(void)
{
	return (struct sockaddr *)&listening;
}

static int listener(int type)
{
	socklen_t len = sizeof listening;
	int fd;

	listening = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = inet_addr("127.0.0.1") };
	MUST((fd = socket(AF_INET, SOCK_STREAM | type, 0)) >= 0);
	MUST(bind(fd, sa(), sizeof listening) == 0);
	MUST(listen(fd, 16) == 0);
	MUST(getsockname(fd, sa(), &len) == 0 && listening.sin_port != 0);
	return fd;
}

static int client(int type)
{
	int fd;

	MUST((fd = socket(AF_INET, SOCK_STREAM | type, 0)) >= 0);
	return fd;
}

static ino_t inode(int fd)
{
	struct stat stat;

	MUST(fstat(fd, &stat) == 0);
	return stat.st_ino;
}

/* Waits until both ends of a new connection are iWARP's: each descriptor is another file then, and what the end that
 * accepted sends goes that way. */
static void settle(int c, int a)
{
	struct pollfd fds[2] = { { .fd = c, .events = POLLOUT }, { .fd = a, .events = POLLOUT } };
	ino_t ic, ia;
	uint64_t end = now_ms() + LIMIT_MS;
	char byte = 0;

	if (!upgraded)
		return;
	ic = inode(c);
	ia = inode(a);
	do {
		poll(fds, 2, 0);
		usleep(200);
		MUST(now_ms() < end);
	} while (inode(c) == ic || inode(a) == ia);
	MUST(poll(fds + 1, 1, LIMIT_MS) == 1 && send(a, &byte, 1, 0) == 1);
	MUST(readable(c, LIMIT_MS) && recv(c, &byte, 1, 0) == 1);
	MUST(poll(fds, 1, LIMIT_MS) == 1);
}

/* Both ends of a connection. */
static void pair_of(int fds[2])
{
	int l = listener(0);

	fds[0] = client(0);
	MUST(connect(fds[0], sa(), sizeof listening) == 0);
	MUST((fds[1] = accept(l, NULL, NULL)) >= 0);
	MUST(close(l) == 0);
	settle(fds[0], fds[1]);
}

static void close_both(int fds[2])
{
	MUST(close(fds[0]) == 0 && close(fds[1]) == 0);
}

/* Waits until poll says this of the descriptor, or the limit is over; what it says then. */
static int settled(int fd, int want)
{
	struct pollfd p = { .fd = fd, .events = ALL };
	uint64_t end = now_ms() + LIMIT_MS;

	do {
		MUST(poll(&p, 1, 0) >= 0);
		if (p.revents == want)
			break;
		usleep(500);
	} while (now_ms() < end);
	return p.revents;
}

static void is_ready(int fd, int want, const char *name)
{
	int got = settled(fd, want);

	check(got == want, name, "poll says %#x, want %#x", got, want);
}

static void set_nonblocking(int fd)
{
	MUST(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0);
}

static void states(void)
{
	struct sockaddr_in name;
	socklen_t len = sizeof name;
	char byte = 0;
	int l, c, a, value;

	signal(SIGPIPE, SIG_IGN);
	c = client(0);
	check_failed(recv(c, &byte, 1, 0) == -1, ENOTCONN, "recv without a connection");
	check_failed(send(c, &byte, 1, 0) == -1, EPIPE, "send without a connection");
	check_failed(accept(c, NULL, NULL) == -1, EINVAL, "accept at a socket that does not listen");
	check_failed(getpeername(c, (void *)&name, &len) == -1, ENOTCONN, "getpeername without a connection");
	is_ready(c, POLLOUT | POLLHUP, "a socket without a connection");
	l = listener(0);
	check(listen(l, 5) == 0, "listen again", "errno %d", errno);
	check_failed(recv(l, &byte, 1, 0) == -1, ENOTCONN, "recv at a listener");
	check_failed(send(l, &byte, 1, 0) == -1, EPIPE, "send at a listener");
	check_failed(connect(l, sa(), sizeof listening) == -1, EISCONN, "connect at a listener");
	check_failed(bind(l, sa(), sizeof listening) == -1, EINVAL, "bind at a listener");
	len = sizeof value;
	check(getsockopt(l, SOL_SOCKET, SO_ACCEPTCONN, &value, &len) == 0 && value == 1, "SO_ACCEPTCONN", "%d", value);
	is_ready(l, 0, "a listener without a connection");
	check(connect(c, sa(), sizeof listening) == 0, "connect", "errno %d", errno);
	is_ready(l, POLLIN, "a listener with a connection");
	len = sizeof name;
	check((a = accept4(l, (void *)&name, &len, SOCK_CLOEXEC)) >= 0, "accept4", "errno %d", errno);
	check(len == sizeof name && name.sin_family == AF_INET && ntohl(name.sin_addr.s_addr) == INADDR_LOOPBACK,
	      "accept gives the peer's address", "length %u", len);
	is_ready(l, 0, "a listener whose connection was taken");
	settle(c, a);
	check_failed(connect(c, sa(), sizeof listening) == -1, EISCONN, "connect again");
	check_failed(accept(c, NULL, NULL) == -1, EINVAL, "accept at a connected socket");
	check_failed(listen(c, 1) == -1, EINVAL, "listen at a connected socket");
	check(fcntl(a, F_GETFD) == FD_CLOEXEC && fcntl(c, F_GETFD) == 0, "FD_CLOEXEC", "%d %d", fcntl(a, F_GETFD),
	      fcntl(c, F_GETFD));
	MUST(fcntl(c, F_SETFD, FD_CLOEXEC) == 0);
	check(fcntl(c, F_GETFD) == FD_CLOEXEC, "FD_CLOEXEC that is set", "%d", fcntl(c, F_GETFD));
	check((fcntl(a, F_GETFL) & O_ACCMODE) == O_RDWR, "F_GETFL", "%#x", fcntl(a, F_GETFL));
	len = sizeof name;
	check(getpeername(c, (void *)&name, &len) == 0 && name.sin_port == listening.sin_port &&
	      name.sin_addr.s_addr == listening.sin_addr.s_addr, "getpeername", "errno %d", errno);
	check_failed(lseek(c, 0, SEEK_CUR) == -1, ESPIPE, "lseek");
	check_failed(send(c, (void *)8, 4096, 0) == -1, EFAULT, "send from an address without memory");
	MUST(close(l) == 0 && close(a) == 0 && close(c) == 0);
	check_failed(send(c, &byte, 1, 0) == -1, EBADF, "send after close");
	check_failed(close(c) == -1, EBADF, "close after close");
	c = client(0);
	check_failed(connect(c, sa(), sizeof listening) == -1, ECONNREFUSED, "connect where nobody listens");
	MUST(close(c) == 0);
}

static void nonblocking(void)
{
	struct pollfd p;
	socklen_t len = sizeof(int);
	char byte = 'x', block[65536];
	int l = listener(SOCK_NONBLOCK), c = client(SOCK_NONBLOCK), a, error = -1, on = 1;
	long filled = 0, got = 0;
	ssize_t n;

	memset(block, 'b', sizeof block);
	check_failed(accept(l, NULL, NULL) == -1, EAGAIN, "accept without a connection");
	check_failed(connect(c, sa(), sizeof listening) == -1, EINPROGRESS, "connect");
	is_ready(c, POLLOUT, "a socket that has connected");
	check(getsockopt(c, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0, "SO_ERROR", "%d", error);
	is_ready(l, POLLIN, "a listener with a connection");
	check((a = accept(l, NULL, NULL)) >= 0, "accept", "errno %d", errno);
	check(!(fcntl(a, F_GETFL) & O_NONBLOCK), "a connection does not inherit O_NONBLOCK", "%#x", fcntl(a, F_GETFL));
	settle(c, a);
	check_failed(recv(a, &byte, 1, MSG_DONTWAIT) == -1, EAGAIN, "recv with MSG_DONTWAIT");
	MUST(ioctl(a, FIONBIO, &on) == 0);
	check(fcntl(a, F_GETFL) & O_NONBLOCK, "FIONBIO", "%#x", fcntl(a, F_GETFL));
	check_failed(read(a, &byte, 1) == -1, EAGAIN, "read after FIONBIO");
	check_failed(read(c, &byte, 1) == -1, EAGAIN, "read");
	/* Until there is no room, and again until it stays so. */
	for (;;) {
		n = write(c, block, sizeof block);
		if (n > 0) {
			filled += n;
			continue;
		}
		check_failed(n == -1, EAGAIN, "write without room");
		p = (struct pollfd){ .fd = c, .events = POLLOUT };
		if (poll(&p, 1, 2 * QUIET_MS) == 0)
			break;
	}
	is_ready(c, 0, "a socket without room");
	is_ready(a, POLLIN | POLLOUT, "its peer");
	while (got < filled) {
		n = read(a, block, sizeof block);
		if (n > 0)
			got += n;
		else
			MUST(errno == EAGAIN && readable(a, LIMIT_MS));
	}
	is_ready(c, POLLOUT, "a socket with room again");
	is_ready(a, POLLOUT, "its peer, which has read everything");
	MUST(close(a) == 0 && close(c) == 0 && close(l) == 0);
	c = client(SOCK_NONBLOCK);
	check_failed(connect(c, sa(), sizeof listening) == -1, EINPROGRESS, "connect where nobody listens");
	is_ready(c, POLLIN | POLLOUT | POLLRDHUP | POLLHUP | POLLERR, "a socket that was refused");
	check(getsockopt(c, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == ECONNREFUSED, "SO_ERROR", "%d", error);
	check(getsockopt(c, SOL_SOCKET, SO_ERROR, &error, &len) == 0 && error == 0, "SO_ERROR again", "%d", error);
	MUST(close(c) == 0);
}

static void data(void)
{
	char to[64] = "", parts[3][4];
	struct iovec out[3] = { { "ab", 2 }, { "", 0 }, { "cdef", 4 } };
	struct iovec in[3] = { { parts[0], 1 }, { parts[1], 2 }, { parts[2], 3 } };
	struct mmsghdr several[2] = { { .msg_hdr = { .msg_iov = out, .msg_iovlen = 1 } },
				      { .msg_hdr = { .msg_iov = out + 2, .msg_iovlen = 1 } } };
	static struct iovec many[1025];
	struct iovec negative = { to, (size_t)-5 };
	struct msghdr too_many = { .msg_iov = many, .msg_iovlen = 1025 };
	struct sockaddr_in from;
	socklen_t len = sizeof from;
	struct msghdr message = { .msg_iov = in, .msg_iovlen = 3, .msg_name = &from, .msg_namelen = sizeof from };
	off_t offset = 1;
	int fds[2], pipe_of[2], unread = -1;
	FILE *file;

	pair_of(fds);
	check(send(fds[0], "hello", 5, 0) == 5, "send", "errno %d", errno);
	is_ready(fds[1], POLLIN | POLLOUT, "with data");
	check(recv(fds[1], to, sizeof to, MSG_PEEK) == 5 && memcmp(to, "hello", 5) == 0, "MSG_PEEK", "%s", to);
	check(ioctl(fds[1], FIONREAD, &unread) == 0 && unread == 5, "FIONREAD", "%d", unread);
	check(recv(fds[1], to, 2, 0) == 2, "a part of it", "errno %d", errno);
	is_ready(fds[1], POLLIN | POLLOUT, "with the rest");
	check(read(fds[1], to, sizeof to) == 3 && memcmp(to, "llo", 3) == 0, "the rest", "%s", to);
	is_ready(fds[1], POLLOUT, "without data");
	check(writev(fds[0], out, 3) == 6, "writev", "errno %d", errno);
	check_failed(writev(fds[0], many, 1025) == -1, EINVAL, "writev of too many pieces");
	check_failed(sendmsg(fds[0], &too_many, 0) == -1, EMSGSIZE, "sendmsg of too many pieces");
	check_failed(recvmsg(fds[1], &too_many, 0) == -1, EMSGSIZE, "recvmsg of too many pieces");
	check_failed(writev(fds[0], &negative, 1) == -1, EINVAL, "a piece of a negative length");
	check(recv(fds[1], to, 6, MSG_WAITALL | MSG_PEEK) == 6, "MSG_WAITALL", "errno %d", errno);
	check(recvmsg(fds[1], &message, 0) == 6 && parts[0][0] == 'a' && parts[1][1] == 'c' && parts[2][2] == 'f',
	      "recvmsg", "errno %d", errno);
	check(message.msg_namelen == 0 && message.msg_flags == 0, "recvmsg names nobody", "%u", message.msg_namelen);
	check(sendmmsg(fds[0], several, 2, 0) == 2 && several[0].msg_len == 2 && several[1].msg_len == 4, "sendmmsg",
	      "errno %d", errno);
	check(recvfrom(fds[1], to, 6, MSG_WAITALL, (void *)&from, &len) == 6 && memcmp(to, "abcdef", 6) == 0,
	      "recvfrom", "errno %d", errno);
	check(len == 0, "recvfrom names nobody", "length %u", len);
	check(pwritev2(fds[0], out, 1, -1, 0) == 2 && preadv2(fds[1], in, 2, -1, 0) == 2, "pwritev2 and preadv2",
	      "errno %d", errno);
	check(send(fds[0], "thrown away", 11, 0) == 11 && recv(fds[1], NULL, 64, MSG_TRUNC) == 11, "MSG_TRUNC",
	      "errno %d", errno);
	check(send(fds[0], to, 0, 0) == 0, "send of nothing", "errno %d", errno);
	check_failed(recv(fds[1], to, 1, MSG_OOB) == -1, EINVAL, "urgent data, without any");
	MUST((file = tmpfile()) != NULL && fputs("0123456789", file) > 0 && fflush(file) == 0);
	check(sendfile(fds[0], fileno(file), &offset, 4) == 4 && offset == 5, "sendfile", "offset %ld", (long)offset);
	check(recv(fds[1], to, 4, MSG_WAITALL) == 4 && memcmp(to, "1234", 4) == 0, "sendfile's bytes", "%.4s", to);
	rewind(file);
	check(sendfile(fds[0], fileno(file), NULL, 100) == 10 && lseek(fileno(file), 0, SEEK_CUR) == 10,
	      "sendfile to the end", "errno %d", errno);
	MUST(recv(fds[1], to, 10, MSG_WAITALL) == 10 && fclose(file) == 0 && pipe(pipe_of) == 0);
	check(write(pipe_of[1], "through", 7) == 7 && splice(pipe_of[0], NULL, fds[0], NULL, 100, 0) == 7,
	      "splice from a pipe", "errno %d", errno);
	check(splice(fds[1], NULL, pipe_of[1], NULL, 7, 0) == 7 && read(pipe_of[0], to, 7) == 7 &&
	      memcmp(to, "through", 7) == 0, "splice to a pipe", "errno %d", errno);
	MUST(close(pipe_of[0]) == 0 && close(pipe_of[1]) == 0);
	close_both(fds);
}

static void half_closed(void)
{
	char to[8];
	int fds[2];

	signal(SIGPIPE, SIG_IGN);
	pair_of(fds);
	MUST(send(fds[0], "last", 4, 0) == 4);
	check(shutdown(fds[0], SHUT_WR) == 0, "shutdown", "errno %d", errno);
	check_failed(send(fds[0], "x", 1, 0) == -1, EPIPE, "send after shutdown");
	is_ready(fds[0], POLLOUT, "the end that does not send any more");
	is_ready(fds[1], POLLIN | POLLOUT | POLLRDHUP, "its peer");
	check(recv(fds[1], to, 8, 0) == 4, "what was sent before", "errno %d", errno);
	check(recv(fds[1], to, 8, 0) == 0 && recv(fds[1], to, 8, 0) == 0, "the end", "errno %d", errno);
	check(send(fds[1], "back", 4, 0) == 4, "the other direction", "errno %d", errno);
	is_ready(fds[0], POLLIN | POLLOUT, "its data");
	check(recv(fds[0], to, 8, 0) == 4, "the data", "errno %d", errno);
	MUST(shutdown(fds[1], SHUT_WR) == 0);
	is_ready(fds[0], POLLIN | POLLOUT | POLLRDHUP | POLLHUP, "both directions ended");
	is_ready(fds[1], POLLIN | POLLOUT | POLLRDHUP | POLLHUP, "both directions ended, the other end");
	check(recv(fds[0], to, 8, 0) == 0, "the end of the other direction", "errno %d", errno);
	close_both(fds);
	pair_of(fds);
	MUST(send(fds[0], "last", 4, 0) == 4 && close(fds[0]) == 0);
	is_ready(fds[1], POLLIN | POLLOUT | POLLRDHUP, "a peer that has closed");
	check(recv(fds[1], to, 8, 0) == 4 && recv(fds[1], to, 8, 0) == 0, "its last data", "errno %d", errno);
	MUST(close(fds[1]) == 0);
}

static volatile sig_atomic_t signals;

static void count(int number)
{
	(void)number;
	signals++;
}

static void signalled(void)
{
	struct sigaction action = { .sa_handler = count };
	struct timeval soon = { .tv_usec = 20000 };
	struct itimerval timer = { .it_value = { .tv_usec = 50000 }, .it_interval = { .tv_usec = 50000 } };
	uint64_t began;
	char byte;
	int fds[2];

	pair_of(fds);
	MUST(sigaction(SIGPIPE, &action, NULL) == 0 && sigaction(SIGALRM, &action, NULL) == 0);
	MUST(shutdown(fds[0], SHUT_WR) == 0);
	check_failed(send(fds[0], "x", 1, MSG_NOSIGNAL) == -1, EPIPE, "MSG_NOSIGNAL");
	check(signals == 0, "no SIGPIPE", "%d signals", signals);
	check_failed(write(fds[0], "x", 1) == -1, EPIPE, "write");
	check(signals == 1, "SIGPIPE", "%d signals", signals);
	MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
	check_failed(recv(fds[0], &byte, 1, 0) == -1, EINTR, "recv that a signal ends");
	timer = (struct itimerval){ 0 };
	MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
	check(setsockopt(fds[0], SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof soon) == 0, "SO_RCVTIMEO", "errno %d", errno);
	began = now_ms();
	check_failed(recv(fds[0], &byte, 1, 0) == -1, EAGAIN, "recv with a limit");
	check(now_ms() - began >= 20, "not before it is over", "%lu ms", (unsigned long)(now_ms() - began));
	close_both(fds);
}

/* The first send may still succeed, or say that the peer has ended the connection. */
static void nobody_to_send_to(void)
{
	struct sigaction action = { .sa_handler = count };
	uint64_t until = now_ms() + LIMIT_MS;
	int fds[2], wrong = 0;

	pair_of(fds);
	MUST(sigaction(SIGPIPE, &action, NULL) == 0);
	signals = 0;
	MUST(close(fds[1]) == 0);
	errno = 0;
	while (errno != EPIPE && now_ms() < until) {
		wrong += send(fds[0], "x", 1, 0) == -1 && errno != EPIPE && errno != ECONNRESET;
		usleep(10000);
	}
	check(errno == EPIPE && wrong == 0 && signals == 1, "EPIPE and SIGPIPE once the peer has closed", "errno %d, %d others, %d signals",
	      errno, wrong, signals);
	check_failed(send(fds[0], "x", 1, MSG_NOSIGNAL) == -1, EPIPE, "and again");
	MUST(close(fds[0]) == 0);
}

static void options_of(void)
{
	static const struct { int level, name, value; const char *text; } ints[] = {
		{ SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE" },
		{ SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR" },
		{ SOL_SOCKET, SO_PRIORITY, 3, "SO_PRIORITY" },
		{ IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY" },
		{ IPPROTO_TCP, TCP_CORK, 1, "TCP_CORK" },
		{ IPPROTO_TCP, TCP_KEEPIDLE, 77, "TCP_KEEPIDLE" },
		{ IPPROTO_TCP, TCP_KEEPCNT, 5, "TCP_KEEPCNT" },
		{ IPPROTO_TCP, TCP_USER_TIMEOUT, 4000, "TCP_USER_TIMEOUT" },
		{ IPPROTO_IP, IP_TOS, 16, "IP_TOS" },
	};
	struct tcp_info info = { 0 };
	struct linger linger = { 1, 3 }, seen = { 0, 0 };
	socklen_t len;
	int fds[2], value, before, on = 1, inherited = 0, l;

	pair_of(fds);
	for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
		value = -1;
		len = sizeof value;
		check(setsockopt(fds[0], ints[i].level, ints[i].name, &ints[i].value, sizeof value) == 0 &&
		      getsockopt(fds[0], ints[i].level, ints[i].name, &value, &len) == 0 && value == ints[i].value,
		      ints[i].text, "%d, errno %d", value, errno);
	}
	check_failed(setsockopt(fds[0], IPPROTO_TCP, 9999, &on, sizeof on) == -1, ENOPROTOOPT, "an unknown option");
	check_failed(setsockopt(fds[0], SOL_SOCKET, SO_KEEPALIVE, &on, 1) == -1, EINVAL, "a short option");
	len = sizeof seen;
	check(setsockopt(fds[0], SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0 &&
	      getsockopt(fds[0], SOL_SOCKET, SO_LINGER, &seen, &len) == 0 && seen.l_linger == 3, "SO_LINGER", "%d",
	      seen.l_linger);
	len = sizeof before;
	MUST(getsockopt(fds[0], SOL_SOCKET, SO_TYPE, &before, &len) == 0);
	check(before == SOCK_STREAM, "SO_TYPE", "%d", before);
	MUST(getsockopt(fds[0], SOL_SOCKET, SO_DOMAIN, &before, &len) == 0);
	check(before == AF_INET, "SO_DOMAIN", "%d", before);
	MUST(getsockopt(fds[0], SOL_SOCKET, SO_PROTOCOL, &before, &len) == 0);
	check(before == IPPROTO_TCP, "SO_PROTOCOL", "%d", before);
	len = sizeof info;
	check(getsockopt(fds[0], IPPROTO_TCP, TCP_INFO, &info, &len) == 0 && info.tcpi_state == TCP_ESTABLISHED,
	      "TCP_INFO", "%d", info.tcpi_state);
	close_both(fds);
	l = listener(0);
	MUST(setsockopt(l, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
	fds[0] = client(0);
	MUST(connect(fds[0], sa(), sizeof listening) == 0 && (fds[1] = accept(l, NULL, NULL)) >= 0);
	len = sizeof inherited;
	MUST(getsockopt(fds[1], IPPROTO_TCP, TCP_NODELAY, &inherited, &len) == 0);
	check(inherited == 1, "a connection inherits options", "%d", inherited);
	close_both(fds);
	MUST(close(l) == 0);
}

static void duplicates(void)
{
	char to[8];
	int fds[2], d, e, high;

	pair_of(fds);
	MUST((d = dup(fds[1])) >= 0);
	check(send(fds[0], "dup", 3, 0) == 3 && recv(d, to, 8, 0) == 3, "dup", "errno %d", errno);
	MUST(close(fds[1]) == 0);
	is_ready(fds[0], POLLOUT, "the connection lives with the copy");
	check(send(d, "back", 4, 0) == 4 && recv(fds[0], to, 8, 0) == 4, "sent by the copy", "errno %d", errno);
	set_nonblocking(d);
	MUST((e = fcntl(d, F_DUPFD_CLOEXEC, 200)) >= 200);
	check(fcntl(e, F_GETFL) & O_NONBLOCK, "a copy has the same flags", "%#x", fcntl(e, F_GETFL));
	check_failed(recv(e, to, 8, 0) == -1, EAGAIN, "and does not wait");
	MUST((high = dup2(e, 300)) == 300 && close(d) == 0 && close(e) == 0);
	check(send(fds[0], "dup2", 4, 0) == 4 && readable(high, LIMIT_MS) && recv(high, to, 8, 0) == 4, "dup2",
	      "errno %d", errno);
	MUST((d = open("/dev/null", O_RDWR)) >= 0 && dup2(d, high) == high);
	is_ready(fds[0], CLOSED, "a copy that is overwritten was the last");
	check(write(high, "x", 1) == 1, "the new file", "errno %d", errno);
	MUST(close(high) == 0 && close(d) == 0 && close(fds[0]) == 0);
	pair_of(fds);
	check(close_range((unsigned)fds[1], (unsigned)fds[1], 0) == 0, "close_range", "errno %d", errno);
	is_ready(fds[0], CLOSED, "its peer");
	MUST(close(fds[0]) == 0);
}

/* The events of one descriptor within the limit, or 0 if there are none for a while. */
static unsigned events_of(int set, bool some)
{
	struct epoll_event event = { 0 };
	int n = epoll_wait(set, &event, 1, some ? LIMIT_MS : QUIET_MS);

	MUST(n >= 0);
	return n == 1 ? event.events : 0;
}

static void is_event(int set, unsigned want, const char *name)
{
	unsigned got = events_of(set, true);

	check(got == want, name, "epoll says %#x, want %#x", got, want);
}

static void edges(void)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET };
	char to[8];
	int fds[2], set;

	pair_of(fds);
	MUST((set = epoll_create1(0)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fds[1], &event) == 0);
	is_event(set, EPOLLOUT, "at first");
	check(events_of(set, false) == 0, "reported once", "?");
	MUST(send(fds[0], "one", 3, 0) == 3);
	is_event(set, EPOLLIN | EPOLLOUT, "data");
	check(events_of(set, false) == 0, "data is reported once", "?");
	/* What comes of this is no more data. */
	MUST(send(fds[1], "x", 1, 0) == 1 && readable(fds[0], LIMIT_MS) && recv(fds[0], to, 8, 0) == 1);
	check(events_of(set, false) == 0, "an acknowledgement is not reported", "?");
	MUST(send(fds[0], "two", 3, 0) == 3);
	is_event(set, EPOLLIN | EPOLLOUT, "more data, unread");
	check(recv(fds[1], to, 8, 0) == 6, "all of it", "errno %d", errno);
	MUST(send(fds[0], "six", 3, 0) == 3);
	is_event(set, EPOLLIN | EPOLLOUT, "data again");
	MUST(recv(fds[1], to, 8, 0) == 3);
	MUST(shutdown(fds[0], SHUT_WR) == 0);
	is_event(set, EPOLLIN | EPOLLOUT | EPOLLRDHUP, "the end");
	close_both(fds);
	check(events_of(set, false) == 0, "a closed descriptor leaves the set", "?");
	MUST(close(set) == 0);
}

static void sets(void)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLONESHOT, .data.fd = 7 }, got;
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };
	struct timespec precise = { .tv_sec = LIMIT_MS / 1000 };
	struct pollfd both[3];
	fd_set r, w;
	char to[8];
	int fds[2], set, outer, pipe_of[2], c;

	pair_of(fds);
	MUST(pipe(pipe_of) == 0 && (set = epoll_create1(0)) >= 0 && (outer = epoll_create1(0)) >= 0);
	MUST(epoll_ctl(set, EPOLL_CTL_ADD, fds[1], &event) == 0);
	check_failed(epoll_ctl(set, EPOLL_CTL_ADD, fds[1], &event) == -1, EEXIST, "added twice");
	event.events = EPOLLIN;
	MUST(epoll_ctl(outer, EPOLL_CTL_ADD, set, &event) == 0);
	MUST(send(fds[0], "x", 1, 0) == 1);
	check(epoll_wait(outer, &got, 1, LIMIT_MS) == 1, "a set within a set", "nothing");
	check(epoll_wait(set, &got, 1, LIMIT_MS) == 1 && got.data.fd == 7, "its event", "nothing");
	check(epoll_wait(set, &got, 1, QUIET_MS) == 0, "EPOLLONESHOT", "again");
	event.events = EPOLLIN | EPOLLONESHOT;
	check(epoll_ctl(set, EPOLL_CTL_MOD, fds[1], &event) == 0 && epoll_wait(set, &got, 1, LIMIT_MS) == 1,
	      "and again when it is changed", "nothing");
	both[0] = (struct pollfd){ .fd = pipe_of[0], .events = POLLIN };
	both[1] = (struct pollfd){ .fd = fds[1], .events = POLLIN };
	both[2] = (struct pollfd){ .fd = -1, .events = POLLIN };
	check(ppoll(both, 3, &precise, NULL) == 1 && both[0].revents == 0 && both[1].revents == POLLIN &&
	      both[2].revents == 0, "ppoll over both kinds", "%#x %#x", both[0].revents, both[1].revents);
	MUST(write(pipe_of[1], "x", 1) == 1);
	check(poll(both, 2, LIMIT_MS) == 2, "poll over both kinds", "%#x %#x", both[0].revents, both[1].revents);
	FD_ZERO(&r);
	FD_ZERO(&w);
	FD_SET(fds[0], &r);
	FD_SET(fds[1], &r);
	FD_SET(pipe_of[0], &r);
	FD_SET(fds[1], &w);
	check(select(FD_SETSIZE, &r, &w, NULL, &limit) == 3 && !FD_ISSET(fds[0], &r) && FD_ISSET(fds[1], &r) &&
	      FD_ISSET(pipe_of[0], &r) && FD_ISSET(fds[1], &w), "select over both kinds", "errno %d", errno);
	MUST(recv(fds[1], to, 8, 0) == 1);
	check(poll(both + 1, 1, QUIET_MS) == 0, "nothing after it was read", "%#x", both[1].revents);
	check(epoll_ctl(set, EPOLL_CTL_DEL, fds[1], NULL) == 0, "taken out", "errno %d", errno);
	check_failed(epoll_ctl(set, EPOLL_CTL_DEL, fds[1], NULL) == -1, ENOENT, "taken out twice");
	close_both(fds);
	/* In a set before it is known what it becomes. */
	c = listener(0);
	fds[0] = client(SOCK_NONBLOCK);
	event = (struct epoll_event){ .events = EPOLLOUT, .data.fd = 9 };
	MUST(epoll_ctl(set, EPOLL_CTL_ADD, fds[0], &event) == 0);
	MUST(epoll_wait(set, &got, 1, LIMIT_MS) == 1 && got.events == (EPOLLOUT | EPOLLHUP));
	MUST(connect(fds[0], sa(), sizeof listening) == -1 && errno == EINPROGRESS);
	for (int i = 0; i < 1000; i++) {
		MUST(epoll_wait(set, &got, 1, LIMIT_MS) == 1);
		if (got.events == EPOLLOUT)
			break;
	}
	check(got.events == EPOLLOUT && got.data.fd == 9, "in a set before it connects", "%#x", got.events);
	MUST(close(fds[0]) == 0 && close(c) == 0 && close(set) == 0 && close(outer) == 0);
	MUST(close(pipe_of[0]) == 0 && close(pipe_of[1]) == 0);
}

/* Bytes of both directions at once, between two threads. */
#define BYTES (8 << 20)

static void *echo(void *arg)
{
	int fd = *(int *)arg;
	char block[20000];
	ssize_t n, done;

	while ((n = read(fd, block, sizeof block)) > 0)
		for (done = 0; done < n;) {
			ssize_t w = write(fd, block + done, (size_t)(n - done));

			MUST(w > 0);
			done += w;
		}
	MUST(n == 0);
	MUST(shutdown(fd, SHUT_WR) == 0);
	return NULL;
}

static void streams(void)
{
	unsigned char block[30000];
	long sent = 0, got = 0, wrong = 0;
	struct pollfd p;
	pthread_t thread;
	int fds[2];
	ssize_t n;

	pair_of(fds);
	set_nonblocking(fds[0]);
	MUST(pthread_create(&thread, NULL, echo, &fds[1]) == 0);
	while (got < BYTES) {
		p = (struct pollfd){ .fd = fds[0], .events = POLLIN | (sent < BYTES ? POLLOUT : 0) };
		MUST(poll(&p, 1, LIMIT_MS) == 1);
		if (p.revents & POLLOUT) {
			long len = sent + (long)sizeof block > BYTES ? BYTES - sent : (long)sizeof block;

			for (long i = 0; i < len; i++)
				block[i] = (unsigned char)((sent + i) * 7 % 251);
			n = write(fds[0], block, (size_t)len);
			MUST(n > 0 || errno == EAGAIN);
			if (n > 0 && (sent += n) == BYTES)
				MUST(shutdown(fds[0], SHUT_WR) == 0);
		}
		if (p.revents & POLLIN) {
			n = read(fds[0], block, sizeof block);
			MUST(n > 0 || (n < 0 && errno == EAGAIN));
			for (long i = 0; i < n; i++)
				wrong += block[i] != (unsigned char)((got + i) * 7 % 251);
			if (n > 0)
				got += n;
		}
	}
	check(wrong == 0, "every byte comes back", "%ld are wrong", wrong);
	MUST(pthread_join(thread, NULL) == 0);
	MUST(readable(fds[0], LIMIT_MS) && read(fds[0], block, 1) == 0);
	close_both(fds);
}

static void children(void)
{
	char to[8] = "", word[2] = "";
	int fds[2], status, tell[2], file;
	ssize_t n;
	pid_t child;

	pair_of(fds);
	MUST(pipe(tell) == 0);
	MUST((child = fork()) >= 0);
	if (child == 0) {
		n = send(fds[0], "child", 5, 0);
		word[0] = n == 5 ? 'y' : n == -1 && errno == ENODEV ? 'n' : '?';
		close(fds[0]);
		/* The numbers are free for other files. */
		file = open("/dev/zero", O_RDONLY);
		if ((file != fds[0] && dup2(file, fds[0]) != fds[0]) || dup2(file, fds[1]) != fds[1] ||
		    read(fds[0], to, 1) != 1 || read(fds[1], to, 1) != 1)
			word[0] = 'f';
		_exit(write(tell[1], word, 1) == 1 ? 0 : 1);
	}
	MUST(waitpid(child, &status, 0) == child && read(tell[0], word, 1) == 1);
	/* A device is the process's that opened it. A connection that was TCP's is carried for a child. */
	bool cannot = ruled && !upgraded;
	check(word[0] == (cannot ? 'n' : 'y'), cannot ? "a child cannot send (ruled)" : "a child sends", "%s", word);
	if (!cannot)
		MUST(recv(fds[1], to, 5, MSG_WAITALL) == 5);
	check(send(fds[0], "parent", 6, 0) == 6 && recv(fds[1], to, 6, MSG_WAITALL) == 6, "the parent goes on", "errno %d",
	      errno);
	/* vfork: the child closes all descriptors in memory that is the parent's. */
	MUST((child = vfork()) >= 0);
	if (child == 0) {
		close(fds[0]);
		close(fds[1]);
		execl("/bin/true", "true", (char *)NULL);
		_exit(1);
	}
	MUST(waitpid(child, &status, 0) == child);
	check(status == 0, "vfork and exec", "%#x", status);
	check(send(fds[0], "parent", 6, 0) == 6 && recv(fds[1], to, 6, MSG_WAITALL) == 6, "the parent goes on again",
	      "errno %d", errno);
	close_both(fds);
	MUST(close(tell[0]) == 0 && close(tell[1]) == 0);
}

/* What was sent reaches a peer also if the process ends without closing. */
static void ending(void)
{
	char to[8] = "";
	int l = listener(0), a, status;
	pid_t child;

	MUST((child = fork()) >= 0);
	if (child == 0) {
		char own[16], *argv[] = { "/proc/self/exe", "-", "leaver", NULL };

		snprintf(own, sizeof own, "%u", ntohs(listening.sin_port));
		setenv("PORT", own, 1);
		execv(argv[0], argv);
		_exit(1);
	}
	MUST((a = accept(l, NULL, NULL)) >= 0);
	check(recv(a, to, 8, MSG_WAITALL) == 5 && memcmp(to, "adieu", 5) == 0, "the last words of a process", "%s", to);
	check(recv(a, to, 8, 0) == 0, "and its end", "errno %d", errno);
	MUST(waitpid(child, &status, 0) == child);
	check(status == 0, "it ended well", "%#x", status);
	MUST(close(a) == 0 && close(l) == 0);
}

/* A process of `ending`. */
static void leaver(void)
{
	const char *port = getenv("PORT");
	int c;

	if (!port)
		return;
	listening = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = inet_addr("127.0.0.1"),
					  .sin_port = htons((uint16_t)atoi(port)) };
	c = client(0);
	MUST(connect(c, sa(), sizeof listening) == 0 && send(c, "adieu", 5, 0) == 5);
	exit(0);
}

static sigjmp_buf back;

static void jump(int signal)
{
	(void)signal;
	siglongjmp(back, 1);
}

/* Sleeps past the lead of a thread that waits (5 ms), and then sends. */
static void *send_late(void *fd)
{
	usleep(30000);
	MUST(send(*(int *)fd, "x", 1, 0) == 1);
	return NULL;
}

static void *wait_for_ever(void *set)
{
	struct epoll_event e;

	epoll_wait(*(int *)set, &e, 1, -1);
	return NULL;
}

/* Whether a byte that comes late wakes epoll_wait; takes it. */
static bool wakes(int set, int fds[2])
{
	struct epoll_event e = { 0 };
	pthread_t thread;
	char byte;
	int n;

	MUST(pthread_create(&thread, NULL, send_late, &fds[0]) == 0);
	n = epoll_wait(set, &e, 1, LIMIT_MS);
	MUST(pthread_join(thread, NULL) == 0);
	return n == 1 && e.data.fd == fds[1] && e.events == EPOLLIN && recv(fds[1], &byte, 1, MSG_DONTWAIT) == 1;
}

static void loops(void)
{
	struct itimerval timer = { .it_value = { .tv_usec = 30000 } };
	struct sigaction action = { .sa_handler = count };
	struct timespec wrong = { .tv_nsec = 1000000000 };
	struct epoll_event e = { .events = EPOLLIN }, got[2];
	sigset_t alarm, none;
	int fds[2], set, outer, before, n;
	uint64_t began;
	pthread_t thread;
	fd_set bits;
	char byte;

	pair_of(fds);
	e.data.fd = fds[1];
	MUST((set = epoll_create1(0)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, fds[1], &e) == 0);
	check(epoll_wait(set, got, 2, 0) == 0, "nothing yet", "errno %d", errno);
	began = now_ms();
	check(epoll_wait(set, got, 2, 40) == 0 && now_ms() - began >= 39, "epoll_wait's limit", "errno %d", errno);
	check_failed(epoll_wait(set, got, 0, -1) == -1, EINVAL, "epoll_wait for no event");
	check_failed(epoll_wait(fds[1], got, 2, -1) == -1, EINVAL, "epoll_wait on what is no set");
	check_failed(epoll_wait(-1, got, 2, -1) == -1, EBADF, "epoll_wait on nothing");
	check_failed(epoll_pwait2(set, got, 2, &wrong, NULL) == -1, EINVAL, "epoll_pwait2 with no time");
	check(wakes(set, fds), "epoll_wait hears of a byte", "errno %d", errno);

	/* A signal that is only let through while the call sleeps. */
	MUST(sigaction(SIGALRM, &action, NULL) == 0 && sigemptyset(&none) == 0);
	MUST(sigemptyset(&alarm) == 0 && sigaddset(&alarm, SIGALRM) == 0 && sigprocmask(SIG_BLOCK, &alarm, NULL) == 0);
	before = signals;
	MUST(raise(SIGALRM) == 0);
	check_failed(epoll_pwait(set, got, 2, -1, &none) == -1, EINTR, "epoll_pwait with a signal that waits");
	check(signals == before + 1, "its handler runs", "%d signals", signals - before);
	MUST(raise(SIGALRM) == 0 && epoll_wait(set, got, 2, 20) == 0 && signals == before + 1);
	MUST(FD_SETSIZE > fds[1]);
	FD_ZERO(&bits);
	FD_SET(fds[1], &bits);
	check_failed(pselect(fds[1] + 1, &bits, NULL, NULL, NULL, &none) == -1, EINTR, "pselect");
	MUST(raise(SIGALRM) == 0);
	check_failed(ppoll(&(struct pollfd){ .fd = fds[1], .events = POLLIN }, 1, NULL, &none) == -1, EINTR, "ppoll");
	check(signals == before + 3, "each handler runs once", "%d signals", signals - before);
	MUST(sigprocmask(SIG_SETMASK, &none, NULL) == 0);

	/* Threads that leave the call: nobody else may be left without progress. */
	MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
	check_failed(epoll_wait(set, got, 2, -1) == -1, EINTR, "epoll_wait that a signal ends");
	action.sa_handler = jump;
	MUST(sigaction(SIGALRM, &action, NULL) == 0);
	timer.it_value.tv_usec = 2000;
	if (sigsetjmp(back, 1) == 0) {
		MUST(setitimer(ITIMER_REAL, &timer, NULL) == 0);
		epoll_wait(set, got, 2, -1);
	}
	check(wakes(set, fds), "a byte after a jump out of the call", "errno %d", errno);
	MUST(pthread_create(&thread, NULL, wait_for_ever, &set) == 0);
	usleep(2000);
	MUST(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
	check(wakes(set, fds), "a byte after a thread was cancelled there", "errno %d", errno);

	MUST((outer = epoll_create1(0)) >= 0 && epoll_ctl(outer, EPOLL_CTL_ADD, set, &e) == 0);
	check(wakes(outer, fds), "a set within a set", "errno %d", errno);
	e.events = EPOLLIN | EPOLLONESHOT;
	MUST(epoll_ctl(set, EPOLL_CTL_MOD, fds[1], &e) == 0 && wakes(set, fds));
	MUST(send(fds[0], "x", 1, 0) == 1 && (n = epoll_wait(set, got, 2, 40)) >= 0);
	check(n == 0 && epoll_ctl(set, EPOLL_CTL_MOD, fds[1], &e) == 0, "a member that is reported once", "%d", n);
	check(epoll_wait(set, got, 2, LIMIT_MS) == 1 && recv(fds[1], &byte, 1, 0) == 1, "again when it is armed", "%d", n);
	MUST(close(outer) == 0 && close(set) == 0);
	close_both(fds);
}

/* Of a program that does not poll: it sleeps until the signal of its socket comes. */
static void driven_by_signals(void)
{
	struct timespec limit = { .tv_sec = LIMIT_MS / 1000 };
	int fds[2], on = 1, owner = 0, own = getpid(), good = 0;
	sigset_t io;
	char byte;

	MUST(sigemptyset(&io) == 0 && sigaddset(&io, SIGIO) == 0 && sigprocmask(SIG_BLOCK, &io, NULL) == 0);
	for (int by_ioctl = 0; by_ioctl < 2; by_ioctl++) {
		pair_of(fds);
		set_nonblocking(fds[1]);
		if (by_ioctl) {
			MUST(ioctl(fds[1], FIOSETOWN, &own) == 0 && ioctl(fds[1], FIOASYNC, &on) == 0);
			MUST(ioctl(fds[1], FIOGETOWN, &owner) == 0);
		} else {
			MUST(fcntl(fds[1], F_SETOWN, own) == 0);
			MUST(fcntl(fds[1], F_SETFL, fcntl(fds[1], F_GETFL) | O_ASYNC) == 0);
			owner = fcntl(fds[1], F_GETOWN);
		}
		check(owner == own, by_ioctl ? "the owner, by ioctl" : "the owner, by fcntl", "%d", owner);
		/* Signals of what was before do not count. */
		while (sigtimedwait(&io, NULL, &(struct timespec){ 0 }) == SIGIO)
			;
		for (good = 0; good < 20; good++) {
			MUST(send(fds[0], "x", 1, 0) == 1);
			do {
				if (sigtimedwait(&io, NULL, &limit) != SIGIO)
					die("no signal");
			} while (recv(fds[1], &byte, 1, 0) != 1 && errno == EAGAIN);
			if (byte != 'x')
				break;
			byte = 0;
		}
		check(good == 20, "each byte is told by SIGIO", "%d of 20", good);
		MUST(close(fds[0]) == 0);
		do {
			if (sigtimedwait(&io, NULL, &limit) != SIGIO)
				die("no signal of the end");
		} while (recv(fds[1], &byte, 1, 0) == -1 && errno == EAGAIN);
		check(recv(fds[1], &byte, 1, 0) == 0, "and the end", "errno %d", errno);
		MUST(close(fds[1]) == 0);
	}
	/* (It stays blocked: one may still wait.) */
}

static int read_by;
static volatile sig_atomic_t was_read;

static void reads(int signal)
{
	char bytes[8];
	int before = errno;

	(void)signal;
	for (ssize_t got; (got = recv(read_by, bytes, sizeof bytes, 0)) > 0;)
		was_read += (int)got;
	errno = before;
}

/* A handler that calls, of a socket whose owner was set before it connected. */
static void read_by_a_handler(void)
{
	struct sigaction action = { .sa_handler = reads }, none = { .sa_handler = SIG_DFL };
	uint64_t end = now_ms() + LIMIT_MS;
	int l = listener(0), a, sent = 0;
	sigset_t io;

	read_by = client(0);
	MUST(sigemptyset(&io) == 0 && sigaddset(&io, SIGIO) == 0);
	MUST(fcntl(read_by, F_SETOWN, getpid()) == 0 && connect(read_by, sa(), sizeof listening) == 0);
	MUST((a = accept(l, NULL, NULL)) >= 0);
	settle(read_by, a);
	check(fcntl(read_by, F_GETOWN) == getpid(), "an owner that was set before", "%d", fcntl(read_by, F_GETOWN));
	MUST(sigaction(SIGIO, &action, NULL) == 0 && sigprocmask(SIG_UNBLOCK, &io, NULL) == 0);
	MUST(fcntl(read_by, F_SETFL, O_RDWR | O_NONBLOCK | O_ASYNC) == 0);
	for (; sent < 50; sent++) {
		MUST(send(a, "x", 1, 0) == 1);
		while (was_read <= sent && now_ms() < end)
			usleep(100);
	}
	check(was_read == sent, "a handler reads each byte", "%d of %d", (int)was_read, sent);
	/* It is raised by the call itself, where something waits already. */
	MUST(sigprocmask(SIG_BLOCK, &io, NULL) == 0 && send(a, "y", 1, 0) == 1 && readable(read_by, LIMIT_MS));
	MUST(fcntl(read_by, F_SETFL, O_RDWR | O_NONBLOCK | O_ASYNC) == 0 && sigprocmask(SIG_UNBLOCK, &io, NULL) == 0);
	reads(0);
	check(was_read == sent + 1, "and one more", "%d", (int)was_read);
	MUST(sigaction(SIGIO, &none, NULL) == 0 && sigprocmask(SIG_BLOCK, &io, NULL) == 0);
	MUST(close(a) == 0 && close(l) == 0 && close(read_by) == 0);

	/* The failure of a connection comes within the call, perhaps. */
	MUST(sigaction(SIGIO, &action, NULL) == 0 && sigprocmask(SIG_UNBLOCK, &io, NULL) == 0);
	l = listener(0);
	MUST(close(l) == 0);
	read_by = client(0);
	MUST(fcntl(read_by, F_SETOWN, getpid()) == 0);
	MUST(fcntl(read_by, F_SETFL, O_RDWR | O_ASYNC) == 0);
	/* (The signal of the refusal ends the kernel's call.) */
	check(connect(read_by, sa(), sizeof listening) == -1 && (errno == ECONNREFUSED || errno == EINTR),
	      "connect with a handler", "errno %d", errno);
	MUST(sigprocmask(SIG_BLOCK, &io, NULL) == 0 && sigaction(SIGIO, &none, NULL) == 0 && close(read_by) == 0);
}

/* MSG_ZEROCOPY's notices, which no stream gives: an upgrade leaves the socket alone, rsockets refuse it. */
static void told_of_buffers(void)
{
	int on = 1, l = listener(0), c = client(0), connected;

	MUST(setsockopt(c, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0);
	connected = connect(c, sa(), sizeof listening);
	if (ruled && !upgraded) {
		check_failed(connected == -1, EOPNOTSUPP, "connect with SO_ZEROCOPY");
	} else {
		check(connected == 0, "connect with SO_ZEROCOPY", "errno %d", errno);
	}
	MUST(close(c) == 0 && close(l) == 0);
}

static const struct group groups[] = {
	{ "states", states },
	{ "nonblocking", nonblocking },
	{ "data", data },
	{ "half_closed", half_closed },
	{ "signalled", signalled },
	{ "driven_by_signals", driven_by_signals },
	{ "read_by_a_handler", read_by_a_handler },
	{ "told_of_buffers", told_of_buffers },
	{ "nobody_to_send_to", nobody_to_send_to },
	{ "options", options_of },
	{ "duplicates", duplicates },
	{ "edges", edges },
	{ "sets", sets },
	{ "loops", loops },
	{ "streams", streams },
	{ "children", children },
	{ "ending", ending },
	{ "leaver", leaver },
};

int main(int argc, char **argv)
{
	ruled = getenv("RULED") != NULL;
	upgraded = getenv("UPGRADED") != NULL;
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
