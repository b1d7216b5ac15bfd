/* TCP connections that become iWARP's in place, under `uwarp run --sockets=upgrade`: bytes of both directions while that
 * happens, in all manners of waiting. */
#define _GNU_SOURCE
#include "upgrade.h"

#include <pthread.h>
#include <sys/epoll.h>

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
	uint64_t first, last;		/* wrong bytes */
	unsigned char sample[24];	/* what came from the first one on */
	size_t sampled;
	ino_t inode;			/* when it came */
};

static void fill(struct end *e, unsigned char *block, uint64_t at, size_t len)
{
	for (size_t i = 0; i < len; i++)
		block[i] = byte_at(e->out, at + i);
}

static void look(struct end *e, const unsigned char *block, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		uint64_t at = e->got + i;

		if (block[i] != byte_at(e->in, at)) {
			if (e->wrong++ == 0) {
				e->first = at;
				e->inode = inode(e->fd);
			}
			e->last = at;
		}
		if (e->wrong && e->sampled < sizeof e->sample)
			e->sample[e->sampled++] = block[i];
	}
	e->got += len;
}

#define CONNECTIONS 120
#define MOST 3000000

/* Says which bytes were wrong, and where else they belong: moved ones say by how much. */
static void explain(int connection, const struct end *e, const struct end *peer, ino_t before)
{
	printf("connection %d, %s, manner %d, peer's %d: bytes %lu to %lu of %lu, %lu of them wrong, the first %s the library:",
	       connection, e->out % 2 ? "accepted" : "connected", e->manner, peer->manner, (unsigned long)e->first,
	       (unsigned long)e->last, (unsigned long)e->receive, (unsigned long)e->wrong,
	       e->inode == before ? "not behind" : "behind");
	for (size_t i = 0; i < e->sampled; i++)
		printf(" %02x", e->sample[i]);
	printf("\n");
	for (unsigned stream = 0; stream < 2 * CONNECTIONS; stream++) {
		for (uint64_t at = 0; at < MOST; at++) {
			size_t same = 0;

			while (same < e->sampled && e->sample[same] == byte_at(stream, at + same))
				same++;
			/* Fewer come up by chance. */
			if (same >= 8)
				printf("%zu of these are bytes %lu and on of connection %u, %s\n", same, (unsigned long)at,
				       stream / 2, stream == e->in ? "the same direction" :
				       stream / 2 == (unsigned)connection ? "the other direction" : "another one");
		}
	}
	fflush(stdout);
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
			ends[k].send = 1 + (draw(&seed) % 3 ? draw(&seed) % 300000 : draw(&seed) % MOST);
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
			if (ends[k].wrong)
				explain(i, &ends[k], &ends[!k], before[k]);
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

/* A server that does not wait answers its first request at each moment of the agreement, and behind it as late as it
 * likes: there is room for it, as in any TCP socket that has sent nothing. It may close at once. */
static void answers(void)
{
	int l = listener(), refused = 0, lost = 0, upgraded = 0;
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };

	for (int i = 0; i < 80; i++) {
		int c = client(), a, n;
		ino_t before = inode(c), own;
		char byte = 0;
		bool leaves = i % 2;

		MUST((a = accept4(l, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0);
		MUST(setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
		own = inode(a);
		MUST(send(c, "q", 1, 0) == 1);
		while ((n = (int)recv(a, &byte, 1, 0)) < 0)
			MUST(errno == EAGAIN);
		MUST(n == 1 && byte == 'q');
		/* Some are late: the library has come between, and a marker is on its way or answered. */
		if (i % 4 < 2)
			usleep((unsigned)(i / 4 * 50));
		else
			becomes(a, own, 2000);
		refused += send(a, "a", 1, MSG_NOSIGNAL) != 1;
		if (leaves)
			MUST(close(a) == 0);
		lost += recv(c, &byte, 1, 0) != 1 || byte != 'a';
		if (leaves)
			lost += recv(c, &byte, 1, 0) != 0;
		else if (i % 8 == 0)
			upgraded += becomes(c, before, 2000);
		MUST(close(c) == 0);
		if (!leaves)
			MUST(close(a) == 0);
	}
	MUST(close(l) == 0);
	check(refused == 0, "a first answer finds room", "%d of 80 times not", refused);
	check(lost == 0, "and reaches its peer", "%d did not", lost);
	check(!getenv("UPGRADED") || upgraded > 5, "connections became streams", "%d of 10", upgraded);
}

static const struct group groups[] = {
	{ "integrity", integrity },
	{ "answers", answers },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
