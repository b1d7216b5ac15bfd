/* Connections come and go for as long as one likes, and what the process has must not grow.
 *
 *	soak [ADDRESS [SECONDS [SEED]]]
 *
 * Several workers each open a connection between two ends in this process, post sends, writes and reads on
 * both from threads of their own, take the completions by polling, by blocking events and by non-blocking
 * ones, from one thread or two, with receives of the queue pair's own or of a shared receive queue;
 * meanwhile one end disconnects, both do, a queue pair is moved to the error state or destroyed, or memory
 * that is in use is deregistered and unmapped. Every byte is looked at and every work request completes
 * once. In between all workers rest, and memory, descriptors, threads and watched sockets are counted.
 *
 * The seed repeats a run as far as threads allow. One line per statement: "ok name" or "FAIL name: what
 * was seen". */
#define _GNU_SOURCE
/* SOAK_SLOW: under a tool that takes fifty times as long and has memory of its own, which is not judged. */
static _Bool slow;

#include <dirent.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "common.h"

#define WORKERS 3
#define MESSAGE 4096u			/* largest */
#define SLOTS 8u			/* of the peer's memory that one end writes, and reads back */
#define SENDS 24
#define RECVS 16u
#define POOL 64u			/* receives of the shared receive queue */
#define VICTIM 16384u			/* bytes that are deregistered while they are in use */
#define SENTINEL (1ull << 40)
#define RECV (1ull << 41)

enum op { IDLE, SEND, WRITE, READ, WILD };

struct work {
	enum op op;
	uint32_t slot, seed, length;
};

struct header {
	uint32_t magic, seed, length;
};

#define MAGIC 0x75776172u

/* One end of a connection, beside what every program's has. */
struct end {
	struct side *side;
	struct end *peer;
	struct ibv_cq *cq;
	struct ibv_mr *mr, *victim;
	/* What is sent from; what the peer writes; where reads of that land; receives. */
	unsigned char *from, *target, *landing, *receives;
	void *memory;
	unsigned char *victim_memory;
	uint32_t victim_lkey, victim_rkey;	/* its keys, which stay what they were */
	bool shared;			/* receives of the shared receive queue */
	int mode;			/* how completions are taken */
	int consumers;
	bool may_fail;
	pthread_t poster, taker[2];
	unsigned int seed;
	pthread_mutex_t lock;		/* of the following */
	struct work work[SENDS];
	uint32_t slots_free;
	unsigned int sends, recvs;	/* outstanding */
	bool sentinel;
	uint64_t faults, received, sent;
	unsigned int events;		/* to be acknowledged */
	atomic_bool stop, quit;
};

static struct {
	struct ibv_pd *pd;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	unsigned char *memory;
	pthread_mutex_t lock;
	uint32_t empty[POOL];
	unsigned int empties;
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER };

static atomic_ulong connections, completions;
static atomic_bool over;

static unsigned int below(unsigned int *seed, unsigned int n)
{
	return (unsigned int)rand_r(seed) % n;
}

static void nap(unsigned int us)
{
	struct timespec ts = { .tv_nsec = (long)us * 1000 };

	nanosleep(&ts, NULL);
}

static unsigned char pattern(uint32_t seed, uint32_t i)
{
	return (unsigned char)((seed * 2654435761u + i * 40503u) >> 13);
}

static void paint(unsigned char *p, uint32_t seed, uint32_t length)
{
	for (uint32_t i = 0; i < length; i++)
		p[i] = pattern(seed, i);
}

static void compare(const unsigned char *p, uint32_t seed, uint32_t length, const char *what)
{
	for (uint32_t i = 0; i < length; i++)
		if (p[i] != pattern(seed, i))
			die("byte %u of %u of a %s is not what was sent", i, length, what);
}

/* ------------------------------------------------------- the shared receives */

