"""Files over HTTP: forms in pieces, bounds, quotas, owners, what a full disk does."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine
from starlette.types import Message, Receive, Scope, Send

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError, TooLarge
from headrace.server.app import Application, create_app
from headrace.server.keys import Key, hash_of, write_keys

BOUNDARY = "----b"
KIND = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(*parts: tuple[str, str | None, bytes], end: bool = True) -> bytes:
    body = b""
    for name, filename, content in parts:
        shown = f'; filename="{filename}"' if filename is not None else ""
        body += (
            (
                f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{shown}\r\n\r\n'
            ).encode()
            + content
            + b"\r\n"
        )
    return body + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


def named(more: bytes) -> bytes:
    """A form whose only part has `more` after its name."""
    return form(("file", None, b"{}")).replace(b'name="file"', b'name="file"' + more)


GOOD = form(("purpose", None, b"batch"), ("file", "a.jsonl", b'{"a": 1}\r\n--\r\n----\n'))


def serving(folder: Path, **more: Any) -> Application:
    given: dict[str, Any] = {"files": str(folder), "max_file": 20_000, "file_quota": 50_000}
    return create_app(FakeEngine(), ServerOptions(**(given | more)))  # type: ignore[arg-type]


def client_of(app: Application, **more: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://test", **more)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Application]:
    app = serving(tmp_path / "files")
    yield app
    app.state.files.close()


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


async def put(
    client: httpx.AsyncClient, content: bytes = b"{}", more: dict[str, str] | None = None
) -> httpx.Response:
    data = {"purpose": "batch"} | (more or {})
    return await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data=data)


async def test_who_deletes_a_file_cuts_no_answer_off(app: Application, tmp_path: Path) -> None:
    """Its head has been sent, and then it is gone: the body comes all the same."""
    content, name = os.urandom(15_000), ""

    async def deleting(scope: Scope, receive: Receive, send: Send) -> None:
        async def between(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start" and scope["path"].endswith("/content"):
                (tmp_path / "files" / name).unlink(missing_ok=True)

        await app(scope, receive, between)

    transport = httpx.ASGITransport(app=deleting)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        name = (await put(client, content)).json()["id"]
        opened = len(os.listdir("/dev/fd"))
        assert (await client.get(f"/v1/files/{name}/content")).content == content
        assert (await client.get(f"/v1/files/{name}/content")).status_code == 404
        assert len(os.listdir("/dev/fd")) == opened


async def test_a_file_comes_and_goes(client: httpx.AsyncClient, tmp_path: Path) -> None:
    content = os.urandom(15_000)
    reply = (await put(client, content)).json()
    assert reply["bytes"] == 15_000
    assert reply["filename"] == "in.jsonl"
    one = f"/v1/files/{reply['id']}"
    assert (await client.get(one)).json() == reply
    got = await client.get(one + "/content")
    assert got.content == content
    assert got.headers["content-type"] == "application/octet-stream"
    assert got.headers["x-content-type-options"] == "nosniff"
    assert "attachment" in got.headers["content-disposition"]
    assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "files" / reply["id"]).stat().st_mode & 0o777 == 0o600
    assert (await client.delete(one)).json() == {
        "id": reply["id"],
        "object": "file",
        "deleted": True,
    }
    for gone in (client.get(one), client.get(one + "/content"), client.delete(one)):
        assert (await gone).status_code == 404
    assert not (tmp_path / "files" / reply["id"]).exists()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
async def test_forms_are_read_in_any_pieces(client: httpx.AsyncClient, size: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(GOOD), size):
            yield GOOD[at : at + size]

    reply = await client.post("/v1/files", content=pieces(), headers=KIND)
    assert reply.status_code == 200
    got = await client.get(f"/v1/files/{reply.json()['id']}/content")
    assert got.content == b'{"a": 1}\r\n--\r\n----\n'


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"", 400, "middle"),
        (GOOD[:-9], 400, "middle"),
        (form(("purpose", None, b"batch")), 400, "file is required"),
        (form(("file", "a", b"{}")), 400, "purpose"),
        (form(("purpose", None, b"fine-tune"), ("file", "a", b"{}")), 400, "purpose"),
        (form(("purpose", None, b"x" * 2000)), 400, "longer"),
        (form(("purpose", None, b"batch"), ("purpose", None, b"batch")), 400, "twice"),
        (form(("other", None, b"a")), 400, "unknown|not a known"),
        (form(*[(f"p{i}", None, b"") for i in range(20)]), 400, "known"),
        (b"------b\r\n" + b"x: " + b"y" * 10_000 + b"\r\n\r\n", 400, "longer"),
        (b"------b\r\nx: y\r\n\r\nz\r\n------b--", 400, "no name"),
        (b"------b junk\r\n", 400, "follows"),
        (form(("purpose", None, b"batch"), ("file", "a", b"x" * 20_001)), 413, "max_file"),
        (form(("purpose", None, b"\xff")), 400, "UTF-8"),
        (named(b"; filename*=idna''x"), 400, "cannot be read"),
        (named(b"; filename*=a\x00b''x"), 400, "cannot be read"),
        (named(b"; filename*" + b"9" * 5000 + b"*=x"), 400, "cannot be read"),
    ],
)
async def test_wrong_forms_are_refused(
    client: httpx.AsyncClient, tmp_path: Path, body: bytes, status: int, word: str
) -> None:
    reply = await client.post("/v1/files", content=body, headers=KIND)
    assert reply.status_code == status, reply.text
    assert re.search(word, reply.json()["error"]["message"])
    assert (await client.get("/v1/files")).json()["data"] == []
    assert not [path for path in (tmp_path / "files").iterdir() if path.name.startswith("file-")]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=" + "x" * 99, 400),
        ("multipart/form-data; boundary*=idna''x", 400),
        ("", 415),
    ],
)
async def test_wrong_content_types(
    client: httpx.AsyncClient, content_type: str, status: int
) -> None:
    headers = {"content-type": content_type}
    reply = await client.post("/v1/files", content=GOOD, headers=headers)
    assert reply.status_code == status


async def test_names_are_shown_and_never_paths(client: httpx.AsyncClient, tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "C:\\x\\y.jsonl", "a\u202eb", "é.jsonl"):
        reply = await client.post(
            "/v1/files",
            headers=KIND,
            content=form(("purpose", None, b"batch"), ("file", name, b"{}")),
        )
        assert reply.status_code == 200
        assert "/" not in reply.json()["filename"]
        assert reply.json()["filename"].isprintable()
    assert not (tmp_path / "etc").exists()
    for bad in ("..", "%2e%2e%2findex.db", "index.db", "lock"):
        assert (await client.get(f"/v1/files/{bad}/content")).status_code == 404


async def test_lists_go_by_pages(client: httpx.AsyncClient) -> None:
    ids = [(await put(client)).json()["id"] for _ in range(5)]
    first = (await client.get("/v1/files", params={"limit": 2})).json()
    assert [file["id"] for file in first["data"]] == ids[:2:-1]
    assert first["has_more"]
    rest = (await client.get("/v1/files", params={"after": first["last_id"]})).json()
    assert [file["id"] for file in rest["data"]] == ids[2::-1]
    assert not rest["has_more"]
    up = (await client.get("/v1/files", params={"order": "asc", "purpose": "batch"})).json()
    assert [file["id"] for file in up["data"]] == ids
    assert (await client.get("/v1/files", params={"purpose": "x"})).json()["data"] == []
    assert (await client.get("/v1/files", params={"limit": 0})).status_code == 400
    assert (await client.get("/v1/files", params={"after": "nobody"})).status_code == 404


async def test_expiry(
    app: Application,
    client: httpx.AsyncClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await put(client, more=more)).json()
    assert file["expires_at"] - file["created_at"] in (3600, 3601)
    for seconds in ("0", "-3600", "abc", "99999999999", ""):
        wrong = await put(client, more=more | {"expires_after[seconds]": seconds})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "expires_after[seconds]"
    app.state.files._clock = lambda: file["expires_at"] + 1
    assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404
    await app.state.files.purge()
    assert not (tmp_path / "files" / file["id"]).exists()


async def test_quota_and_owners(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    write_keys(keys, [Key("a", hash_of("secret-a")), Key("b", hash_of("secret-b"))])
    app = serving(tmp_path / "files", keys=str(keys))
    async with (
        client_of(app, headers={"authorization": "Bearer secret-a"}) as a,
        client_of(app, headers={"authorization": "Bearer secret-b"}) as b,
        client_of(app) as nobody,
    ):
        assert (await put(nobody)).status_code == 401
        files = [(await put(a, b"x" * 20_000)).json()["id"] for _ in range(2)]
        over = await put(a, b"x" * 10_001)
        assert over.status_code == 413
        assert over.json()["error"]["code"] == "quota_exceeded"
        assert (await put(a, b"x" * 10_000)).status_code == 200
        assert (await put(b, b"x" * 10_001)).status_code == 200
        assert (await b.get(f"/v1/files/{files[0]}")).status_code == 404
        assert (await b.get(f"/v1/files/{files[0]}/content")).status_code == 404
        assert (await b.delete(f"/v1/files/{files[0]}")).status_code == 404
        assert len((await b.get("/v1/files")).json()["data"]) == 1
        await a.delete(f"/v1/files/{files[0]}")
        assert (await put(a, b"x" * 10_001)).status_code == 200
    app.state.files.close()


async def test_two_servers_do_not_share_a_folder(app: Application, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="used by another server"):
        serving(tmp_path / "files")


async def test_what_was_half_received_is_removed(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-1.part").write_bytes(b"x")
    serving(tmp_path / "files").state.files.close()
    assert not (tmp_path / "files" / "file-1.part").exists()


async def test_without_a_folder_there_are_no_files() -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    async with client_of(app) as client:
        for reply in (
            await put(client),
            await client.get("/v1/files"),
            await client.get("/v1/batches"),
        ):
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "files_off"


async def test_a_full_disk_is_a_503_and_leaves_nothing(
    app: Application, client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.server.files.store.os.fsync", full)
    reply = await put(client, b"x" * 5000)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "store_failed"
    assert "retry-after" in reply.headers
    assert not [path for path in (tmp_path / "files").iterdir() if path.name.startswith("file-")]
    text = (await client.get("/metrics")).text
    assert 'headrace_server_failures_total{kind="file_write"} 1.0' in text
    monkeypatch.undo()
    assert (await put(client, b"x" * 20_000)).status_code == 200


async def test_a_client_that_leaves_half_way_leaves_nothing(
    app: Application, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": GOOD[:-40], "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        """Nobody is there."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/files",
        "raw_path": b"/v1/files",
        "query_string": b"",
        "headers": [(b"content-type", KIND["content-type"].encode())],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "root_path": "",
        "asgi": {"version": "3.0"},
    }
    await app(scope, receive, send)
    assert not [path for path in (tmp_path / "files").iterdir() if path.name.startswith("file-")]
    assert not app.state.files._arriving
    text = (await client.get("/metrics")).text
    assert re.search(r'http_requests_total\{.*route="/v1/files".*status="499"\} 1.0', text)


async def test_uploads_at_the_same_time_share_the_quota(client: httpx.AsyncClient) -> None:

    replies = await asyncio.gather(*(put(client, b"x" * 15_000) for _ in range(6)))
    kept = [reply for reply in replies if reply.status_code == 200]
    assert sum(reply.json()["bytes"] for reply in kept) <= 50_000
    assert {reply.status_code for reply in replies} == {200, 413}
    stored = (await client.get("/v1/files")).json()["data"]
    assert len(stored) == len(kept)


async def test_an_upload_that_ended_meanwhile_counts(app: Application, tmp_path: Path) -> None:
    slow = await app.state.files.receive("")
    await slow.write(b"x" * 15_000)
    for _ in range(2):  # They begin later and end before.
        quick = await app.state.files.receive("")
        await quick.write(b"x" * 17_450)
        try:
            await quick.keep("quick", "batch", None)
        except TooLarge:
            break
        finally:
            quick.close()
    await slow.write(b"x" * 200)
    with pytest.raises(TooLarge):
        await slow.keep("slow", "batch", None)
    slow.close()
    kept = [path for path in (tmp_path / "files").iterdir() if path.name.startswith("file-")]
    assert sum(path.stat().st_size for path in kept) <= 50_000
