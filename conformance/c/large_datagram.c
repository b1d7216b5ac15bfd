/* One datagram of 60,000 bytes each way, between two processes that find each other through rdma_cm's
 * datagrams: larger than any port's MTU, by uwarpdv.h. Each byte is checked at both ends.
 *
 *	large_datagram server|client ADDRESS PORT */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "common.h"
#include "../../abi/include/uwarpdv.h"

#define SIZE 60000
#define GRH 40

static struct ibv_cq *cq;
static struct ibv_mr *mr;
/* What is received, behind the room for its header, and what is sent. */
static unsigned char memory[GRH + 2 * SIZE], *const sent = memory + GRH + SIZE;

static unsigned char byte_of(int server, uint32_t at)
{
	return (unsigned char)((at * 7 + at / 251 + (server ? 100 : 0)) & 0xFF);
}

static void make_pair(struct rdma_cm_id *id)
{
	struct uwarpdv_qp_attr more = { .comp_mask = UWARPDV_QP_MAX_MESSAGE, .max_message = SIZE };
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_UD, .sq_sig_all = 1,
	};
	struct ibv_sge place = { .addr = (uintptr_t)memory, .length = GRH + SIZE };
	struct ibv_recv_wr receive = { .sg_list = &place, .num_sge = 1 }, *bad;
	__typeof__(uwarpdv_modify_qp) *modify;

	MUST(modify = (__typeof__(modify))dlsym(RTLD_DEFAULT, "uwarpdv_modify_qp"));
	MUST(cq = ibv_create_cq(id->verbs, 2, NULL, NULL, 0));
	init.send_cq = init.recv_cq = cq;
	MUST(rdma_create_qp(id, NULL, &init) == 0);
	MUST(modify(id->qp, &more, sizeof more) == 0);
	MUST(mr = ibv_reg_mr(id->qp->pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE));
	place.lkey = mr->lkey;
	MUST(ibv_post_recv(id->qp, &receive, &bad) == 0);
}

static void send_it(struct rdma_cm_id *id, int server, struct ibv_ah *ah, uint32_t qpn)
{
	struct ibv_sge what = { .addr = (uintptr_t)sent, .length = SIZE, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &what, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	for (uint32_t at = 0; at < SIZE; at++)
		sent[at] = byte_of(server, at);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = qpn;
	wr.wr.ud.remote_qkey = RDMA_UDP_QKEY;
	MUST(ibv_post_send(id->qp, &wr, &bad) == 0);
}

static void check_received(struct ibv_wc wc, int from_server)
{
	uint32_t wrong = 0;

	check(wc.byte_len == GRH + SIZE, "60,000 bytes and the header", "%u", wc.byte_len);
	while (wrong < SIZE && memory[GRH + wrong] == byte_of(from_server, wrong))
		wrong++;
	check(wrong == SIZE, "every byte as it was sent", "byte %u is another", wrong);
}

/* Both come in either order on the one queue. */
static struct ibv_wc both(void)
{
	struct ibv_wc first = want_wc(cq, IBV_WC_SUCCESS, "a completion");
	struct ibv_wc second = want_wc(cq, IBV_WC_SUCCESS, "the other one");

	return first.opcode == IBV_WC_RECV ? first : second;
}

static void serve(struct rdma_event_channel *ch, struct rdma_cm_id *listener, struct sockaddr *own)
{
	struct rdma_conn_param param = { 0 };
	struct ibv_ah_attr back;
	struct rdma_cm_id *id;
	struct ibv_ah *ah;
	struct ibv_wc wc;

	MUST(rdma_bind_addr(listener, own) == 0 && rdma_listen(listener, 1) == 0);
	printf("listening\n");
	fflush(stdout);
	id = must_event(ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	make_pair(id);
	param.qp_num = id->qp->qp_num;
	MUST(rdma_accept(id, &param) == 0);
	wc = want_wc(cq, IBV_WC_SUCCESS, "the datagram comes");
	check_received(wc, 0);
	MUST(ibv_init_ah_from_wc(id->verbs, 1, &wc, (struct ibv_grh *)memory, &back) == 0);
	MUST(ah = ibv_create_ah(id->qp->pd, &back));
	send_it(id, 1, ah, wc.src_qp);
	want_wc(cq, IBV_WC_SUCCESS, "the answer goes");
	MUST(ibv_destroy_ah(ah) == 0);
	rdma_destroy_qp(id);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && rdma_destroy_id(id) == 0);
}

static void ask(struct rdma_event_channel *ch, struct rdma_cm_id *id, struct sockaddr *to)
{
	struct rdma_conn_param param = { 0 };
	struct rdma_ud_param peer;
	struct ibv_ah *ah;

	MUST(rdma_resolve_addr(id, NULL, to, 2000) == 0);
	must_event(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(id, 2000) == 0);
	must_event(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	make_pair(id);
	MUST(rdma_connect(id, &param) == 0);
	peer = must_event(ch, RDMA_CM_EVENT_ESTABLISHED).param.ud;
	MUST(ah = ibv_create_ah(id->qp->pd, &peer.ah_attr));
	send_it(id, 0, ah, peer.qp_num);
	check_received(both(), 1);
	MUST(ibv_destroy_ah(ah) == 0);
	rdma_destroy_qp(id);
	MUST(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0);
}

int main(int argc, char **argv)
{
	struct sockaddr_storage address;
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;

	if (argc != 4) {
		fprintf(stderr, "usage: %s server|client ADDRESS PORT\n", argv[0]);
		return 2;
	}
	address = sockaddr_of(argv[2], (uint16_t)atoi(argv[3]));
	MUST(ch = rdma_create_event_channel());
	MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_UDP) == 0);
	(strcmp(argv[1], "server") ? ask : serve)(ch, id, (struct sockaddr *)&address);
	MUST(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(ch);
	return failures ? 1 : 0;
}
