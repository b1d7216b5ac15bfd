/* A datagram queue pair on command, with messages that another host gets in parts (tests/hostile/parts.rs).
 *
 *	parted ADDRESS		commands on standard input
 *
 * "send QPN ADDRESS SIZE SEED" sends SIZE bytes that follow from SEED, and is answered with "done STATUS" when the
 * Send has completed. It prints "name QPN" first, and for each message that comes "received SIZE SEED", or "FAIL"
 * if its bytes do not follow from the first four of them: nobody has sent it. */
#include "datagrams.h"
#include "told.h"

static struct end end;

static unsigned char byte_of(uint32_t seed, uint32_t at)
{
	return at < 4 ? (unsigned char)(seed >> 8 * at) : (unsigned char)(seed * 31 + at * 7 + (at >> 8));
}

static int send_message(uint32_t qpn, const char *address, uint32_t size, uint32_t seed)
{
	struct ibv_ah_attr attr = {
		.is_global = 1, .port_num = 1, .grh = { .sgid_index = (uint8_t)sgid_index, .hop_limit = 64 },
	};
	struct ibv_sge sge;
	struct ibv_send_wr wr;
	struct ibv_wc wc;

	MUST(size >= 4 && size <= LARGEST);
	attr.grh.dgid = gid_of(address);
	for (uint32_t at = 0; at < size; at++)
		outgoing(&end)[at] = byte_of(seed, at);
	wr = request(&end, &end, &sge, size);
	MUST(wr.wr.ud.ah = ibv_create_ah(pd, &attr));
	wr.wr.ud.remote_qpn = qpn;
	MUST(post_wr(&end, wr) == 0);
	wc = poll_one(end.scq);
	MUST(ibv_destroy_ah(wr.wr.ud.ah) == 0);
	return wc.status;
}

static void command(char *line)
{
	unsigned int qpn, size, seed;
	char address[100];

	if (sscanf(line, "send %u %99s %u %u", &qpn, address, &size, &seed) != 4)
		die("no command: %s", line);
	printf("done %d\n", send_message(qpn, address, size, seed));
}

static void completions(void)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(end.rcq, 1, &wc) == 1) {
		unsigned char *message = end.memory + wc.wr_id * SLOT + GRH;
		uint32_t size = wc.byte_len - GRH, seed = 0, at;

		MUST(wc.status == IBV_WC_SUCCESS && wc.byte_len >= GRH);
		for (at = 0; at < 4 && at < size; at++)
			seed |= (uint32_t)message[at] << 8 * at;
		for (at = 0; at < size && message[at] == byte_of(seed, at); at++)
			;
		if (size >= 4 && at == size)
			printf("received %u %u\n", size, seed);
		else
			printf("FAIL a message of %u bytes that nobody has sent\n", size);
		receive(&end, (int)wc.wr_id);
	}
}

int main(int argc, char **argv)
{
	MUST(argc == 2);
	setvbuf(stdout, NULL, _IOLBF, 0);
	open_device();
	sgid_index = gid_index_of(ctx, argv[1]);
	own_gid = gid_of(argv[1]);
	end_open(&end);
	for (int slot = 0; slot < SLOTS; slot++)
		receive(&end, slot);
	printf("name %u\n", end.qp->qp_num);
	serve_lines(command, completions);
}
