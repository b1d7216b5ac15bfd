/* Verbs that a program calls while it ends, in a handler of atexit(3) and in a destructor, and a thread in the destructor of its
 * own data. Run with UWARP_LOG=trace: the logger keeps a buffer for each thread, and those of the main thread are gone by then.
 *
 *	at_exit			one line per statement: "ok name" or "FAIL name: what was seen" */
#include <pthread.h>

#include "common.h"

static struct ibv_context *context;
static pthread_key_t key;

static void use(const char *name)
{
	struct ibv_device **list;
	struct ibv_pd *pd;
	int count = 0;

	list = ibv_get_device_list(&count);
	check(list && count > 0, name, "no list, %s", strerror(errno));
	if (list)
		ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	check(pd && ibv_dealloc_pd(pd) == 0, "and a protection domain", "%s", strerror(errno));
}

static void of_thread(void *data)
{
	(void)data;
	use("a list of devices in the destructor of a thread's data");
}

static void handler(void)
{
	use("a list of devices in a handler of atexit");
}

__attribute__((destructor)) static void destructor(void)
{
	use("a list of devices in a destructor");
	check(ibv_close_device(context) == 0, "the device is closed there", "%s", strerror(errno));
	printf("ok to the end\n");
	fflush(stdout);
}

static void *run(void *data)
{
	pthread_setspecific(key, context);
	use("a list of devices in a thread");
	return data;
}

int main(void)
{
	struct ibv_device **list;
	pthread_t thread;

	atexit(handler);
	MUST((list = ibv_get_device_list(NULL)) && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	MUST(pthread_key_create(&key, of_thread) == 0);
	MUST(pthread_create(&thread, NULL, run, NULL) == 0 && pthread_join(thread, NULL) == 0);
	use("a list of devices before the end");
	return 0;
}
