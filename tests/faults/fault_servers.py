"""The rows of the fault table that need a server of their own, beside those of `fault_rows`."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import zmq
from attacks import Attacker, asking
from fault_client import ANSWERED, HUNG, LIMIT, LOST, Row, all_of, ended, http
from fault_rows import Place, place
from processes import Running, api_pid, headrace, running

from headrace.base.split import Handed
from headrace.worker import split_wire as wire
from ports import two_ports
from tiny import moonshine, talker

RELOADED = 12.0
"""Seconds within which files of certificates are read again (`server.tls.LOOK_SECONDS`)."""


async def full_temporary_folder(folder: Path) -> Row | None:
    """A server whose TMPDIR has no room: a file system of its own. None where none can be had."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return None
    room = folder / "room"
    room.mkdir(exist_ok=True)
    row = Row("fill", "temporary folder full, the engine killed")
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {room} && "
        f'(head -c 900k /dev/zero > {room}/filler; true) && export TMPDIR={room} && exec "$@"'
    )
    wrap = ("unshare", "--mount", "sh", "-c", script, "sh")
    with place(folder, wrap=wrap) as full:
        row.count(await all_of(full.url, [full.ask(4)] * 4))
        os.kill(full.engine, signal.SIGKILL)
        await full.until_ready(False, 5)
        return await full.serves(row)


async def held_loop(folder: Path) -> Row:
    """Measure how long the dearest parsed bodies hold the event loop, one after the other."""
    row = Row("forge", "the dearest bodies below the bounds, one at a time: event loop")
    row.limits["hold_seconds"] = 0.05
    with place(folder) as own:
        await all_of(own.url, [own.ask(4)])
        row.facts["hold_before_seconds"] = await longest_hold(own)
        attacker = await Attacker.start("heavy", own.url, own.model)
        row.count(await attacker.go())
        row.facts["hold_seconds"] = await longest_hold(own)
        return await own.serves(row)


async def longest_hold(own: Place) -> float:
    """Return the seconds, since the start of the process."""
    text = (await asyncio.to_thread(httpx.get, own.server.url + "/metrics", timeout=LIMIT)).text
    name = "headrace_event_loop_longest_hold_seconds "
    return round(float(text.partition("\n" + name)[2].partition("\n")[0]), 4)


async def cut_panels(folder: Path) -> Row | None:
    """The kept file of repacked weights is truncated while it is mapped, and read from then on.
    None where the default model is not on the disk."""
    command = headrace("models", "--json")
    found = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)
    (default,) = [each for each in json.loads(found.stdout) if each["default"]]
    if not default["complete"]:
        return None
    (model,) = Path(default["path"]).glob("*.gguf")
    row = Row("fill", "the file of repacked weights is cut under four streams")
    own = folder / "panels-of-a-row"
    own.mkdir()
    link = own / model.name
    link.symlink_to(model)
    flags = ("--port", "0", "--cache-dir", str(own), "--max-context", "512")
    with running(headrace("serve", str(link), *flags)) as server:
        here = Place(server, link.name, own)

        async def cut() -> None:
            await here.until_in_work(4)
            (kept,) = own.rglob("*.panels")
            os.truncate(kept, 4096)

        engine = here.engine
        row.count(await all_of(here.url, [here.ask(200)] * 4, then=cut))
        row = await here.serves(row)
        row.facts["engine"] = "another" if here.engine != engine else "the same"
        return row


HEARS = all(find_spec(name) for name in ("soundfile", "soxr", "websockets"))
"""Is the extra `audio` installed?"""


def hearing(folder: Path) -> Any:
    """A server with a random Moonshine, to be entered."""
    model = folder / "moonshine"
    if not model.exists():
        moonshine.make(model)
    return running(headrace("serve", str(model), "--port", "0", "--threads", "1"))


def silence(minutes: int, *, told: bool = True, rate: int = 8_000) -> bytes:
    """A FLAC, 25 bytes a second. `told`: does its head say how long it is?"""
    import numpy as np
    import soundfile

    room, minute = io.BytesIO(), np.zeros(60 * rate, np.int16)
    with soundfile.SoundFile(room, "w", rate, 1, subtype="PCM_16", format="FLAC") as file:
        for _ in range(minutes):
            file.write(minute)
    data = room.getvalue()
    if told:
        return data
    numbers = int.from_bytes(data[18:26], "big") >> 36 << 36
    return data[:18] + numbers.to_bytes(8, "big") + data[26:]


async def heard(server: Running, data: bytes) -> str:
    """Send one file and say how it ended."""
    async with http() as client:
        try:
            url = server.url + "/v1/audio/transcriptions"
            reply = await client.post(url, files={"file": data}, timeout=LIMIT)
        except httpx.TimeoutException:
            return HUNG
        except httpx.HTTPError:
            return LOST
    return ended(reply.status_code, reply.text, streamed=False)


def decoders(server: Running) -> int:
    found = 0
    for child in psutil.Process(api_pid(server)).children():
        with suppress(psutil.NoSuchProcess):
            found += "headrace.media.child" in child.cmdline()
    return found


