// What the MPI programs share: who we are, and how a wrong value ends the job.

#pragma once

#include <mpi.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int rank, ranks;

// Says what is wrong and aborts the job.
__attribute__((format(printf, 2, 3))) static void wrong(const char *part, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fprintf(stderr, "FAIL %s, rank %d: ", part, rank);
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	va_end(args);
	MPI_Abort(MPI_COMM_WORLD, 1);
	abort();
}

static void *room(size_t length)
{
	void *bytes = malloc(length ? length : 1);
	if (!bytes)
		wrong("memory", "no %zu bytes", length);
	return bytes;
}

static void begin(int *argc, char ***argv)
{
	MPI_Init(argc, argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks < 2)
		wrong("start", "wants two ranks or more");
}

// Rank 0 reports a part that no rank has aborted.
__attribute__((format(printf, 2, 3))) static void passed(const char *part, const char *format, ...)
{
	MPI_Barrier(MPI_COMM_WORLD);
	if (rank != 0)
		return;
	va_list args;
	va_start(args, format);
	printf("ok %s: ", part);
	vprintf(format, args);
	printf("\n");
	fflush(stdout);
	va_end(args);
}