static void pool_post(uint32_t slot)
{
	struct ibv_sge sge = sge_of(pool.mr, slot * MESSAGE, MESSAGE);
	struct ibv_recv_wr wr = { .wr_id = RECV | slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	if (ibv_post_srq_recv(pool.srq, &wr, &bad))
		die("the shared receive queue has lost count of its receives");
}

static void pool_refill(void)
{
	uint32_t slots[POOL];
	unsigned int n;

	pthread_mutex_lock(&pool.lock);
	n = pool.empties;
	memcpy(slots, pool.empty, n * sizeof slots[0]);
	pool.empties = 0;
	pthread_mutex_unlock(&pool.lock);
	for (unsigned int i = 0; i < n; i++)
		pool_post(slots[i]);
}

static void *refiller(void *arg)
{
	(void)arg;
	while (!atomic_load(&over)) {
		pool_refill();
		nap(500);
	}
	return NULL;
}

static void pool_open(struct ibv_context *verbs)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = POOL, .max_sge = 1 } };

	MUST(pool.pd = ibv_alloc_pd(verbs));
	MUST(pool.memory = calloc(POOL, MESSAGE));
	MUST(pool.mr = ibv_reg_mr(pool.pd, pool.memory, POOL * MESSAGE, IBV_ACCESS_LOCAL_WRITE));
	MUST(pool.srq = ibv_create_srq(pool.pd, &attr));
	for (uint32_t slot = 0; slot < POOL; slot++)
		pool_post(slot);
}

/* ------------------------------------------------------------ one end's life */

static void receive_again(struct end *e, uint32_t slot, unsigned int *seed)
{
	if (!e->shared) {
		struct ibv_sge sge = sge_of(e->mr, (size_t)(e->receives - e->from) + slot * MESSAGE, MESSAGE);

		pthread_mutex_lock(&e->lock);
		MUST(post_recv(e->side, &sge, 1, RECV | slot) == 0);
		e->recvs++;
		pthread_mutex_unlock(&e->lock);
	} else if (below(seed, 2)) {
		pool_post(slot);
	} else {
		pthread_mutex_lock(&pool.lock);
		pool.empty[pool.empties++] = slot;
		pthread_mutex_unlock(&pool.lock);
	}
}

static void received(struct end *e, const struct ibv_wc *wc, unsigned int *seed)
{
	uint32_t slot = (uint32_t)(wc->wr_id & 0xffff);
	unsigned char *p = e->shared ? pool.memory + slot * MESSAGE : e->receives + slot * MESSAGE;
	bool good = wc->status == IBV_WC_SUCCESS;

	if (good) {
		struct header h;

		memcpy(&h, p, sizeof h);
		if (h.magic != MAGIC || h.length != wc->byte_len)
			die("a message of %u bytes says that it has %u", wc->byte_len, h.length);
		compare(p + sizeof h, h.seed, h.length - (uint32_t)sizeof h, "message");
	}
	pthread_mutex_lock(&e->lock);
	if (!e->shared && e->recvs-- == 0)
		die("more receives completed than were posted");
	e->received += good;
	e->faults += !good;
	pthread_mutex_unlock(&e->lock);
	/* In the error state it would come back at once. */
	if (e->shared || good)
		receive_again(e, slot, seed);
}

static void judge(struct end *e, const struct ibv_wc *wc, unsigned int *seed)
{
	struct work w;

	atomic_fetch_add(&completions, 1);
	if (wc->qp_num != e->side->qp->qp_num)
		die("a completion of another queue pair");
	if (wc->wr_id & SENTINEL) {
		pthread_mutex_lock(&e->lock);
		e->sentinel = true;
		pthread_mutex_unlock(&e->lock);
		return;
	}
	if (wc->wr_id & RECV) {
		received(e, wc, seed);
		return;
	}
	pthread_mutex_lock(&e->lock);
	w = e->work[wc->wr_id % SENDS];
	pthread_mutex_unlock(&e->lock);
	if (w.op == IDLE)
		die("a work request completed twice (%s)", ibv_wc_status_str(wc->status));
	if (w.op == READ && wc->status == IBV_WC_SUCCESS)
		compare(e->landing + w.slot * MESSAGE, w.seed, w.length, "read");
	pthread_mutex_lock(&e->lock);
	e->work[wc->wr_id % SENDS].op = IDLE;
	e->sends--;
	if (w.op == READ)
		e->slots_free |= 1u << w.slot;
	e->sent += w.op == SEND && wc->status == IBV_WC_SUCCESS;
	e->faults += wc->status != IBV_WC_SUCCESS;
	pthread_mutex_unlock(&e->lock);
}

