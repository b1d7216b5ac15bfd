/* Datagram queue pairs through the C interface: address handles, states, Q_Keys, the 40 bytes in front of
 * a message, and what happens to a work request or a datagram that is wrong.
 *
 *	datagrams ADDRESS [GROUP]	the address is not used: every GID of the device is
 *
 * Between queue pairs of one process datagrams keep their order, so what must not arrive is sent in front
 * of what must. */
#include "datagrams.h"

/* ------------------------------------------------------------------ address handles */

static void handles(void)
{
	struct ibv_ah_attr attr;
	struct ibv_pd *other;
	struct ibv_ah *ah;
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct end a;

	open_device();
	end_open(&a);
	attr = way_home();
	if (check((ah = ibv_create_ah(pd, &attr)), "create_ah from a GID", "%m")) {
		check(ah->pd == pd && ah->context == ctx, "an address handle knows what it was made of", "other objects");
		check_errno(ibv_destroy_ah(ah), 0, "destroy_ah");
	}
	attr.port_num = 0;
	errno = 0;
	check_failed(!ibv_create_ah(pd, &attr), EINVAL, "create_ah for port 0");
	attr.port_num = 2;
	errno = 0;
	check_failed(!ibv_create_ah(pd, &attr), EINVAL, "create_ah for a port that is not there");
	attr = way_home();
	attr.grh.sgid_index = 200;
	errno = 0;
	check_failed(!ibv_create_ah(pd, &attr), EINVAL, "create_ah with a GID index beyond the table");
	attr = way_home();
	memset(&attr.grh.dgid, 0, sizeof attr.grh.dgid);
	errno = 0;
	check_failed(!ibv_create_ah(pd, &attr), EINVAL, "create_ah to the zero GID");
	attr = way_home();
	/* The documentation's prefix, or its IPv4 address: not the family of our GID. */
	memset(&attr.grh.dgid, 0, sizeof attr.grh.dgid);
	if (own_gid.raw[10] == 0xff && own_gid.raw[11] == 0xff)
		memcpy(attr.grh.dgid.raw, "\x20\x01\x0d\xb8", 4);
	else
		memcpy(attr.grh.dgid.raw + 10, "\xff\xff\xc0\x00\x02\x09", 6);
	errno = 0;
	check_failed(!ibv_create_ah(pd, &attr), EINVAL, "create_ah from one family to the other");
	attr = (struct ibv_ah_attr){ .port_num = 1, .dlid = 7 };
	errno = 0;
	check_failed(!ibv_create_ah(pd, &attr), EINVAL, "create_ah from a LID where there are none");
	MUST(other = ibv_alloc_pd(ctx));
	attr = way_home();
	MUST(ah = ibv_create_ah(other, &attr));
	check_errno(ibv_dealloc_pd(other), EBUSY, "dealloc_pd with an address handle");
	wr = request(&a, &a, &sge, 8);
	wr.wr.ud.ah = ah;
	check_errno(post_wr(&a, wr), 0, "C15 post_send with the address handle of another domain");
	want_wc(a.scq, IBV_WC_LOC_QP_OP_ERR, "which fails, as adapters have it");
	check(state_of(a.qp) == IBV_QPS_SQE, "and stops the send queue", "%s", state_name(state_of(a.qp)));
	MUST(to(a.qp, IBV_QPS_RTS) == 0);
	MUST(ibv_destroy_ah(ah) == 0 && ibv_dealloc_pd(other) == 0);
	wr = request(&a, &a, &sge, 8);
	wr.wr.ud.ah = NULL;
	check_errno(post_wr(&a, wr), EINVAL, "post_send without an address handle");
	/* A request's handle may go when the request is complete. */
	MUST(ah = ibv_create_ah(pd, &attr));
	receive(&a, 0);
	wr = request(&a, &a, &sge, 8);
	wr.wr.ud.ah = ah;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a Send by this handle");
	check_errno(ibv_destroy_ah(ah), 0, "destroy_ah of a handle that was used");
	want_message(&a, 8, "arrives");
	end_close(&a);
	close_device();
}

