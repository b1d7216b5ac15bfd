/* What the C programs of reliable datagrams share: a queue pair with memory of its own, and another process that has one, too. */
#ifndef UWARP_CONFORMANCE_RELIABLE_H
#define UWARP_CONFORMANCE_RELIABLE_H

#include <dlfcn.h>
#include <sys/socket.h>

#include "common.h"
#include "../../abi/include/uwarpdv.h"

#define QKEY 0x11111111u
#define ROOM (4u << 20)
#define DEPTH 256

static __typeof__(uwarpdv_create_qp) *create_qp;
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static union ibv_gid own_gid;

/* Received messages come into the lower half of its memory, what is sent stands in the upper one. */
struct end {
	struct ibv_qp *qp;
	struct ibv_cq *scq, *rcq;
	struct ibv_mr *mr;
	unsigned char *memory;
	struct ibv_ah *ah;
};

/* How it is made. */
struct how {
	uint64_t order;
	uint32_t flags;
	struct ibv_srq *srq;
	int rnr_retry;		/* 7; -1: none */
	int channel;		/* of the receives' queue */
	uint64_t job_key;
	int access;		/* of its memory, beside IBV_ACCESS_LOCAL_WRITE */
};

static inline void open_device(void)
{
	struct ibv_device **list;

	MUST(create_qp = (__typeof__(create_qp))dlvsym(RTLD_DEFAULT, "uwarpdv_create_qp", "UWARPDV_1.0"));
	MUST(list = ibv_get_device_list(NULL));
	MUST(list[0] && (ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(pd = ibv_alloc_pd(ctx));
	MUST(ibv_query_gid(ctx, 1, 0, &own_gid) == 0);
}

static inline struct ibv_ah *handle_of(union ibv_gid gid)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } };

	return ibv_create_ah(pd, &attr);
}

static inline void up(struct ibv_qp *qp, int rnr_retry)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };

	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .min_rnr_timer = 1 };
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_MIN_RNR_TIMER) == 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .rnr_retry = (uint8_t)rnr_retry };
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_RNR_RETRY) == 0);
}

static inline struct ibv_qp_init_attr_ex init_of(struct ibv_cq *scq, struct ibv_cq *rcq)
{
	return (struct ibv_qp_init_attr_ex){
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 64 },
		.qp_type = IBV_QPT_DRIVER, .send_cq = scq, .recv_cq = rcq, .pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
	};
}

static inline void end_open(struct end *e, struct how how)
{
	struct uwarpdv_qp_init_attr attr = { .driver_qp_type = UWARPDV_QPT_RD, .flags = how.flags, .msg_order = how.order,
					     .job_key = how.job_key };
	struct ibv_comp_channel *channel = how.channel ? ibv_create_comp_channel(ctx) : NULL;
	struct ibv_qp_init_attr_ex init;

	memset(e, 0, sizeof *e);
	MUST(e->scq = ibv_create_cq(ctx, 2 * DEPTH, NULL, NULL, 0));
	MUST(e->rcq = ibv_create_cq(ctx, 2 * DEPTH, e, channel, 0));
	MUST(e->memory = calloc(2, ROOM));
	MUST(e->mr = ibv_reg_mr(pd, e->memory, 2 * ROOM, IBV_ACCESS_LOCAL_WRITE | how.access));
	MUST(e->ah = handle_of(own_gid));
	init = init_of(e->scq, e->rcq);
	init.srq = how.srq;
	MUST(e->qp = create_qp(ctx, &init, &attr, sizeof attr));
	up(e->qp, how.rnr_retry < 0 ? 0 : or(how.rnr_retry, 7));
}

static inline void end_close(struct end *e)
{
	struct ibv_comp_channel *channel = e->rcq->channel;

	MUST(!e->qp || ibv_destroy_qp(e->qp) == 0);
	MUST(ibv_destroy_ah(e->ah) == 0);
	MUST(ibv_dereg_mr(e->mr) == 0);
	MUST(ibv_destroy_cq(e->scq) == 0 && ibv_destroy_cq(e->rcq) == 0);
	MUST(!channel || ibv_destroy_comp_channel(channel) == 0);
	free(e->memory);
}

static inline unsigned char *outgoing(struct end *e)
{
	return e->memory + ROOM;
}

static inline void receive_at(struct end *e, uint64_t id, size_t at, uint32_t length)
{
	struct ibv_sge sge = sge_of(e->mr, at, length);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(e->qp, &wr, &bad) == 0);
}

/* Bytes of the upper half go to a queue pair. */
static inline int send_at(struct end *e, struct ibv_ah *ah, uint32_t qpn, uint64_t id, size_t at, uint32_t length)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(e->qp);

	ibv_wr_start(ex);
	ex->wr_id = id;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, ah, qpn, QKEY);
	ibv_wr_set_sge(ex, e->mr->lkey, (uintptr_t)(outgoing(e) + at), length);
	return ibv_wr_complete(ex);
}

static inline void send_to(struct end *e, uint32_t qpn, uint64_t id, size_t at, uint32_t length)
{
	int error = send_at(e, e->ah, qpn, id, at, length);

	if (error)
		die("post: %d", error);
}

/* Another process. */
struct other {
	pid_t pid;
	int fd;
};

static inline uint32_t hear(int fd)
{
	uint32_t word;

	if (read(fd, &word, sizeof word) != sizeof word)
		die("the other process says nothing");
	return word;
}

static inline void say(int fd, uint32_t word)
{
	MUST(write(fd, &word, sizeof word) == sizeof word);
}

/* Starts a process that runs `what` and exits. To be called before the device is opened. */
static inline struct other start(void (*what)(int fd))
{
	struct other other;
	int fds[2];

	MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
	fflush(stdout);
	MUST((other.pid = fork()) >= 0);
	if (other.pid == 0) {
		close(fds[0]);
		what(fds[1]);
		exit(failures ? 1 : 0);
	}
	close(fds[1]);
	other.fd = fds[0];
	return other;
}

static inline void join(struct other other, const char *name)
{
	int status;

	MUST(waitpid(other.pid, &status, 0) == other.pid);
	check(WIFEXITED(status) && WEXITSTATUS(status) == 0, name, "status %#x", status);
	close(other.fd);
}

#endif
