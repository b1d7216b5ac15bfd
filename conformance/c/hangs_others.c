/* What hangs other transports through shared memory. Each group is named for that, is run over each link,
 * and waits for nothing without a limit.
 *
 *	hangs_others [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * vectors		scatter/gather lists of odd lengths (mpich#7653)
 * small_behind_large	many small messages behind a large one, both ways (libfabric#9853)
 * acknowledged		a message completes while one of the other direction waits for its receive
 * starting		some send to others that have not begun, or are stopped (libfabric#12542)
 * events		bursts come when the two threads of a channel go to sleep (iceoryx2#1811)
 * listeners		threads that wait for nothing need no processor (iceoryx2#1680)
 *
 * UWARP is the command, and LINK is the link that `uwarp stat` must show for each connection at both ends.
 * SEED repeats a run. */
#define _GNU_SOURCE
#include "processes.h"
#include "hangs_data.h"

/* ------------------------------------------------------------------ starting */

#define PROCESSES 8
#define MESSAGES 100
#define WINDOW 16
#define MESSAGE 256
#define MOST_COMPLETIONS (2 * PROCESSES * WINDOW)

static struct board {
	_Atomic uint32_t port[PROCESSES];
	_Atomic int served, looked;	/* how many have all messages, and have looked at their links */
} *board;

struct neighbour {
	struct conn c;
	bool asked, up;
	int posted, sent, came;
};

static struct starter {
	int me;
	struct neighbour with[PROCESSES];
	struct conn shared;			/* the channel and the queues of all */
	struct ibv_mr *mr;
	unsigned char memory[PROCESSES][2][WINDOW][MESSAGE];
} starter;

static uint64_t between(int from, int to, int number)
{
	return (uint64_t)((from * PROCESSES + to) * MESSAGES + number);
}

static void receive_from(int i, int slot)
{
	struct ibv_sge sge = { (uintptr_t)starter.memory[i][0][slot], MESSAGE, starter.mr->lkey };

	MUST(receive(&starter.with[i].c, &sge, 1, (uint64_t)(i * WINDOW + slot)) == 0);
}

static void open_neighbour(int i, struct rdma_cm_id *id)
{
	struct conn *c = &starter.with[i].c, *shared = &starter.shared;
	struct ibv_qp_init_attr init = {
		.cap = { WINDOW, WINDOW, 1, 1, 0 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
	};

	if (!domain) {
		MUST(domain = ibv_alloc_pd(id->verbs));
		MUST(shared->channel = ibv_create_comp_channel(id->verbs));
		MUST(shared->came = ibv_create_cq(id->verbs, MOST_COMPLETIONS, NULL, shared->channel, 0));
		MUST(ibv_req_notify_cq(shared->came, 0) == 0);
		MUST(starter.mr = ibv_reg_mr(domain, starter.memory, sizeof starter.memory,
					     IBV_ACCESS_LOCAL_WRITE));
	}
	init.send_cq = init.recv_cq = shared->came;
	c->id = id;
	MUST(rdma_create_qp(id, domain, &init) == 0);
	for (int slot = 0; slot < WINDOW; slot++)
		receive_from(i, slot);
}

static void send_more(int i)
{
	struct neighbour *n = &starter.with[i];

	for (; n->up && n->posted < MESSAGES && n->posted - n->sent < WINDOW; n->posted++) {
		unsigned char *from = starter.memory[i][1][n->posted % WINDOW];
		struct ibv_sge sge = { (uintptr_t)from, MESSAGE, starter.mr->lkey };

		fill(from, MESSAGE, between(starter.me, i, n->posted));
		MUST(submit(&n->c, IBV_WR_SEND, &sge, 1, (uint64_t)(i * WINDOW), 0, 0) == 0);
	}
}

static void connection_event(void)
{
	struct rdma_cm_event *event;
	uint32_t who;
	int i;

	MUST(rdma_get_cm_event(events, &event) == 0);
	i = (int)(intptr_t)event->id->context;
	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		MUST(rdma_resolve_route(event->id, 2000) == 0);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		open_neighbour(i, event->id);
		who = (uint32_t)starter.me;
		param.private_data = &who;
		param.private_data_len = sizeof who;
		MUST(rdma_connect(event->id, &param) == 0);
		break;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		MUST(event->param.conn.private_data_len >= sizeof who);
		memcpy(&who, event->param.conn.private_data, sizeof who);
		MUST(who < PROCESSES && !starter.with[who].c.id);
		event->id->context = (void *)(intptr_t)who;
		open_neighbour((int)who, event->id);
		MUST(rdma_accept(event->id, &param) == 0);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		starter.with[i].up = true;
		send_more(i);
		break;
	default:
		die("process %d and %d: %s, status %d", starter.me, i, rdma_event_str(event->event),
		    event->status);
	}
	MUST(rdma_ack_cm_event(event) == 0);
}

