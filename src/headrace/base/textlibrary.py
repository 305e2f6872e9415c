"""Loader of the small native library for tokens: `text/csrc`.

The package build puts it into `text`; in a source checkout `python -m headrace.kernels.cpu.build`
does. The loader is here, since a reader of files, drafters and loads of KV need it too. ctypes
releases the GIL for every call; `ctypes.PyDLL` keeps it, for calls of a few microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import sysconfig
from array import array
from pathlib import Path
from typing import Any

from .c_header import Header
from .native import BUILD, LibraryAbsent, LibraryStale, loaded

VERSION = 6
"""Version of the C ABI: `hrt_version`."""
FILE = Path(__file__).parents[1] / "text" / "_headrace_text.so"
INSTALLED = Path(sysconfig.get_path("platlib"), "headrace", "text", FILE.name)
"""Path in an editable install."""

_SOURCES = FILE.parent / "csrc"


@functools.cache
def library(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | None:
    """Load the library; None if it cannot be used: `absence` gives the reason."""
    try:
        return _load(kind)
    except LibraryAbsent:
        return None


def absence() -> str | None:
    """Return the reason why `library` is None, as a clause; None if it is not."""
    try:
        _load()
    except LibraryAbsent as absent:
        return str(absent)
    return None


def _load(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    header = Header(*sorted(_SOURCES.glob("*.cpp")))
    found = loaded((FILE, INSTALLED), header, _check, kind)
    if found is None:
        raise LibraryAbsent(
            "our own library was not built (no C++ compiler at install time?); "
            f"{BUILD} builds it in place"
        )
    return found


def _check(library: ctypes.CDLL, file: Path) -> None:
    if library.hrt_version() != VERSION:
        raise LibraryStale(f"{file} belongs to another version of Headrace; {BUILD} builds it anew")


def walk_strings(data: Any, at: int, end: int, count: int) -> tuple[int, array[int]] | None:
    """Walk over `count` strings with a length word each, from offset `at` of a writable buffer.

    Returns (offset after the last one, or -1 if that exceeds `end`; `Packed.starts` of them), or
    None if the library is absent.
    """
    native = library()
    if native is None:
        return None
    starts = array("Q", [0]) * (count + 1)
    held = ctypes.c_char.from_buffer(data)
    walked: int = native.hrt_strings(
        ctypes.addressof(held), at, end, count, starts.buffer_info()[0]
    )
    return walked, starts
