/* A process that shares memory with this one is killed at any instant, or writes that memory at random, under
 * traffic: the other end learns of its end as its view promises, what was placed is acknowledged and nothing
 * else, nothing is left, and no other connection notices.
 *
 *     neighbours ADDRESS kill|scribble ROUNDS [SEED]
 *
 * This process is the survivor. Each round it starts a victim (this program again), which connects or accepts,
 * and another thread kills it. A witness, which is a third process, has a connection with the survivor all the
 * time. The victim's memory is a memfd that the survivor has mapped, too, so that it can be looked at when the
 * victim is gone. The instant is found in the ledger of the two ends, read from the survivor's own mapping
 * (crates/llp/src/memory/ledger.rs). Behind the ROUNDS, more are aimed at each phase that has had less than a
 * tenth of them. One that scribbles runs the same traffic, has a thread that spoils what it shares, and is
 * killed in the end. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "neighbours_ledger.h"
#include "neighbours_traffic.h"

static void *scribbles(void *unused)
{
	struct mappings slabs;
	uint64_t pause = any(4) ? any(2000) : 0;
	bool bells = any(4) == 0;

	do
		find_mappings("uwarp-slab", &slabs);
	while (slabs.count == 0);
	usleep((useconds_t)any(3000));
	for (;;) {
		scribble(slabs.start[0]);
		book->scribbled++;
		if (bells)
			spoil_bells();
		if (pause)
			usleep((useconds_t)pause);
	}
	return unused;
}

/* The victim's life: it is killed, or its peer has killed nobody and disconnects. */
static int victim(uint32_t port)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	struct rdma_cm_event event;
	struct end e = { 0 };
	pthread_t thread;

	MUST(ch);
	if (port) {
		resolve_to(&e, ch, port);
		open_resources(&e, book->written[0], book->received[0]);
		book->target[0] = (uintptr_t)book->written, book->key[0] = e.own->rkey;
		MUST(rdma_connect(e.side.id, &param) == 0);
	} else {
		book->port = ntohs(rdma_get_src_port(listener_on(ch)));
		event = must_event(ch, RDMA_CM_EVENT_CONNECT_REQUEST);
		e.side.id = event.id;
		open_resources(&e, book->written[0], book->received[0]);
		book->target[0] = (uintptr_t)book->written, book->key[0] = e.own->rkey;
		MUST(rdma_accept(e.side.id, &param) == 0);
	}
	if (take_event(ch).event != RDMA_CM_EVENT_ESTABLISHED)
		return 1;
	if (shape == SCRIBBLE)
		MUST(pthread_create(&thread, NULL, scribbles, NULL) == 0);
	for (uint64_t turns = 0; !readable(ch->fd, 0); turns++) {
		traffic(&e);
		if (shape == ASLEEP)
			wait_asleep(&e, 50);
		else
			take(&e);
		book->heard = e.came;
		book->told = e.sent;
		if (shape == CLOSING && turns > 20 && e.came && e.sent) {
			book->closing = now_us();
			e.left = true;
			rdma_disconnect(e.side.id);
			while (e.posted != e.done)
				take(&e);
			close_end(&e);
			usleep(2000);
			return 0;
		}
	}
	return 1;
}

/* Sends its count and waits for the survivor's, over and over. */
static int witness(uint32_t port)
{
	struct rdma_event_channel *ch = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	struct end e = { 0 };
	unsigned char *into;

	MUST(ch);
	resolve_to(&e, ch, port);
	MUST(into = calloc(RECEIVES, MESSAGE));
	open_resources(&e, NULL, into);
	param.private_data = "witness", param.private_data_len = 8;
	MUST(rdma_connect(e.side.id, &param) == 0);
	must_event(ch, RDMA_CM_EVENT_ESTABLISHED);
	while (!e.failed) {
		post_send(&e);
		while (e.came < e.sends || e.done < e.posted) {
			if (e.failed || readable(ch->fd, 0))
				die("the witness's connection has ended");
			wait_asleep(&e, 1000);
		}
		usleep(300);
	}
	return 1;
}

static atomic_ulong seen_came;
static atomic_bool seen_over;

static void *with_witness(void *unused)
{
	while (!seen_over) {
		wait_asleep(&seen, 100);
		while (seen.sends < seen.came && seen.posted - seen.done < DEPTH)
			post_send(&seen);
		if (seen.failed && !seen_over)
			die("the connection with the witness has failed");
		seen_came = seen.came;
	}
	return unused;
}

