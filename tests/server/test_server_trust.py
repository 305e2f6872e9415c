"""Permissions after things have changed: certificates, keys, names, and words that clients
give. Each of these was wrong once: the test failed first."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Running, fake_server, running
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.base.errors import InvalidRequest, OptionError
from headrace.base.sampling import SamplingParams
from headrace.server.accounts import Accounts
from headrace.server.app import create_app, create_operator_app
from headrace.server.hosts import read_hosts
from headrace.server.keys import Key, hash_of, new_key, write_keys
from headrace.server.tls import Tls, _Handshakes

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
LONG = ASK | {"max_tokens": 400}


# Certificates


def authority(folder: Path, name: str) -> Path:
    cert = folder / f"{name}.pem"
    openssl(
        "req",
        "-x509",
        *NEW,
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-keyout",
        cert.with_suffix(".key"),
        "-out",
        cert,
    )
    return cert


def issued(folder: Path, name: str, ca: Path) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    openssl(
        "req",
        "-x509",
        *NEW,
        "-days",
        "2",
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-addext",
        "basicConstraints=CA:FALSE",
        "-keyout",
        key,
        "-out",
        cert,
        "-CA",
        ca,
        "-CAkey",
        ca.with_suffix(".key"),
    )
    return cert, key


NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@contextmanager
def greeting(context: ssl.SSLContext) -> Iterator[int]:
    """A listener of asyncio with this context, on its own thread: says "hi" to whoever gets in."""
    loop = asyncio.new_event_loop()

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hi")
        await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(hello, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def shaken(port: int, ca: Path, client: tuple[Path, Path] | None = None) -> bool:
    """Does a handshake lead to a greeting?"""
    context = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        context.load_cert_chain(*client)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=120) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as secure,
        ):
            return secure.recv(2) == b"hi"
    except (ssl.SSLError, ConnectionError):
        return False


def test_a_certificate_without_its_key_changes_nothing(tmp_path: Path) -> None:
    ca = authority(tmp_path, "ca")
    cert, key = issued(tmp_path, "server", ca)
    fresh, fresh_key = issued(tmp_path, "fresh", ca)
    tls = Tls(cert, key, None)
    with greeting(tls.context) as port:
        assert shaken(port, ca)
        cert.write_bytes(fresh.read_bytes())
        assert tls.refresh() is False
        assert shaken(port, ca)
        key.write_text("garbage")
        assert tls.refresh() is False
        assert shaken(port, ca)
        key.write_bytes(fresh_key.read_bytes())
        assert tls.refresh() is True
        assert shaken(port, ca)


def test_a_client_without_tls_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its connection ends without an answer, so only the log says what was wrong."""
    ca = authority(tmp_path, "ca")
    tls = Tls(*issued(tmp_path, "server", ca), None)
    with greeting(tls.context) as port:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port), timeout=120) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                with suppress(ConnectionError):
                    assert b"hi" not in raw.recv(100)
        assert not shaken(port, authority(tmp_path, "foreign"))
        assert shaken(port, ca)
    plain, refused = caplog.records  # The second and third of one reason wait for a minute.
    assert "begin with https" in plain.message
    assert refused.message == "a TLS handshake failed"
    assert "UNKNOWN_CA" in refused.reason  # type: ignore[attr-defined]


def test_failed_handshakes_of_one_reason_are_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    failures = _Handshakes(lambda: now[0])
    error = ssl.SSLError(1, "[SSL: HTTP_REQUEST] http request")
    error.reason = "HTTP_REQUEST"
    for now[0] in (0.0, 1.0, 59.0, 61.0):
        failures.note(error)
    assert [one.times for one in caplog.records] == [1, 3]  # type: ignore[attr-defined]


def test_a_removed_authority_lets_nobody_in(tmp_path: Path) -> None:
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    server = issued(tmp_path, "server", first)
    old, new = issued(tmp_path, "old", first), issued(tmp_path, "new", second)
    clients = tmp_path / "clients.pem"
    clients.write_bytes(first.read_bytes())
    tls = Tls(*server, clients)
    with greeting(tls.context) as port:
        assert shaken(port, first, old)
        assert not shaken(port, first, new)
        assert not shaken(port, first)
        clients.write_bytes(second.read_bytes())
        assert tls.refresh() is True
        assert not shaken(port, first, old)
        assert shaken(port, first, new)