/* The sender of a message is reached through what came with it. */
static void answer(struct end *a, struct end *b, const char *family)
{
	unsigned char area[GRH];
	struct ibv_ah_attr attr;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_ah *ah;
	struct ibv_wc wc;

	receive(b, 0);
	memset(b->memory, 0xee, SLOT);
	for (int i = 0; i < 100; i++)
		outgoing(a)[i] = (unsigned char)(i * 7);
	send_to(a, b, 100);
	wc = want_message(b, 100, family);
	check(wc.src_qp == a->qp->qp_num && wc.qp_num == b->qp->qp_num, "names sender and receiver", "%#x %#x", wc.src_qp,
	      wc.qp_num);
	check(wc.opcode == IBV_WC_RECV && wc.wc_flags == IBV_WC_GRH, "a receive with a GRH", "opcode %d, flags %#x", wc.opcode,
	      wc.wc_flags);
	memcpy(area, b->memory, GRH);
	if (own_gid.raw[10] == 0xff && own_gid.raw[11] == 0xff) {
		check(area[0] == 0xee && area[19] == 0xee && area[20] == 0x45 && area[29] == 17, "an IPv4 header at byte 20",
		      "%#x %#x %#x %d", area[0], area[19], area[20], area[29]);
		check(!memcmp(area + 32, own_gid.raw + 12, 4) && !memcmp(area + 36, own_gid.raw + 12, 4), "with both addresses",
		      "others");
		check(area[22] == 0 && area[23] == 20 + 8 + 42 + 100, "and the length of the packet", "%d", area[23]);
	} else {
		check(area[0] >> 4 == 6 && area[6] == 17, "an IPv6 header", "%#x %d", area[0], area[6]);
		check(!memcmp(area + 8, &own_gid, 16) && !memcmp(area + 24, &own_gid, 16), "with both addresses", "others");
		check(area[5] == 8 + 42 + 100, "and the length of its payload", "%d", area[5]);
	}
	check(!memcmp(b->memory + GRH, outgoing(a), 100) && b->memory[GRH + 100] == 0xee, "the message behind it, and no more",
	      "other bytes");
	MUST(ibv_init_ah_from_wc(ctx, 1, &wc, (struct ibv_grh *)b->memory, &attr) == 0);
	check(attr.is_global == 1 && !memcmp(&attr.grh.dgid, &own_gid, 16) && attr.port_num == 1, "init_ah_from_wc leads back",
	      "global %d port %d", attr.is_global, attr.port_num);
	check(attr.grh.sgid_index == sgid_index, "from the address that it was sent to", "GID %d, want %d",
	      attr.grh.sgid_index, sgid_index);
	if (!check((ah = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)b->memory, 1)), "create_ah_from_wc", "%m"))
		return;
	receive(a, 0);
	wr = request(b, a, &sge, 30);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = wc.src_qp;
	MUST(post_wr(b, wr) == 0);
	want_wc(b->scq, IBV_WC_SUCCESS, "the answer");
	want_message(a, 30, "comes back");
	MUST(ibv_destroy_ah(ah) == 0);
	wc.wc_flags |= IBV_WC_GRH;
	memset(area, 0, sizeof area);
	errno = 0;
	check(!ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)area, 1) && errno, "create_ah_from_wc with no header fails",
	      "it succeeds");
}

/* Over every address of this host. */
static void families(void)
{
	for (sgid_index = 0; sgid_index < 16; sgid_index++) {
		struct ibv_port_attr port;
		char name[INET6_ADDRSTRLEN];
		struct end a, b;

		open_device();
		MUST(ibv_query_port(ctx, 1, &port) == 0);
		end_open(&a);
		end_open(&b);
		inet_ntop(AF_INET6, own_gid.raw, name, sizeof name);
		answer(&a, &b, name);
		end_close(&a);
		end_close(&b);
		close_device();
		if (sgid_index + 1 >= port.gid_tbl_len)
			return;
		open_device();
		sgid_index++;
		if (ibv_query_gid(ctx, 1, sgid_index, &own_gid) || !(own_gid.global.interface_id | own_gid.global.subnet_prefix))
			return;
		sgid_index--;
		close_device();
	}
}

/* ------------------------------------------------------------------ states and keys */

