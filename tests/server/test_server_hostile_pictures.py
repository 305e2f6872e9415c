"""Hostile pictures on every route: bombs, lies, cuts and mutations each have one typed answer, and
the server serves on."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import struct
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image
from processes import Running, headrace, running

from headrace.media import PICTURE_REFUSALS
from tiny.seeing_chat import make

sys.path.insert(0, str(Path(__file__).parent.parent / "media"))
from mutated_pictures import mutated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sealed memory is Linux's"),
]
MUTATED = 300
ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("seeing_hostile")
    make(folder)
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--served-name", "eye"]
    with running(headrace(*words, "--kv-dtype", "float32", "--max-context", "512")) as one:
        yield one


def body_of(path: str, data: bytes) -> dict[str, Any]:
    """A question about a picture, as a route has it. Its type is wrong on purpose."""
    text = base64.b64encode(data).decode()
    url = f"data:text/html;base64,{text}"
    match path:
        case "/v1/chat/completions":
            content: Any = [{"type": "image_url", "image_url": {"url": url}}]
            return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        case "/v1/messages":
            source = {"type": "base64", "media_type": "text/html", "data": text}
            content = [{"type": "image", "source": source}]
            return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        case "/v1/responses":
            content = [{"type": "input_image", "image_url": url}]
            more = {"store": False, "max_output_tokens": 1}
            return {"input": [{"role": "user", "content": content}], **more}
    asked: dict[str, Any] = {"model": "eye", "stream": False, "options": {"num_predict": 1}}
    if path == "/api/chat":
        return asked | {"messages": [{"role": "user", "content": "", "images": [text]}]}
    return asked | {"images": [text]}


def ask(server: Running, path: str, data: bytes) -> tuple[int, str]:
    reply = httpx.post(server.url + path, json=body_of(path, data), timeout=300)
    told = reply.json().get("error") or ""
    return reply.status_code, told if isinstance(told, str) else told["message"]


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *more: bytes) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows, 9))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    return b"".join([start, *more, body, chunk(b"IEND", b"")])


def zeros(size: int) -> bytes:
    """So many zeros, compressed."""
    packer = zlib.compressobj(9)
    piece = bytes(1 << 20)
    return b"".join([packer.compress(piece) for _ in range(size >> 20)] + [packer.flush()])


def whole(format: str, width: int, height: int) -> bytes:
    room = io.BytesIO()
    draw = np.random.default_rng(width * height)
    pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(room, format)
    return room.getvalue()


LINE = bytes(1 + 3 * 9)
BAD = {
    "declared": png(60_000, 60_000, b""),
    "real": png(8_000, 8_000, bytes((1 + 3 * 8_000) * 8_000)),
    "no rows": png(90, 90, b""),
    "cut": whole("JPEG", 90, 80)[:1500],
    "text": b"no picture at all",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "empty": b"",
    "gif": b"GIF89a\1\0\1\0\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\x08\1\0\0;",
}
GOOD = {
    "one pixel": whole("PNG", 1, 1),
    "a line": whole("PNG", 30_000, 1),
    "a column": whole("WEBP", 1, 16_000),
}
ANY = {
    "a comment of a gigabyte": png(9, 9, LINE * 9, chunk(b"zTXt", b"a\0\0" + zeros(1 << 30))),
    "a profile of a gigabyte": png(9, 9, LINE * 9, chunk(b"iCCP", b"a\0\0" + zeros(1 << 30))),
    "pixels of a gigabyte": png(9, 9, LINE * 9)[:33] + chunk(b"IDAT", zeros(1 << 30)),
}


@pytest.mark.parametrize("path", ROUTES)
def test_bombs_and_lies_are_refused_by_their_reason(server: Running, path: str) -> None:
    for name, data in BAD.items():
        status, said = ask(server, path, data)
        assert status == 400, (name, said)
        assert any(said.endswith(why) for why in PICTURE_REFUSALS.values()), (name, said)
    for name, data in GOOD.items():
        assert ask(server, path, data)[0] == 200, name
    assert httpx.get(server.url + "/v1/health/live").status_code == 200


@pytest.mark.parametrize("name", ANY)
def test_parts_that_inflate_are_bounded(server: Running, name: str) -> None:
    """Read or refused: in either case the child's memory is bounded."""
    assert len(ANY[name]) < 2 << 20
    status, said = ask(server, ROUTES[0], ANY[name])
    assert status in (200, 400), said
    assert ask(server, ROUTES[0], GOOD["one pixel"])[0] == 200


def test_mutated_pictures_on_all_routes(server: Running) -> None:
    draw = np.random.default_rng(38)
    wholes = [whole(format, 40, 30) for format in ("PNG", "JPEG", "WEBP", "BMP", "GIF")]
    cases = [(ROUTES[at % 5], mutated(wholes[at // 5 % 5], draw)) for at in range(MUTATED)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda case: ask(server, *case), cases))
    statuses = {status for status, _ in found}
    assert statuses <= {200, 400}, statuses
    for status, said in found:
        assert status == 200 or any(said.endswith(why) for why in PICTURE_REFUSALS.values()), said
    assert sum(status == 200 for status, _ in found) > MUTATED // 20
    assert ask(server, ROUTES[0], GOOD["one pixel"])[0] == 200


def leave(server: Running, path: str, data: bytes, seconds: float) -> None:
    """Ask, and leave after `seconds`, or with the first bytes of the answer."""
    limit = httpx.Timeout(30, read=seconds)
    body = body_of(path, data) | {"stream": True}
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream("POST", server.url + path, json=body, timeout=limit) as reply,
    ):
        next(reply.iter_raw())


def test_nobody_waits_for_the_picture_of_who_left(server: Running) -> None:
    """Clients leave while their picture is decoded or encoded."""
    for seed in range(6):
        leave(server, ROUTES[seed % 5], whole("PNG", 96 + seed, 96), 0.02 + 0.15 * seed)
    assert ask(server, ROUTES[0], whole("PNG", 97, 97))[0] == 200
    metrics = httpx.get(server.url + "/metrics").text
    (waiting,) = re.findall(r"^headrace:encodings_waiting(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
    assert float(waiting) == 0
    assert httpx.get(server.url + "/load").json()["server_load"] == 0
