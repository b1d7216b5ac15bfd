// matching: messages meet their receives, and collectives have the results that arithmetic says. Every rank's first
// call is an exchange with all others, so that all connections are made at once. Then, between pairs: messages that
// arrive before their receives, receives in another order than their messages, receives from any rank with any tag,
// messages that are probed, also with MPI_Mprobe; then collectives. Needs two ranks or more. A rank that finds a wrong value says so on
// standard error and aborts the job.
//
//     matching [ROUNDS]

#include "check.h"

static unsigned char byte_of(int from, int to, int tag, size_t offset)
{
	uint32_t x = ((uint32_t)from * 31 + (uint32_t)to * 17 + (uint32_t)tag * 7919u + (uint32_t)offset) * 2654435761u;
	return (unsigned char)(x >> 24 ^ offset >> 16);
}

static void fill(unsigned char *bytes, size_t length, int to, int tag)
{
	for (size_t i = 0; i < length; i++)
		bytes[i] = byte_of(rank, to, tag, i);
}

static void same(const char *part, const unsigned char *bytes, size_t length, int from, int tag)
{
	for (size_t i = 0; i < length; i++)
		if (bytes[i] != byte_of(from, rank, tag, i))
			wrong(part, "%zu bytes from %d, tag %d: byte %zu is %#x, wanted %#x", length, from, tag, i, bytes[i],
				  byte_of(from, rank, tag, i));
}

static void arrived(const char *part, const MPI_Status *status, size_t length)
{
	int count;
	MPI_Get_count(status, MPI_BYTE, &count);
	if ((size_t)count != length)
		wrong(part, "%d bytes arrived from %d, tag %d, wanted %zu", count, status->MPI_SOURCE, status->MPI_TAG, length);
}

// No rank has talked to another one before.
static void cold(void)
{
	enum { EACH = 16 };
	int64_t *out = room((size_t)ranks * EACH * sizeof *out), *in = room((size_t)ranks * EACH * sizeof *in);
	for (int i = 0; i < ranks * EACH; i++)
		out[i] = (int64_t)rank * 1000000 + i;
	MPI_Alltoall(out, EACH, MPI_INT64_T, in, EACH, MPI_INT64_T, MPI_COMM_WORLD);
	for (int from = 0; from < ranks; from++)
		for (int i = 0; i < EACH; i++)
			if (in[from * EACH + i] != (int64_t)from * 1000000 + rank * EACH + i)
				wrong("cold", "element %d from %d is %lld", i, from, (long long)in[from * EACH + i]);
	// Also straight to each other rank at the same moment, whatever algorithm the call above has.
	MPI_Request *requests = room((size_t)ranks * 2 * sizeof *requests);
	for (int other = 0; other < ranks; other++) {
		MPI_Irecv(&in[other], 1, MPI_INT64_T, other, 1, MPI_COMM_WORLD, &requests[other]);
		out[other] = rank * 1000 + other;
	}
	for (int other = 0; other < ranks; other++)
		MPI_Isend(&out[other], 1, MPI_INT64_T, other, 1, MPI_COMM_WORLD, &requests[ranks + other]);
	for (int i = 0; i < 2 * ranks; i++)
		MPI_Wait(&requests[i], MPI_STATUS_IGNORE);
	for (int other = 0; other < ranks; other++)
		if (in[other] != other * 1000 + rank)
			wrong("cold", "the number of %d is %lld", other, (long long)in[other]);
	free(requests);
	free(out);
	free(in);
	passed("cold", "%d ranks connect to each other at once", ranks);
}

static const size_t sizes[] = {0,    1,     8,     63,    64,     65,     255,     1000,    2048,   4096,
							   8191, 8192,  8193,  16384, 32768,  65535,  65536,   65537,   131072, 262144,
							   1000000, 1 << 20, 2 << 20, 4 << 20};
enum { SIZES = sizeof sizes / sizeof *sizes };

