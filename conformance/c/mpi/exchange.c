// exchange: what an MPI program does, every byte checked. Between all ranks, in this order: a token round the ring, an
// exchange with both neighbours of messages of all sizes, all-to-all, an all-reduce, and large messages between pairs,
// several of them in flight. Needs two ranks or more. Rank 0 prints one line for each part; a rank that finds a wrong
// byte says so on standard error and aborts the job.
//
//     exchange [ROUNDS]

#include "bytes.h"

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;

static void check(const unsigned char *bytes, size_t length, int from, int to, unsigned number, const char *part)
{
	for (size_t i = 0; i < length; i++) {
		if (bytes[i] == byte_of(from, to, number, i))
			continue;
		fprintf(stderr, "FAIL %s: message %u of %zu bytes from rank %d to %d: byte %zu is %#x, wanted %#x\n", part, number,
				length, from, to, i, bytes[i], byte_of(from, to, number, i));
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
}

static unsigned char *room(size_t length)
{
	unsigned char *bytes = malloc(length ? length : 1);
	if (!bytes) {
		fprintf(stderr, "FAIL out of memory\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	return bytes;
}

static int next_rank(void) { return (rank + 1) % ranks; }
static int last_rank(void) { return (rank + ranks - 1) % ranks; }

// A number that each rank adds its own to, round and round.
static void ring(int rounds)
{
	long long token = 0;
	for (int round = 0; round < rounds; round++) {
		if (rank != 0 || round != 0)
			MPI_Recv(&token, 1, MPI_LONG_LONG, last_rank(), 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		token += rank + 1;
		MPI_Send(&token, 1, MPI_LONG_LONG, next_rank(), 1, MPI_COMM_WORLD);
	}
	if (rank != 0)
		return;
	MPI_Recv(&token, 1, MPI_LONG_LONG, last_rank(), 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	long long wanted = (long long)rounds * ranks * (ranks + 1) / 2;
	if (token != wanted) {
		fprintf(stderr, "FAIL ring: the token is %lld, wanted %lld\n", token, wanted);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	printf("ok ring: %d rounds of %d ranks\n", rounds, ranks);
}

// Round the ring, to the next rank and from the last at once, at the edges of protocols: none, inline, eager, rendezvous.
static void neighbours(void)
{
	static const size_t sizes[] = {0, 1, 7, 64, 100, 1023, 4096, 4097, 16384, 16385, 65535, 65536, 100000, 262144, 1 << 20};
	const unsigned count = sizeof sizes / sizeof *sizes;
	for (unsigned n = 0; n < count; n++) {
		size_t length = sizes[n];
		unsigned char *out = room(length), *in = room(length);
		for (unsigned again = 0; again < 8; again++) {
			unsigned number = n * 8 + again;
			fill(out, length, rank, next_rank(), number);
			MPI_Sendrecv(out, (int)length, MPI_BYTE, next_rank(), 2, in, (int)length, MPI_BYTE, last_rank(), 2,
						 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			check(in, length, last_rank(), rank, number, "neighbours");
		}
		free(out);
		free(in);
	}
	if (rank == 0)
		printf("ok neighbours: %u sizes up to %zu\n", count, sizes[count - 1]);
}

static void all_to_all(int rounds)
{
	static const size_t sizes[] = {8, 1000, 20000, 200000};
	for (unsigned n = 0; n < 4; n++) {
		size_t length = sizes[n];
		unsigned char *out = room(length * (size_t)ranks), *in = room(length * (size_t)ranks);
		for (int round = 0; round < rounds; round++) {
			unsigned number = 1000u * n + (unsigned)round;
			for (int to = 0; to < ranks; to++)
				fill(out + length * (size_t)to, length, rank, to, number);
			MPI_Alltoall(out, (int)length, MPI_BYTE, in, (int)length, MPI_BYTE, MPI_COMM_WORLD);
			for (int from = 0; from < ranks; from++)
				check(in + length * (size_t)from, length, from, rank, number, "all-to-all");
		}
		free(out);
		free(in);
	}
	if (rank == 0)
		printf("ok all-to-all: %d rounds of each of 4 sizes\n", rounds);
}

// Whole numbers, so that the sum does not depend on the order.
static void all_reduce(int rounds)
{
	enum { LENGTH = 50000 };
	int64_t *mine = (int64_t *)room(LENGTH * sizeof *mine), *sum = (int64_t *)room(LENGTH * sizeof *sum);
	for (int round = 0; round < rounds; round++) {
		for (int i = 0; i < LENGTH; i++)
			mine[i] = (int64_t)(rank + 1) * (i + round);
		MPI_Allreduce(mine, sum, LENGTH, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
		for (int i = 0; i < LENGTH; i++) {
			int64_t wanted = (int64_t)ranks * (ranks + 1) / 2 * (i + round);
			if (sum[i] == wanted)
				continue;
			fprintf(stderr, "FAIL all-reduce: round %d, element %d is %lld, wanted %lld\n", round, i, (long long)sum[i],
					(long long)wanted);
			MPI_Abort(MPI_COMM_WORLD, 1);
		}
	}
	free(mine);
	free(sum);
	if (rank == 0)
		printf("ok all-reduce: %d rounds of %d elements\n", rounds, LENGTH);
}

// Four messages each way in flight between each two neighbours; the receives are posted in the other order in odd rounds
// and late in every third, so that messages arrive before anybody wants them.
static void large(int rounds)
{
	enum { FLIGHT = 4 };
	const size_t length = 8 << 20;
	unsigned char *out[FLIGHT], *in[FLIGHT];
	for (int n = 0; n < FLIGHT; n++) {
		out[n] = room(length);
		in[n] = room(length);
	}
	for (int round = 0; round < rounds; round++) {
		MPI_Request requests[2 * FLIGHT];
		for (int n = 0; n < FLIGHT; n++)
			fill(out[n], length, rank, next_rank(), (unsigned)(round * FLIGHT + n));
		for (int late = 0; late < 2; late++) {
			int receives = late == (round % 3 == 2);
			for (int i = 0; i < FLIGHT; i++) {
				int n = receives && round % 2 ? FLIGHT - 1 - i : i;
				if (receives)
					MPI_Irecv(in[n], (int)length, MPI_BYTE, last_rank(), 10 + n, MPI_COMM_WORLD, &requests[n]);
				else
					MPI_Isend(out[n], (int)length, MPI_BYTE, next_rank(), 10 + n, MPI_COMM_WORLD, &requests[FLIGHT + n]);
			}
		}
		// Not ignored: to gcc, MPICH's MPI_STATUSES_IGNORE is an array that is too short.
		MPI_Status statuses[2 * FLIGHT];
		MPI_Waitall(2 * FLIGHT, requests, statuses);
		for (int n = 0; n < FLIGHT; n++)
			check(in[n], length, last_rank(), rank, (unsigned)(round * FLIGHT + n), "large");
	}
	for (int n = 0; n < FLIGHT; n++) {
		free(out[n]);
		free(in[n]);
	}
	if (rank == 0)
		printf("ok large: %d rounds of %d messages of %zu bytes\n", rounds, FLIGHT, length);
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 3;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks < 2) {
		fprintf(stderr, "FAIL wants two ranks or more\n");
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	ring(200 * rounds);
	neighbours();
	all_to_all(rounds);
	all_reduce(rounds);
	large(rounds);
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank == 0)
		printf("every byte as it was sent\n");
	MPI_Finalize();
	return 0;
}