static pid_t start(const char *role, uint32_t port, int fd)
{
	char words[4][24];
	pid_t pid;

	snprintf(words[0], sizeof words[0], "%u", port);
	snprintf(words[1], sizeof words[1], "%d", fd);
	snprintf(words[2], sizeof words[2], "%d", (int)shape);
	snprintf(words[3], sizeof words[3], "%" PRIu64, any(~0ull));
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		execl("/proc/self/exe", "neighbours", address, role, words[0], words[1], words[2], words[3], (char *)NULL);
		_exit(9);
	}
	MUST(pid > 0);
	return pid;
}

/* Of the survivor's memory, to be read where nothing may be mapped any more. */
static int own_memory;

struct killer {
	pid_t pid;
	uint64_t after;			/* us */
	bool aimed;			/* it dies in the phase that is meant, stopped until that is sure */
	const uint64_t *slab;		/* its first pages, mapped once more; NULL: not yet shared */
	uint64_t board;			/* where the victim's is mapped here */
	int mine;			/* which line is the survivor's */
	int events;			/* what the survivor hears of the end by */
	_Atomic bool up, moved;		/* the connection is established; messages have come */
	const char *phase;
	_Atomic bool dead;
	_Atomic uint64_t killed;	/* when the signal went out */
	uint64_t ended;			/* when the system said that it had ended */
	_Atomic uint64_t told;		/* when the survivor heard of it */
};

/* The first lane's lines at this instant. */
static const char *phase_of(const struct killer *k)
{
	uint64_t mine[WORDS], theirs[WORDS], board = 0, tail, head, base;

	if (!k->slab)
		return k->moved ? "some" : "set-up";
	read_line(k->slab, k->mine, mine);
	read_line(k->slab, !k->mine, theirs);
	if (pread(own_memory, &board, 8, (off_t)k->board) != 8)
		board = 0;
	if (!mine[TAIL] && !theirs[TAIL])
		return "set-up";
	if (theirs[FLAGS] & ENDS)
		return "closing";
	tail = mine[TAIL], head = theirs[HEAD], base = mine[BASE];
	if (tail - head + SLOT > RING || theirs[TAIL] - mine[HEAD] + SLOT > RING)
		return "full";
	if (tail != head && (tail - base) / RING != (head - base) / RING)
		return "wrap";
	if (tail != head || theirs[TAIL] != mine[HEAD])
		return "some";
	return board & 0xffff ? "asleep" : "empty";
}

/* Waits a little for the phase that is meant. */
static void await_phase(const struct killer *k)
{
	for (uint64_t until = now_us() + 5000; strcmp(phase_of(k), shape_names[shape]) && now_us() < until; )
		;
}

/* Stops the victim until the ledger shows what is meant. It does not go on, so that is where it dies. */
static void aim(struct killer *k)
{
	for (useconds_t tries = 1; tries < 1000; tries++) {
		siginfo_t info;

		/* Half of what is empty was just in use, and half has been so for a while. */
		if ((shape == EMPTY || shape == ASLEEP) && (k->after % 2 || tries > 20))
			book->quiet = 1;
		if (shape == EMPTY || shape == ASLEEP)
			await_phase(k);
		kill(k->pid, SIGSTOP);
		if (waitid(P_PID, (id_t)k->pid, &info, WSTOPPED | WEXITED | WNOWAIT) || info.si_code != CLD_STOPPED)
			return;
		/* The survivor fills the ring meanwhile. */
		if (shape == FULL || shape == WRAP)
			usleep(shape == FULL ? 20000 : 300);
		k->phase = phase_of(k);
		if (!strcmp(k->phase, shape_names[shape]))
			return;
		kill(k->pid, SIGCONT);
		usleep(tries * 97 % 500);
	}
}

