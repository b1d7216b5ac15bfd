/* What happens at a limit: of the device, no descriptors, a completion queue that is full, no receive for
 * a message. */
#include "common.h"

#include <dirent.h>
#include <sys/resource.h>

#define SIZE 4096

struct scene {
	struct pair p;
	uint8_t memory[2][SIZE];
	struct ibv_mr *mr[2];
};

static void scene_open(struct scene *s, struct options o)
{
	pair_open_with(&s->p, o);
	MUST(s->mr[0] = ibv_reg_mr(s->p.c.pd, s->memory[0], SIZE, REMOTE_ALL));
	MUST(s->mr[1] = ibv_reg_mr(s->p.s.pd, s->memory[1], SIZE, REMOTE_ALL));
}

static void scene_close(struct scene *s)
{
	MUST(ibv_dereg_mr(s->mr[0]) == 0);
	MUST(ibv_dereg_mr(s->mr[1]) == 0);
	pair_close(&s->p);
}

/* A message with its receive. */
static bool exchange(struct scene *s)
{
	struct ibv_sge from = sge_of(s->mr[0], 0, 64), to = sge_of(s->mr[1], 0, 64);
	struct ibv_wc sent, received;

	return post_recv(&s->p.s, &to, 1, 1) == 0 &&
	       post(&s->p.c, IBV_WR_SEND, IBV_SEND_SIGNALED, &from, 1, 0, 0, 2) == 0 &&
	       poll_within(s->p.c.scq, &sent, LIMIT_MS) && sent.status == IBV_WC_SUCCESS &&
	       poll_within(s->p.s.rcq, &received, LIMIT_MS) && received.status == IBV_WC_SUCCESS;
}

