/* A refusal, and its log line. */
#include <infiniband/verbs.h>
#include <unistd.h>
#include "check.h"

int main(void)
{
	struct ibv_context *context;

	CHECK(dup2(1, 2) == 2);
	context = ibv_open_device(ibv_get_device_list(NULL)[0]);
	CHECK(context);
	REFUSED(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
	return 0;
}
