/* What UCX, NCCL, libfabric, Mooncake, RCCL and pyverbs look at before they use a device, or rely on while they do: a group for
 * each. What stands here was read in their sources.
 *
 *	traps - GROUP		one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * It needs the device's files (uwarp run --files on) and a network namespace with veth0 (10.55.0.2), no default route. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "ends.h"

#define PORT "/sys/class/infiniband/uwarp0/ports/1"
#define QKEY 0x1EE7A330u
#define GRH 40

static struct ibv_port_attr port(void)
{
	struct ibv_port_attr attr;

	MUST(ibv_query_port(context, 1, &attr) == 0);
	return attr;
}

/* The first line of a file below the port's directory; -1 with errno. */
static int read_line(char *line, size_t room, const char *file, int index)
{
	char path[256];
	FILE *stream;
	int good;

	snprintf(path, sizeof path, PORT "/%s/%d", file, index);
	stream = fopen(path, "r");
	if (!stream)
		return -1;
	good = fgets(line, (int)room, stream) != NULL;
	fclose(stream);
	line[strcspn(line, "\n")] = 0;
	return good ? 0 : -1;
}

/* Whether the table of routes has one to this IPv4 address by this interface, as UCX asks. */
static bool has_route(struct in_addr to, unsigned int interface)
{
	struct { struct nlmsghdr header; struct rtmsg route; } ask = {
		.header = { .nlmsg_len = sizeof ask, .nlmsg_type = RTM_GETROUTE, .nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP },
		.route = { .rtm_family = AF_INET },
	};
	static _Alignas(struct nlmsghdr) char answer[65536];
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	bool found = false, more = true;

	MUST(fd >= 0 && send(fd, &ask, sizeof ask, 0) == sizeof ask);
	while (more) {
		ssize_t got = recv(fd, answer, sizeof answer, 0);
		unsigned int left = (unsigned int)got;

		MUST(got > 0);
		for (struct nlmsghdr *h = (void *)answer; NLMSG_OK(h, left); h = NLMSG_NEXT(h, left)) {
			struct rtmsg *route = NLMSG_DATA(h);
			unsigned int length = RTM_PAYLOAD(h), by = 0;
			uint32_t network = 0, mask;

			if (h->nlmsg_type == NLMSG_DONE || h->nlmsg_type == NLMSG_ERROR) {
				more = false;
				break;
			}
			for (struct rtattr *a = RTM_RTA(route); RTA_OK(a, length); a = RTA_NEXT(a, length)) {
				if (a->rta_type == RTA_OIF)
					memcpy(&by, RTA_DATA(a), sizeof by);
				if (a->rta_type == RTA_DST)
					memcpy(&network, RTA_DATA(a), sizeof network);
			}
			mask = route->rtm_dst_len ? htonl(~0u << (32 - route->rtm_dst_len)) : 0;
			found |= by == interface && (to.s_addr & mask) == (network & mask);
		}
	}
	close(fd);
	return found;
}

/* UCX since 2025: for each GID it reads the interface, and asks for the route. No file, no peer. A missing type is RoCE v1. */
static void reachability(void)
{
	char interface[64], type[64];
	struct in_addr peer;
	int seen = 0;

	open_device();
	inet_pton(AF_INET, "10.55.0.1", &peer);
	for (int i = 0; i < port().gid_tbl_len; i++) {
		union ibv_gid gid, zero = { 0 };

		MUST(ibv_query_gid(context, 1, i, &gid) == 0);
		if (!memcmp(&gid, &zero, sizeof gid))
			continue;
		seen++;
		check(read_line(interface, sizeof interface, "gid_attrs/ndevs", i) == 0 && if_nametoindex(interface) > 0,
		      "each GID has an interface", "GID %d: %s", i, strerror(errno));
		check(read_line(type, sizeof type, "gid_attrs/types", i) == 0 && !strcmp(type, "RoCE v2"), "and is of RoCE v2", "%s", type);
		if (!strcmp(interface, "veth0"))
			check(has_route(peer, if_nametoindex(interface)), "which has the route to the peer", "%s has not", interface);
	}
	check(seen > 0, "there are GIDs", "none");
	MUST(ibv_close_device(context) == 0);
}

