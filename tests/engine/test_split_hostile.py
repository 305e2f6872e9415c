"""Strangers, rogues and liars on the sockets of a split: nothing of theirs is believed."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_fakes import OPTIONS
from split_pair import (
    PROMPT,
    built,
    counts,
    decoding,
    greedy,
    loopback,
    nothing_is_held,
    prefilling,
    until,
)

from headrace import LLM
from headrace.base.split import Handed
from headrace.kv import PrefixChain
from headrace.obs.threads import THREADS
from headrace.worker import fetching
from headrace.worker import split_wire as wire
from headrace.worker.block_line import BlockLine

pytestmark = pytest.mark.usefixtures("a_split_pays")


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
        nothing_is_held(here, there)


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
    if lie in ("nothing", "no end"):
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
            if lie in LIES:
                until(lambda: bool(asked))
            assert bool(asked) == (lie in LIES)
            nothing_is_held(here)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        listener.close()
        context.destroy(linger=0)


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
