/* A program that spins on its memory, never calls the library, and goes before all others: what its peer writes gets
 * there, since the library's thread goes before it (docs/contracts.md, "Who makes progress").
 *
 *	priorities [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * fifo		SCHED_FIFO, all threads on one processor
 * nice		nice -20, likewise
 *
 * UWARP is the command, and LINK is the link that `uwarp stat` must show at both ends. */
#define _GNU_SOURCE
#include <sched.h>

#include "processes.h"

#define ROUNDS 200
/* Of processor time that the program spins for while a message is there, until it gives way. */
#define ENOUGH_US 20000

static struct shared {
	atomic_uint posted, seen, late;
	uint64_t address;
	uint32_t rkey;
} *shared;

static uint64_t *memory;
static int processors;

static uint64_t own_time_us(void)
{
	struct timespec ts;

	MUST(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts) == 0);
	return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}

/* On a processor of its own, so that it takes nothing from the client but what the test is about. */
static void on_one_processor(void)
{
	cpu_set_t all, one;
	int first = 0;

	MUST(sched_getaffinity(0, sizeof all, &all) == 0);
	processors = CPU_COUNT(&all);
	while (!CPU_ISSET(first, &all))
		first++;
	CPU_ZERO(&one);
	CPU_SET(first, &one);
	MUST(sched_setaffinity(0, sizeof one, &one) == 0);
}

/* Until this message is there. Returns whether it had to give way for that. */
static bool spin(volatile uint64_t *word, uint64_t wanted)
{
	uint64_t there_since = 0;
	bool late = false;

	for (unsigned int n = 1; *word != wanted; n++) {
		if (n % 4096)
			continue;
		if (!there_since && atomic_load(&shared->posted) >= wanted)
			there_since = own_time_us();
		late |= there_since && own_time_us() - there_since > ENOUGH_US;
		/* On one processor the client needs it, too. */
		if (late || processors == 1)
			usleep(100);
	}
	return late;
}

static void end(void)
{
	struct conn c = { 0 };

	meet(&c, 4, 1);
	MUST(memory = calloc(1, 4096));
	MUST(mr = ibv_reg_mr(domain, memory, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	if (server) {
		shared->address = (uintptr_t)memory;
		shared->rkey = mr->rkey;
	}
	both_are_here();
	for (uint64_t round = 1; round <= ROUNDS; round++) {
		struct ibv_sge from = { (uintptr_t)memory, 8, mr->lkey };

		if (server) {
			if (spin(memory, round))
				atomic_fetch_add(&shared->late, 1);
			atomic_store(&shared->seen, (unsigned int)round);
			continue;
		}
		*memory = round;
		MUST(submit(&c, IBV_WR_RDMA_WRITE, &from, 1, round, shared->address, shared->rkey) == 0);
		atomic_store(&shared->posted, (unsigned int)round);
		MUST(poll_one(c.sent).status == IBV_WC_SUCCESS);
		for (uint64_t until = now_ms() + LIMIT_MS; atomic_load(&shared->seen) < round; sched_yield())
			if (now_ms() > until)
				die("the server does not see message %" PRIu64, round);
	}
	both_are_here();
	if (server)
		check(atomic_load(&shared->late) == 0, "what the peer writes comes while the program spins",
		      "%u of %d only when it gave way", atomic_load(&shared->late), ROUNDS);
}

static void run(void (*first)(void))
{
	shared = in_common(sizeof *shared);
	at_first = first;
	two(end, 1);
}

static void with_fifo(void)
{
	struct sched_param param = { .sched_priority = 10 };

	if (!server)
		return;
	on_one_processor();
	if (sched_setscheduler(0, SCHED_FIFO, &param) != 0)
		printf("# left out: no real-time priority here: %s\n", strerror(errno));
}

static void fifo(void)
{
	run(with_fifo);
}

static void with_nice(void)
{
	if (!server)
		return;
	on_one_processor();
	if (setpriority(PRIO_PROCESS, 0, -20) != 0)
		printf("# left out: no nice -20 here: %s\n", strerror(errno));
}

static void nice_20(void)
{
	run(with_nice);
}

static const struct group groups[] = {
	{ "fifo", fifo },
	{ "nice", nice_20 },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