def test_a_revoked_client_stays_out(tmp_path: Path) -> None:
    ca = authority(tmp_path, "ca")
    server, client = issued(tmp_path, "server", ca), issued(tmp_path, "client", ca)
    other = issued(tmp_path, "other", ca)
    config = tmp_path / "ca.cnf"
    config.write_text(
        f"[ca]\ndefault_ca = x\n[x]\ndatabase = {tmp_path}/index.txt\n"
        f"default_md = sha256\ndefault_crl_days = 2\ncrlnumber = {tmp_path}/number\n"
    )
    (tmp_path / "index.txt").touch()
    (tmp_path / "number").write_text("01\n")
    sign = ("-config", config, "-cert", ca, "-keyfile", ca.with_suffix(".key"))
    openssl("ca", *sign, "-revoke", client[0])
    openssl("ca", *sign, "-gencrl", "-out", tmp_path / "crl.pem")
    clients = tmp_path / "clients.pem"
    clients.write_bytes(ca.read_bytes())
    tls = Tls(*server, clients)
    with greeting(tls.context) as port:
        assert shaken(port, ca, client)
        clients.write_bytes(ca.read_bytes() + (tmp_path / "crl.pem").read_bytes())
        assert tls.refresh() is True
        assert not shaken(port, ca, client)
        assert shaken(port, ca, other)


# Keys


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def test_a_replaced_key_goes_on_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    first, second = new_key(), new_key()
    write_keys(path, [Key("bob", hash_of(first), tokens_per_minute=100)])
    accounts = Accounts(path, Clock())
    account = accounts.find(first)
    assert account is not None
    account.enter()
    write_keys(path, [Key("bob", hash_of(second), tokens_per_minute=100)])
    assert accounts.find(first) is None
    after = accounts.find(second)
    assert after is account, "one name, one account"
    account.totals.completion_tokens += 25
    write_keys(path, [])
    assert accounts.find(second) is None
    assert accounts.named("bob") is None
    assert accounts.totals()["bob"].completion_tokens == 25, "what was used stays in the ledger"
    write_keys(path, [Key("bob", hash_of(first))])
    again = accounts.find(first)
    assert again is not None
    assert (again.totals.requests, again.totals.completion_tokens) == (1, 25)