/* An error of ibv_query_gid ends UCX's interface; pyverbs wants ENODATA of the extended one; a type that NCCL cannot open ends NCCL. */
static void gids(void)
{
	struct ibv_gid_entry entry;
	union ibv_gid gid, zero = { 0 };
	char type[64];
	int length;

	open_device();
	length = port().gid_tbl_len;
	check(length > 0, "the table has a length", "%d", length);
	for (int i = 0; i < length; i++) {
		bool empty;
		int rc;

		MUST(ibv_query_gid(context, 1, i, &gid) == 0);
		empty = !memcmp(&gid, &zero, sizeof gid);
		rc = ibv_query_gid_ex(context, 1, (uint32_t)i, &entry, 0);
		check(empty ? rc == ENODATA : rc == 0 && !memcmp(&entry.gid, &gid, sizeof gid), "both queries agree on an entry",
		      "GID %d: %d", i, rc);
		check(empty || read_line(type, sizeof type, "gid_attrs/types", i) == 0, "its type can be read", "GID %d: %s", i,
		      strerror(errno));
	}
	/* An index that is in the table, and has no address. */
	check(length == 1 || ibv_query_gid(context, 1, length - 1, &gid) == 0, "the last entry can be queried", "%s", strerror(errno));
	check(ibv_query_gid(context, 1, length, &gid) != 0, "and none behind it", "one");
	MUST(ibv_close_device(context) == 0);
}

/* UCX makes an address handle of its own GID, to see whether the GID works. */
static void probing(void)
{
	struct ibv_ah_attr attr = {
		.is_global = 1, .port_num = 1, .dlid = 0xC000,
		.grh = { .flow_label = 1, .hop_limit = 255 },
	};
	struct ibv_pd *pd;
	struct ibv_ah *ah;

	open_device();
	MUST(pd = ibv_alloc_pd(context));
	for (int i = 0; i < port().gid_tbl_len; i++) {
		struct ibv_gid_entry entry;

		if (ibv_query_gid_ex(context, 1, (uint32_t)i, &entry, 0))
			continue;
		attr.grh.dgid = entry.gid;
		attr.grh.sgid_index = (uint8_t)i;
		ah = ibv_create_ah(pd, &attr);
		check(ah != NULL, "create_ah of an own GID", "GID %d: %s", i, strerror(errno));
		MUST(!ah || ibv_destroy_ah(ah) == 0);
	}
	MUST(ibv_dealloc_pd(pd) == 0);
	MUST(ibv_close_device(context) == 0);
}

/* Another width is 1x SDR to UCX; NDR and above makes it open two queue pairs a path. */
static void speed(void)
{
	static const uint8_t widths[] = { 1, 2, 4, 8, 16 }, speeds[] = { 1, 2, 4, 8, 16, 32, 64 };
	struct ibv_port_attr attr;

	open_device();
	attr = port();
	check(memchr(widths, attr.active_width, sizeof widths) != NULL, "a width that is one", "%u", attr.active_width);
	check(memchr(speeds, attr.active_speed, sizeof speeds) != NULL, "a speed that is one, below NDR", "%u", attr.active_speed);
	MUST(ibv_close_device(context) == 0);
}

