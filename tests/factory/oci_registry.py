"""A registry on loopback: the part of OCI's distribution specification 1.1 that pushing and pulling
needs, strict where registries are, and out of order where a test wants it so."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, urlsplit


class OciRegistry(ThreadingHTTPServer):
    """Registry of the pushed blobs and manifests, by digest and by tag."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}
        self.uploads: dict[str, bytes] = {}
        self.calls: list[str] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OciRegistry

    def log_message(self, format: str, *args: object) -> None:
        self.server.calls.append(f"{self.command} {self.path}")

    def _answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        kind, name = self.path.rsplit("/", 2)[1:]
        if kind == "blobs" and name in self.server.blobs:
            return self._answer(200, self.server.blobs[name])
        found = self.server.manifests.get(self.server.tags.get(name, name))
        if kind == "manifests" and found:
            return self._answer(200, found[1], Content_Type=found[0])
        return self._answer(404, b'{"errors": []}')

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._body()
        number = str(len(self.server.uploads))
        self.server.uploads[number] = b""
        self._answer(202, Location=f"{self.path}{number}")

    def do_PATCH(self) -> None:
        number, data = self.path.rsplit("/", 1)[1], self._body()
        begin, end = map(int, self.headers["Content-Range"].split("-"))
        if begin != len(self.server.uploads[number]) or end - begin + 1 != len(data):
            return self._answer(416)
        self.server.uploads[number] += data
        return self._answer(202, Location=self.path)

    def do_PUT(self) -> None:
        parts, data = urlsplit(self.path), self._body()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        kind, name = parts.path.rsplit("/", 2)[1:]
        if kind == "uploads":
            data = self.server.uploads.pop(name) + data
            (wanted,) = parse_qs(parts.query)["digest"]
            if wanted != f"sha256:{hashlib.sha256(data).hexdigest()}":
                return self._answer(400, b"DIGEST_INVALID")
            self.server.blobs[wanted] = data
            return self._answer(201)
        document = json.loads(data)
        needed = [*document.get("layers", []), *filter(None, [document.get("config")])]
        if any(one["digest"] not in self.server.blobs for one in needed):
            return self._answer(404, b"MANIFEST_BLOB_UNKNOWN")
        if any(one["digest"] not in self.server.manifests for one in document.get("manifests", [])):
            return self._answer(404, b"MANIFEST_UNKNOWN")
        if re.fullmatch("sha256:[0-9a-f]{64}", name) and name != digest:
            return self._answer(400, b"DIGEST_INVALID")
        self.server.manifests[digest] = self.headers["Content-Type"], data
        self.server.tags[name] = digest
        return self._answer(201)


@contextmanager
def running() -> Iterator[OciRegistry]:
    with OciRegistry() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
