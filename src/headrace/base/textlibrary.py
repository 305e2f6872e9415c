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

from .c_header import Header, declare

VERSION = 6
"""Version of the C ABI: `hrt_version`."""
FILE = Path(__file__).parents[1] / "text" / "_headrace_text.so"
INSTALLED = Path(sysconfig.get_path("platlib"), "headrace", "text", FILE.name)
"""Path in an editable install."""

_SOURCES = FILE.parent / "csrc"


class TextLibraryAbsent(Exception):
    """Reason why the library cannot be used, as a clause."""


@functools.cache
def library(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL | None:
    """Load the library; None if it cannot be used: `absence` gives the reason."""
    try:
        return _load(kind)
    except TextLibraryAbsent:
        return None


def absence() -> str | None:
    """Return the reason why `library` is None, as a clause; None if it is not."""
    try:
        _load()
    except TextLibraryAbsent as absent:
        return str(absent)
    return None


def _load(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    absent: TextLibraryAbsent | None = None
    for file in (FILE, INSTALLED):
        if file.exists():
            try:
                return _opened(file, kind)
            except TextLibraryAbsent as error:  # the other one may be of a later build
                absent = absent or error
    raise absent or TextLibraryAbsent(
        "our own library was not built (no C++ compiler at install time?); "
        "`python -m headrace.kernels.cpu.build` builds it in place"
    )


def _opened(file: Path, kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    try:
        loaded = kind(str(file))
        declare(loaded, Header(*sorted(_SOURCES.glob("*.cpp"))))
    except (OSError, AttributeError) as error:
        raise TextLibraryAbsent(f"{file} cannot be loaded: {error}") from error
    if loaded.hrt_version() != VERSION:
        raise TextLibraryAbsent(
            f"{file} belongs to another version of Headrace; "
            "`python -m headrace.kernels.cpu.build` builds it anew"
        )
    return loaded


def walk_strings(data: Any, at: int, end: int, count: int) -> tuple[int, array[int]] | None:
    """Walk over `count` strings with a length word each, from offset `at` of a writable buffer.

    Returns (offset after the last one, or -1 if that exceeds `end`; `Packed.starts` of them), or
    None if the library is absent.
    """
    loaded = library()
    if loaded is None:
        return None
    starts = array("Q", [0]) * (count + 1)
    held = ctypes.c_char.from_buffer(data)
    walked: int = loaded.hrt_strings(
        ctypes.addressof(held), at, end, count, starts.buffer_info()[0]
    )
    return walked, starts
