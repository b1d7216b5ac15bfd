// onesided: Put, Get, Accumulate and the fetching operations on windows, under each of MPI's ways to synchronize:
// fences, post-start-complete-wait, locks, and lock-all with flushes. Needs two ranks or more. A rank that finds a
// wrong value says so on standard error and aborts the job.
//
//     onesided [ROUNDS] [direct]
//
// direct: what the direct Puts and Gets of MVAPICH2 2.3.7 can do (docs/mvapich2.md): fences without
// assertions, windows on which there was no fence for what follows, and no flushes.

#include "check.h"

// Elements of a rank's window for each rank. A multiple of a page: MPICH 4.0.2 confuses the windows of one host that
// MPI_Win_allocate makes of odd sizes.
enum { EACH = 4096 };

static int64_t *base;
static MPI_Win window;

static int64_t value(int from, int to, int round, int i) { return (int64_t)from * 1000003 + to * 1009 + round * 13 + i; }

static void clear(void)
{
	for (int i = 0; i < EACH * ranks; i++)
		base[i] = 0;
}

// Elements [0, count) of what each rank has put here.
static void all_put(const char *part, int round, int count)
{
	for (int from = 0; from < ranks; from++)
		for (int i = 0; i < count; i++)
			if (base[from * EACH + i] != value(from, rank, round, i))
				wrong(part, "round %d: element %d from %d is %lld, wanted %lld", round, i, from,
					  (long long)base[from * EACH + i], (long long)value(from, rank, round, i));
}

static const int counts[] = {1, 2, 16, 100, 512, 1025, EACH};
enum { COUNTS = sizeof counts / sizeof *counts };

static void fences(int rounds, int direct)
{
	int opening = direct ? 0 : MPI_MODE_NOPRECEDE;
	int64_t *mine = room(sizeof *mine * EACH * (size_t)ranks), *got = room(sizeof *got * EACH * (size_t)ranks);
	for (int round = 0; round < rounds * COUNTS; round++) {
		int count = counts[round % COUNTS];
		clear();
		MPI_Win_fence(opening, window);
		for (int to = 0; to < ranks; to++) {
			for (int i = 0; i < count; i++)
				mine[to * EACH + i] = value(rank, to, round, i);
			MPI_Put(&mine[to * EACH], count, MPI_INT64_T, to, rank * EACH, count, MPI_INT64_T, window);
		}
		MPI_Win_fence(0, window);
		all_put("fence, Put", round, count);
		MPI_Win_fence(0, window);
		for (int from = 0; from < ranks; from++)
			MPI_Get(&got[from * EACH], count, MPI_INT64_T, from, (rank + 1) % ranks * EACH, count, MPI_INT64_T, window);
		MPI_Win_fence(0, window);
		for (int from = 0; from < ranks; from++)
			for (int i = 0; i < count; i++)
				if (got[from * EACH + i] != value((rank + 1) % ranks, from, round, i))
					wrong("fence, Get", "round %d: element %d from %d is %lld", round, i, from,
						  (long long)got[from * EACH + i]);
		clear();
		MPI_Win_fence(0, window);
		// All ranks at once, onto the same elements.
		for (int to = 0; to < ranks; to++)
			MPI_Accumulate(&mine[to * EACH], count, MPI_INT64_T, to, 0, count, MPI_INT64_T, MPI_SUM, window);
		MPI_Win_fence(MPI_MODE_NOSUCCEED, window);
		for (int i = 0; i < count; i++) {
			int64_t sum = 0;
			for (int from = 0; from < ranks; from++)
				sum += value(from, rank, round, i);
			if (base[i] != sum)
				wrong("fence, Accumulate", "round %d: element %d is %lld, wanted %lld", round, i, (long long)base[i],
					  (long long)sum);
		}
		MPI_Barrier(MPI_COMM_WORLD);
	}
	free(mine);
	free(got);
	passed("fence", "Put, Get and Accumulate of up to %d elements, %d rounds", EACH, rounds * COUNTS);
}

// Each rank opens its window to the rank before it, and writes to the rank behind it.
static void posts(int rounds)
{
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	MPI_Group world, to, from;
	MPI_Comm_group(MPI_COMM_WORLD, &world);
	MPI_Group_incl(world, 1, &next, &to);
	MPI_Group_incl(world, 1, &last, &from);
	int64_t *mine = room(sizeof *mine * EACH), *got = room(sizeof *got * EACH);
	for (int round = 0; round < rounds * 20; round++) {
		int count = counts[round % COUNTS];
		for (int i = 0; i < EACH; i++) {
			base[rank * EACH + i] = value(rank, rank, round, i);
			mine[i] = value(rank, next, round, i);
		}
		MPI_Win_post(from, 0, window);
		MPI_Win_start(to, 0, window);
		MPI_Put(mine, count, MPI_INT64_T, next, rank * EACH, count, MPI_INT64_T, window);
		MPI_Get(got, count, MPI_INT64_T, next, next * EACH, count, MPI_INT64_T, window);
		MPI_Win_complete(window);
		MPI_Win_wait(window);
		for (int i = 0; i < count; i++) {
			if (base[last * EACH + i] != value(last, rank, round, i))
				wrong("post", "round %d: element %d is %lld", round, i, (long long)base[last * EACH + i]);
			if (got[i] != value(next, next, round, i))
				wrong("post", "round %d: element %d read is %lld", round, i, (long long)got[i]);
		}
		MPI_Barrier(MPI_COMM_WORLD);
	}
	MPI_Group_free(&world);
	MPI_Group_free(&to);
	MPI_Group_free(&from);
	free(mine);
	free(got);
	passed("post", "post, start, complete, wait, %d rounds", rounds * 20);
}

