"""A first load in a confined child process: what a library does with a file is its own affair.

A file may make the library compute or allocate without end while a session is made, or crash it.
Here that ends a child with bounded memory and time, without files and network.
`python -m headrace.programs.trial` is the child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.errors import DoesNotFit, ModelFileError, UnsupportedModel
from ..media.seccomp import confine
from .inspection import Inspection, Limits
from .library import library, session

_SPARE = 256 << 20
_MOST_ANSWER = 4096


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a first load."""

    memory: int
    """Bytes by which the process grew, at most."""
    seconds: float


def tried(inspection: Inspection, data: bytes, limits: Limits) -> Trial:
    """Load a program in a child, and run it once with zeros if every size is known or may be 1.

    Raises `DoesNotFit`, `ModelFileError` with the library's reason, `UnsupportedModel` if it
    crashes or takes too long.
    """
    library()  # Its absence is this process's error.
    parts = {"": data, **inspection.outside}
    order = {
        "parts": {name: len(one) for name, one in parts.items()},
        "memory": limits.memory + 2 * sum(map(len, parts.values())) + _SPARE,
        "seconds": max(1, round(limits.load_seconds)),
        "run": not inspection.loops,
    }
    name = inspection.name
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "headrace.programs.trial", json.dumps(order)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath},
    ) as child:
        try:
            said, _ = child.communicate(b"".join(parts.values()), timeout=2 * limits.load_seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            raise UnsupportedModel(
                f"{name} did not load and run within {2 * limits.load_seconds:.0f} s"
            ) from None
        except BaseException:
            child.kill()
            raise
    answer: Any = {}
    with suppress(ValueError, IndexError):
        answer = json.loads(said[:_MOST_ANSWER].splitlines()[-1])
    reason = answer.get("refused") if isinstance(answer, dict) else None
    if isinstance(reason, str):
        if reason == "memory":
            raise DoesNotFit(f"{name} needs more than {limits.memory:,} bytes to load")
        raise ModelFileError(f"{name} does not load: {reason:.400}")
    memory, seconds = answer.get("memory"), answer.get("seconds")
    if child.returncode or not isinstance(memory, int) or not isinstance(seconds, float):
        raise UnsupportedModel(f"{name} ends the process that loads it (status {child.returncode})")
    return Trial(memory, seconds)


def main() -> None:
    """Load the program on standard input as ordered by the only argument, a JSON object."""
    order = json.loads(sys.argv[1])
    library()
    outside = {name: sys.stdin.buffer.read(size) for name, size in order["parts"].items()}
    data = outside.pop("")
    status = os.open("/proc/self/status", os.O_RDONLY)
    begun, space = _kilobytes(status, "VmRSS"), _kilobytes(status, "VmSize")
    confine((space << 10) + order["memory"], order["seconds"], 0)
    start = time.monotonic()
    try:
        made = session(data, outside, fixed=False, threads=1, memory=order["memory"])
        seconds = time.monotonic() - start
        if order["run"]:
            _run(made)
    except MemoryError:
        return _say({"refused": "memory"})
    except Exception as error:  # noqa: BLE001 - whatever the library raises is the file's fault
        memory = "bad_alloc" in str(error) or "allocate" in str(error).lower()
        return _say({"refused": "memory" if memory else plain(error)})
    return _say({"memory": max(0, _kilobytes(status, "VmHWM") - begun) << 10, "seconds": seconds})


def _run(made: Any) -> None:
    """Run once with zeros; a refusal of them is no fault."""
    types = {"float": "float32", "double": "float64"}
    given = {}
    for one in made.get_inputs():
        name = one.type.removeprefix("tensor(").removesuffix(")")
        shape = [dim if isinstance(dim, int) else 1 for dim in one.shape]
        given[one.name] = np.zeros(shape, types.get(name, name))
    with suppress(Exception):
        made.run(None, given)


def plain(error: BaseException) -> str:
    """Return the library's reason in one line, without its own file names."""
    text = " ".join(str(error).split()).removeprefix("[ONNXRuntimeError] : ")
    kept = text.partition("Status Message: ")[2] or text.partition(" : ")[2] or text
    return kept.rpartition("Status Message: ")[2][:300].rstrip(".! ")


def _kilobytes(status: int, key: str) -> int:
    text = os.pread(status, 8192, 0).decode()
    return next((int(row.split()[1]) for row in text.splitlines() if row.startswith(f"{key}:")), 0)


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
