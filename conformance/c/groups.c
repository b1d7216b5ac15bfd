/* Multicast groups: where their datagrams leave, who receives them, and how a member leaves.
 *
 *	groups - GROUP		one line per statement: "ok name" or "FAIL name: what was seen"
 *
 * It needs a network namespace of its own with veth0 (10.55.0.2) and veth1 (10.56.0.2), whose peers are up. */
#include <pthread.h>
#include <stdatomic.h>

#include "datagrams.h"

#define TO_GROUP 0xFFFFFFu
#define PLACES 3

static const char *const addresses[PLACES] = { "127.0.0.1", "10.55.0.2", "10.56.0.2" };

/* An id that has joined a group, and what it needs to send and receive there. */
struct member {
	struct rdma_event_channel *ch;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	unsigned char memory[SLOT];
	struct rdma_ud_param to;
	struct ibv_ah *ah;
};

static void join(struct member *m, const char *from, const char *group)
{
	struct sockaddr_storage own = sockaddr_of(from, 0), to = sockaddr_of(group, 0);
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_UD,
	};

	memset(m, 0, sizeof *m);
	MUST(m->ch = rdma_create_event_channel());
	MUST(rdma_create_id(m->ch, &m->id, NULL, RDMA_PS_UDP) == 0);
	MUST(rdma_resolve_addr(m->id, (struct sockaddr *)&own, (struct sockaddr *)&to, 2000) == 0);
	must_event(m->ch, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(m->pd = ibv_alloc_pd(m->id->verbs));
	MUST(m->cq = ibv_create_cq(m->id->verbs, 16, NULL, NULL, 0));
	MUST(m->mr = ibv_reg_mr(m->pd, m->memory, sizeof m->memory, IBV_ACCESS_LOCAL_WRITE));
	init.send_cq = init.recv_cq = m->cq;
	MUST(rdma_create_qp(m->id, m->pd, &init) == 0);
	MUST(rdma_join_multicast(m->id, (struct sockaddr *)&to, NULL) == 0);
	m->to = must_event(m->ch, RDMA_CM_EVENT_MULTICAST_JOIN).param.ud;
	MUST(m->ah = ibv_create_ah(m->pd, &m->to.ah_attr));
}

static void leave(struct member *m)
{
	if (m->id->qp)
		rdma_destroy_qp(m->id);
	MUST(ibv_destroy_ah(m->ah) == 0 && ibv_dereg_mr(m->mr) == 0);
	MUST(ibv_destroy_cq(m->cq) == 0 && ibv_dealloc_pd(m->pd) == 0);
	MUST(rdma_destroy_id(m->id) == 0);
	rdma_destroy_event_channel(m->ch);
}

/* Sends the byte; its memory may be used again at once. */
static void say(struct member *m, unsigned char byte)
{
	struct ibv_sge sge = sge_of(m->mr, SLOT - 1, 1);
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	m->memory[SLOT - 1] = byte;
	wr.wr.ud.ah = m->ah;
	wr.wr.ud.remote_qpn = m->to.qp_num;
	wr.wr.ud.remote_qkey = m->to.qkey;
	MUST(ibv_post_send(m->id->qp, &wr, &bad) == 0);
}

static void listen_for(struct member *m)
{
	struct ibv_sge sge = sge_of(m->mr, 0, SLOT - 1);
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(ibv_post_recv(m->id->qp, &wr, &bad) == 0);
}

/* Datagrams leave from the address that the id is bound to, loopback's included, which is in no GID table. */
static void bound(void)
{
	static struct member members[PLACES];
	struct in_addr source;
	struct ibv_wc wc;

	for (int i = 0; i < PLACES; i++) {
		join(&members[i], addresses[i], "239.77.1.1");
		for (int n = 0; n < PLACES; n++)
			listen_for(&members[i]);
	}
	for (int i = 0; i < PLACES; i++) {
		say(&members[i], (unsigned char)(100 + i));
		want_wc(members[i].cq, IBV_WC_SUCCESS, addresses[i]);
		check(members[i].memory[GRH] == 100 + i, "gets what was sent there", "%u", members[i].memory[GRH]);
		inet_pton(AF_INET, addresses[i], &source);
		check(!memcmp(members[i].memory + 32, &source, sizeof source), "from the bound address", "another one");
	}
	for (int i = 0; i < PLACES; i++)
		check(!poll_within(members[i].cq, &wc, QUIET_MS), "and nothing of the other interfaces", "a completion");
	for (int i = 0; i < PLACES; i++)
		leave(&members[i]);
}