// All ranks count in rank 0's window under an exclusive lock, by reading and writing.
static void locks(int rounds)
{
	int turns = 15 * rounds;
	MPI_Win_lock(MPI_LOCK_EXCLUSIVE, rank, 0, window);
	clear();
	MPI_Win_unlock(rank, window);
	MPI_Barrier(MPI_COMM_WORLD);
	for (int turn = 0; turn < turns; turn++) {
		int64_t count;
		MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, window);
		MPI_Get(&count, 1, MPI_INT64_T, 0, 3, 1, MPI_INT64_T, window);
		MPI_Win_flush(0, window);
		count++;
		MPI_Put(&count, 1, MPI_INT64_T, 0, 3, 1, MPI_INT64_T, window);
		MPI_Win_unlock(0, window);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	int64_t count = 0;
	MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
	MPI_Get(&count, 1, MPI_INT64_T, 0, 3, 1, MPI_INT64_T, window);
	MPI_Win_unlock(0, window);
	if (count != (int64_t)turns * ranks)
		wrong("lock", "%d ranks have counted to %lld, wanted %d", ranks, (long long)count, turns * ranks);
	passed("lock", "%d turns of each rank under one exclusive lock", turns);
}

// Of all ranks that want to put their number in the place of zero, one does.
static void swap(void)
{
	int64_t ticket = rank + 1, zero = 0, got;
	MPI_Compare_and_swap(&ticket, &zero, &got, MPI_INT64_T, 0, 1, window);
	MPI_Win_flush(0, window);
	int won = got == 0, winners;
	MPI_Allreduce(&won, &winners, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
	if (winners != 1)
		wrong("flush", "%d ranks have won the swap", winners);
}

// Without a lock of one rank: counters that fetch and add, a swap that one rank wins, Puts that are flushed.
static void flushes(int rounds)
{
	int64_t one = 1, got, *mine = room(sizeof *mine * EACH);
	int turns = 30 * rounds;
	MPI_Win_lock_all(0, window);
	clear();
	MPI_Win_sync(window);
	MPI_Barrier(MPI_COMM_WORLD);
	int64_t before = -1;
	for (int turn = 0; turn < turns; turn++) {
		MPI_Fetch_and_op(&one, &got, MPI_INT64_T, 0, 0, MPI_SUM, window);
		MPI_Win_flush(0, window);
		if (got <= before || got >= (int64_t)turns * ranks)
			wrong("flush", "the counter was %lld, and is %lld", (long long)before, (long long)got);
		before = got;
	}
	swap();
	int next = (rank + 1) % ranks;
	for (int i = 0; i < EACH; i++)
		mine[i] = value(rank, next, rounds, i);
	for (int part = 0; part < 8; part++)
		MPI_Put(mine + part * (EACH / 8), EACH / 8, MPI_INT64_T, next, rank * EACH + part * (EACH / 8), EACH / 8,
				MPI_INT64_T, window);
	MPI_Win_flush(next, window);
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Win_sync(window);
	int last = (rank + ranks - 1) % ranks;
	for (int i = 0; i < EACH; i++)
		if (base[last * EACH + i] != value(last, rank, rounds, i))
			wrong("flush", "element %d is %lld", i, (long long)base[last * EACH + i]);
	MPI_Win_unlock_all(window);
	free(mine);
	passed("flush", "%d fetching additions of each rank, a swap, Puts", turns);
}

// On this memory, or on memory of the library if it is NULL.
static void open_window(int64_t *memory)
{
	MPI_Aint size = (MPI_Aint)sizeof *base * EACH * ranks;
	base = memory;
	if (memory)
		MPI_Win_create(base, size, sizeof *base, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
	else
		MPI_Win_allocate(size, sizeof *base, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
}

static void on(const char *kind, int64_t *memory, int rounds, int direct)
{
	if (rank == 0)
		printf("window of %s\n", kind);
	open_window(memory);
	fences(rounds, direct);
	if (direct) {
		MPI_Win_free(&window);
		open_window(memory);
	}
	posts(rounds);
	locks(rounds);
	if (!direct)
		flushes(rounds);
	MPI_Win_free(&window);
}

int main(int argc, char **argv)
{
	begin(&argc, &argv);
	int rounds = argc > 1 ? atoi(argv[1]) : 1;
	int direct = argc > 2;
	on("the library's memory", NULL, rounds, direct);
	int64_t *memory = room(sizeof *memory * EACH * (size_t)ranks);
	on("the program's memory", memory, rounds, direct);
	free(memory);
	if (rank == 0)
		printf("every window as it was written\n");
	MPI_Finalize();
	return 0;
}