static int descriptors(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int n = 0;

	MUST(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

static int eaten[4096], meals;

/* Takes all descriptors but `left`. */
static void eat(int left)
{
	while (meals < 4096 && (eaten[meals] = dup(0)) >= 0)
		meals++;
	MUST(errno == EMFILE && meals >= left);
	while (left--)
		close(eaten[--meals]);
}

static void spit(void)
{
	while (meals)
		close(eaten[--meals]);
}

/* Waits until connections that were closed in the background are gone. */
static bool descriptors_become(int want)
{
	uint64_t end = now_ms() + LIMIT_MS;

	while (descriptors() != want && now_ms() < end)
		usleep(10000);
	return descriptors() == want;
}

static void run_out_of_descriptors(void)
{
	struct rlimit limit;
	struct scene bystander, again;
	struct pair p = { 0 };
	struct ibv_comp_channel *cc;
	struct rdma_event_channel *ch;
	struct rdma_cm_event event;
	struct rdma_cm_id *id;
	struct rdma_conn_param param = { .rnr_retry_count = 7 };
	struct options o = { 0 };
	struct ibv_qp_init_attr attr = { .cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	struct ibv_qp *qp;
	int before, rc;

	MUST(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = 256;
	MUST(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	scene_open(&bystander, o);
	before = descriptors();
	listen_somewhere(&p);
	resolve(&p);
	side_resources(&p.c, &o);

	eat(0);
	cc = ibv_create_comp_channel(p.c.id->verbs);
	check_failed(!cc, EMFILE, "ibv_create_comp_channel without descriptors");
	ch = rdma_create_event_channel();
	check_failed(!ch, EMFILE, "rdma_create_event_channel without descriptors");
	rc = rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP);
	check_failed(rc == -1, EMFILE, "rdma_create_id with a channel of its own without descriptors");
	attr.send_cq = p.c.scq;
	attr.recv_cq = p.c.rcq;
	qp = ibv_create_qp(p.c.pd, &attr);
	if (qp) {
		check(ibv_destroy_qp(qp) == 0, "ibv_create_qp needs no descriptor", "");
	} else {
		check_failed(true, EMFILE, "ibv_create_qp without descriptors");
	}
	rc = rdma_connect(p.c.id, &param);
	if (rc == 0) {
		event = take_event(p.c.ch);
		check(event.event == RDMA_CM_EVENT_CONNECT_ERROR && event.status == -EMFILE,
		      "rdma_connect without descriptors", "%s, status %d", rdma_event_str(event.event), event.status);
	} else {
		check_failed(true, EMFILE, "rdma_connect without descriptors");
	}
	check(exchange(&bystander), "a connection that exists works without descriptors", "it does not");
	spit();
	side_close(&p.c);
	rdma_destroy_event_channel(p.c.ch);

	/* One for the client; the listener finds none. */
	resolve(&p);
	side_resources(&p.c, &o);
	eat(1);
	MUST(rdma_connect(p.c.id, &param) == 0);
	check(!readable(p.s.ch->fd, 500), "a connection that cannot be accepted waits", "an event came");
	check(exchange(&bystander), "others work while it waits", "they do not");
	spit();
	event = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.s.id = event.id;
	side_resources(&p.s, &o);
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	check(true, "and is accepted when there are descriptors again", "");
	pair_close(&p);
	scene_open(&again, o);
	check(exchange(&again), "a new connection works", "it does not");
	scene_close(&again);
	check(descriptors_become(before), "no descriptor is lost", "%d, were %d", descriptors(), before);
	scene_close(&bystander);
}

static void overflow(void)
{
	struct scene victim, bystander;
	struct ibv_async_event event;
	bool cq = false, qp = false;
	int size;

	scene_open(&bystander, (struct options){ 0 });
	scene_open(&victim, (struct options){ .cqe = 2, .send_wr = 1024 });
	size = victim.p.c.scq->cqe;
	for (int n = 0; n < size + 2; n++)
		MUST(post(&victim.p.c, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, NULL, 0, 0, 0, (uint64_t)n) == 0);
	while (!(cq && qp) && readable(victim.p.c.id->verbs->async_fd, LIMIT_MS)) {
		MUST(ibv_get_async_event(victim.p.c.id->verbs, &event) == 0);
		cq |= event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == victim.p.c.scq;
		qp |= event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == victim.p.c.qp;
		ibv_ack_async_event(&event);
	}
	check(cq && qp, "an overflow is told for the CQ and for its queue pair", "CQ %d, queue pair %d", cq, qp);
	check(state_of(victim.p.c.qp) == IBV_QPS_ERR, "its queue pair is in the error state", "%s",
	      state_name(state_of(victim.p.c.qp)));
	must_event(victim.p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(victim.p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	check(true, "both ends hear of the end", "");
	check(exchange(&bystander), "another connection is not disturbed", "it is");
	scene_close(&victim);
	check(exchange(&bystander), "nor when all is destroyed", "it is");
	scene_close(&bystander);
}

/* A message that finds no receive, from the client or from the server. With `late_ms` one comes late.
 * False when it came later than `within_ms` (0: no limit), as may happen on a busy machine: then nothing
 * was learnt.
 *
 * How long it may wait is what the receiving end gave for its peer: "the maximum number of times that a
 * send operation from the remote peer should be retried" (rdma_connect(3)), times its own timer of 655 ms.
 * What the sending end gave is for messages that come the other way. */
static bool attempt(struct options o, bool from_server, int late_ms, uint64_t within_ms, bool arrives)
{
	struct scene s;
	struct side *sender, *receiver;
	struct ibv_sge from, to, back;
	struct ibv_async_event event;
	struct ibv_wc wc;
	uint64_t begin;
	uint8_t *memory;
	char name[96];

	snprintf(name, sizeof name, "rnr_retry %d at the client, %d at the server, %s sends", rnr_retries(o.rnr_retry),
		 rnr_retries(or(o.server_rnr_retry, o.rnr_retry)), from_server ? "the server" : "the client");
	scene_open(&s, o);
	sender = from_server ? &s.p.s : &s.p.c;
	receiver = from_server ? &s.p.c : &s.p.s;
	memory = s.memory[!from_server];
	from = sge_of(s.mr[from_server], 0, 64);
	back = sge_of(s.mr[from_server], 64, 64);
	to = sge_of(s.mr[!from_server], 0, 64);
	begin = now_ms();
	MUST(post(sender, IBV_WR_SEND, IBV_SEND_SIGNALED, &from, 1, 0, 0, 1) == 0);
	/* The Send may complete when it is sent; the Read behind it cannot before it has arrived. */
	MUST(post(sender, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED, &back, 1, (uintptr_t)memory, s.mr[!from_server]->rkey,
		  2) == 0);
	if (late_ms) {
		usleep((useconds_t)late_ms * 1000);
		MUST(post_recv(receiver, &to, 1, 3) == 0);
		if (within_ms && now_ms() - begin > within_ms) {
			scene_close(&s);
			return false;
		}
	}
	if (arrives) {
		want_wc(receiver->rcq, IBV_WC_SUCCESS, name);
		want_wc(sender->scq, IBV_WC_SUCCESS, name);
		want_wc(sender->scq, IBV_WC_SUCCESS, name);
		check(exchange(&s), name, "the next message does not arrive");
	} else {
		wc = poll_one(sender->scq);
		if (wc.wr_id == 1 && wc.status == IBV_WC_SUCCESS)
			wc = poll_one(sender->scq);
		check(wc.status == IBV_WC_RNR_RETRY_EXC_ERR, name, "the sender sees %s", ibv_wc_status_str(wc.status));
		must_event(s.p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
		must_event(s.p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
		/* The receiver outlives it: on InfiniBand only the sender hears of its retries. */
		if (readable(receiver->id->verbs->async_fd, QUIET_MS)) {
			MUST(ibv_get_async_event(receiver->id->verbs, &event) == 0);
			ibv_ack_async_event(&event);
			check(false, name, "the asynchronous event %s", ibv_event_type_str(event.event_type));
		}
		check(state_of(sender->qp) == IBV_QPS_ERR && state_of(receiver->qp) == IBV_QPS_RTS, name,
		      "sender in %s, receiver in %s", state_name(state_of(sender->qp)), state_name(state_of(receiver->qp)));
	}
	scene_close(&s);
	return true;
}

/* Until the receive is posted in time. */
static void missing(struct options o, bool from_server, int late_ms, uint64_t within_ms, bool arrives)
{
	for (int n = 0; n < 50; n++)
		if (attempt(o, from_server, late_ms, within_ms, arrives))
			return;
	check(false, "a receive is posted in time", "not once in 50 attempts");
}

static void receives(void)
{
	missing((struct options){ .rnr_retry = -1 }, false, 0, 0, false);
	/* The library waits for a tenth of a second where the program allows no retry. */
	missing((struct options){ .rnr_retry = -1 }, false, 20, 70, true);
	missing((struct options){ .rnr_retry = 2 }, false, 0, 0, false);
	missing((struct options){ .rnr_retry = 2 }, false, 300, 1200, true);
	missing((struct options){ .rnr_retry = 7 }, false, 3000, 0, true);
	/* Whose number counts. */
	missing((struct options){ .rnr_retry = -1, .server_rnr_retry = 7 }, false, 1500, 0, true);
	missing((struct options){ .rnr_retry = -1, .server_rnr_retry = 7 }, true, 0, 0, false);
	missing((struct options){ .rnr_retry = 7, .server_rnr_retry = 2 }, false, 0, 0, false);
	missing((struct options){ .rnr_retry = 7, .server_rnr_retry = 2 }, true, 2000, 0, true);
}

/* A queue pair with these capacities. */
static bool takes(struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_qp_cap cap)
{
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = cap };
	struct ibv_qp *qp;

	errno = 0;
	qp = ibv_create_qp(pd, &attr);
	if (!qp)
		return false;
	MUST(attr.cap.max_send_wr >= cap.max_send_wr && attr.cap.max_recv_wr >= cap.max_recv_wr);
	MUST(attr.cap.max_send_sge >= cap.max_send_sge && attr.cap.max_recv_sge >= cap.max_recv_sge);
	MUST(ibv_destroy_qp(qp) == 0);
	return true;
}

static bool shares(struct ibv_pd *pd, uint32_t max_wr, uint32_t max_sge)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = max_wr, .max_sge = max_sge } };
	struct ibv_srq *srq;

	errno = 0;
	srq = ibv_create_srq(pd, &attr);
	return srq && ibv_destroy_srq(srq) == 0;
}

/* What the device says it can do can be had, and one more cannot. */
static void advertised(void)
{
	struct ibv_device **list;
	struct ibv_device_attr dev;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	uint32_t wr, sge, swr, ssge;

	MUST((list = ibv_get_device_list(NULL)) && list[0] && (ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(ibv_query_device(ctx, &dev) == 0 && (pd = ibv_alloc_pd(ctx)));
	errno = 0;
	check_failed(!ibv_create_cq(ctx, dev.max_cqe + 1, NULL, NULL, 0), EINVAL, "create_cq beyond max_cqe");
	cq = ibv_create_cq(ctx, dev.max_cqe, NULL, NULL, 0);
	if (!check(cq && cq->cqe >= dev.max_cqe, "create_cq of max_cqe", "%m"))
		return;
	check_errno(ibv_resize_cq(cq, 16), 0, "resize_cq to less");
	check_errno(ibv_resize_cq(cq, dev.max_cqe), 0, "resize_cq to max_cqe");
	check_errno(ibv_resize_cq(cq, dev.max_cqe + 1), EINVAL, "resize_cq beyond max_cqe");
	wr = (uint32_t)dev.max_qp_wr;
	sge = (uint32_t)dev.max_sge;
	check(takes(pd, cq, (struct ibv_qp_cap){ wr, 1, 1, 1, 0 }), "create_qp of max_qp_wr (send)", "%m");
	check(takes(pd, cq, (struct ibv_qp_cap){ 1, wr, 1, 1, 0 }), "create_qp of max_qp_wr (receive)", "%m");
	check(takes(pd, cq, (struct ibv_qp_cap){ 1, 1, sge, 1, 0 }), "create_qp of max_sge (send)", "%m");
	check(takes(pd, cq, (struct ibv_qp_cap){ 1, 1, 1, sge, 0 }), "create_qp of max_sge (receive)", "%m");
	check(takes(pd, cq, (struct ibv_qp_cap){ wr, wr, sge, sge, 0 }), "create_qp of the most of all", "%m");
	check_failed(!takes(pd, cq, (struct ibv_qp_cap){ wr + 1, 1, 1, 1, 0 }), EINVAL, "create_qp beyond max_qp_wr (send)");
	check_failed(!takes(pd, cq, (struct ibv_qp_cap){ 1, wr + 1, 1, 1, 0 }), EINVAL,
		     "create_qp beyond max_qp_wr (receive)");
	check_failed(!takes(pd, cq, (struct ibv_qp_cap){ 1, 1, sge + 1, 1, 0 }), EINVAL, "create_qp beyond max_sge (send)");
	check_failed(!takes(pd, cq, (struct ibv_qp_cap){ 1, 1, 1, sge + 1, 0 }), EINVAL,
		     "create_qp beyond max_sge (receive)");
	swr = (uint32_t)dev.max_srq_wr;
	ssge = (uint32_t)dev.max_srq_sge;
	check(shares(pd, swr, ssge), "create_srq of the most", "%m");
	check_failed(!shares(pd, swr + 1, 1), EINVAL, "create_srq beyond max_srq_wr");
	check_failed(!shares(pd, 1, ssge + 1), EINVAL, "create_srq beyond max_srq_sge");
	MUST(ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(ctx) == 0);
}

static struct ibv_context *owner;
static struct ibv_pd *domain;
static struct ibv_cq *completions;

static void *make_pd(void) { return ibv_alloc_pd(owner); }
static int drop_pd(void *pd) { return ibv_dealloc_pd(pd); }
static void *make_cq(void) { return ibv_create_cq(owner, 1, NULL, NULL, 0); }
static int drop_cq(void *cq) { return ibv_destroy_cq(cq); }
static int drop_srq(void *srq) { return ibv_destroy_srq(srq); }
static int drop_qp(void *qp) { return ibv_destroy_qp(qp); }

static void *make_srq(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 1, .max_sge = 1 } };

	return ibv_create_srq(domain, &attr);
}

static void *make_qp(void)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = completions, .recv_cq = completions, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 },
	};

	return ibv_create_qp(domain, &attr);
}

/* `most` objects of a kind, of which there are `before`, and no more; when one has gone there is room for another. */
static void as_many(const char *what, int most, int before, void *(*make)(void), int (*drop)(void *))
{
	void **made = calloc((size_t)most + 1, sizeof *made);
	int count = 0;

	while (count <= most - before && (made[count] = make()))
		count++;
	check(count == most - before && errno == ENOMEM, what, "%d, %m", count + before);
	MUST(drop(made[0]) == 0);
	check((made[0] = make()) && !make(), "and one in the place of another", "%m");
	while (count)
		MUST(drop(made[--count]) == 0);
	free(made);
}

/* C17: the numbers of objects hold, too. */
static void objects(void)
{
	struct ibv_device **list;
	struct ibv_device_attr dev;

	MUST((list = ibv_get_device_list(NULL)) && list[0] && (owner = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(ibv_query_device(owner, &dev) == 0 && (domain = ibv_alloc_pd(owner)));
	as_many("C17 max_cq completion queues", dev.max_cq, 0, make_cq, drop_cq);
	MUST(completions = ibv_create_cq(owner, 1, NULL, NULL, 0));
	as_many("C17 max_pd domains", dev.max_pd, 1, make_pd, drop_pd);
	as_many("C17 max_srq shared receive queues", dev.max_srq, 0, make_srq, drop_srq);
	as_many("C17 max_qp queue pairs", dev.max_qp, 0, make_qp, drop_qp);
	MUST(ibv_destroy_cq(completions) == 0 && ibv_dealloc_pd(domain) == 0 && ibv_close_device(owner) == 0);
}

static const struct group groups[] = {
	{ "advertised", advertised }, { "objects", objects },
	{ "descriptors", run_out_of_descriptors }, { "overflow", overflow }, { "receives", receives },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