async def abandoned_sounds(folder: Path) -> Row | None:
    """Long files whose clients leave while one is decoded and the others wait."""
    if not HEARS:
        return None
    row = Row("forge", "a sound of a minute after 60 abandoned ones of four hours")
    row.limits |= {"small_seconds": 3.0, "decoders_left": 0}
    with hearing(folder) as server:
        long, small = silence(234, told=False), silence(1)
        row.count([await heard(server, small)])
        sent = [asyncio.create_task(heard(server, long)) for _ in range(60)]
        while not await asyncio.to_thread(decoders, server):
            await asyncio.sleep(0.02)
        await asyncio.wait(sent, timeout=1.0)
        for each in sent:
            each.cancel()
        await asyncio.wait(sent)
        begin = time.monotonic()
        row.facts["after"] = await heard(server, small)
        row.facts["small_seconds"] = round(time.monotonic() - begin, 2)
        row.facts["decoders_left"] = await asyncio.to_thread(decoders, server)
        return row.count([str(row.facts["after"])])


async def hoarding_sessions(folder: Path) -> Row | None:
    """Sessions that append ten minutes each and commit nothing."""
    if not HEARS:
        return None
    row = Row("flood", "24 sessions that append ten minutes each: memory")
    row.limits["memory_beside_mib"] = 512
    audio = base64.b64encode(bytes(750_000)).decode()
    append = json.dumps({"type": "input_audio_buffer.append", "audio": audio})
    told: dict[str, int] = {}
    with hearing(folder) as server:
        process = psutil.Process(api_pid(server))
        before = peak = process.memory_info().rss
        sessions = [asyncio.create_task(_hoard(server.url, append, told)) for _ in range(24)]
        while not all(each.done() for each in sessions):
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(0.02)
        row.count([each.result() for each in sessions])
        row.facts["memory_beside_mib"] = round((peak - before) / 2**20)
        row.facts["not_refused"] = int(not told.get("overloaded"))
        row.limits["not_refused"] = 0
        row.facts["after"] = await heard(server, silence(1))
        return row


async def _hoard(url: str, append: str, told: dict[str, int]) -> str:
    """Append six times; the events of errors by their codes are counted in `told`."""
    import websockets

    url = url.replace("http", "ws", 1) + "/v1/realtime"
    fields = {"turn_detection": None, "format": {"type": "audio/pcmu"}}
    update = {"type": "session.update", "session": {"audio": {"input": fields}}}
    try:
        async with asyncio.timeout(LIMIT), websockets.connect(url) as session:
            await session.send(json.dumps(update))
            for _ in range(6):
                await session.send(append)
            await session.send(json.dumps({"type": "end", "event_id": "end"}))
            while True:
                event = json.loads(await session.recv())
                if event["type"] == "error":
                    if event["error"]["event_id"] == "end":
                        return ANSWERED
                    code = event["error"]["code"]
                    told[code] = told.get(code, 0) + 1
    except TimeoutError:
        return HUNG
    except (OSError, websockets.WebSocketException):
        return LOST


async def certificates(folder: Path) -> Row | None:
    """A certificate whose key comes later, then a client that is revoked, under requests on new
    connections all the while. None without the tool that makes certificates."""
    if shutil.which("openssl") is None:
        return None
    row = Row("forge", "the certificate before its key, then a client revoked: new connections")
    own = folder / "certificates-of-a-row"
    own.mkdir()
    papers = Papers(own)
    first, second = papers.issued("first"), papers.issued("second")
    alice, mallory = papers.issued("alice"), papers.issued("mallory")
    cert, key, clients = own / "now.pem", own / "now.key", own / "clients.pem"
    cert.write_bytes(first[0].read_bytes())
    key.write_bytes(first[1].read_bytes())
    clients.write_bytes(papers.ca.read_bytes())
    model = folder / "model"
    if not model.exists():
        talker.make(model)
    flags = (
        "--port",
        "0",
        "--threads",
        "1",
        "--kernels",
        "ref",
        "--tls-cert",
        str(cert),
        "--tls-key",
        str(key),
        "--tls-clients",
        str(clients),
    )
    with running(headrace("serve", str(model), *flags)) as server:
        url, ask = server.url + "/v1/completions", asking(model.name, 4, stream=False)

        async def till(wanted: Callable[[], Awaitable[bool]]) -> bool:
            """Alice asks on a new connection each time, until it is so."""
            end = time.monotonic() + RELOADED
            while time.monotonic() < end:
                row.count([await _over_tls(url, ask, papers.context(alice))])
                if await wanted():
                    return True
                await asyncio.sleep(0.5)
            return False

        async def never() -> bool:
            return False

        async def renewed() -> bool:
            return await asyncio.to_thread(_serial, server.url) == papers.serial(second[0])

        async def refused() -> bool:  # TLS 1.3 tells a client by the end of its connection.
            return await _over_tls(url, ask, papers.context(mallory)) == LOST

        row.count([await _over_tls(url, ask, papers.context(mallory))])
        cert.write_bytes(second[0].read_bytes())
        await till(never)  # The old certificate stays whole until the key fits.
        key.write_bytes(second[1].read_bytes())
        row.facts["not_renewed"] = int(not await till(renewed))
        clients.write_bytes(papers.ca.read_bytes() + papers.revoked(mallory[0]))
        row.facts["not_revoked"] = int(not await till(refused))
        row.count([await _over_tls(url, ask, papers.context(alice))])
        row.facts["not_answered"] = row.sent - row.answered
        row.limits |= {"not_renewed": 0, "not_revoked": 0, "not_answered": 0}
        row.facts["after"] = await _over_tls(url, ask, papers.context(alice))
    return row


