/* Constructors and the device list start no thread and open no descriptor. */
#include <dirent.h>
#include <infiniband/verbs.h>
#include "check.h"

static int count(const char *path)
{
	DIR *dir = opendir(path);
	int n = 0;

	CHECK(dir);
	while (readdir(dir))
		n++;
	closedir(dir);
	return n;
}

int main(void)
{
	int threads = count("/proc/self/task"), descriptors = count("/proc/self/fd");
	int devices;
	struct ibv_device **list = ibv_get_device_list(&devices);

	CHECK(list && devices == 1 && list[0] && !list[1]);
	CHECK(ibv_get_device_guid(list[0]) == ibv_get_device_guid(list[0]) && ibv_get_device_guid(list[0]));
	CHECK(strcmp(ibv_get_device_name(list[0]), "uwarp0") == 0);
	CHECK(strcmp(ibv_node_type_str(list[0]->node_type), "InfiniBand channel adapter") == 0);
	ibv_free_device_list(list);
	CHECK(count("/proc/self/task") == threads && threads == 3);
	CHECK(count("/proc/self/fd") == descriptors);
	return 0;
}
