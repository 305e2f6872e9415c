"""Routes of the page.

The files are read once. All files except the entry lie under a path with the hash of their contents
and may be cached for ever. The entry is revalidated each time and answers 304 if nothing changed.
So a new version is seen at once, and a reload costs one small exchange.
"""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import NotFound

router = APIRouter(include_in_schema=False)

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".html": "text/html; charset=utf-8",
}
ENTRY = "index.html"
SAFE = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
}
FOR_EVER = "public, max-age=31536000, immutable"
ASK_AGAIN = "no-cache"


class Kept(NamedTuple):
    """A file in both forms in which it is sent."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str


def _kept(name: str, content: bytes) -> Kept:
    kind = TYPES[name[name.rindex(".") :]]
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return Kept(kind, content, gzip.compress(content, 9, mtime=0), tag)


def load() -> tuple[str, dict[str, Kept]]:
    """Load the files; return (hash of all files, files by name). The entry's links carry the
    hash."""
    read = {
        entry.name: entry.read_bytes()
        for entry in sorted(files(__package__).iterdir(), key=lambda entry: entry.name)
        if entry.name[entry.name.rfind(".") :] in TYPES
    }
    digest = hashlib.sha256()
    for name, content in read.items():
        digest.update(name.encode() + b"\0" + content)
    version = digest.hexdigest()[:16]
    # Relative, so that the page also works if a proxy serves it under its own path.
    read[ENTRY] = read[ENTRY].replace(b"@base", f"page/{version}".encode())
    return version, {name: _kept(name, content) for name, content in read.items()}


VERSION, FILES = load()


def answer(request: Request, kept: Kept, cache: str) -> Response:
    headers = {**SAFE, "cache-control": cache, "etag": kept.tag, "vary": "accept-encoding"}
    tags = request.headers.get("if-none-match", "")
    if kept.tag in {tag.strip().removeprefix("W/") for tag in tags.split(",")}:
        return Response(status_code=304, headers=headers)
    packed = "gzip" in request.headers.get("accept-encoding", "")
    if packed:
        headers["content-encoding"] = "gzip"
    return Response(kept.packed if packed else kept.plain, headers=headers, media_type=kept.kind)


@router.get("/")
async def page(request: Request) -> Response:
    """Serve the playground and the live view."""
    return answer(request, FILES[ENTRY], ASK_AGAIN)


@router.get("/page/{version}/{name}")
async def file(request: Request, version: str, name: str) -> Response:
    """Serve a file of the page; files of older versions are not found."""
    kept = FILES.get(name)
    if kept is None or version != VERSION or name == ENTRY:
        raise NotFound(f"there is no file {name[:100]!r} of this page")
    return answer(request, kept, FOR_EVER)


@router.get("/favicon.ico")
async def icon(request: Request) -> Response:
    """Serve the icon to browsers that request it by convention."""
    return answer(request, FILES["icon.svg"], ASK_AGAIN)
