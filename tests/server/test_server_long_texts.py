"""Texts of megabytes: refused before they are encoded where they cannot fit, else one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from server_fake import FakeEngine, FakeTokenizer

from headrace.base.config import ServerOptions
from headrace.base.errors import ContextOverflow
from headrace.server.service import LONG_CHARACTERS, Service


class Watched(FakeTokenizer):
    """Remembers how many texts were being encoded at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now = self.most = self.done = 0

    def encode(self, text: str, **how: Any) -> list[int]:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.05)
        with self.lock:
            self.now -= 1
            self.done += 1
        return [0]


def service(tokenizer: Watched) -> Service:
    engine = FakeEngine()
    engine.tokenizer, engine.max_context = tokenizer, 64
    found = Service(ServerOptions())
    found.open(engine)
    return found


async def test_what_cannot_fit_is_not_encoded() -> None:
    tokenizer = Watched()
    served = service(tokenizer)
    with pytest.raises(ContextOverflow, match="more tokens than the 64") as caught:
        await served.encode("x" * 65, raw=True)
    assert caught.value.param == "prompt"
    assert tokenizer.done == 0
    assert await served.encode("x" * 64, raw=True) == [0]
    assert await served.encode("x" * 65, raw=True, must_fit=False) == [0]


async def test_one_text_of_megabytes_at_a_time() -> None:
    tokenizer = Watched()
    served = service(tokenizer)
    long = "x" * (LONG_CHARACTERS + 1)
    await asyncio.gather(*(served.encode(long, raw=True, must_fit=False) for _ in range(4)))
    assert (tokenizer.done, tokenizer.most) == (4, 1)


async def test_a_long_text_is_encoded_as_far_as_it_may_fit() -> None:
    asked: list[int | None] = []

    class Cutting(FakeTokenizer):
        def fewest(self, text: str) -> int:
            return 0

        def encode(self, text: str, *, most: int | None = None, **how: Any) -> list[int]:
            asked.append(most)
            return [0] * 65

    engine = FakeEngine()
    engine.tokenizer, engine.max_context = Cutting(), 64
    served = Service(ServerOptions())
    served.open(engine)
    with pytest.raises(ContextOverflow, match="more than 64 tokens"):
        await served.encode("x" * 10_000, raw=True)
    assert len(await served.encode("x" * 10_000, raw=True, must_fit=False)) == 65
    assert len(await served.encode("x" * 10_000, raw=True, counts=True)) == 65
    assert asked == [64, None, None]
