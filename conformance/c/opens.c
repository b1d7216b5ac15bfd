/* Opens the device, and says whether the program has more rights than its caller. */
#include <stdio.h>
#include <sys/auxv.h>

#include <infiniband/verbs.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;

	printf("secure %lu\n", getauxval(AT_SECURE));
	return !context;
}
