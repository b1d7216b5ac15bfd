"""Runs a program below the system call filter of a container: what Docker's default profile denies, and ptrace and
its like, fail with EPERM.

    contained.py PROGRAM ARGUMENTS...
"""

import ctypes
import os
import struct
import sys

# x86-64: ptrace, mount, umount2, setns, unshare, kcmp, process_vm_readv, process_vm_writev, add_key, request_key,
# keyctl, bpf, userfaultfd, perf_event_open, io_uring_setup, io_uring_enter, io_uring_register, open_by_handle_at,
# name_to_handle_at, personality, pidfd_getfd
DENIED = [101, 165, 166, 308, 272, 312, 310, 311, 248, 249, 250, 321, 323, 298, 425, 426, 427, 304, 303, 135, 438]

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001

rows = [(LOAD, 0, 0, 0)]
rows += [(JUMP_IF_EQUAL, len(DENIED) - i, 0, call) for i, call in enumerate(DENIED)]
rows += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)]
code = b"".join(struct.pack("HBBI", *row) for row in rows)
memory = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", len(rows), ctypes.addressof(memory))

libc = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, program, 0, 0):
    raise OSError(ctypes.get_errno(), "no filter")
os.execvp(sys.argv[1], sys.argv[1:])
