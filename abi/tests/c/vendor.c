/* Vendor libraries read behind the device structure. */
#include <infiniband/efadv.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include "check.h"

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct mlx5dv_context_attr open_attr = { 0 };
	struct mlx5dv_context mlx5_attr = { 0 };
	struct efadv_device_attr efa_attr = { 0 };
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 1 };
	struct mlx5dv_cq_init_attr mlx5_cq = { 0 };
	struct ibv_qp_init_attr_ex qp_attr = { .qp_type = IBV_QPT_DRIVER };
	struct efadv_qp_init_attr efa_qp = { 0 };
	struct ibv_qp_init_attr rc_attr = { .qp_type = IBV_QPT_RC };

	CHECK(list && list[0]);
	CHECK(!mlx5dv_is_supported(list[0]));
	CHECK(!mlx5dv_open_device(list[0], &open_attr));

	context = ibv_open_device(list[0]);
	CHECK(context);
	CHECK(mlx5dv_query_device(context, &mlx5_attr) == EOPNOTSUPP);
	CHECK(!mlx5dv_create_cq(context, &cq_attr, &mlx5_cq));
	CHECK(!mlx5dv_create_qp(context, &qp_attr, NULL));
	CHECK(efadv_query_device(context, &efa_attr, sizeof(efa_attr)) != 0);
	CHECK(!efadv_create_qp_ex(context, &qp_attr, &efa_qp, sizeof(efa_qp)));
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	CHECK(!efadv_create_driver_qp(pd, &rc_attr, EFADV_QP_DRIVER_TYPE_SRD));
	CHECK(ibv_dealloc_pd(pd) == 0);
	CHECK(ibv_close_device(context) == 0);
	ibv_free_device_list(list);
	return 0;
}
