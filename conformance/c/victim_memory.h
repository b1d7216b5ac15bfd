/* The memory of the victim: its regions, between pages without access and painted, and what changed in them. */
#ifndef UWARP_CONFORMANCE_VICTIM_MEMORY_H
#define UWARP_CONFORMANCE_VICTIM_MEMORY_H

#include <inttypes.h>
#include <sys/mman.h>

#include "common.h"

#define PAINT 0xa5
#define SLOTS 16
#define SLOT 1024
#define PAGE 4096u

struct region {
	const char *name;
	size_t before, len, after;	/* paint around the region, so that all three fill pages */
	int access;			/* of the region; 0 for none */
	bool stranger;			/* in another protection domain */
	const char *over;		/* the region whose buffer this is another key of */
	unsigned char *at;
	struct ibv_mr *mr;
};

#define LOCAL IBV_ACCESS_LOCAL_WRITE
#define READ IBV_ACCESS_REMOTE_READ
#define WRITE IBV_ACCESS_REMOTE_WRITE
#define ATOMIC IBV_ACCESS_REMOTE_ATOMIC

static struct region regions[] = {
	{ .name = "write", .len = 2 * PAGE, .access = LOCAL | WRITE },
	{ .name = "read", .len = 2 * PAGE, .access = READ },
	{ .name = "both", .len = 256 * PAGE, .access = LOCAL | READ | WRITE },
	{ .name = "odd", .before = 1500, .len = 1000, .after = PAGE - 2500, .access = LOCAL | READ | WRITE },
	{ .name = "edge", .before = PAGE - 100, .len = 100, .access = LOCAL | READ | WRITE },
	{ .name = "start", .len = 100, .after = PAGE - 100, .access = LOCAL | READ | WRITE },
	{ .name = "empty", .before = 2000, .after = PAGE - 2000, .access = LOCAL | READ | WRITE },
	{ .name = "local", .len = PAGE, .access = LOCAL },
	{ .name = "foreign", .len = PAGE, .access = LOCAL | READ | WRITE, .stranger = true },
	{ .name = "dead", .len = PAGE, .access = LOCAL | READ | WRITE },
	{ .name = "recv", .len = SLOTS * SLOT, .access = LOCAL },
	{ .name = "sink", .len = PAGE, .access = LOCAL },
	{ .name = "readers", .len = PAGE, .access = READ, .over = "write" },
	{ .name = "strangers", .len = PAGE, .access = LOCAL | READ | WRITE, .stranger = true, .over = "write" },
	/* No right for peers but through memory windows. */
	{ .name = "bind", .len = 256 * PAGE, .access = LOCAL | IBV_ACCESS_MW_BIND },
	/* Its last four bytes are a part of eight. */
	{ .name = "atomic", .before = PAGE - 104, .len = 100, .after = 4, .access = LOCAL | READ | WRITE | ATOMIC },
	{ .name = "atomics", .len = PAGE, .access = LOCAL | ATOMIC },
};
#define REGIONS (sizeof regions / sizeof *regions)

static struct ibv_context *context;
static struct ibv_pd *pd, *other_pd;

/* Pages for length bytes with a page without access before and behind. */
static unsigned char *guarded(size_t length)
{
	unsigned char *all = mmap(NULL, length + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	MUST(all != MAP_FAILED);
	MUST(length == 0 || mprotect(all + PAGE, length, PROT_READ | PROT_WRITE) == 0);
	return all + PAGE;
}

static struct region *region(const char *name)
{
	for (size_t i = 0; i < REGIONS; i++)
		if (!strcmp(regions[i].name, name))
			return &regions[i];
	die("no region %s", name);
	return NULL;
}

static size_t body_of(const struct region *r)
{
	return r->before + r->len + r->after;
}

static void register_all(void)
{
	for (size_t i = 0; i < REGIONS; i++) {
		struct region *r = &regions[i];

		if (!r->at)
			r->at = r->over ? region(r->over)->at : guarded(body_of(r)) + r->before;
		MUST(mprotect(r->at - r->before, body_of(r), PROT_READ | PROT_WRITE) == 0);
		memset(r->at - r->before, PAINT, body_of(r));
		if (r->mr)
			MUST(ibv_dereg_mr(r->mr) == 0);
		MUST(r->mr = ibv_reg_mr(r->stranger ? other_pd : pd, r->at, r->len, r->access));
		printf("region %s %u %" PRIuPTR " %zu\n", r->name, r->mr->rkey, (uintptr_t)r->at, r->len);
		if (!strcmp(r->name, "dead")) {
			MUST(ibv_dereg_mr(r->mr) == 0);
			r->mr = NULL;
		}
	}
}

/* Says which bytes of each region's pages changed, as NAME:FIRST-LAST counted from the region's start, and
 * paints them. */
static void print_changes(void)
{
	const char *comma = "";

	printf(" changed=");
	for (size_t i = 0; i < REGIONS; i++) {
		const struct region *r = &regions[i];
		unsigned char *p = r->at - r->before;
		size_t n = body_of(r), first = 0, last = n;

		/* What was retired cannot be looked at, and could not be written. */
		if (r->over || (!r->mr && strcmp(r->name, "dead")))
			continue;
		if (p[0] == PAINT && !memcmp(p, p + 1, n - 1))
			continue;
		while (p[first] == PAINT)
			first++;
		while (p[last - 1] == PAINT)
			last--;
		printf("%s%s:%ld-%ld", comma, r->name, (long)first - (long)r->before, (long)last - 1 - (long)r->before);
		comma = ",";
		memset(p, PAINT, n);
	}
}

#endif
