// What `uwarp bench mpi` measures: the user's mpicc compiles it, the user's mpirun runs it once for each transport and
// round. Rank 0 prints one line for each figure: name, unit, median, 99th percentile, number of measurements.
//
//     mpi MILLISECONDS            each figure takes about so long

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 200000, LARGE = 1 << 20, FLIGHT = 16 };

static int rank, ranks;
static double limit;
static double *times;
static char *out, *in, *memory;
static MPI_Win window;

typedef void step(int size);

static int in_order(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

// Of `bytes` in each measured time, if it is a throughput.
static void print(const char *name, int size, int count, double bytes)
{
	qsort(times, (size_t)count, sizeof *times, in_order);
	double middle = times[count / 2], late = times[(int)(count * 0.99)];
	if (bytes > 0)
		printf("%s-%d MB/s %.3f %.3f %d\n", name, size, bytes / middle / 1e6, bytes / late / 1e6, count);
	else
		printf("%s-%d us %.3f %.3f %d\n", name, size, middle * 1e6, late * 1e6, count);
	fflush(stdout);
}

// Rank 0 decides when it is enough, a batch at a time: all ranks make the same number of steps.
static void measure(const char *name, int size, step *one, int parts, double bytes)
{
	int count = 0, more = 1, batch = 8;
	for (int warm = 0; warm < 8; warm++)
		one(size);
	MPI_Barrier(MPI_COMM_WORLD);
	double end = MPI_Wtime() + limit;
	while (more) {
		for (int i = 0; i < batch && count < MOST; i++) {
			double begin = MPI_Wtime();
			one(size);
			times[count++] = (MPI_Wtime() - begin) / parts;
		}
		more = MPI_Wtime() < end && count < MOST;
		MPI_Bcast(&more, 1, MPI_INT, 0, MPI_COMM_WORLD);
		batch = batch < 256 ? batch * 2 : batch;
	}
	if (rank == 0)
		print(name, size, count, bytes);
}

// Between ranks 0 and 1; the others wait.
static void ping_pong(int size)
{
	if (rank == 0) {
		MPI_Send(out, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD);
		MPI_Recv(in, size, MPI_BYTE, 1, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	} else if (rank == 1) {
		MPI_Recv(in, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		MPI_Send(out, size, MPI_BYTE, 0, 1, MPI_COMM_WORLD);
	}
}

static void stream(int size)
{
	MPI_Request requests[FLIGHT];
	MPI_Status statuses[FLIGHT];
	if (rank > 1)
		return;
	for (int i = 0; i < FLIGHT; i++)
		if (rank == 0)
			MPI_Isend(out, size, MPI_BYTE, 1, 2, MPI_COMM_WORLD, &requests[i]);
		else
			MPI_Irecv(in + (size_t)i * LARGE, size, MPI_BYTE, 0, 2, MPI_COMM_WORLD, &requests[i]);
	MPI_Waitall(FLIGHT, requests, statuses);
	if (rank == 0)
		MPI_Recv(in, 0, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
	else
		MPI_Send(out, 0, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
}

static void send_receive(int size)
{
	MPI_Sendrecv(out, size, MPI_BYTE, (rank + 1) % ranks, 4, in, size, MPI_BYTE, (rank + ranks - 1) % ranks, 4,
				 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void put(int size)
{
	if (rank != 0)
		return;
	MPI_Put(out, size, MPI_BYTE, 1, 0, size, MPI_BYTE, window);
	MPI_Win_flush(1, window);
}

static void get(int size)
{
	if (rank != 0)
		return;
	MPI_Get(in, size, MPI_BYTE, 1, 0, size, MPI_BYTE, window);
	MPI_Win_flush(1, window);
}

static void all_reduce(int size) { MPI_Allreduce(out, in, size / 8, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD); }

static void all_gather(int size) { MPI_Allgather(out, size, MPI_BYTE, in, size, MPI_BYTE, MPI_COMM_WORLD); }

static void barrier(int size)
{
	(void)size;
	MPI_Barrier(MPI_COMM_WORLD);
}

// Memory of the rank that has most, in KiB.
static void resident(void)
{
	char line[256];
	long mine = 0, most = 0;
	FILE *status = fopen("/proc/self/status", "r");
	while (status && fgets(line, sizeof line, status))
		if (strncmp(line, "VmRSS:", 6) == 0)
			mine = atol(line + 6);
	if (status)
		fclose(status);
	MPI_Reduce(&mine, &most, 1, MPI_LONG, MPI_MAX, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("memory-0 KiB %ld 0 1\n", most);
}

int main(int argc, char **argv)
{
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	limit = (argc > 1 ? atof(argv[1]) : 100) / 1000;
	times = malloc(sizeof *times * MOST);
	out = calloc(1, LARGE);
	in = calloc((size_t)(ranks > FLIGHT ? ranks : FLIGHT), LARGE);
	memory = calloc(1, LARGE);
	if (ranks < 2 || !times || !out || !in || !memory)
		MPI_Abort(MPI_COMM_WORLD, 1);
	measure("ping-pong", 8, ping_pong, 2, 0);
	measure("ping-pong", 4096, ping_pong, 2, 0);
	measure("ping-pong", 65536, ping_pong, 2, 0);
	measure("stream", 65536, stream, 1, 65536.0 * FLIGHT);
	measure("stream", LARGE, stream, 1, (double)LARGE * FLIGHT);
	measure("send-receive", 8, send_receive, 1, 0);
	measure("send-receive", 65536, send_receive, 1, 0);
	measure("allreduce", 8, all_reduce, 1, 0);
	measure("allreduce", 65536, all_reduce, 1, 0);
	measure("allgather", 1024, all_gather, 1, 0);
	measure("barrier", 0, barrier, 1, 0);
	MPI_Win_create(memory, LARGE, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
	MPI_Win_lock_all(0, window);
	measure("put", 8, put, 1, 0);
	measure("put", LARGE, put, 1, LARGE);
	measure("get", 8, get, 1, 0);
	measure("get", LARGE, get, 1, LARGE);
	MPI_Win_unlock_all(window);
	resident();
	MPI_Win_free(&window);
	MPI_Finalize();
	return 0;
}
