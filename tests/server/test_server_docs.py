"""The API's document as a page: every route and field, nothing from elsewhere, no script."""

from __future__ import annotations

import asyncio
import re
import threading
from html import unescape
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.server import openapi
from headrace.server.app import create_app


async def test_it_has_every_route_and_every_field(client: httpx.AsyncClient) -> None:
    reply = await client.get("/docs")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    text = unescape(reply.text)
    document = (await client.get("/openapi.json")).json()
    paths, schemas = document["paths"], document["components"]["schemas"]
    assert len(re.findall("<details>", text)) == sum(map(len, paths.values()))
    for path, operations in paths.items():
        assert f"<code>{path}</code>" in text
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for each in content["schema"].get("anyOf", [content["schema"]]):
                    name = each.get("$ref", "").rpartition("/")[2]
                    for field in schemas.get(name, {}).get("properties", ()):
                        assert f"<code>{field}</code>" in text, (path, field)


async def test_it_is_the_servers_own_alone(client: httpx.AsyncClient) -> None:
    reply = await client.get("/docs", headers={"accept-encoding": "identity"})
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "<script" not in reply.text
    assert not re.search(r"<[^>]+\s(?:on\w+|style)=", reply.text)
    links = re.findall(r'(?:src|href)="([^"#]+)"', reply.text)
    assert len(links) == 3
    for link in links:
        assert "://" not in link
        assert (await client.get(f"/{link}")).status_code == 200
    again = await client.get("/docs", headers={"if-none-match": reply.headers["etag"]})
    assert again.status_code == 304


async def test_it_is_made_once_and_never_in_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client leaves while it is made, and others wait for the same document."""
    begun, go_on, makers = asyncio.Event(), threading.Event(), []
    loop, make = asyncio.get_running_loop(), openapi.get_openapi

    def slow(**named: Any) -> Any:
        makers.append(threading.current_thread())
        assert makers[-1] is not threading.main_thread()
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        return make(**named)

    monkeypatch.setattr(openapi, "get_openapi", slow)
    first = asyncio.ensure_future(client.get("/docs"))
    await asyncio.wait(
        {first, ended := asyncio.ensure_future(begun.wait())}, return_when="FIRST_COMPLETED"
    )
    assert ended.done(), first
    first.cancel()
    others = [asyncio.ensure_future(client.get(path)) for path in ("/docs", "/openapi.json")]
    assert (await client.get("/health")).status_code == 200  # The loop turns meanwhile.
    go_on.set()
    for other in others:
        assert (await other).status_code == 200
    assert len(makers) == 1


async def test_names_in_the_document_are_text() -> None:
    app = create_app(FakeEngine())  # type: ignore[arg-type]
    app.openapi()["info"]["description"] = "<img src=x onerror=alert(1)>"
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert "<img" not in (await client.get("/docs")).text


async def test_what_no_model_can_do_is_said(client: httpx.AsyncClient) -> None:
    for body, words in (({"input": "a"}, "labels"), ({"input": ["a"], "model": "fake"}, "/score")):
        reply = await client.post("/classify", json=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("model", "unsupported_model")
        assert words in error["message"]
    reply = await client.post("/pooling", json={"input": "a", "task": "token_embed"})
    assert reply.json()["error"]["param"] == "task"
    reply = await client.post("/pooling", json={"input": "a"})
    assert "makes no vectors" in reply.json()["error"]["message"]
