/* What the two ends of a stream through memory say to each other, as another program can see it: the
 * mappings of a process, and the ledger in them (crates/llp/src/memory/ledger.rs). */
#ifndef UWARP_CONFORMANCE_NEIGHBOURS_LEDGER_H
#define UWARP_CONFORMANCE_NEIGHBOURS_LEDGER_H

#include <dirent.h>
#include <inttypes.h>
#include <sys/mman.h>

#include "chance.h"
#include "common.h"

#define MOST_MAPPINGS 64
struct mappings {
	int count;
	uint64_t start[MOST_MAPPINGS], inode[MOST_MAPPINGS];
};

/* The mappings of this process with that name. */
static void find_mappings(const char *name, struct mappings *found)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];

	MUST(maps);
	found->count = 0;
	while (found->count < MOST_MAPPINGS && fgets(line, sizeof line, maps)) {
		uint64_t *start = &found->start[found->count], *inode = &found->inode[found->count];

		if (strstr(line, name))
			found->count += sscanf(line, "%" SCNx64 "-%*x %*s %*x %*s %" SCNu64, start, inode) == 2;
	}
	fclose(maps);
}

/* Where one begins that was not known; 0: there is none. */
static uint64_t new_mapping(const char *name, const struct mappings *known)
{
	struct mappings now;

	find_mappings(name, &now);
	for (int i = 0, k; i < now.count; i++) {
		for (k = 0; k < known->count && known->inode[k] != now.inode[i]; k++)
			;
		if (k == known->count)
			return now.start[i];
	}
	return 0;
}

#define RING (512u << 10)
/* The words of a line; two lines, one of each end, are a lane's. FLAGS: 2 and 4 say that an end ends its stream. */
enum { TAIL, HEAD, ACKED, FLAGS = 4, BASE = 5, PLACED = 6, WORDS = 8 };
#define ENDS 6
/* A page of news, then the lines of 64 lanes. */
#define LEDGER 4096
#define LEDGER_LENGTH (LEDGER + 64 * 2 * WORDS * 8)

/* A mapping of one's own of the pages that are mapped there: the library's goes away with the stream. (That is
 * what mremap does with a length of 0.) NULL: nothing is there any more. */
static inline const uint64_t *see_slab(uint64_t slab)
{
	void *at = slab ? mremap((void *)slab, 0, LEDGER_LENGTH, MREMAP_MAYMOVE) : MAP_FAILED;

	return at == MAP_FAILED ? NULL : at;
}

/* The first lane's line of this side, word by word. */
static inline void read_line(const uint64_t *slab, int side, uint64_t line[WORDS])
{
	for (int i = 0; i < WORDS; i++)
		line[i] = __atomic_load_n(&slab[LEDGER / 8 + side * WORDS + i], __ATOMIC_ACQUIRE);
}

/* Spoils what this process shares with the survivor, each time a little. */
static void scribble(uint64_t slab)
{
	uint64_t *words = (uint64_t *)slab, *rings = words + 4096 / 8 + 2 * 64 * 8, at;
	uint64_t lane = any(4) ? 0 : any(64), side = any(2);
	uint64_t *line = words + 4096 / 8 + (lane * 2 + side) * 8;

	switch (any(8)) {
	case 0:		/* a word of a line, a little wrong */
		line[any(8)] += any(2) ? any(4096) : -any(4096);
		break;
	case 1:
		line[any(8)] = any(2) ? any(~0ull) : any(8);
		break;
	case 2:		/* flags, alone */
		line[FLAGS] = any(8);
		break;
	case 3:		/* the words of lanes that have news */
		words[side * 8] = any(~0ull);
		break;
	case 4:		/* bytes of a ring, where frames are */
		at = any(2) ? any(64) : any(RING / 8);
		rings[(lane * 2 + side) * (RING / 8) + at] ^= 1ull << any(64);
		break;
	case 5:
		for (at = 0; at < 512; at++)
			rings[(lane * 2 + side) * (RING / 8) + at] = any(~0ull);
		break;
	case 6:		/* the pages are given back */
		madvise((char *)slab + 4096 * any(64), 4096 * (1 + any(16)), MADV_REMOVE);
		break;
	default:
		line[TAIL] = line[HEAD] + any(RING + 2);
	}
}

/* Fills each bell that this process has, so that whoever rings it waits. */
static void spoil_bells(void)
{
	uint64_t all = ~1ull;
	char name[64], target[64];

	for (int fd = 3; fd < 256; fd++) {
		ssize_t n;

		snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
		n = readlink(name, target, sizeof target - 1);
		if (n <= 0 || (target[n] = 0, strcmp(target, "anon_inode:[eventfd]")))
			continue;
		n = write(fd, &all, sizeof all);
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
	}
}

#endif
