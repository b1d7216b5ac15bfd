/* Functions that are not offered return EOPNOTSUPP in their own convention, for any arguments. Those are
 * the names that argv lists as NAME VERSION CONVENTION, called with zeros for all arguments (more
 * arguments than a function has do no harm), and the functions that verbs.h calls through the context. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include "check.h"

typedef long call(long, long, long, long, long, long, long, long);

/* An int in the lower half of a register. */
static int is(long result, const char *convention)
{
	if (!strcmp(convention, "code"))
		return (int)result == EOPNOTSUPP && errno == EOPNOTSUPP;
	if (!strcmp(convention, "minus_one"))
		return (int)result == -1 && errno == EOPNOTSUPP;
	/* As wide as a register: ssize_t, off_t. */
	if (!strcmp(convention, "wide_minus_one"))
		return result == -1 && errno == EOPNOTSUPP;
	if (!strcmp(convention, "pointer"))
		return result == 0 && errno == EOPNOTSUPP;
	return !strcmp(convention, "void") && errno == 0;
}

/* Functions without an exported name: verbs.h calls them through the context. */
static void through_the_context(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = ibv_open_device(list[0]);
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);
	/* Objects that no call of ours has made, with the context that the inline functions use. */
	struct ibv_flow flow = { .context = context };
	struct ibv_flow_action action = { .context = context };
	struct ibv_wq wq = { .context = context };
	struct ibv_rwq_ind_table table = { .context = context };
	struct ibv_counters counters = { .context = context };
	struct ibv_xrcd xrcd = { .context = context };
	struct ibv_srq srq = { .context = context };
	struct ibv_ops_wr op = { 0 }, *bad_op = NULL;
	uint32_t number;

	CHECK(qp);
	REFUSED(ibv_create_flow(qp, &(struct ibv_flow_attr){ 0 }), EOPNOTSUPP);
	CHECK(ibv_destroy_flow(&flow) == EOPNOTSUPP);
	REFUSED(ibv_create_flow_action_esp(context, &(struct ibv_flow_action_esp_attr){ 0 }), EOPNOTSUPP);
	CHECK(ibv_modify_flow_action_esp(&action, &(struct ibv_flow_action_esp_attr){ 0 }) == EOPNOTSUPP);
	CHECK(ibv_destroy_flow_action(&action) == EOPNOTSUPP);
	REFUSED(ibv_open_xrcd(context, &(struct ibv_xrcd_init_attr){ 0 }), EOPNOTSUPP);
	CHECK(ibv_close_xrcd(&xrcd) == EOPNOTSUPP && ibv_get_srq_num(&srq, &number) == EOPNOTSUPP);
	CHECK(ibv_post_srq_ops(&srq, &op, &bad_op) == EOPNOTSUPP && bad_op == &op);
	REFUSED(ibv_alloc_null_mr(pd), EOPNOTSUPP);
	REFUSED(ibv_create_wq(context, &(struct ibv_wq_init_attr){ .pd = pd, .cq = cq }), EOPNOTSUPP);
	CHECK(ibv_modify_wq(&wq, &(struct ibv_wq_attr){ 0 }) == EOPNOTSUPP);
	CHECK(ibv_destroy_wq(&wq) == EOPNOTSUPP);
	REFUSED(ibv_create_rwq_ind_table(context, &(struct ibv_rwq_ind_table_init_attr){ 0 }), EOPNOTSUPP);
	CHECK(ibv_destroy_rwq_ind_table(&table) == EOPNOTSUPP);
	REFUSED(ibv_create_counters(context, &(struct ibv_counters_init_attr){ 0 }), EOPNOTSUPP);
	CHECK(ibv_attach_counters_point_flow(&counters, &(struct ibv_counter_attach_attr){ 0 }, &flow) == EOPNOTSUPP);
	CHECK(ibv_read_counters(&counters, &(uint64_t){ 0 }, 1, 0) == EOPNOTSUPP);
	CHECK(ibv_destroy_counters(&counters) == EOPNOTSUPP);
	CHECK(ibv_modify_cq(cq, &(struct ibv_modify_cq_attr){ 0 }) == EOPNOTSUPP);
	REFUSED(ibv_open_qp(context, &(struct ibv_qp_open_attr){ 0 }), EOPNOTSUPP);
	CHECK(ibv_modify_qp_rate_limit(qp, &(struct ibv_qp_rate_limit_attr){ 0 }) == EOPNOTSUPP);
	CHECK(ibv_set_ece(qp, &(struct ibv_ece){ 0 }) == EOPNOTSUPP);
	CHECK(ibv_query_ece(qp, &(struct ibv_ece){ 0 }) == EOPNOTSUPP);
	CHECK(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0);
	CHECK(ibv_close_device(context) == 0);
	ibv_free_device_list(list);
}

int main(int argc, char **argv)
{
	void *library = dlopen("libibverbs.so.1", RTLD_NOW);
	int failed = 0;

	CHECK(library && argc > 1 && (argc - 1) % 3 == 0);
	for (int i = 1; i < argc; i += 3) {
		const char *name = argv[i], *version = argv[i + 1], *convention = argv[i + 2];
		call *function = (call *)dlvsym(library, name, version);
		long result;

		if (!function) {
			printf("%s@%s is not there\n", name, version);
			failed = 1;
			continue;
		}
		/* After a crash, the last name printed is at fault. */
		printf("%s@%s: ", name, version);
		fflush(stdout);
		errno = 0;
		result = function(0, 0, 0, 0, 0, 0, 0, 0);
		failed |= !is(result, convention);
		printf("%ld, %s%s\n", result, strerror(errno), is(result, convention) ? "" : ": NOT its convention");
		fflush(stdout);
	}
	through_the_context();
	return failed;
}
