/* A device for each network interface (UWARP_DEVICES=per-interface).
 *
 *	devices - GROUP		one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * It needs a network namespace of its own with veth0 (10.55.0.2, fd55::2) and veth1 (10.56.0.2, fd56::2), whose peers are up, and
 * no default route. "events" changes veth1. */
#include <net/if.h>

#include "ends.h"

#define DEVICES 2

static const char *const names[DEVICES] = { "uwarp0", "uwarp1" };
static const char *const interfaces[DEVICES] = { "veth0", "veth1" };
static const char *const addresses[DEVICES] = { "10.55.0.2", "10.56.0.2" };
static struct ibv_context *opened[DEVICES];
static union ibv_gid gids[DEVICES];

static void open_devices(void)
{
	struct ibv_device **list;
	int count = 0;

	MUST(list = ibv_get_device_list(&count));
	if (count != DEVICES)
		die("%d devices", count);
	for (int i = 0; i < DEVICES; i++) {
		MUST(opened[i] = ibv_open_device(list[i]));
		MUST(ibv_query_gid(opened[i], 1, 0, &gids[i]) == 0);
	}
	ibv_free_device_list(list);
}

static void close_devices(void)
{
	for (int i = 0; i < DEVICES; i++)
		MUST(ibv_close_device(opened[i]) == 0);
}

/* What follows is about this device. */
static void use(int i)
{
	context = opened[i];
}

static void ip(const char *args)
{
	char line[128];

	snprintf(line, sizeof line, "ip %s", args);
	MUST(system(line) == 0);
}

static void listed(void)
{
	struct ibv_gid_entry entries[16];
	struct ibv_device **list, **again;
	struct ibv_device_attr attr[DEVICES];
	struct ibv_port_attr port;
	int count = 0;

	MUST(list = ibv_get_device_list(&count));
	check(count == DEVICES && !list[DEVICES], "a device for each interface, and none for lo", "%d", count);
	MUST(again = ibv_get_device_list(NULL));
	check(!memcmp(list, again, sizeof *list * DEVICES), "the same in the next list", "others");
	ibv_free_device_list(again);
	for (int i = 0; i < DEVICES; i++)
		check(!strcmp(ibv_get_device_name(list[i]), names[i]), names[i], "%s", ibv_get_device_name(list[i]));
	check(ibv_get_device_guid(list[0]) && ibv_get_device_guid(list[1]) &&
	      ibv_get_device_guid(list[0]) != ibv_get_device_guid(list[1]), "each has a GUID of its own", "the same");
	ibv_free_device_list(list);
	open_devices();
	for (int i = 0; i < DEVICES; i++) {
		struct in_addr in = { 0 };
		ssize_t rows = ibv_query_gid_table(opened[i], entries, 16, 0);
		bool own = true, there = false;

		MUST(ibv_query_device(opened[i], &attr[i]) == 0);
		MUST(ibv_query_port(opened[i], 1, &port) == 0);
		MUST(inet_aton(addresses[i], &in));
		for (ssize_t row = 0; row < rows; row++) {
			own &= entries[row].ndev_ifindex == if_nametoindex(interfaces[i]);
			there |= !memcmp(entries[row].gid.raw + 12, &in, sizeof in);
		}
		check(rows >= 2 && rows == port.gid_tbl_len && own && there, "its GIDs are its interface's addresses",
		      "%zd of %d", rows, port.gid_tbl_len);
		check(port.state == IBV_PORT_ACTIVE && attr[i].node_guid == ibv_get_device_guid(opened[i]->device),
		      "its port is active", "%d", port.state);
	}
	check(attr[0].sys_image_guid == attr[1].sys_image_guid, "both are of one host", "of two");
	close_devices();
}

static int next_event(int i, int ms)
{
	struct ibv_async_event event;

	if (!readable(opened[i]->async_fd, ms))
		return -1;
	MUST(ibv_get_async_event(opened[i], &event) == 0);
	ibv_ack_async_event(&event);
	return (int)event.event_type;
}

static void want_event(int i, enum ibv_event_type type, const char *name)
{
	int seen;

	do {
		seen = next_event(i, LIMIT_MS);
	} while (seen != -1 && seen != (int)type);
	check(seen != -1, name, "none");
}

static enum ibv_port_state port_state(int i)
{
	struct ibv_port_attr port;

