/* What uwarp's datagram queue pairs can do beyond the verbs (uwarpdv.h): larger messages, and what peers say of messages that
 * they dropped. The functions are found as a program finds them that also runs over other devices.
 *
 *	uwarpdv ADDRESS [GROUP]	the address is not used */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "datagrams.h"
#include "../../abi/include/uwarpdv.h"

static __typeof__(uwarpdv_query_qp) *query_qp;
static __typeof__(uwarpdv_modify_qp) *modify_qp;
static __typeof__(uwarpdv_get_peer_error) *get_peer_error;

static void open_all(void)
{
	MUST(query_qp = (__typeof__(query_qp))dlvsym(RTLD_DEFAULT, "uwarpdv_query_qp", "UWARPDV_1.0"));
	MUST(modify_qp = (__typeof__(modify_qp))dlsym(RTLD_DEFAULT, "uwarpdv_modify_qp"));
	MUST(get_peer_error = (__typeof__(get_peer_error))dlsym(RTLD_DEFAULT, "uwarpdv_get_peer_error"));
	open_device();
}

static struct uwarpdv_qp_attr attr_of(struct ibv_qp *qp)
{
	struct uwarpdv_qp_attr attr = { .comp_mask = UWARPDV_QP_MAX_MESSAGE | UWARPDV_QP_PEER_ERRORS };

	MUST(query_qp(qp, &attr, sizeof attr) == 0);
	return attr;
}

static int set_largest(struct ibv_qp *qp, uint32_t bytes)
{
	struct uwarpdv_qp_attr attr = { .comp_mask = UWARPDV_QP_MAX_MESSAGE, .max_message = bytes };

	return modify_qp(qp, &attr, sizeof attr);
}

static int set_errors(struct ibv_qp *qp, uint32_t wanted)
{
	struct uwarpdv_qp_attr attr = { .comp_mask = UWARPDV_QP_PEER_ERRORS, .peer_errors = wanted };

	return modify_qp(qp, &attr, sizeof attr);
}

static void larger(void)
{
	struct uwarpdv_qp_attr attr;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b;

	open_all();
	end_open(&a);
	end_open(&b);
	attr = attr_of(a.qp);
	check(attr.max_message == UWARPDV_MESSAGE_DEFAULT && !attr.peer_errors, "the values of a new queue pair", "%u, %u",
	      attr.max_message, attr.peer_errors);
	check_errno(set_largest(a.qp, 20000), 0, "messages of up to 20,000 bytes");
	check(attr_of(a.qp).max_message == 20000, "are what the queue pair then says", "%u", attr_of(a.qp).max_message);
	for (uint32_t i = 0; i < 20000; i++)
		outgoing(&a)[i] = (unsigned char)(i * 7 ^ i >> 8);
	/* A receive of several slots. */
	MUST(receive_into(&b, 0, GRH + 20000) == 0);
	wr = request(&a, &b, &sge, 20000);
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a message of 20,000 bytes");
	want_message(&b, 20000, "arrives at a queue pair that asked for nothing");
	check(!memcmp(b.memory + GRH, outgoing(&a), 20000), "whole", "other bytes");
	receive(&b, 0);
	send_to(&a, &b, LARGEST + 1);
	settle(&a);
	nothing_more(&b, "a larger message than the receive is dropped");
	send_to(&a, &b, LARGEST);
	want_message(&b, LARGEST, "and the receive is there for the next");
	wr = request(&a, &b, &sge, 20001);
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_LOC_LEN_ERR, "a byte more than asked for");
	MUST(to(a.qp, IBV_QPS_RESET) == 0);
	up(a.qp, QKEY);
	check(attr_of(a.qp).max_message == 20000, "a reset does not change it", "%u", attr_of(a.qp).max_message);
	check_errno(set_largest(a.qp, UWARPDV_MESSAGE_MOST), 0, "the most there is");
	MUST(receive_into(&b, 0, GRH + UWARPDV_MESSAGE_MOST) == 0);
	wr = request(&a, &b, &sge, UWARPDV_MESSAGE_MOST);
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a message of 65,465 bytes");
	want_message(&b, UWARPDV_MESSAGE_MOST, "arrives");
	end_close(&a);
	end_close(&b);
	close_device();
}