static int change(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = state, .port_num = 1, .qkey = QKEY, .path_mtu = IBV_MTU_1024, .sq_psn = 1 };

	return ibv_modify_qp(qp, &attr, mask | IBV_QP_STATE);
}

static void modifying(void)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr = { 0 };
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a;
	const int first = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;

	open_device();
	end_open(&a);
	MUST(to(a.qp, IBV_QPS_RESET) == 0);
	check_errno(receive_into(&a, 0, SLOT), EINVAL, "post_recv in RESET");
	check_errno(change(a.qp, IBV_QPS_INIT, 0), EINVAL, "INIT without attributes");
	check_errno(change(a.qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT), EINVAL, "INIT without Q_Key");
	check_errno(change(a.qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_QKEY), EINVAL, "INIT without port");
	check_errno(change(a.qp, IBV_QPS_INIT, first | IBV_QP_ACCESS_FLAGS), EINVAL, "INIT with rights");
	check_errno(change(a.qp, IBV_QPS_RTR, first), EINVAL, "RESET to RTR");
	check_errno(change(a.qp, IBV_QPS_RTS, first), EINVAL, "RESET to RTS");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 2, .qkey = 1 };
	check_errno(ibv_modify_qp(a.qp, &attr, first | IBV_QP_STATE), EINVAL, "INIT with another port");
	check(state_of(a.qp) == IBV_QPS_RESET, "is still in RESET", "%s", state_name(state_of(a.qp)));
	check_errno(change(a.qp, IBV_QPS_INIT, first), 0, "INIT");
	check_errno(receive_into(&a, 0, SLOT), 0, "post_recv in INIT");
	wr = request(&a, &a, &sge, 8);
	check_errno(post_wr(&a, wr), EINVAL, "post_send in INIT");
	check_errno(change(a.qp, IBV_QPS_RTR, IBV_QP_AV), EINVAL, "RTR with an address vector");
	check_errno(change(a.qp, IBV_QPS_RTR, IBV_QP_DEST_QPN), EINVAL, "RTR with a peer");
	check_errno(change(a.qp, IBV_QPS_RTR, IBV_QP_PATH_MTU), EINVAL, "RTR with a path MTU");
	check_errno(change(a.qp, IBV_QPS_RTR, 0), 0, "RTR");
	check_errno(post_wr(&a, wr), EINVAL, "post_send in RTR");
	check_errno(change(a.qp, IBV_QPS_RTS, 0), EINVAL, "RTS without a PSN");
	check_errno(change(a.qp, IBV_QPS_RTS, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT), EINVAL, "RTS with a timeout");
	check_errno(change(a.qp, IBV_QPS_RTS, IBV_QP_SQ_PSN), 0, "RTS");
	MUST(ibv_query_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_QKEY | IBV_QP_SQ_PSN, &init) == 0);
	check(attr.qp_state == IBV_QPS_RTS && attr.qkey == QKEY && attr.sq_psn == 1 && attr.port_num == 1 &&
	      init.qp_type == IBV_QPT_UD, "query_qp tells what was set", "%d %#x %u", attr.qp_state, attr.qkey, attr.sq_psn);
	check(attr.cap.max_send_wr >= 64 && attr.cap.max_inline_data >= 128, "and its capabilities", "%u %u",
	      attr.cap.max_send_wr, attr.cap.max_inline_data);
	check_errno(change(a.qp, IBV_QPS_INIT, first), EINVAL, "RTS to INIT");
	check_errno(to(a.qp, IBV_QPS_SQE), EINVAL, "RTS to SQE");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .cur_qp_state = IBV_QPS_SQD };
	check_errno(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL, "a wrong current state");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .qkey = 5 };
	check_errno(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_QKEY), 0, "another Q_Key in RTS");
	MUST(ibv_query_qp(a.qp, &attr, IBV_QP_QKEY, &init) == 0);
	check(attr.qkey == 5, "which is stored", "%#x", attr.qkey);
	check_errno(to(a.qp, IBV_QPS_ERR), 0, "ERR");
	want_wc(a.rcq, IBV_WC_WR_FLUSH_ERR, "the receive is flushed");
	check_errno(post_wr(&a, wr), 0, "post_send in ERR");
	want_wc(a.scq, IBV_WC_WR_FLUSH_ERR, "is flushed");
	check_errno(receive_into(&a, 0, SLOT), 0, "post_recv in ERR");
	want_wc(a.rcq, IBV_WC_WR_FLUSH_ERR, "is flushed, too");
	check_errno(to(a.qp, IBV_QPS_RTS), EINVAL, "ERR to RTS");
	check_errno(to(a.qp, IBV_QPS_RESET), 0, "RESET");
	end_close(&a);
	close_device();
}

