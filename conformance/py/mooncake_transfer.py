"""Mooncake's transfer engine over RDMA between two processes: Writes and Reads of registered memory, compared.

    mooncake_transfer.py owner|user OWNERS-ADDRESS OWN-ADDRESS FILE

The owner leaves its port and the address of its memory in FILE, and ends when the user has removed it.
"""
import ctypes
import os
import sys
import time

from mooncake.engine import TransferEngine

ROOM = 1 << 20
LIMIT = 120


def check(good, what):
    print(("ok " if good else "FAIL ") + what, flush=True)


def wait(done, what):
    end = time.monotonic() + LIMIT
    while not done():
        if time.monotonic() > end:
            check(False, f"{what} within {LIMIT} s")
            sys.exit(1)
        time.sleep(0.02)


def pattern(round):
    return bytes((n * 7 + n // 251 + round) & 255 for n in range(ROOM))


def own(engine, memory, file):
    with open(file + ".new", "w") as out:
        out.write(f"{engine.get_rpc_port()} {ctypes.addressof(memory)}")
    os.rename(file + ".new", file)
    wait(lambda: not os.path.exists(file), "the user is done")
    check(memory.raw == pattern(2), "what the user wrote is here")


def use(engine, memory, file, address):
    wait(lambda: os.path.exists(file), "the owner is there")
    with open(file) as where:
        port, start = where.read().split()
    here, owner = ctypes.addressof(memory), f"{address}:{port}"
    for round in range(3):
        ctypes.memmove(memory, pattern(round), ROOM)
        check(engine.transfer_sync_write(owner, here, int(start), ROOM) == 0, f"write {round}")
        ctypes.memset(memory, 0, ROOM)
        check(engine.transfer_sync_read(owner, here, int(start), ROOM) == 0, f"read {round}")
        check(memory.raw == pattern(round), f"what was written is read, {round}")
    os.remove(file)


def main():
    role, address, own_address, file = sys.argv[1:]
    engine = TransferEngine()
    check(engine.initialize(own_address, "P2PHANDSHAKE", "rdma", "") == 0, "the engine begins")
    memory = ctypes.create_string_buffer(ROOM)
    check(engine.register_memory(ctypes.addressof(memory), ROOM) == 0, "memory is registered")
    if role == "owner":
        own(engine, memory, file)
    else:
        use(engine, memory, file, address)


main()
