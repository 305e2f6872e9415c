"""A Kubernetes API that knows EndpointSlices alone: TLS, a token, lists and watches."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


def slice_of(
    name: str,
    *addresses: str,
    port: int = 8000,
    family: str = "IPv4",
    named: str = "http",
    **conditions: bool,
) -> dict[str, Any]:
    """An EndpointSlice, as the API writes one."""
    return {
        "metadata": {"name": name, "resourceVersion": "7", "labels": {"a": "b"}},
        "addressType": family,
        "endpoints": [{"addresses": [one], "conditions": conditions} for one in addresses],
        "ports": [{"name": named, "port": port, "protocol": "TCP"}],
    }


@dataclass
class ClusterApi:
    """The API's answers, and what it was asked."""

    slices: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    raw: bytes | None = None
    """A list's body in place of `slices`."""
    events: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """Lines of the watch; an empty one ends it."""
    asked: list[tuple[dict[str, list[str]], str]] = field(default_factory=list)
    """(query, authorization) of each request."""
    paths: set[str] = field(default_factory=set)
    serving: set[asyncio.Task[Any] | None] = field(default_factory=set)
    address: str = ""
    account: Path = Path()

    def tell(self, kind: str, what: dict[str, Any]) -> None:
        self.events.put_nowait(json.dumps({"type": kind, "object": what}).encode() + b"\n")

    async def _next(self, left: asyncio.Future[bytes]) -> bytes:
        """The next line of a watch; empty too where the client has left."""
        told = asyncio.ensure_future(self.events.get())
        await asyncio.wait({told, left}, return_when=asyncio.FIRST_COMPLETED)
        if told.done():
            return told.result()
        told.cancel()
        return b""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.add(task := asyncio.current_task())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            url = urlsplit(head[0].split(" ")[1])
            words = parse_qs(url.query)
            headers = {k.lower(): v for k, _, v in (one.partition(": ") for one in head[1:])}
            self.asked.append((words, headers.get("authorization", "")))
            self.paths.add(url.path)
            if "watch" in words and self.status == 200:
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                left = asyncio.ensure_future(reader.read())
                while line := await self._next(left):
                    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                    await writer.drain()
                left.cancel()
                writer.write(b"0\r\n\r\n")
            else:
                told = {"metadata": {"resourceVersion": "3"}, "items": self.slices}
                body = json.dumps(told).encode() if self.raw is None else self.raw
                head_line = f"HTTP/1.1 {self.status} X\r\ncontent-length: {len(body)}\r\n"
                writer.write(f"{head_line}connection: close\r\n\r\n".encode() + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.serving.discard(task)


@asynccontextmanager
async def cluster_api(folder: Path, **answers: Any) -> AsyncIterator[ClusterApi]:
    """The API on a port of its own, and a service account's files in `folder`."""
    key, ca = folder / "tls.key", folder / "ca.crt"
    command = "openssl req -x509 -newkey ec -nodes -days 1 -subj /CN=api"
    words = [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subprocess.run([*words, "-keyout", key, "-out", ca], check=True, capture_output=True)
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("here")
    api = ClusterApi(account=folder, **answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca, key)
    server = await asyncio.start_server(api._serve, "127.0.0.1", 0, ssl=context)
    async with server:
        api.address = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield api
        while api.serving:  # Who watches has left, or leaves at this word.
            api.events.put_nowait(b"")
            await asyncio.sleep(0.01)