/* UCX finds the sender in the GRH area: IPv4's header is its second half, and the first one stays as UCX wrote it. */
static void headers(void)
{
	struct ibv_ah_attr way = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
	struct in_addr own;
	struct ibv_send_wr send = { .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_recv_wr receive = { .num_sge = 1 }, *bad_receive;
	uint32_t largest;
	struct ibv_sge out, in;
	unsigned char *area;
	struct ibv_pd *pd;
	struct ibv_cq *scq, *rcq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_ah *ah;
	struct ibv_wc wc;

	open_device();
	largest = 128u << port().active_mtu;
	largest = largest < 8192 ? largest : 8192;
	MUST(pd = ibv_alloc_pd(context));
	MUST(scq = ibv_create_cq(context, 16, NULL, NULL, 0));
	MUST(rcq = ibv_create_cq(context, 16, NULL, NULL, 0));
	init.send_cq = scq;
	init.recv_cq = rcq;
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	MUST(to(qp, IBV_QPS_RTR) == 0);
	attr.qp_state = IBV_QPS_RTS;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	MUST(area = malloc(GRH + 2 * (size_t)largest));
	memset(area, 0xff, GRH);
	MUST(mr = ibv_reg_mr(pd, area, GRH + 2 * (size_t)largest, IBV_ACCESS_LOCAL_WRITE));
	way.grh.dgid = own_gid;
	MUST(ah = ibv_create_ah(pd, &way));
	in = sge_of(mr, 0, GRH + largest);
	receive.sg_list = &in;
	MUST(ibv_post_recv(qp, &receive, &bad_receive) == 0);
	out = sge_of(mr, GRH + largest, largest);
	send.sg_list = &out;
	send.wr.ud.ah = ah;
	send.wr.ud.remote_qpn = qp->qp_num;
	send.wr.ud.remote_qkey = QKEY;
	MUST(ibv_post_send(qp, &send, &bad) == 0);
	want_wc(scq, IBV_WC_SUCCESS, "a message of the port's MTU");
	wc = want_wc(rcq, IBV_WC_SUCCESS, "arrives");
	check(wc.byte_len == largest + GRH && wc.wc_flags & IBV_WC_GRH, "with the length of both, and GRH", "%u, flags %#x", wc.byte_len,
	      wc.wc_flags);
	check(area[0] == 0xff && !memcmp(area, area + 1, 19), "the first 20 bytes are as they were", "%#x", area[0]);
	inet_pton(AF_INET, "10.55.0.2", &own);
	check(area[20] == 0x45 && !memcmp(area + 36, &own, 4), "then the header of IPv4, the destination last", "%#x", area[20]);
	check(!memcmp(own_gid.raw + 12, area + 36, 4), "which is in the table of GIDs", "it is not");
	MUST(ibv_destroy_qp(qp) == 0 && ibv_destroy_ah(ah) == 0 && ibv_dereg_mr(mr) == 0);
	MUST(ibv_destroy_cq(scq) == 0 && ibv_destroy_cq(rcq) == 0 && ibv_dealloc_pd(pd) == 0);
	free(area);
	MUST(ibv_close_device(context) == 0);
}

/* UCX over RC: its shared receive queue, the state in the C structure, and the event after which it destroys a queue pair. */
static void shared(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 4095, .max_sge = 1 } };
	struct ibv_async_event event;
	struct ibv_device_attr device;
	struct ibv_srq *srq;
	struct ibv_pd *pd;
	struct end a = { 0 }, b = { 0 };

	open_device();
	MUST(ibv_query_device(context, &device) == 0);
	check(device.max_srq > 0 && device.max_srq_wr >= 4095, "the device has SRQs of that depth", "%d", device.max_srq_wr);
	MUST(pd = ibv_alloc_pd(context));
	srq = ibv_create_srq(pd, &attr);
	if (!check(srq != NULL, "create_srq of 4,095", "%s", strerror(errno)))
		return;
	end_open_with(&a, srq);
	end_open(&b);
	check(a.qp->state == IBV_QPS_RESET, "the structure's state: RESET", "%d", a.qp->state);
	MUST(init(a.qp) == 0);
	check(a.qp->state == IBV_QPS_INIT, "INIT", "%d", a.qp->state);
	end_to_rtr(&a, &b);
	check(a.qp->state == IBV_QPS_RTR, "RTR", "%d", a.qp->state);
	end_to_rtr(&b, &a);
	end_to_rts(&a);
	end_to_rts(&b);
	check(a.qp->state == IBV_QPS_RTS, "RTS", "%d", a.qp->state);
	MUST(to(a.qp, IBV_QPS_ERR) == 0);
	check(a.qp->state == IBV_QPS_ERR, "ERR", "%d", a.qp->state);
	if (check(readable(context->async_fd, LIMIT_MS), "an event follows", "none")) {
		MUST(ibv_get_async_event(context, &event) == 0);
		check(event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED && event.element.qp == a.qp, "LAST_WQE_REACHED", "%s",
		      ibv_event_type_str(event.event_type));
		ibv_ack_async_event(&event);
	}
	end_close(&a);
	end_close(&b);
	MUST(ibv_destroy_srq(srq) == 0 && ibv_dealloc_pd(pd) == 0);
	MUST(ibv_close_device(context) == 0);
}