static void refused(void)
{
	static const enum ibv_wr_opcode others[] = {
		IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_INV, IBV_WR_LOCAL_INV,
		IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_BIND_MW,
	};
	struct ibv_sge sges[5], sge;
	struct ibv_send_wr wr, second, *bad;
	struct end a;

	open_device();
	end_open(&a);
	receive(&a, 0);
	for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
		wr = request(&a, &a, &sge, 8);
		wr.opcode = others[i];
		check_errno(post_wr(&a, wr), EINVAL, "another operation than a Send");
	}
	wr = request(&a, &a, &sge, 8);
	for (int i = 0; i < 5; i++)
		sges[i] = sge;
	wr.sg_list = sges;
	wr.num_sge = 5;
	check_errno(post_wr(&a, wr), EINVAL, "more elements than the queue pair was made for");
	wr = request(&a, &a, &sge, 129);
	wr.send_flags |= IBV_SEND_INLINE;
	check_errno(post_wr(&a, wr), EINVAL, "more inline data than the queue pair was made for");
	/* What is in front of a refused one is posted. */
	wr = request(&a, &a, &sge, 8);
	second = wr;
	second.opcode = IBV_WR_RDMA_READ;
	wr.next = &second;
	check_errno(ibv_post_send(a.qp, &wr, &bad), EINVAL, "a list with a request that is refused");
	check(bad == &second, "bad_wr names it", "another one");
	want_wc(a.scq, IBV_WC_SUCCESS, "the one in front of it");
	want_message(&a, 8, "arrives");
	check(state_of(a.qp) == IBV_QPS_RTS, "no refusal changes the state", "%s", state_name(state_of(a.qp)));
	end_close(&a);
	close_device();
}

static void keys(void)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b;

	open_device();
	end_open(&a);
	end_open(&b);
	receive(&b, 0);
	receive(&b, 1);
	wr = request(&a, &b, &sge, 1);
	wr.wr.ud.remote_qkey = QKEY + 1;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a Send with a wrong Q_Key succeeds");
	wr = request(&a, &b, &sge, 2);
	wr.wr.ud.remote_qkey = 0x80000000u;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "one with the top bit set");
	want_message(&b, 2, "has the sender's own, and arrives; the other one does not");
	/* An own Q_Key with the top bit is sent as it is, and only so. */
	MUST(to(a.qp, IBV_QPS_RESET) == 0 && to(b.qp, IBV_QPS_RESET) == 0);
	up(a.qp, 0x80010000u);
	up(b.qp, 0x80010000u);
	receive(&b, 1);
	wr.wr.ud.remote_qkey = 0x80000000u;
	wr.wr_id = 3;
	sge.length = 3;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a controlled Q_Key");
	want_message(&b, 3, "is the sender's own");
	nothing_more(&b, "and that is all");
	end_close(&a);
	end_close(&b);
	close_device();
}

/* ------------------------------------------------------------------ messages */

