/* What the programs of connections that become iWARP's in place share: a listener, a client, and bytes that say where
 * they belong. */
#ifndef UWARP_CONFORMANCE_UPGRADE_H
#define UWARP_CONFORMANCE_UPGRADE_H

#include "common.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

static struct sockaddr_storage listening;
static socklen_t listening_len;

static inline struct sockaddr *sa(void)
{
	return (struct sockaddr *)&listening;
}

static inline int listener(void)
{
	int fd, on = 1;

	listening = sockaddr_of(strcmp(address, "-") ? address : "127.0.0.1", 0);
	listening_len = listening.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
	MUST((fd = socket(listening.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
	MUST(bind(fd, sa(), listening_len) == 0 && listen(fd, 1024) == 0);
	MUST(getsockname(fd, sa(), &listening_len) == 0);
	return fd;
}

static inline int client(void)
{
	int fd;

	MUST((fd = socket(listening.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(connect(fd, sa(), listening_len) == 0);
	return fd;
}

static inline ino_t inode(int fd)
{
	struct stat stat;

	MUST(fstat(fd, &stat) == 0);
	return stat.st_ino;
}

/* Whether a descriptor becomes another file within this time: the library has come between. */
static inline bool becomes(int fd, ino_t before, int ms)
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
static inline unsigned char byte_at(unsigned stream, uint64_t at)
{
	uint64_t x = (at + 1) * 0x9E3779B97F4A7C15u + stream * 0xBF58476D1CE4E5B9u;

	/* Without the second product, stretches of one place come up at many others, too. */
	return (unsigned char)(((x ^ (x >> 29)) * 0x94D049BB133111EBu) >> 56);
}

#endif
