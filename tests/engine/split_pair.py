"""A prefill and a decode server of a small model in one process, for tests of the split."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_fakes import OPTIONS

from headrace import LLM, SamplingParams
from headrace.base.request import Request
from headrace.base.spec import RequestSpec
from headrace.base.split import SplitStats
from headrace.dist import wake
from headrace.engine.loop.build import Built
from headrace.kv import KvManager, lent_of
from headrace.sched import Scheduler
from ports import two_ports

PROMPT = [(place * 7) % 250 for place in range(70)]
TURN = threading.Lock()
"""Held while a prefill server changes what a test looks at from another thread."""


def built(llm: LLM) -> Built:
    return llm._built  # type: ignore[return-value]


def counts(llm: LLM) -> SplitStats:
    found = built(llm).core.scheduler.stats().split
    assert found is not None
    return found


@contextmanager
def prefilling(model: Path, address: str, **options: Any) -> Iterator[LLM]:
    """A prefill server whose loop runs in a thread of its own."""
    with LLM(str(model), **{**OPTIONS, **options}, role=f"prefill@{address}") as llm:
        stop = threading.Event()

        def run() -> None:
            core, lender = built(llm).core, built(llm).lender
            assert lender is not None
            while not stop.is_set():
                with TURN:
                    lender.turn(core)
                    works = core.has_work
                    if works:
                        lender.take(core.turn())
                if not works:
                    wake.wait(core.executor.wake, 0.02)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield llm
        finally:
            stop.set()
            thread.join()


@contextmanager
def decoding(model: Path, address: str, servers: int = 1, **options: Any) -> Iterator[LLM]:
    """A decode server that has found so many prefill servers."""
    with LLM(str(model), **{**OPTIONS, **options}, role=f"decode@{address}") as llm:
        until(lambda: counts(llm).servers == servers)
        yield llm


def until(holds: Callable[[], bool]) -> None:
    """Wait for an event; the limit only tells a wait from an end."""
    end = time.monotonic() + 180.0
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def greedy(llm: LLM, prompt: list[int], tokens: int = 24) -> tuple[list[int], int]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    return list(output.outputs[0].token_ids), output.cached_tokens


def nothing_is_held(*engines: LLM) -> None:
    """Neither of them holds a block for anybody; what is lent is given back, since no lease expires
    before a test does (`a_split_pays`)."""
    for llm in engines:
        scheduler = built(llm).core.scheduler
        assert isinstance(scheduler, Scheduler)
        kv = scheduler.kv

        def given_back(kv: KvManager = kv) -> bool:
            kv.turn()
            return not lent_of(kv)

        until(given_back)
        with TURN:
            scheduler.check_integrity()


def loopback() -> str:
    return f"tcp://127.0.0.1:{two_ports()}"


def add(llm: LLM, number: int, prompt: list[int], tokens: int = 8) -> str:
    spec = RequestSpec(
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), seed=number
    )
    built(llm).core.add(Request(f"r{number}", prompt, spec))
    return f"r{number}"


def own(number: int) -> list[int]:
    """A prompt that begins as no other."""
    return [(number * 31 + place * (number + 3)) % 250 for place in range(70)]


def finished(llm: LLM) -> dict[str, list[int]]:
    """Run until all have ended; what each got."""
    core = built(llm).core
    found: dict[str, list[int]] = {}
    while core.has_work:
        for delta in core.turn():
            found.setdefault(delta.request_id, []).extend(delta.tokens)
            assert delta.finish != "error", delta.error
        if core.stalled:
            wake.wait(core.executor.wake, 0.02)
    return found
