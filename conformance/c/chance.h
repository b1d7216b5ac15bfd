/* What happens by chance, and again with the same seed. */
#ifndef UWARP_CONFORMANCE_CHANCE_H
#define UWARP_CONFORMANCE_CHANCE_H

#include <stdint.h>

static uint64_t seed = 88172645463325252ull;

/* A number below this one. */
static inline uint64_t any(uint64_t below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed % below;
}

#endif
