/* Calls during which a TCP connection becomes iWARP's in place, under `uwarp run --sockets=upgrade`: each answers as TCP
 * would, and what it has done holds afterwards. They are made one instruction at a time, so that the library comes between
 * at any of them. */
#define _GNU_SOURCE
#include "upgrade.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <ucontext.h>

static unsigned draw(unsigned *seed)
{
	*seed = *seed * 1664525u + 1013904223u;
	return *seed >> 8;
}

/* The instruction of a call before which it waits until the library has come between, or for a moment. */
static volatile long pause_at, step, most;
static int watched;
static ino_t watched_was;

static void on_step(int signal, siginfo_t *info, void *context)
{
	struct stat now;

	(void)signal, (void)info;
	/* A lock may be held here, behind which the library waits. */
	for (int i = 0; step == pause_at && i < 200 && fstat(watched, &now) == 0 && now.st_ino == watched_was; i++)
		usleep(200);
	step++;
#ifdef __x86_64__
	if (step >= most || (pause_at >= 0 && step > pause_at))
		((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL] &= ~0x100ll;
#else
	(void)context;
#endif
}

static void begin_to_step(struct sigaction *before)
{
	struct sigaction action = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };

	MUST(sigaction(SIGTRAP, &action, before) == 0);
}

/* A connection, and what a call must say of its end. */
struct meeting {
	int fd, peer;
	ino_t was;
	struct sockaddr_storage own, other;
	socklen_t len;
	int turn;		/* which call of it this is */
	int copy;		/* another descriptor of the end, or -1 */
	char byte;
};

/* A call, one instruction at a time. */
static int slowly(int (*call)(struct meeting *), struct meeting *m, long at)
{
	int result;

	watched = m->fd;
	watched_was = m->was;
	pause_at = at;
	step = 0;
	most = 8000;
#ifdef __x86_64__
	/* Not what is below the stack pointer: the compiler may use it. */
	__asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; orq $0x100, (%%rsp); popfq; lea 128(%%rsp), %%rsp" ::: "memory", "cc");
#endif
	result = call(m);
	most = 0;
	return result;
}

/* A connection. If both ends have been used, the two libraries begin to ask each other. */
static struct meeting meet(int l, int from, bool both)
{
	struct meeting m = { .copy = -1, .len = sizeof m.own };
	int ends[2];
	char byte;