static bool take(struct end *e, unsigned int *seed)
{
	struct ibv_wc wc[4];
	int n = ibv_poll_cq(e->cq, 1 + (int)below(seed, 4), wc);

	if (n < 0)
		die("ibv_poll_cq gives %d", n);
	for (int i = 0; i < n; i++)
		judge(e, &wc[i], seed);
	return n > 0;
}

/* All that was posted has completed, and the last one too; or nobody wants to know. */
static bool done(struct end *e)
{
	bool idle;

	if (atomic_load(&e->quit))
		return true;
	pthread_mutex_lock(&e->lock);
	idle = e->sentinel && e->sends == 0 && e->recvs == 0;
	pthread_mutex_unlock(&e->lock);
	return idle;
}

static void one_event(struct end *e, unsigned int *seed)
{
	struct ibv_cq *cq;
	void *context;

	if (ibv_get_cq_event(e->side->cc, &cq, &context)) {
		MUST(errno == EAGAIN);
		return;
	}
	MUST(cq == e->cq && context == e);
	if (below(seed, 2)) {
		ibv_ack_cq_events(cq, 1);
	} else {
		pthread_mutex_lock(&e->lock);
		e->events++;
		pthread_mutex_unlock(&e->lock);
	}
}

/* Takes completions: 0 polls, 1 blocks on events, 2 waits on the descriptor. */
static void taker(struct end *e, int mode, unsigned int seed)
{
	while (!done(e)) {
		if (mode == 0) {
			if (!take(e, &seed) && below(&seed, 64) == 0)
				nap(below(&seed, 300));
			continue;
		}
		while (take(e, &seed))
			;
		if (below(&seed, 8) == 0)
			MUST(ibv_req_notify_cq(e->cq, 1) == 0);
		MUST(ibv_req_notify_cq(e->cq, 0) == 0);
		if (take(e, &seed) || done(e))
			continue;
		if (mode == 1 || readable(e->side->cc->fd, 20))
			one_event(e, &seed);
	}
}

static void *first_taker(void *arg)
{
	struct end *e = arg;

	taker(e, e->mode == 3 ? 2 : e->mode, e->seed + 1);
	return NULL;
}

static void *second_taker(void *arg)
{
	struct end *e = arg;

	taker(e, e->mode == 3 ? 0 : e->mode, e->seed + 2);
	return NULL;
}

/* An entry for a work request, with a place to send from that nobody else uses meanwhile; -1 if the queue
 * is full. */
static int reserve(struct end *e, struct work w)
{
	int i;

	pthread_mutex_lock(&e->lock);
	for (i = SENDS - 1; i >= 0 && e->work[i].op != IDLE; i--)
		;
	if (i >= 0) {
		e->work[i] = w;
		e->sends++;
	}
	pthread_mutex_unlock(&e->lock);
	return i;
}

static void give_back(struct end *e, int i)
{
	pthread_mutex_lock(&e->lock);
	if (e->work[i].op == READ)
		e->slots_free |= 1u << e->work[i].slot;
	e->work[i].op = IDLE;
	e->sends--;
	pthread_mutex_unlock(&e->lock);
}

static int post_reserved(struct end *e, int i, enum ibv_wr_opcode op, unsigned int flags, struct ibv_sge sge,
			 uint64_t remote, uint32_t rkey)
{
	int rc = post(e->side, op, flags, &sge, 1, remote, rkey, (uint64_t)i);

	if (rc)
		give_back(e, i);
	return rc;
}

static int post_message(struct end *e, uint32_t n, unsigned int *seed)
{
	uint32_t most = below(seed, 3) ? 100 : MESSAGE - (uint32_t)sizeof(struct header);
	uint32_t length = (uint32_t)sizeof(struct header) + below(seed, most);
	struct header h = { MAGIC, n, length };
	unsigned int flags = below(seed, 2) ? IBV_SEND_SOLICITED : 0;
	int i = reserve(e, (struct work){ .op = SEND });
	unsigned char *p = e->from + i * (int)MESSAGE;

	if (i < 0)
		return ENOMEM;
	if (length <= 64 && below(seed, 2))
		flags |= IBV_SEND_INLINE;
	memcpy(p, &h, sizeof h);
	paint(p + sizeof h, h.seed, length - (uint32_t)sizeof h);
	return post_reserved(e, i, IBV_WR_SEND, flags, sge_of(e->mr, (size_t)(p - e->from), length), 0, 0);
}

