/* How the device presents itself. */
#include <infiniband/verbs.h>
#include "check.h"

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	struct ibv_port_attr port;
	struct ibv_gid_entry gid;
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_RC,
	};
	struct ibv_recv_wr wr = { .wr_id = 1 }, *bad;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp *qp;
	enum ibv_qp_state first;

	CHECK(context);
	CHECK(ibv_query_port(context, 1, &port) == 0);
	CHECK(ibv_query_gid_ex(context, 1, 0, &gid, 0) == 0);
	CHECK((init.send_cq = init.recv_cq = ibv_create_cq(context, 4, NULL, NULL, 0)) != NULL);
	CHECK((qp = ibv_create_qp(ibv_alloc_pd(context), &init)) != NULL);
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
	first = attr.qp_state;
	/* RESET takes no receive, INIT does. */
	CHECK((ibv_post_recv(qp, &wr, &bad) == 0) == (first == IBV_QPS_INIT));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1 };
	CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
	printf("node %d transport %d link layer %d gid type %d first state %d\n", list[0]->node_type, list[0]->transport_type,
	       port.link_layer, gid.gid_type, first);
	return 0;
}
