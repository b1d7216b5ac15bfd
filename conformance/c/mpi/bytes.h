// Bytes that say where they belong.

#pragma once

#include <stddef.h>
#include <stdint.h>

// The byte at `offset` of message `number` from one rank to another. Multiplied and shifted, so that messages
// that changed places, or a page of one in another, are seen.
static unsigned char byte_of(int from, int to, unsigned number, size_t offset)
{
	uint32_t seed = (uint32_t)from * 31 + (uint32_t)to * 17 + number * 7919u;
	uint32_t x = (seed + (uint32_t)offset) * 2654435761u;
	return (unsigned char)(x >> 24 ^ offset >> 16);
}

static void fill(unsigned char *bytes, size_t length, int from, int to, unsigned number)
{
	for (size_t i = 0; i < length; i++)
		bytes[i] = byte_of(from, to, number, i);
}
