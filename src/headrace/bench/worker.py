"""A client process: `python -m headrace.bench.worker`, which reads its job from stdin.

Lines in: a job, then the start time on the monotonic clock, then further sessions that it
requested. Lines out: "ready", a record per ended request, "more" if sessions run out too early, and
the audit at the end, each a JSON object with its type first.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable

import msgspec

from ..base.errors import HeadraceError
from ..base.foreign import json_reader
from ..obs.threads import THREADS
from .client import Client, Recount
from .job import Job, More
from .record import RequestRecord

_encode = msgspec.json.Encoder().encode


def say(kind: str, value: object = None) -> None:
    sys.stdout.buffer.write(_encode({"type": kind, "value": value}) + b"\n")
    sys.stdout.buffer.flush()


def recounter(model: str | None) -> Recount | None:
    """Make a counter of tokens with a model's own tokenizer."""
    if model is None:
        return None
    from ..loader import open_model  # Only if recounting is enabled: it costs start-up time.
    from ..text import load_tokenizer

    files = open_model(model)
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, special=False))

    # The first call takes most of a second to build tables: during the run it would stall the loop.
    count("warm")
    return count


def new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    made: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return made


_more, _job = json_reader(More), json_reader(Job)


async def work(job: Job, recount: Recount | None, start_ns: int) -> None:
    def emit(record: RequestRecord) -> None:
        say("record", record)

    client = Client(job, emit, recount, ask=lambda: say("more"))
    loop = asyncio.get_running_loop()

    def listen() -> None:
        # Not by `sys.stdin`: when the process ends no thread may hold its lock.
        rest = b""
        while data := os.read(0, 1 << 20):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                more = _more(line)
                loop.call_soon_threadsafe(client.add, more)

    THREADS.keep("more", listen)
    # Collections during a run would add lag of our own.
    gc.collect()
    gc.freeze()
    gc.disable()
    await client.run(start_ns)
    say("audit", client.audit)


def main() -> None:
    job = _job(sys.stdin.buffer.readline())
    try:
        recount = recounter(job.tokenizer)
        say("ready")
        line = sys.stdin.buffer.readline()
        if not line:
            return  # The parent is gone.
        with asyncio.Runner(loop_factory=new_loop()) as runner:
            runner.run(work(job, recount, int(line)))
    except HeadraceError as error:
        say("failed", error.message)
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