	MUST(ibv_query_port(opened[i], 1, &port) == 0);
	return port.state;
}

static void events(void)
{
	const char *third = "none";
	struct ibv_device **list;
	int count = 0;

	open_devices();
	ip("link set veth1 down");
	want_event(1, IBV_EVENT_PORT_ERR, "its interface goes down: PORT_ERR");
	check(port_state(1) == IBV_PORT_DOWN && port_state(0) == IBV_PORT_ACTIVE, "one port is down, the other one is not",
	      "%d, %d", port_state(1), port_state(0));
	MUST(list = ibv_get_device_list(&count));
	check(count == DEVICES, "the device is still there", "%d", count);
	ibv_free_device_list(list);
	ip("link set veth1 mtu 600");
	ip("link set veth1 up");
	want_event(1, IBV_EVENT_PORT_ACTIVE, "it goes up: PORT_ACTIVE");
	for (int i = 0; i < DEVICES; i++) {
		struct ibv_port_attr port;

		MUST(ibv_query_port(opened[i], 1, &port) == 0);
		check(port.active_mtu == (i ? IBV_MTU_512 : IBV_MTU_4096), "the MTU is 4096, or the interface's, if that is short", "%d", port.active_mtu);
	}
	check(next_event(0, QUIET_MS) == -1, "the other device had no event", "one");
	ip("link add veth7 type veth peer name veth8");
	ip("addr add 10.57.0.2/24 dev veth7");
	ip("link set veth7 up");
	ip("link set veth8 up");
	/* The kernel may tell of the carrier late. */
	for (uint64_t end = now_ms() + LIMIT_MS; count == DEVICES && now_ms() < end; usleep(2000)) {
		MUST(list = ibv_get_device_list(&count));
		third = count > DEVICES ? ibv_get_device_name(list[DEVICES]) : "none";
		ibv_free_device_list(list);
	}
	check(!strcmp(third, "uwarp2"), "a new interface is a new device", "%s", third);
	ip("link del veth7");
	MUST(list = ibv_get_device_list(&count));
	check(count == DEVICES, "which goes with it", "%d", count);
	ibv_free_device_list(list);
	close_devices();
}

/* What belongs to one device and is given to another. */
static void objects(void)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_RC,
	};
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_pd *pd[DEVICES];
	struct ibv_cq *cq[DEVICES];
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	static char buffer[64];

	open_devices();
	for (int i = 0; i < DEVICES; i++) {
		MUST(pd[i] = ibv_alloc_pd(opened[i]));
		MUST(cq[i] = ibv_create_cq(opened[i], 8, NULL, NULL, 0));
	}
	for (int i = 0; i < 4; i++) {
		init.send_cq = cq[i & 1];
		init.recv_cq = cq[i >> 1];
		qp = ibv_create_qp(pd[0], &init);
		if (i)
			check_failed(!qp, EINVAL, "a completion queue of another device");
		else
			check(qp && ibv_destroy_qp(qp) == 0, "completion queues of the same device", "errno %d", errno);
	}
	MUST(srq = ibv_create_srq(pd[1], &srq_init));
	init.srq = srq;
	init.send_cq = init.recv_cq = cq[0];
	check_failed(!ibv_create_qp(pd[0], &init), EINVAL, "a shared receive queue of another device");
	MUST(ibv_destroy_srq(srq) == 0);
	MUST(mr = ibv_reg_mr(pd[0], buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE));
	check_failed(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pd[1], NULL, 0, 0) != 0, EINVAL,
		     "a region moved to another device's domain");
	check(mr->pd == pd[0] && ibv_dereg_mr(mr) == 0, "it is where it was", "not");
	for (int i = 0; i < DEVICES; i++)
		MUST(ibv_destroy_cq(cq[i]) == 0 && ibv_dealloc_pd(pd[i]) == 0);
	close_devices();
}

