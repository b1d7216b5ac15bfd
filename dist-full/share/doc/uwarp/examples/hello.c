/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A first verbs program: the client connects through rdma_cm and sends one message. Nothing in it is uwarp's.
 *
 *	cc -o hello hello.c -lrdmacm -libverbs
 *	uwarp run -- ./hello server ADDRESS
 *	uwarp run -- ./hello client ADDRESS
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/rdma_verbs.h>

#define PORT "7471"
#define SIZE 100

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	int server = argc == 3 && !strcmp(argv[1], "server");
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = server ? RAI_PASSIVE : 0 }, *to;
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};
	char message[SIZE] = "hello from C";
	struct rdma_cm_id *id, *listener = NULL;
	struct ibv_mr *mr;
	struct ibv_wc done;

	if (argc != 3) {
		fprintf(stderr, "usage: %s server|client ADDRESS\n", argv[0]);
		return 2;
	}
	must(!rdma_getaddrinfo(argv[2], PORT, &hints, &to), "rdma_getaddrinfo");
	must(!rdma_create_ep(&id, to, NULL, &attr), "rdma_create_ep");
	if (server) {
		listener = id;
		must(!rdma_listen(listener, 1), "rdma_listen");
		must(!rdma_get_request(listener, &id), "rdma_get_request");
	}

	/* Registered: the device reads and writes this memory itself. */
	must((mr = rdma_reg_msgs(id, message, SIZE)) != NULL, "rdma_reg_msgs");
	if (server) {
		/* First the buffer, then the connection: a message that comes finds its place. */
		must(!rdma_post_recv(id, NULL, message, SIZE, mr), "rdma_post_recv");
		must(!rdma_accept(id, NULL), "rdma_accept");
		must(rdma_get_recv_comp(id, &done) == 1 && !done.status, "rdma_get_recv_comp");
		printf("received: %.*s\n", (int)done.byte_len, message);
	} else {
		must(!rdma_connect(id, NULL), "rdma_connect");
		must(!rdma_post_send(id, NULL, message, strlen(message), mr, 0), "rdma_post_send");
		must(rdma_get_send_comp(id, &done) == 1 && !done.status, "rdma_get_send_comp");
		printf("sent: %s\n", message);
	}

	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
	if (listener)
		rdma_destroy_ep(listener);
	rdma_freeaddrinfo(to);
	return 0;
}