	ends[0] = client();
	MUST((ends[1] = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	m.fd = ends[from];
	m.peer = ends[!from];
	MUST(getsockname(m.fd, (struct sockaddr *)&m.own, &m.len) == 0);
	MUST(getsockname(m.peer, (struct sockaddr *)&m.other, &m.len) == 0);
	m.was = inode(m.fd);
	for (int k = 0; both && k < 2; k++)
		MUST(send(ends[k], "x", 1, 0) == 1 && recv(ends[!k], &byte, 1, 0) == 1);
	return m;
}

/* ------------------------------------------------------------------ calls */

/* Each says 0, or what it saw instead. */
struct call {
	const char *name;
	int (*call)(struct meeting *);
	int (*after)(struct meeting *);	/* what holds once the library is between; NULL: nothing more */
};

static int wrong(void)
{
	return errno ? -errno : -9999;
}

static int same(const struct sockaddr_storage *got, socklen_t len, const struct sockaddr_storage *want, const struct meeting *m)
{
	return len == m->len && memcmp(got, want, len) == 0 ? 0 : 10000 + got->ss_family;
}

static int end(struct meeting *m)
{
	return shutdown(m->fd, SHUT_WR) ? wrong() : 0;
}

static int end_is_seen(struct meeting *m)
{
	return readable(m->peer, LIMIT_MS) && recv(m->peer, &m->byte, 1, 0) == 0 ? 0 : 1;
}

static int own_name(struct meeting *m)
{
	struct sockaddr_storage got = { 0 };
	socklen_t len = sizeof got;

	return getsockname(m->fd, (struct sockaddr *)&got, &len) ? wrong() : same(&got, len, &m->own, m);
}

static int peers_name(struct meeting *m)
{
	struct sockaddr_storage got = { 0 };
	socklen_t len = sizeof got;

	return getpeername(m->fd, (struct sockaddr *)&got, &len) ? wrong() : same(&got, len, &m->other, m);
}

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t len = sizeof value;

	return getsockopt(fd, level, name, &value, &len) ? wrong() : value;
}

static int error_is_none(struct meeting *m)
{
	return option(m->fd, SOL_SOCKET, SO_ERROR);
}

static int domain(struct meeting *m)
{
	return option(m->fd, SOL_SOCKET, SO_DOMAIN) - m->own.ss_family;
}

static int segment(struct meeting *m)
{
	int size = option(m->fd, IPPROTO_TCP, TCP_MAXSEG);

	return size > 0 ? 0 : size;
}

static int set(int fd, int level, int name, int value)
{
	return setsockopt(fd, level, name, &value, sizeof value) ? wrong() : 0;
}

static int nodelay(struct meeting *m)
{
	return set(m->fd, IPPROTO_TCP, TCP_NODELAY, ++m->turn % 2);
}

static int nodelay_holds(struct meeting *m)
{
	return option(m->fd, IPPROTO_TCP, TCP_NODELAY) - m->turn % 2;
}

static int keepalive(struct meeting *m)
{
	return set(m->fd, IPPROTO_TCP, TCP_KEEPIDLE, 100 + ++m->turn);
}

static int keepalive_holds(struct meeting *m)
{
	return option(m->fd, IPPROTO_TCP, TCP_KEEPIDLE) - (100 + m->turn);
}

static int low_water(struct meeting *m)
{
	return set(m->fd, SOL_SOCKET, SO_RCVLOWAT, 1 + ++m->turn % 2);
}

static int low_water_holds(struct meeting *m)
{
	return option(m->fd, SOL_SOCKET, SO_RCVLOWAT) - (1 + m->turn % 2);
}

static int limit(struct meeting *m)
{
	struct timeval time = { .tv_usec = ++m->turn % 2 ? 5000 : 0 };

	return setsockopt(m->fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) ? wrong() : 0;
}

static void on_alarm(int signal)
{
	(void)signal;
}

static int limit_holds(struct meeting *m)
{
	struct sigaction action = { .sa_handler = on_alarm }, before;
	unsigned left;
	int result = 0;

	if (m->turn % 2) {
		/* Without a limit, it would wait for ever. */
		MUST(sigaction(SIGALRM, &action, &before) == 0);
		left = alarm(3);
		errno = 0;
		if (recv(m->fd, &m->byte, 1, 0) != -1 || errno != EAGAIN)
			result = wrong();
		MUST(sigaction(SIGALRM, &before, NULL) == 0);
		alarm(left);
	}
	return result;
}

/* meet() has left nothing unread, and before the first call four bytes come. */
static int count(struct meeting *m)
{
	int bytes = -1;

	if (m->turn++ == 0) {
		MUST(send(m->peer, "1234", 4, 0) == 4);
		for (uint64_t end = now_ms() + LIMIT_MS; now_ms() < end && bytes != 4;)
			MUST(ioctl(m->fd, FIONREAD, &bytes) == 0);
	}
	return ioctl(m->fd, FIONREAD, &bytes) ? wrong() : bytes == 4 ? 0 : 10000 + bytes;
}

static int counted(struct meeting *m)
{
	char block[8];

	return recv(m->fd, block, sizeof block, 0) == 4 && memcmp(block, "1234", 4) == 0 ? 0 : -1;
}

static int nonblocking(struct meeting *m)
{
	int on = ++m->turn % 2;

	return ioctl(m->fd, FIONBIO, &on) ? wrong() : 0;
}

static int flags(struct meeting *m)
{
	return fcntl(m->fd, F_SETFL, O_RDWR | (++m->turn % 2 ? O_NONBLOCK : 0)) ? wrong() : 0;
}

static int flags_hold(struct meeting *m)
{
	int now = fcntl(m->fd, F_GETFL);
	ssize_t n;

	if ((now & O_NONBLOCK) != (m->turn % 2 ? O_NONBLOCK : 0))
		return now;
	/* The library's own idea of it. */
	if (m->turn % 2)
		return recv(m->fd, &m->byte, 1, 0) == -1 && errno == EAGAIN ? 0 : wrong();
	MUST(send(m->peer, "y", 1, 0) == 1);
	n = recv(m->fd, &m->byte, 1, 0);
	return n == 1 ? 0 : wrong();
}

static int kept_over_exec(struct meeting *m)
{
	int on = ++m->turn % 2 ? FD_CLOEXEC : 0;

	if (fcntl(m->fd, F_SETFD, on))
		return wrong();
	return fcntl(m->fd, F_GETFD) == on ? 0 : 1;
}

static int kept_holds(struct meeting *m)
{
	return fcntl(m->fd, F_GETFD) - (m->turn % 2 ? FD_CLOEXEC : 0);
}

static int connect_again(struct meeting *m)
{
	errno = 0;
	return connect(m->fd, (struct sockaddr *)&m->other, m->len) == -1 && errno == EISCONN ? 0 : wrong();
}

static int urgent(struct meeting *m)
{
	errno = 0;
	return recv(m->fd, &m->byte, 1, MSG_OOB | MSG_DONTWAIT) == -1 && errno == EINVAL ? 0 : wrong();
}

/* TCP throws such bytes away. */
static int thrown_away(struct meeting *m)
{
	char block[2] = "q";

	MUST(send(m->peer, "w", 1, 0) == 1);
	for (int i = 0; i < LIMIT_MS; i++) {
		ssize_t n = recv(m->fd, block, 1, MSG_TRUNC);

		if (n == 1)
			return block[0] == 'q' ? 0 : 10000 + block[0];
		MUST(n == -1 && errno == EAGAIN);
		usleep(1000);
	}
	return -1;
}

static int copied(struct meeting *m, int copy)
{
	if (copy < 0)
		return wrong();
	m->copy = copy;
	return 0;
}

static int dup_of(struct meeting *m)
{
	return copied(m, dup(m->fd));
}

static int dup2_of(struct meeting *m)
{
	return copied(m, dup2(m->fd, 500));
}

static int dup3_of(struct meeting *m)
{
	return copied(m, dup3(m->fd, 500, O_CLOEXEC));
}

static int dupfd_of(struct meeting *m)
{
	return copied(m, fcntl(m->fd, F_DUPFD_CLOEXEC, 100));
}

/* The copy is the same stream, and lives on without the first descriptor. */
static int copy_is_the_same(struct meeting *m)
{
	struct pollfd p = { .fd = m->copy, .events = POLLIN };

	if (inode(m->copy) != inode(m->fd))
		return 1;
	MUST(close(m->fd) == 0);
	m->fd = m->copy;
	m->copy = -1;
	MUST(send(m->peer, "z", 1, 0) == 1);
	if (poll(&p, 1, LIMIT_MS) != 1 || recv(m->fd, &m->byte, 1, 0) != 1 || m->byte != 'z')
		return 2;
	MUST(send(m->fd, "v", 1, 0) == 1);
	return recv(m->peer, &m->byte, 1, 0) == 1 && m->byte == 'v' ? 0 : 3;
}

#define MEETINGS 40

/* Each call in as many connections, in each of which the library comes between at another instruction of it. */
static void all_of(const struct call *calls, size_t count)
{
	struct sigaction before;
	int l = listener();
	unsigned seed = 4711;

	begin_to_step(&before);
	for (size_t k = 0; k < count; k++) {
		int faults = 0, last = 0, later = 0, afterwards = 0, upgraded = 0;
		long length = 0;

		for (int i = 0; i < MEETINGS; i++) {
			struct meeting m = meet(l, i % 2, i > 0);
			int got;

			if (i == 0) {
				/* The loader looks the function up at the first call. */
				got = calls[k].call(&m);
				if (m.copy >= 0)
					MUST(close(m.copy) == 0);
				if (got == 0)
					got = slowly(calls[k].call, &m, -1);
				length = step;
				MUST(close(m.fd) == 0 && close(m.peer) == 0);
				if (m.copy >= 0)
					MUST(close(m.copy) == 0);
				faults += got != 0;
				last = got;
				continue;
			}
			got = slowly(calls[k].call, &m, length * i / MEETINGS + draw(&seed) % (unsigned)(length / MEETINGS + 1));
			faults += got != 0;
			last = got ? got : last;
			/* What ends a direction keeps the connection TCP. */
			if (got == 0 && (calls[k].call == end || becomes(m.fd, m.was, 5000))) {
				upgraded++;
				got = calls[k].after ? calls[k].after(&m) : 0;
				later += got != 0;
				afterwards = got ? got : afterwards;
			}
			if (m.copy >= 0)
				MUST(close(m.copy) == 0);
			MUST(close(m.fd) == 0 && close(m.peer) == 0);
		}
		printf("# %s: %ld instructions\n", calls[k].name, length);
		check(faults == 0, calls[k].name, "%d of %d answers were wrong, the last %d", faults, MEETINGS, last);
		check(later == 0, "and it holds", "%d of %d do not, the last %d", later, upgraded, afterwards);
		check(upgraded + faults >= MEETINGS - 5, "connections came behind the library", "%d of %d", upgraded, MEETINGS);
	}
	MUST(sigaction(SIGTRAP, &before, NULL) == 0 && close(l) == 0);
}

#define ALL_OF(...) \
	do { \
		static const struct call calls[] = { __VA_ARGS__ }; \
		all_of(calls, sizeof calls / sizeof *calls); \
	} while (0)

static void ends_meanwhile(void)
{
	ALL_OF({ "an end goes out", end, end_is_seen });
}

static void names_meanwhile(void)
{
	ALL_OF({ "getsockname", own_name, own_name }, { "getpeername", peers_name, peers_name },
	       { "connect, once more", connect_again, connect_again });
}

static void options_meanwhile(void)
{
	ALL_OF({ "SO_ERROR", error_is_none, error_is_none }, { "SO_DOMAIN", domain, domain }, { "TCP_MAXSEG", segment, segment },
	       { "TCP_NODELAY", nodelay, nodelay_holds }, { "TCP_KEEPIDLE", keepalive, keepalive_holds },
	       { "SO_RCVLOWAT", low_water, low_water_holds }, { "SO_RCVTIMEO", limit, limit_holds });
}

static void flags_meanwhile(void)
{
	ALL_OF({ "FIONREAD", count, counted }, { "FIONBIO", nonblocking, flags_hold }, { "F_SETFL", flags, flags_hold },
	       { "F_SETFD", kept_over_exec, kept_holds }, { "MSG_OOB", urgent, urgent }, { "MSG_TRUNC", thrown_away, thrown_away });
}

static void copies_meanwhile(void)
{
	ALL_OF({ "dup", dup_of, copy_is_the_same }, { "dup2", dup2_of, copy_is_the_same }, { "dup3", dup3_of, copy_is_the_same },
	       { "F_DUPFD_CLOEXEC", dupfd_of, copy_is_the_same });
}

/* ------------------------------------------------------------------ waiting */

static int asked[2];		/* a pipe */
static int sends_to;

/* Sends a byte for each that it is asked for, when the library is likely to have come between. */
static void *sender(void *arg)
{
	char byte;

	while (read(asked[0], &byte, 1) == 1) {
		usleep(15000);
		MUST(send(sends_to, "b", 1, 0) == 1);
	}
	return arg;
}

static int byte_came(struct meeting *m, int ready)
{
	if (ready != 1)
		return ready < 0 ? wrong() : 10000 + ready;
	return recv(m->fd, &m->byte, 1, MSG_DONTWAIT) == 1 ? 0 : wrong();
}

static int by_poll(struct meeting *m)
{
	struct pollfd p = { .fd = m->fd, .events = POLLIN };

	sends_to = m->peer;
	MUST(write(asked[1], "", 1) == 1);
	return byte_came(m, poll(&p, 1, LIMIT_MS));
}

static int by_select(struct meeting *m)
{
	struct timeval time = { .tv_sec = LIMIT_MS / 1000 };
	fd_set set;

	FD_ZERO(&set);
	FD_SET(m->fd, &set);
	sends_to = m->peer;
	MUST(write(asked[1], "", 1) == 1);
	return byte_came(m, select(m->fd + 1, &set, NULL, NULL, &time));
}

static int by_epoll(struct meeting *m)
{
	struct epoll_event event = { .events = EPOLLIN };
	int set, result;

	MUST((set = epoll_create1(EPOLL_CLOEXEC)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, m->fd, &event) == 0);
	sends_to = m->peer;
	MUST(write(asked[1], "", 1) == 1);
	result = byte_came(m, epoll_wait(set, &event, 1, LIMIT_MS));
	MUST(close(set) == 0);
	return result;
}

/* Beside a thread that sends. */
static void waits_meanwhile(void)
{
	static int one;
	static const struct call calls[] = { { "poll", by_poll, NULL }, { "select", by_select, NULL },
					     { "epoll", by_epoll, NULL } };
	pthread_t thread;

	MUST(pipe(asked) == 0 && pthread_create(&thread, NULL, sender, &one) == 0);
	all_of(calls, sizeof calls / sizeof *calls);
	MUST(close(asked[1]) == 0 && pthread_join(thread, NULL) == 0);
}

static const struct group groups[] = {
	{ "ends_meanwhile", ends_meanwhile },
	{ "names_meanwhile", names_meanwhile },
	{ "options_meanwhile", options_meanwhile },
	{ "flags_meanwhile", flags_meanwhile },
	{ "copies_meanwhile", copies_meanwhile },
	{ "waits_meanwhile", waits_meanwhile },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
