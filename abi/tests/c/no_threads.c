/* A process that must not start another thread opens the device. */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <sys/resource.h>
#include <unistd.h>
#include "check.h"

int main(void)
{
	struct rlimit none = { 0, 0 };

	CHECK(dup2(1, 2) == 2);
	/* Root is exempt from the limit. */
	if (geteuid() == 0)
		CHECK(setresuid(65534, 65534, 65534) == 0);
	CHECK(setrlimit(RLIMIT_NPROC, &none) == 0);
	REFUSED(ibv_open_device(ibv_get_device_list(NULL)[0]), ENOMEM);
	return 0;
}
