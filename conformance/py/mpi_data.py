"""Messages, collectives and windows through mpi4py, each value checked by its receiver.

    mpi_data.py PART...

Prints one line for each part that all ranks have passed: "ok PART", or "FAIL PART: what was seen", which ends the job.
"""
import sys
from array import array

from mpi4py import MPI

world = MPI.COMM_WORLD
rank, ranks = world.Get_rank(), world.Get_size()
after, before = (rank + 1) % ranks, (rank - 1) % ranks


def pattern(owner, size):
    """Bytes that differ with the rank, the size, and the place."""
    cycle = bytes((owner * 37 + size + i * 7 + i // 251) & 0xFF for i in range(1021))
    return bytearray((cycle * (size // len(cycle) + 1))[:size])


def check(good, name, seen=""):
    if not good:
        print(f"FAIL {name}, rank {rank}: {seen}", flush=True)
        world.Abort(1)


def passed(name):
    world.Barrier()
    if rank == 0:
        print(f"ok {name}", flush=True)


def objects():
    """Pickled: dictionaries, long strings, None."""
    for size in (0, 1, 100, 5000, 100_000):
        said = {"from": rank, "text": "x" * size + str(rank), "list": list(range(size // 10)), "none": None}
        got = world.sendrecv(said, dest=after, source=before)
        wanted = {"from": before, "text": "x" * size + str(before), "list": list(range(size // 10)), "none": None}
        check(got == wanted, "objects", f"another object of size {size}")
    passed("objects")


def buffers():
    for size in (0, 1, 8, 1000, 8191, 8192, 65_536, 1_000_003, 4 << 20):
        into = bytearray(size)
        request = world.Irecv([into, MPI.BYTE], source=before, tag=size % 1000)
        world.Send([pattern(rank, size), MPI.BYTE], dest=after, tag=size % 1000)
        request.Wait()
        check(into == pattern(before, size), "buffers", f"other bytes of {size}")
    passed("buffers")


def collectives():
    gathered = world.allgather((rank, "r" * rank))
    check(gathered == [(r, "r" * r) for r in range(ranks)], "collectives", f"allgather {gathered}")
    swapped = world.alltoall([(rank, to) for to in range(ranks)])
    check(swapped == [(owner, rank) for owner in range(ranks)], "collectives", f"alltoall {swapped}")
    word = world.bcast("word" * 10_000 if rank == 1 else None, root=1)
    check(word == "word" * 10_000, "collectives", "bcast")
    for count in (1, 1000, 200_000):
        mine, total = array("d", [rank + 1.0] * count), array("d", [0.0] * count)
        world.Allreduce([mine, MPI.DOUBLE], [total, MPI.DOUBLE], op=MPI.SUM)
        check(set(total) == {ranks * (ranks + 1) / 2}, "collectives", f"sums of {count}: {set(total)}")
    passed("collectives")


def windows():
    count = 10_000
    memory = array("q", [rank] * count)
    window = MPI.Win.Create(memory, disp_unit=8, comm=world)
    window.Fence()
    window.Put([array("q", [1000 + rank] * 100), MPI.INT64_T], after, target=[rank * 100, 100, MPI.INT64_T])
    window.Fence()
    check(set(memory[before * 100 : before * 100 + 100]) == {1000 + before}, "windows", "Put")
    got = array("q", [-1] * 100)
    window.Get([got, MPI.INT64_T], after, target=[rank * 100, 100, MPI.INT64_T])
    window.Fence()
    check(set(got) == {1000 + rank}, "windows", f"Get {set(got)}")
    window.Lock(0)
    window.Accumulate([array("q", [1]), MPI.INT64_T], 0, target=[count - 1, 1, MPI.INT64_T], op=MPI.SUM)
    window.Unlock(0)
    world.Barrier()
    window.Lock(0)
    window.Get([got, 1, MPI.INT64_T], 0, target=[count - 1, 1, MPI.INT64_T])
    window.Unlock(0)
    check(got[0] == ranks, "windows", f"{got[0]} additions, wanted {ranks}")
    window.Free()
    passed("windows")


for part in sys.argv[1:]:
    {"objects": objects, "buffers": buffers, "collectives": collectives, "windows": windows}[part]()
