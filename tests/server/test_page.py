"""The page's files as HTTP serves them: headers, caching, size, nothing from elsewhere."""

from __future__ import annotations

import re

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.server.app import create_app
from headrace.server.page.route import FILES, VERSION


async def test_the_page_is_open_small_and_names_its_files_by_content(
    client: httpx.AsyncClient,
) -> None:
    reply = await client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    links = re.findall(r'(?:src|href)="(page/[^"]+)"', reply.text)
    assert len(links) >= 3
    assert all(link.startswith(f"page/{VERSION}/") for link in links)
    for link in links:
        found = await client.get(f"/{link}")
        assert found.status_code == 200
        assert found.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert sum(len(kept.plain) for kept in FILES.values()) < 160_000
    assert sum(len(kept.packed) for kept in FILES.values()) < 56_000


async def test_modules_import_only_each_other() -> None:
    for name, kept in FILES.items():
        text = kept.plain.decode()
        if name.endswith(".js"):
            for target in re.findall(r'from "([^"]+)"', text):
                assert target.removeprefix("./") in FILES, f"{name} imports {target}"
            for way in (".innerHTML", "insertAdjacentHTML", "document.write", "eval("):
                assert way not in text, f"{name} uses {way}"
        outside = re.findall(
            r"https?://(?!www\.w3\.org/(?:2000/svg|1998/Math/MathML))[^\s\"'`]+", text
        )
        assert not outside, f"{name} names {outside}"


async def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline(
    client: httpx.AsyncClient,
) -> None:
    reply = await client.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "frame-ancestors 'none'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<[^>]+\s(?:on\w+|style)=", reply.text), "inline handlers or styles"
    assert not re.search(r"<(?:script|style)[^>]*>[^<]", reply.text)


async def test_caching_by_tag_and_the_packed_form(client: httpx.AsyncClient) -> None:
    first = await client.get("/", headers={"accept-encoding": "identity"})
    assert first.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in first.headers
    packed = await client.get("/", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.text == first.text
    for tag in (first.headers["etag"], f'"x", W/{first.headers["etag"]}'):
        again = await client.get("/", headers={"if-none-match": tag})
        assert again.status_code == 304
        assert not again.content


@pytest.mark.parametrize(
    "path",
    [
        "/page/0000000000000000/main.js",
        f"/page/{VERSION}/index.html",
        f"/page/{VERSION}/..%2Froute.py",
        f"/page/{VERSION}/route.py",
    ],
)
async def test_other_files_are_not_there(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_the_page_is_there_while_the_model_loads() -> None:
    app = create_app(None, ServerOptions())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/v1/stats")).status_code == 503


async def test_every_label_of_the_page_has_its_field_and_ids_are_unique() -> None:
    text = FILES["index.html"].plain.decode()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    names = (r'for="([^"]+)"', r'aria-(?:labelledby|controls|describedby)="([^"]+)"')
    for target in (name for pattern in names for name in re.findall(pattern, text)):
        assert target in ids, target


def test_fake_engine_has_no_statistics() -> None:
    assert not hasattr(FakeEngine(), "metrics"), "the board must do without"


async def test_a_browser_asks_for_an_icon(client: httpx.AsyncClient) -> None:
    reply = await client.get("/favicon.ico")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "image/svg+xml"