static int post_write_and_read(struct end *e, uint32_t n, unsigned int *seed)
{
	uint32_t slot, length = 1 + below(seed, MESSAGE - 1);
	size_t landing = (size_t)(e->landing - e->from);
	unsigned char *p;
	uint64_t remote;
	int write, read, rc;

	pthread_mutex_lock(&e->lock);
	slot = e->slots_free ? (uint32_t)__builtin_ctz(e->slots_free) : SLOTS;
	e->slots_free &= ~(1u << slot);
	pthread_mutex_unlock(&e->lock);
	if (slot == SLOTS)
		return ENOMEM;
	read = reserve(e, (struct work){ READ, slot, n, length });
	if (read < 0) {
		pthread_mutex_lock(&e->lock);
		e->slots_free |= 1u << slot;
		pthread_mutex_unlock(&e->lock);
		return ENOMEM;
	}
	write = reserve(e, (struct work){ .op = WRITE });
	if (write < 0) {
		give_back(e, read);
		return ENOMEM;
	}
	p = e->from + write * (int)MESSAGE;
	paint(p, n, length);
	remote = (uint64_t)(uintptr_t)(e->peer->target + slot * MESSAGE);
	rc = post_reserved(e, write, IBV_WR_RDMA_WRITE, 0, sge_of(e->mr, (size_t)(p - e->from), length), remote,
			   e->peer->mr->rkey);
	if (rc) {
		give_back(e, read);
		return rc;
	}
	return post_reserved(e, read, IBV_WR_RDMA_READ, 0, sge_of(e->mr, landing + slot * MESSAGE, length), remote,
			     e->peer->mr->rkey);
}

/* To and from memory that may go away any time; what comes of it nobody cares. */
static int post_wild(struct end *e, unsigned int *seed)
{
	/* A tool reports what the library reads of it: through memory it does that itself. */
	bool mine = below(seed, 2) && !slow, read = below(seed, 2);
	struct ibv_sge own = { (uint64_t)(uintptr_t)e->victim_memory, VICTIM, e->victim_lkey };
	struct ibv_sge sge = mine ? own : sge_of(e->mr, (size_t)(e->landing - e->from) + SLOTS * MESSAGE, VICTIM);
	int i = reserve(e, (struct work){ .op = WILD });

	if (i < 0)
		return ENOMEM;
	return post_reserved(e, i, read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, 0, sge,
			     (uint64_t)(uintptr_t)e->peer->victim_memory, e->peer->victim_rkey);
}

static void *poster(void *arg)
{
	struct end *e = arg;
	unsigned int seed = e->seed;
	uint32_t n = e->seed;

	while (!atomic_load(&e->stop)) {
		int rc;

		switch (below(&seed, e->may_fail ? 3 : 2)) {
		case 0:
			rc = post_message(e, n++, &seed);
			break;
		case 1:
			rc = post_write_and_read(e, n++, &seed);
			break;
		default:
			rc = post_wild(e, &seed);
			break;
		}
		if (rc)
			nap(below(&seed, 200));
		if (rc && rc != ENOMEM)
			die("posting gives %d (%s)", rc, strerror(rc));
		if (below(&seed, 40) == 0)
			nap(below(&seed, 1500));
		/* Once in error all is flushed at once. */
		if (below(&seed, 16) == 0 && state_of(e->side->qp) == IBV_QPS_ERR)
			break;
	}
	return NULL;
}

/* ------------------------------------------------------------ one connection */

#define FROM (SENDS * MESSAGE)
#define WHOLE (FROM + 2 * SLOTS * MESSAGE + VICTIM + RECVS * MESSAGE)