// The next rank's messages are all there, or on the way, before the first receive.
static void unexpected(int rounds)
{
	enum { FLIGHT = 5 };
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	unsigned char *in = room(sizes[SIZES - 1]), *out[FLIGHT];
	for (int n = 0; n < FLIGHT; n++)
		out[n] = room(sizes[SIZES - 1]);
	for (int round = 0; round < rounds; round++)
		for (int s = 0; s < SIZES; s++) {
			size_t length = sizes[s];
			MPI_Request requests[FLIGHT];
			for (int tag = 0; tag < FLIGHT; tag++) {
				fill(out[tag], length, next, 100 * round + tag);
				MPI_Isend(out[tag], (int)length, MPI_BYTE, next, 100 * round + tag, MPI_COMM_WORLD, &requests[tag]);
			}
			if (length <= 8192)
				MPI_Barrier(MPI_COMM_WORLD);
			// The last first.
			for (int tag = FLIGHT - 1; tag >= 0; tag--) {
				MPI_Status status;
				MPI_Recv(in, (int)length, MPI_BYTE, last, 100 * round + tag, MPI_COMM_WORLD, &status);
				arrived("unexpected", &status, length);
				same("unexpected", in, length, last, 100 * round + tag);
			}
			for (int tag = 0; tag < FLIGHT; tag++)
				MPI_Wait(&requests[tag], MPI_STATUS_IGNORE);
		}
	for (int n = 0; n < FLIGHT; n++)
		free(out[n]);
	free(in);
	passed("unexpected", "%d sizes up to %zu, the last message received first", (int)SIZES, sizes[SIZES - 1]);
}

// Rank 0 takes what comes, in the order of each sender; the size is known from a probe.
static void any_source(int rounds)
{
	int each = 40 * rounds;
	if (rank == 0) {
		int *next = calloc((size_t)ranks, sizeof *next);
		unsigned char *in = room(100000);
		for (int n = 0; next && n < each * (ranks - 1); n++) {
			MPI_Status status;
			MPI_Probe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
			int from = status.MPI_SOURCE, tag = status.MPI_TAG, count;
			if (tag != next[from]++)
				wrong("any source", "rank %d's message %d comes as its %d.", from, tag, next[from]);
			MPI_Get_count(&status, MPI_BYTE, &count);
			MPI_Recv(in, count, MPI_BYTE, from, tag, MPI_COMM_WORLD, &status);
			arrived("any source", &status, (size_t)(tag * 977 % 70000));
			same("any source", in, (size_t)count, from, tag);
		}
		free(in);
		free(next);
	} else {
		unsigned char *out = room(100000);
		for (int tag = 0; tag < each; tag++) {
			size_t length = (size_t)(tag * 977 % 70000);
			fill(out, length, 0, tag);
			if (tag % 3 == 0)
				MPI_Ssend(out, (int)length, MPI_BYTE, 0, tag, MPI_COMM_WORLD);
			else
				MPI_Send(out, (int)length, MPI_BYTE, 0, tag, MPI_COMM_WORLD);
		}
		free(out);
	}
	passed("any source", "%d messages of each of %d ranks", each, ranks - 1);
}

// A probe takes each message out of the queue, and a receive of its own gets it: so does mpi4py with objects.
static void claimed(int rounds)
{
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	unsigned char *in = room(sizes[SIZES - 1]), *out[2] = {room(sizes[SIZES - 1]), room(sizes[SIZES - 1])};
	for (int round = 0; round < rounds; round++)
		for (int s = 0; s < SIZES; s++) {
			size_t length = sizes[s];
			MPI_Request requests[2];
			MPI_Message messages[2];
			MPI_Status status;
			for (int tag = 0; tag < 2; tag++) {
				fill(out[tag], length, next, tag);
				MPI_Isend(out[tag], (int)length, MPI_BYTE, next, tag, MPI_COMM_WORLD, &requests[tag]);
			}
			for (int tag = 1; tag >= 0; tag--) {
				MPI_Mprobe(last, tag, MPI_COMM_WORLD, &messages[tag], &status);
				arrived("claimed", &status, length);
			}
			for (int tag = 0; tag < 2; tag++) {
				MPI_Mrecv(in, (int)length, MPI_BYTE, &messages[tag], &status);
				arrived("claimed", &status, length);
				same("claimed", in, length, last, tag);
			}
			for (int tag = 0; tag < 2; tag++)
				MPI_Wait(&requests[tag], MPI_STATUS_IGNORE);
		}
	free(out[0]);
	free(out[1]);
	free(in);
	passed("claimed", "%d sizes up to %zu by MPI_Mprobe and MPI_Mrecv", (int)SIZES, sizes[SIZES - 1]);
}

