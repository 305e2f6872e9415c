"""A server with configurable latencies, errors and lies, to test the harness itself.

Real HTTP on a real socket, OpenAI's formats, and timers with absolute deadlines so that pauses do
not drift. `headrace bench mock`, or `MockServer` inside a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ..obs.threads import THREADS

TOKEN = 7
"""The id of all tokens."""
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="mock"}} {running}
# TYPE mock_requests_total counter
mock_requests_total {requests}
"""
"""Template of its `/metrics`, with its own figures."""


@dataclass(slots=True)
class Behaviour:
    """Behaviour of the server. Times in seconds."""

    ttft: float = 0.05
    itl: float = 0.01
    ttft_per_token: float = 0.0
    """Per uncached prompt token."""
    error_rate: float = 0.0
    error_status: int = 500
    drop_rate: float = 0.0
    """Share of answers cut off in the middle."""
    at_once: int = 0
    """Requests served at the same time, while the others queue; 0: no limit."""
    stall_after: int = 0
    """Tokens after which a stream stalls for `stall_seconds`; 0: never."""
    stall_seconds: float = 0.0
    chunk: int = 1
    """Tokens in one piece."""
    claim: float = 1.0
    """Factor on the output tokens that usage claims."""
    claim_prompt: int = 0
    """Added to the prompt tokens that usage claims."""
    buffered: bool = False
    """Whether everything is sent at the end even if a stream was requested."""
    no_usage: bool = False
    prefix_cache: bool = False
    not_ready: float = 0.0
    """Seconds after the start during which it answers 503."""
    stale_after: int = 0
    """Answers on a connection after which the next request closes it; 0: never."""
    zero_vectors: bool = False
    """Whether embeddings are all zeros."""
    template: int = 0
    """Tokens that a chat template adds around every prompt."""
    repeat: int = 1
    """Number of times that each event is sent."""
    line_end: str = "\n"
    """End of the events' lines: LF, CR alone or CR LF."""
    calls: bool = False
    """Whether it answers with the arguments of a tool call instead of text."""
    done: bool = True
    """Whether streams end with [DONE]."""
    seed: int = 0


@dataclass(slots=True)
class Seen:
    """Counters of the server, and the request bodies."""

    requests: int = 0
    errors: int = 0
    cancelled: int = 0
    running: int = 0
    most_running: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)


