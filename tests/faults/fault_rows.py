"""The rows of the fault table: each breaks one thing of a real server and counts what came back.

The server runs a random model of two layers: the service is tried here, not a model.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from attacks import Attacker, asking, formed, heavy_bodies, hostile_bodies
from fault_client import (
    ANSWERED,
    HUNG,
    LIMIT,
    LOST,
    REFUSED,
    Others,
    Row,
    all_of,
    http,
    outcome,
    percentile,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from processes import Running, api_pid, headrace, running

from tiny import talker


@dataclass
class Place:
    """A server and where it lives."""

    server: Running
    model: str
    folder: Path
    runs: int = 1
    """Runs of each attack beside which others are timed; the median is told."""

    @property
    def url(self) -> str:
        return self.server.url + "/v1/completions"

    @property
    def engine(self) -> int:
        return psutil.Process(api_pid(self.server)).children()[0].pid

    def ask(self, tokens: int = 20, *, stream: bool = True, **more: Any) -> dict[str, Any]:
        return asking(self.model, tokens, stream=stream, **more)

    def ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(self.server.url + "/v1/health/ready", timeout=5.0).status_code == 200
        return False

    async def until_ready(self, wanted: bool = True, seconds: float = LIMIT) -> float:
        """Seconds that it took."""
        begin = time.monotonic()
        while await asyncio.to_thread(self.ready) is not wanted:
            if time.monotonic() - begin > seconds:
                return seconds
            await asyncio.sleep(0.02)
        return time.monotonic() - begin

    async def until_generated(self, tokens: int) -> None:
        """So many more tokens have come from the engine."""
        begin, end = None, time.monotonic() + LIMIT
        async with http() as client:
            while time.monotonic() < end:
                text = (await client.get(self.server.url + "/metrics")).text
                lines = [
                    x for x in text.splitlines() if x.startswith("vllm:generation_tokens_total{")
                ]
                now = sum(float(line.split()[-1]) for line in lines)
                begin = now if begin is None else begin
                if now - begin >= tokens:
                    return
                await asyncio.sleep(0.01)
        raise TimeoutError("no tokens came")

    async def until_in_work(self, count: int) -> None:
        """So many requests have reached the API process's engine face, or all that did are done."""
        end, before = time.monotonic() + 3 * LIMIT, 0.0
        async with http() as client:
            while time.monotonic() < end:
                text = (await client.get(self.server.url + "/metrics")).text
                line = next(
                    x for x in text.splitlines() if x.startswith("headrace_http_requests_in_work")
                )
                now = float(line.split()[-1])
                if now >= count or (before > 0 and now == 0):
                    return
                before = now
                await asyncio.sleep(0.05)

    async def serves(self, row: Row) -> Row:
        """Held against the row: afterwards it is ready, answers, and holds nothing."""
        row.facts["ready_again_seconds"] = round(await self.until_ready(), 2)
        after = await all_of(self.url, [self.ask(4, stream=False)])
        row.facts["after"] = after[0]
        if after[0] != ANSWERED:
            row.lost += 1
        return row


@contextmanager
def place(folder: Path, *flags: str, wrap: tuple[str, ...] = (), runs: int = 1) -> Iterator[Place]:
    model = folder / "model"
    if not model.exists():
        talker.make(model)
    command = headrace(
        "serve",
        str(model),
        "--port",
        "0",
        "--threads",
        "1",
        "--kernels",
        "ref",
        "--max-sequences",
        "16",
        "--max-waiting",
        "600",
        *flags,
    )
    with running([*wrap, *command]) as server:
        yield Place(server, model.name, folder, runs)


PREPARED = 4.0
"""Seconds after its start in which a server's parent gets ready for another API process."""
Fault = Callable[[Place], Awaitable[Row]]


async def killed_before_the_first_byte(place: Place) -> Row:
    engine = place.engine
    os.kill(engine, signal.SIGSTOP)  # So nothing can have been sent.

    async def kill() -> None:
        await place.until_in_work(24)
        os.kill(engine, signal.SIGKILL)

    row = Row("kill", "engine, before the first byte of 24 streams")
    row.count(await all_of(place.url, [place.ask()] * 24, then=kill))
    row.facts["not_answered"] = row.sent - row.answered
    row.limits["not_answered"] = 0
    return await place.serves(row)


async def killed_in_the_middle(place: Place) -> Row:
    row = Row("kill", "engine, in the middle of 16 streams")
    begun = asyncio.Semaphore(0)

    async def one(client: httpx.AsyncClient) -> str:
        return await outcome(client, place.url, place.ask(450), on_begin=begun.release)

    async with http() as client:
        tasks = [asyncio.create_task(one(client)) for _ in range(16)]
        for _ in range(16):
            await asyncio.wait_for(begun.acquire(), LIMIT)
        os.kill(place.engine, signal.SIGKILL)
        row.count(await asyncio.gather(*tasks))
    return await place.serves(row)


