"""Finds and loads the shared library; explains its absence.

It is in this file's folder: the package build puts it there, or in a source checkout `python -m
headrace.kernels.cpu.build`. An editable install leaves this file in the checkout and puts the
library into the environment, at the same path below site-packages. ctypes releases the GIL for
every call.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import platform
import sysconfig
import weakref
from collections.abc import Callable
from ctypes import c_double, c_void_p
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...base.errors import EngineFault
from ...base.native import BUILD, loaded
from ...base.native import LibraryAbsent as LibraryAbsent
from ...base.native import LibraryStale as LibraryStale
from ..arrays import address
from .records import HEADER, HrStep

LAYOUT = "cpu panels 2"
"""Version of the panels' memory layout: kept panels of another layout are not used."""
FILE = Path(__file__).parent / "_headrace_cpu.so"
SOURCES = Path(__file__).parent / "csrc"
"""Sources of the library."""
INSTALLED = Path(sysconfig.get_path("platlib"), "headrace", "kernels", "cpu", FILE.name)
"""Path of the library in an editable install."""
LEVELS_OF = {"x86_64": ("avx2", "avx512", "vnni", "bf16"), "aarch64": ("neon", "dotprod")}
"""By processor, from the fewest to the most instructions; each includes those before it. All give
the same bits."""
PAIRS, TILES, ROUNDED = "avx512-bf16", "amx", "amx-bf16"
"""Levels above bf16 with different bits, used only if named (csrc/named.h)."""
_NAMES = {"AMD64": "x86_64", "amd64": "x86_64", "arm64": "aarch64"}
LEVELS = LEVELS_OF.get(_NAMES.get(platform.machine(), platform.machine()), ())
"""Levels of this processor; empty if there are no kernels for it."""
BUILD_ALL = "`python -m headrace.kernels.cpu.build --levels all`"
"""Command that builds all levels in place. An editable install has only its machine's level."""


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library; check that it matches this file and the sources. Raises `LibraryAbsent`."""
    if not LEVELS:
        raise LibraryAbsent(
            f"the CPU kernels are for {' and '.join(LEVELS_OF)}, this is {platform.machine()}"
        )
    library = loaded((FILE, INSTALLED), HEADER, _check)
    if library is None:
        raise LibraryAbsent(
            f"the CPU kernels were not built (no C++ compiler at install time?); {BUILD} builds "
            "them in place"
        )
    return library


def _check(library: ctypes.CDLL, file: Path) -> None:
    built_from = library.hr_sources().decode()
    if SOURCES.is_dir() and built_from != (here := digest_of(SOURCES)):
        raise LibraryStale(
            f"{file} was built from other sources ({built_from}) than {SOURCES} holds ({here}): "
            "the last build failed, or none came after the last change; install the package again"
        )
    if library.hr_level(None) is None:
        if library.hr_level_state(LEVELS[0].encode()) == _NOT_HERE:
            raise LibraryAbsent("this CPU lacks AVX2, FMA or F16C")
        raise LibraryAbsent(
            f"{file} was built for another processor, whose level this CPU lacks; {BUILD} builds "
            "it for this one"
        )


def digest_of(folder: Path) -> str:
    """Digest the sources in a folder as CMakeLists.txt does for `hr_sources`."""
    files = sorted(file for file in folder.iterdir() if file.suffix in (".cpp", ".h"))
    digests = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def sources() -> str:
    """Return the digest of the library's sources, 16 hexadecimal digits."""
    return str(load().hr_sources().decode())


def level(wish: str | None = None) -> str | None:
    """Return the ISA level in use; with a wish that level, or None if the CPU lacks it."""
    name = load().hr_level(wish.encode() if wish else None)
    return name.decode() if name else None


_NOT_BUILT, _NOT_HERE = 1, 2
"""Two of the answers of `hr_level_state`."""


def refused(wish: str) -> str | None:
    """Explain why a level without tiles cannot serve here, as half a sentence; None if it can."""
    state = load().hr_level_state(wish.encode())
    if state == _NOT_BUILT:
        return f"level {wish} was not built; {BUILD_ALL} builds it"
    if state == _NOT_HERE:
        return f"the CPU has no {wish}"
    return f"there is no level {wish}" if state else None


