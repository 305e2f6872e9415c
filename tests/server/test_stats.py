"""`/v1/stats`: one point a second while somebody looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.errors import Overloaded
from headrace.base.request import StepStats
from headrace.obs.metrics import EngineMetrics
from headrace.obs.sketch import BINS, GROWTH, Sketch, quantiles
from headrace.obs.tasks import TaskWatch
from headrace.server.app import Application
from headrace.server.routes.stats import board as board_module
from headrace.server.routes.stats import serve as serve_module
from headrace.server.routes.stats.board import Board


class SteppingEngine(FakeEngine):
    """A fake that reports steps when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[StepStats], None]] = []
        self.metrics = EngineMetrics("fake")

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def step(self, **fields: Any) -> None:
        self.stats = StepStats(**fields)
        for callback in self.callbacks:
            callback(self.stats)


async def test_a_point_sums_up_its_second() -> None:
    engine = SteppingEngine()
    engine.stats = StepStats(prefix_queries=100, prefix_hits=10, preemptions=1)
    now = 100.0
    board = Board(engine, clock=lambda: now)  # type: ignore[arg-type]
    board.point()
    engine.step(entries=2, sampled_tokens=2, prefill_tokens=10, seconds=0.1, predicted_seconds=0.05)
    engine.step(
        entries=4,
        sampled_tokens=4,
        seconds=0.3,
        predicted_seconds=0.15,
        running=4,
        waiting=3,
        kv_usage=0.25,
        prefix_queries=150,
        prefix_hits=50,
        preemptions=3,
    )
    engine.metrics.token_gaps.observe(0.02, 99)
    engine.metrics.token_gaps.observe(0.5)
    now = 102.0
    point = board.point()
    assert point["output_tokens_per_second"] == 3
    assert point["prompt_tokens_per_second"] == 5
    assert point["steps_per_second"] == 1
    assert point["batch"] == 3
    assert point["step_seconds"] == pytest.approx(0.2)
    assert point["busy"] == pytest.approx(0.2)
    assert point["roofline"] == pytest.approx(0.5)
    assert point["others"] is None or 0 <= point["others"] <= 1
    assert (point["running"], point["waiting"], point["kv_usage"]) == (4, 3, 0.25)
    assert (point["prefix_lookups"], point["prefix_hits"], point["preemptions"]) == (50, 40, 2)
    assert point["time_to_first_token"] is None
    assert point["inter_token_latency"]["p50"] == pytest.approx(0.02, rel=GROWTH - 1)
    quiet = board.point()
    assert quiet["output_tokens_per_second"] == 0
    assert quiet["roofline"] is None
    assert quiet["step_seconds"] is None
    board.close()
    assert not engine.callbacks


async def test_an_engine_that_starts_again_counts_from_zero() -> None:
    engine = SteppingEngine()
    engine.stats = StepStats(prefix_queries=100, prefix_hits=60)
    board = Board(engine)  # type: ignore[arg-type]
    board.point()
    engine.step(prefix_queries=10, prefix_hits=4)
    point = board.point()
    assert (point["prefix_lookups"], point["prefix_hits"]) == (10, 4)
    board.close()


async def test_the_board_leaves_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "SECONDS", 0.01)
    engine = SteppingEngine()
    board = Board(engine)  # type: ignore[arg-type]
    await board.next()
    assert engine.callbacks
    monkeypatch.setattr(board_module, "IDLE_SECONDS", 0.05)
    while not board.closed:
        await asyncio.sleep(0.01)
    assert not engine.callbacks


async def test_a_point_that_fails_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "SECONDS", 0.01)
    tasks = TaskWatch()
    board = Board(SteppingEngine(), tasks=tasks)  # type: ignore[arg-type]
    point, failures = board.point, iter([ZeroDivisionError("once")])

    def failing() -> dict[str, Any]:
        for failure in failures:
            raise failure
        return point()

    monkeypatch.setattr(board, "point", failing)
    assert "running" in await board.next()
    assert tasks.failures == {"statistics": 1}
    assert not tasks.down
    board.close()


async def test_requests_are_told_without_their_content() -> None:
    engine = SteppingEngine()
    life = SimpleNamespace(
        arrival=0.0, generated=3, prompt_tokens=7, cached=2, max_tokens=10, choices=3
    )
    engine.in_work = lambda: [("r", life)] * 80  # type: ignore[attr-defined]
    board = Board(engine)  # type: ignore[arg-type]
    told = board.requests()
    assert len(told) == board_module.MOST_REQUESTS
    assert set(told[0]) == {
        "id",
        "age",
        "state",
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "max_tokens",
        "choices",
    }
    assert told[0]["state"] == "decode"
    assert told[0]["max_tokens"] == 30, "of all choices, as what is generated"
    board.close()


async def test_the_snapshot_and_the_stream(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "SECONDS", 0.02)
    first = (await client.get("/v1/stats")).json()
    assert first["server"]["model"] == "fake"
    assert first["server"]["ready"]
    assert first["server"]["decisions"][0]["name"] == "kernels"
    while not (await client.get("/v1/stats")).json()["points"]:
        await asyncio.sleep(0.01)

    watchers = serve_module.watchers(app)
    frames = watchers.events()
    name, data = _event(await anext(frames))
    assert name == "snapshot"
    assert data["points"]
    name, data = _event(await anext(frames))
    assert name == "point"
    assert data["point"]["running"] == 0
    app.state.service.draining = True
    rest = [frame async for frame in frames]
    assert len(rest) <= 1, "a server that drains lets its watchers go"
    watchers.board().close()


async def test_watchers_are_bounded(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "MOST_WATCHERS", 1)
    watchers = serve_module.watchers(app)
    frames = watchers.events()
    await anext(frames)
    with pytest.raises(Overloaded):
        await anext(watchers.events())
    await frames.aclose()
    other = watchers.events()
    await anext(other)
    await other.aclose()
    watchers.board().close()


def test_sketch_quantiles_are_right_to_two_percent() -> None:
    sketch = Sketch()
    before = sketch.counts[:]
    values = [0.001 * 1.003**step for step in range(2000)]
    for value in values:
        sketch.observe(value)
    found = quantiles(sketch.counts, before, 0.5, 0.9, 0.99)
    assert found is not None
    for share, value in zip((0.5, 0.9, 0.99), found, strict=True):
        exact = sorted(values)[int(share * len(values)) - 1]
        assert value == pytest.approx(exact, rel=0.021)
    assert quantiles(sketch.counts, sketch.counts, 0.5) is None
    for wild in (0.0, -1.0, 1e12):
        sketch.observe(wild)
    assert len(sketch.counts) == BINS


def _event(frame: bytes) -> tuple[str, dict[str, Any]]:
    name, data = frame.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))
