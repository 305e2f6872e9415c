"""HEAD, OPTIONS, and a `base_url` without `/v1`."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import openai
import pytest
from processes import fake_server, running

from headrace.base.config import ServerOptions
from headrace.server.app import Application, create_app, create_operator_app
from headrace.server.keys import Key, hash_of, new_key, write_keys

GETS = ["/", "/health", "/v1/models", "/models", "/metrics", "/version", "/openapi.json", "/ping"]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", GETS)
async def test_head_is_get_without_its_body(client: httpx.AsyncClient, path: str) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert head.status_code == whole.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    if path not in ("/metrics", "/"):  # One grows by being read, the other is packed.
        assert head.headers["content-length"] == str(len(whole.content))


async def test_every_get_route_has_head_and_options(
    client: httpx.AsyncClient, app: Application
) -> None:
    paths = app.openapi()["paths"]
    readable = [
        re.compile(re.sub(r"\{[^}]+\}", "[^/]+", other))
        for other, operations in paths.items()
        if "{" in other and "get" in operations
    ]
    for path, operations in paths.items():
        # /v1/responses/input_tokens can also be the id of a response, which is read.
        if "{" in path or any(pattern.fullmatch(path) for pattern in readable):
            continue
        allowed = {
            word.strip() for word in (await client.options(path)).headers["allow"].split(",")
        }
        assert {method.upper() for method in operations} <= allowed
        assert "OPTIONS" in allowed
        assert ("HEAD" in allowed) == ("get" in operations)
        async with asyncio.timeout(60):
            reply = await client.head(path)
        assert (reply.status_code == 405) == ("get" not in operations), path
        if reply.status_code == 405:
            assert reply.headers["allow"] == ", ".join(sorted(allowed))


async def test_a_stream_without_an_end_ends_at_its_head(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        reply = await client.head("/v1/stats/stream")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")


async def test_a_path_of_its_own_has_its_own_methods(client: httpx.AsyncClient) -> None:
    """`/v1/responses/{response_id}` matches it too, and is another resource."""
    allowed = (await client.options("/v1/responses/input_tokens")).headers["allow"]
    assert allowed == "OPTIONS, POST"
    allowed = (await client.options("/v1/responses/resp_1")).headers["allow"]
    assert set(allowed.split(", ")) == {"DELETE", "GET", "HEAD", "OPTIONS"}


async def test_unknown_paths_have_neither(client: httpx.AsyncClient) -> None:
    assert (await client.head("/nothing")).status_code == 404
    assert (await client.options("/nothing")).status_code == 404


def test_head_over_a_real_connection_which_is_kept() -> None:
    with running(fake_server()) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            for path in ("/v1/health/live", "/v1/models", "/v1/stats/stream", "/"):
                assert client.head(path).status_code == 200
            assert client.get("/v1/models").json()["object"] == "list"
        assert client.head("/v1/chat/completions").status_code == 405


def test_openai_works_without_the_version_in_its_base_url() -> None:
    with (
        running(fake_server()) as server,
        openai.OpenAI(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        assert client.models.list().data[0].id == "fake"
        assert client.models.retrieve("fake").id == "fake"
        said = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=5)  # type: ignore[arg-type]
        assert said.choices[0].message.content == "Hello"
        text = client.completions.create(model="fake", prompt="x", max_tokens=5)
        assert text.choices[0].text == "Hello"
        assert client.responses.create(model="fake", input="x").id.startswith("resp")


@pytest.fixture
def keyed(engine: object, tmp_path: Path) -> tuple[Application, str, str]:
    path = tmp_path / "keys.toml"
    user, operator = new_key(), new_key()
    keys = [Key("user", hash_of(user)), Key("operator", hash_of(operator), "operator")]
    write_keys(path, keys)
    return create_app(engine, ServerOptions(keys=str(path))), user, operator  # type: ignore[arg-type]


def _client(app: Application) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_the_other_names_have_the_same_lock(keyed: tuple[Application, str, str]) -> None:
    app, user, _ = keyed
    async with _client(app) as client:
        for path in ("/models", "/chat/completions", "/completions", "/embeddings", "/responses"):
            assert (await client.get(path)).status_code == 401
            assert (await client.head(path)).status_code == 401
            assert (await client.options(path)).status_code == 401
        headers = {"authorization": f"Bearer {user}"}
        assert (await client.get("/models", headers=headers)).status_code == 200
        # What is an operator's is so with HEAD too, and has no other name.
        assert (await client.head("/metrics", headers=headers)).status_code == 403
        assert (await client.head("/v1/stats", headers=headers)).status_code == 403
    for path in (
        "/stats",
        "/stats/stream",
        "/models/../stats",
        "/models/%2e%2e/stats",
        "//models",
        "/./models",
        "/Models",
        "/models/../../metrics",
        "/metrics/",
        "/v1/v1/models",
        "models",
        "/models;/../v1/stats",
        "/v1/../models",
        "/models\x00",
        "",
    ):
        assert await _status(app, path, user) in (403, 404), path


async def _status(app: Application, path: str, key: str) -> int:
    """The answer to a path that no client would send as it is."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "client": None,
        "server": ("test", 80),
        "headers": [(b"authorization", b"Bearer " + key.encode())],
    }
    found: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])  # type: ignore[arg-type]

    await app(scope, receive, send)  # type: ignore[arg-type]
    return found[0]


async def test_the_operators_port_has_no_other_names(keyed: tuple[Application, str, str]) -> None:
    app, _, operator = keyed
    async with _client(create_operator_app(app)) as client:
        headers = {"authorization": f"Bearer {operator}"}
        assert (await client.get("/models", headers=headers)).status_code == 404
        assert (await client.head("/operate/state", headers=headers)).status_code == 200
        assert (await client.head("/operate/state")).status_code == 401
