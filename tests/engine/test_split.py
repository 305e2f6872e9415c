"""Prompts that a prefill server computes: the same bits, nothing held for long, nothing lost."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import zmq
from engine_fakes import OPTIONS

from headrace import LLM, SamplingParams
from headrace.base.errors import OptionError
from headrace.base.request import Request
from headrace.base.spec import RequestSpec
from headrace.base.split import Handed, SplitStats
from headrace.dist import wake
from headrace.engine.build import Built
from headrace.engine.lending import Lender
from headrace.kv import KvManager, PrefixChain, lent_of
from headrace.kv.leases import SECONDS
from headrace.kv.split import SplitChoice
from headrace.obs.threads import THREADS
from headrace.sched import Scheduler
from headrace.worker import fetching, sending
from headrace.worker import split_wire as wire
from headrace.worker.block_line import BlockLine
from headrace.worker.borrowing import Borrowed
from headrace.worker.places import Places
from ports import two_ports
from tiny import families
from tiny.kept import Kept

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import headrace, kill, running

PROMPT = [(place * 7) % 250 for place in range(70)]
TURN = threading.Lock()
"""Held while a prefill server changes what a test looks at from another thread."""


@pytest.fixture(autouse=True)
def a_split_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these models takes long enough to compute."""
    monkeypatch.setattr(SplitChoice, "pays", True)
    monkeypatch.setattr("headrace.kv.handover.LEAST_SECONDS", -1.0)
    monkeypatch.setattr("headrace.kv.tiers.LATENCY", -1e9)


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


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.005)


def greedy(llm: LLM, prompt: list[int], tokens: int = 24) -> tuple[list[int], int]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    return list(output.outputs[0].token_ids), output.cached_tokens


def nothing_is_held(*engines: LLM, seconds: float = 1.0) -> None:
    """Neither of them holds a block for anybody, a second later."""
    for llm in engines:
        scheduler = built(llm).core.scheduler
        assert isinstance(scheduler, Scheduler)
        kv = scheduler.kv

        def given_back(kv: KvManager = kv) -> bool:
            kv.turn()
            return not lent_of(kv)

        until(given_back, seconds)
        with TURN:
            scheduler.check_integrity()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/split"


def loopback() -> str:
    return f"tcp://127.0.0.1:{two_ports()}"


