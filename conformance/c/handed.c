/* A program that hands its TCP connections over: each becomes an iWARP stream (uwarp_sockets.h). What comes is sent back
 * (tests/hostile/adoption.rs).
 *
 *	handed ROLE MS ADDRESS		accepts; prints "port N", then "over NUMBER ERRNO BYTES" of the connection that was
 *					accepted as this one, with what its program received
 *	handed ROLE MS ADDRESS PORT	connects there, and prints "echoed" when what it sends has come back
 *
 * ROLE is that of uwarp_iwarp_mode, MS its limit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

#include "common.h"
#include "../../abi/include/uwarp_sockets.h"

static __typeof__(uwarp_setsockopt) *set_option;
static __typeof__(uwarp_read) *read_some;
static __typeof__(uwarp_write) *write_some;
static __typeof__(uwarp_close) *close_it;
static struct uwarp_iwarp_mode mode;

struct taken {
	int fd, number;
};

static void *echo(void *arg)
{
	struct taken taken = *(struct taken *)arg;
	int error = 0, bytes = 0;
	char block[64];
	ssize_t got = -1;

	free(arg);
	if (set_option(taken.fd, SOL_UWARP, IWARP_MODE, &mode, sizeof mode) == 0) {
		while ((got = read_some(taken.fd, block, sizeof block)) > 0) {
			bytes += (int)got;
			if (write_some(taken.fd, block, (size_t)got) != got)
				break;
		}
	}
	error = got == 0 ? 0 : errno;
	MUST(close_it(taken.fd) == 0);
	printf("over %d %d %d\n", taken.number, error, bytes);
	return NULL;
}

static void serve(const char *address)
{
	struct sockaddr_storage at = sockaddr_of(address, 0);
	socklen_t len = sizeof(struct sockaddr_in);
	int l;

	MUST((l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(bind(l, (void *)&at, len) == 0 && listen(l, 64) == 0 && getsockname(l, (void *)&at, &len) == 0);
	printf("port %d\n", ntohs(((struct sockaddr_in *)&at)->sin_port));
	for (int number = 0;; number++) {
		struct taken *taken = malloc(sizeof *taken);
		pthread_t thread;

		MUST(taken && (taken->fd = accept4(l, NULL, NULL, SOCK_CLOEXEC)) >= 0);
		taken->number = number;
		MUST(pthread_create(&thread, NULL, echo, taken) == 0 && pthread_detach(thread) == 0);
	}
}

static void ask(const char *address, uint16_t port)
{
	struct sockaddr_storage at = sockaddr_of(address, port);
	char block[16] = "fifteen letters", got[16];
	int fd;

	MUST((fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) >= 0);
	MUST(connect(fd, (void *)&at, sizeof(struct sockaddr_in)) == 0);
	MUST(set_option(fd, SOL_UWARP, IWARP_MODE, &mode, sizeof mode) == 0);
	MUST(write_some(fd, block, sizeof block) == sizeof block);
	for (size_t have = 0; have < sizeof got;) {
		ssize_t more = read_some(fd, got + have, sizeof got - have);

		MUST(more > 0);
		have += (size_t)more;
	}
	MUST(!memcmp(got, block, sizeof got) && close_it(fd) == 0);
	printf("echoed\n");
}

int main(int argc, char **argv)
{
	void *library;

	MUST(argc == 4 || argc == 5);
	setvbuf(stdout, NULL, _IOLBF, 0);
	mode.role = (uint32_t)atoi(argv[1]);
	mode.timeout_ms = (uint32_t)atoi(argv[2]);
	/* Nothing else here is of the library, so the linker does not bring it. */
	MUST(library = dlopen("libibverbs.so.1", RTLD_NOW));
	MUST(set_option = (__typeof__(set_option))dlsym(library, "uwarp_setsockopt"));
	MUST(read_some = (__typeof__(read_some))dlsym(library, "uwarp_read"));
	MUST(write_some = (__typeof__(write_some))dlsym(library, "uwarp_write"));
	MUST(close_it = (__typeof__(close_it))dlsym(library, "uwarp_close"));
	if (argc == 4)
		serve(argv[3]);
	else
		ask(argv[3], (uint16_t)atoi(argv[4]));
	return 0;
}