static void end_open(struct end *e, struct side *side, unsigned int *seed)
{
	struct ibv_qp_init_attr attr = {
		.cap = { SENDS, RECVS, 2, 2, 64 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};

	memset(e, 0, sizeof *e);
	pthread_mutex_init(&e->lock, NULL);
	e->side = side;
	e->seed = (unsigned int)rand_r(seed);
	e->shared = below(seed, 3) == 0;
	e->mode = (int)below(seed, 4);
	e->consumers = e->mode == 1 ? 1 : e->mode == 3 ? 2 : 1 + (int)below(seed, 2);
	e->slots_free = (1u << SLOTS) - 1;
	if (e->shared)
		side->pd = pool.pd;
	else
		MUST(side->pd = ibv_alloc_pd(side->id->verbs));
	MUST(side->cc = ibv_create_comp_channel(side->id->verbs));
	if (e->mode != 1)
		MUST(fcntl(side->cc->fd, F_SETFL, fcntl(side->cc->fd, F_GETFL) | O_NONBLOCK) == 0);
	/* As deep as its work queues: posting is refused before it overruns, in the error state, too. */
	MUST(e->cq = ibv_create_cq(side->id->verbs, e->shared ? 1024 : SENDS + RECVS, e, side->cc, 0));
	attr.send_cq = attr.recv_cq = e->cq;
	if (e->shared)
		attr.srq = pool.srq;
	MUST(rdma_create_qp(side->id, side->pd, &attr) == 0);
	side->qp = side->id->qp;
	MUST(e->memory = calloc(1, WHOLE));
	e->from = e->memory;
	e->target = e->from + FROM;
	e->landing = e->target + SLOTS * MESSAGE;
	e->receives = e->landing + SLOTS * MESSAGE + VICTIM;
	MUST(e->mr = ibv_reg_mr(side->pd, e->memory, WHOLE, REMOTE_ALL));
	e->victim_memory = mmap(NULL, VICTIM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(e->victim_memory != MAP_FAILED);
	MUST(e->victim = ibv_reg_mr(side->pd, e->victim_memory, VICTIM, REMOTE_ALL));
	e->victim_lkey = e->victim->lkey;
	e->victim_rkey = e->victim->rkey;
	for (uint32_t slot = 0; slot < RECVS && !e->shared; slot++)
		receive_again(e, slot, seed);
}

static void end_start(struct end *e)
{
	MUST(pthread_create(&e->poster, NULL, poster, e) == 0);
	MUST(pthread_create(&e->taker[0], NULL, first_taker, e) == 0);
	if (e->consumers > 1)
		MUST(pthread_create(&e->taker[1], NULL, second_taker, e) == 0);
}

static void end_takers_join(struct end *e)
{
	for (int i = 0; i < e->consumers; i++)
		MUST(pthread_join(e->taker[i], NULL) == 0);
}

/* Moves it to the error state and sees every work request complete. */
static void end_drain(struct end *e)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_sge sge = sge_of(e->mr, 0, 1);
	int rc;

	MUST(ibv_modify_qp(e->side->qp, &attr, IBV_QP_STATE) == 0);
	/* There is a place for it when the completions of others were polled. */
	while ((rc = post(e->side, IBV_WR_SEND, 0, &sge, 1, 0, 0, SENTINEL)) == ENOMEM)
		nap(100);
	MUST(rc == 0);
	end_takers_join(e);
}

static void victim_close(struct end *e)
{
	if (e->victim) {
		MUST(ibv_dereg_mr(e->victim) == 0);
		e->victim = NULL;
		/* Nothing may touch it from here on. */
		MUST(munmap(e->victim_memory, VICTIM) == 0);
	}
}

static void end_close(struct end *e)
{
	struct side *side = e->side;

	if (side->qp)
		rdma_destroy_qp(side->id);
	if (e->events)
		ibv_ack_cq_events(e->cq, e->events);
	MUST(ibv_destroy_cq(e->cq) == 0);
	MUST(ibv_destroy_comp_channel(side->cc) == 0);
	victim_close(e);
	MUST(ibv_dereg_mr(e->mr) == 0);
	MUST(e->shared || ibv_dealloc_pd(side->pd) == 0);
	MUST(rdma_destroy_id(side->id) == 0);
	free(e->memory);
	pthread_mutex_destroy(&e->lock);
}

static void *disconnect(void *arg)
{
	struct end *e = arg;

	rdma_disconnect(e->side->id);
	return NULL;
}

static void *closer(void *arg)
{
	end_close(arg);
	return NULL;
}

/* Without trouble, everything arrives. */
static void calm(struct end *a, struct end *b)
{
	uint64_t end = now_ms() + LIMIT_MS;
	bool idle;

	do {
		nap(300);
		pthread_mutex_lock(&a->lock);
		pthread_mutex_lock(&b->lock);
		idle = a->sends + b->sends == 0 && a->sent == b->received && b->sent == a->received;
		if (a->faults + b->faults)
			die("a work request failed for no reason");
		if (!idle && now_ms() > end)
			die("%u and %u work requests do not complete, %lu of %lu and %lu of %lu messages arrived", a->sends,
			    b->sends, b->received, a->sent, a->received, b->sent);
		pthread_mutex_unlock(&b->lock);
		pthread_mutex_unlock(&a->lock);
	} while (!idle);
}

static void life(unsigned int *seed)
{
	struct rdma_conn_param param = {
		.responder_resources = 4, .initiator_depth = 4, .retry_count = 7, .rnr_retry_count = 7,
	};
	struct rdma_cm_event event;
	struct pair p = { 0 };
	struct end c, s;
	unsigned int way = below(seed, 7);
	pthread_t other;

	atomic_fetch_add(&connections, 1);
	listen_somewhere(&p);
	resolve(&p);
	end_open(&c, &p.c, seed);
	MUST(rdma_connect(p.c.id, &param) == 0);
	event = must_event(p.s.ch, RDMA_CM_EVENT_CONNECT_REQUEST);
	p.s.id = event.id;
	end_open(&s, &p.s, seed);
	c.peer = &s;
	s.peer = &c;
	c.may_fail = s.may_fail = way != 0;
	MUST(rdma_accept(p.s.id, &param) == 0);
	must_event(p.c.ch, RDMA_CM_EVENT_ESTABLISHED);
	must_event(p.s.ch, RDMA_CM_EVENT_ESTABLISHED);
	/* A thread that blocks for an event cannot be told that nobody wants to know. */
	if (way == 3 && c.mode == 1)
		way = 1;
	end_start(&c);
	end_start(&s);
	nap(below(seed, 40000));
	switch (way) {
	case 0:
		c.stop = s.stop = true;
		MUST(pthread_join(c.poster, NULL) == 0 && pthread_join(s.poster, NULL) == 0);
		calm(&c, &s);
		rdma_disconnect(p.c.id);
		break;
	case 1:
		rdma_disconnect(p.s.id);
		break;
	case 2:
		MUST(pthread_create(&other, NULL, disconnect, &s) == 0);
		rdma_disconnect(p.c.id);
		MUST(pthread_join(other, NULL) == 0);
		break;
	case 3:
		/* Nobody else may use it any more, but it is busy. */
		c.stop = true;
		MUST(pthread_join(c.poster, NULL) == 0);
		c.quit = true;
		end_takers_join(&c);
		/* What it took of the shared receives it gives back only by completing them. */
		if (!c.shared) {
			rdma_destroy_qp(p.c.id);
			p.c.qp = NULL;
		} else {
			c.quit = false;
			c.consumers = 1;
			MUST(pthread_create(&c.taker[0], NULL, first_taker, &c) == 0);
			end_drain(&c);
		}
		break;
	case 4: {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };

		MUST(ibv_modify_qp(p.c.qp, &attr, IBV_QP_STATE) == 0);
		break;
	}
	default:
		victim_close(way == 5 ? &c : &s);
		nap(below(seed, 3000));
		rdma_disconnect(p.c.id);
	}
	if (way != 3)
		must_event(p.c.ch, RDMA_CM_EVENT_DISCONNECTED);
	must_event(p.s.ch, RDMA_CM_EVENT_DISCONNECTED);
	c.stop = s.stop = true;
	if (way != 0) {
		MUST(way == 3 || pthread_join(c.poster, NULL) == 0);
		MUST(pthread_join(s.poster, NULL) == 0);
	}
	if (way != 3)
		end_drain(&c);
	end_drain(&s);
	MUST(pthread_create(&other, NULL, closer, &c) == 0);
	end_close(&s);
	MUST(pthread_join(other, NULL) == 0);
	MUST(rdma_destroy_id(p.listener) == 0);
	rdma_destroy_event_channel(p.c.ch);
	rdma_destroy_event_channel(p.s.ch);
}

