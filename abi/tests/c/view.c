/* What the device passes for. */
#include <infiniband/verbs.h>
#include "check.h"

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	struct ibv_port_attr port;
	struct ibv_gid_entry gid;

	CHECK(context);
	CHECK(ibv_query_port(context, 1, &port) == 0);
	CHECK(ibv_query_gid_ex(context, 1, 0, &gid, 0) == 0);
	printf("node %d transport %d link layer %d gid type %d\n", list[0]->node_type, list[0]->transport_type,
	       port.link_layer, gid.gid_type);
	return 0;
}
