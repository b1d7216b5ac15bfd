/* Sockets in IWARP_MODE (uwarp_sockets(7)) beside what the man pages of the kernel's sockets say.
 *
 *	sockets ADDRESS [GROUP] */
#define _GNU_SOURCE
#include <sys/prctl.h>
#include <sys/resource.h>

#include "iwarp_mode.h"

/* Both ends in blocking mode, each in a thread of its own, with private data. */
struct blocking_end {
	int fd;
	struct uwarp_iwarp_mode mode;
	int result;
};

static void *set_mode(void *arg)
{
	struct blocking_end *e = arg;

	e->result = CALL(setsockopt, e->fd, SOL_UWARP, IWARP_MODE, &e->mode, sizeof e->mode) ? errno : 0;
	return NULL;
}

static void modes(void)
{
	struct blocking_end ends[2] = {
		{ .mode = { .role = UWARP_INITIATOR, .private_data = "to the server", .private_data_len = 13 } },
		{ .mode = { .role = UWARP_RESPONDER, .timeout_ms = LIMIT_MS } },
	};
	struct uwarp_iwarp_mode wrong = ends[0].mode;
	char data[600], small[4];
	socklen_t len = sizeof data;
	pthread_t thread;
	int fds[2], udp;

	tcp(fds);
	check(role_of(fds[0]) == 0, "a socket is not in IWARP_MODE", "%d", role_of(fds[0]));
	check_failed(CALL(getsockopt, fds[0], SOL_UWARP, IWARP_PEER_DATA, data, &len) < 0, ENOTCONN, "so it has no data of a peer");
	check_failed(set_role(fds[0], 0) < 0, EINVAL, "no role");
	check_failed(set_role(fds[0], 3) < 0, EINVAL, "an unknown role");
	check_failed(CALL(setsockopt, fds[0], SOL_UWARP, IWARP_MODE, &wrong, 3) < 0, EINVAL, "a wrong length");
	check_failed(CALL(setsockopt, fds[0], SOL_UWARP, IWARP_MODE, NULL, 4) < 0, EINVAL, "no value");
	check_failed(CALL(setsockopt, fds[0], SOL_UWARP, 77, &wrong, 4) < 0, ENOPROTOOPT, "an unknown option");
	wrong.private_data = data;
	wrong.private_data_len = UWARP_PRIVATE_DATA_MAX + 1;
	check_failed(CALL(setsockopt, fds[0], SOL_UWARP, IWARP_MODE, &wrong, sizeof wrong) < 0, EINVAL, "too much private data");
	wrong = ends[0].mode;
	wrong.role = UWARP_INITIATOR;
	wrong.reserved = 1;
	check_failed(CALL(setsockopt, fds[0], SOL_UWARP, IWARP_MODE, &wrong, sizeof wrong) < 0, EINVAL, "what is reserved");
	check_failed(set_role(-1, UWARP_INITIATOR) < 0, EBADF, "no descriptor");
	check_failed(role_of(-1) < 0, EBADF, "nor has that a role");
	check_failed(CALL(getsockopt, fds[0], SOL_UWARP, IWARP_MODE, NULL, &len) < 0, EFAULT, "no place for the role");
	MUST((udp = socket(AF_INET, SOCK_DGRAM, 0)) >= 0);
	check_failed(set_role(udp, UWARP_INITIATOR) < 0, EOPNOTSUPP, "a UDP socket");
	close(udp);
	MUST((udp = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
	check_failed(set_role(udp, UWARP_INITIATOR) < 0, ENOTCONN, "a socket without a peer");
	close(udp);
	check(send(fds[0], "plain", 5, 0) == 5 && recv(fds[1], data, 5, MSG_WAITALL) == 5, "after all that it is plain TCP", "not");

	ends[0].fd = fds[0];
	ends[1].fd = fds[1];
	MUST(pthread_create(&thread, NULL, set_mode, &ends[1]) == 0);
	set_mode(&ends[0]);
	MUST(pthread_join(thread, NULL) == 0);
	check(ends[0].result == 0 && ends[1].result == 0, "both ends in IWARP_MODE", "%d, %d", ends[0].result, ends[1].result);
	check(role_of(fds[0]) == UWARP_INITIATOR && role_of(fds[1]) == UWARP_RESPONDER, "each knows its role", "not");
	len = sizeof data;
	check(CALL(getsockopt, fds[1], SOL_UWARP, IWARP_PEER_DATA, data, &len) == 0 && len == 13 && !memcmp(data, "to the server", 13),
	      "the initiator's private data", "%u bytes", len);
	len = sizeof small;
	check(CALL(getsockopt, fds[1], SOL_UWARP, IWARP_PEER_DATA, small, &len) == 0 && len == 4 && !memcmp(small, "to t", 4),
	      "as much as fits", "%u bytes", len);
	check_failed(set_role(fds[0], UWARP_INITIATOR) < 0, EALREADY, "once more");
	len = sizeof udp;
	check(CALL(getsockopt, fds[0], IPPROTO_TCP, TCP_NODELAY, &udp, &len) == 0 && udp, "options of TCP are TCP's", "%d", udp);
	close_both(fds);

	/* Closed before the peer has set it: the peer must not wait for the end of set-up's time. */
	for (int role = UWARP_INITIATOR; role <= UWARP_RESPONDER; role++) {
		struct uwarp_iwarp_mode patient = { .role = (uint32_t)role, .timeout_ms = 10 * LIMIT_MS };
		struct pollfd end = { .events = POLLRDHUP };

		tcp(fds);
		set_nonblocking(fds[0], true);
		check_failed(CALL(setsockopt, fds[0], SOL_UWARP, IWARP_MODE, &patient, sizeof patient) < 0, EINPROGRESS, "begun");
		check(events(fds[0], POLLOUT, 100) == 0, "set-up waits for the peer", "not");
		check(CALL(close, fds[0]) == 0, "closed during set-up", "errno %d", errno);
		end.fd = fds[1];
		check(poll(&end, 1, LIMIT_MS) == 1, "the peer sees the end at once", "revents %#x", end.revents);
		close(fds[1]);
	}
	if (getenv("NO_DEVICE_AT")) {
		const char *before = address;

		address = getenv("NO_DEVICE_AT");
		tcp(fds);
		check_failed(set_role(fds[0], UWARP_INITIATOR) < 0, ENODEV, "an address that is none of a device's");
		check(send(fds[0], "plain", 5, 0) == 5 && recv(fds[1], data, 5, MSG_WAITALL) == 5, "it stays plain TCP", "not");
		close_both(fds);
		address = before;
	}
	/* The number is another socket's: not one that was forgotten. */
	pair(fds);
	MUST(close(fds[0]) == 0 && close(fds[1]) == 0);
	pair(fds);
	check(CALL(write, fds[0], "again", 5) == 5 && CALL(read, fds[1], data, 9) == 5, "a number that was closed by close(2)", "not");
	close_both(fds);
}

static void bytes(void)
{
	static char out[1 << 20], in[1 << 20];
	struct iovec from[3] = { { out, 10 }, { out + 10, 0 }, { out + 10, 90 } }, to[2] = { { in, 60 }, { in + 60, 100 } };
	int fds[2], pipes[2], count = -1;

	for (size_t i = 0; i < sizeof out; i++)
		out[i] = (char)(i * 7 + i / 253);
	pair(fds);
	check(CALL(write, fds[0], out, 0) == 0, "nothing", "errno %d", errno);
	check(CALL(writev, fds[0], from, 3) == 100, "writev", "errno %d", errno);
	check(CALL(recv, fds[1], in, 20, MSG_PEEK) == 20 && !memcmp(in, out, 20), "MSG_PEEK", "errno %d", errno);
	check(CALL(readv, fds[1], to, 2) == 100 && !memcmp(in, out, 100), "readv", "errno %d", errno);
	check_failed(CALL(recv, fds[1], in, 1, MSG_DONTWAIT) < 0, EAGAIN, "MSG_DONTWAIT");
	check(CALL(send, fds[0], out, 50, MSG_NOSIGNAL) == 50 && CALL(send, fds[0], out + 50, 50, 0) == 50, "send", "errno %d", errno);
	check(CALL(recv, fds[1], in, 100, MSG_WAITALL) == 100 && !memcmp(in, out, 100), "MSG_WAITALL", "errno %d", errno);
	check_failed(CALL(send, fds[0], out, 1, MSG_OOB) < 0, EOPNOTSUPP, "urgent data");
	check_failed(CALL(write, fds[0], (void *)16, 8) < 0, EFAULT, "from an address that is not mapped");
	for (int i = 0; i < 20; i++) {
		size_t half = sizeof out / 16;

		for (int part = 0; part < 16; part++) {
			write_all(fds[i & 1], out + half * (size_t)part, half);
			read_all(fds[!(i & 1)], in + half * (size_t)part, half);
		}
		count += !memcmp(in, out, sizeof out);
	}
	check(count == 19, "20 MiB, back and forth", "%d of 20", count + 1);
	set_nonblocking(fds[0], true);
	for (count = 0; CALL(write, fds[0], out, 1 << 16) > 0; count++)
		;
	check(errno == EAGAIN && count > 0, "a socket that is full", "%d writes, errno %d", count, errno);
	check(events(fds[0], POLLOUT, 0) == 0, "is not writable", "it is");
	close_both(fds);
	MUST(pipe(pipes) == 0);
	check(CALL(write, pipes[1], "pipe", 4) == 4 && CALL(read, pipes[0], in, 9) == 4, "any other descriptor", "errno %d", errno);
	close_both(pipes);
	check_failed(CALL(read, pipes[0], in, 1) < 0, EBADF, "a closed one");
}

static void *write_late(void *arg)
{
	usleep(30000);
	MUST(CALL(write, *(int *)arg, "late", 4) == 4);
	return NULL;
}

static void polling(void)
{
	struct pollfd set[4];
	char buf[16];
	pthread_t thread;
	int fds[2], pipes[2];

	pair(fds);
	MUST(pipe(pipes) == 0);
	check(events(fds[0], POLLIN | POLLOUT, 0) == POLLOUT, "an idle socket", "%#x", events(fds[0], POLLIN | POLLOUT, 0));
	for (int i = 0; i < 2; i++)
		set[i] = (struct pollfd){ .fd = fds[i], .events = POLLIN };
	set[2] = (struct pollfd){ .fd = pipes[0], .events = POLLIN };
	set[3] = (struct pollfd){ .fd = -1, .events = POLLIN };
	check(CALL(poll, set, 4, 20) == 0, "a time limit", "something is ready");
	MUST(pthread_create(&thread, NULL, write_late, &fds[0]) == 0);
	check(CALL(poll, set, 4, LIMIT_MS) == 1 && set[1].revents == POLLIN, "data wake it", "%#x", set[1].revents);
	MUST(pthread_join(thread, NULL) == 0);
	check(CALL(read, fds[1], buf, sizeof buf) == 4, "and are there", "errno %d", errno);
	MUST(pthread_create(&thread, NULL, write_late, &pipes[1]) == 0);
	check(CALL(poll, set, 4, LIMIT_MS) == 1 && set[2].revents == POLLIN, "so does a pipe", "%#x", set[2].revents);
	MUST(pthread_join(thread, NULL) == 0);
	MUST(CALL(shutdown, fds[0], SHUT_WR) == 0);
	check(events(fds[1], POLLIN | POLLRDHUP, LIMIT_MS) == (POLLIN | POLLRDHUP), "the end of one direction", "not");
	MUST(CALL(close, fds[0]) == 0);
	check(events(fds[1], POLLHUP, LIMIT_MS) & POLLHUP, "and of both", "not");
	MUST(CALL(close, fds[1]) == 0);
	close_both(pipes);
}

static void half_closed(void)
{
	struct linger linger = { .l_onoff = 1, .l_linger = LIMIT_MS / 1000 };
	socklen_t len = sizeof linger;
	char buf[64];
	int fds[2], copy;

	pair(fds);
	MUST(CALL(write, fds[0], "question", 8) == 8 && CALL(shutdown, fds[0], SHUT_WR) == 0);
	check_failed(CALL(write, fds[0], "x", 1) < 0, EPIPE, "writing after SHUT_WR");
	check(CALL(read, fds[1], buf, sizeof buf) == 8 && CALL(read, fds[1], buf, sizeof buf) == 0, "the peer reads to the end", "not");
	check(CALL(write, fds[1], "answer", 6) == 6 && CALL(read, fds[0], buf, sizeof buf) == 6, "and answers", "errno %d", errno);
	MUST(CALL(write, fds[1], "more", 4) == 4 && CALL(close, fds[1]) == 0);
	check(CALL(read, fds[0], buf, sizeof buf) == 4 && CALL(read, fds[0], buf, sizeof buf) == 0, "what is left, then the end", "not");
	MUST(CALL(close, fds[0]) == 0);
	pair(fds);
	check_failed(CALL(shutdown, fds[0], 9) < 0, EINVAL, "an unknown direction");
	MUST(CALL(shutdown, fds[0], SHUT_RDWR) == 0);
	check(CALL(read, fds[0], buf, 1) == 0, "reading after SHUT_RDWR", "errno %d", errno);
	check(CALL(read, fds[1], buf, 1) == 0, "and the peer", "errno %d", errno);
	close_both(fds);
	pair(fds);
	MUST((copy = dup(fds[0])) >= 0 && setsockopt(copy, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
	MUST(CALL(write, fds[0], "linger", 6) == 6 && CALL(close, fds[0]) == 0);
	MUST(getsockopt(copy, SOL_SOCKET, SO_LINGER, &linger, &len) == 0);
	check(linger.l_onoff == 0, "SO_LINGER is done by the close", "it would wait again");
	MUST(close(copy) == 0);
	check(CALL(read, fds[1], buf, sizeof buf) == 6 && CALL(read, fds[1], buf, 1) == 0, "and all arrives", "errno %d", errno);
	MUST(CALL(close, fds[1]) == 0);
	pair(fds);
	linger = (struct linger){ .l_onoff = 1 };
	MUST(setsockopt(fds[0], SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0 && CALL(close, fds[0]) == 0);
	check_failed(CALL(read, fds[1], buf, 1) < 0, ECONNRESET, "SO_LINGER of no time breaks the connection");
	MUST(CALL(close, fds[1]) == 0);
}

static void nothing(int number)
{
	(void)number;
}

static pthread_t sleeper;
static volatile bool interrupted_end;

static void *interrupt(void *arg)
{
	(void)arg;
	while (!interrupted_end) {
		pthread_kill(sleeper, SIGUSR1);
		usleep(5000);
	}
	return NULL;
}

static void waiting(void)
{
	struct sigaction action = { .sa_handler = nothing };
	struct timeval time = { .tv_usec = 30000 };
	char buf[4];
	pthread_t thread;
	int fds[2], alone[2], many = 1 << 16;

	pair(fds);
	MUST(setsockopt(fds[0], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) == 0);
	check_failed(CALL(read, fds[0], buf, 1) < 0, EAGAIN, "SO_RCVTIMEO");
	set_nonblocking(fds[0], true);
	check_failed(CALL(read, fds[0], buf, 1) < 0, EAGAIN, "O_NONBLOCK");
	set_nonblocking(fds[0], false);
	MUST(sigaction(SIGUSR1, &action, NULL) == 0);
	sleeper = pthread_self();
	MUST(pthread_create(&thread, NULL, interrupt, NULL) == 0);
	check_failed(CALL(read, fds[1], buf, 1) < 0, EINTR, "a signal while it reads");
	check_failed(CALL(poll, &(struct pollfd){ .fd = fds[1], .events = POLLIN }, 1, LIMIT_MS) < 0, EINTR, "or polls");
	tcp(alone);
	/* Of which the library's own reading is independent. */
	MUST(setsockopt(alone[0], SOL_SOCKET, SO_RCVLOWAT, &many, sizeof many) == 0);
	check_failed(set_role(alone[0], UWARP_INITIATOR) < 0, EINTR, "or waits for its peer");
	interrupted_end = true;
	MUST(pthread_join(thread, NULL) == 0);
	action.sa_flags = SA_RESTART;
	MUST(sigaction(SIGUSR1, &action, NULL) == 0);
	interrupted_end = false;
	MUST(pthread_create(&thread, NULL, interrupt, NULL) == 0);
	check_failed(CALL(read, fds[0], buf, 1) < 0, EAGAIN, "a handler with SA_RESTART does not end a call");
	interrupted_end = true;
	MUST(pthread_join(thread, NULL) == 0);
	begin(alone[1], UWARP_RESPONDER);
	end(alone[1]);
	check(CALL(write, alone[0], "x", 1) == 1 && CALL(read, alone[1], buf, 1) == 1, "which set-up survives", "errno %d", errno);
	close_both(alone);
	close_both(fds);
}

/* Peers that are killed: a child that opens the device itself. */
static pid_t child_with(int fds[2], void (*what)(int fd))
{
	pid_t child;

	tcp(fds);
	MUST((child = fork()) >= 0);
	if (child == 0) {
		/* Also if this test ends with an error. */
		MUST(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
		close(fds[0]);
		what(fds[1]);
		pause();
		_exit(0);
	}
	close(fds[1]);
	return child;
}

static void be_silent(int fd)
{
	(void)fd;
}

static void be_up(int fd)
{
	MUST(set_role(fd, UWARP_RESPONDER) == 0);
	MUST(CALL(write, fd, "up", 2) == 2);
}

static void kill_child(pid_t child)
{
	MUST(kill(child, SIGKILL) == 0 && waitpid(child, NULL, 0) == child);
}

static void killed(void)
{
	static char many[1 << 16];
	char buf[8];
	ssize_t n;
	int fds[2];
	/* Forked before this process opens the device. */
	pid_t silent, up, reader;
	int at_set_up[2], at_rest[2], at_work[2];

	silent = child_with(at_set_up, be_silent);
	up = child_with(at_rest, be_up);
	reader = child_with(at_work, be_up);

	begin(at_set_up[0], UWARP_INITIATOR);
	kill_child(silent);
	check(events(at_set_up[0], POLLOUT, LIMIT_MS) & POLLERR, "a peer killed during set-up", "not seen");
	check(error_of(at_set_up[0]) == ECONNRESET, "is ECONNRESET", "not");
	check_failed(CALL(read, at_set_up[0], buf, 1) < 0, ENOTCONN, "and then there is no stream");

	MUST(set_role(at_rest[0], UWARP_INITIATOR) == 0);
	read_all(at_rest[0], buf, 2);
	kill_child(up);
	/* As with TCP: the end; or a reset, if the library there had not read everything yet. */
	MUST((n = CALL(read, at_rest[0], buf, 1)) <= 0);
	check(n == 0 || errno == ECONNRESET, "a peer killed at rest", "errno %d", errno);
	check_failed(CALL(write, at_rest[0], buf, 1) < 0, ECONNRESET, "nobody to write to");

	MUST(set_role(at_work[0], UWARP_INITIATOR) == 0);
	read_all(at_work[0], buf, 2);
	set_nonblocking(at_work[0], true);
	while (CALL(write, at_work[0], many, sizeof many) > 0)
		;
	set_nonblocking(at_work[0], false);
	kill_child(reader);
	while (CALL(write, at_work[0], many, sizeof many) > 0)
		;
	check(errno == ECONNRESET || errno == EPIPE, "a peer killed that did not read", "errno %d", errno);
	MUST(CALL(close, at_set_up[0]) == 0 && CALL(close, at_rest[0]) == 0 && CALL(close, at_work[0]) == 0);
	tcp(fds);
	MUST(close(fds[1]) == 0);
	check_failed(set_role(fds[0], UWARP_RESPONDER) < 0, ECONNRESET, "a peer that has closed before");
	MUST(CALL(close, fds[0]) == 0);
	tcp(fds);
	MUST(write(fds[1], "GET / HTTP/1.0\r\n\r\n......", 24) == 24);
	check_failed(set_role(fds[0], UWARP_RESPONDER) < 0, EPROTO, "a peer that does not speak MPA");
	MUST(CALL(close, fds[0]) == 0);
	check(CALL(read, fds[1], buf, 1) == 0, "learns that it is over", "errno %d", errno);
	MUST(CALL(close, fds[1]) == 0);
	tcp(fds);
	{
		struct uwarp_iwarp_mode mode = { .role = UWARP_RESPONDER, .timeout_ms = QUIET_MS };

		check_failed(CALL(setsockopt, fds[0], SOL_UWARP, IWARP_MODE, &mode, sizeof mode) < 0, ETIMEDOUT, "a silent one");
	}
	close_both(fds);
}

static void forking(void)
{
	char buf[8];
	int fds[2], status;
	pid_t child;

	pair(fds);
	MUST((child = fork()) >= 0);
	if (child == 0) {
		bool good = CALL(write, fds[0], "x", 1) < 0 && errno == ENODEV;

		good = good && CALL(read, fds[1], buf, 1) < 0 && errno == ENODEV;
		good = good && CALL(close, fds[0]) == 0 && CALL(close, fds[1]) == 0;
		_exit(good ? 0 : 1);
	}
	MUST(waitpid(child, &status, 0) == child);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child cannot use it, and closes its copies", "status %#x", status);
	check(CALL(write, fds[0], "still", 5) == 5 && CALL(read, fds[1], buf, 8) == 5, "it is the parent's as before", "errno %d", errno);
	close_both(fds);
}

/* The ends of the group's socket. A message that waits goes on in calls for its socket, so one thread that has both ends waits
 * for both. */
static int both[2];

static struct uwarp_completion done_at(int fd)
{
	struct uwarp_completion c;
	struct pollfd set[2] = { { .fd = both[0], .events = POLLPRI }, { .fd = both[1], .events = POLLPRI } };

	for (uint64_t end = now_ms() + LIMIT_MS; now_ms() < end;) {
		int n = CALL(get_completions, fd, &c, 1);

		MUST(n >= 0);
		if (n == 1)
			return c;
		MUST(CALL(poll, set, 2, LIMIT_MS) > 0);
	}
	die("no completion");
	return c;
}

static void check_done(int fd, uint64_t id, enum uwarp_op op, int error, uint64_t length, const char *name)
{
	struct uwarp_completion c = done_at(fd);

	check(c.id == id && c.op == (uint32_t)op && c.error == error && c.length == length, name, "id %lu op %u error %d length %lu",
	      (unsigned long)c.id, c.op, c.error, (unsigned long)c.length);
}

#define LARGE (3 << 20)

static void descriptors(void)
{
	static char out[LARGE], in[LARGE];
	struct ibv_mr *from, *to;
	struct ibv_sge whole, list[3], parts[3];
	char byte;
	int fds[2];

	for (size_t i = 0; i < sizeof out; i++)
		out[i] = (char)(i * 11 + i / 251);
	pair(fds);
	memcpy(both, fds, sizeof both);
	from = registered(fds[0], out, sizeof out, 0);
	to = registered(fds[1], in, sizeof in, IBV_ACCESS_LOCAL_WRITE);
	whole = (struct ibv_sge){ (uintptr_t)in, LARGE, to->lkey };
	check_errno(post_one(fds[1], 1, UWARP_RECV, &whole, 1), 0, "a receive");
	list[0] = (struct ibv_sge){ (uintptr_t)out, 1000, from->lkey };
	list[1] = (struct ibv_sge){ (uintptr_t)out + 1000, 0, from->lkey };
	list[2] = (struct ibv_sge){ (uintptr_t)out + 1000, LARGE - 1000, from->lkey };
	check_errno(post_one(fds[0], 2, UWARP_SEND, list, 3), 0, "a message of 3 MiB from three pieces");
	check_done(fds[1], 1, UWARP_RECV, 0, LARGE, "is received");
	check(!memcmp(in, out, sizeof in), "as it was sent", "not");
	check_done(fds[0], 2, UWARP_SEND, 0, LARGE, "and completes at the sender");

	memset(in, 0, sizeof in);
	check_errno(post_one(fds[0], 3, UWARP_SEND, list, 1), 0, "a message without a receive");
	check(events(fds[0], POLLPRI, QUIET_MS) == 0, "waits", "it does not");
	check(CALL(write, fds[0], "b", 1) == 1 && CALL(read, fds[1], &byte, 1) == 1, "and stops no bytes", "errno %d", errno);
	for (int i = 0; i < 3; i++)
		parts[i] = (struct ibv_sge){ (uintptr_t)in + 5000 * i, 400, to->lkey };
	check_errno(post_one(fds[1], 4, UWARP_RECV, parts, 3), 0, "until there is one, in pieces");
	check_done(fds[1], 4, UWARP_RECV, 0, 1000, "is received");
	check(!memcmp(in, out, 400) && !memcmp(in + 5000, out + 400, 400) && !memcmp(in + 10000, out + 800, 200) && !in[10200],
	      "into the pieces, and no further", "not");
	check_done(fds[0], 3, UWARP_SEND, 0, 1000, "and completes");

	whole.length = 10;
	check_errno(post_one(fds[1], 5, UWARP_RECV, &whole, 1), 0, "a short receive");
	list[0].length = 11;
	check_errno(post_one(fds[0], 6, UWARP_SEND, list, 1), 0, "a longer message");
	check_done(fds[0], 6, UWARP_SEND, EMSGSIZE, 0, "is refused");
	list[0].length = 0;
	check_errno(post_one(fds[0], 7, UWARP_SEND, list, 1), 0, "one of no bytes");
	check_done(fds[1], 5, UWARP_RECV, 0, 0, "takes the receive");
	check_done(fds[0], 7, UWARP_SEND, 0, 0, "and completes");

	/* Of other libraries' keys libuwarp-verbs-sockets.so knows nothing. */
	if (!over_verbs()) {
		list[0].length = 9;
		check_errno(post_one(fds[0], 8, UWARP_RECV, list, 1), EFAULT, "memory without the right to be written");
		whole.lkey ^= 0x1000;
		check_errno(post_one(fds[1], 8, UWARP_RECV, &whole, 1), EFAULT, "a wrong key");
		whole.lkey = from->lkey;
		check_errno(post_one(fds[1], 8, UWARP_SEND, &whole, 1), EFAULT, "memory of another socket");
	}
	check_errno(post_one(fds[0], 8, UWARP_SEND, list, UWARP_SGE_MAX + 1), EINVAL, "too many pieces");
	check_errno(post_one(fds[0], 8, (enum uwarp_op)9, list, 1), EINVAL, "an unknown operation");
	for (int i = 0; i < 64; i++)
		MUST(post_one(fds[1], 9, UWARP_RECV, &(struct ibv_sge){ (uintptr_t)in, 1, to->lkey }, 1) == 0);
	check_errno(post_one(fds[1], 9, UWARP_RECV, &(struct ibv_sge){ (uintptr_t)in, 1, to->lkey }, 1), EAGAIN, "too many receives");
	check_errno(post_one(0, 9, UWARP_RECV, &whole, 1), EOPNOTSUPP, "a descriptor that is no such socket");
	MUST(CALL(close, fds[0]) == 0);
	both[0] = -1;
	check_done(fds[1], 9, UWARP_RECV, ECONNRESET, 0, "receives fail when the peer goes");
	check_errno(post_one(fds[1], 10, UWARP_RECV, parts, 1), ECONNRESET, "and no more are taken");
	MUST(ibv_dereg_mr(from) == 0 && ibv_dereg_mr(to) == 0);
	MUST(CALL(close, fds[1]) == 0);
}

/* Messages in both directions, many at once, beside bytes. */
static void mixed(void)
{
	static char out[2][64][512], in[2][64][512];
	struct ibv_mr *mrs[4];
	int fds[2], good = 0, sent[2] = { 0, 0 }, got[2] = { 0, 0 };
	char byte;

	pair(fds);
	for (int e = 0; e < 2; e++) {
		mrs[e] = registered(fds[e], out[e], sizeof out[e], 0);
		mrs[2 + e] = registered(fds[e], in[e], sizeof in[e], IBV_ACCESS_LOCAL_WRITE);
		for (int i = 0; i < 32; i++)
			MUST(post_one(fds[e], i, UWARP_RECV, &(struct ibv_sge){ (uintptr_t)in[e][i], 512, mrs[2 + e]->lkey }, 1) == 0);
	}
	while (got[0] < 2000 || got[1] < 2000) {
		for (int e = 0; e < 2; e++) {
			struct uwarp_completion c;

			/* At most 32 are on their way, so each has a place of its own. */
			while (sent[e] < 2000 && sent[e] < got[!e] + 32) {
				int at = sent[e] % 64;
				uint32_t len = (uint32_t)(sent[e] * 37 % 512);

				memset(out[e][at], sent[e], 512);
				MUST(post_one(fds[e], at, UWARP_SEND, &(struct ibv_sge){ (uintptr_t)out[e][at], len, mrs[e]->lkey }, 1) == 0);
				sent[e]++;
			}
			MUST(CALL(write, fds[e], &e, 1) == 1 && CALL(read, fds[!e], &byte, 1) == 1);
			while (CALL(get_completions, fds[e], &c, 1) == 1) {
				char *place = in[e][c.id];
				uint32_t len = (uint32_t)(got[e] * 37 % 512);

				MUST(c.error == 0);
				if (c.op != UWARP_RECV)
					continue;
				good += c.length == len && (len == 0 || (place[0] == (char)got[e] && place[len - 1] == (char)got[e]));
				got[e]++;
				MUST(post_one(fds[e], c.id, UWARP_RECV, &(struct ibv_sge){ (uintptr_t)place, 512, mrs[2 + e]->lkey }, 1) == 0);
			}
		}
	}
	check(good == 4000, "4,000 messages beside as many bytes", "%d good", good);
	for (int i = 0; i < 4; i++)
		MUST(ibv_dereg_mr(mrs[i]) == 0);
	close_both(fds);
}

static void one_sided(void)
{
	static char ours[1 << 16], theirs[1 << 16];
	struct ibv_mr *local, *remote;
	struct uwarp_desc desc;
	struct ibv_send_wr wr = { .wr_id = 77, .opcode = IBV_WR_RDMA_WRITE, .num_sge = 1 }, *bad;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_sge sge;
	char byte;
	int fds[2];

	pair(fds);
	memcpy(both, fds, sizeof both);
	local = registered(fds[0], ours, sizeof ours, IBV_ACCESS_LOCAL_WRITE);
	remote = registered(fds[1], theirs, sizeof theirs, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	memset(ours, 'w', sizeof ours);
	sge = (struct ibv_sge){ (uintptr_t)ours, sizeof ours, local->lkey };
	desc = (struct uwarp_desc){ 1, &sge, 1, UWARP_WRITE, (uintptr_t)theirs, remote->rkey, 0 };
	check(CALL(post, fds[0], &desc, 1) == 1, "a Write", "errno %d", errno);
	MUST(CALL(write, fds[0], "x", 1) == 1);
	check(CALL(read, fds[1], &byte, 1) == 1 && theirs[0] == 'w' && theirs[sizeof theirs - 1] == 'w',
	      "is there when bytes arrive that were written after it", "%c", theirs[0]);
	check_done(fds[0], 1, UWARP_WRITE, 0, sizeof ours, "and completes");
	memset(theirs, 'r', sizeof theirs);
	desc.id = 2;
	desc.op = UWARP_READ;
	check(CALL(post, fds[0], &desc, 1) == 1, "a Read", "errno %d", errno);
	check_done(fds[0], 2, UWARP_READ, 0, sizeof ours, "completes");
	check(ours[0] == 'r' && ours[sizeof ours - 1] == 'r', "with the peer's bytes", "%c", ours[0]);

	if (!over_verbs()) {
		/* siw says nothing about the state. */
		check(ibv_query_qp(CALL(socket_qp, fds[0]), &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_RTS,
		      "the queue pair", "%d", attr.qp_state);
		check_errno(ibv_destroy_qp(CALL(socket_qp, fds[0])), EBUSY, "is the socket's");
	}
	sge.length = 3;
	wr.sg_list = &sge;
	wr.wr.rdma.remote_addr = (uintptr_t)theirs;
	wr.wr.rdma.rkey = remote->rkey;
	ours[0] = 'q';
	check_errno(ibv_post_send(CALL(socket_qp, fds[0]), &wr, &bad), 0, "a work request of the verbs");
	check_done(fds[0], 77, UWARP_WORK_REQUEST, 0, 0, "completes with the others");
	/* With iWARP's own rules it is complete when TCP has it; what comes behind it says that it is there. */
	MUST(CALL(write, fds[0], "y", 1) == 1 && CALL(read, fds[1], &byte, 1) == 1);
	check(theirs[0] == 'q', "and is done", "%c", theirs[0]);

	desc.op = UWARP_WRITE;
	desc.rkey ^= 0x100;
	check(CALL(post, fds[0], &desc, 1) == 1, "a Write with a wrong key", "errno %d", errno);
	{
		struct uwarp_completion c = done_at(fds[0]);

		/* With iWARP's own rules it is complete when TCP has it. */
		check(c.error == EACCES || c.error == ECONNRESET || c.error == 0, "completes, mostly with an error", "error %d", c.error);
	}
	check_failed(CALL(read, fds[0], &byte, 1) < 0, EPROTO, "and ends the stream");
	MUST(ibv_dereg_mr(local) == 0 && ibv_dereg_mr(remote) == 0);
	close_both(fds);
}

#define MANY 500

static void many(void)
{
	static int fds[MANY][2];
	struct rlimit limit;
	char buf[16];
	int good = 0;

	MUST(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = limit.rlim_max;
	MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (int i = 0; i < MANY; i++) {
		tcp(fds[i]);
		begin(fds[i][0], UWARP_INITIATOR);
		begin(fds[i][1], UWARP_RESPONDER);
	}
	for (int i = 0; i < MANY; i++) {
		end(fds[i][0]);
		end(fds[i][1]);
	}
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < MANY; i++)
			write_all(fds[i][round & 1], (char *)&i, sizeof i);
		for (int i = 0; i < MANY; i++) {
			read_all(fds[i][!(round & 1)], buf, sizeof i);
			good += !memcmp(buf, &i, sizeof i);
		}
	}
	check(good == 3 * MANY, "a thousand sockets", "%d of %d messages", good, 3 * MANY);
	for (int i = 0; i < MANY; i++)
		close_both(fds[i]);
	pair(fds[0]);
	check(CALL(write, fds[0][0], "x", 1) == 1 && CALL(read, fds[0][1], buf, 1) == 1, "and one more afterwards", "errno %d", errno);
	close_both(fds[0]);
}

static const struct group groups[] = {
	{ "modes", modes },
	{ "bytes", bytes },
	{ "polling", polling },
	{ "half_closed", half_closed },
	{ "waiting", waiting },
	{ "killed", killed },
	{ "forking", forking },
	{ "descriptors", descriptors },
	{ "mixed", mixed },
	{ "one_sided", one_sided },
	{ "many", many },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
