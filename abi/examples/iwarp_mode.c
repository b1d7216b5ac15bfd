/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * A TCP socket in IWARP_MODE: bytes as before, and a message that is not copied.
 *
 *	cc iwarp_mode.c -I PREFIX/include -L PREFIX/lib/uwarp -luwarp -o iwarp_mode
 *	uwarp run -- ./iwarp_mode server PORT
 *	uwarp run -- ./iwarp_mode client ADDRESS PORT
 */
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <uwarp_sockets.h>

#define MESSAGE (1 << 20)

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

/* A plain TCP connection. */
static int tcp(int server, const char *address, const char *port)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = server ? AI_PASSIVE : 0 }, *to;
	int fd, on = 1;

	must(getaddrinfo(address, port, &hints, &to) == 0, "getaddrinfo");
	must((fd = socket(to->ai_family, SOCK_STREAM, 0)) >= 0, "socket");
	if (server) {
		int listening = fd;

		must(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0, "SO_REUSEADDR");
		must(bind(fd, to->ai_addr, to->ai_addrlen) == 0 && listen(fd, 1) == 0, "listen");
		must((fd = accept(listening, NULL, NULL)) >= 0, "accept");
		must(uwarp_close(listening) == 0, "close");
	} else {
		must(connect(fd, to->ai_addr, to->ai_addrlen) == 0, "connect");
	}
	freeaddrinfo(to);
	return fd;
}

int main(int argc, char **argv)
{
	int server = argc == 3 && !strcmp(argv[1], "server");
	int fd = server ? tcp(1, NULL, argv[2]) : argc == 4 ? tcp(0, argv[2], argv[3]) : -1;
	int role = server ? UWARP_RESPONDER : UWARP_INITIATOR;
	char *memory = calloc(1, MESSAGE), word[6] = "";
	struct pollfd ready = { .fd = fd, .events = POLLPRI };
	struct uwarp_completion done;
	struct ibv_mr *mr;
	struct ibv_sge all;
	struct uwarp_desc desc = { .id = 1, .sg_list = &all, .num_sge = 1 };

	if (argc != (server ? 3 : 4)) {
		fprintf(stderr, "usage: %s server PORT, or %s client ADDRESS PORT\n", argv[0], argv[0]);
		return 2;
	}
	must(fd >= 0 && memory, server ? "listening" : "connecting");
	must(uwarp_setsockopt(fd, SOL_UWARP, IWARP_MODE, &role, sizeof role) == 0, "IWARP_MODE");

	/* Bytes, as ever. */
	must(uwarp_write(fd, "hello", 5) == 5 && uwarp_recv(fd, word, 5, MSG_WAITALL) == 5, "hello");

	/* A message from memory to memory. */
	must((mr = ibv_reg_mr(uwarp_socket_qp(fd)->pd, memory, MESSAGE, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
	all = (struct ibv_sge){ (uintptr_t)memory, MESSAGE, mr->lkey };
	if (!server)
		memset(memory, 'm', MESSAGE);
	desc.op = server ? UWARP_RECV : UWARP_SEND;
	must(uwarp_post(fd, &desc, 1) == 1, "uwarp_post");
	while (uwarp_get_completions(fd, &done, 1) == 0)
		must(uwarp_poll(&ready, 1, -1) == 1, "uwarp_poll");
	must(done.error == 0 && memory[MESSAGE - 1] == 'm', "the message");
	printf("%s, and a message of %lu bytes\n", word, (unsigned long)done.length);
	must(ibv_dereg_mr(mr) == 0 && uwarp_close(fd) == 0, "uwarp_close");
	return 0;
}
