"""A prefill or decode server that hangs, goes or is killed: nothing held, nothing lost."""

from __future__ import annotations

import multiprocessing
import socket
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from engine_fakes import OPTIONS
from split_pair import (
    PROMPT,
    TURN,
    add,
    built,
    counts,
    decoding,
    finished,
    greedy,
    nothing_is_held,
    own,
    prefilling,
    until,
)

from headrace import LLM
from headrace.kv import lent_of
from headrace.kv.leases import SECONDS
from headrace.kv.split import SplitChoice
from headrace.obs.threads import THREADS
from headrace.worker import borrowing, fetching, lending, sending
from headrace.worker import split_wire as wire
from headrace.worker.block_line import BlockLine
from headrace.worker.borrowing import Borrowed
from headrace.worker.lending import LendingSocket
from headrace.worker.places import Places

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import headrace, kill, running

pytestmark = pytest.mark.usefixtures("a_split_pays")


@pytest.mark.parametrize("hang", ["the loop", "all of it"])
def test_a_prefill_server_that_hangs_is_done_without(
    tiny: Path, address: str, hang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop alone: then it is late. All of it: then it says nothing. Nobody else is asked to
    wait for it, and when it is there again, it is asked again."""
    grace = 0.3 if hang == "the loop" else 60.0
    monkeypatch.setattr("headrace.worker.borrowing.GRACE_SECONDS", grace)
    answer = None
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        lender = built(there).lender
        assert lender is not None
        gate, hangs = threading.Event(), threading.Event()
        target, name = (lender, "turn") if hang == "the loop" else (lender._socket, "_hear")
        was = getattr(target, name)

        def hung(*given: Any, **named: Any) -> Any:
            hangs.set()
            gate.wait()
            return was(*given, **named)

        setattr(target, name, hung)
        assert hangs.wait(30.0), "the call that was under way has ended"
        answer = greedy(here, PROMPT)
        assert answer[1] == 0
        assert counts(here).failed == 1
        assert (counts(here).servers == 0) == (hang == "all of it")
        gate.set()
        until(lambda: counts(here).servers == 1)
        assert greedy(here, own(1))[1] == 64
        nothing_is_held(here, there)
    with LLM(str(tiny), **OPTIONS) as alone:
        assert greedy(alone, PROMPT) == answer


@pytest.mark.parametrize("side", [borrowing, lending])
def test_who_slept_takes_nobody_for_silent(
    tiny: Path, address: str, side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped, or waited for a core, has asked nobody meanwhile: whom it knew
    before, it knows when it goes on."""
    slept, gone, sleeps = [0.0], [], threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept[0])
    monkeypatch.setattr(side, "time", clock)
    kind: Any = Borrowed if side is borrowing else LendingSocket
    name = "_renew" if side is borrowing else "_forget_the_silent"
    look, lost = getattr(kind, name), Borrowed._lost

    def late(this: Any, *now: float) -> None:
        if sleeps.is_set() and not slept[0]:
            slept[0] = 1e4
            now = tuple(one + 1e4 for one in now)
        look(this, *now)

    def noted(this: Borrowed, server: Any, why: str) -> None:
        gone.append(why)
        lost(this, server, why)

    monkeypatch.setattr(kind, name, late)
    monkeypatch.setattr(Borrowed, "_lost", noted)
    with prefilling(tiny, address), decoding(tiny, address) as here:
        sleeps.set()
        until(lambda: slept[0] > 0)
        assert greedy(here, PROMPT)[1] == 64
        assert gone == []


def test_a_decode_server_that_is_gone_holds_nothing(
    tiny: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never says so: its leases end since nobody renews them."""
    monkeypatch.setattr("headrace.kv.leases.SECONDS", SECONDS)
    with prefilling(tiny, address) as there:
        with decoding(tiny, address) as here:
            context = built(here).context
            assert context is not None
            monkey = context.tiers.handovers
            assert monkey is not None
            borrowed = monkey._servers
            assert isinstance(borrowed, Borrowed)
            core = built(here).core
            add(here, 1, PROMPT)
            core.turn()
            until(lambda: counts(there).lent_blocks > 0)
            borrowed._say = lambda server, what: None  # type: ignore[method-assign]
            borrowed._renew = lambda now: None  # type: ignore[method-assign]
            until(lambda: not counts(there).lent_blocks)
            assert counts(there).leases == 0
            assert finished(here)["r1"]
        built(there).core.scheduler.check_integrity()


def borrow_and_wait(model: str, address: str) -> None:
    """In a process of its own: a prompt is handed over, and what is lent is renewed, never read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitChoice, "pays", True)
        patch.setattr("headrace.kv.handover.LEAST_SECONDS", -1.0)
        patch.setattr("headrace.kv.tiers.LATENCY", -1e9)
        with decoding(Path(model), address) as here:
            add(here, 1, PROMPT)
            built(here).core.turn()
            time.sleep(120.0)


