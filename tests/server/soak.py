"""Random traffic for a long time against a real server: is the memory flat, is everything free?

    python tests/server/soak.py --minutes 30 [--clients 16] [--json FILE] [--plot FILE]

A server process with its engine process on a tiny model (random weights, a real tokenizer), and
clients that draw at random: chats, completions, responses and messages, streamed or not, several
choices, demanded forms, clients that leave in the middle, and wrong requests of many kinds; files
and batches, cancelled half-way or not; an operator who resets the cache, puts the engine to sleep
and wakes it. `--pause` makes the traffic slow. Each second the memory of both processes is noted.
It fails (exit 1) where memory grows from the second quarter to the last by more than `--growth`
MiB, an answer has status 500, a block is not free at the end, or a request is still in work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from exposed import metric
from processes import serving

from tiny import talker

WORDS = (
    "water",
    "turbine",
    "carries",
    "work",
    "bridge",
    "list",
    "code",
    "naïve",
    "水",
    "🙂",
    "one",
)
WRONG: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_p": 7}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "raise"}]}),
    ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "water " * 3000}),
    ("/v1/completions", {"prompt": [talker.VOCAB + 1]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": -2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_none"}),
    ("/tokenize", {}),
    ("/v1/nothing", {}),
]


def an_ask(draw: random.Random) -> tuple[str, dict[str, Any]]:
    text = " ".join(draw.choices(WORDS, k=draw.randrange(1, 60)))
    if draw.random() < 0.4:
        text = "The headrace carries water to the turbine. " * 6 + text
    common: dict[str, Any] = {"stream": draw.random() < 0.6}
    tokens = draw.randrange(1, 60)
    messages = [{"role": "user", "content": text}]
    kind = draw.random()
    if kind < 0.45:
        body = {**common, "messages": messages, "max_tokens": tokens, "n": draw.choice([1, 1, 3])}
        if draw.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 3}
        if draw.random() < 0.2:
            body["response_format"] = {"type": "json_object"}
        return "/v1/chat/completions", body
    if kind < 0.75:
        return "/v1/completions", {
            **common,
            "prompt": [text, text[:20]],
            "max_tokens": tokens,
            "temperature": draw.random() * 2,
            "seed": draw.randrange(99),
        }
    if kind < 0.88:
        return "/v1/messages", {**common, "messages": messages, "max_tokens": tokens}
    return "/v1/responses", {**common, "input": text, "max_output_tokens": tokens}


class Soak:
    def __init__(
        self, url: str, boss: str, seconds: float, seed: int, pause: float, least: int = 0
    ) -> None:
        """`boss`: the operator's port; `pause`: mean seconds between two asks of one client;
        `least`: answers that it goes on for, however long they take."""
        self.url = url
        self.boss = boss
        self.pause = pause
        self.least = least
        self.end = time.monotonic() + seconds
        self.draw = random.Random(seed)
        self.answers = 0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end and self.answers >= self.least

    async def client(self, seed: int) -> None:
        draw = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            while not self.over:
                if self.pause:
                    await asyncio.sleep(min(draw.expovariate(1 / self.pause), 10 * self.pause))
                kind = draw.random()
                if kind < 0.004:
                    await self.operate(draw)
                elif kind < 0.03:
                    await self.batch(client, draw)
                elif kind < 0.2:
                    await self.wrong(client, draw)
                elif kind < 0.22:
                    client = await self.silent(client)
                else:
                    await self.ask(client, draw, leaves=kind < 0.45)

    async def operate(self, draw: random.Random) -> None:
        async with httpx.AsyncClient(base_url=self.boss, timeout=60) as boss:
            if draw.random() < 0.5:
                self.note(
                    "/reset_prefix_cache", (await boss.post("/reset_prefix_cache")).status_code
                )
                self.counts["cache reset"] += 1
                return
            mode = draw.choice(["abort", "wait"])
            self.note("/sleep", (await boss.post(f"/sleep?level=1&mode={mode}")).status_code)
            await asyncio.sleep(0.2)
            self.note("/wake_up", (await boss.post("/wake_up")).status_code)
            self.counts["slept"] += 1

    async def batch(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        """A file with a wrong line; its batch to the end, or cancelled; all files deleted."""
        lines = [{"custom_id": "wrong"}]
        for number in range(draw.randrange(1, 8)):
            body = {
                "messages": [{"role": "user", "content": "water"}],
                "max_tokens": draw.randrange(1, 20),
            }
            lines.append(
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": "/v1/chat/completions",
                    "body": body,
                }
            )
        content = "\n".join(map(json.dumps, lines))
        made = await client.post(
            "/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"}
        )
        self.note("/v1/files", made.status_code)
        body = {
            "input_file_id": made.json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "1h",
        }
        batch = (await client.post("/v1/batches", json=body)).json()
        if draw.random() < 0.3:
            await client.post(f"/v1/batches/{batch['id']}/cancel")
        while batch["status"] not in ("completed", "cancelled"):
            await asyncio.sleep(0.3)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
            if batch["status"] in ("failed", "expired"):
                self.faults.append(f"a batch {batch['status']}: {batch['errors']}")
                break
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch[name] is not None:
                self.note(
                    "/v1/files", (await client.delete(f"/v1/files/{batch[name]}")).status_code
                )
        self.counts[f"batch {batch['status']}"] += 1

    async def wrong(self, client: httpx.AsyncClient, draw: random.Random) -> None:
        path, body = draw.choice(WRONG)
        reply = await client.post(path, json=body)
        self.note(path, reply.status_code)
        if not 400 <= reply.status_code < 500 and reply.status_code != 503:
            self.faults.append(f"{path} {json.dumps(body)[:100]} gave {reply.status_code}")
        self.counts["refused"] += 1

    async def silent(self, client: httpx.AsyncClient) -> httpx.AsyncClient:
        host, port = self.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-le")
        await asyncio.sleep(0.01)
        writer.close()
        self.counts["half a head"] += 1
        return client

    async def ask(self, client: httpx.AsyncClient, draw: random.Random, leaves: bool) -> None:
        path, body = an_ask(draw)
        async with client.stream("POST", path, json=body) as reply:
            self.note(path, reply.status_code)
            parts = draw.randrange(1, 6) if leaves else 1 << 30
            data = b""
            async for part in reply.aiter_raw():
                data = data[-4096:] + part
                parts -= 1
                if not parts:
                    self.counts["left"] += 1
                    return
        if b'"aborted"' in data or (b'"error"' in data and b"before it was complete" in data):
            self.counts["ended by a sleep"] += 1
            return
        if reply.status_code == 200 and b'"error":{' in data:
            self.faults.append(f"{path} ended with {data[-300:]!r}")
        self.counts["answered" if reply.status_code == 200 else "not served"] += 1

    def note(self, path: str, status: int) -> None:
        self.answers += 1
        self.counts[f"status {status}"] += 1
        if status == 500:
            self.faults.append(f"{path} gave 500")


def mebibytes(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


async def watch(server: psutil.Process, soak: Soak) -> list[tuple[float, float, float]]:
    """(seconds, MiB of the API process, MiB of the engine process), each second."""
    begin, seen = time.monotonic(), []
    while not soak.over:
        engine = max(server.children(recursive=True), key=mebibytes)
        seen.append((time.monotonic() - begin, mebibytes(server), mebibytes(engine)))
        await asyncio.sleep(1.0)
    return seen


async def drive(url: str, boss: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    soak = Soak(url, boss, given.minutes * 60, given.seed, given.pause, given.least)
    watcher = asyncio.create_task(watch(psutil.Process(pid), soak))
    await asyncio.gather(*(soak.client(given.seed + place) for place in range(given.clients)))
    memory = await watcher
    process = psutil.Process(pid)
    cpu = {
        name: round(sum(one.cpu_times()[:2]), 1)
        for name, one in (("api", process), ("engine", max(process.children(), key=mebibytes)))
    }
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(100):
            text = (await client.get("/metrics")).text
            left = {
                "in work": metric(text, "headrace_http_requests_in_work"),
                "running": metric(text, "vllm:num_requests_running"),
                "waiting": metric(text, "vllm:num_requests_waiting"),
                "blocks used": metric(text, "vllm:kv_cache_usage_perc"),
            }
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
    quarter = len(memory) // 4
    growth = {
        name: round(
            statistics.median(row[column] for row in memory[-quarter:])
            - statistics.median(row[column] for row in memory[quarter : 2 * quarter]),
            2,
        )
        for name, column in (("api", 1), ("engine", 2))
    }
    return {
        "minutes": given.minutes,
        "clients": given.clients,
        "seed": given.seed,
        "pause": given.pause,
        "cpu_seconds": cpu,
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "counts": dict(soak.counts.most_common()),
        "faults": soak.faults[:20],
        "left": left,
        "growth_mib": growth,
        "memory": [[round(value, 2) for value in row] for row in memory],
    }


def plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    minutes = [row[0] / 60 for row in record["memory"]]
    axes.plot(minutes, [row[1] for row in record["memory"]], label="API process")
    axes.plot(minutes, [row[2] for row in record["memory"]], label="engine process")
    axes.set(xlabel="minutes", ylabel="resident memory, MiB", ylim=(0, None))
    asked = sum(n for name, n in record["counts"].items() if name.startswith("status"))
    axes.set_title(f"{asked} exchanges, {record['clients']} clients", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=float, default=30)
    arguments.add_argument("--clients", type=int, default=16)
    arguments.add_argument("--pause", type=float, default=0.0, help="seconds between asks")
    arguments.add_argument("--least", type=int, default=0, help="answers, however long they take")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--growth", type=float, default=16.0, help="MiB that are allowed")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--plot", type=Path)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = talker.make(Path(folder) / "tiny")
        with serving(
            model,
            "--max-sequences 16 --kv-memory 2MiB --log-level error --operator-port 0",
            "--store",
            str(Path(folder) / "store.db"),
            "--files",
            str(Path(folder) / "files"),
        ) as server:
            boss = server.await_line(r"operator: (https?://\S+)").group(1)
            record = asyncio.run(drive(server.url, boss, server.process.pid, given))
    if given.json:
        given.json.write_text(json.dumps(record) + "\n")
    if given.plot:
        plot(record, given.plot)
    print(json.dumps({name: value for name, value in record.items() if name != "memory"}, indent=1))
    grown = max(record["growth_mib"].values()) > given.growth
    return int(bool(record["faults"] or any(record["left"].values()) or grown))


if __name__ == "__main__":
    sys.exit(main())
