from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.base.errors import OptionError
from headrace.base.foreign import Undecodable
from headrace.dist.channel import AsyncChannel, Channel, PeerGone, PrivateFolder, address

pytestmark = pytest.mark.timeout(400)


class Number(msgspec.Struct, tag=True):
    value: int


class Blob(msgspec.Struct, tag=True):
    data: bytes


Message = Number | Blob


@pytest.fixture
def folder() -> Iterator[Path]:
    made = PrivateFolder()
    yield made.path
    made.close()
    assert not made.path.exists()


def test_the_folder_is_private(folder: Path) -> None:
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_folders_of_the_dead_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, dead, young = PrivateFolder(), PrivateFolder(), PrivateFolder()
    for folder in (dead, young):
        os.close(folder._lock)  # As the end of its owner does.
    foreign = tmp_path / "headrace-notes"
    foreign.mkdir()
    for path in (living.path, dead.path, foreign):
        os.utime(path, (1, 1))
    PrivateFolder().close()
    assert living.path.exists()
    assert not dead.path.exists()
    assert young.path.exists()
    assert foreign.exists(), "without a lock it is not ours"
    living.close()


def test_messages_arrive_in_order_both_ways(folder: Path) -> None:
    parent = Channel(address(folder, "c"), Message, bind=True)
    child = Channel(address(folder, "c"), Message, bind=False)
    try:
        child.send(Number(-1))
        assert parent.receive_one(120.0) == Number(-1)
        for value in range(5000):
            parent.send(Number(value))
        # More than the system holds for a reader: the rest leaves whenever its sender looks.
        got: list[Message] = []
        while len(got) < 5000 and (some := child.receive(120.0)):
            got += some
            assert parent.receive(0.0) == []
        assert got == [Number(value) for value in range(5000)]
        child.send(Blob(b"x" * 5_000_000))
        child.send(Number(7))
        large: list[Message] = []
        for _ in range(1000):
            large += parent.receive(0.0)
            assert child.receive(0.0) == []
            if len(large) == 2:
                break
        assert large == [Blob(b"x" * 5_000_000), Number(7)]
        assert parent.receive(0.0) == []
        began = time.monotonic()
        assert parent.receive(0.05) == []
        assert time.monotonic() - began >= 0.04
    finally:
        child.close()
        parent.close()


def test_a_folder_of_any_length_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    parent = Channel(address(deep, "end"), Message, bind=True)
    child = Channel(address(deep, "end"), Message, bind=False)
    child.send(Number(7))
    assert parent.receive_one(120.0) == Number(7)
    child.close()
    parent.close()
    monkeypatch.setattr("headrace.dist.channel.os.path.isdir", lambda path: False)
    # No socket is made for it, which nobody would close.
    monkeypatch.setattr("headrace.dist.channel.socket.socket", None)
    with pytest.raises(OptionError, match="TMPDIR"):
        Channel(address(deep, "other"), Message, bind=True)


def test_nobody_there_is_an_error_and_not_a_wait(folder: Path) -> None:
    parent = Channel(address(folder, "c"), Message, bind=True)
    with pytest.raises(PeerGone):
        parent.send(Number(1))
    parent.close()
    parent.close()
    with pytest.raises(PeerGone):
        parent.send(Number(1))


def test_a_watched_descriptor_wakes(folder: Path) -> None:
    parent = Channel(address(folder, "c"), Message, bind=True)
    reader, writer = os.pipe()
    parent.watch(reader)
    threading.Timer(0.1, lambda: os.write(writer, b"x")).start()
    began = time.monotonic()
    assert parent.receive_one(300.0) is None
    assert time.monotonic() - began < 200.0, "it waited for its limit"
    parent.close()
    os.close(reader)
    os.close(writer)


def test_what_is_no_message_is_refused(folder: Path) -> None:
    parent = Channel(address(folder, "c"), Number, bind=True)
    child = Channel(address(folder, "c"), Message, bind=False)
    child.send(Blob(b"x"))
    with pytest.raises(Undecodable):
        parent.receive_one(120.0)
    child.close()
    parent.close()


def test_what_a_peer_said_last_is_heard_after_its_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dist.channel._LINGER_SECONDS", 120.0)  # It waits for our reading.
    parent = Channel(address(folder, "c"), Message, bind=True)
    child = Channel(address(folder, "c"), Message, bind=False)
    child.send(Number(1))
    child.send(Blob(b"y" * 300_000))
    closing = threading.Thread(target=child.close)
    closing.start()
    got: list[Message] = []
    while len(got) < 2 and (some := parent.receive(120.0)):
        got += some
    assert got == [Number(1), Blob(b"y" * 300_000)]
    closing.join()
    assert parent.receive(0.05) == []
    with pytest.raises(PeerGone):
        parent.send(Number(2))
    parent.close()


def test_a_peer_that_reads_nothing_makes_nobody_wait(folder: Path) -> None:
    parent = Channel(address(folder, "c"), Message, bind=True)
    child = Channel(address(folder, "c"), Message, bind=False)
    child.send(Number(0))
    assert parent.receive_one(120.0) == Number(0)
    for _ in range(50):
        parent.send(Blob(b"z" * 100_000))
    got: list[Message] = []
    while len(got) < 50:
        got += child.receive(0.0)
        parent.receive(0.0)
    assert set(map(type, got)) == {Blob}
    child.close()
    parent.close()


def test_an_event_loop_sends_more_than_the_system_holds(folder: Path) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        parent = AsyncChannel(
            address(folder, "c"), Message, on_message=lambda _: heard.set(), loop=loop
        )
        child = Channel(address(folder, "c"), Message, bind=False)
        child.send(Number(1))
        await asyncio.wait_for(heard.wait(), 120)
        parent.send(Blob(b"q" * 3_000_000))
        parent.send(Number(2))
        first = await asyncio.to_thread(child.receive_one, 120.0)
        second = await asyncio.to_thread(child.receive_one, 120.0)
        assert (first, second) == (Blob(b"q" * 3_000_000), Number(2))
        child.close()
        parent.close()

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["asyncio", "uvloop"])
def test_the_event_loop_misses_nothing(folder: Path, policy: str) -> None:
    """Sending and receiving at once, in bursts: no message is lost, and none waits for another."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        got: list[int] = []
        done = asyncio.Event()

        def on_message(message: Message) -> None:
            assert isinstance(message, Number)
            got.append(message.value)
            if len(got) == 3000:
                done.set()

        parent = AsyncChannel(address(folder, "c"), Message, on_message=on_message, loop=loop)

        def echo() -> None:
            child = Channel(address(folder, "c"), Message, bind=False)
            child.send(Number(-1))
            left = 2999
            while left:
                for message in child.receive(120.0):
                    child.send(message)
                    left -= 1
            child.close()

        thread = threading.Thread(target=echo)
        thread.start()
        while not got:
            await asyncio.sleep(0.001)
        for value in range(2999):
            parent.send(Number(value))
            if value % 97 == 0:
                await asyncio.sleep(0)
        await asyncio.wait_for(done.wait(), 120)
        assert got == [-1, *range(2999)]
        await asyncio.to_thread(thread.join)
        parent.close()

    if policy == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    else:
        asyncio.run(run())
