"""Mutated HTTP requests, sent to a real server process over sockets of their own.

Half of them are changed anywhere, head and framing too; of the others the body alone, under a
length that is true. Each has to end: with an answer, with a typed error, or closed without a word
where what came is no whole request. The engine is the fake one: HTTP is tried here.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from fault_client import HUNG, LOST, awake
from mutations import mutated

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from processes import fake_server, running

TOGETHER = 192
"""Requests at once: a half of one, which the server awaits for seconds, costs no time of others."""
LIMIT = 60.0
"""Seconds after which a request that has not ended counts as hung."""
_CALLS: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a\u00e9"}]},
        ],
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["x"],
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 1,
    },
    "/v1/completions": {
        "prompt": [1, 2, 3],
        "max_tokens": 2,
        "echo": True,
        "logprobs": 1,
        "seed": 7,
        "stop_token_ids": [4],
        "min_tokens": 1,
        "top_p": 0.9,
    },
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "user", "content": "a"}],
        "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stream": True,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "max_output_tokens": 2,
        "store": False,
        "text": {"format": {"type": "text"}},
    },
    "/tokenize": {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/api/chat": {
        "model": "fake",
        "messages": [{"role": "user", "content": "a"}],
        "options": {"num_predict": 2},
        "stream": False,
    },
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": "a"}]},
}
_HEAD = (
    b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"x-request-id: r1\r\nconnection: close\r\n"
)


_VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    0.5,
    1e308,
    2**31,
    2**63,
    10**30,
    "",
    "\0",
    "a" * 3000,
    "\ud800",
    "auto",
    [],
    {},
    [[]],
    {"a": None},
    [1] * 2000,
    ["a"] * 50,
    {"type": "text"},
    {"type": "image_url"},
]


def changed(value: Any, draw: random.Random) -> Any:
    """A JSON value in which one value is another, or a key more or less is."""
    if isinstance(value, dict | list) and value and draw.random() < 0.8:
        copy = value.copy()
        keys = list(copy) if isinstance(copy, dict) else range(len(copy))
        key = draw.choice(keys)
        if draw.random() < 0.1:
            del copy[key]
        else:
            copy[key] = changed(copy[key], draw)
        return copy
    return draw.choice(_VALUES)


def request(draw: random.Random) -> bytes:
    """A mutation of one of the requests above."""
    path, value = draw.choice(list(_CALLS.items()))
    body = json.dumps(value).encode()
    head = _HEAD % path.encode()
    if draw.random() < 0.5:
        whole = draw.random() < 0.6
        body = json.dumps(changed(value, draw)).encode() if whole else mutated(body, draw)
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    if draw.random() < 0.3:
        half = len(body) // 2
        parts = (body[:half], body[half:], b"")
        framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        return mutated(head + b"transfer-encoding: chunked\r\n\r\n" + framed, draw)
    if draw.random() < 0.1:
        return mutated(
            b"GET /v1/models?a=%20b HTTP/1.1\r\nhost: [::1]\r\naccept: */*\r\n\r\n", draw
        )
    return mutated(head + b"content-length: %d\r\n\r\n%b" % (len(body), body), draw)


async def _exchange(host: str, port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    parts = []
    try:
        with suppress(ConnectionError):
            writer.write(data)
            while part := await reader.read(1 << 16):
                parts.append(part)
    finally:
        writer.close()
    return b"".join(parts)


def ended(reply: bytes) -> tuple[str, str]:
    """(how the first answer of a connection ended, what is wrong with it or nothing)."""
    if not reply:
        return "refused", ""  # Closed without a word: the server awaited more of it.
    head, _, body = reply.partition(b"\r\n\r\n")
    line = head.partition(b"\r\n")[0].split(b" ")
    if line[0] not in (b"HTTP/1.1", b"HTTP/1.0") or len(line) < 2 or not line[1].isdigit():
        return "untyped", f"no status line: {reply[:100]!r}"
    status = int(line[1])
    if status in (200, 204, 304):
        return "read", ""
    if status == 500:
        return "untyped", f"status 500: {body[:200]!r}"
    typed = b'"error"' in body or b'"type"' in body or status in (100, 307, 405)
    return "refused", "" if typed else f"status {status} without a type: {body[:200]!r}"


async def _send(url: str, numbers: range, ends: Counter[str], findings: list[Any]) -> None:
    host, port = url.removeprefix("http://").split(":")
    waiting = iter(numbers)

    async def sender() -> None:
        for number in waiting:
            try:
                async with awake(LIMIT):
                    reply = await _exchange(host, int(port), request(random.Random(number)))
                how, wrong = ended(reply)
            except TimeoutError:
                how, wrong = HUNG, HUNG
            except OSError as fault:
                how, wrong = LOST, str(fault)
            ends[how] += 1
            if wrong:
                findings.append((number, wrong))

    await asyncio.gather(*(sender() for _ in range(TOGETHER)))


def mutate(count: int, seed: int = 0) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Like `mutations.mutate`: how `count` requests ended, and the findings."""
    code = fake_server()
    code[-1] = code[-1].replace(
        "options =",
        "from headrace.server.protocol import BoundedProtocol as bounds\n"
        "bounds.head_seconds, bounds.body_seconds, bounds.stall_seconds = 2.0, 2.0, 2.0\n"
        "bounds.timeout_keep_alive = property(lambda self: 1.0, lambda self, seconds: None)\n"
        "options =",
    )
    ends: Counter[str] = Counter()
    findings: list[tuple[int, str]] = []
    with running(code) as server:
        asyncio.run(_send(server.url, range(seed, seed + count), ends, findings))
        metrics = httpx.get(server.url + "/metrics", timeout=LIMIT).text
        bugs = [line for line in metrics.splitlines() if 'failures_total{kind="bug"}' in line]
        if not bugs or float(bugs[0].split()[-1]):
            findings.append((seed, f"the server counted {bugs}"))
    return ends, findings