/* A datagram to the address for all hosts: 255.255.255.255, or that of a network. The members of the
 * interface from which it leaves get it. */
static void broadcast(void)
{
	static const char *const networks[PLACES] = { NULL, "10.55.0.255", "10.56.0.255" };
	static struct member all[PLACES], own[PLACES];
	union ibv_gid gid = { 0 };
	struct ibv_wc wc;

	for (int i = 0; i < PLACES; i++) {
		join(&all[i], addresses[i], "255.255.255.255");
		listen_for(&all[i]);
		listen_for(&all[i]);
	}
	for (int i = 1; i < PLACES; i++) {
		join(&own[i], addresses[i], networks[i]);
		listen_for(&own[i]);
		listen_for(&own[i]);
	}
	for (int i = 0; i < PLACES; i++) {
		say(&all[i], (unsigned char)(100 + i));
		want_wc(all[i].cq, IBV_WC_SUCCESS, addresses[i]);
		check(all[i].memory[GRH] == 100 + i, "C25 gets what was sent to 255.255.255.255", "%u", all[i].memory[GRH]);
	}
	for (int i = 1; i < PLACES; i++) {
		say(&own[i], (unsigned char)(200 + i));
		want_wc(own[i].cq, IBV_WC_SUCCESS, networks[i]);
		check(own[i].memory[GRH] == 200 + i, "C25 gets what was sent to its network", "%u", own[i].memory[GRH]);
	}
	for (int i = 0; i < PLACES; i++)
		check(!poll_within(all[i].cq, &wc, QUIET_MS) && (!i || !poll_within(own[i].cq, &wc, QUIET_MS)),
		      "and nothing of the other interfaces", "a completion");
	/* By the verbs alone: the address of a network that the port is in, and of one that it is not in. */
	gid.raw[10] = gid.raw[11] = 0xFF;
	inet_pton(AF_INET, "10.56.0.255", gid.raw + 12);
	check_errno(ibv_attach_mcast(all[1].id->qp, &gid, 0), 0, "C25 attach_mcast of a network");
	say(&own[2], 77);
	want_wc(all[1].cq, IBV_WC_SUCCESS, "on the interface of that network");
	check_errno(ibv_detach_mcast(all[1].id->qp, &gid, 0), 0, "detach_mcast");
	inet_pton(AF_INET, "10.99.0.255", gid.raw + 12);
	check_errno(ibv_attach_mcast(all[1].id->qp, &gid, 0), EINVAL, "attach_mcast of a network of others");
	for (int i = 0; i < PLACES; i++)
		leave(&all[i]);
	for (int i = 1; i < PLACES; i++)
		leave(&own[i]);
}

/* ibv_destroy_qp(3) fails for a member. */
static void leaving(void)
{
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .qp_type = IBV_QPT_UD,
	};
	struct in6_addr group;
	union ibv_gid gid;
	struct ibv_qp *qp;
	struct member m;

	join(&m, "10.55.0.2", "239.77.1.2");
	init.send_cq = init.recv_cq = m.cq;
	MUST(qp = ibv_create_qp(m.pd, &init));
	inet_pton(AF_INET6, "::ffff:239.77.1.3", &group);
	memcpy(gid.raw, &group, sizeof group);
	check_errno(ibv_attach_mcast(qp, &gid, 0), 0, "attach_mcast");
	check_errno(ibv_destroy_qp(qp), EBUSY, "destroy_qp of a member");
	check_errno(ibv_attach_mcast(qp, &gid, 0), 0, "attach_mcast again");
	check_errno(ibv_detach_mcast(qp, &gid, 0), 0, "detach_mcast");
	check_errno(ibv_detach_mcast(qp, &gid, 0), EINVAL, "a second one");
	check_errno(ibv_destroy_qp(qp), 0, "destroy_qp after it");
	/* It has no way to fail; what used the queues is gone afterwards. */
	rdma_destroy_qp(m.id);
	leave(&m);
}

