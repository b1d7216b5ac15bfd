/* Programs whose TCP connections become iWARP's in place, under `uwarp run --sockets=upgrade`: each kind of wait while
 * that happens, and more connections than most programs have. */
#define _GNU_SOURCE
#include "upgrade.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/select.h>

/* Answers late, so that the other end waits when its descriptor becomes another file. */
static void *echo_late(void *arg)
{
	int fd = *(int *)arg;
	char block[64];

	for (ssize_t n; (n = recv(fd, block, sizeof block, 0)) > 0;) {
		usleep(2000);
		MUST(send(fd, block, (size_t)n, 0) == n);
	}
	return NULL;
}

static bool readable_by(int fd, int call)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec limit = { .tv_sec = 10 };
	struct timeval same = { .tv_sec = 10 };
	fd_set set;

	FD_ZERO(&set);
	FD_SET(fd, &set);
	switch (call) {
	case 0:
		return poll(&p, 1, 10000) == 1;
	case 1:
		return ppoll(&p, 1, &limit, NULL) == 1;
	case 2:
		return select(fd + 1, &set, NULL, NULL, &same) == 1;
	default:
		return pselect(fd + 1, &set, NULL, NULL, &limit, NULL) == 1;
	}
}

/* A call that waits when the connection gets its stand-in hears of what comes after that. */
static void waits(void)
{
	static const char *const names[] = { "poll hears of what comes after the switch",
					      "ppoll hears of it", "select hears of it", "pselect hears of it" };
	int l = listener();

	for (int call = 0; call < 4; call++) {
		int missed = 0;

		for (int i = 0; i < 25 && missed == 0; i++) {
			int c = client(), a;
			pthread_t thread;
			char byte;

			MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
			MUST(pthread_create(&thread, NULL, echo_late, &a) == 0);
			for (int k = 0; k < 8 && missed == 0; k++) {
				MUST(send(c, "x", 1, 0) == 1);
				missed += !readable_by(c, call);
				MUST(recv(c, &byte, 1, 0) == 1);
			}
			MUST(close(c) == 0);
			MUST(pthread_join(thread, NULL) == 0);
			MUST(close(a) == 0);
		}
		check(missed == 0, names[call], "it waits for what is there");
	}
	MUST(close(l) == 0);
}

/* An upgraded connection has four descriptors more, and one or two meanwhile. */
#define DESCRIPTORS 7

static long resident_kb(void)
{
	long pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	MUST(f && fscanf(f, "%*d %ld", &pages) == 1 && fclose(f) == 0);
	return pages * sysconf(_SC_PAGESIZE) / 1024;
}

static int has_become(const int *fds, const ino_t *before, int count)
{
	struct stat stat;
	int became = 0;

	for (int i = 0; i < count; i++) {
		MUST(fstat(fds[i], &stat) == 0);
		became += stat.st_ino != before[i];
	}
	return became;
}

/* Sends back what comes, until all have closed. */
static void echo_all(int l, int count)
{
	int set = epoll_create1(EPOLL_CLOEXEC), open = 0, accepted = 0;
	struct epoll_event e = { .events = EPOLLIN, .data.fd = l }, events[256];
	long before = resident_kb(), most = before;
	char block[256];

	MUST(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, l, &e) == 0);
	while (accepted < count || open > 0) {
		int n = epoll_wait(set, events, 256, LIMIT_MS);

		MUST(n > 0);
		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;

			if (fd == l) {
				MUST((fd = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
				e.data.fd = fd;
				MUST(epoll_ctl(set, EPOLL_CTL_ADD, fd, &e) == 0);
				accepted++;
				open++;
				continue;
			}
			ssize_t got = recv(fd, block, sizeof block, 0);

			MUST(got >= 0);
			if (got == 0) {
				if (most == before)
					most = resident_kb();
				MUST(close(fd) == 0);
				open--;
			}
			for (ssize_t at = 0; at < got;) {
				ssize_t sent = send(fd, block + at, (size_t)(got - at), 0);

				MUST(sent > 0);
				at += sent;
			}
		}
	}
	printf("the end that accepted: %ld kB a connection\n", (most - before) / count);
	exit(0);
}

