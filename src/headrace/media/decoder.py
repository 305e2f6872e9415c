"""Run of a decoder in a child process, the same for sounds, pictures and videos.

The child reads a file from standard input and writes what it decodes to the descriptor `into` of
its order. One line of JSON on standard output describes that or gives the reason why there is
nothing. After importing the libraries it gives up everything that could do harm. That is memory,
processor time, new descriptors, large files, other processes and, where the system allows it, the
network. Only system calls needed to compute remain (`seccomp`).
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .seccomp import confine

Decode = Callable[[dict[str, Any], Any], dict[str, Any]]
"""Decodes standard input: (order, libraries) → description of what it wrote."""


class FileRefused(Exception):
    """Refusal by a decoder; its text is a key of the table of clauses for its kind of file."""


def run_decoder(imported: Callable[[str], Any], decode: Decode) -> None:
    """Decode standard input as ordered by the only argument, a JSON object. `imported` returns the
    libraries for a format or raises `ImportError`."""
    order = json.loads(sys.argv[1])
    try:
        libraries = imported(order["format"])
    except ImportError as missing:
        _say({"absent": missing.name})
        return
    obey(order, libraries, decode)


def obey(order: dict[str, Any], libraries: Any, decode: Decode) -> None:
    """Confine this process for good, decode, and print the result."""
    confine(order["memory"], order["processor_seconds"], order["result"])
    try:
        _say(decode(order, libraries))
    except FileRefused as refused:
        _say({"refused": str(refused)})
    except MemoryError:
        _say({"refused": "lost"})
    except Exception:  # noqa: BLE001 - whatever a decoder raises is the file's fault
        _say({"refused": "damaged"})


@contextmanager
def writing() -> Iterator[None]:
    """Refuse the file if the result cannot be written."""
    try:
        yield
    except OSError as error:
        raise FileRefused("room" if error.errno == errno.ENOSPC else "lost") from error


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)
