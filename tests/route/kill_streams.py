"""Streams through a gateway, each event with its time, and the processes of a group of ranks."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from processes import Running, api_pid


@dataclass
class Told:
    """Output of one stream."""

    parts: list[bytes] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    """Arrival of each part, by `perf_counter`."""
    status: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    ended: bool = False
    """Did the end mark come?"""
    error: str = ""

    @property
    def answer(self) -> tuple[list[int], str, str, bool]:
        return self.tokens, self.text, self.finish, self.ended

    def read(self) -> Told:
        """Make of the parts what they say; nothing of that is done while others are awaited."""
        whole = b"".join(self.parts)
        self.error = "" if self.status == 200 else whole.decode()
        for line in whole.split(b"\n"):
            self.ended = self.ended or line == b"data: [DONE]"
            if not line.startswith(b"data: {"):
                continue
            value = json.loads(line[6:])
            self.error = json.dumps(value["error"]) if "error" in value else self.error
            for choice in value.get("choices", ()):
                self.tokens += choice.get("token_ids") or []
                self.text += choice["text"]
                self.finish = choice["finish_reason"] or self.finish
        return self


def body(model: str, number: int, tokens: int) -> dict[str, Any]:
    """A drawn answer of exactly so many tokens."""
    return {
        "model": model,
        "prompt": f"{number}: a river",
        "seed": number,
        "temperature": 1.0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


async def tell(client: httpx.AsyncClient, url: str, asked: dict[str, Any], told: Told) -> Told:
    """Read one stream into `told`, part by part."""
    async with client.stream("POST", url + "/v1/completions", json=asked) as reply:
        told.status = reply.status_code
        async for part in reply.aiter_raw():
            told.came.append(time.perf_counter())
            told.parts.append(part)
    return told.read()


async def until(condition: Any, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def group_of(server: Running) -> list[int]:
    """The pids of a server's ranks: the engine's process first, which is rank 0."""
    (engine,) = (
        one
        for one in psutil.Process(api_pid(server)).children()
        if "headrace.engine.process" in one.cmdline()
    )
    return [engine.pid, *(one.pid for one in engine.children())]
