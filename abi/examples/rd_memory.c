/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * RDMA without a connection: a client writes into the memory of a server, reads it back, and counts in it what it has
 * done. The server makes no call meanwhile; it only shows its memory, to who has the job key. See uwarpdv_create_qp(3).
 *
 *	cc -o rd_memory rd_memory.c -libverbs -ldl
 *	uwarp run -- ./rd_memory server ADDRESS [BYTES [ROUNDS]]
 *	uwarp run -- ./rd_memory client ADDRESS [BYTES [ROUNDS]]
 *
 * The two meet over TCP, as programs do with any device. What the server tells there is all that a client needs, and the
 * job key is the secret part of it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <uwarpdv.h>

#define PORT "7473"
#define QKEY 0x11111111

/* What a process must know of another one to use its memory. */
struct place {
	union ibv_gid gid;
	uint64_t job_key, address;
	uint32_t qpn, rkey;
};

static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static struct place peer;

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

/* A queue pair whose messages come in the order of the posts, so that what is read back is what was written. */
static void make_queue_pair(struct ibv_context *context, struct ibv_pd *pd, uint64_t job_key)
{
	struct uwarpdv_qp_init_attr how = { .driver_qp_type = UWARPDV_QPT_RD, .msg_order = UWARPDV_ORDER_ALL,
					    .job_key = job_key };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_DRIVER, .send_cq = cq, .recv_cq = cq, .pd = pd,
		.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	__typeof__(uwarpdv_create_qp) *create = (__typeof__(create))dlsym(RTLD_DEFAULT, "uwarpdv_create_qp");

	must(create != NULL, "this is not uwarp's libibverbs: uwarp run -- ...");
	must((qp = create(context, &init, &how, sizeof how)) != NULL, "uwarpdv_create_qp");
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	attr.qp_state = IBV_QPS_RTR;
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RTS");
}

enum what { WRITE, READ, COUNT };

static void post(enum what what, char *memory, uint32_t bytes, uint64_t at)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(ex);
	ex->wr_id = what;
	ex->wr_flags = IBV_SEND_SIGNALED;
	if (what == WRITE)
		ibv_wr_rdma_write(ex, peer.rkey, peer.address + at);
	else if (what == READ)
		ibv_wr_rdma_read(ex, peer.rkey, peer.address + at);
	else
		ibv_wr_atomic_fetch_add(ex, peer.rkey, peer.address + at, 1);
	ibv_wr_set_ud_addr(ex, ah, peer.qpn, QKEY);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, bytes);
	must(!ibv_wr_complete(ex), "ibv_wr_complete");
}

static void wait_for(int count)
{
	struct ibv_wc done;

	while (count > 0) {
		int polled = ibv_poll_cq(cq, 1, &done);

		must(polled >= 0, "ibv_poll_cq");
		if (polled && done.status) {
			fprintf(stderr, "request %d failed: %s\n", (int)done.wr_id, ibv_wc_status_str(done.status));
			exit(1);
		}
		count -= polled;
	}
}

int main(int argc, char **argv)
{
	uint32_t bytes = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 0) : 64;
	unsigned long rounds = argc > 4 ? strtoul(argv[4], NULL, 0) : 1000;
	int server = argc > 2 && !strcmp(argv[1], "server"), fd;
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	struct ibv_device **devices;
	struct ibv_context *context;
	struct timespec begin, end;
	struct ibv_pd *pd;
	struct place own;
	uint64_t *memory;
	char *data, word;

	if (argc < 3) {
		fprintf(stderr, "usage: %s server|client ADDRESS [BYTES [ROUNDS]]\n", argv[0]);
		return 2;
	}
	must((devices = ibv_get_device_list(NULL)) && devices[0], "no device");
	must((context = ibv_open_device(devices[0])) != NULL, "ibv_open_device");
	must((pd = ibv_alloc_pd(context)) != NULL, "ibv_alloc_pd");
	must((cq = ibv_create_cq(context, 16, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	/* The counter, what is written, and what is read. */
	must((memory = calloc(1, 8 + 2 * (size_t)bytes)) != NULL, "calloc");
	data = (char *)(memory + 1);
	must((mr = ibv_reg_mr(pd, memory, 8 + 2 * (size_t)bytes,
			      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)) != NULL,
	     "ibv_reg_mr");
	must(!ibv_query_gid(context, 1, 0, &own.gid), "ibv_query_gid");
	fd = meet(server, argv[2]);
	if (server) {
		must(getrandom(&own.job_key, sizeof own.job_key, 0) == sizeof own.job_key, "getrandom");
		make_queue_pair(context, pd, own.job_key);
		own.address = (uintptr_t)memory;
		own.qpn = qp->qp_num;
		own.rkey = mr->rkey;
		must(write(fd, &own, sizeof own) == sizeof own, "write");
		/* The client says that it has done. */
		must(read(fd, &word, 1) == 1, "the client has gone");
		printf("%llu rounds are counted here, and this process made no call for them\n", (unsigned long long)*memory);
		return *memory == rounds ? 0 : 1;
	}
	must(recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer, "recv");
	make_queue_pair(context, pd, peer.job_key);
	to.grh.dgid = peer.gid;
	must((ah = ibv_create_ah(pd, &to)) != NULL, "ibv_create_ah");
	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned long round = 0; round < rounds; round++) {
		for (uint32_t i = 0; i < bytes; i++)
			data[i] = (char)(i * 31 + i / 251 + round * 7);
		post(WRITE, data, bytes, 8);
		post(READ, data + bytes, bytes, 8);
		wait_for(2);
		if (memcmp(data, data + bytes, bytes)) {
			fprintf(stderr, "round %lu: what was read is not what was written\n", round);
			return 1;
		}
		post(COUNT, (char *)memory, 8, 0);
		wait_for(1);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%lu rounds of %u bytes, %.2f us for a Write, a Read and an atomic operation\n", rounds, bytes,
	       ((double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) / 1e3) / (double)(rounds ? rounds : 1));
	must(write(fd, "", 1) == 1, "write");
	return 0;
}
