// pairs: heavy messages within pairs of ranks, then light ones between all, then heavy ones again, every byte checked.
// For connections that differ by what they are for: the first peer of a rank is the other one of its pair. Nothing but
// the heavy messages connects anybody before all pairs have exchanged theirs: the ranks, which share a file system,
// wait for each other by files in DIR. Behind the light messages all wait until there is a file "seen". Needs an even
// number of ranks. Rank 0 prints one line for each part; a rank that finds a wrong byte aborts the job.
//
//     pairs DIR [ROUNDS]

#include "bytes.h"

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define HEAVY (1 << 20)
#define LIGHT 64

static int rank, ranks;
static const char *directory;

static void fail(const char *part, const char *what)
{
	fprintf(stderr, "FAIL %s: rank %d: %s\n", part, rank, what);
	MPI_Abort(MPI_COMM_WORLD, 1);
}

static void check(const unsigned char *bytes, size_t length, int from, int to, unsigned number, const char *part)
{
	for (size_t i = 0; i < length; i++)
		if (bytes[i] != byte_of(from, to, number, i))
			fail(part, "a wrong byte");
}

static void wait_for(const char *name)
{
	struct timespec pause = {.tv_nsec = 5000000};
	char path[512];
	snprintf(path, sizeof path, "%s/%s", directory, name);
	while (access(path, F_OK) != 0)
		nanosleep(&pause, NULL);
}

// All ranks have come here. Without a message.
static void gather(const char *part)
{
	char name[64], path[512];
	snprintf(name, sizeof name, "%s.%d", part, rank);
	snprintf(path, sizeof path, "%s/%s", directory, name);
	FILE *file = fopen(path, "w");
	if (!file || fclose(file) != 0)
		fail(part, path);
	for (int other = 0; other < ranks; other++) {
		snprintf(name, sizeof name, "%s.%d", part, other);
		wait_for(name);
	}
}

static void heavy(unsigned rounds, const char *part)
{
	static unsigned char sent[HEAVY], received[HEAVY];
	int other = rank ^ 1;
	for (unsigned n = 0; n < rounds; n++) {
		fill(sent, HEAVY, rank, other, n);
		memset(received, 0, HEAVY);
		MPI_Sendrecv(sent, HEAVY, MPI_BYTE, other, 1, received, HEAVY, MPI_BYTE, other, 1, MPI_COMM_WORLD,
					 MPI_STATUS_IGNORE);
		check(received, HEAVY, other, rank, n, part);
	}
	gather(part);
	if (rank == 0)
		printf("ok %s: %u messages of %d bytes each way in %d pairs\n", part, rounds, HEAVY, ranks / 2);
}

static void light(unsigned rounds)
{
	unsigned char *sent = malloc((size_t)ranks * LIGHT), *received = malloc((size_t)ranks * LIGHT);
	if (!sent || !received)
		fail("light", "out of memory");
	for (unsigned n = 0; n < rounds; n++) {
		for (int to = 0; to < ranks; to++)
			fill(sent + (size_t)to * LIGHT, LIGHT, rank, to, n);
		memset(received, 0, (size_t)ranks * LIGHT);
		MPI_Alltoall(sent, LIGHT, MPI_BYTE, received, LIGHT, MPI_BYTE, MPI_COMM_WORLD);
		for (int from = 0; from < ranks; from++)
			check(received + (size_t)from * LIGHT, LIGHT, from, rank, n, "light");
	}
	free(sent);
	free(received);
	gather("light");
	if (rank == 0)
		printf("ok light: %u all-to-alls of %d ranks\n", rounds, ranks);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc < 2 || ranks % 2 != 0)
		fail("arguments", "usage: pairs DIR [ROUNDS], by an even number of ranks");
	directory = argv[1];
	unsigned rounds = argc > 2 ? (unsigned)atoi(argv[2]) : 1;
	heavy(8 * rounds, "pairs");
	light(20 * rounds);
	wait_for("seen");
	heavy(8 * rounds, "pairs again");
	MPI_Finalize();
	if (rank == 0)
		printf("every byte as it was sent\n");
	return 0;
}