static void *kills(void *arg)
{
	struct killer *k = arg;
	uint64_t until = now_us() + k->after, heard = 0;
	int process = (int)syscall(SYS_pidfd_open, k->pid, 0);

	MUST(process >= 0);
	if (shape == CLOSING)
		for (uint64_t end = now_ms() + LIMIT_MS; !book->closing && now_ms() < end; )
			usleep(k->aimed ? 1 : 50);
	if (shape == CLOSING)
		until = now_us() + k->after;
	if (until > now_us() + 2000)
		usleep((useconds_t)(until - now_us() - 1000));
	while (now_us() < until)
		;
	k->phase = NULL;
	if (k->aimed && k->slab && shape != CLOSING) {
		aim(k);
	} else {
		if (shape == FULL) {
			kill(k->pid, SIGSTOP);
			usleep(20000);
		}
		if (shape == WRAP) {
			/* So that the ring is not empty, and goes round. */
			kill(k->pid, SIGSTOP);
			usleep(3000);
			kill(k->pid, SIGCONT);
		}
		/* Half of them die at this instant, and half when the ledger shows what is meant, if it soon does. */
		if (k->slab && (k->aimed || k->after % 2))
			await_phase(k);
	}
	k->killed = now_us();
	kill(k->pid, SIGKILL);
	if (!k->phase)
		k->phase = phase_of(k);
	k->dead = true;
	while (!k->ended || (k->up && !heard && !k->told)) {
		struct pollfd of[2] = { { .fd = k->ended ? -1 : process, .events = POLLIN },
					{ .fd = k->up && !heard ? k->events : -1, .events = POLLIN } };

		poll(of, 2, 20);
		if (of[0].revents)
			k->ended = now_us();
		if (of[1].revents)
			heard = now_us();
	}
	if (heard && (!k->told || heard < k->told))
		k->told = heard;
	close(process);
	return NULL;
}

static struct { const char *name; int count; } phases[] = {
	{ "set-up", 0 }, { "empty", 0 }, { "full", 0 }, { "wrap", 0 }, { "asleep", 0 }, { "closing", 0 }, { "some", 0 },
};

/* Times, of which the median, the 99th percentile and the longest are printed. */
struct times {
	int count;
	int64_t of[1 << 14];
};
static struct times since_end, since_kill, behind_limit;

static void add_time(struct times *t, int64_t us)
{
	if (t->count < 1 << 14)
		t->of[t->count++] = us;
}

