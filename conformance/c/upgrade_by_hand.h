/* An end of an upgrade, played by hand: datagrams, by a Unix socket within a host and by UDP across hosts, and markers. */
#ifndef UWARP_CONFORMANCE_UPGRADE_BY_HAND_H
#define UWARP_CONFORMANCE_UPGRADE_BY_HAND_H

#include "upgrade.h"

#include <stddef.h>
#include <sys/un.h>

enum { HELLO = 1, WELCOME = 2, NEVER = 3, MARKED = 4, QUESTION = 5 };

#define DATAGRAM 104
#define MARK "\nuwarp-upgrade1\n"
#define YES "\nuwarp-agreed-1\n"
#define NO "\nuwarp-refused1\n"

static inline void put_end(unsigned char *to, const struct sockaddr_in *in, int port_at)
{
	memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	memcpy(to + 12, &in->sin_addr, 4);
	memcpy(to + port_at, &in->sin_port, 2);
}

/* Both addresses as in a datagram. `connected`: of the end that connected. */
static inline void put_ends(unsigned char ends[40], const struct sockaddr_in *connected, const struct sockaddr_in *accepted)
{
	memset(ends, 0, 40);
	put_end(ends, connected, 32);
	put_end(ends + 16, accepted, 18);
}

static inline void put_datagram(unsigned char d[DATAGRAM], int kind, const unsigned char accepted[16],
				const unsigned char connected[16], const unsigned char ends[40])
{
	memset(d, 0, DATAGRAM);
	memcpy(d, "uwarpUPG", 8);
	d[8] = 2;
	d[9] = (unsigned char)kind;
	memcpy(d + 16, accepted, 16);
	memcpy(d + 32, connected, 16);
	memcpy(d + 48, ends, 36);
}

/* The name of the end that connected. */
static inline socklen_t put_name(struct sockaddr_un *un, const struct sockaddr_in *connected, const struct sockaddr_in *accepted)
{
	char one[INET_ADDRSTRLEN], other[INET_ADDRSTRLEN];
	int len;

	memset(un, 0, sizeof *un);
	un->sun_family = AF_UNIX;
	inet_ntop(AF_INET, &connected->sin_addr, one, sizeof one);
	inet_ntop(AF_INET, &accepted->sin_addr, other, sizeof other);
	len = snprintf(un->sun_path + 1, sizeof un->sun_path - 1, "uwarp-up/%s:%d/%s:%d", one, ntohs(connected->sin_port), other,
		       ntohs(accepted->sin_port));
	return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)len);
}

/* Sends bytes, and so many descriptors with them. */
static inline ssize_t send_shown(int to, const void *bytes, size_t len, const int *fds, int count)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(8 * sizeof(int))];
	} control = { 0 };
	struct iovec piece = { .iov_base = (void *)bytes, .iov_len = len };
	struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1 };

	if (count) {
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
		control.header.cmsg_level = SOL_SOCKET;
		control.header.cmsg_type = SCM_RIGHTS;
		control.header.cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
		memcpy(CMSG_DATA(&control.header), fds, (size_t)count * sizeof(int));
	}
	return sendmsg(to, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Receives bytes, and the first descriptor with them, or -1. */
static inline ssize_t receive_shown(int from, void *bytes, size_t len, int *fd)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec piece = { .iov_base = bytes, .iov_len = len };
	struct msghdr message = { .msg_iov = &piece, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	ssize_t got = recvmsg(from, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	*fd = -1;
	if (got >= 0 && message.msg_controllen >= CMSG_LEN(sizeof(int)) && control.header.cmsg_type == SCM_RIGHTS)
		memcpy(fd, CMSG_DATA(&control.header), sizeof(int));
	return got;
}

/* A descriptor of the same file by which nothing can be done. */
static inline int path_of(int fd)
{
	char path[40];
	int new;

	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	MUST((new = open(path, O_PATH | O_CLOEXEC)) >= 0);
	return new;
}

static inline void put_marker(unsigned char to[48], const unsigned char own[16], const unsigned char peers[16], const char *word)
{
	memcpy(to, own, 16);
	memcpy(to + 16, peers, 16);
	memcpy(to + 32, word, 16);
}

#endif