/* ------------------------------------------------------------------ leaving while messages come */

enum { CROWD = 32 };
static struct end talker, listener, quitter, crowd[CROWD];
static atomic_bool done;

static void *talk(void *argument)
{
	struct ibv_send_wr wr;
	struct ibv_sge sge;

	(void)argument;
	wr = request(&talker, &talker, &sge, 8);
	wr.wr.ud.remote_qpn = TO_GROUP;
	while (!done) {
		MUST(post_wr(&talker, wr) == 0);
		MUST(poll_one(talker.scq).status == IBV_WC_SUCCESS);
	}
	return NULL;
}

/* Another member receives for all of them: they share a socket. */
static void *listen_always(void *argument)
{
	struct ibv_wc wc;

	(void)argument;
	while (!done)
		if (ibv_poll_cq(listener.rcq, 1, &wc) == 1)
			receive(&listener, 0);
	return NULL;
}

/* No message completes that comes after ibv_detach_mcast has returned. */
static void detaching(void)
{
	enum { ROUNDS = 200 };
	pthread_t threads[2];
	struct ibv_ah_attr attr;
	struct in6_addr group;
	struct ibv_wc wc;
	int late = 0;

	open_device();
	end_open(&talker);
	end_open(&listener);
	end_open(&quitter);
	attr = way_home();
	inet_pton(AF_INET6, "::ffff:239.77.1.4", &group);
	memcpy(attr.grh.dgid.raw, &group, sizeof group);
	MUST(ibv_destroy_ah(talker.ah) == 0);
	MUST(talker.ah = ibv_create_ah(pd, &attr));
	MUST(ibv_attach_mcast(listener.qp, &attr.grh.dgid, 0) == 0);
	/* Each message goes to all of these first: there is time to leave. */
	for (int i = 0; i < CROWD; i++) {
		end_open(&crowd[i]);
		MUST(ibv_attach_mcast(crowd[i].qp, &attr.grh.dgid, 0) == 0);
	}
	for (int i = 0; i < SLOTS; i++) {
		receive(&listener, 0);
		receive(&quitter, 0);
	}
	MUST(pthread_create(&threads[0], NULL, talk, NULL) == 0);
	MUST(pthread_create(&threads[1], NULL, listen_always, NULL) == 0);
	for (int round = 0; round < ROUNDS; round++) {
		MUST(ibv_attach_mcast(quitter.qp, &attr.grh.dgid, 0) == 0);
		MUST(poll_one(quitter.rcq).status == IBV_WC_SUCCESS);
		receive(&quitter, 0);
		MUST(ibv_detach_mcast(quitter.qp, &attr.grh.dgid, 0) == 0);
		/* What completed before. */
		while (ibv_poll_cq(quitter.rcq, 1, &wc) == 1)
			receive(&quitter, 0);
		for (int i = 0; i < 20; i++) {
			sched_yield();
			if (ibv_poll_cq(quitter.rcq, 1, &wc) == 1) {
				late++;
				receive(&quitter, 0);
			}
		}
	}
	done = true;
	for (int i = 0; i < 2; i++)
		MUST(pthread_join(threads[i], NULL) == 0);
	check(late == 0, "nothing completes after detach_mcast", "%d messages in %d rounds", late, ROUNDS);
	MUST(ibv_detach_mcast(listener.qp, &attr.grh.dgid, 0) == 0);
	for (int i = 0; i < CROWD; i++) {
		MUST(ibv_detach_mcast(crowd[i].qp, &attr.grh.dgid, 0) == 0);
		end_close(&crowd[i]);
	}
	end_close(&talker);
	end_close(&listener);
	end_close(&quitter);
	close_device();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "bound", bound }, { "broadcast", broadcast }, { "leaving", leaving }, { "detaching", detaching },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
