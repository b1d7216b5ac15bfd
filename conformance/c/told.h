/* What programs share that are told in lines what to do, by addresses in words (conformance/src/attacker/lines.rs). */
#ifndef UWARP_CONFORMANCE_TOLD_H
#define UWARP_CONFORMANCE_TOLD_H

#include <arpa/inet.h>
#include <fcntl.h>

#include "common.h"

static inline union ibv_gid gid_of(const char *address)
{
	union ibv_gid gid = { 0 };

	if (inet_pton(AF_INET6, address, gid.raw) == 1)
		return gid;
	gid.raw[10] = gid.raw[11] = 0xff;
	MUST(inet_pton(AF_INET, address, gid.raw + 12) == 1);
	return gid;
}

static inline uint8_t gid_index_of(struct ibv_context *context, const char *address)
{
	union ibv_gid own = gid_of(address), gid;

	for (int n = 0;; n++) {
		if (ibv_query_gid(context, 1, n, &gid) != 0)
			die("no GID is %s", address);
		if (!memcmp(&gid, &own, sizeof gid))
			return (uint8_t)n;
	}
}

/* Carries out the lines of standard input until that ends, and looks for completions between them, too. */
static inline void serve_lines(void (*command)(char *line), void (*look)(void))
{
	char line[200], byte;
	size_t used = 0;

	MUST(fcntl(0, F_SETFL, O_NONBLOCK) == 0);
	for (;; look()) {
		if (!readable(0, 1))
			continue;
		if (read(0, &byte, 1) != 1)
			return;
		if (byte != '\n' && used < sizeof line - 1) {
			line[used++] = byte;
			continue;
		}
		line[used] = 0;
		used = 0;
		command(line);
	}
}

#endif