def test_a_file_that_became_empty_locks_nobody_out(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key = new_key()
    write_keys(path, [Key("a", hash_of(key))])
    accounts = Accounts(path, Clock())
    failures: list[str] = []
    accounts.failed = failures.append
    path.write_text("")
    assert accounts.find(key) is not None
    assert failures == ["keys_read"]
    write_keys(path, [])  # The last one was removed on purpose: the file says what it is.
    assert accounts.find(key) is None


@pytest.mark.parametrize("way", ["removed", "replaced"])
def test_a_removed_key_ends_what_it_began(tmp_path: Path, way: str) -> None:
    path = tmp_path / "keys.toml"
    gone, stays = new_key(), new_key()
    kept = [Key("stays", hash_of(stays)), Key("boss", hash_of("boss"), "operator")]
    write_keys(path, [Key("gone", hash_of(gone)), *kept])
    gate, options = tmp_path / "gate", f"port=0, keys={str(path)!r}"
    with running(fake_server(gate=gate, options=options)) as server:
        results: dict[str, Any] = {}

        def ask(name: str, key: str, stream: bool) -> None:
            body = LONG | {"stream": stream}
            headers = {"authorization": f"Bearer {key}"}
            with httpx.stream("POST", server.url + CHAT, json=body, headers=headers) as reply:
                data = reply.read()
            results[name] = reply.status_code, data

        threads = [
            threading.Thread(target=ask, args=arguments)
            for arguments in (
                ("stream", gone, True),
                ("whole", gone, False),
                ("other", stays, True),
            )
        ]
        for thread in threads:
            thread.start()
        boss = {"authorization": "Bearer boss"}
        end = time.monotonic() + 120
        while len(httpx.get(server.url + "/v1/stats", headers=boss).json()["requests"]) < 3:
            assert time.monotonic() < end, "they are not in work"
            time.sleep(0.05)
        write_keys(path, kept + ([Key("gone", hash_of(new_key()))] if way == "replaced" else []))
        for thread in threads[:2]:
            thread.join()
        gate.touch()
        threads[2].join()
        status, data = results["stream"]
        assert status == 200
        last = data.decode().strip().split("\n\n")
        assert json.loads(last[-2].removeprefix("data: "))["error"]["code"] == "key_removed"
        assert last[-1] == "data: [DONE]"
        status, data = results["whole"]
        assert (status, json.loads(data)["error"]["code"]) == (401, "key_removed")
        assert results["other"][1].endswith(b"data: [DONE]\n\n")
        assert b"error" not in results["other"][1]


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


async def test_prefixes_belong_to_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    names = {"alice": None, "bob": None, "carol": "team", "dave": "team", "team": None}
    keys = {name: new_key() for name in names}
    write_keys(
        path, [Key(name, hash_of(keys[name]), prefixes=team) for name, team in names.items()]
    )
    engine = FakeEngine()
    salts: list[str] = []
    inner = engine.submit
    engine.submit = lambda *a, **k: (salts.append(k["cache_salt"]), inner(*a, **k))[1]  # type: ignore[method-assign]
    app = create_app(engine, ServerOptions(keys=str(path)))  # type: ignore[arg-type]

    async def salt(name: str, given: str | None = None, path: str = CHAT) -> str:
        body: dict[str, Any] = {"max_tokens": 1, "cache_salt": given}
        body |= {"messages": ASK["messages"]} if path == CHAT else {"prompt": "hi"}
        headers = {"authorization": f"Bearer {keys[name]}"}
        async with client_of(app) as client:
            assert (await client.post(path, json=body, headers=headers)).status_code == 200
        return salts[-1]

    assert await salt("alice") == await salt("alice", path="/v1/completions")
    assert await salt("carol") == await salt("dave")
    assert await salt("alice", "x") != await salt("bob", "x")
    mine = await salt("alice")
    for forged in ("alice", "key alice", mine, mine.rstrip("\0")):
        assert await salt("bob", forged) != mine
    assert len({await salt(name) for name in names}) == 4
    assert await salt("alice", "x") not in (mine, "x")


async def test_without_keys_the_salt_is_the_clients() -> None:
    engine = FakeEngine()
    salts: list[str] = []
    inner = engine.submit
    engine.submit = lambda *a, **k: (salts.append(k["cache_salt"]), inner(*a, **k))[1]  # type: ignore[method-assign]
    async with client_of(create_app(engine, ServerOptions())) as client:  # type: ignore[arg-type]
        for body in (ASK, ASK | {"cache_salt": "x"}):
            assert (await client.post(CHAT, json=body)).status_code == 200
    assert salts == ["", "x"]


# Names that clients give


async def test_one_name_for_many_requests(tmp_path: Path) -> None:
    """Proxies give the requests of one page one `x-request-id`."""
    gate = tmp_path / "gate"
    engine = FakeEngine(gate=gate)
    app = create_app(engine, ServerOptions())  # type: ignore[arg-type]
    async with client_of(app) as client, client_of(create_operator_app(app)) as boss:
        headers = {"x-request-id": "one"}
        body = ASK | {"max_tokens": 50}
        for path, more in ((CHAT, body), ("/v1/completions", {"prompt": "hi", "max_tokens": 50})):
            asked = [
                asyncio.create_task(client.post(path, json=more, headers=headers)) for _ in range(3)
            ]
            while len(engine.running) < 3:
                await asyncio.sleep(0.01)
            assert not any(name in engine.running for name in ("chatcmpl-one", "cmpl-one-0"))
            gate.touch()
            replies = await asyncio.gather(*asked)
            assert [reply.status_code for reply in replies] == [200] * 3
            assert all(reply.headers["x-request-id"] == "one" for reply in replies)
            assert {reply.json()["id"] for reply in replies} <= {"chatcmpl-one", "cmpl-one"}
            gate.unlink()
        asked = [
            asyncio.create_task(client.post(CHAT, json=LONG, headers=headers)) for _ in range(2)
        ]
        while len(engine.running) < 2:
            await asyncio.sleep(0.01)
        ended = await boss.post("/operate/abort", json={"request_id": "chatcmpl-one"})
        assert ended.status_code == 200
        for reply in await asyncio.gather(*asked):
            assert reply.json()["error"]["code"] == "aborted"
        assert (
            await boss.post("/operate/abort", json={"request_id": "chatcmpl-one"})
        ).status_code == 404


def test_lists_of_stop_ids_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="at most 1024 stop tokens"):
        SamplingParams(stop_token_ids=[1] * 1025).verify(10)
    SamplingParams(stop_token_ids=[1] * 1024).verify(10)


