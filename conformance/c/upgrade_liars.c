/* TCP connections that become iWARP's in place, and peers that lie or leave at each step: they are played by hand, under a
 * rule for the program's end only. */
#define _GNU_SOURCE
#include "upgrade_by_hand.h"

#include <sys/random.h>

struct by_hand {
	int tcp, name, link;		/* of the liar; -1: none */
	unsigned char own[16], peers[16];
	unsigned char ends[40];		/* as in a datagram */
	bool connected;			/* the liar has connected */
	struct sockaddr_un un;		/* of the end that connected */
	socklen_t un_len;
};

static struct by_hand by_hand(int tcp, bool connected)
{
	struct sockaddr_in own, peer;
	socklen_t len = sizeof own;
	struct by_hand h = { .tcp = tcp, .name = -1, .link = -1, .connected = connected };

	MUST(getsockname(tcp, (void *)&own, &len) == 0);
	len = sizeof peer;
	MUST(getpeername(tcp, (void *)&peer, &len) == 0);
	put_ends(h.ends, connected ? &own : &peer, connected ? &peer : &own);
	h.un_len = put_name(&h.un, connected ? &own : &peer, connected ? &peer : &own);
	if (connected) {
		MUST((h.name = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) >= 0);
		MUST(bind(h.name, (void *)&h.un, h.un_len) == 0 && listen(h.name, 4) == 0);
	}
	MUST(getrandom(h.own, 16, 0) == 16);
	return h;
}

static void say(struct by_hand *h, int kind)
{
	unsigned char d[DATAGRAM];
	int shown = path_of(h->tcp);

	if (h->link < 0 && !h->connected) {
		MUST((h->link = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) >= 0);
		MUST(connect(h->link, (void *)&h->un, h->un_len) == 0);
	}
	put_datagram(d, kind, h->connected ? h->peers : h->own, h->connected ? h->own : h->peers, h->ends);
	send_shown(h->link, d, sizeof d, &shown, 1);
	MUST(close(shown) == 0);
}

/* As an end that connected does: more than once. The other one lets its program answer first, for 50 ms. */
static void welcome(struct by_hand *h)
{
	say(h, WELCOME);
	usleep(60000);
	say(h, WELCOME);
}

