"""Several names of one model."""

from __future__ import annotations

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError
from headrace.server.app import create_app

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


async def test_each_name_is_served_and_listed(engine: FakeEngine) -> None:
    app = create_app(engine, ServerOptions(served_name="first,gpt-4o"))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [
            ("first", None),
            ("gpt-4o", None),
        ]
        assert (await client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        for name in ("first", "gpt-4o"):
            reply = await client.post("/v1/chat/completions", json={**CHAT, "model": name})
            assert reply.json()["model"] == "first"
        wrong = await client.post("/v1/chat/completions", json={**CHAT, "model": "other"})
        assert wrong.status_code == 404
        assert "'first', 'gpt-4o'" in wrong.json()["error"]["message"]
        tags = (await client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["first:latest", "gpt-4o:latest"]


@pytest.mark.parametrize("names", ["", "a,", ",", "a,,b"])
def test_an_empty_name_is_refused(names: str) -> None:
    with pytest.raises(OptionError, match="served_name must be names between commas"):
        ServerOptions(served_name=names).verify()
