/* Ports that ordinary TCP sockets have, and what rdma_cm's calls say of them:
 *
 *   ports ADDRESS
 *
 * Prints each such port as "taken PORT". What the library has to say besides the errno goes to standard
 * error. */
#include "common.h"

#include <sys/socket.h>

#define PORTS 20

static socklen_t size_of(const struct sockaddr_storage *ss)
{
	return ss->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

/* A TCP socket with a port of its own, and the address. */
static int tcp(struct sockaddr_storage *ss, int reuse)
{
	socklen_t len = sizeof *ss;
	int fd;

	*ss = sockaddr_of(address, 0);
	MUST((fd = socket(ss->ss_family, SOCK_STREAM, 0)) >= 0);
	MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse) == 0);
	MUST(bind(fd, (struct sockaddr *)ss, size_of(ss)) == 0);
	MUST(getsockname(fd, (struct sockaddr *)ss, &len) == 0);
	/* The port stands at the same place in both families' structures. */
	printf("taken %u\n", ntohs(((struct sockaddr_in *)ss)->sin_port));
	return fd;
}

int main(int argc, char **argv)
{
	struct rdma_event_channel *ch;
	struct sockaddr_storage ss;
	struct rdma_cm_id *id;
	int share = 1, fd;

	if (argc > 1)
		address = argv[1];
	MUST(ch = rdma_create_event_channel());
	/* Nobody listens there when the id is bound, and when it is to listen somebody does. */
	fd = tcp(&ss, share);
	MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &share, sizeof share) == 0);
	check(rdma_bind_addr(id, (struct sockaddr *)&ss) == 0, "two bind who share", "%m");
	MUST(listen(fd, 1) == 0);
	errno = 0;
	/* A loopback address is any address to rdma_cm. */
	check_failed(rdma_listen(id, 1) == -1, EADDRNOTAVAIL, "but one listens");
	MUST(rdma_destroy_id(id) == 0);
	for (int n = 1; n < PORTS; n++) {
		fd = tcp(&ss, 0);
		MUST(listen(fd, 1) == 0);
		for (int again = 0; again < 2; again++) {
			MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
			errno = 0;
			check_failed(rdma_bind_addr(id, (struct sockaddr *)&ss) == -1, EADDRNOTAVAIL, "a port is taken");
			MUST(rdma_destroy_id(id) == 0);
		}
	}
	rdma_destroy_event_channel(ch);
	return failures ? 1 : 0;
}
