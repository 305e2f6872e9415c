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

from ..base.foreign import Undecodable, any_json

MOST_SAID = 1 << 10
"""Bytes of an answer: a compromised child may write without end."""
OnChild = Callable[["subprocess.Popen[bytes]"], None]
"""Callback that takes the child of a decoding, which another thread may kill."""


def memory_file(name: str) -> BinaryIO:
    """Open a file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b")
    return tempfile.TemporaryFile()


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
