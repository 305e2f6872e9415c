"""Files from a model hub over HTTPS: resumable, and quick to give up without a hub.

The hub's address and protocol are those of the `huggingface_hub` library, whose constant is read so
that its own variable for mirrors works. An unreachable hub costs at most `CONNECT_SECONDS`, name
resolution included.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

from ..base.environment import hub_token
from ..base.errors import ModelFileError, ModelNotFound
from .catalog import HubSource
from .partial import PartialFile, check_space
from .progress import Progress
from .source import SourceFailed

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 3.0
READ_SECONDS = 30.0
ATTEMPTS = 5
"""Consecutive broken connections, without a byte in between, before the hub is given up."""
MAX_LISTING = 16 << 20
MAX_FILES = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """Entry of a repository's file in the hub's listing; small files have no SHA-256 there."""

    path: str
    size: int
    sha256: str | None


class Hub:
    """A hub at `endpoint`; one connection pool, closed by `close`."""

    name = "hub"

    def __init__(self, endpoint: str | None = None) -> None:
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._client: httpx.Client | None = None
        self._down: str | None = None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def append(self, source: HubSource, partial: PartialFile, progress: Progress) -> None:
        """Bring `partial` to its full length. Raises `SourceFailed`, or `DownloadError`."""
        url = f"{self.endpoint}/{source.repo}/resolve/{source.revision}/{quote(source.path)}"
        check_space(partial.target, partial.size - partial.length)
        failures = 0
        while partial.length < partial.size:
            before = partial.length
            try:
                self._stream(url, partial, progress)
            except self._transport_errors() as error:
                failures = failures + 1 if partial.length == before else 1
                if failures >= ATTEMPTS:
                    raise SourceFailed(f"{url}: {type(error).__name__}: {error}") from None
                time.sleep(0.2 * failures)

    def listing(self, repo: str, revision: str) -> tuple[str, list[HubFile]]:
        """Return (commit, files) of a repository. Raises `ModelNotFound` or `SourceFailed`."""
        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
        try:
            answer = self._connected().get(url, params={"blobs": "true"}, headers=_headers())
        except self._transport_errors() as error:
            raise SourceFailed(f"{url}: {type(error).__name__}: {error}") from None
        if answer.status_code in (401, 403, 404):
            raise ModelNotFound(
                f"the hub has no model {repo} (revision {revision}), or it is private or gated: "
                "then accept its terms there and set HF_TOKEN",
                param="model",
            )
        if answer.status_code != 200 or len(answer.content) > MAX_LISTING:
            raise SourceFailed(f"{url}: HTTP {answer.status_code}")
        return _parse_listing(answer, repo)

    def _connected(self) -> httpx.Client:
        # httpx costs 80 ms to import: only a download pays for it.
        import httpx

        if self._down is None and self._client is None:
            self._down = _unreachable(self.endpoint)
        if self._down is not None:
            raise SourceFailed(self._down)
        if self._client is None:
            timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
            self._client = httpx.Client(timeout=timeout, follow_redirects=True)
        return self._client

    def _transport_errors(self) -> type[Exception]:
        import httpx

        return httpx.TransportError

    def _stream(self, url: str, partial: PartialFile, progress: Progress) -> None:
        headers = _headers()
        if partial.length:
            headers["Range"] = f"bytes={partial.length}-"
        with self._connected().stream("GET", url, headers=headers) as answer:
            if answer.status_code == 416 or (answer.status_code == 200 and partial.length):
                # The server does not resume: start again.
                progress.advance(-partial.length)
                partial.truncate(0)
            if answer.status_code == 416:
                return
            if answer.status_code not in (200, 206):
                raise SourceFailed(f"{url}: HTTP {answer.status_code}")
            _check_identity(answer, url, partial)
            # Chunk by chunk as they come: collecting them would lose those before a break.
            for data in answer.iter_raw():
                if partial.length + len(data) > partial.size:
                    raise SourceFailed(f"{url}: more than {partial.size} bytes came")
                partial.write(data)
                progress.advance(len(data))


def _check_identity(answer: httpx.Response, url: str, partial: PartialFile) -> None:
    """Check the headers that the hub sends before the file. Raises `SourceFailed`."""
    total: int | None = None
    if answer.status_code == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("content-range", ""))
        if match is None or int(match[1]) != partial.length:
            raise SourceFailed(f"{url}: answered another range than was asked")
        total = int(match[3])
    elif answer.headers.get("content-length", "").isdigit():
        total = int(answer.headers["content-length"])
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise SourceFailed(f"{url}: sends the file encoded")
    if total is not None and total != partial.size:
        raise SourceFailed(f"{url}: has {total} bytes, {partial.size} were expected")
    if partial.sha256_wanted is None:
        return
    for hop in (*answer.history, answer):
        tag = hop.headers.get("x-linked-etag", "").strip('"')
        if _SHA256.fullmatch(tag) and tag != partial.sha256_wanted:
            raise SourceFailed(f"{url}: expected SHA-256 {partial.sha256_wanted}, got {tag}")


def _headers() -> dict[str, str]:
    headers = {"Accept-Encoding": "identity", "User-Agent": "headrace"}
    token = hub_token()
    return {**headers, "Authorization": f"Bearer {token}"} if token else headers


def _parse_listing(answer: httpx.Response, repo: str) -> tuple[str, list[HubFile]]:
    try:
        body: Any = answer.json()
        commit = body["sha"]
        entries = body["siblings"]
        files = [
            HubFile(
                path=entry["rfilename"],
                size=int(entry["size"]),
                sha256=(entry.get("lfs") or {}).get("sha256"),
            )
            for entry in entries[:MAX_FILES]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SourceFailed(f"{repo}: the hub's listing is not understood") from None
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise SourceFailed(f"{repo}: the hub's listing names no commit")
    for file in files:
        if not isinstance(file.path, str) or file.path.startswith("/") or ".." in file.path:
            raise ModelFileError(f"{repo}: a file of the repository is called {file.path!r:.80}")
        if file.size < 0 or (file.sha256 is not None and not _SHA256.fullmatch(file.sha256)):
            raise SourceFailed(f"{repo}: the hub's listing is not understood")
    return commit, files


def _unreachable(endpoint: str) -> str | None:
    """Return why the hub cannot be reached, within `CONNECT_SECONDS`; None if it can.

    Connects in a thread of its own: the resolver has no time limit.
    """
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    # With a proxy the host need not resolve here: the request itself will show.
    if parts.scheme in getproxies() or "all" in getproxies():
        return None
    answer: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()
            answer.append(None)
        except OSError as error:
            answer.append(f"{host} cannot be reached: {error}")

    thread = threading.Thread(target=connect, name="headrace-hub-probe", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS)
    return answer[0] if answer else f"{host} did not answer within {CONNECT_SECONDS:g} s"
