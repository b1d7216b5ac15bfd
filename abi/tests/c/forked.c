/* A forked child cannot use its parent's objects. It has a device of its own. */
#include <infiniband/verbs.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, channel, 0);
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	struct ibv_qp_attr to_init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	int mask = IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS;
	struct ibv_recv_wr recv = { 0 }, *bad_recv;
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad_send;
	struct ibv_device_attr device;
	struct ibv_wc wc;
	int status;
	pid_t child;

	CHECK(qp);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		REFUSED(ibv_alloc_pd(context), ENODEV);
		REFUSED(ibv_create_cq(context, 1, NULL, NULL, 0), ENODEV);
		REFUSED(ibv_reg_mr(pd, &wc, 1, 0), ENODEV);
		REFUSED(ibv_create_qp(pd, &attr), ENODEV);
		CHECK(ibv_query_device(context, &device) == ENODEV);
		CHECK(ibv_modify_qp(qp, &to_init, mask) == ENODEV);
		CHECK(ibv_post_recv(qp, &recv, &bad_recv) == ENODEV && bad_recv == &recv);
		CHECK(ibv_post_send(qp, &send, &bad_send) == ENODEV && bad_send == &send);
		CHECK(ibv_poll_cq(cq, 1, &wc) < 0);
		CHECK(ibv_req_notify_cq(cq, 0) == ENODEV);
		CHECK(ibv_destroy_qp(qp) == ENODEV);
		CHECK(ibv_destroy_cq(cq) == ENODEV);
		CHECK(ibv_destroy_comp_channel(channel) == ENODEV);
		CHECK(ibv_close_device(context) == -1);
		CHECK(strcmp(ibv_wc_status_str(IBV_WC_SUCCESS), "success") == 0);
		CHECK((context = ibv_open_device(list[0])) && (pd = ibv_alloc_pd(context)));
		CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
		return 0;
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	/* The parent's device still works. */
	CHECK(ibv_modify_qp(qp, &to_init, mask) == 0);
	CHECK(ibv_post_recv(qp, &recv, &bad_recv) == 0);
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_destroy_comp_channel(channel) == 0);
	CHECK(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
	return 0;
}
