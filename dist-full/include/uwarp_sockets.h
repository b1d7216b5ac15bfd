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

/* POLLPRI: a descriptor of a socket in IWARP_MODE is done. */
int uwarp_poll(struct pollfd *fds, nfds_t nfds, int timeout);
int uwarp_shutdown(int fd, int how);
int uwarp_close(int fd);

/* Descriptors: operations that are posted and complete later. Nothing is copied. Memory is registered with ibv_reg_mr(3) in the
 * protection domain of the socket, uwarp_socket_qp(fd)->pd, and named by its lkey. */
enum uwarp_op {
	/* Receives one message. The memory needs IBV_ACCESS_LOCAL_WRITE. The peer may write it until the completion. */
	UWARP_RECV = 1,
	/* Sends one message into the peer's oldest UWARP_RECV; waits until there is one. */
	UWARP_SEND = 2,
	/* Writes to, or reads, memory that the peer has registered for it. The peer's program is not told. */
	UWARP_WRITE = 3,
	UWARP_READ = 4,
	/* In completions only: a work request that the program has posted to the queue pair with ibv_post_send(3). */
	UWARP_WORK_REQUEST = 5,
};

/* Most pieces of memory of a descriptor. */
#define UWARP_SGE_MAX 16

struct uwarp_desc {
	uint64_t id;			/* comes back in the completion */
	const struct ibv_sge *sg_list;
	uint32_t num_sge;
	uint32_t op;			/* enum uwarp_op */
	uint64_t remote_addr;		/* UWARP_WRITE, UWARP_READ */
	uint32_t rkey;
	uint32_t flags;			/* 0 */
};

struct uwarp_completion {
	uint64_t id;
	uint64_t length;		/* bytes */
	uint32_t op;			/* enum uwarp_op */
	int32_t error;			/* 0, or an error number */
};

/* Posts descriptors; returns how many, or -1 if the first one is refused. Never waits. EAGAIN: no more fit now. */
int uwarp_post(int fd, const struct uwarp_desc *descs, int count);
/* Takes completions, oldest first; returns how many. Never waits: uwarp_poll() does. */
int uwarp_get_completions(int fd, struct uwarp_completion *completions, int count);
/* The socket's queue pair, for the rest of the verbs. It is the socket's until uwarp_close(). */
struct ibv_qp *uwarp_socket_qp(int fd);

#ifdef __cplusplus
}
#endif

#endif
