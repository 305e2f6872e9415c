"""CPU time and memory of processes and of the whole machine, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
LISTENS = "0A"


class Used(NamedTuple):
    """Resources used by processes."""

    cpu_seconds: float
    resident_bytes: float
    """Sum of resident sets: pages that two of them share count twice."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes `roots` and all their descendants that are alive at the time of a call."""

    roots: tuple[int, ...]

    @classmethod
    def listening_on(cls, port: int) -> Processes:
        """Find the processes that accept on a TCP port; empty if that cannot be seen (another user,
        a container)."""
        inodes = {f"socket:[{inode}]" for inode in _listeners(port)}
        found = []
        for entry in PROC.glob("[0-9]*") if inodes else ():
            with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
                if any(_points_to(one) in inodes for one in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
        return cls(tuple(found))

    def used(self) -> Used | None:
        """Return the resources used now; None if no process can be seen."""
        seen: dict[int, Used] = {}
        waiting = list(self.roots)
        while waiting:
            pid = waiting.pop()
            if pid in seen:
                continue
            try:
                place = PROC / str(pid)
                # After the name, which may contain spaces and brackets.
                stat = (place / "stat").read_text().rpartition(")")[2].split()
                pages = int((place / "statm").read_text().split()[1])
                for task in (place / "task").iterdir():
                    waiting += map(int, (task / "children").read_text().split())
            except (OSError, ValueError, IndexError):
                continue
            ticks = int(stat[11]) + int(stat[12])
            seen[pid] = Used(
                ticks / os.sysconf("SC_CLK_TCK"), float(pages * os.sysconf("SC_PAGE_SIZE"))
            )
        if not seen:
            return None
        return Used(*map(sum, zip(*seen.values(), strict=True)))


def _points_to(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""  # Closed meanwhile.


def _listeners(port: int) -> list[str]:
    """Return the inodes of the sockets that listen on a port."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            parts = line.split()
            if parts[3] == LISTENS and int(parts[1].rpartition(":")[2], 16) == port:
                found.append(parts[9])
    return found


def busy_cores() -> float | None:
    """Return the core seconds that this machine has worked since it started; None if unknown."""
    try:
        user, nice, system, _idle, _wait, irq, soft = (PROC / "stat").read_text().split()[1:8]
    except (OSError, ValueError):
        return None
    ticks = sum(map(int, (user, nice, system, irq, soft)))
    return ticks / os.sysconf("SC_CLK_TCK")


NOTABLE = 0.1
"""Share of the processors above which others' work distorts figures."""


def busy_words(share: float | None) -> str | None:
    """Return the warning for a share of the processors that others used; None if it is small."""
    if share is None or share <= NOTABLE:
        return None
    return (
        f"other programs used {share:.0%} of the processors meanwhile: the times are longer, and "
        "the ratios lower, than those of this machine alone"
    )


class Others:
    """Share of this machine's processors that other programs use, between two calls."""

    def __init__(self) -> None:
        self._own = Processes((os.getpid(),))
        self._before = self._read()

    def share(self) -> float | None:
        """Return the share since the last call, or None if it cannot be seen."""
        before, now = self._before, self._read()
        self._before = now
        if before is None or now is None:
            return None
        seconds, busy, own = (new - old for new, old in zip(now, before, strict=True))
        offered = seconds * (os.cpu_count() or 1)
        # The time of a child that has ended is no longer in its sum.
        return min(1.0, max(0.0, busy - max(0.0, own)) / offered) if offered > 0 else None

    def _read(self) -> tuple[float, float, float] | None:
        busy, own = busy_cores(), self._own.used()
        return None if busy is None or own is None else (time.monotonic(), busy, own.cpu_seconds)
