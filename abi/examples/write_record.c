/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * RDMA Write-Record: a client writes frames into the memory of a server, which posts no receive and learns from records which
 * bytes have come. Over unreliable datagrams (ud) some may be lost, over reliable ones (rd) none. See uwarpdv_create_qp(3).
 *
 *	cc -o write_record write_record.c -libverbs -ldl
 *	uwarp run -- ./write_record server ADDRESS [ud|rd [BYTES [FRAMES]]]
 *	uwarp run -- ./write_record client ADDRESS [ud|rd [BYTES [FRAMES]]]
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

#define PORT "7474"
#define QKEY 0x11111111
#define RECORDS 256
/* Bytes of one frame over unreliable datagrams. */
#define MOST (1u << 20)
/* Without flow control, a sender gives a receiver some time. */
#define UNDER_WAY 8

/* What a process must know of another one to write to its memory. */
struct place {
	union ibv_gid gid;
	uint64_t job_key, address;
	uint32_t qpn, rkey;
};

static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;

static void must(int good, const char *what)
{
	if (!good) {
		perror(what);
		exit(1);
	}
}

static void *find(const char *name)
{
	void *function = dlsym(RTLD_DEFAULT, name);

	must(function != NULL, "this is not uwarp's libibverbs: uwarp run -- ...");
	return function;
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

static void make_queue_pair(struct ibv_context *context, struct ibv_pd *pd, int reliable, uint64_t job_key)
{
	struct uwarpdv_qp_init_attr how = { .driver_qp_type = reliable ? UWARPDV_QPT_RD : 0, .job_key = job_key,
					    .max_records = RECORDS };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = reliable ? IBV_QPT_DRIVER : IBV_QPT_UD, .send_cq = cq, .recv_cq = cq, .pd = pd,
		.cap = { .max_send_wr = UNDER_WAY, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	__typeof__(uwarpdv_create_qp) *create = find("uwarpdv_create_qp");

	must((qp = create(context, &init, &how, sizeof how)) != NULL, "uwarpdv_create_qp");
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY), "to INIT");
	attr.qp_state = IBV_QPS_RTR;
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE), "to RTR");
	attr.qp_state = IBV_QPS_RTS;
	attr.rnr_retry = 7;		/* while all records of the peer are taken, as often as it takes */
	must(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | (reliable ? IBV_QP_RNR_RETRY : IBV_QP_SQ_PSN)), "to RTS");
}

static char byte_of(uint32_t at, uint32_t frame)
{
	return (char)(at * 31 + at / 251 + frame * 7);
}

/* Writes all frames, each to a place of its own. */
static void send_frames(struct ibv_pd *pd, int fd, struct place peer, char *memory, uint32_t bytes, uint32_t frames)
{
	__typeof__(uwarpdv_wr_rdma_write_record) *write_record = find("uwarpdv_wr_rdma_write_record");
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer.gid, .hop_limit = 64 } };
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	uint32_t posted = 0, done = 0;
	struct ibv_ah *ah;
	struct ibv_wc wc;

	must((ah = ibv_create_ah(pd, &to)) != NULL, "ibv_create_ah");
	while (done < frames) {
		if (posted < frames && posted - done < UNDER_WAY) {
			char *frame = memory + (size_t)posted * bytes;

			for (uint32_t i = 0; i < bytes; i++)
				frame[i] = byte_of(i, posted);
			ibv_wr_start(ex);
			ex->wr_id = posted;
			ex->wr_flags = IBV_SEND_SIGNALED;
			write_record(ex, peer.rkey, peer.address + (uint64_t)posted * bytes, htonl(posted));
			ibv_wr_set_ud_addr(ex, ah, peer.qpn, QKEY);
			ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)frame, bytes);
			must(!ibv_wr_complete(ex), "ibv_wr_complete");
			posted++;
		}
		if (ibv_poll_cq(cq, 1, &wc) == 0)
			continue;
		if (wc.status) {
			fprintf(stderr, "frame %d: %s\n", (int)wc.wr_id, ibv_wc_status_str(wc.status));
			exit(1);
		}
		done++;
	}
	must(write(fd, "", 1) == 1, "write");
	printf("%u frames of %u bytes have left\n", frames, bytes);
}

/* Takes what comes, until the client has done and nothing more does. Returns whether all that is valid is right. (Of long
 * frames over unreliable datagrams, none may come whole.) */
