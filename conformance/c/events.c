/* Asynchronous events that have a cause outside the queue pair: data for one that cannot send yet,
 * interfaces that go down and up, addresses that come and go.
 *
 *	events [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * "interfaces", "lids", "fresh" and "indices" change veth0 of the network namespace they run in, and need a namespace of their own, "lids" the
 * ib view. */
#include "ends.h"

/* The next asynchronous event, acknowledged; -1 when none comes. */
static int next_event(int ms, struct ibv_async_event *event)
{
	if (!readable(context->async_fd, ms))
		return -1;
	MUST(ibv_get_async_event(context, event) == 0);
	ibv_ack_async_event(event);
	return (int)event->event_type;
}

static void check_no_event(const char *name)
{
	struct ibv_async_event event;
	int type = next_event(QUIET_MS, &event);

	check(type == -1, name, "%s", ibv_event_type_str(type));
}

/* Waits for an event of the port, and skips others. */
static void want_port_event(enum ibv_event_type type, const char *name)
{
	struct ibv_async_event event;
	int seen;

	do {
		seen = next_event(LIMIT_MS, &event);
	} while (seen != -1 && seen != (int)type);
	check(seen != -1 && event.element.port_num == 1, name, "event %d", seen);
}

static void communication(void)
{
	struct ibv_async_event event = { 0 };
	struct end a = { 0 }, b = { 0 };
	int type;

	open_device();
	end_open(&a);
	end_open(&b);
	end_receive(&b, 1, 64);
	end_receive(&b, 2, 64);
	end_to_rtr(&a, &b);
	end_to_rts(&a);
	end_to_rtr(&b, &a);
	check_no_event("a queue pair in RTR that nothing has reached: no event");
	end_submit(&a, &b, IBV_WR_SEND, 3, 64);
	want_wc(b.rcq, IBV_WC_SUCCESS, "a Send reaches a queue pair in RTR");
	type = next_event(LIMIT_MS, &event);
	check(type == IBV_EVENT_COMM_EST && event.element.qp == b.qp, "COMM_EST names it", "event %d", type);
	end_submit(&a, &b, IBV_WR_SEND, 4, 64);
	want_wc(b.rcq, IBV_WC_SUCCESS, "so does a second");
	check_no_event("which makes no second event");
	end_to_rts(&b);
	end_receive(&a, 5, 64);
	end_submit(&b, &a, IBV_WR_SEND, 6, 64);
	want_wc(a.rcq, IBV_WC_SUCCESS, "one in RTS gets a Send");
	check_no_event("and makes no event");
	check(b.qp->events_completed == 1, "the event is counted as acknowledged", "%u", b.qp->events_completed);
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

static void ip(const char *args)
{
	char line[128];

	snprintf(line, sizeof line, "ip %s", args);
	MUST(system(line) == 0);
}

static struct ibv_port_attr port(void)
{
	struct ibv_port_attr attr;

	MUST(ibv_query_port(context, 1, &attr) == 0);
	return attr;
}

static bool has_gid(const char *text)
{
	union ibv_gid wanted, gid;
	struct ibv_port_attr attr = port();

	MUST(inet_pton(AF_INET6, text, &wanted) == 1);
	for (int i = 0; i < attr.gid_tbl_len; i++)
		if (ibv_query_gid(context, 1, i, &gid) == 0 && memcmp(&gid, &wanted, sizeof gid) == 0)
			return true;
	return false;
}

static void interfaces(void)
{
	struct ibv_context *second;
	struct ibv_port_attr attr;
	uint64_t end;

	open_device();
	MUST(second = ibv_open_device(context->device));
	attr = port();
	check(attr.state == IBV_PORT_ACTIVE && attr.phys_state == 5, "an interface that is up: PORT_ACTIVE", "%d, %d",
	      attr.state, attr.phys_state);
	check_no_event("nothing changes: no event");
	ip("addr add 192.0.2.77/24 dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "an address more: GID_CHANGE");
	check(has_gid("::ffff:192.0.2.77"), "it is in the GID table", "it is not");
	ip("addr del 192.0.2.77/24 dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "an address less: GID_CHANGE");
	check(!has_gid("::ffff:192.0.2.77"), "it is no longer in the GID table", "it is");
	ip("link set veth0 mtu 600");
	end = now_ms() + LIMIT_MS;
	do {
		attr = port();
	} while (attr.active_mtu != IBV_MTU_512 && now_ms() < end);
	check(attr.active_mtu == IBV_MTU_512, "active_mtu follows the interface's", "%d", attr.active_mtu);
	ip("link set veth0 mtu 1500");
	ip("link set veth0 down");
	want_port_event(IBV_EVENT_PORT_ERR, "the interface goes down: PORT_ERR");
	attr = port();
	check(attr.state == IBV_PORT_DOWN && attr.phys_state == 3, "the port is down", "%d, %d", attr.state,
	      attr.phys_state);
	ip("link set veth0 up");
	want_port_event(IBV_EVENT_PORT_ACTIVE, "the interface goes up: PORT_ACTIVE");
	attr = port();
	check(attr.state == IBV_PORT_ACTIVE, "the port is active", "%d", attr.state);
	check(readable(second->async_fd, LIMIT_MS), "a second context of the device has events of its own", "none");
	/* With events that nobody took. */
	check(ibv_close_device(second) == 0, "it is closed with them", "errno %d", errno);
	ip("addr flush dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "no addresses any more: GID_CHANGE");
	MUST(ibv_close_device(context) == 0);
}

/* In the ib view, which has LIDs. */
static void lids(void)
{
	struct ibv_async_event event;
	uint16_t lid;
	int type, changes = 0;

	open_device();
	lid = port().lid;
	check(lid == 0x0002, "the LID is the low half of GID 0", "%#x", lid);
	ip("addr add 192.0.2.77/24 dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "a further address: GID_CHANGE");
	while ((type = next_event(QUIET_MS, &event)) != -1)
		changes += type == IBV_EVENT_LID_CHANGE;
	check(!changes && port().lid == lid, "and no LID_CHANGE", "%d, %#x", changes, port().lid);
	ip("addr del 10.55.0.2/24 dev veth0");
	want_port_event(IBV_EVENT_LID_CHANGE, "another GID 0: LID_CHANGE");
	check(port().lid == 0x024d && port().sm_lid == 0x024d, "the LID is that of the address which is left", "%#x",
	      port().lid);
	MUST(ibv_close_device(context) == 0);
}

/* The kernel says up to a second later that an interface is running. Its addresses are the device's at once: programs open it
 * once, and would keep 127.0.0.1. */
static void fresh(void)
{
	struct ibv_port_attr attr;
	int missing = 0;

	open_device();
	for (int i = 0; i < 5; i++) {
		ip("link set veth0 down");
		ip("link set veth0 up");
		attr = port();
		missing += !has_gid("::ffff:10.55.0.2") || attr.state != IBV_PORT_ACTIVE;
	}
	check(missing == 0, "an interface that is up and has its carrier is the port's", "%d times of 5 it is not", missing);
	MUST(ibv_close_device(context) == 0);
}

static int index_of(const char *text)
{
	union ibv_gid wanted, gid;
	struct ibv_port_attr attr = port();

	MUST(inet_pton(AF_INET6, text, &wanted) == 1);
	for (int i = 0; i < attr.gid_tbl_len; i++)
		if (ibv_query_gid(context, 1, i, &gid) == 0 && memcmp(&gid, &wanted, sizeof gid) == 0)
			return i;
	return -1;
}

/* C14: programs keep the indices of GIDs as long as they run. */
static void indices(void)
{
	union ibv_gid before[16], gid, nothing = { .raw = { 0 } };
	struct ibv_gid_entry entry, table[16];
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1 };
	struct ibv_port_attr attr;
	struct ibv_pd *pd;
	int gone, moved = 0;

	open_device();
	MUST(pd = ibv_alloc_pd(context));
	attr = port();
	MUST(attr.gid_tbl_len >= 2 && attr.gid_tbl_len <= 16);
	for (int i = 0; i < attr.gid_tbl_len; i++)
		MUST(ibv_query_gid(context, 1, i, &before[i]) == 0);
	ip("addr add 192.0.2.77/24 dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "an address more");
	for (int i = 0; i < attr.gid_tbl_len; i++)
		moved += ibv_query_gid(context, 1, i, &gid) != 0 || memcmp(&gid, &before[i], sizeof gid) != 0;
	check(moved == 0 && index_of("::ffff:192.0.2.77") == attr.gid_tbl_len, "C14 the others keep their indices",
	      "%d moved, the new one is number %d", moved, index_of("::ffff:192.0.2.77"));
	gone = index_of("::ffff:10.55.0.2");
	ip("addr del 10.55.0.2/24 dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "an address less");
	check(index_of("::ffff:192.0.2.77") == attr.gid_tbl_len, "C14 those behind it keep their indices", "number %d",
	      index_of("::ffff:192.0.2.77"));
	check(ibv_query_gid(context, 1, gone, &gid) == 0 && memcmp(&gid, &nothing, sizeof gid) == 0, "its place is a GID of zeros",
	      "not");
	check_errno(ibv_query_gid_ex(context, 1, (uint32_t)gone, &entry, 0), ENODATA, "of the extended query: ENODATA");
	check(ibv_query_gid_table(context, table, 16, 0) == attr.gid_tbl_len, "the table has only what is there", "not");
	ah.grh.dgid = table[attr.gid_tbl_len - 1].gid;
	ah.grh.sgid_index = (uint8_t)gone;
	check_failed(!ibv_create_ah(pd, &ah), EINVAL, "create_ah from it: EINVAL");
	ip("addr add 198.51.100.7/24 dev veth0");
	want_port_event(IBV_EVENT_GID_CHANGE, "another address");
	check(index_of("::ffff:198.51.100.7") == gone, "C14 a new one takes the free place", "number %d",
	      index_of("::ffff:198.51.100.7"));
	MUST(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "communication", communication }, { "interfaces", interfaces }, { "lids", lids }, { "fresh", fresh },
		{ "indices", indices },
	};
	bool chosen = argc > 2;

	/* Not by accident where others use the network. */
	return run_groups(argc, argv, groups, chosen ? 5 : 1);
}