/* The next datagram's kind, or 0 if none comes in time. */
static int hear(struct by_hand *h, int ms)
{
	unsigned char d[DATAGRAM + 1];
	ssize_t n;
	int shown;

	for (uint64_t end = now_ms() + (uint64_t)ms; now_ms() < end;) {
		if (h->link < 0 && h->connected && readable(h->name, 10))
			MUST((h->link = accept4(h->name, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		if (h->link < 0 || !readable(h->link, 10))
			continue;
		n = receive_shown(h->link, d, sizeof d, &shown);
		if (shown >= 0)
			MUST(close(shown) == 0);
		if (n <= 0) {
			MUST(close(h->link) == 0);
			h->link = -1;
			continue;
		}
		if (n != DATAGRAM || memcmp(d, "uwarpUPG", 8) || d[8] != 2 || memcmp(d + 48, h->ends, 36))
			continue;
		memcpy(h->peers, d + (h->connected ? 16 : 32), 16);
		return d[9];
	}
	return 0;
}

static void marker(struct by_hand *h, unsigned char to[48], const char *word)
{
	put_marker(to, h->own, h->peers, word);
}

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
	MUST(close(h->tcp) == 0);
	if (h->name >= 0)
		MUST(close(h->name) == 0);
	if (h->link >= 0)
		MUST(close(h->link) == 0);
}

/* How many descriptors of this process are this socket, the library's included. */
static int descriptors_of(ino_t socket)
{
	struct stat stat;
	int count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fstat(fd, &stat) == 0 && S_ISSOCK(stat.st_mode) && stat.st_ino == socket;
	return count;
}

#define KEPT 65536

/* Behind its marker, before the peer's: as in any TCP socket there is room for the first bytes, and not for all. */
static void sends_behind_a_marker(int fd)
{
	static unsigned char block[2 * KEPT];
	struct pollfd p = { .fd = fd, .events = POLLOUT };

	for (size_t i = 0; i < sizeof block; i++)
		block[i] = byte_at(7, i);
	MUST(poll(&p, 1, LIMIT_MS) == 1);
	check(p.revents == POLLOUT, "a socket that waits for the answer to its marker has room", "%x", (unsigned)p.revents);
	check(send(fd, block, 1, MSG_DONTWAIT) == 1, "a first byte finds room", "errno %d", errno);
	check(send(fd, block + 1, sizeof block - 1, MSG_DONTWAIT) == KEPT - 1, "and more", "errno %d", errno);
	check_failed(send(fd, block, 1, MSG_DONTWAIT) == -1, EAGAIN, "until there is none");
	check(poll(&p, 1, 0) == 0, "which is no room", "%x", (unsigned)p.revents);
}

static bool is_all_of_it(int fd)
{
	static unsigned char got[KEPT];

	if (recv(fd, got, sizeof got, MSG_WAITALL) != sizeof got)
		return false;
	for (size_t i = 0; i < sizeof got; i++)
		if (got[i] != byte_at(7, i))
			return false;
	return true;
}

/* The program accepts; what connects is by hand. Run with upgrade:listen. */
static void liars_that_connect(void)
{
	int l = listener(), a;
	struct by_hand h;
	unsigned char m[48], to[64];
	ino_t before;
	char byte;
	pid_t child;
	int status, n;

	signal(SIGPIPE, SIG_IGN);
	for (int step = 0; step < 13; step++) {
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
			welcome(&h);
			check(is_marked(&h, MARK), "the marker comes as the next bytes", "?");
			MUST(send(h.tcp, "early", 5, 0) == 5);
			mark(&h, NO);
			check(recv(a, to, 5, MSG_WAITALL) == 5 && !memcmp(to, "early", 5), "bytes before a refusal", "?");
			is_tcp(a, h.tcp, "after a refusal the connection is TCP");
			break;
		case 3:		/* closes instead of an answer */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			MUST(send(h.tcp, "last", 4, 0) == 4 && shutdown(h.tcp, SHUT_WR) == 0);
			check(recv(a, to, 8, MSG_WAITALL) == 4 && recv(a, to, 8, 0) == 0, "bytes and the end instead of an answer", "?");
			check(send(a, "still", 5, 0) == 5 && recv(h.tcp, to, 5, MSG_WAITALL) == 5, "and the other direction", "?");
			break;
		case 4:		/* says something else */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			marker(&h, m, YES);
			m[40] ^= 1;
			MUST(send(h.tcp, m, 48, 0) == 48);
			check_failed(recv(a, to, 8, 0) == -1, ECONNRESET, "an answer without meaning ends the connection");
			break;
		case 5:		/* agrees, and sends what is not MPA's */
			welcome(&h);
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
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			mark(&h, YES);
			MUST(recv(h.tcp, to, 20, MSG_WAITALL) == 20 && close(h.tcp) == 0);
			check(recv(a, to, 8, 0) == 0, "a peer that closes before the stream is the end", "errno %d", errno);
			check_failed(send(a, to, 8, 0) == -1, EPIPE, "and nothing can be sent");
			MUST((h.tcp = dup(STDOUT_FILENO)) >= 0);
			break;
		case 7:		/* never answers the marker, and the program goes */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			MUST(close(a) == 0);
			check(recv(h.tcp, to, 8, 0) == 0, "a program that closes while it waits ends the connection", "errno %d",
			      errno);
			MUST((a = dup(STDOUT_FILENO)) >= 0);
			break;
		case 8:		/* welcomes late */
			usleep(8300000);
			is_tcp(a, h.tcp, "a peer that is silent stays TCP");
			while ((n = hear(&h, LIMIT_MS)) == HELLO)
				;
			check(n == NEVER, "whoever was silent hears NEVER", "%d", n);
			say(&h, WELCOME);
			check(hear(&h, LIMIT_MS) == NEVER, "and again for a late WELCOME", "something else");
			check(!becomes(a, before, QUIET_MS), "and does nothing", "?");
			is_tcp(a, h.tcp, "and it is TCP");
			break;
		case 9:		/* answers a program that has forked meanwhile */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			MUST((child = fork()) >= 0);
			if (!child)
				_exit(descriptors_of(before));
			MUST(waitpid(child, &status, 0) == child && WIFEXITED(status));
			check(WEXITSTATUS(status) == 0, "a child that is forked before the answer has no copy of the connection",
			      "%d descriptors", WEXITSTATUS(status));
			mark(&h, NO);
			is_tcp(a, h.tcp, "and the connection goes on");
			break;
		case 10:	/* refuses, after the program has sent */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			sends_behind_a_marker(a);
			check_failed(recv(h.tcp, to, 8, MSG_DONTWAIT) == -1, EAGAIN, "nothing follows a marker without an answer");
			mark(&h, NO);
			check(is_all_of_it(h.tcp), "after a refusal all of it comes", "?");
			is_tcp(a, h.tcp, "and the connection goes on");
			break;
		case 11:	/* the same, and the program has gone */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			sends_behind_a_marker(a);
			MUST(close(a) == 0 && (a = dup(STDOUT_FILENO)) >= 0);
			check_failed(recv(h.tcp, to, 8, MSG_DONTWAIT) == -1, EAGAIN, "nothing follows, nor the end");
			mark(&h, NO);
			check(is_all_of_it(h.tcp) && recv(h.tcp, to, 8, 0) == 0, "after a refusal all of it comes, and the end", "?");
			break;
		case 12:	/* ends its direction, after the program has sent and ended its own */
			welcome(&h);
			check(is_marked(&h, MARK), "a marker", "?");
			sends_behind_a_marker(a);
			MUST(shutdown(a, SHUT_WR) == 0 && shutdown(h.tcp, SHUT_WR) == 0);
			check(is_all_of_it(h.tcp) && recv(h.tcp, to, 8, 0) == 0, "all of it comes where the peer ends, and the end", "?");
			check(recv(a, to, 8, 0) == 0, "and the peer's end", "errno %d", errno);
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
			MUST((h.tcp = dup(STDOUT_FILENO)) >= 0);
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
			MUST((c = dup(STDOUT_FILENO)) >= 0);
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
	{ "liars_that_connect", liars_that_connect },
	{ "liars_that_accept", liars_that_accept },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
