"""Clients' view of a fault: every request ends as one of four outcomes, and is counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWERED, REFUSED, HUNG, LOST = "answered", "refused", "hung", "lost"
LIMIT = 60.0
"""Seconds after which an answer that has not ended counts as hung."""
SLICES = 60
"""Parts of a limit: see `awake`."""


@dataclass
class Row:
    """One line of the fault table."""

    kind: str
    """kill, stop, fill, flood, forge or mutate."""
    fault: str
    sent: int = 0
    answered: int = 0
    """Complete answers, as they were asked for."""
    refused: int = 0
    """With a typed error."""
    hung: int = 0
    lost: int = 0
    """Ended without an answer."""
    may_lose: bool = False
    """The documentation promises less than nothing lost: the process that held them was killed."""
    facts: dict[str, float | str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    """Upper bounds of the facts."""

    def count(self, outcomes: Sequence[str]) -> Row:
        counted = Counter(outcomes)
        self.sent += len(outcomes)
        self.answered += counted[ANSWERED]
        self.refused += counted[REFUSED]
        self.hung += counted[HUNG]
        self.lost += counted[LOST]
        return self

    def broken(self, *, timed: bool = True) -> list[str]:
        """The promises that it breaks, in words; `timed`: those in seconds too and their ratios,
        which a machine with other work may break."""
        wrong = [f"{self.hung} hung"] if self.hung else []
        if self.lost and not self.may_lose:
            wrong.append(f"{self.lost} lost")
        for name, most in self.limits.items():
            if name.endswith(("_seconds", "_ratio")) and not timed:
                continue
            value = self.facts.get(name)
            if not isinstance(value, int | float) or value > most:
                wrong.append(f"{name} is {value}, at most {most:g}")
        return wrong


def http(limit: float = LIMIT) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=limit, limits=limits)


@asynccontextmanager
async def awake(seconds: float) -> AsyncIterator[None]:
    """`TimeoutError` after so many seconds in which this process ran. One that was stopped (with
    its server, for another's measurement) has not waited: a part counts once, however long."""
    loop = asyncio.get_running_loop()
    left = SLICES

    def tick() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(seconds / SLICES, tick)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(seconds / SLICES, tick)
        try:
            yield
        finally:
            timer.cancel()


async def outcome(
    client: httpx.AsyncClient,
    url: str,
    body: Any,
    *,
    limit: float = LIMIT,
    on_begin: Callable[[], None] = lambda: None,
) -> str:
    """Send one request and say how it ended."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    text = ""
    try:
        async with awake(limit):
            headers = {"content-type": "application/json"}
            sent = client.stream("POST", url, content=raw, headers=headers, timeout=None)
            async with sent as reply:
                async for part in reply.aiter_text():
                    if not text:
                        on_begin()
                    text += part
                streamed = reply.headers["content-type"].startswith("text/event-stream")
                return ended(reply.status_code, text, streamed=streamed)
    except TimeoutError:
        return HUNG
    except httpx.HTTPError:
        return LOST


def ended(status: int, text: str, *, streamed: bool) -> str:
    if streamed:
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            return LOST
        return REFUSED if any('"error"' in event[:10] for event in events) else ANSWERED
    try:
        value = json.loads(text)
    except ValueError:
        return LOST
    if status == 200:
        return ANSWERED
    return REFUSED if isinstance(value.get("error"), dict) and value["error"].get("type") else LOST


async def all_of(
    url: str,
    bodies: Sequence[Any],
    *,
    limit: float = LIMIT,
    then: Callable[[], Awaitable[None]] | None = None,
) -> list[str]:
    """Outcomes of requests at once; `then` goes on beside them."""
    async with http(limit) as client:
        tasks = [asyncio.create_task(outcome(client, url, body, limit=limit)) for body in bodies]
        if then is not None:
            await then()
        return list(await asyncio.gather(*tasks))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Others:
    """Clients who do nothing wrong: the time of a short answer, asked for all the while."""

    def __init__(self, url: str, body: Any) -> None:
        self._url = url
        self._body = body
        self.seconds: list[float] = []
        self.outcomes: list[str] = []

    @asynccontextmanager
    async def asking(self, pause: float = 0.05) -> AsyncIterator[None]:
        async def ask() -> None:
            async with http() as client:
                while True:
                    begin = time.monotonic()
                    self.outcomes.append(await outcome(client, self._url, self._body))
                    self.seconds.append(time.monotonic() - begin)
                    await asyncio.sleep(pause)

        task = asyncio.create_task(ask())
        try:
            yield
        finally:
            # The answer that is on its way is part of what was measured.
            count = len(self.seconds)
            end = time.monotonic() + LIMIT
            while len(self.seconds) == count and not task.done() and time.monotonic() < end:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
