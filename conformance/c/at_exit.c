/* Verbs that a program calls while it ends: in handlers of atexit(3) that it installed before and after its first verb, in a
 * destructor, and in the destructor of a thread's own data. Over adapters all of them work there (MPI_Finalize, C++ objects). Run
 * with UWARP_LOG=trace: the logger keeps a buffer for each thread, and those of the main thread are gone by then.
 *
 *	at_exit			one line per statement: "ok name" or "FAIL name: what was seen" */
#include <pthread.h>

#include "common.h"

static struct ibv_context *context;
static struct pair pair;
static pthread_key_t key;

/* A Read and a Send over a connection, with registered memory of their own and their events. */
static void move(struct pair *p, const char *where)
{
	static char bytes[2][64];
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_mr *from = ibv_reg_mr(p->c.pd, bytes[0], sizeof bytes[0], rights);
	struct ibv_mr *into = ibv_reg_mr(p->s.pd, bytes[1], sizeof bytes[1], rights);
	struct ibv_wc wc = { .status = IBV_WC_GENERAL_ERR };
	struct ibv_sge sge;
	struct ibv_cq *cq = NULL;
	void *data;

	if (!check(from && into, "registration", "%s: %s", where, strerror(errno)))
		return;
	sge = sge_of(from, 0, 64);
	MUST(post(&p->c, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &sge, 1, (uintptr_t)bytes[1], into->rkey, 1) == 0);
	check(poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS, "a Read", "%s: %s", where,
	      ibv_wc_status_str(wc.status));
	sge = sge_of(into, 0, 64);
	MUST(post_recv(&p->s, &sge, 1, 2) == 0);
	MUST(ibv_req_notify_cq(p->s.rcq, 0) == 0);
	sge = sge_of(from, 0, 64);
	MUST(post(&p->c, IBV_WR_SEND, IBV_SEND_SIGNALED, &sge, 1, 0, 0, 3) == 0);
	check(poll_within(p->c.scq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS, "a Send", "%s: %s", where,
	      ibv_wc_status_str(wc.status));
	check(ibv_get_cq_event(p->s.cc, &cq, &data) == 0, "its event", "%s: %s", where, strerror(errno));
	if (cq)
		ibv_ack_cq_events(cq, 1);
	check(poll_within(p->s.rcq, &wc, LIMIT_MS) && wc.status == IBV_WC_SUCCESS, "its receive", "%s: %s", where,
	      ibv_wc_status_str(wc.status));
	MUST(ibv_dereg_mr(from) == 0 && ibv_dereg_mr(into) == 0);
}

/* The same over a new connection, whose events are waited for. */
static void use(const char *where)
{
	struct rdma_cm_event *event;
	struct ibv_device **list;
	struct pair own;
	int count = 0;

	list = ibv_get_device_list(&count);
	if (!check(list && count > 0, where, "no list, %s", strerror(errno)))
		return;
	ibv_free_device_list(list);
	pair_open(&own);
	move(&own, where);
	MUST(rdma_disconnect(own.s.id) == 0);
	if (check(rdma_get_cm_event(own.c.ch, &event) == 0, "an event of rdma_cm", "%s: %s", where, strerror(errno))) {
		check(event->event == RDMA_CM_EVENT_DISCONNECTED, "it is the right one", "%s", rdma_event_str(event->event));
		rdma_ack_cm_event(event);
	}
	pair_close(&own);
	if (pair.c.id)
		move(&pair, "the old connection");
}

static void of_thread(void *data)
{
	(void)data;
	use("in the destructor of a thread's data");
}

static void handler(void)
{
	use("in a handler that was installed after the first verb");
}

static void first_handler(void)
{
	use("in a handler that was installed before any verb");
}

__attribute__((destructor)) static void destructor(void)
{
	use("in a destructor");
	pair_close(&pair);
	check(ibv_close_device(context) == 0, "the device is closed there", "%s", strerror(errno));
	printf("ok to the end\n");
	fflush(stdout);
}

static void *run(void *data)
{
	pthread_setspecific(key, context);
	use("in a thread");
	return data;
}

int main(void)
{
	struct ibv_device **list;
	pthread_t thread;

	atexit(first_handler);
	MUST((list = ibv_get_device_list(NULL)) && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	pair_open(&pair);
	atexit(handler);
	MUST(pthread_key_create(&key, of_thread) == 0);
	MUST(pthread_create(&thread, NULL, run, NULL) == 0 && pthread_join(thread, NULL) == 0);
	use("before the end");
	return 0;
}
