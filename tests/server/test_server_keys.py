"""Keys, roles, limits, the ledger, the operator's port, TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import fake_server, running
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError, RateLimited
from headrace.server.accounts import Account, Accounts, Bucket
from headrace.server.app import OPERATOR_ROUTERS, ROUTERS, create_app, create_operator_app
from headrace.server.authentication import OPEN, PAGE
from headrace.server.keys import Key, hash_of, new_key, read_keys, write_keys
from headrace.server.store import ResponseStore
from headrace.server.tls import Tls

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Guarded:
    """An application with keys: `user`, `operator`, and one per set of limits given."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.user, self.operator, self.limited = new_key(), new_key(), new_key()
        self.file = folder / "keys.toml"
        write_keys(
            self.file,
            [
                Key("user", hash_of(self.user)),
                Key("operator", hash_of(self.operator), "operator"),
                Key("limited", hash_of(self.limited), **limits),
            ],
        )
        self.gate = folder / "gate"
        self.engine = FakeEngine()
        options = ServerOptions(keys=str(self.file), store=str(folder / "store.db"))
        self.app = create_app(self.engine, options)  # type: ignore[arg-type]
        self.http = self._client(self.app)
        self.operating = self._client(create_operator_app(self.app))

    def _client(self, app: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")

    def hold(self) -> None:
        """No answer gives a token before the gate is there."""
        self.engine.gate, self.engine.held_after = self.gate, 0

    async def ask(self, key: str, **more: Any) -> httpx.Response:
        return await self.http.post(CHAT, json=BODY | more, headers=bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_every_route_is_closed_but_the_probes(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    paths = {
        (route.path, method)
        for router in ROUTERS
        for route in router.routes
        for method in route.methods
    }  # type: ignore[attr-defined]
    paths |= {("/openapi.json", "GET"), ("/nothing", "GET"), (CHAT, "OPTIONS")}
    assert len(paths) > 25
    for path, method in sorted(paths):
        reply = await guarded.http.request(method, path.replace("{", "").replace("}", ""))
        if path in OPEN and method in ("GET", "HEAD"):
            assert reply.status_code < 400, path
        elif path.startswith(PAGE):
            assert reply.status_code == 404  # static files of the page, and no such one
        else:
            assert reply.status_code == 401, (path, method)
            assert reply.headers["www-authenticate"] == "Bearer"
            body = reply.json()
            if path.startswith("/api/"):  # Ollama's shape
                assert "API key" in body["error"]
            else:  # KServe's is flat; /v2/rerank is Cohere's
                flat = path.startswith("/v2") and path != "/v2/rerank"
                said = body if flat else body["error"]
                assert said["type"] == "authentication_error"
    for router in OPERATOR_ROUTERS:
        for route in router.routes:
            path = route.path  # type: ignore[attr-defined]
            if path not in OPEN:
                assert (await guarded.operating.get(path)).status_code == 401


async def test_keys_open_what_their_role_may(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    for wrong in ("", "x", guarded.user[:-1], guarded.user + "x", "\xff", hash_of(guarded.user)):
        headers = {b"authorization": b"Bearer " + wrong.encode("latin-1")}
        assert (await guarded.http.post(CHAT, json=BODY, headers=headers)).status_code == 401
    assert (await guarded.ask(guarded.user)).status_code == 200
    assert (await guarded.ask(guarded.operator)).status_code == 200
    by_header = await guarded.http.post(
        "/v1/messages", json=BODY, headers={"x-api-key": guarded.user}
    )
    assert by_header.status_code == 200
    reply = await guarded.http.get("/metrics", headers=bearer(guarded.user))
    assert reply.status_code == 403
    assert (await guarded.http.get("/metrics", headers=bearer(guarded.operator))).status_code == 200
    for path in ("/operate/usage", "/operate/state"):
        assert (await guarded.operating.get(path, headers=bearer(guarded.user))).status_code == 403
        good = await guarded.operating.get(path, headers=bearer(guarded.operator))
        assert good.status_code == 200
        # The public port does not have them at all.
        other = await guarded.http.get(path, headers=bearer(guarded.operator))
        assert other.status_code == 404


async def test_errors_for_anthropics_clients_have_their_shape(tmp_path: Path) -> None:
    reply = await Guarded(tmp_path).http.post("/v1/messages", json=BODY)
    assert reply.status_code == 401
    assert reply.json()["error"]["type"] == "authentication_error"
    assert reply.json()["type"] == "error"


async def test_a_limit_on_requests(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, requests_per_minute=2)
    statuses = [(await guarded.ask(guarded.limited)).status_code for _ in range(4)]
    assert statuses == [200, 200, 429, 429]
    reply = await guarded.ask(guarded.limited)
    assert 1 <= int(reply.headers["retry-after"]) <= 31
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await guarded.ask(guarded.user)).status_code == 200


async def test_a_limit_on_tokens(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, tokens_per_minute=10)
    statuses = [(await guarded.ask(guarded.limited)).status_code for _ in range(3)]
    # A request costs 8 - 3 prompt tokens and 4 generated ones; the bucket may be overdrawn once.
    assert statuses == [200, 200, 429]


async def test_a_limit_on_concurrency_frees_what_ends(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, concurrent=2)
    guarded.hold()
    asked = [asyncio.create_task(guarded.ask(guarded.limited, stream=True)) for _ in range(5)]
    while sum(task.done() for task in asked) < 3:
        await asyncio.sleep(0.01)
    guarded.gate.touch()
    replies = await asyncio.gather(*asked)
    assert sorted(reply.status_code for reply in replies) == [200, 200, 429, 429, 429]
    assert (await guarded.ask(guarded.limited)).status_code == 200
    assert (await guarded.ask(guarded.limited, max_tokens=0)).status_code == 400
    assert all(account.in_work == 0 for account in guarded.app.state.accounts)


async def test_background_work_is_charged_at_its_end(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, concurrent=1)
    guarded.hold()
    body = {"input": "hi", "max_output_tokens": 8, "background": True}
    headers = bearer(guarded.limited)
    made = await guarded.http.post("/v1/responses", json=body, headers=headers)
    assert made.json()["status"] == "queued"
    assert (await guarded.ask(guarded.limited)).status_code == 429
    guarded.gate.touch()
    while guarded.app.state.service.in_work:
        await asyncio.sleep(0.01)
    account = guarded.app.state.accounts.find(guarded.limited)
    assert account.in_work == 0
    assert account.totals.completion_tokens == 8
    assert account.totals.requests == 1
    # What one key made, another does not see.
    path = f"/v1/responses/{made.json()['id']}"
    assert (await guarded.http.get(path, headers=headers)).status_code == 200
    other = await guarded.http.get(path, headers=bearer(guarded.user))
    assert other.status_code == 404


async def test_the_ledger_counts_and_survives(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    for path, body in (
        (CHAT, BODY),
        (CHAT, BODY | {"stream": True}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
        ("/v1/messages", BODY),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ):
        reply = await guarded.http.post(path, json=body, headers=bearer(guarded.user))
        assert reply.status_code == 200
    reply = await guarded.operating.get("/operate/usage", headers=bearer(guarded.operator))
    usage = next(key for key in reply.json()["keys"] if key["name"] == "user")
    assert usage["requests"] == 5
    assert usage["completion_tokens"] == 20
    assert usage["cached_tokens"] == 15
    metrics = await guarded.operating.get("/metrics", headers=bearer(guarded.operator))
    assert 'headrace_key_completion_tokens_total{key="user"} 20.0' in metrics.text
    accounts = guarded.app.state.accounts
    await guarded.app.state.store.save_ledger({a.key.name: a.totals for a in accounts})
    guarded.app.state.store.close()
    again = create_app(FakeEngine(), guarded.app.state.service.options)  # type: ignore[arg-type]
    assert again.state.accounts.find(guarded.user).totals.requests == 5


async def test_the_operator_aborts_and_drains(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path)
    guarded.hold()
    asked = asyncio.create_task(guarded.ask(guarded.user, max_tokens=400, request_id="mine"))
    while not guarded.engine.held:
        await asyncio.sleep(0.01)
    headers = bearer(guarded.operator)
    post = guarded.operating.post
    missing = await post("/operate/abort", json={"request_id": "x"}, headers=headers)
    assert missing.status_code == 404
    done = await post("/operate/abort", json={"request_id": "chatcmpl-mine"}, headers=headers)
    assert done.status_code == 200
    assert (await asked).json()["error"]["code"] == "aborted"
    assert (await post("/operate/drain", headers=headers)).json()["draining"] is True
    assert (await guarded.ask(guarded.user)).status_code == 503
    assert (await guarded.http.get("/health")).status_code == 503


def test_the_file_is_read_again_and_a_broken_one_locks_nobody_out(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "keys.toml"
    first, second = new_key(), new_key()
    write_keys(path, [Key("a", hash_of(first), requests_per_minute=2)])
    accounts = Accounts(path, clock)
    account = accounts.find(first)
    assert account is not None
    account.enter()
    write_keys(path, [Key("a", hash_of(first), requests_per_minute=2), Key("b", hash_of(second))])
    assert accounts.find(second) is None
    clock.now += 3
    assert accounts.find(second) is not None
    assert accounts.find(first) is account
    path.write_text("[[key]]\nname = ")
    clock.now += 3
    assert accounts.find(first) is account
    write_keys(path, [Key("b", hash_of(second))])
    clock.now += 3
    assert accounts.find(first) is None


def test_the_file_holds_no_key_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secret = new_key()
    keys = [Key('na"me\\ \n ü', hash_of(secret), "operator", 1, 2, 3), Key("b", hash_of("x"))]
    write_keys(path, keys)
    assert read_keys(path) == keys
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text",
    [
        "key = 1",
        "[[key]]\nname = 'a'",
        "x = 1",
        "[[key",
        "[[key]]\nname='a'\nhash='md5:1'",
        f"[[key]]\nname='a'\nhash='{hash_of('x')}'\nrole='king'",
        f"[[key]]\nname='a'\nhash='{hash_of('x')}'\nconcurrent=0",
        f"[[key]]\nname='a'\nhash='{hash_of('x')}'\ncolour=0",
        f"[[key]]\nname=''\nhash='{hash_of('x')}'",
        f"[[key]]\nname='a'\nhash='{hash_of('x')}'\n[[key]]\nname='a'\nhash='{hash_of('y')}'",
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(OptionError):
        Accounts(path)
    with pytest.raises(OptionError):
        read_keys(tmp_path / "none.toml")


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=60))
def test_a_bucket_never_gives_more_than_its_rate(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = Bucket(30, clock)
    begin, taken = clock.now, 0.0
    for seconds, amount in steps:
        clock.now += seconds
        wait = bucket.wait(amount)
        if wait == 0:
            bucket.take(amount)
            taken += amount
        elif amount <= 30:
            clock.now += wait + 1e-6
            assert bucket.wait(amount) == 0
    assert taken <= 30 + (clock.now - begin) * 0.5 + 1e-3


def test_a_refusal_takes_nothing(tmp_path: Path) -> None:
    clock = Clock()
    account = Account(Key("a", hash_of("x"), requests_per_minute=60, concurrent=1), clock)
    account.enter()
    for _ in range(10):
        with pytest.raises(RateLimited):
            account.enter()
    account.leave(None)
    account.enter()
    assert account.totals.refused == 10
    assert account.totals.requests == 2


# TLS


def certificate(folder: Path, name: str, ca: str | None = None) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself or by `ca`."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    if ca is not None:
        command += ["-CA", str(folder / f"{ca}.pem"), "-CAkey", str(folder / f"{ca}.key")]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def context(ca: Path, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        made.load_cert_chain(*client)
    return made


def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    client = certificate(tmp_path, "client")
    options = f"port=0, tls_cert={str(cert)!r}, tls_key={str(key)!r}"
    with running(fake_server(options=options)) as server:
        assert server.url.startswith("https://")
        assert httpx.get(server.url + "/health", verify=context(cert)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url + "/health")
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
    options += f", tls_clients={str(client[0])!r}"
    with running(fake_server(options=options)) as server:
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url + "/health", verify=context(cert))
        good = httpx.get(server.url + "/health", verify=context(cert, client))
        assert good.status_code == 200


def test_a_new_certificate_is_taken_and_a_broken_one_is_not(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    tls = Tls(cert, key, None)
    assert tls.refresh() is False
    fresh, fresh_key = certificate(tmp_path, "fresh")
    cert.write_bytes(fresh.read_bytes())
    key.write_bytes(fresh_key.read_bytes())
    os.utime(cert, ns=(1, 10**18))
    assert tls.refresh() is True
    cert.write_text("broken")
    assert tls.refresh() is False
    with pytest.raises(OptionError):
        Tls(cert, key, None)
    with pytest.raises(OptionError):
        Tls.of(ServerOptions(tls_cert=str(fresh)))


def test_the_operators_port(tmp_path: Path) -> None:
    with running(fake_server(options="port=0, operator_port=0")) as server:
        operator = server.await_line(r"operator: (http://\S+)").group(1)
        assert httpx.get(operator + "/operate/state").json()["ready"] is True
        assert httpx.get(operator + "/metrics").status_code == 200
        assert httpx.post(operator + CHAT, json=BODY).status_code == 404
        assert httpx.get(server.url + "/operate/state").status_code == 404
        assert httpx.post(operator + "/operate/drain").status_code == 200
        assert httpx.get(server.url + "/health").status_code == 503
        server.signal()
        assert server.wait() == 0


async def test_a_store_on_a_full_disk_keeps_the_ledger_in_memory() -> None:
    store = ResponseStore()
    store._base.now(lambda base: base.execute("pragma query_only = on"))
    assert await store.save_ledger({}) is True
    from headrace.server.accounts import Totals

    assert await store.save_ledger({"a": Totals()}) is False
