/* libibverbs.so.1 and librdmacm.so.1 are the same object, and names are found by version. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include "check.h"

int main(void)
{
	void *verbs = dlopen("libibverbs.so.1", RTLD_NOW);
	void *cm = dlopen("librdmacm.so.1", RTLD_NOW);
	struct link_map *a, *b;

	CHECK(verbs && cm);
	CHECK(dlinfo(verbs, RTLD_DI_LINKMAP, &a) == 0 && dlinfo(cm, RTLD_DI_LINKMAP, &b) == 0);
	CHECK(a == b);
	CHECK(strstr(a->l_name, "libibverbs.so.1"));
	/* The old interface has another function. */
	CHECK(dlvsym(verbs, "ibv_get_device_list", "IBVERBS_1.1"));
	CHECK(dlvsym(verbs, "ibv_get_device_list", "IBVERBS_1.0"));
	CHECK(dlvsym(verbs, "ibv_get_device_list", "IBVERBS_1.0") !=
	      dlvsym(verbs, "ibv_get_device_list", "IBVERBS_1.1"));
	CHECK(dlsym(verbs, "ibv_get_device_list") == dlvsym(verbs, "ibv_get_device_list", "IBVERBS_1.1"));
	CHECK(dlvsym(cm, "rdma_connect", "RDMACM_1.0") && dlvsym(cm, "rdma_establish", "RDMACM_1.2"));
	CHECK(!dlsym(verbs, "uwarp_unsupported_code"));
	/* -z nodelete */
	CHECK(dlclose(verbs) == 0 && dlclose(cm) == 0);
	CHECK(dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD));
	return 0;
}