def unbuilt() -> list[str]:
    """Return the levels that other processors of this family may need and this library lacks."""
    built = load().hr_built().decode().split()
    return [name for name in LEVELS if name not in built]


def tiles_refused() -> str | None:
    """Explain why level `TILES` cannot serve here, as half a sentence; None if it can.

    On x86-64 the first call in a process asks Linux for the permission to use tiles.
    """
    why = load().hr_amx_refused()
    if why and load().hr_level_state(TILES.encode()) == _NOT_BUILT:
        return refused(TILES)
    return why.decode(errors="replace") if why else None


class Team:
    """A thread pool at one ISA level. Two pools in one process are independent."""

    watch: ClassVar[Callable[[int, int, int, int], None] | None] = None
    """Called for every call of every pool, with the address of its records, their number, the
    address of its step and that of the seconds of each record (`timing.timed`)."""

    def __init__(self, threads: int, level: str | None = None) -> None:
        self._library = load()
        self._run = self._library.hr_run
        handle = self._library.hr_team_new(threads, level.encode() if level else None)
        if not handle:
            why = refused(level) if level else None
            raise LibraryAbsent(why or f"no team of {threads} threads at level {level or 'best'}")
        self.handle: int = handle
        self.threads: int = self._library.hr_team_threads(handle)
        chosen = self._library.hr_level(level.encode() if level else None)
        self.level: str = chosen.decode()
        weakref.finalize(self, self._library.hr_team_free, handle).atexit = False

    def run(self, records: Any, count: int, step: HrStep) -> None:
        """Run `count` records (an array of `HrRecord`) on a step."""
        self.run_at(ctypes.addressof(records), count, ctypes.addressof(step))

    def run_at(self, records: int, count: int, step: int) -> None:
        """Run by addresses, for callers that run the same records again and again."""
        watch = Team.watch
        room = None if watch is None else (c_double * count)()
        seconds = None if room is None else ctypes.addressof(room)
        ended = self._run(self.handle, records, count, step, seconds)
        if ended:
            raise _WHY[ended]
        if watch is not None and seconds is not None:
            watch(records, count, step, seconds)

    def read_bandwidth(self, data: npt.NDArray[np.uint8]) -> float:
        """Return the bytes a second of one read of all of `data` (uint8) by the whole pool."""
        return float(self._library.hr_probe_read(self.handle, address(data), data.nbytes))

    def int8_rate(self, iterations: int = 2_000_000) -> float:
        """Return int8 operations a second on registers: the ceiling of every quantised product."""
        return float(self._library.hr_probe_int8(self.handle, iterations))


_WHY: dict[int, Exception] = {
    -1: MemoryError("no memory for the work space of the CPU kernels"),
    -2: EngineFault("another rank of the group is gone"),
    -3: EngineFault("the ranks of the group are not in one place of one program"),
}
"""Errors by the return value of `hr_run`."""


def meet(fence: int, ranks: int, sign: int) -> None:
    """Wait at a fence for the other ranks, which must bring the same sign (csrc/ranks.h). Raises
    `EngineFault`."""
    ended = load().hr_meet(fence, ranks, sign)
    if ended:
        raise _WHY[ended]


def allocate(size: int) -> npt.NDArray[np.uint8]:
    """Allocate zeroed uint8[size], aligned to 2 MiB and on huge pages if the system has them.

    Memory is taken page by page as it is first touched. Raises `MemoryError`.
    """
    library = load()
    room = max(size, 1)
    at = library.hr_alloc(room)
    if not at:
        raise MemoryError(f"no {room:,} bytes of memory")
    array = (ctypes.c_uint8 * room).from_address(at)
    # Views of `array` keep it alive; its memory is freed with it.
    weakref.finalize(array, library.hr_release, at, room).atexit = False
    return np.frombuffer(memoryview(array), np.uint8)[:size]


def forget(address: int, size: int) -> None:
    """Release the whole pages inside: a file mapping reads them again, other memory is zero."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        _LIBC.madvise(c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


_LIBC = ctypes.CDLL(None)