@pytest.fixture(params=["memory", "another user", "the same host", "hosts", "hosts with a key"])
def by(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An address, and servers that can move blocks in this way alone."""
    way = request.param
    copied = []
    copy, near = Places.copy, fetching._opened

    def copying(*given: Any) -> None:
        copied.append(1)
        copy(*given)

    def far(kind: Any, where: Any, *given: Any) -> Any:
        if where[:1] == "\0":
            raise ConnectionRefusedError("of another host")
        return near(kind, where, *given)

    monkeypatch.setattr(Places, "copy", copying)
    if way.startswith("hosts"):
        monkeypatch.setattr(fetching, "_opened", far)
    elif way == "another user":
        monkeypatch.setattr(sending, "is_same_user", lambda sock: False)
    (tmp_path / "key").write_bytes(b"k" * 32)
    if way in ("memory", "another user"):
        yield f"ipc://{tmp_path}/split"
    elif way == "hosts with a key":
        yield f"{loopback()}?key={tmp_path}/key"
    else:
        yield loopback()
    assert bool(copied) == (way in ("memory", "the same host"))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "k8v4"])
def test_a_prompt_that_was_handed_over_has_the_same_answer(
    tiny: Path, by: str, kv_dtype: str
) -> None:
    address = by
    with LLM(str(tiny), **OPTIONS, kv_dtype=kv_dtype) as alone:
        answers = [greedy(alone, PROMPT[:size])[0] for size in (70, 64, 33)]
    with (
        prefilling(tiny, address, kv_dtype=kv_dtype) as there,
        decoding(tiny, address, kv_dtype=kv_dtype) as here,
    ):
        for number, size in enumerate((70, 64, 33)):
            built(here).core.scheduler.kv.reset()  # type: ignore[attr-defined]
            found = min(size // 16 * 16, size - 1)
            assert greedy(here, PROMPT[:size]) == (answers[number], found)
            nothing_is_held(here, there)
        assert counts(here).brought == counts(here).handed == 3
        assert counts(there).computed == 3
        assert counts(there).lent_bytes > 0
        # What it has, it asks nobody for.
        assert greedy(here, PROMPT[:33]) == (answers[2], 32)
        assert counts(here).handed == 3


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma3", "qwen3_next", "lfm2", "granitemoehybrid-dense"]
)
def test_latents_windows_and_states_are_handed_over_too(
    kept: Kept, tiny: Path, tmp_path: Path, address: str, family: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(kept(families.make, family), model)
    shutil.copy(tiny / "tokenizer.json", model)
    with LLM(str(model), **OPTIONS, max_context=256) as alone:
        answer = greedy(alone, PROMPT)[0]
    with (
        prefilling(model, address, max_context=256) as there,
        decoding(model, address, max_context=256) as here,
    ):
        assert greedy(here, PROMPT) == (answer, 64)
        assert counts(here).brought == 1
        nothing_is_held(here, there)


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


def test_two_hundred_aborts_leave_nothing(tiny: Path, address: str) -> None:
    """In every state of a handover: asked for, computed, lent, under way, decoding."""
    with (
        prefilling(tiny, address, kv_memory="4MiB") as there,
        decoding(tiny, address, kv_memory="4MiB") as here,
    ):
        core = built(here).core
        waiting: list[str] = []
        for number in range(200):
            waiting.append(add(here, number, own(number)))
            core.turn()
            if len(waiting) > 12:
                core.abort(waiting.pop(number % 12))
        for request in waiting:
            core.abort(request)
        finished(here)
        nothing_is_held(here, there)
        assert counts(here).handed == 200
        assert counts(here).left > 0
        until(lambda: counts(there).leases == counts(there).lent_blocks == 0, 1.0)
        assert greedy(here, PROMPT)[1] == 64
        nothing_is_held(here, there)


def test_a_prompt_that_is_left_at_once_is_not_lent(
    tiny: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prefill server takes one prompt, others are asked for and left: it heeds the order
    of what it heard."""
    begin = Lender._begin

    def slowly(*about: Any) -> str:
        time.sleep(0.02)
        return begin(*about)

    monkeypatch.setattr(Lender, "_begin", slowly)
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        core = built(here).core
        for number in range(30):
            request = add(here, number, own(number))
            core.turn()
            core.abort(request)
        finished(here)
        assert greedy(here, PROMPT)[1] == 64, "it has taken all that came before"
        nothing_is_held(here, there)
        assert counts(there).expired == 0


def test_many_prompts_at_once_have_their_answers(tiny: Path, address: str) -> None:
    """More than the prefill server may hold: what it declines is computed here."""
    with LLM(str(tiny), **OPTIONS) as alone:
        for number in range(40):
            add(alone, number, own(number % 30))
        wanted = finished(alone)
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        for number in range(40):
            add(here, number, own(number % 30))
        assert finished(here) == wanted
        assert counts(here).brought > 0
        nothing_is_held(here, there)


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


def test_a_decode_server_that_is_gone_holds_nothing(tiny: Path, address: str) -> None:
    """It never says so: its leases end since nobody renews them."""
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
            until(lambda: not counts(there).lent_blocks, SECONDS + 1.0)
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
def test_a_killed_decode_server_holds_nothing(tiny: Path, address: str) -> None:
    """kill -9, after it held its lease for longer than one lasts."""
    with prefilling(tiny, address) as there:
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=borrow_and_wait, args=(str(tiny), address), daemon=True)
        other.start()
        try:
            until(lambda: counts(there).lent_blocks > 0, 120.0)
            end = time.monotonic() + SECONDS + 1.0
            while time.monotonic() < end:
                assert counts(there).lent_blocks > 0
                time.sleep(0.05)
        finally:
            assert other.pid is not None
            kill(other.pid)
            other.join()
        killed = time.monotonic()
        until(lambda: not lent_of(built(there).core.scheduler.kv), SECONDS + 1.0)  # type: ignore[attr-defined]
        assert counts(there).leases == counts(there).lent_blocks == 0
        assert time.monotonic() - killed < SECONDS + 1.0
        nothing_is_held(there)
        with decoding(tiny, address) as here:
            assert greedy(here, PROMPT)[1] == 64


