/* The child of a process that has used the device, and that of one that is using it, has a device. */
#include <rdma/rdma_cma.h>
#include <infiniband/verbs.h>
#include <arpa/inet.h>
#include <sys/wait.h>
#include <unistd.h>
#include "check.h"

/* Verbs and rdma_cm: a request arrives and is rejected. */
static void all(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct rdma_event_channel *server = rdma_create_event_channel(), *client = rdma_create_event_channel();
	struct rdma_conn_param param = { .retry_count = 7 };
	struct rdma_cm_id *listener, *id;
	struct rdma_cm_event *event;
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_recv_wr = 1 } };
	struct ibv_context *context, **contexts;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	char buffer[64];

	CHECK(list && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CHECK((pd = ibv_alloc_pd(context)) && (mr = ibv_reg_mr(pd, buffer, sizeof buffer, 0)));
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
	CHECK((contexts = rdma_get_devices(NULL)) && contexts[0]);
	rdma_free_devices(contexts);

	CHECK(server && client);
	CHECK(rdma_create_id(server, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0 && rdma_listen(listener, 1) == 0);
	address.sin_port = rdma_get_src_port(listener);
	CHECK(rdma_create_id(client, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 2000) == 0);
	CHECK(rdma_get_cm_event(client, &event) == 0 && event->event == RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_resolve_route(id, 2000) == 0);
	CHECK(rdma_get_cm_event(client, &event) == 0 && event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_create_qp(id, NULL, &attr) == 0 && rdma_connect(id, &param) == 0);
	CHECK(rdma_get_cm_event(server, &event) == 0 && event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_reject(event->id, NULL, 0) == 0 && rdma_destroy_id(event->id) == 0 && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_get_cm_event(client, &event) == 0 && event->event == RDMA_CM_EVENT_REJECTED);
	CHECK(rdma_ack_cm_event(event) == 0);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(client);
	rdma_destroy_event_channel(server);
}

/* In a child, which may fork another one. */
static void in_a_child(int deeper)
{
	pid_t child = fork();
	int status;

	CHECK(child >= 0);
	if (child == 0) {
		alarm(100);
		all();
		if (deeper)
			in_a_child(deeper - 1);
		/* With the exit handlers. */
		exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
	struct rdma_event_channel *open;
	pid_t child;
	int status;

	all();
	in_a_child(1);
	/* The parent's device still works; its children have their own while it has objects, too. */
	all();
	CHECK(open = rdma_create_event_channel());
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		alarm(100);
		all();
		return 0;
	}
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	rdma_destroy_event_channel(open);
	return 0;
}