static int take_frames(int fd, const char *memory, uint32_t bytes, uint32_t frames, int reliable)
{
	__typeof__(uwarpdv_get_record) *get_record = find("uwarpdv_get_record");
	__typeof__(uwarpdv_free_record) *free_record = find("uwarpdv_free_record");
	struct uwarpdv_range ranges[UWARPDV_RANGES_MOST];
	unsigned long whole = 0, partly = 0, valid = 0, wrong = 0;
	struct uwarpdv_record record;
	struct timespec now, last = { 0 };
	struct ibv_wc wc;
	uint32_t count;
	char word;

	while (whole + partly < frames) {
		if (ibv_poll_cq(cq, 1, &wc) == 0) {
			clock_gettime(CLOCK_MONOTONIC, &now);
			if (!last.tv_sec && recv(fd, &word, 1, MSG_DONTWAIT) == 1)
				last = now;
			/* A record of which a part is missing is complete a tenth of a second later. */
			if (last.tv_sec && now.tv_sec > last.tv_sec + 1)
				break;
			continue;
		}
		must(wc.status == IBV_WC_SUCCESS && wc.opcode == UWARPDV_WC_RECORD, "another completion");
		count = UWARPDV_RANGES_MOST;
		must(!get_record(qp, wc.wr_id, &record, sizeof record, ranges, &count), "uwarpdv_get_record");
		for (uint32_t k = 0; k < count; k++)
			for (uint32_t i = ranges[k].offset; i < ranges[k].offset + ranges[k].length; i++)
				wrong += memory[record.addr - (uintptr_t)memory + i] != byte_of(i, ntohl(record.imm_data));
		must(!free_record(qp, wc.wr_id), "uwarpdv_free_record");
		valid += wc.byte_len;
		whole += wc.byte_len == bytes;
		partly += wc.byte_len != bytes;
	}
	printf("%lu frames came whole, %lu in part, of %u; %lu bytes are valid, %lu of them wrong\n", whole, partly, frames, valid,
	       wrong);
	return !wrong && (valid || !bytes) && (!reliable || whole == frames);
}

int main(int argc, char **argv)
{
	int server = argc > 2 && !strcmp(argv[1], "server"), reliable = argc > 3 && !strcmp(argv[3], "rd"), fd;
	uint32_t bytes = argc > 4 ? (uint32_t)strtoul(argv[4], NULL, 0) : 65536;
	uint32_t frames = argc > 5 ? (uint32_t)strtoul(argv[5], NULL, 0) : 1000;
	struct ibv_device **devices;
	struct ibv_context *context;
	struct place place;
	struct ibv_pd *pd;
	char *memory;

	if (argc < 3 || (argc > 3 && !reliable && strcmp(argv[3], "ud")) || (!reliable && bytes > MOST)) {
		fprintf(stderr, "usage: %s server|client ADDRESS [ud|rd [BYTES [FRAMES]]]; by ud at most %u bytes\n", argv[0], MOST);
		return 2;
	}
	must((devices = ibv_get_device_list(NULL)) && devices[0], "no device");
	must((context = ibv_open_device(devices[0])) != NULL, "ibv_open_device");
	must((pd = ibv_alloc_pd(context)) != NULL, "ibv_alloc_pd");
	must((cq = ibv_create_cq(context, UNDER_WAY + RECORDS, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	must((memory = calloc(frames, bytes)) != NULL, "calloc");
	must((mr = ibv_reg_mr(pd, memory, (size_t)frames * bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)) != NULL,
	     "ibv_reg_mr");
	fd = meet(server, argv[2]);
	if (!server) {
		must(recv(fd, &place, sizeof place, MSG_WAITALL) == sizeof place, "recv");
		make_queue_pair(context, pd, reliable, place.job_key);
		send_frames(pd, fd, place, memory, bytes, frames);
		return 0;
	}
	must(!ibv_query_gid(context, 1, 0, &place.gid), "ibv_query_gid");
	must(getrandom(&place.job_key, sizeof place.job_key, 0) == sizeof place.job_key, "getrandom");
	make_queue_pair(context, pd, reliable, place.job_key);
	place.address = (uintptr_t)memory;
	place.qpn = qp->qp_num;
	place.rkey = mr->rkey;
	must(write(fd, &place, sizeof place) == sizeof place, "write");
	return !take_frames(fd, memory, bytes, frames, reliable);
}
