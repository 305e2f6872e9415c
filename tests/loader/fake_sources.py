"""A hub on loopback and a folder of wheels: real bytes over real sockets and through real pip."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Serves `files` of one repository; the switches are its bad habits."""

    repo: str
    files: dict[str, bytes]
    url: str = ""
    resumes: bool = True
    break_after: int | None = None
    """Close the connection after so many bytes of a body, `breaks` times."""
    breaks: int = 0
    tag: str | None = None
    status: int | None = None
    lies_about_size: int = 0
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """(path, Range header) of each request for a file."""
    keys: list[str | None] = field(default_factory=list)
    """Authorization header of each request."""


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.keys.append(self.headers.get("Authorization"))
        if path.startswith(f"/api/models/{hub.repo}/revision/"):
            return self.send_listing()
        prefix = f"/{hub.repo}/resolve/"
        name = path[len(prefix) :].partition("/")[2] if path.startswith(prefix) else ""
        wanted = self.headers.get("Range")
        hub.requests.append((name, wanted))
        if hub.status is not None or name not in hub.files:
            return self.answer(hub.status or 404, b"no", {})
        return self.send_file(hub.files[name], wanted)

    def send_listing(self) -> None:
        siblings = [
            {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": hashlib.sha256(data).hexdigest()} if len(data) > 1000 else None,
            }
            for name, data in self.hub.files.items()
        ]
        self.answer(200, json.dumps({"sha": COMMIT, "siblings": siblings}).encode(), {})

    def send_file(self, data: bytes, wanted: str | None) -> None:
        hub = self.hub
        start, status, headers = 0, 200, {}
        if hub.tag:
            headers["X-Linked-Etag"] = f'"{hub.tag}"'
        if wanted and hub.resumes:
            start, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:] + b"x" * hub.lies_about_size
        limit = None
        if hub.break_after is not None and hub.breaks > 0:
            hub.breaks -= 1
            limit = hub.break_after
        self.answer(status, body, headers, limit)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], limit: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if limit is None else body[:limit])
        if limit is not None:
            self.wfile.flush()
            self.close_connection = True


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away in the middle are part of the tests."""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    handler = type("Bound", (Handler,), {"hub": hub})
    server = Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_wheel(folder: Path, package: str, version: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with the given members."""
    folder.mkdir(parents=True, exist_ok=True)
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    contents = {
        **members,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}")
    contents[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel
