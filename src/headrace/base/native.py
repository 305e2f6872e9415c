"""Loader of our native libraries, whose functions are those of their sources.

ctypes releases the GIL for every call of a `CDLL`; a `PyDLL` keeps it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from .c_header import Header

BUILD = "`python -m headrace.kernels.cpu.build`"
"""Command that builds our libraries in place, in a source checkout."""


class LibraryAbsent(Exception):
    """Reason why a library of ours cannot be used, as a clause."""


class LibraryStale(LibraryAbsent):
    """The library was not built from the present sources: its records may have another meaning and
    its KV another layout, without an error."""


def loaded(
    files: tuple[Path, ...],
    header: Header,
    check: Callable[[ctypes.CDLL, Path], None],
    kind: type[ctypes.CDLL] = ctypes.CDLL,
) -> ctypes.CDLL | None:
    """Load the first of the files that declares all functions and passes `check`; None if there is
    no file. Raises `LibraryAbsent`, as `check` does."""
    absent: LibraryAbsent | None = None
    for file in filter(Path.exists, files):
        try:
            library = kind(str(file))
            for name, (result, arguments) in header.functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            check(library, file)
            return library
        except OSError as error:
            found = LibraryAbsent(f"{file} cannot be loaded: {error}")
        except AttributeError as error:
            found = LibraryStale(f"{file} is of other sources ({error}); {BUILD} builds it anew")
        except LibraryAbsent as error:
            found = error
        absent = absent or found  # Another file may be of a later build.
    if absent is not None:
        raise absent
    return None