static void messages(void)
{
	static const uint32_t lengths[] = { 0, 1, 8, 63, 64, 65, 1000, 1430, 1472, 2048, 4095, 4096 };
	struct ibv_sge sges[4], into[3];
	struct ibv_recv_wr recv = { .wr_id = 77, .sg_list = into, .num_sge = 3 }, *bad_recv;
	struct ibv_send_wr wr;
	struct ibv_wc wc;
	struct end a, b;

	open_device();
	end_open(&a);
	end_open(&b);
	for (int i = 0; i < LARGEST; i++)
		outgoing(&a)[i] = (unsigned char)(i * 31 ^ i >> 8);
	for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
		receive(&b, 0);
		memset(b.memory, 0, SLOT);
		send_to(&a, &b, lengths[i]);
		want_message(&b, lengths[i], "a message");
		check(!memcmp(b.memory + GRH, outgoing(&a), lengths[i]), "every byte of it", "length %u", lengths[i]);
	}
	/* Immediate data and the solicited flag do not depend on each other. */
	receive(&b, 0);
	wr = request(&a, &b, sges, 5);
	wr.opcode = IBV_WR_SEND_WITH_IMM;
	wr.imm_data = htonl(0xdeadbeef);
	wr.send_flags |= IBV_SEND_SOLICITED;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "SEND_WITH_IMM");
	wc = want_message(&b, 5, "arrives");
	check(wc.wc_flags == (IBV_WC_GRH | IBV_WC_WITH_IMM) && ntohl(wc.imm_data) == 0xdeadbeef, "with its immediate data",
	      "flags %#x, %#x", wc.wc_flags, ntohl(wc.imm_data));
	/* Lists at both ends: the GRH may end within an element. */
	into[0] = sge_of(b.mr, 0, 30);
	into[1] = sge_of(b.mr, 1000, 20);
	into[2] = sge_of(b.mr, 2000, 500);
	MUST(ibv_post_recv(b.qp, &recv, &bad_recv) == 0);
	memset(b.memory, 0xee, SLOT);
	wr = request(&a, &b, sges, 100);
	sges[1] = sge_of(a.mr, SLOTS * SLOT + 500, 0);
	sges[2] = sge_of(a.mr, SLOTS * SLOT + 700, 3);
	sges[3] = sge_of(a.mr, SLOTS * SLOT + 900, 97);
	wr.num_sge = 4;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "four elements");
	wc = want_message(&b, 200, "arrive in three");
	check(wc.wr_id == 77 && !memcmp(b.memory + 1010, outgoing(&a), 10) && !memcmp(b.memory + 2000, outgoing(&a) + 10, 90) &&
	      !memcmp(b.memory + 2090, outgoing(&a) + 700, 3) && !memcmp(b.memory + 2093, outgoing(&a) + 900, 97),
	      "in their places", "elsewhere");
	check(b.memory[2190] == 0xee && b.memory[30] == 0xee && b.memory[1020] == 0xee, "and nowhere else", "elsewhere too");
	/* Inline data needs no region, and is the program's again at once. */
	receive(&b, 0);
	wr = request(&a, &b, sges, 128);
	sges[0] = (struct ibv_sge){ (uint64_t)(uintptr_t)outgoing(&a), 128, 0 };
	wr.send_flags |= IBV_SEND_INLINE;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "inline data");
	want_message(&b, 128, "arrives");
	check(!memcmp(b.memory + GRH, outgoing(&a), 128), "whole", "other bytes");
	/* Not signalled: no completion, until an error. */
	receive(&b, 0);
	wr = request(&a, &b, sges, 9);
	wr.send_flags = 0;
	MUST(post_wr(&a, wr) == 0);
	want_message(&b, 9, "an unsignalled Send");
	check(ibv_poll_cq(a.scq, 1, &wc) == 0, "has no completion", "one");
	end_close(&a);
	end_close(&b);
	close_device();
}

/* A work request that fails stops the sender, and only it. */
static void stop(struct end *a, struct end *b, struct ibv_send_wr wr, enum ibv_wc_status status, const char *name)
{
	struct ibv_send_wr behind;
	struct ibv_sge sge;

	behind = request(a, b, &sge, 11);
	wr.send_flags = 0;
	wr.next = NULL;
	MUST(post_wr(a, wr) == 0);
	MUST(post_wr(a, behind) == 0);
	want_wc(a->scq, status, name);
	check(state_of(a->qp) == IBV_QPS_SQE, "takes the queue pair to SQE", "%s", state_name(state_of(a->qp)));
	want_wc(a->scq, IBV_WC_WR_FLUSH_ERR, "the one behind it is flushed");
	receive(a, 3);
	send_to(b, a, 12);
	want_message(a, 12, "in SQE it receives");
	check_errno(to(a->qp, IBV_QPS_RTS), 0, "SQE to RTS");
	receive(b, 3);
	send_to(a, b, 13);
	want_message(b, 13, "and sends again");
}