// Every second element of every message, gathered and scattered by the library.
static void strided(void)
{
	enum { LENGTH = 30000 };
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	MPI_Datatype every_second;
	MPI_Type_vector(LENGTH, 1, 2, MPI_INT, &every_second);
	MPI_Type_commit(&every_second);
	int *out = room(2 * LENGTH * sizeof *out), *in = room(2 * LENGTH * sizeof *in);
	for (int i = 0; i < 2 * LENGTH; i++) {
		out[i] = rank * 7 + i;
		in[i] = -1;
	}
	MPI_Sendrecv(out, 1, every_second, next, 5, in, 1, every_second, last, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	for (int i = 0; i < 2 * LENGTH; i++)
		if (in[i] != (i % 2 ? -1 : last * 7 + i))
			wrong("strided", "element %d is %d", i, in[i]);
	MPI_Type_free(&every_second);
	free(out);
	free(in);
	passed("strided", "%d elements, every second one", LENGTH);
}

// Numbers that a double holds exactly, so that the order of a sum does not matter.
static void sums(size_t length)
{
	double *mine = room(length * sizeof *mine), *all = room(length * sizeof *all);
	for (size_t i = 0; i < length; i++)
		mine[i] = (rank + 1) * 0.25 + (double)(i % 1000);
	double ends = ranks * (ranks + 1) / 2 * 0.25;
	MPI_Allreduce(mine, all, (int)length, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	for (size_t i = 0; i < length; i++)
		if (all[i] != ends + ranks * (double)(i % 1000))
			wrong("collectives", "all-reduce of %zu: element %zu is %g", length, i, all[i]);
	MPI_Reduce(mine, all, (int)length, MPI_DOUBLE, MPI_MAX, ranks - 1, MPI_COMM_WORLD);
	for (size_t i = 0; rank == ranks - 1 && i < length; i++)
		if (all[i] != ranks * 0.25 + (double)(i % 1000))
			wrong("collectives", "reduce of %zu: element %zu is %g", length, i, all[i]);
	MPI_Scan(mine, all, (int)length, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
	for (size_t i = 0; i < length; i++)
		if (all[i] != (rank + 1) * (rank + 2) / 2 * 0.25 + (rank + 1) * (double)(i % 1000))
			wrong("collectives", "scan of %zu: element %zu is %g", length, i, all[i]);
	free(mine);
	free(all);
}

static void copies(int length, int root)
{
	int *one = room((size_t)length * sizeof *one), *all = room((size_t)length * (size_t)ranks * sizeof *all);
	for (int i = 0; i < length; i++)
		one[i] = rank == root ? root * 3 + i : -1;
	MPI_Bcast(one, length, MPI_INT, root, MPI_COMM_WORLD);
	for (int i = 0; i < length; i++)
		if (one[i] != root * 3 + i)
			wrong("collectives", "broadcast of %d from %d: element %d is %d", length, root, i, one[i]);
	for (int i = 0; i < length; i++)
		one[i] = rank * 5 + i;
	MPI_Allgather(one, length, MPI_INT, all, length, MPI_INT, MPI_COMM_WORLD);
	for (int i = 0; i < length * ranks; i++)
		if (all[i] != i / length * 5 + i % length)
			wrong("collectives", "all-gather of %d: element %d is %d", length, i, all[i]);
	MPI_Scatter(all, length, MPI_INT, one, length, MPI_INT, root, MPI_COMM_WORLD);
	for (int i = 0; i < length; i++)
		if (one[i] != rank * 5 + i)
			wrong("collectives", "scatter of %d from %d: element %d is %d", length, root, i, one[i]);
	MPI_Gather(one, length, MPI_INT, all, length, MPI_INT, root, MPI_COMM_WORLD);
	for (int i = 0; rank == root && i < length * ranks; i++)
		if (all[i] != i / length * 5 + i % length)
			wrong("collectives", "gather of %d at %d: element %d is %d", length, root, i, all[i]);
	free(one);
	free(all);
}

static void collectives(int rounds)
{
	static const int lengths[] = {1, 7, 128, 3000, 50000, 200000};
	for (int round = 0; round < rounds; round++)
		for (unsigned n = 0; n < sizeof lengths / sizeof *lengths; n++) {
			sums((size_t)lengths[n]);
			copies(lengths[n], (round + (int)n) % ranks);
			MPI_Barrier(MPI_COMM_WORLD);
		}
	passed("collectives", "%d rounds of sums, broadcasts, gathers, scatters of up to 200000 elements", rounds);
}

int main(int argc, char **argv)
{
	begin(&argc, &argv);
	int rounds = argc > 1 ? atoi(argv[1]) : 1;
	cold();
	unexpected(rounds);
	any_source(rounds);
	claimed(rounds);
	strided();
	collectives(rounds);
	if (rank == 0)
		printf("every message where it belongs\n");
	MPI_Finalize();
	return 0;
}