/* Those above listen, and have not been asked yet. */
static void ask_others(void)
{
	for (int i = starter.me + 1; i < PROCESSES; i++) {
		struct sockaddr_storage ss;
		struct rdma_cm_id *id;

		if (!board->port[i] || starter.with[i].asked)
			continue;
		ss = sockaddr_of(address, (uint16_t)board->port[i]);
		MUST(rdma_create_id(events, &id, (void *)(intptr_t)i, RDMA_PS_TCP) == 0);
		MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0);
		starter.with[i].asked = true;
	}
}

static int complete(void)
{
	struct ibv_wc wc;
	int count = 0;

	for (; starter.shared.came && take(starter.shared.came, &wc); count++) {
		int i = (int)wc.wr_id / WINDOW, slot = (int)wc.wr_id % WINDOW;
		struct neighbour *n = &starter.with[i];
		char name[64];

		if (wc.opcode == IBV_WC_RECV) {
			snprintf(name, sizeof name, "message %d of %d to %d", n->came, i, starter.me);
			MUST(slot == n->came % WINDOW && wc.byte_len == MESSAGE);
			must_hold(starter.memory[i][0][slot], MESSAGE, between(i, starter.me, n->came), name);
			n->came++;
			receive_from(i, slot);
		} else {
			n->sent++;
			send_more(i);
		}
	}
	return count;
}

static bool has_asked_all(void)
{
	for (int i = starter.me + 1; i < PROCESSES; i++)
		if (!starter.with[i].asked)
			return false;
	return true;
}

