/* Gloo over its verbs transport: sums over all ranks, by two algorithms, every number checked.
 *
 *	gloo RANK RANKS DIRECTORY	the ranks find each other by files in the directory */
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include <unistd.h>

#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/ibverbs/device.h>

static int rank_, ranks;
static bool failed;

static void check(bool good, const char *what, int size)
{
	printf("%s %s of %d numbers\n", good ? "ok" : "FAIL", what, size);
	failed |= !good;
}

/* Kept: Debian's version ends the process when a buffer goes whose last Write has not completed, and its
 * algorithms do not wait for that. */
static std::vector<std::unique_ptr<gloo::Algorithm>> kept;
static std::vector<std::unique_ptr<std::vector<float>>> numbers;

template <typename Algorithm>
static void sum(const char *name, const std::shared_ptr<gloo::Context> &context, int size)
{
	numbers.push_back(std::make_unique<std::vector<float>>(size));
	std::vector<float> &own = *numbers.back();
	bool good = true;

	kept.push_back(std::make_unique<Algorithm>(context, std::vector<float *>{own.data()}, size));
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < size; i++)
			own[i] = rank_ + i % 17 + round;
		kept.back()->run();
		for (int i = 0; i < size; i++)
			good &= own[i] == ranks * (i % 17 + round) + ranks * (ranks - 1) / 2;
	}
	check(good, name, size);
}

/* A message to and from each of the others. Its completion comes after those of all messages before it. */
static void meet(const std::shared_ptr<gloo::Context> &context)
{
	int slot = context->nextSlot(), heard = 0;

	for (int other = 0; other < ranks; other++) {
		if (other == rank_)
			continue;
		int say = 1000 + rank_, hear = 0;
		auto out = context->getPair(other)->createSendBuffer(slot, &say, sizeof say);
		auto in = context->getPair(other)->createRecvBuffer(slot, &hear, sizeof hear);

		out->send();
		out->waitSend();
		in->waitRecv();
		heard += hear == 1000 + other;
	}
	check(heard == ranks - 1, "a word of each of the others", heard);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	rank_ = atoi(argv[1]);
	ranks = atoi(argv[2]);
	auto device = gloo::transport::ibverbs::CreateDevice({"", 1, 0});
	auto store = gloo::rendezvous::FileStore(argv[3]);
	auto context = std::make_shared<gloo::rendezvous::Context>(rank_, ranks);

	printf("ok device %s\n", device->str().c_str());
	context->connectFullMesh(store, device);
	for (int size : {1, 100, 4096, 1 << 20}) {
		sum<gloo::AllreduceRing<float>>("ring", context, size);
		sum<gloo::AllreduceHalvingDoubling<float>>("halving and doubling", context, size);
	}
	meet(context);
	fflush(stdout);
	/* Not by a return: gloo's own thread goes on while what it uses is destroyed. And not at once: an adapter would go
	 * on to acknowledge what has come, a library in a process cannot. */
	sleep(1);
	_exit(failed);
}