static void failing(void)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge, two[2];
	struct end a, b;

	open_device();
	end_open(&a);
	end_open(&b);
	wr = request(&a, &b, &sge, LARGEST + 1);
	stop(&a, &b, wr, IBV_WC_LOC_LEN_ERR, "a message longer than the largest");
	wr = request(&a, &b, two, LARGEST);
	two[1] = two[0];
	wr.num_sge = 2;
	stop(&a, &b, wr, IBV_WC_LOC_LEN_ERR, "one of two elements");
	two[0].length = two[1].length = UINT32_MAX;
	stop(&a, &b, wr, IBV_WC_LOC_LEN_ERR, "one whose length does not fit into 32 bits");
	wr = request(&a, &b, &sge, 8);
	sge.lkey ^= 0x5a5a00;
	stop(&a, &b, wr, IBV_WC_LOC_PROT_ERR, "a wrong lkey");
	wr = request(&a, &b, &sge, 8);
	sge.addr = (uint64_t)(uintptr_t)(a.memory + 2 * SLOTS * SLOT - 4);
	stop(&a, &b, wr, IBV_WC_LOC_PROT_ERR, "memory beyond the region");
	/* A wrong receive is the receiver's mistake. */
	sge = sge_of(b.mr, 0, SLOT);
	sge.lkey ^= 0x5a5a00;
	MUST(ibv_post_recv(b.qp, &(struct ibv_recv_wr){ .wr_id = 5, .sg_list = &sge, .num_sge = 1 },
			   &(struct ibv_recv_wr *){ NULL }) == 0);
	send_to(&a, &b, 8);
	want_wc(b.rcq, IBV_WC_LOC_PROT_ERR, "a message into a wrong receive");
	check(state_of(b.qp) == IBV_QPS_ERR && state_of(a.qp) == IBV_QPS_RTS, "takes the receiver to ERR, and not the sender",
	      "%s, %s", state_name(state_of(b.qp)), state_name(state_of(a.qp)));
	end_close(&a);
	end_close(&b);
	close_device();
}

static void dropping(void)
{
	struct ibv_wc wc;
	struct end a, b, c;

	open_device();
	end_open(&a);
	end_open(&b);
	end_open(&c);
	send_to(&a, &b, 1);
	/* A receive posted later is not for it. */
	send_to(&a, &c, 2);
	settle(&a);
	nothing_more(&c, "a message without a receive completes nothing");
	receive(&c, 0);
	send_to(&a, &c, 3);
	wc = want_message(&c, 3, "a message without a receive is dropped, the next one arrives");
	check(wc.wr_id == 0, "in the first receive", "%d", (int)wc.wr_id);
	nothing_more(&b, "nor here");
	MUST(receive_into(&b, 0, GRH + 10) == 0 && receive_into(&b, 1, GRH) == 0 && receive_into(&b, 2, GRH - 1) == 0);
	receive(&b, 3);
	send_to(&a, &b, 11);
	send_to(&a, &b, 10);
	wc = want_message(&b, 10, "a message that is too long leaves the receive to the next one");
	check(wc.wr_id == 0, "which fits exactly", "receive %d", (int)wc.wr_id);
	send_to(&a, &b, 1);
	send_to(&a, &b, 0);
	wc = want_message(&b, 0, "the same of 40 bytes and an empty message");
	check(wc.wr_id == 1, "which fits", "receive %d", (int)wc.wr_id);
	send_to(&a, &b, 0);
	check(state_of(b.qp) == IBV_QPS_RTS, "no drop changes the state", "%s", state_name(state_of(b.qp)));
	/* 39 bytes never fit: nothing is received until the program resets the queue. */
	nothing_more(&b, "less room than the GRH takes nothing");
	check(state_of(a.qp) == IBV_QPS_RTS, "and not the sender's", "%s", state_name(state_of(a.qp)));
	end_close(&a);
	end_close(&b);
	end_close(&c);
	close_device();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "handles", handles }, { "families", families }, { "modifying", modifying }, { "refused", refused },
		{ "keys", keys }, { "messages", messages }, { "failing", failing }, { "dropping", dropping },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
