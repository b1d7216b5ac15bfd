/* An unreliable connection over a network that loses packets, between two processes that find each other over a TCP
 * connection of their own. What completes must be whole, with the right bytes, in the order of sending, and take the
 * receives in their order; and some must be lost.
 *
 *	unreliable_loss server|client ADDRESS PORT LENGTH COUNT */
#include <sys/socket.h>

#include "common.h"

/* Messages between two words of the client: fewer than receives, so that none lacks one. */
#define BATCH 8
#define RECEIVES 16
#define PSN 0x654321u

static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
/* The server's: a place for each receive, then one for each Write of a batch. */
static unsigned char *memory;
static uint32_t length, count;

struct name {
	union ibv_gid gid;
	uint32_t qpn, rkey;
	uint64_t memory;
};

static unsigned char byte_of(uint32_t message, uint32_t at)
{
	return (unsigned char)(at * 7 + at / 251 + message * 31);
}

static void fill(unsigned char *place, uint32_t message)
{
	for (uint32_t i = 0; i < length; i++)
		place[i] = byte_of(message, i);
}

static bool is_whole(const unsigned char *place, uint32_t message)
{
	for (uint32_t i = 0; i < length; i++)
		if (place[i] != byte_of(message, i))
			return false;
	return true;
}

static int socket_to(const char *role, const char *host, const char *port)
{
	struct sockaddr_storage ss = sockaddr_of(host, (uint16_t)atoi(port));
	socklen_t len = ss.ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
	int fd = socket(ss.ss_family, SOCK_STREAM, 0), one = 1, accepted;

	MUST(fd >= 0);
	if (strcmp(role, "client") == 0) {
		MUST(connect(fd, (struct sockaddr *)&ss, len) == 0);
		return fd;
	}
	MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
	MUST(bind(fd, (struct sockaddr *)&ss, len) == 0 && listen(fd, 1) == 0);
	MUST((accepted = accept(fd, NULL, NULL)) >= 0);
	close(fd);
	return accepted;
}

static void receive(uint32_t id)
{
	struct ibv_sge sge = sge_of(mr, (size_t)(id % RECEIVES) * length, length);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(qp, &wr, &bad) == 0);
}

/* Returns the peer's name, with both queue pairs in RTS. */
static struct name open_qp(int fd)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = BATCH, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UC, .sq_sig_all = 1,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct name own = { 0 }, peer;
	struct ibv_context *ctx;
	struct ibv_pd *pd;

	MUST(list && list[0] && (ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(pd = ibv_alloc_pd(ctx));
	MUST(cq = init.send_cq = init.recv_cq = ibv_create_cq(ctx, 64, NULL, NULL, 0));
	MUST(memory = calloc(RECEIVES + BATCH, length));
	MUST(mr = ibv_reg_mr(pd, memory, (size_t)(RECEIVES + BATCH) * length, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(ibv_query_gid(ctx, 1, 0, &own.gid) == 0);
	own.qpn = qp->qp_num;
	own.rkey = mr->rkey;
	own.memory = (uintptr_t)memory + (uint64_t)RECEIVES * length;
	MUST(write(fd, &own, sizeof own) == sizeof own);
	MUST(recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer);
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer.qpn, .rq_psn = PSN,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer.gid, .hop_limit = 7 } },
	};
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = PSN };
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	return peer;
}

static void serve(int fd)
{
	uint32_t next_receive = RECEIVES, taken = 0, writes = 0, end = 0, wrong = 0;
	int64_t last = -1;
	struct ibv_wc wc;
	char word;

	for (uint32_t i = 0; i < RECEIVES; i++)
		receive(i);
	MUST(write(fd, "", 1) == 1);
	while (end < count) {
		/* When the client has sent a batch, what has not come a moment later is lost. */
		bool is_over = recv(fd, &word, 1, MSG_DONTWAIT) == 1;

		while (poll_within(cq, &wc, is_over ? 20 : 1)) {
			uint32_t message = ntohl(wc.imm_data);
			unsigned char *place = memory + (size_t)(wc.wr_id % RECEIVES) * length;

			if (wc.status != IBV_WC_SUCCESS)
				die("%s", ibv_wc_status_str(wc.status));
			if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
				place = memory + (size_t)(RECEIVES + message % BATCH) * length;
				writes++;
			}
			wrong += wc.wr_id != taken || (int64_t)message <= last || wc.byte_len != length || !is_whole(place, message);
			last = message;
			taken++;
			receive(next_receive++);
		}
		if (is_over) {
			end += BATCH;
			MUST(write(fd, "", 1) == 1);
		}
	}
	check(wrong == 0, "every message that completed is whole, the right one, and in its turn", "%u of %u are not", wrong, taken);
	check(taken < count, "messages were lost", "all have come");
	check(writes > 0 && writes < taken, "Sends and Writes have come", "%u of %u are Writes", writes, taken);
	printf("# %u of %u messages of %u bytes came, %u of them Writes\n", taken, count, length, writes);
}

static void send_all(int fd, struct name peer)
{
	uint32_t failed = 0;
	char word;

	MUST(read(fd, &word, 1) == 1);
	for (uint32_t message = 0; message < count; message++) {
		uint32_t slot = message % BATCH;
		struct ibv_sge sge = sge_of(mr, (size_t)slot * length, length);
		struct ibv_send_wr wr = {
			.wr_id = message, .sg_list = &sge, .num_sge = 1, .imm_data = htonl(message),
			.opcode = message % 2 ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
			.wr.rdma = { .remote_addr = peer.memory + (uint64_t)slot * length, .rkey = peer.rkey },
		}, *bad;

		fill(memory + (size_t)slot * length, message);
		MUST(ibv_post_send(qp, &wr, &bad) == 0);
		if (slot + 1 < BATCH)
			continue;
		for (uint32_t i = 0; i < BATCH; i++) {
			struct ibv_wc wc = poll_one(cq);

			failed += wc.status != IBV_WC_SUCCESS || wc.wr_id != message + 1 - BATCH + i;
		}
		MUST(write(fd, "", 1) == 1 && read(fd, &word, 1) == 1);
	}
	check(failed == 0, "all have left, in the order of posting", "%u have not", failed);
}

int main(int argc, char **argv)
{
	struct name peer;
	int fd;

	if (argc != 6)
		return 2;
	length = (uint32_t)atoi(argv[4]);
	count = (uint32_t)atoi(argv[5]) / BATCH * BATCH;
	fd = socket_to(argv[1], argv[2], argv[3]);
	peer = open_qp(fd);
	if (strcmp(argv[1], "server") == 0)
		serve(fd);
	else
		send_all(fd, peer);
	MUST(ibv_destroy_qp(qp) == 0);
	return failures ? 1 : 0;
}