async def killed_in_whole_answers(place: Place) -> Row:
    """One request of every interface that is not streamed, two of them sampled: nobody has seen
    anything of their answers yet."""
    row = Row("kill", "engine, in the middle of six answers that are not streamed")
    said = [{"role": "user", "content": "The headrace"}]
    common = {"model": place.model, "stream": False}
    long = {"max_tokens": 450, "ignore_eos": True}
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "The headrace", "temperature": 0, **long}),
        ("/v1/completions", {"prompt": ["The", "headrace"], "temperature": 1, "n": 2, **long}),
        ("/v1/chat/completions", {"messages": said, "temperature": 1, **long}),
        ("/v1/messages", {"messages": said, "max_tokens": 450}),
        ("/v1/responses", {"input": "The headrace", "max_output_tokens": 450}),
        ("/api/chat", {"messages": said, "options": {"num_predict": 450}}),
    ]
    async with http() as client:
        tasks = [
            asyncio.create_task(outcome(client, place.server.url + path, common | body))
            for path, body in asks
        ]
        await place.until_generated(50)
        os.kill(place.engine, signal.SIGKILL)
        row.count(await asyncio.gather(*tasks))
    row.facts["not_answered"] = row.sent - row.answered
    row.limits["not_answered"] = 0
    return await place.serves(row)


async def api_killed(place: Place) -> Row:
    row = Row("kill", "API process, under 8 streams", may_lose=True)
    row.limits["port_answers_seconds"] = 1.0
    await asyncio.sleep(PREPARED)

    async def kill() -> None:
        await place.until_in_work(8)
        os.kill(api_pid(place.server), signal.SIGKILL)
        begin = time.monotonic()
        async with http() as client:
            reply = await client.get(place.server.url + "/v1/health/live")
        row.facts["port_answers_seconds"] = round(time.monotonic() - begin, 2)
        row.facts["status"] = str(reply.status_code)

    row.count(await all_of(place.url, [place.ask(450)] * 8, then=kill))
    return await place.serves(row)


async def stopped_for_a_while(place: Place) -> Row:
    row = Row("stop", "engine for 6 s, under 8 streams")
    row.limits["unready_after_seconds"] = 3.5  # The bound of a step of this model is nothing.

    async def stop() -> None:
        await place.until_in_work(8)
        engine = place.engine
        os.kill(engine, signal.SIGSTOP)
        row.facts["unready_after_seconds"] = round(await place.until_ready(False, 20), 2)
        await asyncio.sleep(max(0.0, 6 - float(row.facts["unready_after_seconds"])))
        os.kill(engine, signal.SIGCONT)

    row.count(await all_of(place.url, [place.ask(450)] * 8, then=stop))
    return await place.serves(row)


async def folder_gone(place: Place) -> Row:
    row = Row("fill", "the folder of the sockets is removed, the engine killed")
    engine = psutil.Process(place.engine)
    folder = Path(engine.cmdline()[4])
    assert folder.name.startswith("headrace-"), folder
    shutil.rmtree(folder)
    engine.kill()
    await place.until_ready(False, 5)
    return (await place.serves(row)).count([str(row.facts["after"])])


async def no_processes(place: Place) -> Row | None:
    """None where no control group can be made."""
    row = Row("fill", "process table full for 5 s, the engine killed")
    group = Path("/sys/fs/cgroup/pids") / f"headrace-faults-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        return None
    api = api_pid(place.server)
    try:
        (group / "cgroup.procs").write_text(str(api))
        (group / "pids.max").write_text((group / "pids.current").read_text())
        os.kill(place.engine, signal.SIGKILL)
        await asyncio.sleep(5)
        row.count(await all_of(place.url, [place.ask(4)] * 4))
        (group / "pids.max").write_text("max")
        await place.serves(row)
    finally:
        (group / "pids.max").write_text("max")
        Path("/sys/fs/cgroup/pids/cgroup.procs").write_text(str(api))
        with suppress(OSError, psutil.Error):
            for child in psutil.Process(api).children():
                Path("/sys/fs/cgroup/pids/cgroup.procs").write_text(str(child.pid))
        with suppress(OSError):
            group.rmdir()
    return row


async def burst(place: Place, count: int = 2000) -> Row:
    row = Row("flood", f"{count:,} requests at once")
    bodies = [place.ask(2, stream=bool(place_ % 2)) for place_ in range(count)]
    row.count(await all_of(place.url, bodies, limit=120))
    return await place.serves(row)


