/* What is in the memory that two processes share (crates/llp/src/memory/slab.rs), seen by each of them.
 *
 *	slabs [ADDRESS [GROUP]]		one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * dumps	a dump of a process has nothing of it
 * cleared	a lane that serves another queue pair has nothing of the one before
 *
 * UWARP is the command, and LINK is the link that `uwarp stat` must show: memory. */
#define _GNU_SOURCE
#include "processes.h"

#define MESSAGE 65536
#define ROUNDS 40

static unsigned char *memory;		/* what is sent, what is received */

static void prepare(void)
{
	if (!memory) {
		MUST(memory = calloc(2, MESSAGE));
		MUST(mr = ibv_reg_mr(domain, memory, 2 * MESSAGE, IBV_ACCESS_LOCAL_WRITE));
	}
}

/* A message each way. */
static void exchange(struct conn *c, uint32_t length, uint64_t message)
{
	struct ibv_sge from = { (uintptr_t)memory, length, mr->lkey };
	struct ibv_sge into = { (uintptr_t)memory + MESSAGE, length, mr->lkey };

	MUST(receive(c, &into, 1, 1) == 0);
	for (uint64_t at = 0, word = word_of(message + server, 0); at < length; at += 8)
		memcpy(memory + at, &word, 8);
	MUST(submit(c, IBV_WR_SEND, &from, 1, 2, 0, 0) == 0);
	MUST(poll_one(c->sent).status == IBV_WC_SUCCESS && poll_one(c->came).status == IBV_WC_SUCCESS);
	for (uint64_t at = 0, word = word_of(message + !server, 0); at < length; at += 8)
		MUST(memcmp(memory + MESSAGE + at, &word, 8) == 0);
	both_are_here();
}

static void leave(struct conn *c)
{
	rdma_destroy_qp(c->id);
	MUST(rdma_destroy_id(c->id) == 0);
	MUST(ibv_destroy_cq(c->sent) == 0 && ibv_destroy_cq(c->came) == 0);
	MUST(ibv_destroy_comp_channel(c->channel) == 0);
	*c = (struct conn){ 0 };
}

/* Calls this with the lines of each mapping with that name: its first one, and its flags. Returns how many. */
static int mappings(const char *name, void (*each)(const char *first, const char *flags))
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	char line[512], first[512] = "";
	int count = 0;

	MUST(smaps);
	while (fgets(line, sizeof line, smaps)) {
		unsigned long from, to;

		line[strcspn(line, "\n")] = 0;
		if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
			strcpy(first, strstr(line, name) ? line : "");
		else if (!strncmp(line, "VmFlags:", 8) && *first)
			count++, each(first, line);
	}
	fclose(smaps);
	return count;
}

/* ------------------------------------------------------------------ dumps */

static int dumped;

static void look_at_flags(const char *first, const char *flags)
{
	printf("# %s %s\n", first, flags);
	dumped += !strstr(flags, " dd");
}

static void dumps_end(void)
{
	struct conn c = { 0 };
	int count;

	meet(&c, 4, 1);
	prepare();
	exchange(&c, MESSAGE, 1);
	count = mappings("memfd:uwarp-slab", look_at_flags);
	check(count > 0 && dumped == 0, "no dump has the slabs", "%d of %d are dumped", dumped, count);
	count = mappings("memfd:uwarp-board", look_at_flags);
	check(count > 0 && dumped == 0, "nor the boards", "%d, of %d boards", dumped, count);
}

static void dumps(void)
{
	two(dumps_end, 1);
}

/* ------------------------------------------------------------------ cleared */

/* Before the rings, and one of them. */
#define RINGS (4096 + 2 * 64 * 64)
#define RING (512u << 10)

static const unsigned char *slab;

static void take_slab(const char *first, const char *flags)
{
	(void)flags;
	slab = (const unsigned char *)strtoul(first, NULL, 16);
}

/* How many words of the first lane's rings are this one. Frames begin at any byte. */
static int found(uint64_t wanted)
{
	int count = 0;

	for (size_t at = 0; at + 8 <= 2 * RING; at++) {
		uint64_t word;

		memcpy(&word, slab + RINGS + at, 8);
		count += word == wanted;
	}
	return count;
}

/* Of what both have said. */
static int found_of(uint64_t message)
{
	return found(word_of(message, 0)) + found(word_of(message + 1, 0));
}

static void cleared_end(void)
{
	const unsigned char *first;
	struct conn c = { 0 };
	int rounds = 0, old, of_now;

	meet(&c, 4, 1);
	prepare();
	MUST(mappings("memfd:uwarp-slab", take_slab) == 1);
	first = slab;
	exchange(&c, MESSAGE, 100);
	old = found_of(100);
	check(old > MESSAGE / 8, "the slab has what a queue pair has sent and received", "%d words", old);
	/* A lane is free some time after both queue pairs are gone. */
	do {
		leave(&c);
		both_are_here();
		meet(&c, 4, 1);
		exchange(&c, 64, 200);
		of_now = found_of(200);
	} while (of_now == 0 && ++rounds < ROUNDS);
	MUST(mappings("memfd:uwarp-slab", take_slab) == 1);
	check(of_now == 2 * 64 / 8 && slab == first, "another queue pair has its lane", "%d words", of_now);
	old = found_of(100);
	check(old == 0, "and nothing of what it has sent and received is left", "%d words", old);
}

static void cleared(void)
{
	two(cleared_end, 1);
}

static const struct group groups[] = {
	{ "dumps", dumps },
	{ "cleared", cleared },
};

int main(int argc, char **argv)
{
	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