/* ------------------------------------------------------ what the process has */

struct sample {
	unsigned long rss, heap;	/* bytes */
	unsigned int fds, threads, watched;
	unsigned long connections;
};

static unsigned int entries(const char *dir)
{
	unsigned int n = 0;
	DIR *d;

	MUST(d = opendir(dir));
	while (readdir(d))
		n++;
	closedir(d);
	return n - 2;
}

/* Descriptors that the process's epoll instances watch. */
static unsigned int watched(void)
{
	char path[280], line[256];
	struct dirent *entry;
	unsigned int n = 0;
	DIR *d;

	MUST(d = opendir("/proc/self/fdinfo"));
	while ((entry = readdir(d))) {
		FILE *f;

		snprintf(path, sizeof path, "/proc/self/fdinfo/%s", entry->d_name);
		f = fopen(path, "r");
		while (f && fgets(line, sizeof line, f))
			n += strncmp(line, "tfd:", 4) == 0;
		if (f)
			fclose(f);
	}
	closedir(d);
	return n;
}

static struct sample look(void)
{
	struct sample s = { .connections = atomic_load(&connections) };
	struct mallinfo m;
	FILE *f;

	malloc_trim(0);
	/* glibc 2.31 has no mallinfo2, and later ones warn of this one, whose numbers have 32 bits. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
	m = mallinfo();
#pragma GCC diagnostic pop
	s.heap = (unsigned long)(unsigned)m.uordblks + (unsigned)m.hblkhd;
	MUST(f = fopen("/proc/self/statm", "r"));
	MUST(fscanf(f, "%*s %lu", &s.rss) == 1);
	fclose(f);
	s.rss *= (unsigned long)sysconf(_SC_PAGESIZE);
	s.fds = entries("/proc/self/fd");
	s.threads = entries("/proc/self/task");
	s.watched = watched();
	return s;
}

static bool has_as_many(const struct sample *a, const struct sample *b)
{
	return a->fds == b->fds && a->threads == b->threads && a->watched == b->watched;
}

/* What is left when nothing is under way any more: what is not used (the socket over which two processes
 * agree to share memory) is closed after 2 s. */
static struct sample first_look(void)
{
	uint64_t end = now_ms() + LIMIT_MS, since = now_ms();
	struct sample s = look(), before;