/* One process with so many connections to another one; bytes of all come back. */
static void many(void)
{
	int wanted = getenv("MANY") ? atoi(getenv("MANY")) : 1000, count, l, status, bad = 0;
	struct rlimit limit;
	ino_t *before;
	struct stat stat;
	pid_t server;
	int *fds;

	MUST(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (limit.rlim_max < (rlim_t)wanted * DESCRIPTORS + 500)
		limit.rlim_max = (rlim_t)wanted * DESCRIPTORS + 500;
	limit.rlim_cur = limit.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
		MUST(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	count = (int)(limit.rlim_cur / DESCRIPTORS);
	count = count < wanted ? count : wanted;
	printf("%d connections\n", count);
	fflush(stdout);
	l = listener();
	MUST((server = fork()) >= 0);
	if (server == 0)
		echo_all(l, count);
	MUST(close(l) == 0);
	MUST((fds = calloc((size_t)count, sizeof *fds)) && (before = calloc((size_t)count, sizeof *before)));
	long memory = resident_kb();

	for (int round = 0; round < 4; round++) {
		/* A few at a time, or the kernel's queue of connections is full. */
		for (int first = 0; first < count; first += 64) {
			int end = first + 64 < count ? first + 64 : count;
			unsigned char out[200], in[200];

			for (int i = first; i < end; i++) {
				if (round == 0) {
					fds[i] = client();
					MUST(fstat(fds[i], &stat) == 0);
					before[i] = stat.st_ino;
				}
				for (int k = 0; k < 200; k++)
					out[k] = (unsigned char)(i * 31 + k * 7 + round);
				MUST(send(fds[i], out, sizeof out, 0) == sizeof out);
			}
			for (int i = first; i < end; i++) {
				MUST(readable(fds[i], LIMIT_MS));
				bad += recv(fds[i], in, sizeof in, MSG_WAITALL) != sizeof in;
				for (int k = 0; k < 200; k++)
					bad += in[k] != (unsigned char)(i * 31 + k * 7 + round);
			}
		}
		printf("round %d: %d are behind the library\n", round, has_become(fds, before, count));
		fflush(stdout);
		/* Until all have, or no more do: another program may have a UDP port. */
		for (int was = -1, is; round == 0 && (is = has_become(fds, before, count)) > was && is < count; was = is)
			usleep(1000000);
	}
	check(bad == 0, "all bytes of all connections come back", "%d are wrong", bad);
	check(has_become(fds, before, count) >= count * 9 / 10, "nine of ten are streams", "%d of %d",
	      has_become(fds, before, count), count);
	printf("the end that connected: %ld kB a connection\n", (resident_kb() - memory) / count);
	for (int i = 0; i < count; i++)
		MUST(close(fds[i]) == 0);
	MUST(waitpid(server, &status, 0) == server);
	check(status == 0, "the other end has seen all of them closed", "%#x", status);
}

/* So many connections at once, with so many descriptors left: what cannot be upgraded stays TCP. */
static void with_room_for(int room)
{
	struct rlimit limit;
	int l = listener(), c[4], a[4], made = 0, free_fd = dup(l);
	char in[100], out[100];

	alarm(30);
	MUST(free_fd >= 0 && close(free_fd) == 0 && getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = (rlim_t)(free_fd + room);
	MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	for (; made < 4; made++) {
		c[made] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (c[made] < 0)
			break;
		MUST(connect(c[made], sa(), listening_len) == 0);
		a[made] = accept4(l, NULL, NULL, SOCK_CLOEXEC);
		if (a[made] < 0)
			break;
		/* While the agreement goes on. */
		for (int round = 0; round < 6; round++) {
			for (int i = 0; i <= made; i++) {
				memset(out, 'a' + round + i, sizeof out);
				MUST(send(c[i], out, sizeof out, 0) == sizeof out);
				MUST(recv(a[i], in, sizeof in, MSG_WAITALL) == sizeof in && memcmp(in, out, sizeof in) == 0);
				MUST(send(a[i], in, sizeof in, 0) == sizeof in);
				MUST(readable(c[i], LIMIT_MS));
				MUST(recv(c[i], in, sizeof in, MSG_WAITALL) == sizeof in && memcmp(in, out, sizeof in) == 0);
			}
			usleep(1000);
		}
	}
	MUST(made == 4 || errno == EMFILE);
	for (int i = 0; i < made; i++) {
		MUST(close(c[i]) == 0);
		MUST(recv(a[i], in, 1, 0) == 0 && close(a[i]) == 0);
	}
	/* The first has a socket of UDP, too. */
	exit(made > 0 || room < 3 ? 0 : 3);
}

static void exhausted(void)
{
	int status, bad = 0;
	pid_t child;

	for (int room = 0; room < 48; room++) {
		fflush(stdout);
		MUST((child = fork()) >= 0);
		if (child == 0)
			with_room_for(room);
		MUST(waitpid(child, &status, 0) == child);
		if (status != 0) {
			printf("room for %d: %#x\n", room, status);
			bad++;
		}
	}
	check(bad == 0, "without descriptors for a stream, a connection is TCP, or EMFILE", "%d times not", bad);
}

static int asked;
static volatile sig_atomic_t waiting, owed;

/* send is safe in a handler. */
static void ask(int signal)
{
	(void)signal;
	if (waiting && owed < 64 && send(asked, "x", 1, MSG_DONTWAIT) == 1)
		owed++;
}

static void *answer(void *arg)
{
	int fd = *(int *)arg;
	char block[64];

	for (ssize_t n; (n = recv(fd, block, sizeof block, 0)) > 0;)
		MUST(send(fd, block, (size_t)n, 0) == n);
	return NULL;
}

/* Waits for the socket by poll, select or epoll_wait. */
static void wait_by(int fd, int set, int call)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct epoll_event event;
	fd_set readable;

	FD_ZERO(&readable);
	FD_SET(fd, &readable);
	waiting = 1;
	switch (call) {
	case 0:
		poll(&p, 1, 1000);
		break;
	case 1:
		select(fd + 1, &readable, NULL, NULL, &(struct timeval){ .tv_sec = 1 });
		break;
	default:
		epoll_wait(set, &event, 1, 1000);
	}
	waiting = 0;
}

/* A handler that interrupts a call that waits may use the same socket. A call that hung would end the test. */
static void handlers(void)
{
	static const char *const names[] = { "a handler sends during poll", "a handler sends during select",
					      "a handler sends during epoll_wait" };
	const struct itimerval often = { { .tv_usec = 300 }, { .tv_usec = 300 } }, never = { 0 };
	struct epoll_event member = { .events = EPOLLIN };
	int l = listener(), c = client(), a, set;
	sigset_t alarms;
	pthread_attr_t small;
	pthread_t thread;
	char block[64];

	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	MUST(pthread_sigmask(SIG_BLOCK, &alarms, NULL) == 0);
	/* As those of many programs, so blocks of bytes do not fit on it. */
	MUST(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 64 << 10) == 0);
	MUST(pthread_create(&thread, &small, answer, &a) == 0);
	asked = c;
	/* The connection becomes iWARP's. */
	for (int i = 0; i < 20; i++)
		MUST(send(c, "x", 1, 0) == 1 && recv(c, block, 1, 0) == 1);
	MUST((set = epoll_create1(EPOLL_CLOEXEC)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, c, &member) == 0);
	MUST(sigaction(SIGALRM, &(struct sigaction){ .sa_handler = ask }, NULL) == 0);
	MUST(pthread_sigmask(SIG_UNBLOCK, &alarms, NULL) == 0);
	for (int call = 0; call < 3; call++) {
		MUST(setitimer(ITIMER_REAL, &often, NULL) == 0);
		for (int got = 0; got < 1500;) {
			wait_by(c, set, call);
			for (ssize_t n; (n = recv(c, block, sizeof block, MSG_DONTWAIT)) > 0; got += n)
				owed -= n;
		}
		MUST(setitimer(ITIMER_REAL, &never, NULL) == 0);
		/* A connection that is closed with bytes unread is reset. */
		for (ssize_t n; owed > 0 && (n = recv(c, block, sizeof block, 0)) > 0;)
			owed -= n;
		check(owed == 0, names[call], "%d answers are missing", (int)owed);
	}
	MUST(close(c) == 0 && pthread_join(thread, NULL) == 0);
	MUST(close(a) == 0 && close(set) == 0 && close(l) == 0);
}

/* Programs that poll by a table of all descriptors that there may be: the kernel takes no more entries than that. */
static void entries(void)
{
	struct pollfd fds[256];
	struct rlimit limit, few;
	int l = listener(), c = client(), a;
	ino_t before = inode(c);
	char byte;

	MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	MUST(send(c, "x", 1, 0) == 1 && recv(a, &byte, 1, 0) == 1 && becomes(c, before, LIMIT_MS));
	for (int i = 0; i < 256; i++)
		fds[i] = (struct pollfd){ .fd = i == 3 ? c : -1, .events = POLLIN, .revents = -1 };
	MUST(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	few = limit;
	few.rlim_cur = 256;
	MUST(setrlimit(RLIMIT_NOFILE, &few) == 0);
	check(poll(fds, 256, 20) == 0, "as many entries as files are polled", "errno %d", errno);
	MUST(send(a, "y", 1, 0) == 1);
	check(poll(fds, 256, LIMIT_MS) == 1 && fds[3].revents == POLLIN && fds[4].revents == 0, "and one of them is ready",
	      "0x%x", fds[3].revents);
	MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	MUST(close(c) == 0 && close(a) == 0 && close(l) == 0);
}

/* A connection whose end that connects has this asked for before it is used; says whether it becomes a stream. */
static bool becomes_with(int (*ask)(int fd), int fds[2])
{
	int l = listener();
	ino_t before;
	char byte;

	fds[0] = client();
	MUST((fds[1] = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0 && close(l) == 0);
	MUST(ask == NULL || ask(fds[0]) == 0);
	before = inode(fds[0]);
	for (int i = 0; i < 20; i++) {
		MUST(send(fds[0], "q", 1, 0) == 1 && recv(fds[1], &byte, 1, 0) == 1);
		MUST(send(fds[1], "r", 1, 0) == 1 && recv(fds[0], &byte, 1, 0) == 1 && byte == 'r');
		usleep(1000);
	}
	return becomes(fds[0], before, ask ? 1000 : LIMIT_MS);
}

static int asks_for_signals(int fd)
{
	return fcntl(fd, F_SETFL, O_ASYNC);
}

static int asks_for_zerocopy(int fd)
{
	int on = 1;

	return setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on);
}

/* What a stream has not: where the program has asked for it, the connection stays TCP; behind the switch it is refused. */
static void what_no_stream_has(void)
{
	struct sockaddr_storage name;
	socklen_t len = sizeof name;
	pid_t child;
	int fds[2], status;
	char to[8];

	signal(SIGIO, SIG_IGN);
	check(!becomes_with(asks_for_signals, fds), "O_ASYNC keeps it TCP", "it became a stream");
	MUST(close(fds[0]) == 0 && close(fds[1]) == 0);
	check(!becomes_with(asks_for_zerocopy, fds), "SO_ZEROCOPY keeps it TCP", "it became a stream");
	MUST(close(fds[0]) == 0 && close(fds[1]) == 0);
	check(becomes_with(NULL, fds), "another one becomes a stream", "it stays TCP");
	check_failed(asks_for_zerocopy(fds[0]) == -1, EOPNOTSUPP, "SO_ZEROCOPY of a stream");
	fflush(stdout);
	MUST((child = fork()) >= 0);
	if (child == 0)
		_exit(ioctl(fds[0], FIONCLEX) == 0 && fcntl(fds[0], F_GETFD) == 0 ? 0 : 1);
	MUST(waitpid(child, &status, 0) == child);
	check(status == 0, "a child keeps it over exec by ioctl as by fcntl", "%#x", status);
	MUST(send(fds[1], "bye", 3, 0) == 3 && close(fds[1]) == 0 && readable(fds[0], LIMIT_MS));
	/* Both ends of the connection end, sooner or later. */
	for (int i = 0; i < 50; i++, usleep(10000)) {
		len = sizeof name;
		if (getpeername(fds[0], (struct sockaddr *)&name, &len) != 0)
			break;
	}
	check(getpeername(fds[0], (struct sockaddr *)&name, &len) == 0 && name.ss_family == AF_INET,
	      "a peer that has closed has a name", "errno %d", errno);
	check(recv(fds[0], to, sizeof to, 0) == 3 && recv(fds[0], to, sizeof to, 0) == 0, "what it sent before", "errno %d", errno);
	MUST(close(fds[0]) == 0);
}

static const struct group groups[] = {
	{ "waits", waits },
	{ "entries", entries },
	{ "handlers", handlers },
	{ "many", many },
	{ "exhausted", exhausted },
	{ "what_no_stream_has", what_no_stream_has },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