/* EOPNOTSUPP says that there is no ECE; descriptor -1 is how programs ask whether there are dmabuf regions. */
static void extensions(void)
{
	struct ibv_ece ece = { 0 };
	struct end a = { 0 };
	struct ibv_mr *mr;

	open_device();
	end_open(&a);
	check_errno(ibv_query_ece(a.qp, &ece), EOPNOTSUPP, "query_ece");
	check_errno(ibv_set_ece(a.qp, &ece), EOPNOTSUPP, "set_ece");
	errno = 0;
	mr = ibv_reg_dmabuf_mr(a.pd, 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE);
	check(!mr && (errno == EBADF || errno == EOPNOTSUPP), "reg_dmabuf_mr of descriptor -1: EBADF or EOPNOTSUPP", "%s", strerror(errno));
	end_close(&a);
	MUST(ibv_close_device(context) == 0);
}

/* perftest and NCCL always set the optional bit. Programs that see on-demand paging use it. */
static void rights(void)
{
	struct ibv_device_attr_ex device = { 0 };
	static char memory[8192];
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct end a = { 0 }, b = { 0 };
	struct ibv_mr *mr, *all;
	struct ibv_pd *pd;
	char *page;

	open_device();
	MUST(pd = ibv_alloc_pd(context));
	mr = ibv_reg_mr(pd, memory, sizeof memory, REMOTE_ALL | IBV_ACCESS_RELAXED_ORDERING);
	check(mr != NULL, "reg_mr with RELAXED_ORDERING", "%s", strerror(errno));
	MUST(!mr || ibv_dereg_mr(mr) == 0);
	mr = ibv_reg_mr_iova2(pd, memory, sizeof memory, 0x10000, (unsigned int)(REMOTE_ALL | IBV_ACCESS_RELAXED_ORDERING));
	check(mr != NULL, "reg_mr_iova2 with RELAXED_ORDERING", "%s", strerror(errno));
	MUST(!mr || ibv_dereg_mr(mr) == 0);
	mr = ibv_reg_mr(pd, memory, sizeof memory, REMOTE_ALL | (1 << 29));
	check(mr != NULL, "with the last optional bit", "%s", strerror(errno));
	MUST(!mr || ibv_dereg_mr(mr) == 0);
	MUST(ibv_dealloc_pd(pd) == 0);
	/* What is advertised is there: memory that no region names, and no page stands for yet. */
	MUST(ibv_query_device_ex(context, NULL, &device) == 0);
	check(device.odp_caps.general_caps & IBV_ODP_SUPPORT_IMPLICIT, "on-demand paging is advertised", "%#lx",
	      device.odp_caps.general_caps);
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	end_receive(&b, 1, 4096);
	MUST(all = ibv_reg_mr(a.pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	MUST(page != MAP_FAILED);
	sge = (struct ibv_sge){ (uintptr_t)page, 4096, all->lkey };
	memset(b.buffer + ROOM, 1, 4096);
	MUST(ibv_post_send(a.qp, &wr, &bad) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a Send from it");
	want_wc(b.rcq, IBV_WC_SUCCESS, "arrives");
	check(b.buffer[ROOM] == 0 && b.buffer[ROOM + 4095] == 0, "with the page's zeros", "%d", b.buffer[ROOM]);
	MUST(munmap(page, 4096) == 0 && ibv_dereg_mr(all) == 0);
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

/* libfabric doubles the inline size until create_qp fails, and sends that much inline. Its datagrams use GID 0 and P_Key 0. */
static void inlining(void)
{
	struct ibv_gid_entry entry;
	struct end a = { 0 }, b = { 0 };
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE }, *bad;
	uint32_t best = 0, size;
	__be16 pkey;
	int rc = 0;

	open_device();
	end_open(&a);
	end_open(&b);
	for (size = 1; size < 1u << 24 && !rc; size *= 2) {
		struct ibv_qp_init_attr init = {
			.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = size },
			.qp_type = IBV_QPT_RC, .send_cq = a.scq, .recv_cq = a.rcq, .sq_sig_all = 1,
		};
		struct ibv_qp *qp;

		errno = 0;
		qp = ibv_create_qp(a.pd, &init);
		rc = qp ? 0 : errno;
		if (!qp)
			break;
		check(init.cap.max_inline_data >= size, "the size that is granted is the requested one at least", "%u",
		      init.cap.max_inline_data);
		best = size;
		MUST(ibv_destroy_qp(qp) == 0);
	}
	check(rc == EINVAL && best >= 64, "above the limit: EINVAL", "%s, last %u", strerror(rc), best);
	MUST(ibv_destroy_qp(a.qp) == 0);
	{
		struct ibv_qp_init_attr attr = {
			.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = best },
			.qp_type = IBV_QPT_RC, .send_cq = a.scq, .recv_cq = a.rcq, .sq_sig_all = 1,
		};

		MUST(a.qp = ibv_create_qp(a.pd, &attr));
		MUST(init(a.qp) == 0);
	}
	ends_connect(&a, &b);
	end_receive(&b, 1, ROOM);
	memset(a.buffer, 9, best);
	/* No region is named. */
	sge = (struct ibv_sge){ (uintptr_t)a.buffer, best, 0 };
	MUST(best <= ROOM && ibv_post_send(a.qp, &wr, &bad) == 0);
	memset(a.buffer, 1, best);
	want_wc(a.scq, IBV_WC_SUCCESS, "a Send of that much inline");
	check(want_wc(b.rcq, IBV_WC_SUCCESS, "arrives").byte_len == best && b.buffer[ROOM] == 9 && b.buffer[ROOM + best - 1] == 9,
	      "as it was when it was posted", "%d", b.buffer[ROOM]);
	check(ibv_query_pkey(context, 1, 0, &pkey) == 0 && pkey == 0xffff, "P_Key 0 is the default one", "%#x", pkey);
	check(ibv_query_gid_ex(context, 1, 0, &entry, 0) == 0 && entry.gid.global.interface_id != 0, "GID 0 has an interface_id", "none");
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

/* NCCL loads the library by itself, in versions of its choice, and waits for data in memory, without a call. */
static void spinning(void)
{
	static const struct { const char *name, *version; } wanted[] = {
		{ "ibv_get_device_list", "IBVERBS_1.1" }, { "ibv_reg_mr", "IBVERBS_1.1" }, { "ibv_reg_mr_iova2", "IBVERBS_1.8" },
		{ "ibv_query_ece", "IBVERBS_1.10" }, { "ibv_set_ece", "IBVERBS_1.10" }, { "ibv_reg_dmabuf_mr", "IBVERBS_1.12" },
		{ "ibv_query_port_speed", "IBVERBS_1.16" },
	};
	void *library = dlopen("libibverbs.so.1", RTLD_NOW);
	volatile uint64_t *last;
	struct end a = { 0 }, b = { 0 };
	uint64_t end;

	MUST(library);
	for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
		check(dlvsym(library, wanted[i].name, wanted[i].version) != NULL, wanted[i].name, "not in %s", wanted[i].version);
	open_device();
	end_open(&a);
	end_open(&b);
	ends_connect(&a, &b);
	memset(a.buffer, 5, 4096);
	last = (volatile uint64_t *)(void *)(b.buffer + ROOM + 4096 - 8);
	/* Plain, then with immediate data: the last bytes of each come without a call of the receiver. */
	for (int round = 0; round < 2; round++) {
		end_receive(&b, 1, 0);
		memset(b.buffer + ROOM, 0, 4096);
		end_submit(&a, &b, round ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE, 2, 4096);
		for (end = now_ms() + LIMIT_MS; *last != 0x0505050505050505ull && now_ms() < end;)
			;
		check(*last == 0x0505050505050505ull, "the last 8 bytes of a Write show up in memory", "%lx", *last);
		check(b.buffer[ROOM] == 5 && !memcmp(b.buffer + ROOM, b.buffer + ROOM + 1, 4095), "the others are there before", "not");
		want_wc(a.scq, IBV_WC_SUCCESS, "it completes");
	}
	want_wc(b.rcq, IBV_WC_SUCCESS, "and with immediate data also at the receiver");
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
	dlclose(library);
}

/* pyverbs' tests: numbers that are not 0, and the interface below the device's directory. */
static void identity(void)
{
	struct ibv_device_attr device;
	struct dirent *entry;
	char name[64] = "";
	DIR *directory;
	int others = 0;

	open_device();
	MUST(ibv_query_device(context, &device) == 0);
	check(device.vendor_id && device.node_guid && device.sys_image_guid && device.max_pkeys,
	      "vendor_id, GUIDs and max_pkeys are not 0", "%#x %d", device.vendor_id, device.max_pkeys);
	check(port().pkey_tbl_len > 0, "the port has P_Keys", "none");
	directory = opendir("/sys/class/infiniband/uwarp0/device/net/");
	if (!check(directory != NULL, "device/net can be listed", "%s", strerror(errno)))
		return;
	while ((entry = readdir(directory))) {
		if (entry->d_name[0] == '.')
			continue;
		others += name[0] != 0;
		snprintf(name, sizeof name, "%.60s", entry->d_name);
	}
	closedir(directory);
	check(!strcmp(name, "veth0") && !others, "it names the interface", "%s", name);
	MUST(ibv_close_device(context) == 0);
}

static int counted;

static int counting_poll(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
	(void)cq, (void)n, (void)wc;
	counted++;
	return 0;
}

/* RCCL writes over the operations of one context. Others keep theirs. */
static void operations(void)
{
	struct ibv_context *first;
	struct ibv_cq *cq, *other;
	struct ibv_wc wc;

	open_device();
	first = context;
	open_device();
	MUST(cq = ibv_create_cq(first, 4, NULL, NULL, 0));
	MUST(other = ibv_create_cq(context, 4, NULL, NULL, 0));
	first->ops.poll_cq = counting_poll;
	check(ibv_poll_cq(cq, 1, &wc) == 0 && counted == 1, "an operation that the program writes is called", "%d times", counted);
	check(ibv_poll_cq(other, 1, &wc) == 0 && counted == 1, "and is not that of another context", "%d times", counted);
	MUST(ibv_destroy_cq(cq) == 0 && ibv_destroy_cq(other) == 0);
	MUST(ibv_close_device(first) == 0 && ibv_close_device(context) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "reachability", reachability }, { "gids", gids }, { "probing", probing }, { "speed", speed },
		{ "headers", headers }, { "shared", shared }, { "extensions", extensions }, { "rights", rights },
		{ "inlining", inlining }, { "spinning", spinning }, { "identity", identity }, { "operations", operations },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