# Names of the server


STRANGERS = [
    "evil.example",
    "evil.example:8611",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "a.b@c.d",
    "evil.example.",
    "1.2.3.4.5",
    "[::1].evil.example",
]
OWN = [
    "127.0.0.1",
    "127.0.0.1:8000",
    "[::1]:8000",
    "10.0.0.7",
    "localhost",
    "LOCALHOST:8000",
    "headrace",
    "headrace:8000",
    "box.local",
    "a.localhost",
    "headrace.default.svc",
    "headrace.default.svc.cluster.local",
]


async def asked_as(app: Any, host: str, path: str = "/v1/models") -> httpx.Response:
    async with client_of(app) as client:
        return await client.get(path, headers={"host": host})


@pytest.mark.parametrize("host", STRANGERS)
async def test_a_rebound_name_is_refused(host: str) -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    for each in (app, create_operator_app(app)):
        reply = await asked_as(each, host, "/metrics")
        assert reply.status_code == 421
        assert reply.json()["error"]["code"] == "host_not_allowed"
    async with client_of(app) as client:
        page = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert (await client.post(CHAT, json=ASK, headers=page)).status_code == 421


@pytest.mark.parametrize("host", OWN)
async def test_own_names_are_served(host: str) -> None:
    assert (await asked_as(create_app(FakeEngine(), ServerOptions()), host)).status_code == 200  # type: ignore[arg-type]


async def test_names_of_the_operator(tmp_path: Path) -> None:
    options = ServerOptions(hosts="api.example.com, .example.org")
    app = create_app(FakeEngine(), options)  # type: ignore[arg-type]
    statuses = {
        host: (await asked_as(app, host)).status_code
        for host in (
            "api.example.com:443",
            "a.example.org",
            "b.a.example.org",
            "example.com",
            "x.api.example.com",
            "badexample.org",
            "localhost",
        )
    }
    assert [host for host, status in statuses.items() if status == 421] == [
        "example.com",
        "x.api.example.com",
        "badexample.org",
    ]
    for wrong in ("*", "https://a.example", "a b"):
        with pytest.raises(OptionError, match="hosts"):
            read_hosts(wrong)
    # No browser sends a key by itself: with keys a name may be any.
    keys = tmp_path / "keys.toml"
    write_keys(keys, [Key("a", hash_of("secret"))])
    app = create_app(FakeEngine(), ServerOptions(keys=str(keys)))  # type: ignore[arg-type]
    assert (await asked_as(app, "evil.example")).status_code == 401


