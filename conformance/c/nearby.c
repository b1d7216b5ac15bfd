/* Datagrams to processes of this host that are killed, are stopped, spoil the memory that they share with us,
 * or belong to another user. A witness, which nothing happens to, answers all along.
 *
 *	nearby kill|stop|scribble|user ROUNDS
 *	nearby echo|scribbler		what it starts: answers datagrams, and spoils the memory
 *
 * It asserts that the datagrams go by memory: /proc/self/maps shows what is shared.
 */
#include <pthread.h>
#include <sys/mman.h>

#include "chance.h"
#include "datagrams.h"

#define OTHER_USER 54321

static const char *self;

/* How much memory is shared: each process that datagrams go to by memory has some of its own. */
static int slabs(uint64_t *first)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int count = 0;

	MUST(maps);
	while (fgets(line, sizeof line, maps)) {
		if (!strstr(line, "memfd:uwarp-slab"))
			continue;
		if (first && !count)
			*first = strtoull(line, NULL, 16);
		count++;
	}
	fclose(maps);
	return count;
}

static int descriptors(void)
{
	int count = 0;

	for (int fd = 0; fd < 1024; fd++)
		count += fcntl(fd, F_GETFD) >= 0;
	return count;
}

/* ------------------------------------------------------------------ who answers */

static void *scribbles(void *unused)
{
	uint64_t start = 0;

	(void)unused;
	while (!slabs(&start))
		usleep(200);
	for (;;) {
		uint64_t *words = (uint64_t *)start;

		/* Lines of lane 0, the ready words, and the front of the rings. */
		switch (any(4)) {
		case 0:
			words[4096 / 8 + any(16)] = any(2) ? any(1 << 22) : any(~0ull);
			break;
		case 1:
			words[any(16)] = any(~0ull);
			break;
		default:
			words[(4096 + 2 * 64 * 64) / 8 + any(2) * (2 << 20) / 8 + any(8192)] = any(100);
		}
		if (!any(64))
			usleep(100);
	}
	return NULL;
}

static __attribute__((noreturn)) void answer(bool spoils)
{
	struct end e;
	pthread_t thread;

	open_device();
	end_open(&e);
	for (int i = 0; i < SLOTS; i++)
		receive(&e, i);
	MUST(write(3, &e.qp->qp_num, sizeof e.qp->qp_num) == sizeof e.qp->qp_num);
	if (spoils)
		MUST(pthread_create(&thread, NULL, scribbles, NULL) == 0);
	for (;;) {
		int slot;
		struct ibv_wc wc;
		struct ibv_sge sge;
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

		if (ibv_poll_cq(e.rcq, 1, &wc) != 1) {
			sched_yield();
			continue;
		}
		MUST(wc.status == IBV_WC_SUCCESS);
		slot = (int)wc.wr_id;
		/* Only what waits for an answer. */
		if (wc.byte_len == GRH + 4) {
			sge = sge_of(e.mr, (size_t)slot * SLOT + GRH, 4);
			wr.wr.ud.ah = e.ah;
			wr.wr.ud.remote_qpn = wc.src_qp;
			wr.wr.ud.remote_qkey = QKEY;
			wr.send_flags = IBV_SEND_SIGNALED;
			MUST(ibv_post_send(e.qp, &wr, &bad) == 0);
			while (ibv_poll_cq(e.scq, 1, &wc) != 1)
				sched_yield();
			MUST(wc.status == IBV_WC_SUCCESS);
		}
		receive(&e, slot);
	}
}

struct other {
	pid_t pid;
	uint32_t qpn;
};

static struct other start(const char *what, bool of_another_user)
{
	struct other other;
	int fds[2];

	MUST(pipe(fds) == 0);
	MUST((other.pid = fork()) >= 0);
	if (other.pid == 0) {
		if (dup2(fds[1], 3) < 0)
			_exit(3);
		if (of_another_user && (setgid(OTHER_USER) || setuid(OTHER_USER)))
			_exit(4);
		execl(self, self, what, (char *)NULL);
		_exit(5);
	}
	close(fds[1]);
	if (!readable(fds[0], LIMIT_MS) || read(fds[0], &other.qpn, sizeof other.qpn) != sizeof other.qpn)
		die("a process does not begin");
	close(fds[0]);
	return other;
}

static void kill_it(struct other other)
{
	MUST(kill(other.pid, SIGKILL) == 0);
	MUST(waitpid(other.pid, NULL, 0) == other.pid);
}

/* ------------------------------------------------------------------ who asks */

static struct end me;
static uint32_t last;

static void say(uint32_t qpn, uint32_t length)
{
	struct ibv_sge sge;
	struct ibv_send_wr wr = request(&me, &me, &sge, length);

	wr.wr.ud.remote_qpn = qpn;
	MUST(post_wr(&me, wr) == 0);
	if (poll_one(me.scq).status != IBV_WC_SUCCESS)
		die("a Send fails");
}

/* Whether the answer comes in time. Others may come before it, late. */
static bool ask(uint32_t qpn, int ms)
{
	uint32_t number = ++last, got;
	struct ibv_wc wc;

	memcpy(outgoing(&me), &number, 4);
	say(qpn, 4);
	do {
		if (!poll_within(me.rcq, &wc, ms))
			return false;
		MUST(wc.status == IBV_WC_SUCCESS);
		memcpy(&got, me.memory + wc.wr_id * SLOT + GRH, 4);
		receive(&me, (int)wc.wr_id);
	} while (got != number);
	return true;
}

