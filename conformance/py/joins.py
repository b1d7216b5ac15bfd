"""Asks a process for memory as its peers do (crates/driver/src/host/words.rs), and lies.

    joins.py NAME WAY [NONCE OWN PEER]

NONCE is what the process has said over a connection whose ends are the ports OWN and PEER. NAME is the process's among abstract Unix sockets. Prints what became of it: "closed" if the process has closed
the socket, "not there" if nobody has that name, "silence" if it says nothing, "answered N" if it refuses with the reason N, "granted" if it does not.
"""

import array
import fcntl
import os
import select
import socket
import struct
import sys
import time

PATIENCE = 60
# Longer than a process that asks nothing is waited for.
QUIET = 4
MOMENT = 0.3
# Questions about a connection that is given up after 10 s, and then the program that listens ends.
PROOFS = {"proves": 1, "proves_twice": 2, "proves_another_connection": 1}
FIRST, NEW_SLAB = 1, 2
RING = 512 << 10
SLAB = 4096 + 2 * 64 * 64 + 2 * 64 * RING
BOARD = 4096
# Linux names them so, and Python knows them from 3.8 on.
SHRINK_GROW_SEAL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory(size, seals=SHRINK_GROW_SEAL):
    made = os.memfd_create("a stranger's", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def end(address, port):
    return bytes(10) + b"\xff\xff" + socket.inet_aton(address) + struct.pack("!H", port)


def question(flags=FIRST | NEW_SLAB, nonce=b"a guess, no more", slab=0, lane=0, magic=b"uwJ1"):
    return magic + struct.pack("=I16sII", flags, nonce, slab, lane) + end("127.0.0.1", 1) + end("127.0.0.1", 2)


def bell():
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def link(name):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Waits, while many others do the same.
    made.connect("\0" + name)
    made.settimeout(PATIENCE)
    return made


def say(made, words, descriptors=()):
    rights = array.array("i", descriptors)
    try:
        made.sendmsg([words], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else [])
    except (BrokenPipeError, ConnectionResetError):
        pass


def became(made, answers=None):
    """What the process does with it, in the end; with `answers`, a moment after so many."""
    said, count = [], 0
    while select.select([made], [], [], QUIET if count != answers else MOMENT)[0]:
        try:
            answer = made.recv(100)
        except ConnectionResetError:
            answer = b""
        if not answer:
            return " ".join(said + ["closed"])
        reason = struct.unpack("=I", answer[4:8])[0]
        count += 1
        word = f"answered {reason}" if reason else "granted"
        said += [word] if said[-1:] != [word] else []
    return " ".join(said or ["silence"])


def nothing(made):
    """Only connects."""


def guesses(made):
    """All is as it should be but the nonce."""
    say(made, question(), [memory(BOARD), bell(), memory(SLAB)])
    for number in range(5000):
        say(made, question(0, struct.pack("=QQ", number, number)))


def nonsense(made):
    say(made, os.urandom(77))


def another_version(made):
    say(made, question(magic=b"uwJ9"), [memory(BOARD), bell(), memory(SLAB)])


def no_descriptors(made):
    say(made, question())


def too_many_descriptors(made):
    say(made, question(), [memory(BOARD), bell(), memory(SLAB), memory(SLAB), memory(SLAB)])


def files(made):
    null = os.open("/dev/null", os.O_RDWR)
    say(made, question(), [null, null, null])


def without_seals(made):
    say(made, question(), [memory(BOARD), bell(), memory(SLAB, fcntl.F_SEAL_GROW)])


def a_small_slab(made):
    say(made, question(), [memory(BOARD), bell(), memory(SLAB - 4096)])


def a_slab_before_the_board(made):
    say(made, question(NEW_SLAB), [memory(SLAB)])


def a_second_board(made):
    say(made, question(), [memory(BOARD), bell(), memory(SLAB)])
    say(made, question(), [memory(BOARD), bell(), memory(SLAB)])


def a_bell_that_is_a_pipe(made):
    read, write = os.pipe2(os.O_NONBLOCK)
    say(made, question(), [memory(BOARD), write, memory(SLAB)])


def a_bell_that_waits(made):
    """Whoever rings it would wait for ever."""
    full = os.eventfd(0, os.EFD_CLOEXEC)
    os.eventfd_write(full, 2**64 - 2)
    say(made, question(), [memory(BOARD), full, memory(SLAB)])


def half(made):
    """The first message, and not more; the answer cannot come."""
    say(made, question()[:40], [memory(BOARD), bell(), memory(SLAB)])


def asks_on_and_on(made):
    """Questions without a pause, for a second."""
    say(made, question(), [memory(BOARD), bell(), memory(SLAB)])
    made.settimeout(0.1)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        try:
            made.send(question(0, os.urandom(16)))
        except TimeoutError:
            pass


def proven(lane=0, flags=0, own=0):
    """A question about the connection of the arguments."""
    nonce, mine, theirs = bytes.fromhex(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    bare = question(flags, nonce, lane=lane)
    return bare[:-36] + end("127.0.0.1", mine + own) + end("127.0.0.1", theirs)


def proves(made):
    say(made, proven(flags=FIRST | NEW_SLAB), [memory(BOARD), bell(), memory(SLAB)])


def proves_twice(made):
    proves(made)
    say(made, proven(lane=1))


def proves_another_connection(made):
    """The nonce is right; an end is not: somebody lies between."""
    say(made, proven(flags=FIRST | NEW_SLAB, own=1), [memory(BOARD), bell(), memory(SLAB)])


def main():
    name, way = sys.argv[1:3]
    if way == "floods":
        # Each is closed at once, or stays without a word.
        for _ in range(5000):
            link(name).close()
        print("closed")
        return
    if way == "crowds":
        made = [link(name) for _ in range(500)]
        say(made[0], b"?")
        print(became(made[0]))
        return
    try:
        made = link(name)
    except ConnectionRefusedError:
        print("not there")
        return
    globals()[way](made)
    print(became(made, PROOFS.get(way)))


main()