static void errors(void)
{
	struct uwarpdv_peer_error error;
	struct ibv_async_event event;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct end a, b;

	open_all();
	end_open(&a);
	end_open(&b);
	check_errno(set_errors(a.qp, 1), 0, "errors of peers");
	check(attr_of(a.qp).peer_errors == 1, "are asked for", "%u", attr_of(a.qp).peer_errors);
	check_errno(get_peer_error(a.qp, &error, sizeof error), EAGAIN, "and there is none");
	wr = request(&a, &b, &sge, 100);
	wr.wr_id = 77;
	MUST(post_wr(&a, wr) == 0);
	want_wc(a.scq, IBV_WC_SUCCESS, "a message without a receive");
	MUST(readable(ctx->async_fd, LIMIT_MS) && ibv_get_async_event(ctx, &event) == 0);
	check(event.event_type == UWARPDV_EVENT_PEER_ERROR && event.element.qp == a.qp, "is an asynchronous event", "%s",
	      ibv_event_type_str(event.event_type));
	check(!strcmp(ibv_event_type_str(event.event_type), "a peer has dropped a message"), "with a name", "%s",
	      ibv_event_type_str(event.event_type));
	check_errno(get_peer_error(a.qp, &error, sizeof error), 0, "and an error");
	check(error.wr_id == 77 && error.msn == 1 && error.reason == UWARPDV_ERROR_NO_RECEIVE, "that names message and reason",
	      "wr_id %u, msn %u, reason %#x", (unsigned)error.wr_id, error.msn, error.reason);
	check(error.remote_qpn == b.qp->qp_num && !memcmp(&error.remote_gid, &own_gid, sizeof own_gid), "and the peer",
	      "%#x, or another GID", error.remote_qpn);
	check_errno(get_peer_error(a.qp, &error, sizeof error), EAGAIN, "once");
	ibv_ack_async_event(&event);
	MUST(receive_into(&b, 0, GRH + 99) == 0);
	send_to(&a, &b, 100);
	MUST(readable(ctx->async_fd, LIMIT_MS) && ibv_get_async_event(ctx, &event) == 0);
	ibv_ack_async_event(&event);
	check(get_peer_error(a.qp, &error, sizeof error) == 0 && error.reason == UWARPDV_ERROR_TOO_LONG && error.msn == 2,
	      "a message that is too long for its receive", "msn %u, reason %#x", error.msn, error.reason);
	/* The program takes three errors and no event. */
	for (uint32_t msn = 3; msn < 6; msn++) {
		send_to(&a, &b, 100);
		for (int ms = 0; get_peer_error(a.qp, &error, sizeof error); ms++) {
			MUST(ms < LIMIT_MS);
			usleep(1000);
		}
		check(error.msn == msn, "errors are there without the events", "msn %u", error.msn);
	}
	MUST(readable(ctx->async_fd, LIMIT_MS) && ibv_get_async_event(ctx, &event) == 0);
	ibv_ack_async_event(&event);
	check(!readable(ctx->async_fd, QUIET_MS), "and one event stands for all of them", "a second one");
	check(state_of(a.qp) == IBV_QPS_RTS && state_of(b.qp) == IBV_QPS_RTS, "no error changes a state", "%s, %s",
	      state_name(state_of(a.qp)), state_name(state_of(b.qp)));
	/* From the other one, which has not asked: after the error has come back, nothing has happened. */
	send_to(&b, &a, 100);
	settle(&b);
	settle(&b);
	check(!readable(ctx->async_fd, QUIET_MS), "a program that does not ask hears nothing", "an event");
	check_errno(get_peer_error(b.qp, &error, sizeof error), EAGAIN, "and finds nothing");
	end_close(&a);
	end_close(&b);
	close_device();
}

