/* A server that accepts and posts no receive, and a client whose Send waits for one. Neither ends by itself.
 * Arguments: server or client, address, port. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <rdma/rdma_verbs.h>

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	int server = argc == 4 && !strcmp(argv[1], "server");
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = server ? RAI_PASSIVE : 0 }, *to;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1,
			 .max_inline_data = 16 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};
	struct rdma_cm_id *id, *listener;

	must(argc == 4, "usage");
	must(!rdma_getaddrinfo(argv[2], argv[3], &hints, &to), "rdma_getaddrinfo");
	must(!rdma_create_ep(&id, to, NULL, &attr), "rdma_create_ep");
	if (server) {
		listener = id;
		must(!rdma_listen(listener, 1), "rdma_listen");
		must(!rdma_get_request(listener, &id), "rdma_get_request");
		must(!rdma_accept(id, NULL), "rdma_accept");
	} else {
		must(!rdma_connect(id, NULL), "rdma_connect");
		must(!rdma_post_send(id, NULL, "message", 8, NULL, IBV_SEND_INLINE), "rdma_post_send");
	}
	for (;;)
		pause();
}
