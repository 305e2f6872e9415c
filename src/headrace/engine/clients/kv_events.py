"""Blocks of the prefix cache as they come and go, in the form of vLLM's events over ZeroMQ.

For other projects' routers, which know a prompt by its tokens. The form is that of vLLM's
`kv_events.py` of 2026. A PUB socket sends (topic, number of the batch as eight bytes, batch in
msgpack). A ROUTER socket at the next port repeats the batches from a given number on, and ends with
an empty one numbered -1. Block names are our own 16 bytes; a listener can derive others from the
tokens and the parent.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Any

import msgspec

from ...base.config import EngineOptions
from ...base.errors import OptionError
from ...base.extras import needed
from ...kv.holdings import BlockEvent
from ...obs.threads import THREADS

log = logging.getLogger("headrace.engine")

AGAIN = 10_000
"""Batches that are kept to be sent again."""
WAITING = 100_000
"""Most batches queued for the thread; beyond that a listener sees a gap in the numbers."""
LOOK_SECONDS = 0.1
"""Seconds between checks for listeners that request batches again."""
LAST = (-1).to_bytes(8, "big", signed=True)


class _KvEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_KvEvent):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(_KvEvent):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(_KvEvent):
    pass


class KVEventBatch(msgspec.Struct, omit_defaults=True):
    """The events of one moment; `ts` in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def published(options: EngineOptions) -> KvEvents | None:
    """Return the publisher for the options. Raises `OptionError` and `PackageAbsent`."""
    if options.kv_events is None:
        return None
    return KvEvents(options.kv_events)


class KvEvents:
    """Publisher with a thread of its own, so that no listener holds up the loop."""

    def __init__(self, address: str) -> None:
        """Raises `OptionError` if the address or the next port cannot be bound."""
        zmq = needed("zmq", "events of the KV cache", "events")
        head, _, port = address.rpartition(":")
        if not head.startswith("tcp://") or not port.isdigit() or not 0 < int(port) < 65535:
            raise OptionError(
                f"kv_events must be tcp://HOST:PORT, not {address!r}", param="kv_events"
            )
        self.medium = "GPU"
        """Memory of the blocks: CPU or GPU."""
        self._context = zmq.Context()
        self._events, self._again = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._again.setsockopt(zmq.MAXMSGSIZE, 1024)
        self._again.setsockopt(zmq.SNDHWM, 2 * AGAIN)  # Messages above this are dropped silently.
        try:
            self._events.bind(address)
            self._again.bind(f"{head}:{int(port) + 1}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OptionError(
                f"kv_events: {address} and the port behind it cannot be had: {error}",
                param="kv_events",
            ) from None
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=AGAIN)
        self._waiting: Queue[KVEventBatch | None] = Queue(WAITING)
        self._number = 0
        """Number of the next batch."""
        self._pack = msgspec.msgpack.Encoder().encode
        self._thread = THREADS.keep("kv-events", self._run)

    def tell(self, blocks: Sequence[BlockEvent]) -> None:
        """Publish the events of one turn, in their order."""
        medium = self.medium
        events: list[Any] = []
        for key, tokens, parent in blocks:
            before = events[-1] if events else None
            if not tokens:
                if isinstance(before, BlockRemoved):
                    before.block_hashes.append(key)
                else:
                    events.append(BlockRemoved([key], medium))
            elif isinstance(before, BlockStored) and before.block_hashes[-1] == parent:
                before.block_hashes.append(key)
                before.token_ids += tokens
            else:
                stored = [key], parent, [*tokens], len(tokens)
                events.append(BlockStored(*stored, lora_id=None, medium=medium, lora_name=None))
        if events:
            self._put(events)

    def cleared(self) -> None:
        """Publish that no block is held any more: the engine process is gone."""
        self._put([AllBlocksCleared()])

    def _put(self, events: list[Any]) -> None:
        with suppress(Full):
            self._waiting.put_nowait(KVEventBatch(time.time(), events, 0))

    def close(self) -> None:
        """Publish what waits, within a second, and free the ports."""
        with suppress(Full):
            self._waiting.put_nowait(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            while self._again.poll(0):
                with THREADS.skipping("kv-events"):
                    self._send_again(self._again.recv_multipart())
            try:
                batch = self._waiting.get(timeout=LOOK_SECONDS)
            except Empty:
                continue
            if batch is None:
                break
            with THREADS.skipping("kv-events"):
                # A failed batch is a gap in the numbers, which listeners notice.
                number, self._number = self._number, self._number + 1
                parts = number.to_bytes(8, "big"), self._pack(batch)
                self._kept.append(parts)
                self._events.send_multipart((b"", *parts))
        self._context.destroy(linger=500)

    def _send_again(self, asked: list[bytes]) -> None:
        if len(asked) != 3 or len(asked[2]) != 8:
            log.warning("a request for events again has another form")
            return
        who, _, first = asked
        for number, data in self._kept:
            if number >= first:
                self._again.send_multipart((who, b"", number, data))
        self._again.send_multipart((who, b"", LAST, b""))