/* Between two devices of this host, each queue pair on its own. */
static void by_number(void)
{
	struct end ends[DEVICES] = { 0 };
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_wc wc;

	open_devices();
	for (int i = 0; i < DEVICES; i++) {
		use(i);
		end_open(&ends[i]);
	}
	for (int i = 0; i < DEVICES; i++) {
		own_gid = gids[!i];
		end_to_rtr(&ends[i], &ends[!i]);
	}
	for (int i = 0; i < DEVICES; i++) {
		end_to_rts(&ends[i]);
		end_receive(&ends[i], 1, 64);
	}
	for (int i = 0; i < DEVICES; i++) {
		snprintf(ends[i].buffer, 64, "from %s", names[i]);
		end_submit(&ends[i], &ends[!i], IBV_WR_SEND, 2, 64);
		want_wc(ends[i].scq, IBV_WC_SUCCESS, "a Send to the other device");
		wc = want_wc(ends[!i].rcq, IBV_WC_SUCCESS, "which arrives");
		check(wc.byte_len == 64 && !strcmp(ends[!i].buffer + ROOM, ends[i].buffer), "with its bytes", "%s",
		      ends[!i].buffer + ROOM);
	}
	/* The region of the other device's queue pair. */
	sge = (struct ibv_sge){ (uintptr_t)ends[1].buffer, 64, ends[1].mr->lkey };
	MUST(ibv_post_send(ends[0].qp, &wr, &bad) == 0);
	want_wc(ends[0].scq, IBV_WC_LOC_PROT_ERR, "a region of another device");
	for (int i = 0; i < DEVICES; i++)
		end_close(&ends[i]);
	close_devices();
}

