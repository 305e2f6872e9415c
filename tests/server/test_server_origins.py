"""Web pages of other origins: refused, but for the listed ones."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError
from headrace.server.app import create_app, create_operator_app

LISTED = "https://app.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


def serving(origins: str | None = None) -> Any:
    return create_app(FakeEngine(), ServerOptions(cors_origins=origins))  # type: ignore[arg-type]


async def test_off_by_default() -> None:
    async with client_of(serving()) as client:
        asked = {"origin": LISTED, "access-control-request-method": "POST"}
        reply = await client.options("/v1/chat/completions", headers=asked)
        assert reply.status_code == 204  # an answer, but no leave: a browser then sends nothing
        reply = await client.get("/v1/models", headers={"origin": LISTED})
        assert "access-control-allow-origin" not in reply.headers


async def test_a_listed_origin_may_read_and_ask() -> None:
    async with client_of(serving(f"{LISTED}, http://other.example:8080/")) as client:
        asked = {
            "origin": LISTED,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,x-stainless-os",
        }
        allowed = await client.options("/v1/chat/completions", headers=asked)
        assert allowed.status_code == 204
        assert allowed.headers["access-control-allow-origin"] == LISTED
        assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
        assert allowed.headers["vary"] == "Origin"
        headers = {"origin": LISTED, "sec-fetch-site": "cross-site"}
        reply = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == LISTED
        assert "access-control-allow-credentials" not in reply.headers
        other = await client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        port = {"origin": "http://other.example:8080"}
        reply = await client.get("/v1/models", headers=port)
        assert reply.headers["access-control-allow-origin"] == port["origin"]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://test", "sec-fetch-site": "cross-site"},
        {"origin": "http://test:81"},
        {"origin": "http://["},
        {"origin": "http://test]"},
        {"origin": "://"},
    ],
)
async def test_a_foreign_page_cannot_act(headers: dict[str, str]) -> None:
    app = serving()
    operator = create_operator_app(app)
    async with client_of(app) as client, client_of(operator) as other:
        reply = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
        # No preflight stands before this one: a form in a page would drain the server.
        assert (await other.post("/operate/drain", headers=headers)).status_code == 403
        assert not app.state.service.draining
        text = (await client.get("/metrics")).text
        assert 'headrace_refused_total{code="origin_not_allowed"} 2.0' in text


async def test_anthropics_clients_are_refused_in_their_shape() -> None:
    async with client_of(serving()) as client:
        headers = {"origin": "https://evil.example"}
        reply = await client.post("/v1/messages", json=CHAT, headers=headers)
        assert reply.status_code == 403
        assert reply.json()["type"] == "error"
        assert reply.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://test"},
        {"origin": "https://front.example", "sec-fetch-site": "same-origin"},
    ],
)
async def test_its_own_page_and_programs_may(headers: dict[str, str]) -> None:
    async with client_of(serving()) as client:
        reply = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert reply.status_code == 200


@pytest.mark.parametrize("origins", ["*", "app.example", "https://a.example/path", "https://*"])
def test_a_wrong_list_is_told(origins: str) -> None:
    with pytest.raises(OptionError, match="cors_origins"):
        serving(origins)


async def test_the_document_says_so() -> None:
    app = serving()
    for document in (app.openapi(), create_operator_app(app).openapi()):
        for operations in document["paths"].values():
            for method, operation in operations.items():
                assert ("403" in operation["responses"]) == (method != "get")
