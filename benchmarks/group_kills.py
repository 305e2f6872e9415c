"""A rank of a group is killed under streams, behind a router with another server: what is lost.

    python benchmarks/group_kills.py [--model qwen2.5-coder-0.5b --streams 8 --tokens 96] [--stop]

One server has two ranks of one thread (`--layout TP2`), the other is one process of one thread; all
streams come through `headrace route`. In the middle of them a rank is ended by SIGKILL: the other
process's (rank 1), then the engine's own (rank 0), then, with `--stop`, a rank is stopped
(SIGSTOP), which no process can be told of. Without `--model` the model is a random one of two
layers. Each stream's tokens are held against those that the other server gives alone.

`seen_ms`: from the signal to the line of the log that says so, by the line's own time. `pause_s`:
the longest wait of each stream between two events, median and longest. `restart_s`: from the signal
until the group is ready again; `idle`: the same with nothing in work, beside the first start of the
same server, three times. Neighbours are streams that ask the other server itself, from before the
kill until all has ended: their gaps before it, and behind it with what the moved streams add, and
(`migrate` false) without. `beside`: four such streams are all there is, and the group that is
killed had nothing to do: what its start alone disturbs, until it is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "route"))

import httpx
from kill_streams import Told, body, group_of, tell, until
from processes import Running, headrace, running

from tiny import talker

NEIGHBOURS = 4
SPAWN = multiprocessing.get_context("spawn")
ALONE_SECONDS = 1.5
"""How long neighbours are watched before the kill, at least, with all streams in work."""
BESIDE_SECONDS = 5.0
"""The same where the group that is killed has nothing to do."""


def log_ms(server: Running, words: str, since: float) -> float | None:
    """Milliseconds from `since` (Unix time) to the first line with these words, by the line's own
    time: who reads it here is busy with all the streams."""
    for line in list(server.lines):
        if line.startswith("{") and words in line:
            at = datetime.fromisoformat(json.loads(line)["ts"]).timestamp()
            if at >= since - 1e-3:
                return round(1e3 * (at - since), 1)
    return None


async def ask_on(url: str, model: str, tokens: int, over: Any, to: Any) -> None:
    """Streams one after the other until `over`; then the times of their events go to `to`."""
    told: list[Told] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        for turn in itertools.count(1000 * number):
            if over.is_set():
                return
            told.append(Told())
            await tell(client, url, body(model, turn, tokens), told[-1])

    async with httpx.AsyncClient(timeout=600) as client:
        asking = [asyncio.ensure_future(one(client, number)) for number in range(1, NEIGHBOURS + 1)]
        await until(lambda: sum(len(each.came) for each in told) > 10 * NEIGHBOURS)
        to.send("begun")
        await asyncio.gather(*asking)
    to.send([each.came for each in told])


def neighbours(url: str, model: str, tokens: int, over: Any, to: Any) -> None:
    """A process of their own, so that who reads all the other streams is in none of their times."""
    asyncio.run(ask_on(url, model, tokens, over, to))


def gaps(streams: list[list[float]], since: float, before: float) -> list[float]:
    """Milliseconds between two events of a stream that both lie in this time."""
    return [
        1e3 * (b - a)
        for came in streams
        for a, b in itertools.pairwise(came)
        if since <= a and b <= before
    ]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


async def migrations(client: httpx.AsyncClient, url: str) -> int:
    """Streams that have gone on elsewhere, of this gateway."""
    text = (await client.get(url + "/metrics")).text
    found = re.findall(r"^headrace_route_migrations_total{.*} (\S+)$", text, re.M)
    return int(sum(map(float, found)))


async def ready_again(client: httpx.AsyncClient, url: str, since: float) -> float:
    """Seconds from `since` until the server was not ready and is again."""
    was = True
    while True:
        try:
            now = (await client.get(url + "/v1/health/ready")).status_code == 200
        except httpx.HTTPError:
            now = False
        if now and not was:
            return time.perf_counter() - since
        was = was and now
        await asyncio.sleep(0.01)


async def idle_restart(group: Running) -> float:
    """Seconds from the end of a rank until the group is ready again, with nothing in work."""
    async with httpx.AsyncClient(timeout=600) as client:
        os.kill(group_of(group)[1], signal.SIGKILL)
        return await ready_again(client, group.url, time.perf_counter())


async def one_row(
    group: Running, other: Running, gate: Running, model: str, asked: Any, rank: int, how: int
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:
        bodies = [body(model, number, asked.tokens) for number in range(asked.streams)]
        wanted = await asyncio.gather(*(tell(client, other.url, one, Told()) for one in bodies))
        over, (mine, its) = SPAWN.Event(), SPAWN.Pipe()
        near = SPAWN.Process(target=neighbours, args=(other.url, model, asked.tokens, over, its))
        near.start()
        await asyncio.to_thread(mine.recv)  # They have begun.
        found = [Told() for _ in bodies]
        streams = [
            asyncio.ensure_future(tell(client, gate.url, one, told))
            for one, told in zip(bodies, found, strict=True)
        ]
        await until(lambda: all(len(told.parts) > 2 for told in found), 300)
        begun = time.perf_counter()
        await until(
            lambda: (
                time.perf_counter() - begun > ALONE_SECONDS
                or max(len(told.parts) for told in found) > 0.7 * asked.tokens
            ),
            300,
        )
        living = sum(not one.done() for one in streams)
        pids = group_of(group)
        killed, wall = time.perf_counter(), time.time()
        os.kill(pids[rank], how)
        again = asyncio.ensure_future(ready_again(client, group.url, killed))
        await asyncio.gather(*streams)
        ended = time.perf_counter()
        over.set()
        came = await asyncio.to_thread(mine.recv)
        near.join()
        restart = await asyncio.wait_for(again, 300)
        moves = await migrations(client, gate.url)
    before, behind = gaps(came, begun, killed), gaps(came, killed, ended)
    pauses = [max(b - a for a, b in itertools.pairwise(told.came)) for told in found]
    pairs = list(zip(found, wanted, strict=True))
    return {
        "rank": rank,
        "signal": signal.Signals(how).name,
        "streams": asked.streams,
        "living": living,
        "moved": moves,
        "equal": sum(told.answer == one.answer for told, one in pairs),
        "errors": sum(bool(told.error) for told in found),
        "tokens_lost": sum(max(0, len(one.tokens) - len(told.tokens)) for told, one in pairs),
        "tokens_too_many": sum(max(0, len(told.tokens) - len(one.tokens)) for told, one in pairs),
        "seen_ms": log_ms(group, "engine process ", wall),
        "pause_s": [round(f(pauses), 3) for f in (statistics.median, max)],
        "neighbours_p50_ms": [round(statistics.median(x), 2) for x in (before, behind) if x],
        "neighbours_p99_ms": [round(p99(x), 2) for x in (before, behind) if x],
        "neighbours_gaps": [len(before), len(behind)],
        "restart_s": round(restart, 2),
    }


async def one_beside(group: Running, other: Running, model: str, asked: Any) -> dict[str, Any]:
    """What a group that had nothing to do disturbs while it starts again."""
    over, (mine, its) = SPAWN.Event(), SPAWN.Pipe()
    near = SPAWN.Process(target=neighbours, args=(other.url, model, asked.tokens, over, its))
    near.start()
    await asyncio.to_thread(mine.recv)
    begun = time.perf_counter()
    await asyncio.sleep(BESIDE_SECONDS)
    killed, restart = time.perf_counter(), await idle_restart(group)
    over.set()
    came = await asyncio.to_thread(mine.recv)
    near.join()
    both = gaps(came, begun, killed), gaps(came, killed, killed + restart)
    return {
        "neighbours_p50_ms": [round(statistics.median(x), 2) for x in both],
        "neighbours_p99_ms": [round(p99(x), 2) for x in both],
        "neighbours_most_ms": [round(max(x), 2) for x in both],
        "neighbours_gaps": [len(x) for x in both],
        "restart_s": round(restart, 2),
    }


def beside_case(flags: list[str], name: str, asked: Any) -> dict[str, Any]:
    with (
        running(headrace(*flags, "--layout", "TP2", "--threads", "2")) as group,
        running(headrace(*flags, "--threads", "1")) as other,
    ):
        return asyncio.run(one_beside(group, other, name, asked))


def one_case(flags: list[str], name: str, asked: Any, rank: int, how: int, migrate: bool) -> Any:
    """A row with servers of its own: one that has died before waits longer before it starts."""
    flags = [*flags, "--log-format", "json"]
    with (
        running(headrace(*flags, "--layout", "TP2", "--threads", "2")) as group,
        running(headrace(*flags, "--threads", "1")) as other,
    ):
        routing = headrace("route", group.url, other.url, "--port", "0")
        routing += ["--policy", "least-loaded", *([] if migrate else ["--no-migrate"])]
        with running(routing) as gate:
            return asyncio.run(one_row(group, other, gate, name, asked, rank, how))


def idle_case(flags: list[str]) -> dict[str, float]:
    """Seconds of a first start, of the engine's part of it, and of a restart."""
    begin = time.perf_counter()
    with running(headrace(*flags, "--layout", "TP2", "--threads", "2")) as group:
        start = time.perf_counter() - begin
        found = re.search(r"engine_total ([\d.]+)", "\n".join(group.lines))
        assert found is not None
        restart = asyncio.run(idle_restart(group))
    return {"start": round(start, 2), "engine": float(found[1]), "restart": round(restart, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="instead of a random one")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--stop", action="store_true", help="stop a rank, too")
    parser.add_argument("--rows", type=int, default=5, help="of the kills under streams")
    parser.add_argument("--beside", type=int, default=3, help="kills of a group without streams")
    parser.add_argument("--idle", type=int, default=3, help="kills with nothing in work at all")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    kill = signal.SIGKILL
    rows = [(1, kill, True), (0, kill, True), (1, kill, False), (0, kill, False)]
    rows += [(1, signal.SIGSTOP, True)] * asked.stop
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or str(talker.make(Path(folder) / "tiny", hidden=768))
        flags = ["serve", model, "--port", "0", "--max-sequences", "128"]
        flags += [] if asked.model else ["--cache-dir", str(Path(folder) / "cache")]
        found = []
        for rank, how, migrate in rows[: asked.rows]:
            row = one_case(flags, Path(model).name, asked, rank, how, migrate)
            found.append({"migrate": migrate, **row})
            print(json.dumps(found[-1]), flush=True)
        beside = [beside_case(flags, Path(model).name, asked) for _ in range(asked.beside)]
        for row in beside:
            print(json.dumps(row), flush=True)
        idle = [idle_case(flags) for _ in range(asked.idle)]
    report: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "model": asked.model or "random, two layers of 768",
        "rows": found,
        "beside": beside,
        "idle": idle,
    }
    if idle:
        ratio = statistics.median(one["restart"] / one["start"] for one in idle)
        report["restart_over_start"] = round(ratio, 2)
    print(json.dumps({name: value for name, value in report.items() if name != "rows"}))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
