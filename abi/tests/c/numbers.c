/* Makes argv[1] queue pairs and prints the ports that their numbers name; errors go to the log. */
#include <infiniband/verbs.h>
#include <unistd.h>
#include "check.h"

int main(int argc, char **argv)
{
	struct ibv_context *context = ibv_open_device(ibv_get_device_list(NULL)[0]);
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	unsigned last = 0;

	CHECK(argc == 2 && context && dup2(1, 2) == 2);
	CHECK((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 4, NULL, NULL, 0)));
	for (int i = 0; i < atoi(argv[1]); i++) {
		struct ibv_qp_init_attr attr = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 },
		};
		struct ibv_qp *qp = ibv_create_qp(pd, &attr);

		if (!qp) {
			printf("%s\n", strerror(errno));
			return 0;
		}
		if (qp->qp_num >> 8 != last)
			printf("%u\n", last = qp->qp_num >> 8);
	}
	return 0;
}
