/* One assertion of a test; the first that fails ends the program. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                     \
	do {                                                                                            \
		errno = 0;                                                                              \
		if (!(what)) {                                                                          \
			fprintf(stderr, "%s:%d: not so: %s (errno: %s)\n", __FILE__, __LINE__, #what,   \
				strerror(errno));                                                       \
			exit(1);                                                                        \
		}                                                                                       \
	} while (0)

/* A call that returns NULL or -1 and sets errno. */
#define REFUSED(call, code)                                                                             \
	do {                                                                                            \
		errno = 0;                                                                              \
		if ((call) || errno != (code)) {                                                        \
			fprintf(stderr, "%s:%d: not refused with %s: %s (errno: %s)\n", __FILE__,       \
				__LINE__, #code, #call, strerror(errno));                               \
			exit(1);                                                                        \
		}                                                                                       \
	} while (0)