static void ask_witness(struct other witness, int times, const char *name)
{
	int lost = 0;

	for (int i = 0; i < times; i++)
		lost += !ask(witness.qpn, 10000);
	if (lost)
		check(false, name, "%d of %d answers are missing", lost, times);
}

/* Until there is so much memory. */
static void share(uint32_t qpn, int want)
{
	uint64_t end = now_ms() + LIMIT_MS;

	while (slabs(NULL) < want) {
		ask(qpn, 20);
		if (now_ms() > end)
			die("no memory after %d s", LIMIT_MS / 1000);
	}
	/* Both directions. */
	for (int i = 0; i < 20; i++)
		ask(qpn, 20);
}

static void come_down(const char *name, int (*count)(void), int want)
{
	uint64_t end = now_ms() + LIMIT_MS;

	while (count() > want && now_ms() < end)
		usleep(1000);
	check(count() <= want, name, "%d, and there were %d", count(), want);
}

static int all_slabs(void)
{
	return slabs(NULL);
}

static void killed(struct other witness, int rounds)
{
	for (int round = 0; round < rounds; round++) {
		struct other victim = start("echo", false);
		uint64_t until;

		/* Some are killed while the two still agree. */
		if (round % 4)
			share(victim.qpn, 2);
		until = now_ms() + any(4);
		do {
			if (any(2))
				ask(victim.qpn, 20);
			else
				say(victim.qpn, (uint32_t)any(LARGEST + 1));
		} while (now_ms() < until);
		kill_it(victim);
		ask_witness(witness, 3, "the witness answers after a kill");
		for (int i = 0; i < 5; i++)
			say(victim.qpn, 100);
	}
	check(true, "neighbours are killed", "");
}

static void stopped(struct other witness, int rounds)
{
	struct other victim = start("echo", false);

	share(victim.qpn, 2);
	for (int round = 0; round < rounds; round++) {
		uint64_t end = now_ms() + LIMIT_MS;
		bool answers = false;

		MUST(kill(victim.pid, SIGSTOP) == 0);
		/* More than the ring has room for. */
		for (int i = 0; i < 1500; i++) {
			say(victim.qpn, LARGEST);
			if (i % 100 == 0)
				ask_witness(witness, 1, "the witness answers beside one that is stopped");
		}
		MUST(kill(victim.pid, SIGCONT) == 0);
		while (!answers && now_ms() < end)
			answers = ask(victim.qpn, 100);
		check(answers, "who was stopped goes on", "no answer");
	}
	kill_it(victim);
}

static void scribbled(struct other witness, int rounds)
{
	for (int round = 0; round < rounds; round++) {
		struct other victim = start("scribbler", false);

		for (int i = 0; i < 300; i++) {
			ask(victim.qpn, 1);
			say(victim.qpn, (uint32_t)any(LARGEST + 1));
			if (i % 20 == 0)
				ask_witness(witness, 1, "the witness answers beside one that scribbles");
		}
		kill_it(victim);
	}
	check(true, "who scribbles spoils his own datagrams", "");
}

static void another_user(int rounds)
{
	for (int round = 0; round < rounds; round++) {
		struct other other = start("echo", true);
		int answers = 0;

		for (int i = 0; i < 500; i++)
			answers += ask(other.qpn, 10000);
		check(answers == 500, "another user answers", "%d of 500", answers);
		check(slabs(NULL) == 1, "and shares no memory", "%d", slabs(NULL));
		kill_it(other);
	}
}

int main(int argc, char **argv)
{
	struct other witness;
	int fds, rounds = argc > 2 ? atoi(argv[2]) : 1;

	self = argv[0];
	seed += (uint64_t)getpid() * 7919;
	if (argc > 1 && (!strcmp(argv[1], "echo") || !strcmp(argv[1], "scribbler")))
		answer(!strcmp(argv[1], "scribbler"));
	open_device();
	end_open(&me);
	for (int i = 0; i < SLOTS; i++)
		receive(&me, i);
	witness = start("echo", false);
	share(witness.qpn, 1);
	/* Time for the two to agree. Where both have asked at once, each has made some, and what is not used goes
	 * when nobody has used it for 2 s. */
	for (uint64_t start = now_ms(); now_ms() < start + 500 || (slabs(NULL) > 1 && now_ms() < start + 10000);)
		ask(witness.qpn, 10000);
	check(slabs(NULL) == 1, "datagrams go by memory", "%d", slabs(NULL));
	fds = descriptors();
	if (argc > 1 && !strcmp(argv[1], "kill"))
		killed(witness, rounds);
	else if (argc > 1 && !strcmp(argv[1], "stop"))
		stopped(witness, rounds);
	else if (argc > 1 && !strcmp(argv[1], "scribble"))
		scribbled(witness, rounds);
	else if (argc > 1 && !strcmp(argv[1], "user"))
		another_user(rounds);
	else
		die("kill, stop, scribble or user?");
	ask_witness(witness, 1000, "the witness answers to the end");
	come_down("no memory is left", all_slabs, 1);
	come_down("no descriptor is left", descriptors, fds);
	kill_it(witness);
	come_down("no memory of the witness is left", all_slabs, 0);
	end_close(&me);
	close_device();
	return failures ? 1 : 0;
}