/* Sleeps until something comes. One that has slept long, and finds that something is there, was not woken. */
static void sleep_a_while(void)
{
	struct pollfd fds[] = {
		{ .fd = events->fd, .events = POLLIN },
		{ .fd = starter.shared.channel ? starter.shared.channel->fd : -1, .events = POLLIN },
	};
	int ms = has_asked_all() ? 2000 : 1, n = poll(fds, 2, ms);
	struct ibv_cq *cq;
	void *context;

	MUST(n >= 0);
	if (fds[1].revents) {
		MUST(ibv_get_cq_event(starter.shared.channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
		MUST(ibv_req_notify_cq(cq, 0) == 0);
	}
	if (n == 0 && ms > 1 && (complete() || readable(events->fd, 0)))
		die("process %d was not woken in %d ms", starter.me, ms);
}

static bool all_served(void)
{
	int served = 0;

	for (int i = 0; i < PROCESSES; i++)
		served += starter.with[i].sent == MESSAGES && starter.with[i].came == MESSAGES;
	return served == PROCESSES - 1;
}

static void wait_for_all(_Atomic int *count)
{
	uint64_t late = now_ms() + LIMIT_MS;

	++*count;
	while (*count < PROCESSES && now_ms() < late)
		usleep(500);
	if (*count < PROCESSES)
		die("process %d: only %d are ready", starter.me, *count);
}

static void hangs(void)
{
	for (int i = 0; i < PROCESSES; i++) {
		struct neighbour *n = &starter.with[i];

		if (i != starter.me && (n->came < MESSAGES || n->sent < MESSAGES))
			die("process %d hangs: with %d it is %s; %d messages have come, %d are sent",
			    starter.me, i, n->up ? "connected" : "not connected", n->came, n->sent);
	}
}

static void start_late(int me, uint64_t us)
{
	uint64_t late = now_ms() + LIMIT_MS;
	char name[32];

	MUST(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
	alarm(GROUP_LIMIT);
	starter.me = me;
	if (us)
		usleep((useconds_t)us);
	MUST(events = rdma_create_event_channel());
	board->port[me] = ntohs(rdma_get_src_port(listener_on(events)));
	while (!all_served()) {
		if (now_ms() > late)
			hangs();
		ask_others();
		while (readable(events->fd, 0))
			connection_event();
		/* Half of them poll. */
		if (complete() == 0 && !all_served()) {
			if (me % 2)
				sched_yield();
			else
				sleep_a_while();
		}
	}
	wait_for_all(&board->served);
	snprintf(name, sizeof name, "process %d's", me);
	check_links(name, PROCESSES - 1);
	wait_for_all(&board->looked);
}

static void starting(void)
{
	pid_t pids[PROCESSES];
	uint64_t late = now_ms() + 2 * LIMIT_MS;
	int left = PROCESSES, bad = 0;

	board = in_common(sizeof *board);
	for (int i = 0; i < PROCESSES; i++) {
		uint64_t us = any(3) ? any(200000) : 0;

		fflush(stdout);
		MUST((pids[i] = fork()) >= 0);
		if (pids[i] == 0) {
			start_late(i, us);
			_exit(failures ? 1 : 0);
		}
	}
	/* Two at a time are stopped. */
	for (int i = 0; i < 4 && board->looked == 0; i++) {
		pid_t one = pids[any(PROCESSES / 2)], another = pids[PROCESSES / 2 + any(PROCESSES / 2)];

		usleep((useconds_t)any(30000));
		kill(one, SIGSTOP);
		usleep((useconds_t)any(20000));
		kill(another, SIGSTOP);
		usleep(50000);
		kill(one, SIGCONT);
		kill(another, SIGCONT);
	}
	while (left && !bad && now_ms() < late) {
		for (int i = 0, status; i < PROCESSES; i++)
			if (pids[i] && waitpid(pids[i], &status, WNOHANG) == pids[i]) {
				bad += !WIFEXITED(status) || WEXITSTATUS(status);
				pids[i] = 0;
				left--;
			}
		usleep(500);
	}
	for (int i = 0; i < PROCESSES; i++)
		if (pids[i]) {
			kill(pids[i], SIGKILL);
			waitpid(pids[i], NULL, 0);
		}
	check(!bad && !left, "each pair of eight that start exchanges all messages",
	      "%d have failed, %d are left", bad, left);
}

/* ------------------------------------------------------------------ two threads wait for one channel */

#define PAIRS 8
#define BURSTS 600
#define SLOTS 64
#define MOST 16384
#define LONGEST_US 1000000

struct note {
	uint64_t sent_at;		/* µs */
	uint32_t number;
};

static struct watch {
	_Atomic uint32_t seen;
	_Atomic uint32_t twice;
	_Atomic uint64_t longest;	/* µs */
	_Atomic int stop, gone;
	_Atomic unsigned char had[MOST];
} *watch;

static struct conn conns[PAIRS];
static struct note notes[PAIRS][SLOTS];
static uint32_t posted[PAIRS], sent[PAIRS];

static void receive_note(int i, uint64_t slot)
{
	struct ibv_sge sge = { (uintptr_t)&notes[i][slot], sizeof(struct note), mr->lkey };

	MUST(receive(&conns[i], &sge, 1, slot) == 0);
}

static void see(int i, uint64_t slot)
{
	uint64_t waited = now_us() - notes[i][slot].sent_at, longest = watch->longest;

	while (waited > longest && !atomic_compare_exchange_weak(&watch->longest, &longest, waited))
		;
	if (watch->had[notes[i][slot].number % MOST]++)
		watch->twice++;
	receive_note(i, slot);
	watch->seen++;
}

static void *takes_events(void *unused)
{
	while (!watch->stop) {
		struct ibv_cq *cq;
		struct ibv_wc wc;
		void *context;

		MUST(ibv_get_cq_event(conns[0].channel, &cq, &context) == 0);
		ibv_ack_cq_events(cq, 1);
		MUST(ibv_req_notify_cq(cq, 0) == 0);
		while (take(cq, &wc))
			see((int)((struct conn *)context - conns), wc.wr_id);
	}
	watch->gone++;
	return unused;
}

static bool all_seen(uint32_t number, uint64_t us)
{
	uint64_t late = now_us() + us;

	while (watch->seen < number && now_us() < late)
		usleep(20);
	return watch->seen >= number;
}

static void send_note(int i, uint32_t number)
{
	uint64_t late = now_ms() + LIMIT_MS;
	uint32_t slot = posted[i] % SLOTS;
	struct ibv_sge sge = { (uintptr_t)&notes[i][slot], sizeof(struct note), mr->lkey };
	struct ibv_wc wc;

	for (;;) {
		while (take(conns[i].sent, &wc))
			sent[i]++;
		if (posted[i] - sent[i] < SLOTS)
			break;
		if (now_ms() > late)
			die("Sends do not complete: %u of %u", sent[i], posted[i]);
		sched_yield();
	}
	notes[i][slot] = (struct note){ now_us(), number };
	MUST(submit(&conns[i], IBV_WR_SEND, &sge, 1, slot, 0, 0) == 0);
	posted[i]++;
}

/* Pauses are as long as a thread needs to go to sleep. */
static void pause_us(uint64_t us)
{
	uint64_t until = now_us() + us;

	if (any(2))
		usleep((useconds_t)us);
	while (now_us() < until)
		;
}

static void sends_bursts(void)
{
	uint32_t number = 0;
	int late = 0;

	for (int burst = 0; burst < BURSTS; burst++) {
		int first = (int)any(PAIRS), pairs = 1 + (int)any(any(2) ? 2 : PAIRS);

		for (int left = 1 + (int)any(8); left > 0; left--)
			send_note((first + (int)any((uint64_t)pairs)) % PAIRS, number++);
		pause_us(any(201));
		/* What comes next would hide that an event was lost. */
		if (any(4) == 0 && !all_seen(number, LONGEST_US)) {
			late++;
			if (!all_seen(number, 3 * LONGEST_US))
				break;
		}
	}
	check(all_seen(number, LONGEST_US), "every completion is seen", "%u of %u", watch->seen, number);
	check(watch->twice == 0, "each is seen once", "%u twice", watch->twice);
	check(late == 0 && watch->longest <= LONGEST_US, "none waits longer than a second",
	      "%d waits were longer; the longest: %" PRIu64 " us", late, watch->longest);
	printf("# the longest wait: %" PRIu64 " us\n", watch->longest);
	/* The threads look whether it is over when an event comes. */
	watch->stop = 1;
	for (int i = 0; watch->gone < 2 && i < 2000; i++) {
		send_note(i % PAIRS, number++);
		usleep(1000);
	}
	check(watch->gone == 2, "both threads are woken", "%d", watch->gone);
}

static void events_end(void)
{
	pthread_t threads[2];

	for (int i = 0; i < PAIRS; i++) {
		conns[i].channel = conns[0].channel;
		meet(&conns[i], SLOTS, 1);
	}
	MUST(mr = ibv_reg_mr(domain, notes, sizeof notes, IBV_ACCESS_LOCAL_WRITE));
	for (int i = 0; server && i < PAIRS; i++)
		for (uint64_t slot = 0; slot < SLOTS; slot++)
			receive_note(i, slot);
	for (int i = 0; server && i < 2; i++)
		MUST(pthread_create(&threads[i], NULL, takes_events, NULL) == 0);
	both_are_here();
	if (!server)
		sends_bursts();
}

static void waited_for(void)
{
	watch = in_common(sizeof *watch);
	two(events_end, PAIRS);
}

/* ------------------------------------------------------------------ threads that wait for nothing */

#define IDLE_MS 2000
#define SPENT_MS 20

static struct rdma_event_channel *more[2];	/* a listener each */
static _Atomic int woken;

static void *waits_for_a_message(void *arg)
{
	struct conn *c = arg;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	void *context;

	MUST(ibv_get_cq_event(c->channel, &cq, &context) == 0);
	ibv_ack_cq_events(cq, 1);
	if (take(cq, &wc))
		woken++;
	return NULL;
}

static void *waits_for_a_request(void *arg)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	MUST(rdma_get_cm_event(arg, &event) == 0);
	MUST(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	id = event->id;
	MUST(rdma_ack_cm_event(event) == 0 && rdma_reject(id, NULL, 0) == 0 && rdma_destroy_id(id) == 0);
	woken++;
	return NULL;
}

static uint64_t spent_us(void)
{
	struct rusage u;

	MUST(getrusage(RUSAGE_SELF, &u) == 0);
	return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000 +
	       (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void idles(void)
{
	uint64_t before;

	/* What still comes, comes first. */
	usleep(200000);
	before = spent_us();
	usleep(IDLE_MS * 1000);
	before = spent_us() - before;
	check(before < SPENT_MS * 1000, server ? "threads that wait for nothing need no processor" :
	      "nor does a peer", "%" PRIu64 " us in %d ms", before, IDLE_MS);
}

static void sleepers(void)
{
	uint64_t late = now_ms() + LIMIT_MS;
	pthread_t thread;

	for (int i = 0; i < 2; i++) {
		uint16_t port;

		MUST(more[i] = rdma_create_event_channel());
		port = ntohs(rdma_get_src_port(listener_on(more[i])));
		tell(&port, sizeof port);
		receive_note(i, 0);
		MUST(pthread_create(&thread, NULL, waits_for_a_message, &conns[i]) == 0);
		MUST(pthread_create(&thread, NULL, waits_for_a_request, more[i]) == 0);
	}
	idles();
	both_are_here();
	while (woken < 4 && now_ms() < late)
		usleep(1000);
	check(woken == 4, "all four are woken", "%d", woken);
}

static void wakes_them(void)
{
	uint16_t ports[2];

	hear(&ports[0], sizeof ports[0]);
	hear(&ports[1], sizeof ports[1]);
	idles();
	both_are_here();
	for (int i = 0; i < 2; i++) {
		struct conn c = { .id = resolve_to(ports[i]) };

		send_note(i, 0);
		resources(&c, 1, 1);
		MUST(rdma_connect(c.id, &param) == 0);
		must_event(events, RDMA_CM_EVENT_REJECTED);
		rdma_destroy_qp(c.id);
		MUST(rdma_destroy_id(c.id) == 0);
	}
}

static void listeners_end(void)
{
	for (int i = 0; i < 2; i++)
		meet(&conns[i], SLOTS, 1);
	MUST(mr = ibv_reg_mr(domain, notes, sizeof notes, IBV_ACCESS_LOCAL_WRITE));
	if (server)
		sleepers();
	else
		wakes_them();
}

static void listeners(void)
{
	two(listeners_end, 2);
}

static const struct group groups[] = {
	{ "vectors", vectors },
	{ "small_behind_large", small_behind_large },
	{ "acknowledged", acknowledged },
	{ "starting", starting },
	{ "events", waited_for },
	{ "listeners", listeners },
};

int main(int argc, char **argv)
{
	const char *given = getenv("SEED");

	seed = (given ? strtoull(given, NULL, 10) : now_us() * 7919 + (uint64_t)getpid()) | 1;
	printf("# seed %" PRIu64 "\n", seed);
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
