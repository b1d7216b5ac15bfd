/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Reliable datagrams: messages go to and fro between two processes that have no connection. Each has one queue pair, could
 * send to any number of others with it, and gets a completion when the other one has the message. What comes back must be
 * what was sent. See uwarpdv_create_qp(3).
 *
 *	cc -o rd_pingpong rd_pingpong.c -libverbs -ldl
 *	uwarp run -- ./rd_pingpong server ADDRESS [BYTES [ROUNDS]]
 *	uwarp run -- ./rd_pingpong client ADDRESS [BYTES [ROUNDS]]
 *
 * The two tell each other the numbers of their queue pairs over TCP, as programs do with any device.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <uwarpdv.h>

#define PORT "7472"
#define QKEY 0x11111111

struct name {
	union ibv_gid gid;
	uint32_t qpn;
};

static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static struct name peer;

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

/* A TCP connection to the other process. */
static int meet(int server, const char *address)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = server ? AI_PASSIVE : 0 }, *at;
	int fd, one = 1, listener;

	must(!getaddrinfo(address, PORT, &hints, &at), "getaddrinfo");
	must((fd = socket(at->ai_family, SOCK_STREAM, 0)) >= 0, "socket");
	if (server) {
		listener = fd;
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		must(!bind(listener, at->ai_addr, at->ai_addrlen) && !listen(listener, 1), "listen");
		must((fd = accept(listener, NULL, NULL)) >= 0, "accept");
		close(listener);
	} else {
		must(!connect(fd, at->ai_addr, at->ai_addrlen), "connect");
	}
	freeaddrinfo(at);
	return fd;
}

static void make_queue_pair(struct ibv_context *context, struct ibv_pd *pd)
{
	struct uwarpdv_qp_init_attr how = { .driver_qp_type = UWARPDV_QPT_RD, .msg_order = UWARPDV_ORDER_ALL };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_DRIVER, .send_cq = cq, .recv_cq = cq, .pd = pd,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	__typeof__(uwarpdv_create_qp) *create = (__typeof__(create))dlsym(RTLD_DEFAULT, "uwarpdv_create_qp");

	must(create != NULL, "this is not uwarp's libibverbs: uwarp run -- ...");
	must((qp = create(context, &init, &how, sizeof how)) != NULL, "uwarpdv_create_qp");
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	attr.qp_state = IBV_QPS_RTR;
	attr.min_rnr_timer = 1;		/* a message that finds no receive comes again after 10 us */
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.rnr_retry = 7;		/* as often as it takes */
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_RNR_RETRY), "to RTS");
}

static void receive(char *memory, uint32_t bytes)
{
	struct ibv_sge place = { .addr = (uintptr_t)memory, .length = bytes, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &place, .num_sge = 1 }, *bad;

	must(!ibv_post_recv(qp, &wr, &bad), "ibv_post_recv");
}

static void send_message(char *memory, uint32_t bytes)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(ex);
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, ah, peer.qpn, QKEY);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, bytes);
	must(!ibv_wr_complete(ex), "ibv_wr_complete");
}

/* Until so many messages were sent and received in all. */
static void wait_for(unsigned long *sent, unsigned long *received, unsigned long sends, unsigned long receives)
{
	struct ibv_wc done;

	while (*sent < sends || *received < receives) {
		int count = ibv_poll_cq(cq, 1, &done);

		must(count >= 0, "ibv_poll_cq");
		if (!count)
			continue;
		if (done.status) {
			fprintf(stderr, "a message failed: %s\n", ibv_wc_status_str(done.status));
			exit(1);
		}
		++*(done.opcode == IBV_WC_RECV ? received : sent);
	}
}

int main(int argc, char **argv)
{
	char *end_of_number = "";
	unsigned long asked = argc > 3 ? strtoul(argv[3], &end_of_number, 0) : 64;
	uint32_t bytes = (uint32_t)asked;
	unsigned long rounds = argc > 4 ? strtoul(argv[4], NULL, 0) : 1000, sent = 0, received = 0;
	int server = argc > 2 && !strcmp(argv[1], "server"), fd;
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	struct ibv_device **devices;
	struct ibv_context *context;
	struct timespec begin, end;
	struct name own;
	struct ibv_pd *pd;
	char *memory, *out;

	if (argc < 3 || *end_of_number || asked > 1ul << 30 || !rounds) {
		fprintf(stderr, "usage: %s server|client ADDRESS [BYTES [ROUNDS]]\n", argv[0]);
		return 2;
	}
	must((devices = ibv_get_device_list(NULL)) && devices[0], "no device");
	must((context = ibv_open_device(devices[0])) != NULL, "ibv_open_device");
	must((pd = ibv_alloc_pd(context)) != NULL, "ibv_alloc_pd");
	must((cq = ibv_create_cq(context, 8, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	must((memory = calloc(2, bytes + 1)) != NULL, "calloc");
	must((mr = ibv_reg_mr(pd, memory, 2 * (bytes + 1ul), IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr");
	make_queue_pair(context, pd);
	receive(memory, bytes);
	out = memory + bytes + 1;

	fd = meet(server, argv[2]);
	must(!ibv_query_gid(context, 1, 0, &own.gid), "ibv_query_gid");
	own.qpn = qp->qp_num;
	must(write(fd, &own, sizeof own) == sizeof own && read(fd, &peer, sizeof peer) == sizeof peer, "the other process");
	to.grh.dgid = peer.gid;
	must((ah = ibv_create_ah(pd, &to)) != NULL, "ibv_create_ah");

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned long round = 0; round < rounds; round++) {
		if (!server) {
			memset(out, (int)round, bytes);
			send_message(out, bytes);
		}
		/* Its own messages, too: their memory is used again. */
		wait_for(&sent, &received, server ? round : round + 1, round + 1);
		if (server) {
			memcpy(out, memory, bytes);
		} else if (memcmp(out, memory, bytes)) {
			fprintf(stderr, "round %lu: other bytes come back\n", round);
			return 1;
		}
		/* Before the answer: the next message finds a place. */
		receive(memory, bytes);
		if (server)
			send_message(out, bytes);
	}
	wait_for(&sent, &received, rounds, rounds);
	clock_gettime(CLOCK_MONOTONIC, &end);
	if (!server)
		printf("%lu rounds of %u bytes, %.2f us each way\n", rounds, bytes,
		       ((double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) / 1e3) / (double)rounds / 2);
	/* Both are done before either leaves. */
	must(write(fd, &own, 1) == 1 && read(fd, &peer, 1) == 1, "the other process");
	return 0;
}