/* What the functions do with structures of other versions. */
static void sizes(struct end *a)
{
	struct {
		struct uwarpdv_qp_attr attr;
		uint64_t later;
	} longer = { .attr.comp_mask = UWARPDV_QP_MAX_MESSAGE | UWARPDV_QP_PEER_ERRORS, .later = 9 };
	struct uwarpdv_qp_attr *attr = &longer.attr;
	uint32_t shorter = offsetof(struct uwarpdv_qp_attr, peer_errors);
	struct uwarpdv_peer_error error;

	check(query_qp(a->qp, attr, sizeof longer) == 0 && longer.later == 9, "a query of a longer structure", "%u",
	      (unsigned)longer.later);
	check_errno(modify_qp(a->qp, attr, sizeof longer), 0, "modify with one");
	check_errno(query_qp(a->qp, attr, shorter), EINVAL, "query of a member beyond the size");
	check_errno(modify_qp(a->qp, attr, shorter), EINVAL, "modify of one");
	check_errno(query_qp(a->qp, attr, 7), EINVAL, "query of less than the mask");
	attr->comp_mask = UWARPDV_QP_MAX_MESSAGE;
	attr->peer_errors = 55;
	check(query_qp(a->qp, attr, shorter) == 0 && attr->peer_errors == 55, "a query of a shorter structure", "%u",
	      attr->peer_errors);
	check_errno(get_peer_error(a->qp, &error, sizeof error - 1), EINVAL, "an error into less than its size");
}

static void refused(void)
{
	struct uwarpdv_qp_attr attr = { .comp_mask = 1 << 2 };
	struct ibv_qp_init_attr init = { .cap = { .max_send_wr = 1, .max_recv_wr = 1 }, .qp_type = IBV_QPT_RC };
	struct uwarpdv_peer_error error;
	struct ibv_qp *rc;
	struct end a;

	open_all();
	end_open(&a);
	check_errno(query_qp(a.qp, &attr, sizeof attr), EINVAL, "query of an attribute that is not known");
	check_errno(modify_qp(a.qp, &attr, sizeof attr), EINVAL, "modify of one");
	check_errno(query_qp(a.qp, NULL, sizeof attr), EINVAL, "query into nothing");
	check_errno(modify_qp(NULL, &attr, sizeof attr), EINVAL, "modify of nothing");
	check_errno(get_peer_error(a.qp, NULL, sizeof error), EINVAL, "an error into nothing");
	check_errno(set_largest(a.qp, UWARPDV_MESSAGE_MOST + 1), EINVAL, "more than a datagram carries");
	check_errno(set_largest(a.qp, UWARPDV_MESSAGE_DEFAULT - 1), EINVAL, "less than every queue pair sends");
	attr = (struct uwarpdv_qp_attr){ .comp_mask = 3, .max_message = 1, .peer_errors = 1 };
	check_errno(modify_qp(a.qp, &attr, sizeof attr), EINVAL, "one good and one bad value");
	attr = attr_of(a.qp);
	check(attr.max_message == UWARPDV_MESSAGE_DEFAULT && !attr.peer_errors, "change nothing", "%u, %u", attr.max_message,
	      attr.peer_errors);
	attr = (struct uwarpdv_qp_attr){ .comp_mask = UWARPDV_QP_MAX_MESSAGE, .peer_errors = 55 };
	check(query_qp(a.qp, &attr, sizeof attr) == 0 && attr.peer_errors == 55, "a query writes what is asked for", "%u", attr.peer_errors);
	sizes(&a);
	init.send_cq = init.recv_cq = a.scq;
	MUST(rc = ibv_create_qp(pd, &init));
	check_errno(query_qp(rc, &attr, sizeof attr), EOPNOTSUPP, "query of a connected queue pair");
	check_errno(set_largest(rc, 8192), EOPNOTSUPP, "modify of one");
	check_errno(get_peer_error(rc, &error, sizeof error), EOPNOTSUPP, "an error of one");
	MUST(ibv_destroy_qp(rc) == 0);
	end_close(&a);
	close_device();
}

int main(int argc, char **argv)
{
	static const struct group groups[] = {
		{ "larger", larger }, { "errors", errors }, { "refused", refused },
	};

	return run_groups(argc, argv, groups, sizeof groups / sizeof *groups);
}
