"""A process that renders one conversation after another: the child of `renderer`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, BinaryIO

from ..base.foreign import msgpack_reader
from .renderer import HARD_SECONDS, LENGTH, MEMORY, encode
from .sandbox import Exhausted, Raised, TemplateEnvironment, rendered

_asked = msgpack_reader()


def _main(into: BinaryIO, out: BinaryIO) -> None:
    """Render until the parent is gone."""
    template = None
    while True:
        given = _asked(_message(into))
        if isinstance(given, str):
            template = TemplateEnvironment().from_string(given)
            _answer(out, "ok", "")
        else:
            _limit()
            _answer(out, *_rendered(template, given))


def _rendered(template: Any, variables: dict[str, Any]) -> tuple[str, str]:
    try:
        return "ok", rendered(template, variables)
    except Raised as error:
        return "raised", str(error)
    except Exhausted as error:
        return "exhausted", str(error)
    except MemoryError:
        return "exhausted", "takes too much memory"
    except Exception as error:  # noqa: BLE001 - the boundary to foreign code
        return "failed", f"{type(error).__name__}: {error}"[:1000]


def _limit() -> None:
    """Let the kernel end this process if its parent does not live to do so."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = int(used.ru_utime + used.ru_stime + HARD_SECONDS) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _message(into: BinaryIO) -> bytes:
    head = into.read(LENGTH.size)
    if len(head) < LENGTH.size:
        sys.exit(0)
    return into.read(LENGTH.unpack(head)[0])


def _answer(out: BinaryIO, kind: str, text: str) -> None:
    data = encode((kind, text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")))
    out.write(LENGTH.pack(len(data)) + data)
    out.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        _main(sys.stdin.buffer, sys.stdout.buffer)
