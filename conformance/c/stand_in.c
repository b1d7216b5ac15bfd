/* Connections of rdma_cm for the number of a datagram queue pair, which takes no connection: UCX makes
 * them for their private data and their end, and connects its own queue pairs beside them by number.
 *
 *	stand_in [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen" */
#include "ends.h"

static struct ibv_qp *dummy(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_UD, .cap = { .max_send_wr = 2, .max_recv_wr = 2, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp;

	MUST(init.send_cq = init.recv_cq = ibv_create_cq(id->verbs, 1, NULL, NULL, 0));
	MUST(qp = ibv_create_qp(id->pd, &init));
	return qp;
}

static void dummy_close(struct ibv_qp *qp)
{
	struct ibv_cq *cq = qp->send_cq;

	MUST(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0);
}

struct link {
	struct pair p;
	struct ibv_qp *client, *server;
};

static struct rdma_conn_param param_of(struct ibv_qp *qp, const char *data)
{
	return (struct rdma_conn_param){
		.qp_num = qp->qp_num, .private_data = data, .private_data_len = (uint8_t)(strlen(data) + 1),
		.retry_count = 7, .rnr_retry_count = 7, .responder_resources = 1, .initiator_depth = 1,
	};
}

static void take(struct rdma_event_channel *ch, enum rdma_cm_event_type type, const char *data, uint32_t number,
		 const char *name, struct rdma_cm_id **id)
{
	struct rdma_cm_event *event;
	bool good;

	if (!readable(ch->fd, LIMIT_MS))
		die("no rdma_cm event: %s", name);
	MUST(rdma_get_cm_event(ch, &event) == 0);
	good = event->event == type;
	if (good && data)
		good = event->param.conn.private_data && !strcmp(event->param.conn.private_data, data) &&
		       event->param.conn.qp_num == number;
	check(good, name, "%s (%d), number %u", rdma_event_str(event->event), event->status, event->param.conn.qp_num);
	if (id)
		*id = event->id;
	MUST(rdma_ack_cm_event(event) == 0);
}

static void link_open(struct link *l)
{
	struct rdma_conn_param param;

	memset(l, 0, sizeof *l);
	listen_somewhere(&l->p);
	resolve(&l->p);
	l->client = dummy(l->p.c.id);
	param = param_of(l->client, "request");
	check(rdma_connect(l->p.c.id, &param) == 0, "connect for a datagram queue pair", "errno %d", errno);
	take(l->p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST, "request", l->client->qp_num, "the request names its number", &l->p.s.id);
	l->server = dummy(l->p.s.id);
	param = param_of(l->server, "reply");
	check(rdma_accept(l->p.s.id, &param) == 0, "accept for another", "errno %d", errno);
	take(l->p.c.ch, RDMA_CM_EVENT_CONNECT_RESPONSE, "reply", l->server->qp_num, "the reply names that one's", NULL);
	check(!readable(l->p.s.ch->fd, QUIET_MS), "it is not established yet", "it is");
	check(rdma_establish(l->p.c.id) == 0, "establish", "errno %d", errno);
	take(l->p.s.ch, RDMA_CM_EVENT_ESTABLISHED, NULL, 0, "ESTABLISHED at the other end", NULL);
}

static void link_close(struct link *l)
{
	dummy_close(l->client);
	dummy_close(l->server);
	MUST(rdma_destroy_id(l->p.c.id) == 0 && rdma_destroy_id(l->p.s.id) == 0 && rdma_destroy_id(l->p.listener) == 0);
	rdma_destroy_event_channel(l->p.c.ch);
	rdma_destroy_event_channel(l->p.s.ch);
}

static void connecting(void)
{
	struct end a = { 0 }, b = { 0 };
	struct link l;

	link_open(&l);
	open_device();
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	end_receive(&b, 1, 64);
	end_submit(&a, &b, IBV_WR_SEND, 2, 64);
	want_wc(b.rcq, IBV_WC_SUCCESS, "queue pairs connected by number beside it work");
	check(l.client->state == IBV_QPS_RESET, "the datagram queue pair stays as it is", "%d", l.client->state);
	check(rdma_disconnect(l.p.c.id) == 0, "disconnect", "errno %d", errno);
	take(l.p.s.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "DISCONNECTED at the other end", NULL);
	MUST(rdma_disconnect(l.p.s.id) == 0);
	take(l.p.c.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "and here", NULL);
	end_receive(&b, 3, 64);
	end_submit(&a, &b, IBV_WR_SEND, 4, 64);
	want_wc(b.rcq, IBV_WC_SUCCESS, "the others still work");
	link_close(&l);
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

/* The end that disconnects hears of it when the other program has disconnected, too, as over InfiniBand: what
 * that one has posted before has been received by then. (UCX closes its own queue pairs on this event.) */
static void answered(void)
{
	struct end a = { 0 }, b = { 0 };
	struct pair p;
	struct link l;

	link_open(&l);
	open_device();
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	MUST(rdma_disconnect(l.p.c.id) == 0);
	take(l.p.s.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "DISCONNECTED at the other end", NULL);
	check(!readable(l.p.c.ch->fd, QUIET_MS), "but not yet here", "it is");
	end_submit(&b, &a, IBV_WR_RDMA_WRITE, 1, 64);
	MUST(rdma_disconnect(l.p.s.id) == 0);
	take(l.p.c.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "after the other end's rdma_disconnect", NULL);
	MUST(ibv_destroy_qp(a.qp) == 0);
	want_wc(b.scq, IBV_WC_SUCCESS, "a Write from before that has succeeded");
	link_close(&l);

	pair_open(&p);
	MUST(rdma_disconnect(p.c.id) == 0);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	check(!readable(p.c.ch->fd, QUIET_MS), "nor with a queue pair of the id's", "it is");
	rdma_destroy_qp(p.s.id);
	take(p.c.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "that is destroyed: this answers, too", NULL);

	pair_open(&p);
	MUST(rdma_disconnect(p.c.id) == 0);
	take(p.c.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "the other program does nothing: after a time", NULL);
	pair_close(&p);
}

static void leaving(void)
{
	struct link l;

	link_open(&l);
	dummy_close(l.client);
	check(rdma_destroy_id(l.p.c.id) == 0, "an id is destroyed without a word", "errno %d", errno);
	take(l.p.s.ch, RDMA_CM_EVENT_DISCONNECTED, NULL, 0, "DISCONNECTED at the other end", NULL);
	dummy_close(l.server);
	MUST(rdma_destroy_id(l.p.s.id) == 0 && rdma_destroy_id(l.p.listener) == 0);
}

static void rejecting(void)
{
	struct rdma_conn_param param;
	struct pair p = { 0 };
	struct ibv_qp *qp;

	listen_somewhere(&p);
	resolve(&p);
	qp = dummy(p.c.id);
	param = param_of(qp, "request");
	MUST(rdma_connect(p.c.id, &param) == 0);
	take(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST, "request", qp->qp_num, "a request", &p.s.id);
	MUST(rdma_reject(p.s.id, "no", 3) == 0);
	take(p.c.ch, RDMA_CM_EVENT_REJECTED, NULL, 0, "that is rejected", NULL);
	dummy_close(qp);
	MUST(rdma_destroy_id(p.c.id) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "connecting", connecting }, { "answered", answered }, { "leaving", leaving }, { "rejecting", rejecting },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
