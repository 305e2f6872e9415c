"""Blocks go from pool to pool over a line, out of where they lie and to where they are wanted."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.base.textlibrary import library
from headrace.base.tiers import KEY_BYTES
from headrace.worker import block_line
from headrace.worker.block_line import BlockLine, OtherBytes
from headrace.worker.fetching import Fetching, Wanted
from headrace.worker.places import Places

SIZES = 2048, 6, 130, 300_000
BLOCKS = 40


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    if request.param == "unix":
        here, there = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            here = socket.create_connection(listener.getsockname())
            there = listener.accept()[0]
    with here, there:
        yield here, there


def pool(value: int | None = None) -> tuple[Places, list[np.ndarray]]:
    draws = np.random.default_rng(1)
    arrays = [
        draws.integers(0, 256, (BLOCKS, size), np.uint8)
        if value is None
        else np.full((BLOCKS, size), value, np.uint8)
        for size in SIZES
    ]
    return Places(arrays), arrays


def named(at: int) -> bytes:
    return at.to_bytes(KEY_BYTES, "little")


def lines(
    ends: tuple[socket.socket, socket.socket], key: bytes = b""
) -> tuple[BlockLine, BlockLine]:
    """(asks, answers)"""
    made: list[BlockLine] = []
    first = threading.Thread(
        target=lambda: made.append(BlockLine(ends[1], key, asks=False, seconds=10.0))
    )
    first.start()
    asks = BlockLine(ends[0], key, asks=True, seconds=10.0)
    first.join()
    return asks, made[0]


@pytest.mark.parametrize("without", ["", "library", "asker's library"])
@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_blocks_come_as_they_are(
    ends: tuple[socket.socket, socket.socket],
    key: bytes,
    without: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if without:
        found = library()
        main = threading.current_thread()

        def lacking() -> object:
            return None if without == "library" or threading.current_thread() is main else found

        monkeypatch.setattr(block_line, "library", lacking)
    asks, answers = lines(ends, key)
    source, theirs = pool()
    target, ours = pool(0)
    there = [*range(3, 20), 39, 30, 29, 28, 1]
    here = [*range(10, 32), 3, 2][: len(there)]
    names = b"".join(map(named, range(len(there))))
    sends = threading.Thread(
        target=lambda: answers.send_blocks(source, there, lambda: names, b"a question")
    )
    sends.start()
    assert asks.receive_blocks(target, here, b"a question") == names
    sends.join()
    left = [block for block in range(BLOCKS) if block not in here]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine[here] == other[there]).all()
        assert not mine[left].any()


@pytest.mark.parametrize("wrong", ["question", "names", "fewer"])
def test_where_something_wrong_came_there_are_zeros(
    ends: tuple[socket.socket, socket.socket], wrong: str
) -> None:
    asks, answers = lines(ends)
    source, _ = pool()
    target, ours = pool(1)
    wanted = [Wanted(at, named(at), at + 2, at) for at in range(4)]

    def answer() -> None:
        question = bytes(answers.receive(1 << 16))
        if wrong == "question":
            question += b"another"
        count = 2 if wrong == "fewer" else 4
        names = b"".join(named(at + (wrong == "names" and at > 0)) for at in range(count))
        answers.send_blocks(source, range(count), lambda: names, question)

    thread = threading.Thread(target=answer)
    thread.start()
    fetching, came = Fetching(asks, None), {"question": 0, "names": 1, "fewer": 2}[wrong]
    if came:
        assert fetching.bring(1, 0, wanted, target, lambda: None) == came
    else:
        with pytest.raises(OtherBytes):
            fetching.bring(1, 0, wanted, target, lambda: None)
    thread.join()
    for array in ours:
        assert not array[2 + came : 6].any()
        assert (array[[0, 1, 6, 7]] == 1).all()


def test_memory_of_blocks_is_had_before_they_are_written() -> None:
    file = os.memfd_create("pool")
    os.ftruncate(file, 1 << 20)
    pages = mmap.mmap(file, 1 << 20)
    array = np.frombuffer(pages, np.uint8).reshape(256, 4096)
    array[3] = 7
    Places([array]).populate(range(2, 10), writes=True)
    assert os.lseek(file, 0, os.SEEK_DATA) == 2 * 4096
    assert os.lseek(file, 2 * 4096, os.SEEK_HOLE) == 10 * 4096
    assert (array[3] == 7).all()
    os.close(file)
