/* What the programs of sockets in IWARP_MODE share. The functions are found as a program finds them that also runs without uwarp. With
 * VERBS_SOCKETS=FILE they are those of that library, libuwarp-verbs-sockets.so, over whatever librdmacm there is. */
#ifndef UWARP_CONFORMANCE_IWARP_MODE_H
#define UWARP_CONFORMANCE_IWARP_MODE_H

#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>

#include "common.h"
#include "../../abi/include/uwarp_sockets.h"

static inline bool over_verbs(void)
{
	return getenv("VERBS_SOCKETS") != NULL;
}

static inline void *symbol(const char *name)
{
	static void *library;
	void *found;

	if (!library)
		library = dlopen(over_verbs() ? getenv("VERBS_SOCKETS") : "libibverbs.so.1", RTLD_NOW);
	MUST(library);
	found = over_verbs() ? dlsym(library, name) : dlvsym(library, name, "UWARP_SOCKETS_1.0");
	if (!found)
		die("%s is not there", name);
	return found;
}

#define CALL(name, ...) ((__typeof__(&uwarp_##name))symbol("uwarp_" #name))(__VA_ARGS__)

/* Two ends of a TCP connection. */
static inline void tcp(int fds[2])
{
	struct sockaddr_storage at = sockaddr_of(address, 0);
	socklen_t len = at.ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	int listening;

	MUST((listening = socket(at.ss_family, SOCK_STREAM, 0)) >= 0);
	MUST(bind(listening, (struct sockaddr *)&at, len) == 0 && listen(listening, 1) == 0);
	MUST(getsockname(listening, (struct sockaddr *)&at, &len) == 0);
	MUST((fds[0] = socket(at.ss_family, SOCK_STREAM, 0)) >= 0);
	/* Some groups send signals all the time. */
	while (connect(fds[0], (struct sockaddr *)&at, len) != 0 && errno != EISCONN)
		MUST(errno == EINTR || errno == EALREADY);
	while ((fds[1] = accept(listening, NULL, NULL)) < 0)
		MUST(errno == EINTR);
	close(listening);
}

static inline void set_nonblocking(int fd, bool on)
{
	int flags = fcntl(fd, F_GETFL);

	MUST(fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK) == 0);
}

static inline int set_role(int fd, int role)
{
	return CALL(setsockopt, fd, SOL_UWARP, IWARP_MODE, &role, sizeof role);
}

static inline int role_of(int fd)
{
	int role = -1;
	socklen_t len = sizeof role;

	return CALL(getsockopt, fd, SOL_UWARP, IWARP_MODE, &role, &len) ? -1 : role;
}

static inline int error_of(int fd)
{
	int error = -1;
	socklen_t len = sizeof error;

	MUST(CALL(getsockopt, fd, SOL_SOCKET, SO_ERROR, &error, &len) == 0);
	return error;
}

/* What is ready of these, now or within the time limit. */
static inline short events(int fd, short asked, int ms)
{
	struct pollfd p = { .fd = fd, .events = asked };
	int n;

	do
		n = CALL(poll, &p, 1, ms);
	while (n < 0 && errno == EINTR);
	if (n != (p.revents != 0))
		die("uwarp_poll returns %d with revents %#x", n, p.revents);
	return p.revents;
}

/* Neither end waits in setsockopt, so one thread can set both. */
static inline void begin(int fd, int role)
{
	set_nonblocking(fd, true);
	if (set_role(fd, role) != 0 && errno != EINPROGRESS)
		die("IWARP_MODE");
}

static inline void end(int fd)
{
	short ready = events(fd, POLLOUT, LIMIT_MS);
	int error = error_of(fd);

	errno = error;
	if (ready != POLLOUT || error)
		die("set-up ends with events %#x", ready);
	set_nonblocking(fd, false);
}

static inline void upgrade(int fds[2])
{
	begin(fds[0], UWARP_INITIATOR);
	begin(fds[1], UWARP_RESPONDER);
	end(fds[0]);
	end(fds[1]);
}

static inline void pair(int fds[2])
{
	tcp(fds);
	upgrade(fds);
}

static inline void close_both(int fds[2])
{
	MUST(CALL(close, fds[0]) == 0 && CALL(close, fds[1]) == 0);
}

static inline void write_all(int fd, const char *bytes, size_t len)
{
	while (len > 0) {
		ssize_t n = CALL(write, fd, bytes, len);

		MUST(n > 0);
		bytes += n;
		len -= (size_t)n;
	}
}

static inline void read_all(int fd, char *bytes, size_t len)
{
	while (len > 0) {
		ssize_t n = CALL(read, fd, bytes, len);

		MUST(n > 0);
		bytes += n;
		len -= (size_t)n;
	}
}

/* The error of posting one descriptor, or 0. */
static inline int post_one(int fd, uint64_t id, enum uwarp_op op, const struct ibv_sge *list, uint32_t n)
{
	struct uwarp_desc desc = { .id = id, .sg_list = list, .num_sge = n, .op = op };

	return CALL(post, fd, &desc, 1) == 1 ? 0 : errno;
}

static inline struct ibv_mr *registered(int fd, void *at, size_t len, int access)
{
	struct ibv_qp *qp = CALL(socket_qp, fd);
	struct ibv_mr *mr;

	MUST(qp);
	/* By its function: the macro of the header looks whether the flags are known to the library. */
	MUST(mr = (ibv_reg_mr)(qp->pd, at, len, access));
	return mr;
}

#endif
