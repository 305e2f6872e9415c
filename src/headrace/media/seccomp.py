"""Confinement of a process that only computes; on Linux (x86-64, 64-bit ARM) with a filter.

A system call that is not on the list fails with EPERM: processes, signals, other processes'
memory, sockets, opening files by name. Other systems have no filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys
from contextlib import suppress
from typing import Any

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_ALLOWED = {
    # Name: numbers on x86-64 and on 64-bit ARM.
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "writev": (20, 66),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
_SET_SECCOMP, _FILTER = 22, 2
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_OF_ALL_THREADS = 1
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES = 38


def leave_networks() -> None:
    """Enter a network of its own, without any connection; possible while there is one thread."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "unshare"):
        # Some containers refuse this. Nothing here opens a connection anyway.
        libc.unshare(_NEW_USER | _NEW_NET)


def confine(memory: int, seconds: int, result: int) -> None:
    """Give up for good all that computing does not need, in every thread of the process.

    Left are `memory` bytes of address space, `seconds` of processor time, files of `result` bytes;
    a limit of -1 is none. A process with more than one thread calls `leave_networks` first.
    """
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, result),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    leave_networks()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        only_compute(libc)


def only_compute(libc: Any) -> bool:
    """Deny all threads all other system calls for good; return False if that is impossible.

    The process must already have given up new privileges (`PR_SET_NO_NEW_PRIVS`).
    """
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in _ARCHITECTURE or sys.maxsize < 2**32:
        return False
    place = list(_ARCHITECTURE).index(machine)
    numbers = [each[place] for each in _ALLOWED.values()]
    steps = [
        (_LOAD, 0, 0, 4),  # The architecture, which gives the numbers their meaning.
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        *((_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    if libc.syscall(_SECCOMP[machine], 1, _OF_ALL_THREADS, program) == 0:
        return True
    return bool(libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0)  # Of this thread.
