/* Connections with several peers, made and ended in the order of the arguments. Each carries a message there and back
 * when it is made, and all that there are do so before each pause: at a ".", the program prints "step N" and waits until
 * there is a file DIR/N.
 *
 *     peers server ADDRESS PORT
 *     peers client ADDRESS DIR {+PORT | -PORT | .}...
 *
 * "-PORT" ends the oldest connection with this peer. */
#include "common.h"

#include <rdma/rdma_verbs.h>

#define LENGTH 1000
#define MOST 16

struct connection {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	char *bytes;			/* what is sent, what is received */
	const char *port;
};

static struct connection connections[MOST];
static int count;

static void receive(struct connection *c)
{
	MUST(rdma_post_recv(c->id, NULL, c->bytes + LENGTH, LENGTH, c->mr) == 0);
}

static void prepare(struct connection *c)
{
	MUST(c->bytes = calloc(2, LENGTH));
	MUST(c->mr = rdma_reg_msgs(c->id, c->bytes, 2 * LENGTH));
	receive(c);
}

static void done(struct ibv_cq *cq)
{
	struct ibv_wc wc = poll_one(cq);

	if (wc.status != IBV_WC_SUCCESS)
		die("%s", ibv_wc_status_str(wc.status));
}

static struct rdma_cm_id *end_for(const char *port, bool passive)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = passive ? RAI_PASSIVE : 0 }, *info;
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 }, .sq_sig_all = 1,
	};
	struct rdma_cm_id *id;

	MUST(rdma_getaddrinfo((char *)address, (char *)port, &hints, &info) == 0);
	MUST(rdma_create_ep(&id, info, NULL, &init) == 0);
	rdma_freeaddrinfo(info);
	return id;
}

/* A message there and back. */
static void exchange(struct connection *c, unsigned char seed)
{
	memset(c->bytes, seed, LENGTH);
	MUST(rdma_post_send(c->id, NULL, c->bytes, LENGTH, c->mr, 0) == 0);
	done(c->id->send_cq);
	done(c->id->recv_cq);
	if (memcmp(c->bytes, c->bytes + LENGTH, LENGTH) != 0)
		die("other bytes came back from %s", c->port);
	receive(c);
}

static void connect_to(const char *port)
{
	struct connection *c = &connections[count];

	MUST(count < MOST);
	*c = (struct connection){ .id = end_for(port, false), .port = port };
	prepare(c);
	MUST(rdma_connect(c->id, NULL) == 0);
	count++;
	exchange(c, (unsigned char)(17 * count));
}

static void end(int at)
{
	struct connection *c = &connections[at];

	MUST(rdma_disconnect(c->id) == 0);
	MUST(rdma_dereg_mr(c->mr) == 0);
	rdma_destroy_ep(c->id);
	free(c->bytes);
	memmove(c, c + 1, (size_t)(--count - at) * sizeof *c);
}

static void disconnect_from(const char *port)
{
	int at = 0;

	while (at < count && strcmp(connections[at].port, port) != 0)
		at++;
	MUST(at < count);
	end(at);
}

static void pause_at(const char *directory, int step)
{
	char path[512];

	for (int i = 0; i < count; i++)
		exchange(&connections[i], (unsigned char)(31 * step + i));
	printf("step %d\n", step);
	fflush(stdout);
	snprintf(path, sizeof path, "%s/%d", directory, step);
	while (access(path, F_OK) != 0)
		usleep(5000);
}

/* Sends back what comes, on all connections, for ever. */
static void serve(const char *port)
{
	struct rdma_cm_id *listener = end_for(port, true);
	struct rdma_event_channel *events;
	struct ibv_wc wc;

	MUST(rdma_listen(listener, MOST) == 0);
	events = listener->channel;
	for (;;) {
		if (count < MOST && readable(events->fd, 1)) {
			struct connection *c = &connections[count++];
			MUST(rdma_get_request(listener, &c->id) == 0);
			prepare(c);
			MUST(rdma_accept(c->id, NULL) == 0);
		}
		for (int i = 0; i < count; i++) {
			struct connection *c = &connections[i];
			/* The only event is that the client has ended the connection. */
			if (readable(c->id->channel->fd, 0)) {
				end(i--);
				continue;
			}
			if (ibv_poll_cq(c->id->recv_cq, 1, &wc) != 1)
				continue;
			MUST(wc.status == IBV_WC_SUCCESS);
			memcpy(c->bytes, c->bytes + LENGTH, LENGTH);
			receive(c);
			MUST(rdma_post_send(c->id, NULL, c->bytes, LENGTH, c->mr, 0) == 0);
			done(c->id->send_cq);
		}
	}
}

int main(int argc, char **argv)
{
	MUST(argc >= 4);
	address = argv[2];
	if (strcmp(argv[1], "server") == 0)
		serve(argv[3]);
	for (int i = 4, step = 0; i < argc; i++) {
		switch (argv[i][0]) {
		case '+':
			connect_to(argv[i] + 1);
			break;
		case '-':
			disconnect_from(argv[i] + 1);
			break;
		default:
			pause_at(argv[3], ++step);
		}
	}
	while (count > 0)
		disconnect_from(connections[0].port);
	check(true, "every message came back", "");
	return failures != 0;
}
