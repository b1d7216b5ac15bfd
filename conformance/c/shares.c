/* One end of connections that may share memory, in a process that others must not look into, from one connection on.
 *
 *	shares serve|connect PORT [COUNT [UNDUMPABLE]]
 *
 * Makes COUNT connections (1), one after the other, and is not dumpable (PR_SET_DUMPABLE) any more before the one of the
 * number UNDUMPABLE. Sends over each of them until it is stopped, so that `uwarp stat` shows them. */
#include "common.h"

#include <sys/auxv.h>
#include <sys/prctl.h>

#define MOST 4

static struct ibv_mr *regions[MOST];
static char words[MOST][2][64];

/* A message each way. */
static void talk(struct side *side, int i)
{
	struct ibv_sge from = sge_of(regions[i], 0, 64), into = sge_of(regions[i], 64, 64);

	MUST(post_recv(side, &into, 1, 1) == 0);
	MUST(post(side, IBV_WR_SEND, IBV_SEND_SIGNALED, &from, 1, 0, 0, 2) == 0);
	MUST(poll_one(side->scq).status == IBV_WC_SUCCESS && poll_one(side->rcq).status == IBV_WC_SUCCESS);
}

static void connect_to(struct side *side, uint16_t port)
{
	struct rdma_conn_param param = { .retry_count = 7, .rnr_retry_count = 7 };
	struct sockaddr_storage ss = sockaddr_of(address, port);
	struct options o = { 0 };

	MUST(rdma_create_id(side->ch, &side->id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(side->id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	must_event(side->ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(rdma_resolve_route(side->id, 2000) == 0);
	must_event(side->ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
	side_resources(side, &o);
	MUST(rdma_connect(side->id, &param) == 0);
}

static void accept_one(struct side *side)
{
	struct rdma_conn_param param = { .rnr_retry_count = 7 };
	struct options o = { 0 };

	side->id = must_event(side->ch, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	side_resources(side, &o);
	MUST(rdma_accept(side->id, &param) == 0);
}

int main(int argc, char **argv)
{
	bool serves = argc > 2 && strcmp(argv[1], "serve") == 0;
	uint16_t port = (uint16_t)(argc > 2 ? atoi(argv[2]) : 0);
	int count = argc > 3 ? atoi(argv[3]) : 1, undumpable = argc > 4 ? atoi(argv[4]) : 0;
	struct sockaddr_storage ss = sockaddr_of(address, port);
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_cm_id *listener;
	struct side sides[MOST] = { 0 };

	MUST(ch && port && count <= MOST);
	printf("AT_SECURE %lu\n", getauxval(AT_SECURE));
	fflush(stdout);
	for (int i = 0; i < count; i++) {
		MUST(i + 1 != undumpable || prctl(PR_SET_DUMPABLE, 0) == 0);
		if (serves && i == 0) {
			MUST(rdma_create_id(ch, &listener, NULL, RDMA_PS_TCP) == 0);
			MUST(rdma_bind_addr(listener, (struct sockaddr *)&ss) == 0 && rdma_listen(listener, 8) == 0);
		}
		/* Each has become what the other one will meet. */
		if (i > 0)
			talk(&sides[i - 1], i - 1);
		sides[i].ch = ch;
		if (serves)
			accept_one(&sides[i]);
		else
			connect_to(&sides[i], port);
		must_event(ch, RDMA_CM_EVENT_ESTABLISHED);
		MUST(regions[i] = ibv_reg_mr(sides[i].pd, words[i], sizeof words[i], IBV_ACCESS_LOCAL_WRITE));
		talk(&sides[i], i);
	}
	printf("ok connected\n");
	fflush(stdout);
	for (;;) {
		for (int i = 0; i < count; i++)
			talk(&sides[i], i);
		usleep(10000);
	}
}
