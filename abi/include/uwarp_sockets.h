/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * uwarp_sockets.h: TCP sockets of the kernel whose connection is an iWARP stream. See uwarp_sockets(7).
 *
 *	int role = UWARP_INITIATOR;			// the other end: UWARP_RESPONDER
 *
 *	uwarp_setsockopt(fd, SOL_UWARP, IWARP_MODE, &role, sizeof role);
 *	uwarp_write(fd, "hello", 5);
 *	uwarp_close(fd);
 *
 * The functions are in libuwarp.so: link with -luwarp. Each is for any descriptor. For a socket in IWARP_MODE it does what the
 * call without the prefix does for others, and for all others it is that call.
 */
#ifndef UWARP_SOCKETS_H
#define UWARP_SOCKETS_H

#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The level of these options. */
#define SOL_UWARP 0x5557

/* Set: the connected socket becomes an iWARP stream. The value is an int (the role) or a struct uwarp_iwarp_mode. Get: an int, the
 * role, or 0 for a socket that is not in IWARP_MODE. */
#define IWARP_MODE 1
/* Get: the private data that the peer's program gave. */
#define IWARP_PEER_DATA 2

enum uwarp_role {
	UWARP_INITIATOR = 1,
	UWARP_RESPONDER = 2,
};

/* Most bytes of private data. */
#define UWARP_PRIVATE_DATA_MAX 456

struct uwarp_iwarp_mode {
	uint32_t role;			/* enum uwarp_role */
	uint32_t timeout_ms;		/* for set-up; 0: 30 seconds */
	const void *private_data;	/* for the peer's program */
	uint32_t private_data_len;
	uint32_t reserved;		/* 0 */
};

int uwarp_setsockopt(int fd, int level, int optname, const void *optval, socklen_t optlen);
int uwarp_getsockopt(int fd, int level, int optname, void *optval, socklen_t *optlen);

ssize_t uwarp_read(int fd, void *buf, size_t count);
ssize_t uwarp_readv(int fd, const struct iovec *iov, int iovcnt);
ssize_t uwarp_recv(int fd, void *buf, size_t len, int flags);
ssize_t uwarp_write(int fd, const void *buf, size_t count);
ssize_t uwarp_writev(int fd, const struct iovec *iov, int iovcnt);
ssize_t uwarp_send(int fd, const void *buf, size_t len, int flags);

int uwarp_poll(struct pollfd *fds, nfds_t nfds, int timeout);
int uwarp_shutdown(int fd, int how);
int uwarp_close(int fd);

#ifdef __cplusplus
}
#endif

#endif