static int by_size(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static void print_times(const char *what, struct times *t)
{
	if (!t->count)
		return;
	qsort(t->of, (size_t)t->count, sizeof *t->of, by_size);
	printf("# %s, us: median %" PRId64 ", 99th percentile %" PRId64 ", longest %" PRId64 "; of %d\n", what,
	       t->of[t->count / 2], t->of[(t->count - 1) * 99 / 100], t->of[t->count - 1], t->count);
}

static uint64_t setup_time = 20000;
static int late, ended, spoiled;
static int exact, uncounted, most_uncounted, told_of, retried;

/* What the victim's ledger counts as placed is in its memory. */
static void check_placed(uint64_t writes, uint64_t sends)
{
	for (uint64_t n = writes; n > 0 && n + SLOTS > writes; n--) {
		const unsigned char *at = book->written[n % SLOTS];

		if (first_of(at) < n || last_of(at, length_of(n % SLOTS)) < n)
			die("Write %" PRIu64 " of %" PRIu64 " counts as placed; there are %" PRIu64 " and %" PRIu64, n,
			    writes, first_of(at), last_of(at, length_of(n % SLOTS)));
	}
	for (uint64_t n = sends; n > 0 && n + RECEIVES > sends; n--)
		if (first_of(book->received[n % RECEIVES]) < n)
			die("Send %" PRIu64 " counts as placed; there is %" PRIu64, n,
			    first_of(book->received[n % RECEIVES]));
}

/* Sends that are in the victim's memory, behind that one. (Of Writes it cannot be told: one that waits for room takes
 * its bytes later, when the next one into its slot has been posted.) */
static int more_placed(uint64_t sends)
{
	int more = 0;

	for (uint64_t slot = 0; slot < RECEIVES; slot++)
		more += first_of(book->received[slot]) > sends;
	return more;
}

/* What the victim has placed is acknowledged, exactly: a work request has success if its message counts as placed
 * in the line that the victim has left, and only then. (One behind a Read without an answer cannot have it:
 * completions are in order.) In the iwarp view success says less: up to LEAD messages may be ahead. The count
 * follows the bytes: the message that was placed by the victim's last instructions may be in memory and not be
 * counted, and so not acknowledged (docs/adr/009). If a thread of the library's received it
 * while the program's thread polled, the program may even know. Both are counted here; the latter was never seen.
 *
 * The other way round: what the victim has written is received, all of it, unless receives were short. */
static void check_exact(const struct end *e, const struct killer *k)
{
	uint64_t theirs[WORDS], mine[WORDS], placed, writes = 0, sends = 0;
	int more;

	read_line(k->slab, !k->mine, theirs);
	read_line(k->slab, k->mine, mine);
	placed = theirs[PLACED] > theirs[ACKED] ? theirs[PLACED] : theirs[ACKED];
	if (placed > e->messages)
		die("%" PRIu64 " of %" PRIu64 " messages count as placed", placed, e->messages);
	if (e->succeeded > placed + (as_iwarp() ? LEAD : 0))
		die("message %" PRIu64 " has success, and %" PRIu64 " are placed", e->succeeded, placed);
	if (!as_iwarp() && e->denied && e->denied <= placed)
		die("message %" PRIu64 " has no success (%s), and %" PRIu64 " are placed", e->denied,
		    ibv_wc_status_str(e->why), placed);
	for (uint64_t n = placed; n > 0 && n + REMEMBERED > e->messages && !(writes && sends); n--) {
		const struct message *message = &e->log[n % REMEMBERED];

		if (message->write && !writes)
			writes = message->nth;
		else if (!message->write && !sends)
			sends = message->nth;
	}
	check_placed(writes, sends);
	told_of += book->heard > sends;
	if (book->told > e->came + (as_iwarp() ? LEAD : 0))
		die("Send %" PRIu64 " of the victim had success, and %" PRIu64 " have come", book->told, e->came);
	if (mine[HEAD] != theirs[TAIL] && e->most < RECEIVES)
		die("%" PRIu64 " bytes that the victim has written are not received", theirs[TAIL] - mine[HEAD]);
	more = more_placed(sends);
	exact++;
	uncounted += more > 0;
	if (more > most_uncounted)
		most_uncounted = more;
}

/* The peer is gone, and the survivor's view says what follows (docs/adr/009, 011). `waits`: its program does
 * nothing about it. `limit`: what retried_for() has said. */
static void check_end(struct end *e, const struct killer *k, bool waits, uint64_t limit)
{
	bool failed = e->failed;
	enum ibv_qp_state state = state_of(e->side.qp);
	uint64_t gone = book->closing && book->closing < k->killed ? book->closing : k->killed;

	while (take(e))
		;
	/* An RNIC's queue pair ends with the stream. InfiniBand's stays as it is until its retries are over. */
	if (state == IBV_QPS_ERR ? !as_iwarp() && !e->failed : state != IBV_QPS_RTS || as_iwarp() || failed)
		die("the queue pair is in %s", state_name(state));
	if (waits && !as_iwarp() && !e->failed && e->posted == e->done)
		post_send(e);
	if (!waits) {
		e->left = true;
		rdma_disconnect(e->side.id);
	}
	for (uint64_t end = now_ms() + LIMIT_MS; e->posted != e->done || e->flushed != RECEIVES; ) {
		take(e);
		if (now_ms() > end)
			die("%" PRIu64 " of %" PRIu64 " requests and %" PRIu64 " of %d receives end", e->done, e->posted,
			    e->flushed, RECEIVES);
	}
	if (waits && !as_iwarp() && e->why != IBV_WC_RETRY_EXC_ERR)
		die("no request is retried");
	if (e->why == IBV_WC_RETRY_EXC_ERR) {
		if (e->failed_at < gone + limit)
			die("RETRY_EXC comes %" PRIu64 " us after the end, and the retries take %" PRIu64,
			    e->failed_at - gone, limit);
		add_time(&behind_limit, (int64_t)(e->failed_at - gone - limit));
	}
	retried += e->why == IBV_WC_RETRY_EXC_ERR;
}

/* The local acknowledgement timeout that the survivor's work requests have: with one retry, 134 ms, less than the
 * shortest time that ADR 011 has, and more than the longest. */
static void set_retries(struct end *e)
{
	static const uint8_t codes[] = { 14, 8, 14, 20 };
	uint8_t code = codes[any(4)];

	MUST(rdma_set_option(e->side.id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &code, 1) == 0);
}

/* One victim. Returns whether it was killed as was meant. */
static bool round_of(int fd, struct rdma_event_channel *listening, uint32_t port, bool connects, bool waits,
		     bool aimed)
{
	struct rdma_event_channel *ch = connects ? rdma_create_event_channel() : listening;
	struct rdma_conn_param param = parameters();
	struct killer k = { .mine = connects ? 0 : 1, .aimed = aimed };
	struct end e = { 0 };
	unsigned char *around = calloc(3 * RECEIVES, MESSAGE), *into = around + RECEIVES * MESSAGE;
	struct mappings known_slabs, known_boards;
	uint64_t begun = now_us(), limit = 0;
	bool established = false, over = false, good = true, killing = false;
	pthread_t thread;
	int status;

	MUST(ch && around);
	k.events = ch->fd;
	memset(book, 0, sizeof *book);
	find_mappings("uwarp-slab", &known_slabs);
	find_mappings("uwarp-board", &known_boards);
	k.pid = start("victim", connects ? 0 : port, fd);
	if (shape == SETUP) {
		k.after = any(setup_time * (aimed ? 4 : 5) / 4);
		MUST(pthread_create(&thread, NULL, kills, &k) == 0);
		killing = true;
	}
	if (connects) {
		for (uint64_t end = now_ms() + LIMIT_MS; !book->port && !k.dead && now_ms() < end; )
			usleep(50);
		if (book->port) {
			resolve_to(&e, ch, book->port);
			set_retries(&e);
			open_resources(&e, NULL, into);
			MUST(rdma_connect(e.side.id, &param) == 0);
		} else {
			over = true;
		}
	}
	for (uint64_t end = now_ms() + LIMIT_MS; !over; ) {
		struct rdma_cm_event event;

		if (now_ms() > end)
			die("the survivor does not learn that a victim is dead: %s, %s, posted %" PRIu64 ", done %" PRIu64,
			    shape_names[shape], connects ? "it has connected" : "it has accepted", e.posted, e.done);
		/* A victim that dies before its request is heard of leaves nothing to be told. */
		if (!e.side.id && k.dead && !readable(ch->fd, QUIET_MS))
			break;
		if (k.dead)
			book->quiet = 0;
		if (established) {
			traffic(&e);
			if (shape == ASLEEP && any(2))
				wait_asleep(&e, 5);
			else
				take(&e);
			k.moved = k.moved || e.came || e.sent || e.placed;
		}
		/* Once the first message is there, the ledger is, and there is something to be killed. */
		if (established && !killing && (k.moved || shape == SCRIBBLE)) {
			if (shape != SCRIBBLE)
				k.slab = see_slab(new_mapping("uwarp-slab", &known_slabs));
			k.board = new_mapping("uwarp-board", &known_boards);
			if ((!k.slab || !k.board) && shape != SCRIBBLE && !book->closing)
				die("the connection does not go through memory");
			k.after = shape == SCRIBBLE ? 100000 + any(200000) : any(any(2) ? 20000 : 1000);
			if (shape == CLOSING && (aimed || any(2)))
				k.after = any(100);
			MUST(pthread_create(&thread, NULL, kills, &k) == 0);
			killing = true;
		}
		if (!readable(ch->fd, established ? 0 : 1))
			continue;
		event = take_event(ch);
		switch (event.event) {
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			e.side.id = event.id;
			set_retries(&e);
			open_resources(&e, NULL, into);
			if (rdma_accept(e.side.id, &param))
				over = true;
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			k.up = established = true;
			setup_time = (3 * setup_time + now_us() - begun) / 4;
			limit = retried_for(e.side.qp);
			if (book->target[0])
				e.remote = book->target[0], e.rkey = (uint32_t)book->key[0];
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
		case RDMA_CM_EVENT_REJECTED:
		case RDMA_CM_EVENT_UNREACHABLE:
		case RDMA_CM_EVENT_CONNECT_ERROR:
			if (established && event.event != RDMA_CM_EVENT_DISCONNECTED)
				die("event %s of a connection that was established", rdma_event_str(event.event));
			over = true;
			break;
		default:
			die("event %s", rdma_event_str(event.event));
		}
	}
	if (!k.told)
		k.told = now_us();
	if (!killing || (shape != CLOSING && shape != SCRIBBLE && !k.killed)) {
		/* It has ended by itself: memory was not granted in time. */
		good = false;
		printf("# not in time: %s, %s, %sestablished, %s\n", shape_names[shape], connects ? "connects" : "accepts",
		       established ? "" : "not ", killing ? "not dead yet" : "not begun");
		kill(k.pid, SIGKILL);
	}
	if (killing)
		pthread_join(thread, NULL);
	MUST(waitpid(k.pid, &status, 0) == k.pid);
	if (shape != SCRIBBLE && WIFEXITED(status) && WEXITSTATUS(status) == 2)
		die("the victim has failed");
	if (e.side.qp && (shape == SCRIBBLE || !good || !established)) {
		e.left = true;
		ended += e.failed;
		rdma_disconnect(e.side.id);
		for (uint64_t end = now_ms() + LIMIT_MS; e.posted != e.done; ) {
			take(&e);
			if (now_ms() > end)
				die("%" PRIu64 " of %" PRIu64 " requests complete", e.done, e.posted);
		}
		spoiled += book->scribbled > 0;
	} else if (e.side.qp) {
		check_end(&e, &k, waits, limit);
		if (k.slab)
			check_exact(&e, &k);
	}
	if (good && established && WIFSIGNALED(status) && shape < CLOSING) {
		add_time(&since_end, (int64_t)(k.told - k.ended));
		add_time(&since_kill, (int64_t)(k.told - k.killed));
	}
	if (k.slab)
		munmap((void *)k.slab, LEDGER_LENGTH);
	close_end(&e);
	if (connects)
		rdma_destroy_event_channel(ch);
	for (size_t i = 0; i < RECEIVES * MESSAGE; i++)
		if (around[i] || around[2 * RECEIVES * MESSAGE + i])
			die("memory beside a receive was written");
	free(around);
	for (size_t i = 0; good && WIFSIGNALED(status) && shape != SCRIBBLE && i < sizeof phases / sizeof *phases; i++)
		phases[i].count += !strcmp(phases[i].name, k.phase);
	return good;
}

/* Waits until there are as few of something as there were. */
static void come_down(const char *what, int (*count)(void), int to)
{
	int n = count();

	for (uint64_t end = now_ms() + LIMIT_MS; n > to && now_ms() < end; n = count())
		usleep(10000);
	check(n <= to, what, "%d are left, there were %d", n, to);
}

/* Files and the like of a directory whose names have that in them. */
static int entries_of(const char *path, const char *with)
{
	DIR *dir = opendir(path);
	struct dirent *entry;
	int n = 0;

	while (dir && (entry = readdir(dir)))
		n += entry->d_type != DT_DIR && strstr(entry->d_name, with) != NULL;
	if (dir)
		closedir(dir);
	return n;
}

static int descriptors(void)
{
	return entries_of("/proc/self/fd", "");
}

static int named(void)
{
	return entries_of("/dev/shm", "uwarp");
}

static int mapped(const char *name)
{
	struct mappings found;

	find_mappings(name, &found);
	return found.count;
}

static int slabs(void)
{
	return mapped("memfd:uwarp-slab");
}

/* Whatever it is. */
static int shared(void)
{
	return mapped("/memfd:") + mapped("/dev/shm/") + mapped("/SYSV");
}

/* The phase of which there were the fewest; -1: each has had so many. */
static int rarest(int want)
{
	int least = 0;

	for (int i = 1; i < SHAPES; i++)
		if (phases[i].count < phases[least].count)
			least = i;
	return phases[least].count < want ? least : -1;
}

static void check_kills(int rounds, int more, int want)
{
	printf("# of %d, and %d that were aimed at the rare phases:", rounds, more);
	for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
		printf(" %s %d,", phases[i].name, phases[i].count);
	printf(" not in time for memory %d\n", late);
	printf("# acknowledged exactly in %d, RETRY_EXC in %d; in %d, Sends were in place and not counted, at most %d;"
	       " in %d, the program knew of one\n", exact, retried, uncounted, most_uncounted, told_of);
	print_times("from the end of the process, as the system says it, until the survivor's event", &since_end);
	print_times("from the signal until the survivor's event", &since_kill);
	print_times("from the end of the time of ADR 011 until RETRY_EXC", &behind_limit);
	check(told_of <= exact / 20, "what the victim's program knew is acknowledged", "not in %d of %d", told_of, exact);
	check(rarest(want) < 0, "each phase has had its kills", "%d want %d", phases[rarest(0x7fffffff)].count, want);
}

static int survivor(int rounds, bool scribbling)
{
	struct rdma_event_channel *listening = rdma_create_event_channel(), *events = rdma_create_event_channel();
	struct rdma_conn_param param = parameters();
	int fd = memfd_create("book", 0), fds, of_slabs, of_all, of_names, alive, i, want = scribbling ? 0 : rounds / 10;
	pid_t watching;
	pthread_t thread;
	uint32_t port;
	unsigned char *into = calloc(RECEIVES, MESSAGE);
	struct rdma_cm_id *listener;

	MUST(listening && events && into && fd >= 0 && ftruncate(fd, sizeof *book) == 0);
	/* What a victim has started, and left, is found among this process's children. */
	MUST(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
	MUST((own_memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC)) >= 0);
	book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(book != MAP_FAILED);
	listener = listener_on(listening);
	port = ntohs(rdma_get_src_port(listener));
	watching = start("witness", port, fd);
	seen.side.id = must_event(listening, RDMA_CM_EVENT_CONNECT_REQUEST).id;
	open_resources(&seen, NULL, into);
	MUST(rdma_migrate_id(seen.side.id, events) == 0);
	MUST(rdma_accept(seen.side.id, &param) == 0);
	must_event(events, RDMA_CM_EVENT_ESTABLISHED);
	MUST(pthread_create(&thread, NULL, with_witness, NULL) == 0);
	for (uint64_t end = now_ms() + LIMIT_MS; !seen_came && now_ms() < end; )
		usleep(1000);
	fds = descriptors(), of_slabs = slabs(), of_all = shared(), of_names = named();
	check(of_slabs == 1, "the witness's connection goes through memory", "%d slabs", of_slabs);
	for (i = 0; i < rounds || (i < 4 * rounds && rarest(want) >= 0); i++) {
		unsigned long came = seen_came;
		bool aimed = i >= rounds;
		int turn = scribbling ? i : i / SHAPES;

		shape = scribbling ? SCRIBBLE : (enum shape)(aimed ? rarest(want) : i % SHAPES);
		if (aimed)
			turn = (int)any(4);
		/* The survivor's end is the client's and the server's in turn; of some, all requests are waited for. */
		if (!round_of(fd, listening, port, turn % 2, turn % 4 == 3 || turn % 8 == 4, aimed))
			late++;
		for (uint64_t end = now_ms() + LIMIT_MS; seen_came < came + 2; usleep(200))
			if (now_ms() > end)
				die("the connection with the witness stands still");
	}
	alive = waitpid(watching, NULL, WNOHANG);
	check(alive == 0 && !readable(events->fd, 0), "the other connection has noticed nothing", "it has ended");
	if (scribbling) {
		printf("# %d of %d have spoiled the memory; %d connections had ended before them\n", spoiled, rounds, ended);
		check(spoiled > rounds / 2, "most have spoiled the memory", "%d of %d have", spoiled, rounds);
	} else {
		check_kills(rounds, i - rounds, want);
	}
	check(late <= i / 4, "most victims are killed as was meant", "%d of %d are not", late, i);
	come_down("no memory is left", slabs, of_slabs);
	come_down("nothing else is left mapped", shared, of_all);
	come_down("no descriptor is left", descriptors, fds);
	come_down("no name is left", named, of_names);
	/* The thread may see the end before this one hears of it. */
	seen_over = true;
	kill(watching, SIGKILL);
	MUST(waitpid(watching, NULL, 0) == watching);
	must_event(events, RDMA_CM_EVENT_DISCONNECTED);
	pthread_join(thread, NULL);
	check(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD, "no process is left", "there is one");
	rdma_disconnect(seen.side.id);
	close_end(&seen);
	come_down("no memory of the witness is left", slabs, 0);
	free(into);
	rdma_destroy_id(listener);
	rdma_destroy_event_channel(events);
	rdma_destroy_event_channel(listening);
	return failures ? 1 : 0;
}

int main(int argc, char **argv)
{
	MUST(argc >= 4);
	address = argv[1];
	if (argc == 7) {
		book = mmap(NULL, sizeof *book, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[4]), 0);
		MUST(book != MAP_FAILED);
		close(atoi(argv[4]));
		shape = (enum shape)atoi(argv[5]);
		seed = strtoull(argv[6], NULL, 10) | 1;
		return (strcmp(argv[2], "witness") ? victim : witness)((uint32_t)atoi(argv[3]));
	}
	seed = argc > 4 ? strtoull(argv[4], NULL, 10) : now_us();
	seed |= 1;
	printf("# seed %" PRIu64 "\n", seed);
	return survivor(atoi(argv[3]), !strcmp(argv[2], "scribble"));
}
