"""Start of the child process that decodes one file, and its answer."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from ..base.errors import InvalidRequest, Overloaded, TooLarge
from ..base.extras import absent
from ..base.foreign import Undecodable, any_json

MOST_SAID = 1 << 10
"""Bytes of an answer: a compromised child may write without end."""
MOST_NAME = 64
"""Characters of a missing package's name."""
OnChild = Callable[["subprocess.Popen[bytes]"], None]
"""Callback that takes the child of a decoding, which another thread may kill."""


def memory_file(name: str) -> BinaryIO:
    """Open a file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()


def check_size(data: bytes | bytearray, most: int, param: str) -> None:
    """Raise `TooLarge` for a file of more bytes than are taken."""
    if len(data) > most:
        raise TooLarge(f"the file has {len(data):,} bytes, at most {most:,} are taken", param=param)


def decoded(
    module: str,
    data: bytes | bytearray,
    order: Mapping[str, Any],
    target: BinaryIO,
    wall_seconds: float,
    believable: Callable[[dict[str, Any]], bool],
    refusals: Mapping[str, str],
    needs: tuple[str, ...],
    param: str,
    on_child: OnChild | None,
) -> dict[str, Any]:
    """Run a decoder on a file; return its description of what it wrote to `target`.

    `refusals`: code from the child → clause for the user. `needs`: the subject and the extras of
    the error if a library is missing. Raises `InvalidRequest`, `PackageAbsent`, and `Overloaded` if
    there is no room for the result.
    """
    with memory_file(module) as source:
        source.write(data)
        source.flush()
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        answer = run_child(module, order, source, target, wall_seconds, on_child)
    found = checked(answer, refusals, believable)
    if "absent" in found:
        raise absent(needs[0], found["absent"], *needs[1:])
    if found.get("refused") == "room":
        raise Overloaded(refusals["room"], retry_after=5.0)
    if "refused" in found:
        raise InvalidRequest(refusals[found["refused"]], param=param)
    return found


def checked(
    answer: Any, refusals: Mapping[str, str], believable: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Return an answer of one of the three known forms, else that the file is lost: a compromised
    child may send anything."""
    if isinstance(answer, dict):
        refused, missing = answer.get("refused"), answer.get("absent")
        if refused is None and missing is None and believable(answer):
            return answer
        if isinstance(refused, str) and refused in refusals:
            return {"refused": refused}
        if isinstance(missing, str) and len(missing) < MOST_NAME:
            return {"absent": missing}
    return {"refused": "lost"}


def run_child(
    module: str,
    order: Mapping[str, Any],
    source: BinaryIO,
    target: BinaryIO,
    wall_seconds: float,
    on_child: OnChild | None,
) -> Any:
    """Run a module of this package on a file; return what it printed as JSON, not yet to be
    believed.

    The child reads `source` as its standard input, and writes to `target` by the descriptor `into`
    of its order. One that takes too long is killed, its answer is `{"refused": "time"}`; of one
    that says nothing sensible it is `{"refused": "lost"}`.
    """
    whole = {
        **order,
        "processor_seconds": max(1, round(wall_seconds)),
        "into": target.fileno(),
    }
    command = [sys.executable, "-I", "-m", f"headrace.media.{module}", json.dumps(whole)]
    # One thread of a linear algebra library reserves more address space than a decoder needs.
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath}
    with subprocess.Popen(
        command,
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(target.fileno(),),
        env=environment,
    ) as child:
        try:
            if on_child is not None:
                on_child(child)
            said = _said(child, time.monotonic() + wall_seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            return {"refused": "time"}
        except BaseException:
            child.kill()
            raise
    try:
        return any_json(said)
    except Undecodable:
        return {"refused": "lost"}


def _said(child: subprocess.Popen[bytes], end: float) -> bytes:
    """Wait for a child until `end` and return what it printed; nothing if that is too much, and the
    child is killed. Raises `TimeoutExpired`."""
    assert child.stdout is not None
    said = b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            left = end - time.monotonic()
            if left <= 0 or not ready.select(left):
                raise subprocess.TimeoutExpired(child.args, left)
            part = os.read(child.stdout.fileno(), MOST_SAID + 1 - len(said))
            said += part
            if len(said) > MOST_SAID:
                child.kill()
                return b""
            if not part:
                child.wait(max(0.0, end - time.monotonic()))
                return said
