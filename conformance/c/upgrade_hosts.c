/* One end of TCP connections that may become iWARP's in place, on a host of its own:
 *
 *   upgrade_hosts serve|connect ADDRESS PORT attack|agree|stay
 *
 * attack: another user of the accepting host claims to be the other end, and has the server send what it has learned.
 * agree, stay: what becomes of a connection whose two ends use it. */
#define _GNU_SOURCE
#include "upgrade_by_hand.h"

#include <sys/random.h>

extern int setgroups(size_t count, const gid_t *groups);

#define STRANGER 65534
#define ROUNDS 400

static struct sockaddr_in own_name, peers_name;	/* of the end that connected, and of the other one */

/* Whoever is answered knows the nonce. Without the key, with the datagrams of both versions. */
static void learn(unsigned char learned[16])
{
	unsigned char d[DATAGRAM], ends[40], zero[16] = { 0 }, own[16] = "a stranger";
	struct timeval limit = { .tv_usec = 30000 };
	int udp;

	put_ends(ends, &own_name, &peers_name);
	MUST((udp = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(setsockopt(udp, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	MUST(connect(udp, (void *)&own_name, sizeof own_name) == 0);
	for (int again = 0; again < 12; again++) {
		put_datagram(d, HELLO, own, again % 4 < 2 ? zero : learned, ends);
		d[8] = (unsigned char)(1 + again % 2);
		if (again >= 8)
			MUST(getrandom(d + 88, 16, 0) == 16);
		(void)!send(udp, d, d[8] == 1 ? 88 : DATAGRAM, 0);
		if (recv(udp, d, sizeof d, 0) >= 88)
			memcpy(learned, d + 32, 16);
	}
}

/* The server has no rule. What it sends of the stranger's it sends before in other words, so that the client knows it. */
static void serve_a_stranger(int a)
{
	unsigned char learned[16] = { 0 }, own[16] = "a stranger", marker[48], other[48];
	int result[2], status;
	socklen_t len = sizeof own_name;
	pid_t child;
	char byte;

	MUST(getpeername(a, (void *)&own_name, &len) == 0 && getsockname(a, (void *)&peers_name, &len) == 0);
	MUST(recv(a, &byte, 1, 0) == 1 && pipe(result) == 0 && (child = fork()) >= 0);
	if (child == 0) {
		MUST(setgroups(0, NULL) == 0 && setresgid(STRANGER, STRANGER, STRANGER) == 0 &&
		     setresuid(STRANGER, STRANGER, STRANGER) == 0);
		learn(learned);
		_exit(write(result[1], learned, 16) == 16 ? 0 : 1);
	}
	MUST(read(result[0], learned, 16) == 16 && waitpid(child, &status, 0) == child && status == 0);
	put_marker(marker, own, learned, MARK);
	for (int i = 0; i < 48; i++)
		other[i] = marker[i] ^ 0xff;
	MUST(send(a, other, 48, 0) == 48 && send(a, marker, 48, 0) == 48 && send(a, "end", 3, 0) == 3);
	check(recv(a, &byte, 1, 0) == 0, "the client closes in order", "errno %d", errno);
}

static void connect_to_a_stranger(int c)
{
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };
	ino_t before = inode(c);
	unsigned char got[99];
	bool same = true;

	MUST(setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	MUST(send(c, "x", 1, 0) == 1);
	check(recv(c, got, 99, MSG_WAITALL) == 99, "every byte comes", "errno %d", errno);
	for (int i = 0; i < 48; i++)
		same &= got[i] == (got[48 + i] ^ 0xff);
	check(same && !memcmp(got + 96, "end", 3), "what looks like a marker is the program's", "?");
	check(inode(c) == before, "a claim without the key leaves the connection alone", "?");
}

/* Both ends send and receive while it is decided what becomes of the connection. */
static void use(int fd, bool agrees, bool first)
{
	struct timeval limit = { .tv_sec = LIMIT_MS / 1000 };
	ino_t before = inode(fd);
	char block[500], got[500];
	bool good = true;

	MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
	for (int i = 0; i < ROUNDS && good; i++) {
		memset(block, 'a' + i % 26, sizeof block);
		good = (!first || send(fd, block, sizeof block, 0) == sizeof block) &&
		       recv(fd, got, sizeof got, MSG_WAITALL) == sizeof got && !memcmp(block, got, sizeof got) &&
		       (first || send(fd, block, sizeof block, 0) == sizeof block);
		if (first)
			usleep(2000);
	}
	check(good, "every byte is the right one", "errno %d", errno);
	check((inode(fd) != before) == agrees, agrees ? "the connection is iWARP's" : "the connection stays TCP", "?");
	MUST(close(fd) == 0);
}

int main(int argc, char **argv)
{
	struct sockaddr_storage to;
	bool attack, serves;
	int fd, l, on = 1;

	MUST(argc == 5);
	serves = !strcmp(argv[1], "serve");
	attack = !strcmp(argv[4], "attack");
	alarm(GROUP_LIMIT);
	to = sockaddr_of(argv[2], (uint16_t)atoi(argv[3]));
	MUST((fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	if (serves) {
		MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
		MUST(bind(fd, (void *)&to, sizeof(struct sockaddr_in)) == 0 && listen(fd, 4) == 0);
		l = fd;
		MUST((fd = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
	} else {
		MUST(connect(fd, (void *)&to, sizeof(struct sockaddr_in)) == 0);
	}
	if (attack && serves)
		serve_a_stranger(fd);
	else if (attack)
		connect_to_a_stranger(fd);
	else
		use(fd, !strcmp(argv[4], "agree"), !serves);
	return failures != 0;
}
