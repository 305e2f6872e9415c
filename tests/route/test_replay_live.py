"""Decisions of a live gateway, repeated by the simulator: the same requests, the same times, the
same policy, and so the same servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx
import pytest
from route_servers import Mock, gateway, mocks, on_the_loop_of_servers
from test_route_holdings import event, until

from headrace.engine.simulator.routing import Place, Prompted
from headrace.engine.simulator.sim import Cluster
from headrace.engine.simulator.sim_replica import GRAIN, ReplicaSpec, SimRequest
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES, Loop
from headrace.roofline.known import known
from headrace.roofline.weights import WeightBytes

pytestmark = pytest.mark.slow
SERVERS, EVENTS, MOST_OPEN = 3, 120, 14
STEP, SLOT = 2.0, 16.0
"""Seconds of a simulated step, which is nearly all loop, and between two events of a trace: what
steps differ by never moves an end past the next event."""


class Turns(asyncio.Event):
    """Holds each stream of a server until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[asyncio.Event] = []

    async def wait(self) -> bool:  # type: ignore[override]
        self.open.append(asyncio.Event())
        return await self.open[-1].wait()


@dataclass
class Seen:
    """One request of a live trace; times in events of the trace."""

    names: list[int]
    server: int
    begin: int
    end: int = 0


@dataclass(slots=True)
class Recorded(SimRequest):
    """With the names of its beginnings that the live router saw."""

    names: list[int] = field(default_factory=list)

    @property
    def prefixes(self) -> list[int]:
        return self.names


async def play(policy: str, *, tells: bool, seed: int) -> list[Seen]:
    """A gateway before mock servers, one event after the other: a request comes, or one ends."""
    chances, turns = random.Random(seed), [Turns() for _ in range(SERVERS)]
    servers = [Mock(gate=one, tells=asyncio.Queue() if tells else None) for one in turns]
    trace: list[Seen] = []
    open_: list[tuple[Seen, asyncio.Event, asyncio.Task[httpx.Response]]] = []
    client = httpx.AsyncClient(timeout=60)
    async with client, mocks(*servers) as urls, gateway(urls, policy) as (url, app):
        choose, now = app._router.choose, 0

        def noted(request: Prompted, replicas: Sequence[Place]) -> Place:
            chosen = choose(request, replicas)
            trace.append(Seen(list(request.prefixes), chosen.number, now))
            return chosen

        app._router.choose = noted  # type: ignore[method-assign]
        for now in range(EVENTS):
            if not open_ or (len(open_) < MOST_OPEN and chances.random() < 0.6):
                family = min(chances.randrange(8), chances.randrange(8))
                text = f"family {family} " * 40 * chances.randrange(1, 8)
                asked = {"messages": [{"role": "user", "content": text}], "stream": True}
                held = [len(one.open) for one in turns]
                task = asyncio.ensure_future(client.post(url + "/v1/chat/completions", json=asked))
                await until(lambda held=held: [len(one.open) for one in turns] != held)  # type: ignore[misc]
                server = trace[-1].server
                open_.append((trace[-1], turns[server].open[-1], task))
                if (queue := servers[server].tells) is not None:
                    queue.put_nowait(event(trace[-1].names))
                    await until(
                        lambda seen=trace[-1]: all(  # type: ignore[misc]
                            seen.server in app._router._holders(name)  # type: ignore[attr-defined]
                            for name in seen.names
                        )
                    )
            else:
                seen, gate, task = open_.pop(chances.randrange(len(open_)))
                gate.set()
                assert (await task).status_code == 200
                await until(
                    lambda: sum(one.outstanding for one in app.replicas) == len(open_)  # type: ignore[misc]
                )
                seen.end = now
        for seen, gate, task in open_:
            gate.set()
            await task
            seen.end = EVENTS
    return trace


def replayed(trace: Sequence[Seen], policy: str, *, tells: bool) -> list[int]:
    """The servers that a simulated cluster gives them."""
    case = Case(known("llama-3.1-8b")[0], WeightBytes("fp8"))
    hardware = replace(DEVICES["H200"], loop=Loop(0.0, STEP, 0.0, 0.0))
    spec = ReplicaSpec(case, hardware, rows=64, max_context=8192, kv_tokens=1 << 17)
    cluster = Cluster(spec, SERVERS, policy, told_after=0.1 if tells else None)
    requests = []
    for number, seen in enumerate(trace):
        prompt = [2 + name % 100_000 for name in seen.names for _ in range(GRAIN)] + [number]
        tokens = round((seen.end - seen.begin - 0.5) * SLOT / STEP)
        one = Recorded(str(number), prompt, tokens, names=seen.names)
        requests.append((seen.begin * SLOT, one))
    answers = {int(one.request.id): one for one in cluster.run(requests)}
    for number, seen in enumerate(trace):
        assert (seen.end - 1) * SLOT < answers[number].end < seen.end * SLOT
    return [answers[number].replica for number in range(len(trace))]


@pytest.mark.parametrize(
    ("policy", "tells"),
    [("round-robin", False), ("least-loaded", False), ("prefix", False), ("prefix", True)],
)
@on_the_loop_of_servers
async def test_the_simulator_decides_as_the_live_gateway_did(policy: str, tells: bool) -> None:
    trace = await play(policy, tells=tells, seed=1)
    assert len(trace) > EVENTS / 3
    lived = [seen.server for seen in trace]
    assert replayed(trace, policy, tells=tells) == lived
    for other in {"round-robin", "least-loaded", "prefix"} - {policy}:
        assert replayed(trace, other, tells=False) != lived, "they could have differed"