async def _over_tls(url: str, ask: dict[str, Any], context: ssl.SSLContext) -> str:
    try:
        async with httpx.AsyncClient(verify=context, timeout=LIMIT) as client:
            return ANSWERED if (await client.post(url, json=ask)).status_code == 200 else LOST
    except httpx.TimeoutException:
        return HUNG
    except httpx.HTTPError:
        return LOST


def _serial(url: str) -> int:
    host, port = url.split("/")[2].split(":")
    return _serial_of(ssl.get_server_certificate((host, int(port))))


def _serial_of(pem: str) -> int:
    out = subprocess.run(
        ["openssl", "x509", "-noout", "-serial"],
        input=pem,
        text=True,
        capture_output=True,
        check=True,
    )
    return int(out.stdout.strip().removeprefix("serial="), 16)


class Papers:
    """An authority in a folder: certificates of servers and clients, and who is revoked."""

    _NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl(
            "req", "-x509", *self._NEW, "-subj", "/CN=ca", "-keyout", self._key, "-out", self.ca
        )
        self._config = folder / "ca.cnf"
        self._config.write_text(
            f"[ca]\ndefault_ca = x\n[x]\ndatabase = {folder}/index.txt\n"
            f"default_md = sha256\ndefault_crl_days = 2\ncrlnumber = {folder}/number\n"
        )
        (folder / "index.txt").touch()
        (folder / "number").write_text("01\n")

    def issued(self, name: str) -> tuple[Path, Path]:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        _openssl(
            "req",
            "-x509",
            *self._NEW,
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
            self.ca,
            "-CAkey",
            self._key,
        )
        return cert, key

    def revoked(self, cert: Path) -> bytes:
        """The list of those that are revoked, with this one."""
        sign = ("-config", self._config, "-cert", self.ca, "-keyfile", self._key)
        _openssl("ca", *sign, "-revoke", cert)
        out = self._folder / "crl.pem"
        _openssl("ca", *sign, "-gencrl", "-out", out)
        return out.read_bytes()

    def context(self, client: tuple[Path, Path]) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(*client)
        return context

    @staticmethod
    def serial(cert: Path) -> int:
        return _serial_of(cert.read_text())


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


async def lying_neighbours(folder: Path) -> Row:
    """Messages at the socket of a prefill server that are none: it goes on lending, and counts."""
    row = Row("forge", "40 messages that are none at a prefill server's socket")
    address = f"tcp://127.0.0.1:{two_ports()}"
    handed = Handed([1] * 33, "#text#", None, b"k" * 16, 0, 2)
    no_utf8 = wire.pack(wire.Compute(1, handed)).replace(b"#text#", b"\xff" * 6)
    forged = [no_utf8, b"\x91" * 2**20, b"", b"\xc1" * 100]
    with place(folder, "--role", f"prefill@{address}") as own:
        context = zmq.Context()
        stranger = wire.asking(context, address, None)

        def lends() -> bool:
            stranger.send(wire.pack(wire.Renew([])))
            return bool(stranger.poll(1000 * LIMIT)) and bool(stranger.recv())

        row.facts["lends_before"] = str(await asyncio.to_thread(lends))
        for _ in range(10):
            for message in forged:
                stranger.send(message)
        row.count(await all_of(own.url, [own.ask(4)] * 4))
        row.facts["silent_after"] = int(not await asyncio.to_thread(lends))
        counted, end = 0.0, time.monotonic() + LIMIT
        while counted < 10 * len(forged) and time.monotonic() < end:  # Counts come with beats.
            await asyncio.sleep(0.05)
            text = (await asyncio.to_thread(httpx.get, own.server.url + "/metrics")).text
            counted = next(
                float(line.split()[-1])
                for line in text.splitlines()
                if line.startswith("headrace:failures_total") and 'kind="thread"' in line
            )
        row.facts["not_counted"] = 10 * len(forged) - int(counted)
        row.limits |= {"silent_after": 0, "not_counted": 0}
        context.destroy(linger=0)
        return await own.serves(row)


Own = Callable[[Path], Awaitable[Row | None]]
QUICK: dict[str, Own] = {
    "full_temporary_folder": full_temporary_folder,
    "held_loop": held_loop,
    "lying_neighbours": lying_neighbours,
    "abandoned_sounds": abandoned_sounds,
    "hoarding_sessions": hoarding_sessions,
}
"""Faults that CI tries too."""
SLOW: dict[str, Own] = {"certificates": certificates, "cut_panels": cut_panels}

__all__ = ["QUICK", "SLOW"]
