/* Which link the connections of this process go by, as `uwarp stat` shows it. UWARP is the command, and LINK
 * is the link that is meant; without them nothing is checked. */
#ifndef UWARP_CONFORMANCE_LINKS_H
#define UWARP_CONFORMANCE_LINKS_H

#include "common.h"

/* How often this text stands in what `uwarp stat` says of this process. */
static inline int stat_has(const char *text)
{
	char command[512], *line = NULL;
	size_t room = 0;
	int found = 0;
	FILE *stat;

	snprintf(command, sizeof command, "LD_PRELOAD= %s stat --json --pid %d", getenv("UWARP"),
		 (int)getpid());
	MUST(stat = popen(command, "r"));
	while (getline(&line, &room, stat) > 0)
		for (const char *at = line; (at = strstr(at, text)); at++)
			found++;
	free(line);
	MUST(pclose(stat) == 0);
	return found;
}

static inline void check_links(const char *whose, int count)
{
	const char *link = getenv("LINK");
	char text[64], name[128];
	int found;

	if (!link || !getenv("UWARP"))
		return;
	snprintf(text, sizeof text, "\"link\":\"%s\"", link);
	snprintf(name, sizeof name, "%s connections go by %s", whose, link);
	found = stat_has(text);
	check(found == count, name, "%d of %d", found, count);
}

#endif
