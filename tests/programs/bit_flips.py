"""Bits of memory that turn over: in a child's, as its parent may write it, and in our own bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path


def flip_in_process(pid: int, patterns: Iterable[bytes]) -> int:
    """Turn over a bit in each place of a process where one of these is; return their number.
    Its memory is read once, since that may take seconds, in which a guard tests it."""
    found, wanted = 0, [*patterns]
    spaces = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in spaces:
            span, rights, *_ = line.split()
            if "rw" not in rights or "[v" in line:
                continue
            begin, end = (int(one, 16) for one in span.split("-"))
            try:
                memory.seek(begin)
                data = memory.read(end - begin)
            except (OSError, ValueError, OverflowError):
                continue
            for pattern in wanted:
                at = data.find(pattern)
                while at >= 0:
                    memory.seek(begin + at + 3)
                    memory.write(bytes([data[at + 3] ^ 0x40]))
                    found += 1
                    at = data.find(pattern, at + len(pattern))
    return found


def flip_in_bytes(data: bytes, at: int) -> None:
    """Turn over a bit of bytes that nobody may change."""
    ctypes.memset(id(data) + bytes.__basicsize__ - 1 + at, data[at] ^ 1, 1)
