"""Step statistics, summed once a second, and only while clients watch.

The engine reports after every step; a chart needs one point a second. The board subscribes at the
first request, keeps the last two minutes, and unsubscribes when no request has come for a while. A
watcher waits for the next point: a slow one misses points and blocks nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ....base.process import Others
from ....base.request import StepStats
from ....obs.life import RequestLife
from ....obs.sketch import quantiles
from ....obs.tasks import TaskWatch

if TYPE_CHECKING:
    from ....engine.clients.face import ServingEngine

SECONDS = 1.0
HISTORY = 120
"""Number of points kept: two minutes."""
LATENCY_SECONDS = 30
"""Seconds over which latency quantiles are computed: shorter windows fluctuate."""
IDLE_SECONDS = 60.0
"""Seconds without a request after which the board leaves the engine."""
MOST_REQUESTS = 50
SHARES = (0.5, 0.9, 0.99)


class Board:
    """Statistics of the models of a server; belongs to their event loop."""

    def __init__(
        self,
        *engines: ServingEngine,
        tasks: TaskWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Subscribe to the engines. `tasks`: the service's watch, which restarts failed tasks;
        None: a new watch."""
        self.points: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self.closed = False
        self._engines = engines
        self._clock = clock
        measured = (getattr(engine, "metrics", None) for engine in engines)
        self._metrics = [one for one in measured if one is not None]
        self._sums = _Sums()
        self._others = Others()
        self._begin = clock()
        self._prefix: tuple[int, int] | None = None
        self._preemptions = 0
        self._sketches: deque[tuple[list[int], list[int]]] = deque(maxlen=LATENCY_SECONDS + 1)
        self._asked = clock()
        self._next: asyncio.Future[dict[str, Any]] = _future()
        self._unsubscribe = [engine.subscribe(self._sums.add) for engine in engines]
        self._snapshot()
        self._task = (tasks or TaskWatch()).keep("statistics", self._run)

    def of(self, engines: Sequence[ServingEngine]) -> bool:
        """Whether the board is open and shows these engines; close a board of other engines."""
        if not self.closed and self._engines != tuple(engines):
            self.close()
        return not self.closed

    async def next(self) -> dict[str, Any]:
        """Wait for the next point. Raises `asyncio.CancelledError` if the board is closed."""
        self._asked = self._clock()
        return await asyncio.shield(self._next)

    def asked(self) -> None:
        """Note a request, so that the board stays."""
        self._asked = self._clock()

    def close(self) -> None:
        """Unsubscribe from the engine; waiting watchers get `CancelledError`."""
        if not self.closed:
            self.closed = True
            for unsubscribe in self._unsubscribe:
                unsubscribe()
            self._task.cancel()
            self._next.cancel()

    async def _run(self) -> None:
        while self._clock() - self._asked < IDLE_SECONDS:
            await asyncio.sleep(SECONDS)
            point = self.point()
            self.points.append(point)
            waited, self._next = self._next, _future()
            waited.set_result(point)
        self.close()

    def point(self) -> dict[str, Any]:
        """Close the current window and return its point."""
        now = self._clock()
        window, self._begin = max(now - self._begin, 1e-6), now
        sums = self._sums
        stats = [engine.stats for engine in self._engines]
        lookups, hits = self._since_prefix(stats)
        preemptions = sum(one.preemptions for one in stats)
        preempted = max(0, preemptions - self._preemptions)
        self._preemptions = preemptions
        first, gaps = self._latencies()
        point = {
            "time": time.time(),
            "seconds": window,
            "running": sum(one.running for one in stats),
            "waiting": sum(one.waiting for one in stats),
            "kv_usage": max(one.kv_usage for one in stats),
            "output_tokens_per_second": sums.sampled / window,
            "prompt_tokens_per_second": sums.prefill / window,
            "steps_per_second": sums.steps / window,
            "batch": sums.entries / sums.steps if sums.steps else 0.0,
            "step_seconds": sums.device / sums.steps if sums.steps else None,
            "busy": min(1.0, sums.device / window),
            "others": self._others.share(),
            "roofline": sums.predicted / sums.compared if sums.compared else None,
            "prefix_lookups": lookups,
            "prefix_hits": hits,
            "preemptions": preempted,
            "time_to_first_token": first,
            "inter_token_latency": gaps,
        }
        sums.clear()
        return point

    def requests(self) -> list[dict[str, Any]]:
        """List the oldest requests in work: ids, ages and counts, no content."""
        in_work: list[tuple[str, RequestLife]] = []
        for engine in self._engines:
            in_work += getattr(engine, "in_work", list)()
        in_work.sort(key=lambda one: one[1].arrival)
        now = time.monotonic()
        return [
            {
                "id": name,
                "age": now - life.arrival,
                "state": "decode" if life.generated else "prefill",
                "prompt_tokens": life.prompt_tokens,
                "cached_tokens": life.cached,
                "generated_tokens": life.generated,
                "max_tokens": life.max_tokens * life.choices or None,
                "choices": life.choices,
            }
            for name, life in in_work[:MOST_REQUESTS]
        ]

    def _since_prefix(self, stats: list[StepStats]) -> tuple[int, int]:
        now = (sum(one.prefix_queries for one in stats), sum(one.prefix_hits for one in stats))
        before = self._prefix or now
        self._prefix = now
        if now[0] < before[0]:
            return now  # The engine was restarted and counts from 0.
        return now[0] - before[0], now[1] - before[1]

    def _snapshot(self) -> None:
        if self._metrics:
            first = zip(*(one.first_tokens.counts for one in self._metrics), strict=True)
            gaps = zip(*(one.token_gaps.counts for one in self._metrics), strict=True)
            self._sketches.append(([*map(sum, first)], [*map(sum, gaps)]))

    def _latencies(self) -> tuple[dict[str, float] | None, dict[str, float] | None]:
        self._snapshot()
        if not self._sketches:
            return None, None
        found = []
        for which in (0, 1):
            values = quantiles(self._sketches[-1][which], self._sketches[0][which], *SHARES)
            found.append(
                {f"p{share * 100:.0f}": value for share, value in zip(SHARES, values, strict=True)}
                if values
                else None
            )
        return found[0], found[1]


class _Sums:
    """Sums over the steps of one window."""

    __slots__ = ("compared", "device", "entries", "predicted", "prefill", "sampled", "steps")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.steps = self.entries = self.prefill = self.sampled = 0
        self.device = self.predicted = self.compared = 0.0

    def add(self, stats: StepStats) -> None:
        self.steps += 1
        self.entries += stats.entries
        self.prefill += stats.prefill_tokens
        self.sampled += stats.sampled_tokens
        self.device += stats.seconds
        if stats.predicted_seconds > 0 and stats.seconds > 0:
            self.predicted += stats.predicted_seconds
            self.compared += stats.seconds


def _future() -> asyncio.Future[dict[str, Any]]:
    return asyncio.get_running_loop().create_future()
