"""Shared parts of the tests of batches: a server with files, lines, and a batch on its way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.server.app import Application, create_app

CHAT = "/v1/chat/completions"
DONE = ("completed", "failed", "expired", "cancelled")


def request_line(name: str, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": name}], "max_tokens": 3}
    return {"custom_id": name, "method": "POST", "url": url, "body": given | body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def serving(folder: Path, engine: FakeEngine, **more: Any) -> Application:
    given: dict[str, Any] = {"files": str(folder), "max_body": 4096, "max_concurrent": 2}
    return create_app(engine, ServerOptions(**(given | more)))  # type: ignore[arg-type]


def client_of(app: Application, secret: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


async def close(app: Application) -> None:
    await app.state.batches.close()
    app.state.files.close()


async def begin(client: httpx.AsyncClient, content: bytes, **more: Any) -> dict[str, Any]:
    files = {"file": ("in.jsonl", content)}
    file = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"} | more
    reply = await client.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text
    batch: dict[str, Any] = reply.json()
    assert batch["status"] == "validating"
    return batch


async def look(client: httpx.AsyncClient, batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return found


async def until(
    client: httpx.AsyncClient, batch: dict[str, Any], *statuses: str, done: int = 0
) -> dict[str, Any]:
    for _ in range(12000):
        found = await look(client, batch)
        if found["status"] in (statuses or DONE) and found["request_counts"]["completed"] >= done:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"the batch did not end: {found}")


async def results(client: httpx.AsyncClient, file_id: str | None) -> dict[Any, dict[str, Any]]:
    assert file_id is not None
    text = (await client.get(f"/v1/files/{file_id}/content")).text
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["custom_id"] or line["error"]["line"]: line for line in lines}
