"""How much of the engine's speed arrives at a client: served and in one process, in turns.

Run: `python benchmarks/served.py [--streams 1 32] [--tokens 128] [--rounds 5] [--json FILE]`.

One `LLM` in this process and one `headrace serve` beside it decode the same prompts, greedily, one
after the other in each round: whoever does not decode sleeps. A stream's rate is its tokens but the
first over the time from its first to its last, as its reader sees them; a round's is the sum over
its streams. The client is a plain socket that only looks for the ends of events, so that next to
nothing of what is lost is the client's own. `--against PYTHON` names the Python of another
installation of Headrace; its server is measured in the same rounds.

The ratio of each round is what counts: on shared cores both rates move together. How often the
threads of the server's processes were switched, per token, is counted beside it; that number does
not depend on what else the machine does as much.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.base.request import OutputDelta

TOPICS = (
    "rivers",
    "bread",
    "sorting",
    "bridges",
    "chess",
    "rain",
    "compilers",
    "gardens",
    "clocks",
    "islands",
    "music",
    "glass",
    "trains",
    "honey",
    "maps",
    "winter",
)
_PORT = re.compile(r"http://127\.0\.0\.1:(\d+)")
_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass
class Reading:
    """When the parts of one answer came, and how many tokens it had."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    tail: bytes = b""

    @property
    def rate(self) -> float:
        """Tokens a second behind the first token."""
        return (self.tokens - 1) / (self.last - self.first)


def prompts(streams: int) -> list[str]:
    return [
        f"Write a long essay about {TOPICS[i % len(TOPICS)]}, part {i}." for i in range(streams)
    ]


def in_process(llm: LLM, streams: int, tokens: int) -> float:
    """Tokens a second of all streams together, text included."""
    seen: dict[str, Reading] = {}

    def note(delta: OutputDelta) -> None:
        now = time.perf_counter()
        reading = seen.setdefault(delta.request_id, Reading(first=now))
        reading.last = now
        reading.tokens += len(delta.token_ids)

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm.chat(
        [[{"role": "user", "content": text}] for text in prompts(streams)],
        sampling,
        on_delta=note,
    )
    return sum(reading.rate for reading in seen.values())


def served(port: int, streams: int, tokens: int) -> float:
    """The same over HTTP, as events."""
    waiting = selectors.DefaultSelector()
    for text in prompts(streams):
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        one = socket.create_connection(("127.0.0.1", port))
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        waiting.register(one, selectors.EVENT_READ, Reading())
    rate = 0.0
    while waiting.get_map():
        for key, _ in waiting.select():
            one, reading = key.fileobj, key.data
            assert isinstance(one, socket.socket)
            data = one.recv(65536)
            if not data:
                found = _USAGE.findall(reading.tail)
                if not found:
                    sys.exit(f"the server did not answer: {reading.tail[-300:]!r}")
                reading.tokens = int(found[-1])
                rate += reading.rate
                waiting.unregister(one)
                one.close()
                continue
            reading.tail = (reading.tail + data)[-4096:]
            # A part may hold the opening, whose content is empty, beside the first token.
            if data.count(b'"content":"') > data.count(b'"content":""'):
                reading.last = time.perf_counter()
                reading.first = reading.first or reading.last
    return rate


class Server:
    """`headrace serve` of one installation, until it is closed."""

    def __init__(self, python: str, model: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "headrace", "serve", model, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            found = _PORT.search(line)
            if found:
                self.port = int(found.group(1))
                return
        sys.exit(f"the server did not start:\n{said}")

    def switches(self) -> int:
        """How often a thread of the server's processes has given its core away, or lost it."""
        total = 0
        for process in _family(self._process.pid):
            for status in Path(f"/proc/{process}/task").glob("*/status"):
                found = re.findall(r"ctxt_switches:\s+(\d+)", status.read_text())
                total += sum(map(int, found))
        return total

    def computed(self) -> float:
        """Seconds that the threads of the API process, not the engine's, have had a core."""
        return (
            sum(
                int(times.read_text().split()[0])
                for process in _family(self._process.pid)
                if b"headrace.engine" not in Path(f"/proc/{process}/cmdline").read_bytes()
                for times in Path(f"/proc/{process}/task").glob("*/schedstat")
            )
            / 1e9
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def _family(pid: int) -> list[int]:
    """A process and all that descend from it (Linux)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", help="Python of another installation, served in turns")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    pythons = {"served": sys.executable}
    if arguments.against:
        pythons["other"] = arguments.against
    servers = {name: Server(python, arguments.model) for name, python in pythons.items()}
    found: list[dict[str, Any]] = []
    try:
        with LLM(arguments.model) as llm:
            for streams in arguments.streams:
                ways = {"process": lambda s=streams: in_process(llm, s, arguments.tokens)}
                for name, server in servers.items():
                    ways[name] = lambda s=streams, p=server.port: served(p, s, arguments.tokens)
                rounds: list[dict[str, float]] = []
                for number in range(-1, arguments.rounds):
                    order = list(ways) if number % 2 else list(reversed(ways))
                    rates = {}
                    for name in order:
                        server = servers.get(name)
                        before = (server.switches(), server.computed()) if server else (0, 0.0)
                        rates[name] = ways[name]()
                        if server:
                            count = streams * arguments.tokens
                            rates[f"{name} switches"] = (server.switches() - before[0]) / count
                            rates[f"{name} us"] = (server.computed() - before[1]) / count * 1e6
                    if number >= 0:  # The first one warms caches.
                        rounds.append(rates)
                for name in servers:
                    ratios = [one[name] / one["process"] for one in rounds]
                    row = {
                        "streams": streams,
                        "way": name,
                        "process": statistics.median(one["process"] for one in rounds),
                        "rate": statistics.median(one[name] for one in rounds),
                        "ratio": statistics.median(ratios),
                        "least": min(ratios),
                        "most": max(ratios),
                        "switches": statistics.median(one[f"{name} switches"] for one in rounds),
                        "api_us": statistics.median(one[f"{name} us"] for one in rounds),
                    }
                    found.append(row)
                    print(
                        f"{streams:3} streams, {name}: {row['rate']:.1f} of {row['process']:.1f} "
                        f"tokens/s, x{row['ratio']:.3f} ({row['least']:.3f} to {row['most']:.3f}), "
                        f"a token {row['switches']:.2f} switches, {row['api_us']:.0f} µs API",
                        flush=True,
                    )
    finally:
        for server in servers.values():
            server.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({"tokens": arguments.tokens, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