class MockServer:
    """Mock server in a thread with its own loop; `with MockServer(...) as server: server.url`."""

    def __init__(self, behaviour: Behaviour | None = None, port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        self.seen = Seen()
        self.port = port
        self._rng = random.Random(self.behaviour.seed)
        self._at_once: asyncio.Semaphore | None = None
        self._cached: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = time.monotonic()
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> MockServer:
        self._thread = THREADS.keep("mock", lambda: asyncio.run(self._serve()))
        if not self._ready.wait(60):
            raise RuntimeError("the mock server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def wait(self) -> None:
        """Wait until the thread ends."""
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self.behaviour.at_once:
            self._at_once = asyncio.Semaphore(self.behaviour.at_once)
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled: the server stops while a client keeps its connection.
        with contextlib.suppress(
            ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError
        ):
            answered = 0
            while await self._exchange(reader, writer):
                answered += 1
                if answered == self.behaviour.stale_after:
                    await reader.readuntil(b"\r\n\r\n")
                    writer.transport.abort()
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (h.partition(":") for h in head)}
        body = b""
        if found.get("transfer-encoding") == "chunked":  # From a gateway that changed it.
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:size]
            await reader.readuntil(b"\r\n")
        else:
            body = await reader.readexactly(int(found.get("content-length", 0)))
        method, path, _ = head[0].split(" ", 2)
        if method == "GET":
            self._get(path, writer)
            await writer.drain()
            return True
        request = json.loads(body)
        seen, behaviour = self.seen, self.behaviour
        seen.requests += 1
        seen.bodies.append(request)
        if self._rng.random() < behaviour.error_rate:
            seen.errors += 1
            _whole(writer, behaviour.error_status, {"error": {"message": "as was set"}})
            await writer.drain()
            return True
        begin = time.monotonic()
        if self._at_once is not None:
            await self._at_once.acquire()
            begin = time.monotonic()
        seen.running += 1
        seen.most_running = max(seen.most_running, seen.running)
        try:
            return await self._answer(path, request, writer, begin)
        except ConnectionError:
            seen.cancelled += 1
            return False
        finally:
            seen.running -= 1
            if self._at_once is not None:
                self._at_once.release()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if time.monotonic() - self._started < self.behaviour.not_ready:
            _whole(writer, 503, {"error": {"message": "the model is being loaded"}})
        elif path == "/v1/models":
            _whole(writer, 200, {"object": "list", "data": [{"id": "mock", "object": "model"}]})
        elif path == "/metrics":
            text = METRICS.format(running=self.seen.running, requests=self.seen.requests)
            _text(writer, 200, "text/plain", text.encode())
        elif path in ("/health", "/version"):
            _whole(writer, 200, {"version": "mock"})
        else:
            _whole(writer, 404, {"error": {"message": "no such path"}})

    async def _answer(
        self, path: str, request: dict[str, Any], writer: asyncio.StreamWriter, begin: float
    ) -> bool:
        behaviour = self.behaviour
        if path.endswith("/embeddings"):
            await self._vector(request, writer, begin)
            return True
        tokens = int(request.get("max_tokens", 16))
        prompt, cached = self._prompt(request)
        first = begin + behaviour.ttft + behaviour.ttft_per_token * (prompt - cached)
        chat = path.endswith("/chat/completions")
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": "mock", "object": kind, "created": 0, "model": "mock"}
        usage = {
            "prompt_tokens": prompt + behaviour.claim_prompt,
            "completion_tokens": round(tokens * behaviour.claim),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if not request.get("stream"):
            await _until(first + behaviour.itl * (tokens - 1))
            text = " tok" * tokens
            part: dict[str, Any] = {"message": {"content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": "length", **part}
            _whole(writer, 200, {"choices": [choice], "usage": usage})
            await writer.drain()
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        held = io.BytesIO()  # One piece on any machine.
        out = held if behaviour.buffered else writer
        drop = tokens // 2 if self._rng.random() < behaviour.drop_rate else -1
        shift = 0.0
        for number in range(0, tokens, behaviour.chunk):
            if number == drop:
                writer.transport.abort()
                return False
            if behaviour.stall_after and number == behaviour.stall_after:
                shift = behaviour.stall_seconds
            await _until(first + shift + behaviour.itl * number)
            text = " tok" * min(behaviour.chunk, tokens - number)
            part = {"delta": {"content": text}} if chat else {"text": text}
            count = min(behaviour.chunk, tokens - number)
            ids = {"token_ids": [TOKEN] * count} if request.get("return_token_ids") else {}
            if behaviour.calls and chat:
                part = {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}
            for _ in range(behaviour.repeat):
                self._event(
                    out, {**head, "choices": [{"index": 0, "finish_reason": None, **part, **ids}]}
                )
            await writer.drain()
            if writer.transport.is_closing():
                raise ConnectionResetError
        end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        self._event(out, {**head, "choices": [{"index": 0, "finish_reason": "length", **end}]})
        if not behaviour.no_usage:
            self._event(out, {**head, "choices": [], "usage": usage})
        if behaviour.done:
            self._event(out, "[DONE]")
        out.write(b"0\r\n\r\n")
        writer.write(held.getvalue())
        await writer.drain()
        return True

    def _event(self, out: asyncio.StreamWriter | io.BytesIO, value: dict[str, Any] | str) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}{self.behaviour.line_end * 2}".encode()
        out.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def _vector(
        self, request: dict[str, Any], writer: asyncio.StreamWriter, begin: float
    ) -> None:
        text = request["input"]
        count = len(text if isinstance(text, list) else text.split())
        await _until(begin + self.behaviour.ttft + self.behaviour.ttft_per_token * count)
        values = [0.0 if self.behaviour.zero_vectors else 0.5] * 4
        usage = {"prompt_tokens": count, "total_tokens": count}
        data = [{"object": "embedding", "index": 0, "embedding": values}]
        _whole(writer, 200, {"object": "list", "data": data, "usage": usage})
        await writer.drain()

    def _prompt(self, request: dict[str, Any]) -> tuple[int, int]:
        """Return (prompt tokens, cached ones) of words or ids; only whole blocks of 16 are
        cached."""
        prompt = request.get("prompt")
        if prompt is None:
            prompt = " ".join(str(part.get("content")) for part in request.get("messages", []))
            prompt = "<> " * self.behaviour.template + prompt
        units = prompt if isinstance(prompt, list) else prompt.split()
        cached = 0
        if self.behaviour.prefix_cache:
            for end in range(16, len(units), 16):
                key = repr(units[:end])
                if key in self._cached and cached == end - 16:
                    cached = end
                self._cached.add(key)
        return len(units), cached


async def _until(when: float) -> None:
    delay = when - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)


def _whole(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    _text(writer, status, "application/json", json.dumps(value).encode())


def _text(writer: asyncio.StreamWriter, status: int, kind: str, data: bytes) -> None:
    writer.write(
        f"HTTP/1.1 {status} Set\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
