"""Events of the prefix cache as a router of others reads them: a real subscriber, a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_waits import until

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.kv_events import KvEvents
from headrace.kv.holdings import BlockEvent
from ports import two_ports
from tiny import talker
from tiny.kept import Kept

BLOCK = 16


def address() -> str:
    return f"tcp://127.0.0.1:{two_ports()}"


class Listener:
    """A subscriber's knowledge, from the events alone."""

    def __init__(self, where: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(where)
        self.numbers: list[int] = []
        self.tokens: dict[bytes, list[int]] = {}

    def known(self, first: int) -> list[list[int]]:
        """Take what has come; return the prefixes that begin with this token."""
        while self.socket.poll(0):
            topic, number, data = self.socket.recv_multipart()
            assert topic == b""
            self.numbers.append(int.from_bytes(number, "big"))
            self.apply(data)
        return [one for one in self.tokens.values() if one[0] == first]

    def apply(self, data: bytes) -> None:
        batch: dict[str, Any] = msgspec.msgpack.decode(data)
        assert batch["ts"] > 1.7e9
        for event in batch["events"]:
            match event["type"]:
                case "BlockStored":
                    names, ids = event["block_hashes"], event["token_ids"]
                    assert event["block_size"] * len(names) == len(ids)
                    assert event["medium"] == "CPU"
                    assert {"parent_block_hash", "lora_id", "lora_name"} <= event.keys()
                    before = event["parent_block_hash"]
                    prefix = [] if before is None else self.tokens[before]
                    for place, name in enumerate(names):
                        prefix = prefix + ids[place * BLOCK : (place + 1) * BLOCK]
                        self.tokens[name] = prefix
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        self.tokens.pop(name, None)  # What was there before it listened.
                case "AllBlocksCleared":
                    self.tokens.clear()
                case other:
                    raise AssertionError(other)


@pytest.mark.slow
def test_a_subscriber_learns_the_tokens_of_what_is_cached(kept: Kept) -> None:
    where = address()
    ids = [7 + n % 90 for n in range(100)]

    async def run() -> None:
        options = EngineOptions(model=str(kept(talker.make)), threads=1, kv_events=where)
        async with await AsyncEngine.start(options) as engine:
            listener = Listener(where)
            sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            other = 300
            while not listener.known(other):  # A subscription takes a moment.
                other += 1
                await engine.generate([other] * 40, sampling)
                await asyncio.sleep(0.05)
            await engine.generate(ids, sampling)
            wanted = [ids[: (n + 1) * BLOCK] for n in range(len(ids) // BLOCK)]
            await until(lambda: len(listener.known(ids[0])) >= len(wanted), "blocks are stored")
            assert listener.known(ids[0]) == wanted
            assert listener.numbers == [*range(listener.numbers[0], listener.numbers[-1] + 1)]
            await engine.operations.reset_prefix_cache()
            await until(lambda: not listener.known(ids[0]), "all blocks are cleared")
            listener.context.destroy(linger=0)

    asyncio.run(run())


def test_batches_can_be_had_again_from_any_number() -> None:
    where = address()
    events = KvEvents(where)
    events.medium = "CPU"
    blocks = [BlockEvent(bytes([n]), [n] * BLOCK, bytes([n - 1]) if n else None) for n in range(9)]
    for block in blocks[:6]:
        events.tell([block])
    events.tell(blocks[6:])
    events.tell([BlockEvent(bytes([1]), []), BlockEvent(bytes([2]), [])])
    events.cleared()
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    head, _, port = where.rpartition(":")
    asking.connect(f"{head}:{int(port) + 1}")
    listener = Listener(where)
    try:
        for first, behind in ((0, 9), (5, 9), (9, 9), (50, 9)):
            batches: list[tuple[int, bytes]] = []
            while not batches or batches[-1][0] != -1:
                if not batches:
                    asking.send_multipart((b"", first.to_bytes(8, "big")))
                assert asking.poll(60_000)
                _, number, data = asking.recv_multipart()
                batches.append((int.from_bytes(number, "big", signed=True), data))
                if batches[-1][0] == -1 and first == 0 and len(batches) < 10:
                    batches.clear()  # The publisher's thread was behind.
            assert [number for number, _ in batches] == [*range(first, behind), -1]
            if first == 0:
                for _, data in batches[:7]:
                    listener.apply(data)
                assert listener.tokens[bytes([8])] == [n for n in range(9) for _ in range(BLOCK)]
                listener.apply(batches[7][1])
                assert listener.tokens.keys() == {bytes([n]) for n in (0, *range(3, 9))}
                listener.apply(batches[8][1])
                assert not listener.tokens
        asking.send_multipart((b"", b"what"))
        asking.send_multipart((b"",))
        asking.send_multipart((b"", (9).to_bytes(8, "big")))
        assert asking.poll(60_000)
        assert asking.recv_multipart()[1] == (-1).to_bytes(8, "big", signed=True)
    finally:
        events.close()
        context.destroy(linger=0)
        listener.context.destroy(linger=0)


@pytest.mark.parametrize(
    "wrong", ["5557", "tcp://127.0.0.1", "tcp://nowhere.invalid:5557", "ipc://x"]
)
def test_an_address_that_cannot_be_had_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kv_events"):
        KvEvents(wrong)
