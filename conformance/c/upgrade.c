/* TCP connections that become iWARP's in place, under `uwarp run --sockets=upgrade`: bytes of both directions while
 * that happens, servers that fork, ends that speak first, and peers that lie or leave at each step.
 *
 * Groups with `_of_tcp` are run with a rule for one end only: the other end is played by hand here. */
#define _GNU_SOURCE
#include "common.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

static struct sockaddr_storage listening;
static socklen_t listening_len;

static struct sockaddr *sa(void)
{
	return (struct sockaddr *)&listening;
}

static int listener(void)
{
	int fd, on = 1;

	listening = sockaddr_of(strcmp(address, "-") ? address : "127.0.0.1", 0);
	listening_len = listening.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
	MUST((fd = socket(listening.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	MUST(bind(fd, sa(), listening_len) == 0 && listen(fd, 64) == 0);
	MUST(getsockname(fd, sa(), &listening_len) == 0);
	return fd;
}

static int client(void)
{
	int fd;

	MUST((fd = socket(listening.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(connect(fd, sa(), listening_len) == 0);
	return fd;
}

static ino_t inode(int fd)
{
	struct stat stat;

	MUST(fstat(fd, &stat) == 0);
	return stat.st_ino;
}

/* Whether a descriptor becomes another file within this time: the library has come between. */
static bool becomes(int fd, ino_t before, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	for (uint64_t end = now_ms() + (uint64_t)ms; now_ms() < end; usleep(500)) {
		poll(&p, 1, 0);
		if (inode(fd) != before)
			return true;
	}
	return false;
}

/* Bytes by their place in a stream: a missing, repeated or foreign one is seen. */
static unsigned char byte_at(unsigned stream, uint64_t at)
{
	uint64_t x = (at + 1) * 0x9E3779B97F4A7C15u + stream * 0xBF58476D1CE4E5B9u;

	return (unsigned char)((x ^ (x >> 29)) >> 17);
}

static unsigned draw(unsigned *seed)
{
	*seed = *seed * 1664525u + 1013904223u;
	return *seed >> 8;
}

/* One end of a connection that sends and receives at once. */
struct end {
	int fd;
	unsigned out, in;		/* streams */
	uint64_t send, receive;		/* bytes */
	int manner;			/* 0: two threads that block; 1: poll; 2: epoll, edges */
	unsigned seed;
	uint64_t got, wrong;
};

static void fill(struct end *e, unsigned char *block, uint64_t at, size_t len)
{
	for (size_t i = 0; i < len; i++)
		block[i] = byte_at(e->out, at + i);
}

static void look(struct end *e, const unsigned char *block, size_t len)
{
	for (size_t i = 0; i < len; i++)
		e->wrong += block[i] != byte_at(e->in, e->got + i);
	e->got += len;
}

static size_t some(struct end *e, uint64_t left)
{
	size_t most = draw(&e->seed) % 4 == 0 ? 60000 : 600;
	size_t len = 1 + draw(&e->seed) % most;

	return len < left ? len : (size_t)left;
}

static void *blocking_sender(void *arg)
{
	struct end *e = arg;
	unsigned char block[60000];

	for (uint64_t sent = 0; sent < e->send;) {
		size_t len = some(e, e->send - sent);

		fill(e, block, sent, len);
		MUST(send(e->fd, block, len, 0) == (ssize_t)len);
		sent += len;
		if (draw(&e->seed) % 16 == 0)
			usleep(draw(&e->seed) % 2000);
	}
	MUST(shutdown(e->fd, SHUT_WR) == 0);
	return NULL;
}

static void receive_all(struct end *e)
{
	unsigned char block[50000];
	ssize_t n;

	while ((n = recv(e->fd, block, sizeof block, 0)) > 0)
		look(e, block, (size_t)n);
	if (n != 0)
		die("recv gives %zd", n);
}

static void both_at_once(struct end *e)
{
	unsigned char out[60000], in[30000];
	struct epoll_event event = { .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET };
	uint64_t sent = 0, done = 0, len = 0;
	bool ended = false, writable = false, can_read = false;
	int set = -1;
	ssize_t n;

	MUST(fcntl(e->fd, F_SETFL, fcntl(e->fd, F_GETFL) | O_NONBLOCK) == 0);
	if (e->manner == 2)
		MUST((set = epoll_create1(EPOLL_CLOEXEC)) >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, e->fd, &event) == 0);
	while (!ended || sent < e->send) {
		if (!(writable && sent < e->send) && !(can_read && !ended)) {
			if (e->manner == 2) {
				MUST(epoll_wait(set, &event, 1, LIMIT_MS) == 1);
				can_read |= (event.events & (EPOLLIN | EPOLLRDHUP)) != 0;
				writable |= (event.events & EPOLLOUT) != 0;
			} else {
				struct pollfd p = { .fd = e->fd, .events = (short)((ended ? 0 : POLLIN) | (sent < e->send ? POLLOUT : 0)) };

				MUST(poll(&p, 1, LIMIT_MS) == 1);
				can_read = (p.revents & POLLIN) != 0;
				writable = (p.revents & POLLOUT) != 0;
			}
		}
		if (writable && sent < e->send) {
			if (done == len) {
				len = some(e, e->send - sent);
				fill(e, out, sent, len);
				done = 0;
			}
			n = send(e->fd, out + done, len - done, MSG_NOSIGNAL);
			if (n < 0) {
				MUST(errno == EAGAIN);
				writable = false;
			} else {
				done += (uint64_t)n;
				sent += (uint64_t)n;
				if (sent == e->send)
					MUST(shutdown(e->fd, SHUT_WR) == 0);
			}
		}
		if (can_read && !ended) {
			n = recv(e->fd, in, 1 + draw(&e->seed) % sizeof in, 0);
			if (n < 0) {
				MUST(errno == EAGAIN);
				can_read = false;
			} else if (n == 0) {
				ended = true;
			} else {
				look(e, in, (size_t)n);
			}
		}
	}
	if (set >= 0)
		MUST(close(set) == 0);
}

static void *run_end(void *arg)
{
	struct end *e = arg;
	struct end sender = *e;
	pthread_t thread;

	if (e->manner == 0) {
		sender.seed ^= 0x5555;
		MUST(pthread_create(&thread, NULL, blocking_sender, &sender) == 0);
		receive_all(e);
		MUST(pthread_join(thread, NULL) == 0);
	} else {
		both_at_once(e);
	}
	return NULL;
}

/* TODO: 120, when none hangs any more beside busy processes (docs/adr/044). */
#define CONNECTIONS 40

/* Many connections, bytes of both directions while they become streams, in all pairs of manners. */
static void integrity(void)
{
	int l = listener(), upgraded = 0;
	uint64_t wrong = 0, missing = 0;
	unsigned seed = 12345;

	if (getenv("SEED"))
		seed = (unsigned)atoi(getenv("SEED"));
	printf("seed %u\n", seed);
	fflush(stdout);
	for (int i = 0; i < CONNECTIONS; i++) {
		struct end ends[2] = { { .out = (unsigned)i * 2, .in = (unsigned)i * 2 + 1 },
				       { .out = (unsigned)i * 2 + 1, .in = (unsigned)i * 2 } };
		ino_t before[2];
		pthread_t thread;
		bool both;

		for (int k = 0; k < 2; k++) {
			ends[k].manner = k ? i / 3 % 3 : i % 3;
			ends[k].seed = draw(&seed);
			/* At least one byte: an end closes its direction behind its last one. */
			ends[k].send = 1 + (draw(&seed) % 3 ? draw(&seed) % 300000 : draw(&seed) % 3000000);
		}
		ends[0].receive = ends[1].send;
		ends[1].receive = ends[0].send;
		ends[0].fd = client();
		MUST((ends[1].fd = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		before[0] = inode(ends[0].fd);
		before[1] = inode(ends[1].fd);
		/* Most are upgraded somewhere in the middle, or not in time; these before their first byte. */
		if (getenv("UPGRADED") && i % 8 == 0) {
			char byte;

			MUST(recv(ends[0].fd, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
			/* Not if another process has the UDP port of that number. */
			if (!becomes(ends[1].fd, before[1], 10000) || !becomes(ends[0].fd, before[0], 10000))
				printf("connection %d stays TCP\n", i);
		}
		MUST(pthread_create(&thread, NULL, run_end, &ends[1]) == 0);
		run_end(&ends[0]);
		MUST(pthread_join(thread, NULL) == 0);
		both = inode(ends[0].fd) != before[0] && inode(ends[1].fd) != before[1];
		upgraded += both;
		for (int k = 0; k < 2; k++) {
			wrong += ends[k].wrong;
			missing += ends[k].got != ends[k].receive;
			MUST(close(ends[k].fd) == 0);
		}
	}
	check(wrong == 0, "every byte is the right one", "%lu are not", (unsigned long)wrong);
	check(missing == 0, "and none is missing", "at %lu ends", (unsigned long)missing);
	printf("%d of %d connections had come behind the library at their end\n", upgraded, CONNECTIONS);
	check(!getenv("UPGRADED") || upgraded >= CONNECTIONS / 10, "connections became streams", "%d", upgraded);
	check(getenv("UPGRADED") || upgraded == 0, "none did without a rule for both ends", "%d", upgraded);
	MUST(close(l) == 0);
}

/* Each connection in a child of its own, which the parent only accepts and closes. */
static void forked(void)
{
	int l = listener(), c, a, status;
	char to[16];
	pid_t child;
	ino_t before;

	for (int i = 0; i < 8; i++) {
		child = fork();
		MUST(child >= 0);
		if (child == 0) {
			/* A client of its own process, too. */
			close(l);
			c = client();
			before = inode(c);
			MUST(send(c, "hello", 5, 0) == 5);
			for (uint64_t at = 0; at < 400000;) {
				unsigned char block[4000];
				ssize_t n = recv(c, block, sizeof block, 0);

				MUST(n > 0);
				for (ssize_t k = 0; k < n; k++)
					MUST(block[k] == byte_at(7, at + (uint64_t)k));
				at += (uint64_t)n;
				if (at % 3 == 0)
					usleep(100);
			}
			MUST(recv(c, to, 1, 0) == 0);
			_exit(getenv("UPGRADED") && inode(c) == before ? 3 : 0);
		}
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		pid_t server = fork();
		MUST(server >= 0);
		if (server == 0) {
			close(l);
			MUST(recv(a, to, 5, MSG_WAITALL) == 5);
			/* As long as it takes to become a stream, and then some. */
			for (uint64_t at = 0; at < 400000; at += 1000) {
				unsigned char block[1000];

				for (int k = 0; k < 1000; k++)
					block[k] = byte_at(7, at + (uint64_t)k);
				MUST(send(a, block, sizeof block, 0) == sizeof block);
				usleep(500);
			}
			exit(0);
		}
		MUST(close(a) == 0);
		MUST(waitpid(server, &status, 0) == server);
		check(status == 0, "a child that serves", "%#x", status);
		MUST(waitpid(child, &status, 0) == child);
		check(status == 0, "its client", "%#x", status);
	}
	MUST(close(l) == 0);
}

/* One direction is the parent's, the other the child's: no process can have the stream. */
static void shared_by_two(void)
{
	int l = listener(), c, a, status, used[2];
	char block[1000], to[1000];
	pid_t child;

	MUST(pipe(used) == 0);
	for (int i = 0; i < 10; i++) {
		c = client();
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		memset(block, 'a' + i, sizeof block);
		MUST((child = fork()) >= 0);
		if (child == 0) {
			/* It sends what the parent reads at the other end. */
			MUST(recv(c, to, 1, MSG_DONTWAIT) == -1 && write(used[1], "", 1) == 1);
			for (int k = 0; k < 200; k++) {
				MUST(send(c, block, sizeof block, 0) == sizeof block);
				usleep(50);
			}
			_exit(0);
		}
		/* Both have used their end before the other end says anything. */
		MUST(read(used[0], to, 1) == 1 && recv(c, to, 1, MSG_DONTWAIT) == -1);
		for (int k = 0; k < 200; k++) {
			MUST(send(a, "answer", 6, 0) == 6);
			MUST(recv(c, to, 6, MSG_WAITALL) == 6 && memcmp(to, "answer", 6) == 0);
			MUST(recv(a, to, sizeof to, MSG_WAITALL) == sizeof to && memcmp(to, block, sizeof to) == 0);
		}
		MUST(waitpid(child, &status, 0) == child);
		check(status == 0, "a connection of two processes stays whole", "%#x", status);
		MUST(close(a) == 0 && close(c) == 0);
	}
	MUST(close(l) == 0);
}

/* A server that has read a request and hands the connection to another program, while it still has it itself. */
static void handed_on(void)
{
	char *const argv[] = { "/bin/sh", "-c", "sleep 0.05; echo first; sleep 0.05; echo second", NULL };
	int a, status;
	char to[64];
	pid_t server, program;

	for (int i = 0; i < 5; i++) {
		MUST((server = fork()) >= 0);
		if (server == 0) {
			/* Of its own: a process that has a device is another matter. */
			int l = listener();

			MUST((program = fork()) >= 0);
			if (program == 0) {
				int c = client();

				MUST(send(c, "do it", 5, 0) == 5);
				ssize_t n = recv(c, to, sizeof to, MSG_WAITALL);
				_exit(n == 13 && memcmp(to, "first\nsecond\n", 13) == 0 ? 0 : 1);
			}
			MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0 && recv(a, to, 5, MSG_WAITALL) == 5);
			pid_t child = fork();

			MUST(child >= 0);
			if (child == 0) {
				MUST(dup2(a, STDOUT_FILENO) == STDOUT_FILENO);
				execv(argv[0], argv);
				_exit(9);
			}
			MUST(waitpid(child, &status, 0) == child && close(a) == 0);
			MUST(waitpid(program, &status, 0) == program);
			_exit(WEXITSTATUS(status));
		}
		MUST(waitpid(server, &status, 0) == server);
		check(status == 0, "a connection that is handed on in use", "%#x", status);
	}
}

/* A connection that is a stream already, and then a child's, by fork and exec or by posix_spawn. The library cannot send
 * what the child writes; the peer must not take what it gets for all there is. */
static void written_by_a_child(void)
{
	static const char *names[] = { "bytes of a child, before its parent closes", "bytes of a child, after its parent has closed",
				       "no bytes of a child" };
	char *says[] = { "/bin/sh", "-c", "sleep 0.1; echo answer", NULL }, *silent[] = { "/bin/sh", "-c", "sleep 0.1", NULL };

	for (int i = 0; i < 6; i++) {
		int way = i / 2, a, status;
		pid_t server, program, child;
		char byte, to[16];

		MUST((server = fork()) >= 0);
		if (server == 0) {
			int l = listener();
			char **argv = way == 2 ? silent : says;
			ino_t before;

			MUST((program = fork()) >= 0);
			if (program == 0) {
				int c = client();

				MUST(send(c, "r", 1, 0) == 1 && recv(c, to, 6, MSG_WAITALL) == 6 && send(c, "r", 1, 0) == 1);
				ssize_t n = recv(c, to, sizeof to, 0);
				_exit(n == 0 ? 1 : n == -1 && errno == ECONNRESET ? 2 : 3);
			}
			MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
			before = inode(a);
			MUST(recv(a, &byte, 1, 0) == 1 && becomes(a, before, LIMIT_MS));
			MUST(send(a, "first ", 6, 0) == 6 && recv(a, &byte, 1, 0) == 1);
			if (i % 2) {
				posix_spawn_file_actions_t actions;

				MUST(posix_spawn_file_actions_init(&actions) == 0);
				MUST(posix_spawn_file_actions_adddup2(&actions, a, STDOUT_FILENO) == 0);
				MUST(posix_spawn(&child, argv[0], &actions, NULL, argv, environ) == 0);
			} else {
				MUST((child = fork()) >= 0);
				if (child == 0) {
					MUST(dup2(a, STDOUT_FILENO) == STDOUT_FILENO);
					execv(argv[0], argv);
					_exit(9);
				}
			}
			if (way == 1)
				MUST(close(a) == 0);
			MUST(waitpid(child, &status, 0) == child);
			if (way != 1)
				MUST(close(a) == 0);
			MUST(waitpid(program, &status, 0) == program);
			_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 9);
		}
		MUST(waitpid(server, &status, 0) == server && WIFEXITED(status));
		check(WEXITSTATUS(status) == (way == 2 ? 1 : 2), names[way], "%d", WEXITSTATUS(status));
	}
}

/* Programs that end at once: what was sent arrives, and then the end. */
static void brief(void)
{
	int l = listener(), a, status, bad = 0;
	char block[3000], to[3001];
	pid_t child;

	memset(block, 'b', sizeof block);
	for (int i = 0; i < 60; i++) {
		MUST((child = fork()) >= 0);
		if (child == 0) {
			int c = client();

			MUST(send(c, block, sizeof block, 0) == sizeof block);
			if (i % 3)
				usleep((unsigned)(i * 700));
			if (i % 2)
				MUST(close(c) == 0);
			exit(0);
		}
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		if (i % 5 == 4)
			usleep(20000);
		ssize_t n = recv(a, to, sizeof to, MSG_WAITALL);
		if (n != sizeof block) {
			printf("%d: %zd, errno %d\n", i, n, errno);
			bad++;
		}
		MUST(close(a) == 0);
		MUST(waitpid(child, &status, 0) == child && status == 0);
	}
	check(bad == 0, "what a process sends before it ends arrives, and its end", "%d times not", bad);
	MUST(close(l) == 0);
}

/* Datagrams and markers by hand. */
enum { HELLO = 1, WELCOME = 2, NEVER = 3 };

struct by_hand {
	int tcp, udp;			/* of the liar */
	unsigned char own[16], peers[16];
	unsigned char ends[40];		/* as in a datagram */
	bool connected;			/* the liar has connected */
};

static void put_end(unsigned char *to, const struct sockaddr_storage *ss, int port_at)
{
	const struct sockaddr_in *in = (const void *)ss;

	memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	memcpy(to + 12, &in->sin_addr, 4);
	memcpy(to + port_at, &in->sin_port, 2);
}

static struct by_hand by_hand(int tcp, bool connected)
{
	struct sockaddr_storage own, peer;
	socklen_t len = sizeof own;
	struct by_hand h = { .tcp = tcp, .connected = connected };
	const struct sockaddr_storage *c, *a;

	MUST(getsockname(tcp, (void *)&own, &len) == 0);
	len = sizeof peer;
	MUST(getpeername(tcp, (void *)&peer, &len) == 0);
	c = connected ? &own : &peer;
	a = connected ? &peer : &own;
	put_end(h.ends, c, 32);
	put_end(h.ends + 16, a, 18);
	MUST((h.udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) >= 0);
	if (connected) {
		MUST(bind(h.udp, (void *)&own, sizeof(struct sockaddr_in)) == 0);
	} else {
		MUST(connect(h.udp, (void *)&peer, sizeof(struct sockaddr_in)) == 0);
	}
	MUST(getrandom(h.own, 16, 0) == 16);
	return h;
}

static void say(struct by_hand *h, int kind)
{
	unsigned char d[88] = "uwarpUPG";

	d[8] = 1;
	d[9] = (unsigned char)kind;
	memcpy(d + 16, h->connected ? h->peers : h->own, 16);
	memcpy(d + 32, h->connected ? h->own : h->peers, 16);
	memcpy(d + 48, h->ends, 36);
	(void)!send(h->udp, d, sizeof d, 0);
}

/* The next datagram's kind, or 0 if none comes in time. */
static int hear(struct by_hand *h, int ms)
{
	struct sockaddr_in from;
	socklen_t len = sizeof from;
	unsigned char d[100];
	ssize_t n;

	for (uint64_t end = now_ms() + (uint64_t)ms; now_ms() < end;) {
		if (!readable(h->udp, 10))
			continue;
		n = recvfrom(h->udp, d, sizeof d, 0, (void *)&from, &len);
		if (n != 88 || memcmp(d, "uwarpUPG", 8) || d[8] != 1 || memcmp(d + 48, h->ends, 36))
			continue;
		memcpy(h->peers, d + (h->connected ? 16 : 32), 16);
		if (h->connected)
			MUST(connect(h->udp, (void *)&from, len) == 0);
		return d[9];
	}
	return 0;
}

static void marker(struct by_hand *h, unsigned char to[48], const char *word)
{
	memcpy(to, h->own, 16);
	memcpy(to + 16, h->peers, 16);
	memcpy(to + 32, word, 16);
}

#define MARK "\nuwarp-upgrade1\n"
#define YES "\nuwarp-agreed-1\n"
#define NO "\nuwarp-refused1\n"

static void mark(struct by_hand *h, const char *word)
{
	unsigned char m[48];

	marker(h, m, word);
	MUST(send(h->tcp, m, sizeof m, MSG_NOSIGNAL) == sizeof m);
}

/* Reads exactly this marker. */
static bool is_marked(struct by_hand *h, const char *word)
{
	unsigned char m[48], got[48];
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };

	memcpy(m, h->peers, 16);
	memcpy(m + 16, h->own, 16);
	memcpy(m + 32, word, 16);
	MUST(setsockopt(h->tcp, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	return recv(h->tcp, got, 48, MSG_WAITALL) == 48 && memcmp(m, got, 48) == 0;
}

/* What this end's program and the other end say to each other over a connection that stays TCP. */
static void is_tcp(int ours, int theirs, const char *name)
{
	char to[8];
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };

	MUST(setsockopt(theirs, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	check(send(ours, "there", 5, MSG_NOSIGNAL) == 5 && recv(theirs, to, 5, MSG_WAITALL) == 5 && !memcmp(to, "there", 5) &&
	      send(theirs, "back", 4, MSG_NOSIGNAL) == 4 && recv(ours, to, 4, MSG_WAITALL) == 4 && !memcmp(to, "back", 4),
	      name, "errno %d", errno);
}

static void close_by_hand(struct by_hand *h)
{
	MUST(close(h->tcp) == 0 && close(h->udp) == 0);
}

/* The program accepts; what connects is by hand. Run with upgrade:listen. */
static void liars_that_connect(void)
{
	int l = listener(), a;
	struct by_hand h;
	unsigned char m[48], to[64];
	ino_t before;
	char byte;

	signal(SIGPIPE, SIG_IGN);
	for (int step = 0; step < 9; step++) {
		h = by_hand(client(), true);
		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		before = inode(a);
		MUST(recv(a, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		MUST(hear(&h, LIMIT_MS) == HELLO);
		switch (step) {
		case 0:		/* another nonce */
			h.peers[3] ^= 1;
			say(&h, WELCOME);
			check(!becomes(a, before, QUIET_MS), "a WELCOME with another nonce does nothing", "?");
			is_tcp(a, h.tcp, "and the connection is TCP");
			break;
		case 1:		/* another connection */
			h.ends[33] ^= 1;
			say(&h, WELCOME);
			h.ends[33] ^= 1;
			check(!becomes(a, before, QUIET_MS), "a WELCOME for another connection does nothing", "?");
			is_tcp(a, h.tcp, "and the connection is TCP");
			break;
		case 2:		/* answers no */
			say(&h, WELCOME);
			check(is_marked(&h, MARK), "the marker comes as the next bytes", "?");
			MUST(send(h.tcp, "early", 5, 0) == 5);
			mark(&h, NO);
			check(recv(a, to, 5, MSG_WAITALL) == 5 && !memcmp(to, "early", 5), "bytes before a refusal", "?");
			is_tcp(a, h.tcp, "after a refusal the connection is TCP");
			break;
		case 3:		/* closes instead of an answer */
			say(&h, WELCOME);
			check(is_marked(&h, MARK), "a marker", "?");
			MUST(send(h.tcp, "last", 4, 0) == 4 && shutdown(h.tcp, SHUT_WR) == 0);
			check(recv(a, to, 8, MSG_WAITALL) == 4 && recv(a, to, 8, 0) == 0, "bytes and the end instead of an answer", "?");
			check(send(a, "still", 5, 0) == 5 && recv(h.tcp, to, 5, MSG_WAITALL) == 5, "and the other direction", "?");
			break;
		case 4:		/* says something else */
			say(&h, WELCOME);
			check(is_marked(&h, MARK), "a marker", "?");
			marker(&h, m, YES);
			m[40] ^= 1;
			MUST(send(h.tcp, m, 48, 0) == 48);
			check_failed(recv(a, to, 8, 0) == -1, ECONNRESET, "an answer without meaning ends the connection");
			break;
		case 5:		/* agrees, and sends what is not MPA's */
			say(&h, WELCOME);
			check(is_marked(&h, MARK), "a marker", "?");
			MUST(send(h.tcp, "plain", 5, 0) == 5);
			mark(&h, YES);
			check(recv(a, to, 5, MSG_WAITALL) == 5, "plain bytes", "?");
			MUST(recv(h.tcp, to, 20, MSG_WAITALL) == 20);
			check(!memcmp(to, "MPA ID Req Frame", 16), "then MPA's request", "%.16s", to);
			memset(to, 'x', sizeof to);
			MUST(send(h.tcp, to, sizeof to, MSG_NOSIGNAL) == sizeof to);
			check(recv(a, to, 8, 0) == -1, "a peer that speaks no MPA is an error", "no error");
			break;
		case 6:		/* agrees, and vanishes */
			say(&h, WELCOME);
			check(is_marked(&h, MARK), "a marker", "?");
			mark(&h, YES);
			MUST(recv(h.tcp, to, 20, MSG_WAITALL) == 20 && close(h.tcp) == 0);
			check(recv(a, to, 8, 0) == 0, "a peer that closes before the stream is the end", "errno %d", errno);
			check_failed(send(a, to, 8, 0) == -1, EPIPE, "and nothing can be sent");
			MUST((h.tcp = dup(h.udp)) >= 0);
			break;
		case 7:		/* never answers the marker, and the program goes */
			say(&h, WELCOME);
			check(is_marked(&h, MARK), "a marker", "?");
			check_failed(send(a, "x", 1, MSG_DONTWAIT) == -1, EAGAIN, "without an answer nothing can be sent");
			MUST(close(a) == 0);
			check(recv(h.tcp, to, 8, 0) == 0, "a program that closes while it waits ends the connection", "errno %d",
			      errno);
			MUST((a = dup(h.udp)) >= 0);
			break;
		case 8:		/* welcomes late */
			usleep(2300000);
			is_tcp(a, h.tcp, "a peer that is silent stays TCP");
			say(&h, WELCOME);
			check(hear(&h, LIMIT_MS) != 0, "a late WELCOME hears something", "nothing");
			check(!becomes(a, before, QUIET_MS), "and does nothing", "?");
			is_tcp(a, h.tcp, "and it is TCP");
			break;
		}
		MUST(close(a) == 0);
		close_by_hand(&h);
	}
	MUST(close(l) == 0);
}

/* The program connects; what accepts is by hand. Run with upgrade:connect. */
static void liars_that_accept(void)
{
	int l = listener(), c;
	ssize_t n;
	struct by_hand h;
	unsigned char m[48], to[64];
	ino_t before;
	char byte;

	signal(SIGPIPE, SIG_IGN);
	for (int step = 0; step < 11; step++) {
		c = client();
		MUST((h.tcp = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		h = by_hand(h.tcp, false);
		before = inode(c);
		if (step == 0) {
			say(&h, HELLO);
			check(hear(&h, QUIET_MS) == 0 && inode(c) == before, "a connection that is not used stays as it is", "?");
		}
		MUST(recv(c, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
		if (step == 1) {
			h.ends[33] ^= 1;
			say(&h, HELLO);
			h.ends[33] ^= 1;
			check(hear(&h, QUIET_MS) == 0 && !becomes(c, before, QUIET_MS), "a HELLO for another connection", "answered");
			is_tcp(c, h.tcp, "the connection is TCP");
			MUST(close(c) == 0);
			close_by_hand(&h);
			continue;
		}
		say(&h, HELLO);
		MUST(hear(&h, LIMIT_MS) == WELCOME);
		switch (step) {
		case 0:		/* changes its mind */
			is_tcp(c, h.tcp, "after WELCOME the connection is TCP until a marker comes");
			say(&h, NEVER);
			is_tcp(c, h.tcp, "and after NEVER");
			break;
		case 2:		/* the marker in pieces, behind bytes that begin like it */
			marker(&h, m, MARK);
			MUST(send(h.tcp, "front", 5, 0) == 5 && send(h.tcp, m, 20, 0) == 20);
			check(recv(c, to, 5, MSG_WAITALL) == 5 && recv(c, to, 64, MSG_DONTWAIT) == -1, "the front", "%s", to);
			MUST(send(h.tcp, "xyz", 3, 0) == 3);
			check(recv(c, to, 23, MSG_WAITALL) == 23 && !memcmp(to, m, 20) && !memcmp(to + 20, "xyz", 3),
			      "what only began like a marker", "?");
			for (int i = 0; i < 48; i += 16) {
				MUST(send(h.tcp, m + i, 16, 0) == 16);
				usleep(3000);
			}
			check(is_marked(&h, YES), "a marker in pieces is agreed to", "?");
			break;
		case 3:		/* the marker twice */
			mark(&h, MARK);
			mark(&h, MARK);
			/* Before the first is answered, the second is plain bytes, so the answer is no. Afterwards it is an error. */
			marker(&h, m, MARK);
			n = recv(c, to, 48, MSG_WAITALL);
			check(n <= 0 || (n == 48 && !memcmp(to, m, 48)), "a marker twice is no upgrade", "%zd", n);
			break;
		case 4:		/* no word that is known */
			marker(&h, m, YES);
			MUST(send(h.tcp, m, 48, 0) == 48);
			check_failed(recv(c, to, 8, 0) == -1, ECONNRESET, "a marker of the wrong end ends the connection");
			break;
		case 5:		/* closes behind the marker */
			MUST(send(h.tcp, "last", 4, 0) == 4);
			mark(&h, MARK);
			MUST(shutdown(h.tcp, SHUT_WR) == 0);
			check(recv(c, to, 8, MSG_WAITALL) == 4 && recv(c, to, 8, 0) == 0, "bytes and the end behind a marker", "errno %d",
			      errno);
			break;
		case 6:		/* resets before the marker */
			MUST(send(h.tcp, "last", 4, 0) == 4);
			usleep(20000);
			MUST(setsockopt(h.tcp, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 0 }, sizeof(struct linger)) == 0);
			MUST(close(h.tcp) == 0);
			check(recv(c, to, 4, MSG_WAITALL) == 4, "bytes before a reset", "errno %d", errno);
			check_failed(recv(c, to, 8, 0) == -1, ECONNRESET, "a reset");
			check(recv(c, to, 8, 0) == 0, "and the end", "errno %d", errno);
			MUST((h.tcp = dup(h.udp)) >= 0);
			break;
		case 7:		/* the program ends its direction before the marker */
			MUST(send(c, "all", 3, 0) == 3 && shutdown(c, SHUT_WR) == 0);
			mark(&h, MARK);
			MUST(recv(h.tcp, to, 8, MSG_WAITALL) == 3);
			MUST(send(h.tcp, "more", 4, 0) == 4 && shutdown(h.tcp, SHUT_WR) == 0);
			check(recv(c, to, 8, MSG_WAITALL) == 4 && !memcmp(to, "more", 4), "bytes behind a marker nobody can answer",
			      "errno %d", errno);
			break;
		case 8:		/* the program closes before the marker */
			MUST(send(c, "all", 3, 0) == 3 && close(c) == 0);
			check(recv(h.tcp, to, 8, MSG_WAITALL) == 3, "a program that closes early", "errno %d", errno);
			mark(&h, MARK);
			check(recv(h.tcp, to, 8, 0) == 0, "closes in order", "errno %d", errno);
			MUST((c = dup(h.udp)) >= 0);
			break;
		case 9:		/* ends in the middle of the marker */
			marker(&h, m, MARK);
			MUST(send(h.tcp, "last", 4, 0) == 4 && send(h.tcp, m, 40, 0) == 40 && shutdown(h.tcp, SHUT_WR) == 0);
			n = recv(c, to, sizeof to, MSG_WAITALL);
			check(n == 4, "the program sees nothing of a marker that is cut off", "%zd", n);
			break;
		case 10:	/* sends the marker when nobody expects it any more, and not in one piece */
			usleep(2500000);
			marker(&h, m, MARK);
			MUST(send(h.tcp, "front", 5, 0) == 5 && send(h.tcp, m, 5, 0) == 5);
			check(recv(c, to, 10, MSG_WAITALL) == 10, "what is like a marker waits no longer", "errno %d", errno);
			MUST(send(h.tcp, m + 5, 43, 0) == 43);
			check_failed(recv(c, to, 64, 0) == -1, ECONNRESET, "and is an error if it was one");
			break;
		}
		MUST(close(c) == 0);
		close_by_hand(&h);
	}
	MUST(close(l) == 0);
}

static const struct group groups[] = {
	{ "integrity", integrity },
	{ "forked", forked },
	{ "shared_by_two", shared_by_two },
	{ "handed_on", handed_on },
	{ "written_by_a_child", written_by_a_child },
	{ "brief", brief },
	{ "liars_that_connect", liars_that_connect },
	{ "liars_that_accept", liars_that_accept },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