/* A datagram from one device to the other says which addresses it had. */
static void datagrams(void)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_UD,
		.sq_sig_all = 1,
	};
	struct ibv_ah_attr way = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } }, back;
	static char buffer[2][128];
	struct ibv_pd *pd[DEVICES];
	struct ibv_cq *cq[DEVICES];
	struct ibv_qp *qp[DEVICES];
	struct ibv_mr *mr[DEVICES];
	struct ibv_ah *ah;
	struct ibv_wc wc;

	open_devices();
	for (int i = 0; i < DEVICES; i++) {
		struct ibv_qp_attr attr = { .port_num = 1, .qkey = 5 };
		struct ibv_sge sge = { (uintptr_t)buffer[i], sizeof buffer[i], 0 };
		struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;

		MUST(pd[i] = ibv_alloc_pd(opened[i]));
		MUST(cq[i] = ibv_create_cq(opened[i], 8, NULL, NULL, 0));
		MUST(mr[i] = ibv_reg_mr(pd[i], buffer[i], sizeof buffer[i], IBV_ACCESS_LOCAL_WRITE));
		init.send_cq = init.recv_cq = cq[i];
		MUST(qp[i] = ibv_create_qp(pd[i], &init));
		attr.qp_state = IBV_QPS_INIT;
		MUST(ibv_modify_qp(qp[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
		attr.qp_state = IBV_QPS_RTR;
		MUST(ibv_modify_qp(qp[i], &attr, IBV_QP_STATE) == 0);
		attr.qp_state = IBV_QPS_RTS;
		MUST(ibv_modify_qp(qp[i], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
		sge.lkey = mr[i]->lkey;
		if (i == 1)
			MUST(ibv_post_recv(qp[i], &receive, &bad) == 0);
	}
	way.grh.dgid = gids[1];
	MUST(ah = ibv_create_ah(pd[0], &way));
	{
		struct ibv_sge sge = { (uintptr_t)buffer[0], 8, mr[0]->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = qp[1]->qp_num;
		wr.wr.ud.remote_qkey = 5;
		MUST(ibv_post_send(qp[0], &wr, &bad) == 0);
	}
	want_wc(cq[0], IBV_WC_SUCCESS, "a datagram to the other device");
	wc = want_wc(cq[1], IBV_WC_SUCCESS, "which arrives");
	memset(&back, 0, sizeof back);
	check(ibv_init_ah_from_wc(opened[1], 1, &wc, (struct ibv_grh *)buffer[1], &back) == 0 &&
	      !memcmp(&back.grh.dgid, &gids[0], sizeof gids[0]) && back.grh.sgid_index == 0,
	      "the way back goes from its device's GID to the sender's", "%d", back.grh.sgid_index);
	MUST(ibv_destroy_ah(ah) == 0);
	for (int i = 0; i < DEVICES; i++)
		MUST(ibv_destroy_qp(qp[i]) == 0 && ibv_dereg_mr(mr[i]) == 0 && ibv_destroy_cq(cq[i]) == 0 &&
		     ibv_dealloc_pd(pd[i]) == 0);
	close_devices();
}

static const char *device_of(const struct rdma_cm_id *id)
{
	return id->verbs ? ibv_get_device_name(id->verbs->device) : "none";
}

/* The device of an id that resolves an address, from no address of its own. */
static void resolves(struct rdma_event_channel *ch, const char *to, const char *device)
{
	struct sockaddr_storage ss = sockaddr_of(to, 7);
	struct rdma_cm_id *id;

	MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&ss, 2000) == 0);
	must_event(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	check(!strcmp(device_of(id), device), to, "%s", device_of(id));
	MUST(rdma_destroy_id(id) == 0);
}

static void manager(void)
{
	struct sockaddr_storage any = sockaddr_of("0.0.0.0", 0);
	struct rdma_event_channel *ch, *server;
	struct rdma_cm_id *listener, *id;
	struct ibv_context **list;
	int count = 0;

	MUST(list = rdma_get_devices(&count));
	check(count == DEVICES && !list[DEVICES] && !strcmp(ibv_get_device_name(list[1]->device), names[1]),
	      "rdma_get_devices lists both", "%d", count);
	MUST(ch = rdma_create_event_channel());
	MUST(server = rdma_create_event_channel());
	resolves(ch, "10.55.0.1", "uwarp0");
	resolves(ch, "10.56.0.1", "uwarp1");
	resolves(ch, "fd56::1", "uwarp1");
	resolves(ch, "127.0.0.1", "uwarp0");
	for (int i = 0; i < DEVICES; i++) {
		struct sockaddr_storage own = sockaddr_of(addresses[i], 0);

		MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
		MUST(rdma_bind_addr(id, (struct sockaddr *)&own) == 0);
		check(!strcmp(device_of(id), names[i]) && id->verbs == list[i], "bound to an address: its device", "%s",
		      device_of(id));
		MUST(rdma_destroy_id(id) == 0);
	}
	MUST(rdma_create_id(server, &listener, NULL, RDMA_PS_TCP) == 0);
	MUST(rdma_bind_addr(listener, (struct sockaddr *)&any) == 0 && rdma_listen(listener, 8) == 0);
	check(!listener->verbs, "bound to all addresses: no device", "%s", device_of(listener));
	for (int i = 0; i < DEVICES; i++) {
		struct sockaddr_storage to = sockaddr_of(addresses[i], ntohs(rdma_get_src_port(listener)));
		struct ibv_qp_init_attr init = {
			.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
			.qp_type = IBV_QPT_RC,
		};
		struct rdma_conn_param param = { .rnr_retry_count = 7 };
		struct rdma_cm_event event;

		MUST(rdma_create_id(ch, &id, NULL, RDMA_PS_TCP) == 0);
		MUST(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0);
		must_event(ch, RDMA_CM_EVENT_ADDR_RESOLVED);
		MUST(rdma_resolve_route(id, 2000) == 0);
		must_event(ch, RDMA_CM_EVENT_ROUTE_RESOLVED);
		MUST(rdma_create_qp(id, NULL, &init) == 0);
		MUST(rdma_connect(id, &param) == 0);
		event = must_event(server, RDMA_CM_EVENT_CONNECT_REQUEST);
		check(event.id->verbs == list[i] && id->verbs == list[i], "a request is for the device of its address", "%s",
		      device_of(event.id));
		MUST(rdma_create_qp(event.id, NULL, &init) == 0);
		MUST(rdma_accept(event.id, &param) == 0);
		must_event(ch, RDMA_CM_EVENT_ESTABLISHED);
		must_event(server, RDMA_CM_EVENT_ESTABLISHED);
		MUST(rdma_disconnect(id) == 0);
		must_event(ch, RDMA_CM_EVENT_DISCONNECTED);
		must_event(server, RDMA_CM_EVENT_DISCONNECTED);
		rdma_destroy_qp(id);
		rdma_destroy_qp(event.id);
		MUST(rdma_destroy_id(id) == 0 && rdma_destroy_id(event.id) == 0);
	}
	MUST(rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(ch);
	rdma_destroy_event_channel(server);
	rdma_free_devices(list);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "listed", listed }, { "objects", objects }, { "by_number", by_number }, { "datagrams", datagrams },
		{ "manager", manager }, { "events", events },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