async def beside(
    place: Place, row: Row, attack: str, *, quiet: float = 3.0, behind: float = 0.0
) -> Row:
    """Others' answers without and with an attack, whose sender is another process. `behind`:
    seconds after its end in which what it left behind is still worked on."""
    ratios, bases, worsts = [], [], []
    await all_of(place.url, [place.ask(4, stream=False)])  # What the first one pays.
    for _ in range(place.runs):
        attacker = await Attacker.start(attack, place.url, place.model)
        before, during = (Others(place.url, place.ask(4, stream=False)) for _ in range(2))
        async with before.asking():
            await asyncio.sleep(quiet)
        async with during.asking():
            row.count(await attacker.go())
            await asyncio.sleep(behind)
        row.count(during.outcomes)
        bases.append(percentile(before.seconds, 0.99))
        worsts.append(percentile(during.seconds, 0.99))
        ratios.append(worsts[-1] / max(bases[-1], 1e-9))
    row.facts["p99_before_seconds"] = round(median(bases), 3)
    row.facts["p99_seconds"] = round(median(worsts), 3)
    row.facts["p99_ratio"] = round(median(ratios), 2)
    row.limits["p99_ratio"] = 2.0
    return await place.serves(row)


async def idle_connections(place: Place) -> Row:
    row = Row("flood", "700 connections, silent or a byte at a time: others")
    return await beside(place, row, "idle_connections")


async def abandoned_schemas(place: Place) -> Row:
    row = Row("forge", "a small new schema beside eight abandoned huge ones")
    row.limits["small_seconds"] = 1.0
    await all_of(place.url, [formed(place.model, {"type": "boolean"})])  # The tokenizer's tables.
    attacker = await Attacker.start("abandoned_schemas", place.url, place.model)
    await attacker.go()
    begin = time.monotonic()
    new = {"enum": ["yes", f"no {random.random()}"]}
    row.count(await all_of(place.url, [formed(place.model, new)]))
    row.facts["small_seconds"] = round(time.monotonic() - begin, 2)
    return await place.serves(row)


async def forged_bodies(place: Place) -> Row:
    return await beside(
        place, Row("forge", "hostile bodies, four at once: others"), "forged_bodies"
    )


async def schemas(place: Place) -> Row:
    row = Row("forge", "eight abandoned huge schemas: others")
    return await beside(place, row, "abandoned_schemas", behind=4.0)


async def dear_bodies(place: Place) -> Row:
    row = Row("forge", "the dearest bodies below the bounds, one after the other: others")
    return await beside(place, row, "heavy")


FIXED = 32.0
"""MiB that one request may take beside four times its body (ADR 0052)."""


async def memory_of_a_body(place: Place) -> Row:
    """Measure the API process's growth for the dearest bodies, one after the other."""
    bodies = [hostile_bodies(place.model)[1], *heavy_bodies(place.model)]
    row = Row("forge", "the dearest bodies, one at a time: memory beside four times the body")
    process = psutil.Process(api_pid(place.server))
    most = 0.0
    for body in bodies:
        most = max(most, await _grown(place, process, body, row) - 4 * len(body) / 2**20)
    row.facts["memory_beside_mib"] = round(most, 1)
    row.limits["memory_beside_mib"] = FIXED
    return await place.serves(row)


async def _grown(place: Place, process: psutil.Process, body: bytes, row: Row) -> float:
    """MiB, at the highest."""
    before = peak = process.memory_info().rss
    url = place.url
    if b'"messages"' in body:
        url = url.replace("/completions", "/chat/completions")
    asked = asyncio.create_task(all_of(url, [body]))
    while not asked.done():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(0.002)
    row.count(asked.result())
    return (peak - before) / 2**20


QUICK: dict[str, Fault] = {
    "killed_before_the_first_byte": killed_before_the_first_byte,
    "killed_in_the_middle": killed_in_the_middle,
    "killed_in_whole_answers": killed_in_whole_answers,
    "api_killed": api_killed,
    "stopped_for_a_while": stopped_for_a_while,
    "folder_gone": folder_gone,
    "no_processes": no_processes,  # type: ignore[dict-item]
    "abandoned_schemas": abandoned_schemas,
    "forged_bodies": forged_bodies,
}
"""Faults that CI tries too."""
SLOW: dict[str, Fault] = {
    "burst": burst,
    "idle_connections": idle_connections,
    "schemas": schemas,
    "dear_bodies": dear_bodies,
    "memory_of_a_body": memory_of_a_body,
}


__all__ = ["ANSWERED", "HUNG", "LOST", "QUICK", "REFUSED", "SLOW", "Place", "Row", "place"]