	while (now_ms() - since < 4000 && now_ms() < end) {
		nap(20000);
		before = s;
		s = look();
		if (!has_as_many(&s, &before))
			since = now_ms();
	}
	return s;
}

/* Sockets that are closed without loss need their time; descriptors that stay longer are lost. */
static struct sample last_look(const struct sample *first)
{
	uint64_t end = now_ms() + LIMIT_MS;
	struct sample s;

	do {
		nap(20000);
		s = look();
	} while (now_ms() < end && !has_as_many(&s, first));
	return s;
}

/* ------------------------------------------------------------------ the whole */

static pthread_barrier_t begin, rest;
static atomic_ullong round_end;

static void *worker(void *arg)
{
	unsigned int seed = (unsigned int)(uintptr_t)arg;

	for (;;) {
		pthread_barrier_wait(&begin);
		if (atomic_load(&over))
			return NULL;
		while (now_ms() < atomic_load(&round_end))
			life(&seed);
		pthread_barrier_wait(&rest);
	}
}

/* A bar where somebody looks on, and a line for each round where it is kept. */
static void progress(uint64_t passed, uint64_t all, const struct sample *s)
{
	uint64_t part = passed < all ? passed : all;

	if (isatty(STDERR_FILENO))
		/* On one line of eighty. */
		fprintf(stderr, "\r[%-20.*s] %3lu %%  %lu connections, %lu KiB, %u descriptors ", (int)(part * 20 / all),
			"####################", (unsigned long)(part * 100 / all), s->connections, s->rss / 1024, s->fds);
	if (isatty(STDERR_FILENO) && isatty(STDOUT_FILENO))
		return;
	printf("# %lu s: %lu connections, %lu completions, %lu KiB resident, %lu KiB heap, %u descriptors, %u threads, "
	       "%u watched\n", (unsigned long)passed / 1000, s->connections, atomic_load(&completions), s->rss / 1024,
	       s->heap / 1024, s->fds, s->threads, s->watched);
	fflush(stdout);
}

static void flat(const struct sample *first, const struct sample *last)
{
	unsigned long n = last->connections - first->connections;
	long heap = (long)(last->heap - first->heap), rss = (long)(last->rss - first->rss);

	check(n > 0, "connections_came_and_went", "%lu", n);
	check(last->fds == first->fds, "descriptors_are_flat", "%u after %lu connections, %u before", last->fds, n, first->fds);
	check(last->watched == first->watched, "watched_descriptors_are_flat", "%u after %lu connections, %u before",
	      last->watched, n, first->watched);
	check(last->threads == first->threads, "threads_are_flat", "%u after %lu connections, %u before", last->threads, n,
	      first->threads);
	if (slow)
		return;
	/* Tables that double, and buffers of 128 KiB that a thread keeps or does not, are not for each connection. */
	check(heap < 512 * 1024 || heap / (long)n < 16, "the_heap_is_flat", "grown by %ld bytes, %ld for each of %lu connections",
	      heap, heap / (long)n, n);
	check(rss < 8 << 20, "resident_memory_is_flat", "grown by %ld KiB over %lu connections", rss / 1024, n);
}

static unsigned long number(int argc, char **argv, int i, unsigned long other)
{
	return argc > i ? strtoul(argv[i], NULL, 10) : other;
}

int main(int argc, char **argv)
{
	unsigned long seconds = number(argc, argv, 2, 10);
	unsigned long seed = number(argc, argv, 3, (unsigned long)getpid() * 2654435761u ^ (unsigned long)time(NULL)) & 0xffffffff;
	uint64_t start, all = seconds * 1000, limit;
	struct ibv_context **devices;
	pthread_t workers[WORKERS], refill;
	struct sample first = { 0 }, last = { 0 };
	int rounds = 0;

	slow = getenv("SOAK_SLOW") != NULL;
	/* What threads keep for themselves would count as in use. */
	if (!getenv("GLIBC_TUNABLES") && !slow) {
		setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1);
		execv("/proc/self/exe", argv);
	}
	if (argc > 1)
		address = argv[1];
	printf("# soak %s %lu %lu\n", address, seconds, seed);
	fflush(stdout);
	MUST(devices = rdma_get_devices(NULL));
	MUST(devices[0]);
	pool_open(devices[0]);
	MUST(pthread_barrier_init(&begin, NULL, WORKERS + 1) == 0 && pthread_barrier_init(&rest, NULL, WORKERS + 1) == 0);
	MUST(pthread_create(&refill, NULL, refiller, NULL) == 0);
	for (unsigned long i = 0; i < WORKERS; i++)
		MUST(pthread_create(&workers[i], NULL, worker, (void *)(uintptr_t)(seed ^ (i * 0x9e3779b9))) == 0);
	start = now_ms();
	/* A round is long enough for many connections and short enough to see where it grows. */
	limit = all / 8 < 500 ? 500 : all / 8 > 10000 ? 10000 : all / 8;
	do {
		atomic_store(&round_end, now_ms() + limit);
		alarm((unsigned int)(limit / 1000) + 6 * (unsigned int)LIMIT_MS / 1000);
		pthread_barrier_wait(&begin);
		pthread_barrier_wait(&rest);
		/* The first rounds make what is made once. */
		last = ++rounds == 2 ? first = first_look() : look();
		progress(now_ms() - start, all, &last);
	} while (rounds < 4 || now_ms() - start < all);
	if (isatty(STDERR_FILENO))
		fprintf(stderr, "\n");
	last = last_look(&first);
	flat(&first, &last);
	atomic_store(&over, true);
	pthread_barrier_wait(&begin);
	for (int i = 0; i < WORKERS; i++)
		MUST(pthread_join(workers[i], NULL) == 0);
	MUST(pthread_join(refill, NULL) == 0);
	MUST(ibv_destroy_srq(pool.srq) == 0 && ibv_dereg_mr(pool.mr) == 0 && ibv_dealloc_pd(pool.pd) == 0);
	free(pool.memory);
	rdma_free_devices(devices);
	return failures ? 1 : 0;
}