# The wire


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server with four connections."""
    code = fake_server()
    code[-1] = code[-1].replace(
        "options =",
        "from headrace.server.protocol import BoundedProtocol as bounds\n"
        "bounds.max_connections = 4\noptions =",
    )
    with running(code) as server:
        yield server


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def exchange(server: Running, *parts: bytes) -> bytes:
    with connect(server) as raw:
        for part in parts:
            raw.sendall(part)
            time.sleep(0.05)
        data = b""
        with_end = time.monotonic() + 120
        while time.monotonic() < with_end and (part := raw.recv(1 << 16)):
            data += part
        return data


BODY = json.dumps(ASK).encode()
H2C = (
    b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    b"Content-Length: %d\r\nHost: localhost\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
    b"Upgrade: h2c\r\nUser-Agent: Java-http-client/17\r\nContent-Type: application/json\r\n\r\n"
) % len(BODY)
CLOSING = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("cut", [0, 30, 60, len(H2C) - 80, len(H2C) - 1, len(H2C), len(H2C) + 20])
def test_a_wish_for_http_2_costs_no_body(small: Running, cut: int) -> None:
    whole = H2C + BODY + H2C + BODY + CLOSING
    reply = exchange(small, whole[:cut], whole[cut:])
    assert reply.count(b"HTTP/1.1 200") == 3, reply
    assert b"HTTP/1.1 4" not in reply


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n", b"Host: a\r\nHOST: a\r\n"])
def test_a_request_has_one_host(small: Running, hosts: bytes) -> None:
    reply = exchange(small, b"GET /health HTTP/1.1\r\n%bconnection: close\r\n\r\n" % hosts)
    assert reply.startswith(b"HTTP/1.1 400")
    assert b"malformed_http" in reply


def test_http_1_0_needs_none(small: Running) -> None:
    assert exchange(small, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_flood_of_connections_leaves_probes_their_own(small: Running) -> None:
    with_all = [connect(small) for _ in range(60)]
    try:
        for path in ("/health", "/v1/health/live", "/ping"):
            assert httpx.get(small.url + path).status_code == 200
        reply = httpx.get(small.url + "/v1/models")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "too_many_connections"
        assert reply.headers["retry-after"]
    finally:
        for raw in with_all:
            raw.close()
    end = time.monotonic() + 120
    while httpx.get(small.url + "/v1/models").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.05)


# What nobody awaits


async def test_a_habit_that_fails_is_seen_and_begins_anew() -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    failing, again = True, asyncio.Event()

    async def habit() -> None:
        if failing:
            raise OSError("no more files")
        again.set()

    task = app.state.service.tasks.keep("a habit", habit, pause=0.05)
    async with client_of(app) as client:
        while (reply := await client.get("/health")).status_code == 200:
            await asyncio.sleep(0)
        assert reply.json()["message"] == "a habit does not run: OSError: no more files"
        failing = False
        await asyncio.wait_for(again.wait(), 120)
        await task
        assert (await client.get("/health")).status_code == 200
        counted = (await client.get("/metrics")).text
        assert 'headrace_server_failures_total{kind="habit"} 0.0' not in counted


def test_the_files_of_a_certificate_may_be_gone_for_a_while(tmp_path: Path) -> None:
    cert, key = issued(tmp_path, "server", authority(tmp_path, "ca"))
    tls = Tls(cert, key, None)
    os.rename(cert, tmp_path / "away")
    assert tls.refresh() is False
    os.rename(tmp_path / "away", cert)
    assert tls.refresh() in (True, False)


@pytest.mark.parametrize("guards", ["none", "keys", "keys, certificate, clients' certificates"])
def test_the_line_to_try_gets_an_answer(tmp_path: Path, guards: str) -> None:
    """Run the printed line in a shell that has the caller's key and its certificate."""
    token, options = new_key(), ["port=0"]
    if "keys" in guards:
        write_keys(tmp_path / "keys.toml", [Key("bob", hash_of(token))])
        options.append(f"keys={str(tmp_path / 'keys.toml')!r}")
    if "clients" in guards:
        ca = authority(tmp_path, "ca")
        cert, key = issued(tmp_path, "server", ca)
        issued(tmp_path, "CLIENT", ca)
        options += [f"tls_cert={str(cert)!r}", f"tls_key={str(key)!r}", f"tls_clients={str(ca)!r}"]
    with running(fake_server(options=", ".join(options))) as server:
        line = server.await_line("^try: (.*)$")[1]
        done = subprocess.run(
            ["bash", "-c", f"{line} --silent --show-error"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"HEADRACE_API_KEY": token},
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["object"] == "chat.completion", done.stdout
