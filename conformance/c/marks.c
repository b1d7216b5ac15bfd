/* Traffic class and hop limit, which programs set in address vectors: what a socket of the system sees of them.
 *
 *	marks [ADDRESS [GROUP]]	one line per statement: "ok name" or "FAIL name: what was seen" */
#define _GNU_SOURCE
#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "ends.h"

#define CLASS 0xb8

/* The traffic class of each TCP socket of this process that is connected; how many have `want`. */
static int streams_with(int want)
{
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	int count = 0;

	MUST(dir);
	while ((entry = readdir(dir))) {
		int fd = atoi(entry->d_name), tos = 0, type = 0;
		struct sockaddr_storage peer;
		socklen_t length = sizeof peer, size = sizeof type;

		if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_STREAM ||
		    getpeername(fd, (struct sockaddr *)&peer, &length))
			continue;
		size = sizeof tos;
		if (getsockopt(fd, IPPROTO_IP, IP_TOS, &tos, &size) == 0 && tos == want)
			count++;
	}
	closedir(dir);
	return count;
}

static void to_rtr_with(struct end *end, const struct end *peer, uint8_t class)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp->qp_num, .rq_psn = 1,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid, .hop_limit = 1, .traffic_class = class } },
	};

	MUST(ibv_modify_qp(end->qp, &attr, RTR_MASK) == 0);
}

static void streams(void)
{
	struct end a = { 0 }, b = { 0 };

	open_device();
	end_open(&a);
	end_open(&b);
	to_rtr_with(&a, &b, CLASS);
	to_rtr_with(&b, &a, CLASS);
	end_to_rts(&a);
	end_to_rts(&b);
	end_receive(&b, 1, 64);
	end_submit(&a, &b, IBV_WR_SEND, 2, 8);
	MUST(poll_one(a.scq).status == IBV_WC_SUCCESS && poll_one(b.rcq).status == IBV_WC_SUCCESS);
	check(streams_with(CLASS) == 2, "C16 the traffic class of both ends shows in their streams", "%d with it, %d without",
	      streams_with(CLASS), streams_with(0));
	end_close(&a);
	end_close(&b);
	MUST(ibv_close_device(context) == 0);
}

/* A socket of ours in the place of a queue pair: its port is in the number that the datagrams are for. */
static void datagrams(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	int fd = socket(AF_INET, SOCK_DGRAM, 0), yes = 1;
	socklen_t length = sizeof at;
	struct ibv_qp_init_attr init = { .cap = { 4, 4, 1, 1, 64 }, .qp_type = IBV_QPT_UD, .sq_sig_all = 1 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_pd *pd;
	char text[8] = "marked";

	open_device();
	MUST(own_gid.raw[10] == 0xff && own_gid.raw[11] == 0xff);
	memcpy(&at.sin_addr, own_gid.raw + 12, 4);
	MUST(bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && getsockname(fd, (struct sockaddr *)&at, &length) == 0);
	MUST(setsockopt(fd, IPPROTO_IP, IP_RECVTOS, &yes, sizeof yes) == 0);
	MUST(setsockopt(fd, IPPROTO_IP, IP_RECVTTL, &yes, sizeof yes) == 0);
	MUST((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 8, NULL, NULL, 0)));
	init.send_cq = init.recv_cq = cq;
	MUST(qp = ibv_create_qp(pd, &init));
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
	attr.qp_state = IBV_QPS_RTR;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
	attr.qp_state = IBV_QPS_RTS;
	MUST(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);
	/* Class and limit of the handle, and whether the limit shows: 0 and 1 are the system's. */
	static const struct { uint8_t class, limit; bool shows; } cases[] = { { CLASS, 33, true }, { 0x28, 1, false }, { 0, 0, false } };

	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct ibv_ah_attr to = {
			.is_global = 1, .port_num = 1,
			.grh = { .dgid = own_gid, .hop_limit = cases[i].limit, .traffic_class = cases[i].class },
		};
		struct ibv_sge sge = { (uintptr_t)text, sizeof text, 0 };
		struct ibv_send_wr wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE,
			.wr.ud = { .remote_qpn = (uint32_t)ntohs(at.sin_port) << 8, .remote_qkey = 7 },
		}, *bad;
		char bytes[256], control[256];
		struct iovec piece = { bytes, sizeof bytes };
		struct msghdr message = {
			.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control,
		};
		int class = -1, limit = -1;

		MUST(wr.wr.ud.ah = ibv_create_ah(pd, &to));
		MUST(ibv_post_send(qp, &wr, &bad) == 0 && poll_one(cq).status == IBV_WC_SUCCESS);
		MUST(readable(fd, LIMIT_MS) && recvmsg(fd, &message, 0) > 0);
		for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
			if (c->cmsg_type == IP_TOS)
				class = *CMSG_DATA(c);
			if (c->cmsg_type == IP_TTL)
				limit = *CMSG_DATA(c);
		}
		check(class == cases[i].class, "C16 the traffic class of an address handle shows in the datagram", "%#x, not %#x", class,
		      cases[i].class);
		check(cases[i].shows ? limit == cases[i].limit : limit > 33, "and its hop limit", "%d of %d", limit, cases[i].limit);
		MUST(ibv_destroy_ah(wr.wr.ud.ah) == 0);
	}
	close(fd);
	MUST(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0);
}

int main(int argc, char **argv)
{
	static const struct group groups[] = { { "streams", streams }, { "datagrams", datagrams } };

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