def test_terms_that_differ_are_named_and_nothing_is_lent(
    tiny: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        prefilling(tiny, address, kv_dtype="int8"),
        decoding(tiny, address, servers=0, kv_dtype="bfloat16") as here,
    ):
        until(lambda: "lends nothing to this server" in caplog.text)
        assert "option kv_dtype: bfloat16, now int8" in caplog.text
        assert greedy(here, PROMPT)[1] == 0
        assert counts(here).servers == counts(here).handed == 0


def test_who_has_not_got_the_key_gets_no_answer(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "other").write_bytes(b"o" * 32)
    where = loopback()
    with prefilling(tiny, f"{where}?key={tmp_path}/key") as there:
        with decoding(tiny, f"{where}?key={tmp_path}/key") as here:
            assert greedy(here, PROMPT)[1] == 64
            nothing_is_held(here, there)
        for wrong in (f"{where}?key={tmp_path}/other", where):
            with decoding(tiny, wrong, servers=0) as stranger:
                time.sleep(1.0)
                assert counts(stranger).servers == 0
                assert greedy(stranger, PROMPT)[1] == 0


def test_hostile_messages_change_nothing(tiny: Path, address: str) -> None:
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        lender = built(there).lender
        assert lender is not None
        terms = lender._socket._terms
        context = zmq.Context()
        stranger = wire.asking(context, address, None)
        sound = wire.Compute(7, Handed([1] * 33, "", None, b"k" * 16, 0, 2))
        stranger.send(wire.pack(sound))  # Nobody has said who asks.
        assert isinstance(wire.to_decode(stranger.recv()), wire.Stranger)
        stranger.send(wire.pack(wire.Hail(terms)))
        welcome = wire.to_decode(stranger.recv())
        assert isinstance(welcome, wire.Welcome)

        def named(tokens: list[int]) -> bytes:
            return PrefixChain(terms.root, terms.block_size, tokens).extend(2)[1]

        for garbage in (b"", b"\xc1", b"\x92" * 1000, wire.pack({"a": 1}), b"\x00" * 9000):
            stranger.send(garbage)
        stranger.send_multipart([b"two", b"frames"])
        refused = [
            Handed([1] * 33, "", None, b"k" * 16, 0, 2),  # another name
            Handed([1] * 31, "", None, b"k" * 16, 0, 2),
            Handed([1] * 33, "", None, b"k" * 16, 2, 2),
            Handed([1] * 33, "", None, b"k" * 16, -1, 2),
            Handed([2**40] * 33, "", None, b"k" * 16, 0, 2),
            Handed([-1] * 33, "", None, b"k" * 16, 0, 2),
            Handed([1] * 33, "", "an adapter", b"k" * 16, 0, 2),
            Handed([1] * 100_000, "", None, b"k" * 16, 0, 6_000),
            Handed([10**6] * 33, "", None, named([10**6] * 33), 0, 2),
        ]
        for ticket, handed in enumerate(refused):
            stranger.send(wire.pack(wire.Compute(ticket, handed)))
            said = wire.to_decode(stranger.recv())
            assert isinstance(said, wire.Declined), handed
        for first in (b"", b"\0" * wire.NUMBER_BYTES, welcome.number[:-1]):  # Nobody's.
            with hung_up(address, first) as line:
                assert line.recv(1) == b""
        for garbage in (b"\xff" * 4, b"\0" * 4 + b"m" * 16, b"\5\0\0\0" + b"x" * 21):
            with hung_up(address, welcome.number) as line:
                assert socket.recv_fds(line, 1, 1)[0] == b"+"
                while line.recv(1 << 16, socket.MSG_DONTWAIT):
                    line.sendall(garbage)
                    break
                with suppress(ConnectionError):
                    while line.recv(1 << 16):
                        pass
        with hung_up(address, welcome.number) as line:
            file = socket.recv_fds(line, 1, 1)[1][0]
            for change in (lambda: os.ftruncate(file, 0), lambda: os.write(file, b"x")):
                with pytest.raises(OSError):
                    change()
            os.close(file)
            end = BlockLine(line, b"", asks=True, seconds=2.0)
            assert wire.to_pool(end.receive(1000)).blocks
            for group, places in ((0, [0]), (0, [-5, 2**40]), (0, [0] * 9000)):
                for copied in (False, True):
                    question = wire.pack(wire.Fetch(3, group, places, copied))
                    end.send(question)
                    assert end.receive(0, question) == b""
            end.send(wire.pack(wire.Fetch(3, 99, [0])))
            with pytest.raises(ConnectionError):
                end.receive(0)
        stranger.send(wire.pack(wire.Release([1, 2, 3, 999])))
        right = Handed([1] * 33, "", None, named([1] * 33), 0, 2)
        for _ in range(2):  # The second of the same number: one is open.
            stranger.send(wire.pack(wire.Compute(50, right)))
        said = [wire.to_decode(stranger.recv()) for _ in range(2)]
        assert {type(one) for one in said} == {wire.Lent, wire.Declined}
        context.destroy(linger=0)
        assert greedy(here, PROMPT)[1] == 64
        nothing_is_held(here, there, seconds=SECONDS + 1.0)


