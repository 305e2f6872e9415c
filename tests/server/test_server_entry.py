"""A request that waits for its body holds a connection, not a place; what is refused is counted."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

import headrace.server as package
from headrace.base.config import ServerOptions
from headrace.server.app import Application, create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}
WORK = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/detokenize",
    "/invocations",
]


@pytest.fixture
def app() -> Application:
    return create_app(FakeEngine(), ServerOptions(max_concurrent=1))  # type: ignore[arg-type]


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.mark.parametrize("path", WORK)
async def test_a_slow_body_holds_no_place(
    app: Application, client: httpx.AsyncClient, path: str
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def trickle() -> AsyncIterator[bytes]:
        yield b"{"
        begun.set()
        await go_on.wait()
        yield b"}"

    slow = asyncio.create_task(client.post(path, content=trickle(), headers=JSON))
    await begun.wait()
    await asyncio.sleep(0)
    assert app.state.service.in_work == 0
    # The one place there is goes to who is ready.
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    go_on.set()
    assert (await slow).status_code == 400
    assert app.state.service.in_work == 0


async def test_a_full_server_refuses_before_it_reads(app: Application) -> None:
    async def never() -> dict[str, Any]:
        raise AssertionError("the body was asked for")

    app.state.service.enter({})
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "root_path": "",
        "raw_path": b"/v1/completions",
        "asgi": {"version": "3.0"},
    }
    await app(scope, never, send)
    assert sent[0]["status"] == 503


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
MEDIA: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
                    ],
                }
            ]
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}],
                }
            ]
        },
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 1,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "url", "url": "http://127.0.0.1/x.png"},
                        }
                    ],
                }
            ],
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), MEDIA)
async def test_media_are_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "takes no" in message
    assert "text" in message
    text = (await client.get("/metrics")).text
    assert 'headrace_refused_total{code="unsupported_content"} 1.0' in text


OUTWARD = {
    "httpx",
    "requests",
    "aiohttp",
    "urllib.request",
    "http.client",
    "ftplib",
    "smtplib",
    "websockets",
    "urllib3",
    "huggingface_hub",
}
CONNECTS = {"open_connection", "create_connection", "urlopen", "sock_connect", "connect_ex"}


def _outward(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in OUTWARD)
        elif isinstance(node, ast.ImportFrom) and node.module in OUTWARD:
            yield node.module
        elif isinstance(node, ast.Attribute) and node.attr in CONNECTS:
            yield node.attr


def test_no_url_is_ever_fetched() -> None:
    """There is no guard against forged requests because there is nothing to guard."""
    assert list(_outward(ast.parse("import httpx\nasyncio.open_connection('a', 1)"))) == [
        "httpx",
        "open_connection",
    ]
    root = Path(package.__file__).parent
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in _outward(ast.parse(path.read_text()))
    }
    assert not found


async def test_what_is_refused_and_what_fails_is_counted(
    app: Application, client: httpx.AsyncClient
) -> None:
    await client.post("/v1/chat/completions", json={})
    await client.post("/v1/chat/completions", content=b"x" * 10, headers={"content-type": "a/b"})
    await client.get("/nowhere")
    app.state.service.draining = True
    reply = await client.post("/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    text = (await client.get("/metrics")).text
    for code in (
        "missing_required_parameter",
        "unsupported_media_type",
        "not_found_error",
        "shutting_down",
    ):
        assert f'headrace_refused_total{{code="{code}"}} 1.0' in text
    assert 'headrace_server_failures_total{kind="store_write"} 0.0' in text
    assert "headrace_log_lines_lost_total 0.0" in text


async def test_the_fingerprint_is_the_engines_identity(
    app: Application, client: httpx.AsyncClient
) -> None:
    seen = [
        (await client.post("/v1/chat/completions", json=CHAT)).json()["system_fingerprint"]
        for _ in range(2)
    ]
    assert seen == [app.state.service.engine.identity.fingerprint] * 2
