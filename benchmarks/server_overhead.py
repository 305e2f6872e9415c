"""What the API process costs per streamed token, and how many tokens per second it carries.

    python benchmarks/server_overhead.py [--streams 64] [--tokens 400] [--json FILE]

A real server process (uvicorn, the application, its routes) around an engine that only hands out
ready tokens, one per stream and step, as the real one does after each step. The client is another
process that reads raw bytes. `cpu_us_per_token` is the server's CPU time per token; it does not
depend on how busy the machine is. `tokens_per_second` is what one process carried when steps
came without pause; where its readers fell behind, several tokens share one event
(`tokens_per_event`), as they would in production.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))

from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.request import OutputDelta
from headrace.base.sampling import SamplingParams
from headrace.engine.stream import Stream
from headrace.server.run import ServerProcess


class SteppingEngine(FakeEngine):
    """All streams get one token per step; a step every `interval` seconds."""

    def __init__(self, interval: float) -> None:
        super().__init__()
        self.max_context = 1 << 20
        self._interval = interval
        self._open: dict[str, tuple[Stream, int]] = {}
        self._loop: asyncio.Task[None] | None = None

    def submit(
        self, prompt: Any, sampling: SamplingParams, *, request_id: str = "", **more: Any
    ) -> Stream:
        stream = Stream(request_id, list(prompt), 1, self._forget)
        self._open[request_id] = (stream, sampling.max_tokens or 1)
        if self._loop is None:
            self._loop = asyncio.get_running_loop().create_task(self._steps())
        return stream

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    async def _steps(self) -> None:
        while True:
            for request_id, (stream, left) in list(self._open.items()):
                last = left == 1
                stream.push(
                    OutputDelta(
                        request_id,
                        0,
                        " water",
                        [1],
                        prompt_tokens=len(stream.prompt_ids),
                        finish_reason="length" if last else None,
                    )
                )
                if last:
                    del self._open[request_id]
                else:
                    self._open[request_id] = (stream, left - 1)
            await asyncio.sleep(self._interval)


def serve(interval: float, pipe: Connection) -> None:
    async def start() -> Any:
        return SteppingEngine(interval)

    def announce(line: str) -> None:
        if line.startswith("ready"):
            pipe.send(int(line.split("http://")[1].split()[0].rsplit(":", 1)[1]))

    ServerProcess(start, ServerOptions(port=0), announce).run()


async def read_streams(port: int, streams: int, tokens: int) -> tuple[float, int]:
    """(seconds, events) of all streams at the same time."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        events, tail = 0, b""
        while b"data: [DONE]" not in tail:
            part = await reader.read(1 << 16)
            assert part, "the server closed early"
            events += part.count(b'"content":" water"')
            tail = tail[-16:] + part
        writer.close()
        return events

    begin = time.perf_counter()
    counts = await asyncio.gather(*(one() for _ in range(streams)))
    return time.perf_counter() - begin, sum(counts)


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(interval: float, streams: int, tokens: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(interval, theirs), daemon=True)
    process.start()
    port = ours.recv()
    asyncio.run(read_streams(port, 4, 50))
    assert process.pid is not None
    before = cpu_seconds(process.pid)
    seconds, events = asyncio.run(read_streams(port, streams, tokens))
    used = cpu_seconds(process.pid) - before
    process.terminate()
    process.join()
    total = streams * tokens
    return {
        "interval_ms": interval * 1e3,
        "tokens_per_second": round(total / seconds),
        "cpu_us_per_token": round(used / total * 1e6, 1),
        "tokens_per_event": round(total / max(events, 1), 2),
        "server_cpu_share": round(used / seconds, 2),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--streams", type=int, default=64)
    arguments.add_argument("--tokens", type=int, default=400)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    results = [measure(interval, given.streams, given.tokens) for interval in (0.02, 0.005, 0.0)]
    for result in results:
        print(result)
    if given.json:
        record = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "streams": given.streams,
            "tokens": given.tokens,
            "results": results,
            "client_cpu_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