@contextmanager
def hung_up(address: str, first: bytes) -> Iterator[socket.socket]:
    """A line that says so much, of a prefill server that hangs up in time."""
    kind, where = wire.lines_at(address)
    with socket.socket(kind) as line:
        line.settimeout(5.0)
        line.connect(where)
        line.sendall(first)
        if len(first) < wire.NUMBER_BYTES:
            line.shutdown(socket.SHUT_WR)
        yield line


LIES = ["nothing", "no end", "too much", "other bytes", "other names", "half", "not lent"]
POOLS = ["a pool that can be cut", "a pool that is not there", "a pool of no blocks"]


@pytest.mark.parametrize("lie", [*LIES, *POOLS])
def test_a_prefill_server_that_lies_is_not_believed(
    tiny: Path, address: str, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lies are about a prompt, or in the bytes that it sends as its blocks."""
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 0.5)
    with LLM(str(tiny), **OPTIONS) as alone:
        answer = greedy(alone, PROMPT)[0]
    context = zmq.Context()
    sock = wire.listening(context, address, None)
    kind, where = wire.lines_at(address)
    listener = socket.socket(kind)
    listener.bind(where)
    listener.listen()
    listener.settimeout(0.02)
    stop, asked = threading.Event(), []

    def lie_of_prompts() -> None:
        while not stop.is_set():
            if not sock.poll(20):
                continue
            who, said = sock.recv_multipart()
            answers: list[Any] = []
            match wire.to_prefill(said):
                case wire.Hail():
                    answers = [wire.Welcome(b"n" * wire.NUMBER_BYTES, b"", "nobody's")]
                case wire.Renew():
                    answers = [wire.Alive(float("nan"))]
                case wire.Compute(ticket):
                    answers = [wire.Declined(ticket + 1, "x" * 9999)]
                    answers += [wire.Lent(ticket, [(-3, [2**40, -1]), (5, []), (7, [])])]
                    answers += [wire.Lent(ticket, [(0, [1, 2, 3, 4])])]
            for one in answers:
                with suppress(zmq.ZMQError):  # It has hung up.
                    sock.send_multipart([who, wire.pack(one)])

    def lie_of_blocks() -> None:
        file = os.memfd_create("lie", os.MFD_ALLOW_SEALING)
        if lie != "a pool that can be cut":
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        while not stop.is_set():
            with suppress(OSError), listener.accept()[0] as line:
                line.settimeout(2.0)
                assert line.recv(wire.NUMBER_BYTES) == b"n" * wire.NUMBER_BYTES
                socket.send_fds(line, *(([b"+"], [file]) if lie in POOLS else ([b"-"], [])))
                end = BlockLine(line, b"", asks=False, seconds=2.0)
                end.send(wire.pack(wire.PoolThere(0, [0 if "no blocks" in lie else 1 << 20])))
                question = bytes(end.receive(wire.MOST_QUESTION))
                asked.append(wire.to_fetch(question))
                if lie == "no end":
                    while not stop.is_set():
                        line.sendall(b"\1\1\0\0")
                        time.sleep(0.05)
                elif lie != "nothing":
                    content = b"k" * 16 + bytes(4096)
                    about = b"" if lie == "other bytes" else question
                    sizes = {"too much": 1 << 21, "half": 100, "not lent": 0}
                    end.send(bytes(sizes[lie]) if lie in sizes else content, about)
                else:
                    stop.wait(2.0)
        os.close(file)

    threads = [threading.Thread(target=do) for do in (lie_of_prompts, lie_of_blocks)]
    for thread in threads:
        thread.start()
    try:
        with decoding(tiny, address) as here:
            assert greedy(here, PROMPT) == (answer, 0)
            assert counts(here).brought == 1
            assert bool(asked) == (lie in LIES)
            nothing_is_held(here)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        listener.close()
        context.destroy(linger=0)


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
                line.sock.shutdown(socket.SHUT_RDWR)
            return receive(line, *given)

        with decoding(tiny, address) as here:
            monkeypatch.setattr(BlockLine, "receive", gone)
            assert greedy(here, PROMPT)[1] == 0
            until(lambda: counts(here).servers == 1)
            monkeypatch.undo()
            nothing_is_held(here)
        until(lambda: not lines._lines, 5.0)


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ("helper", "must be both"),
        ("prefill", "must be both"),
        ("decode@", "must be both"),
        ("prefill@http://127.0.0.1:1", "neither tcp"),
        ("prefill@tcp://127.0.0.1:x", "neither tcp"),
        ("prefill@tcp://10.0.0.7:5601", "not on this machine"),
        ("decode@tcp://127.0.0.1:1,tcp://127.0.0.1:1", "each once"),
        ("prefill@tcp://127.0.0.1:1,tcp://127.0.0.1:2", "at most 1"),
        ("decode@tcp://10.0.0.7:5601?key=/nowhere/key", "cannot be read"),
        ("decode@tcp://10.0.0.7:5601?seed=1", "not key=FILE"),
    ],
)
def test_roles_that_cannot_be_are_refused(tiny: Path, role: str, why: str) -> None:
    with pytest.raises(OptionError, match=why) as refused:
        LLM(str(tiny), **OPTIONS, role=role)
    assert refused.value.param == "role"


def test_engines_that_cannot_lend_say_why(tiny: Path, address: str) -> None:
    for options, why in (
        ({"prefix_cache": False}, "prefix cache, which is off"),
        ({"executor": "multiproc"}, "in the engine's process"),
    ):
        with pytest.raises(OptionError, match=why):
            LLM(str(tiny), **{**OPTIONS, **options}, role=f"prefill@{address}")


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


def no_utf8(message: Any) -> bytes:
    """A message whose text `#text#` is no UTF-8."""
    return wire.pack(message).replace(b"#text#", b"\xff" * 6)


def test_a_message_that_is_no_message_ends_no_lending(address: str, tiny: Path) -> None:
    handed = Handed(PROMPT, "#text#", None, b"k", 0, 1)
    context = zmq.Context()
    with prefilling(tiny, address):
        stranger = context.socket(zmq.DEALER)
        stranger.connect(address)
        before = THREADS.failures["lending"]
        stranger.send(no_utf8(wire.Compute(1, handed)))
        stranger.send(wire.pack(wire.Renew([])))
        assert stranger.poll(30_000), "it lends no more"
        assert isinstance(wire.to_decode(stranger.recv()), wire.Stranger)
        assert THREADS.failures["lending"] == before + 1
        with decoding(tiny, address) as llm:
            assert greedy(llm, PROMPT)[1] == 64
    context.destroy(linger=0)


def test_a_rogue_ends_no_borrowing_from_another(tmp_path: Path, tiny: Path) -> None:
    good, bad = f"ipc://{tmp_path}/good", f"ipc://{tmp_path}/bad"
    context = zmq.Context()
    rogue = context.socket(zmq.ROUTER)
    rogue.bind(bad)
    before = THREADS.failures["borrowing"]
    with prefilling(tiny, good), decoding(tiny, f"{good},{bad}") as llm:
        assert rogue.poll(30_000), "it was never asked"
        who = rogue.recv_multipart()[0]
        rogue.send_multipart([who, no_utf8(wire.Unlike(["#text#"]))])
        until(lambda: THREADS.failures["borrowing"] == before + 1)
        assert greedy(llm, PROMPT)[1] == 64
        assert counts(llm).servers == counts(llm).brought == 1
    context.destroy(linger=0)


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