@pytest.mark.slow
def test_a_killed_decode_server_holds_nothing(
    tiny: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9, after it held its lease for longer than one lasts."""
    monkeypatch.setattr("headrace.kv.leases.SECONDS", SECONDS)
    with prefilling(tiny, address) as there:
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=borrow_and_wait, args=(str(tiny), address), daemon=True)
        other.start()
        try:
            until(lambda: counts(there).lent_blocks > 0)
            end = time.monotonic() + SECONDS + 1.0
            while time.monotonic() < end:
                assert counts(there).lent_blocks > 0
                time.sleep(0.05)
        finally:
            assert other.pid is not None
            kill(other.pid)
            other.join()
        until(lambda: not lent_of(built(there).core.scheduler.kv))  # type: ignore[attr-defined]
        assert counts(there).leases == counts(there).lent_blocks == 0
        nothing_is_held(there)
        with decoding(tiny, address) as here:
            assert greedy(here, PROMPT)[1] == 64


@pytest.mark.parametrize("way", ["memory", "bytes", "bytes under way"])
def test_what_is_copied_after_its_lease_ended_is_thrown_away(
    tiny: Path, address: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends, and somebody else writes where its blocks were, just before they are copied:
    wherever that is."""
    with LLM(str(tiny), **OPTIONS) as alone:
        answer = greedy(alone, PROMPT)[0]
    if way != "memory":
        monkeypatch.setattr(sending, "is_same_user", lambda sock: False)
    place: Any = Places if way == "bytes under way" else fetching.Fetching
    name_of = "send" if way == "bytes under way" else "bring"
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        leases = built(there).core.scheduler.kv.leases  # type: ignore[attr-defined]
        do = getattr(place, name_of)
        ended = []

        def late(*given: Any) -> Any:
            with TURN:
                for name in list(leases._leases):
                    for (_, block), _ in list(leases.held.items()):
                        for layer in built(there).core.executor.worker.cache.layers:  # type: ignore[attr-defined]
                            layer.k[block] = layer.v[block] = 1
                    leases.release(name)
                    ended.append(name)
            return do(*given)

        monkeypatch.setattr(place, name_of, late)
        assert greedy(here, PROMPT) == (answer, 0)
        assert ended
        nothing_is_held(here, there)


def test_a_decode_server_that_goes_in_the_middle_leaves_no_line(
    tiny: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked for blocks, and takes none."""
    with prefilling(tiny, address) as there:
        lender = built(there).lender
        assert lender is not None
        lines = lender._socket.lines
        receive = BlockLine.receive

        def gone(line: BlockLine, *given: Any) -> memoryview:
            if line._asks and line._got:
                # What the answer may have brought in the meantime is not read.
                line.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            return receive(line, *given)

        with decoding(tiny, address) as here:
            monkeypatch.setattr(BlockLine, "receive", gone)
            assert greedy(here, PROMPT)[1] == 0
            until(lambda: counts(here).servers == 1)
            monkeypatch.undo()
            nothing_is_held(here)
        until(lambda: not lines._lines)


@pytest.mark.slow
def test_a_killed_prefill_server_loses_nothing(tiny: Path, address: str) -> None:
    """kill -9 while prompts wait for it, are computed and move: every answer is that of one server
    alone, and one that is started at the same address is asked again."""
    flags = ("--port", "0", "--threads", "1", "--device", "cpu", "--offline")
    command = headrace("serve", str(tiny), *flags, "--role", f"prefill@{address}")
    with LLM(str(tiny), **OPTIONS) as alone:
        for number in range(60):
            add(alone, number, own(number))
        wanted = finished(alone)
    with ExitStack() as stack:
        server = stack.enter_context(running(command))
        assert httpx.get(f"{server.url}/health").json()["role"] == "prefill"
        here = stack.enter_context(decoding(tiny, address))
        found: dict[str, list[int]] = {}

        def turn() -> None:
            for delta in built(here).core.turn():
                found.setdefault(delta.request_id, []).extend(delta.tokens)

        for number in range(60):
            add(here, number, own(number))
            turn()
            if number == 30:
                while not counts(here).brought:
                    turn()
                below = psutil.Process(server.process.pid).children(recursive=True)
                for pid in (*(one.pid for one in below), server.process.pid):
                    kill(pid)
        for request, tokens in finished(here).items():
            found.setdefault(request, []).extend(tokens)
        assert found == wanted
        assert 0 < counts(here).brought < 60
        nothing_is_held(here)
        stack.enter_context(running(command))
        until(lambda: counts(here).servers == 1)
        assert greedy(here, PROMPT)[1] == 64


def test_a_line_without_a_thread_ends_and_the_next_is_served(
    address: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = THREADS.errand

    def full(name: str, *given: Any) -> threading.Thread | None:
        monkeypatch.setattr(THREADS, "errand", started)
        return None

    with prefilling(tiny, address) as llm:
        lender = built(llm).lender
        assert lender is not None
        lines = lender._socket.lines
        monkeypatch.setattr(THREADS, "errand", full)
        kind, where = wire.lines_at(address)
        with socket.socket(kind, socket.SOCK_STREAM) as refused:
            refused.connect(where)
            assert refused.recv(1) == b""
        assert not lines._lines
        with decoding(tiny, address) as decode:
            assert greedy(decode, PROMPT)[1] == 64
