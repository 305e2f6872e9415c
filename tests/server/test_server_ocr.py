"""Text in pictures over HTTP, by the real programs of ocr-pp-v4."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")
pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image, ImageDraw, ImageFont
from prometheus_client import generate_latest

from headrace.base.config import ServerOptions
from headrace.engine.programs.engine import ProgramEngine
from headrace.engine.programs.files import program_files
from headrace.server.app import create_app
from headrace.server.decoders import MOST_WAITING
from headrace.server.hands import Hands
from headrace.server.reading import picture_bytes

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
LINES = ["Receipt 2026-1187", "Total: 1,284.50 EUR", "Due on 14 December"]


def page(lines: list[str] = LINES, size: int = 36) -> Image.Image:
    made = Image.new("RGB", (640, 2 * size * len(lines) + size), "white")
    pen = ImageDraw.Draw(made)
    for at, line in enumerate(lines):
        pen.text((40, size // 2 + 2 * size * at), line, "black", font=ImageFont.load_default(size))
    return made


def encoded(picture: Image.Image, format: str = "PNG", **more: Any) -> str:
    room = io.BytesIO()
    picture.save(room, format, **more)
    return base64.b64encode(room.getvalue()).decode()


def without_spaces(lines: list[str]) -> list[str]:
    """The reader is unsure of spaces."""
    return [line.replace(" ", "") for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[ProgramEngine]:
    made = await ProgramEngine.start(program_files(["ocr-pp-v4"]), lanes=2)
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: ProgramEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerOptions(max_body=4_000_000))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


async def read(http: httpx.AsyncClient, image: str, **more: Any) -> dict[str, Any]:
    reply = await http.post("/v1/ocr", json={"image": image, **more}, timeout=300)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_a_page_is_read(http: httpx.AsyncClient) -> None:
    found = await read(http, f"data:image/png;base64,{encoded(page())}", model="ocr-pp-v4")
    assert (found["object"], found["model"]) == ("ocr", "ocr-pp-v4")
    assert (found["width"], found["height"]) == (640, 252)
    texts = [line["text"] for line in found["lines"]]
    assert without_spaces(texts) == without_spaces(LINES)
    assert found["text"] == "\n".join(texts)
    for at, line in enumerate(found["lines"]):
        assert 0.8 < line["score"] <= 1
        (left, top), (right, _), (_, bottom), _ = line["box"]
        assert left == pytest.approx(40, abs=8)
        assert 250 < right < 450
        assert top == pytest.approx(18 + 72 * at, abs=14)
        assert bottom - top == pytest.approx(36, abs=14)
    again = await read(http, encoded(page()))
    assert again == found


async def test_the_work_of_a_page_counts_as_large(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may have a large picture."""
    counted, turn = list[bool](), Hands._turn

    async def noted(self: Hands, work: Any, large: bool, *more: Any) -> Any:
        counted.append(large or self._most_waiting == MOST_WAITING)
        return await turn(self, work, large, *more)

    monkeypatch.setattr(Hands, "_turn", noted)
    blank = Image.new("1", (600, 600), 1)
    found = await read(http, encoded(blank))
    assert found["lines"] == []
    assert len(counted) > 3
    assert all(counted)


async def test_turned_pages_are_read(http: httpx.AsyncClient) -> None:
    """On its head by its pixels, and on its side by its EXIF; boxes are of the upright picture."""
    whole = page()
    found = await read(http, encoded(whole.rotate(180)))
    texts = [line["text"] for line in found["lines"]]
    assert without_spaces(texts[::-1]) == without_spaces(LINES)
    exif = Image.Exif()
    exif[0x0112] = 6
    found = await read(http, encoded(whole.rotate(90, expand=True), "JPEG", exif=exif, quality=95))
    assert (found["width"], found["height"]) == whole.size
    assert without_spaces([line["text"] for line in found["lines"]]) == without_spaces(LINES)


@pytest.mark.parametrize("size", [(1, 1), (31, 2), (1500, 15), (15, 1500), (64, 64)])
async def test_an_empty_picture_has_no_lines(http: httpx.AsyncClient, size: Any) -> None:
    found = await read(http, encoded(Image.new("RGB", size, "white")))
    assert (found["text"], found["lines"]) == ("", [])
    assert (found["width"], found["height"]) == size


async def test_wrong_requests_name_their_field(http: httpx.AsyncClient) -> None:
    good = encoded(Image.new("RGB", (8, 8)))
    for body, status, param, message in (
        ({}, 400, "image", "image"),
        ({"image": ""}, 400, "image", "image"),
        ({"image": 5}, 400, "image", "image"),
        ({"image": "https://example.org/a.png"}, 400, "image", "nothing is fetched"),
        ({"image": "file:///etc/passwd"}, 400, "image", "nothing is fetched"),
        ({"image": "data:image/png;base64,****"}, 400, "image", "not base64"),
        ({"image": "AAAA"}, 400, "image", "not a picture of a known format"),
        ({"image": base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"x" * 99).decode()}, 400, "image",
         "cannot be decoded"),
        ({"image": encoded(Image.new("L", (1010, 10)))}, 400, "image", "at most 100 times"),
        ({"image": good, "model": "ocr-pp-v5"}, 404, "model", "this server has ocr-pp-v4"),
        ({"image": good, "timeout": 0}, 400, "timeout", "timeout"),
        ({"image": good, "class": "realtime"}, 400, "class", "class"),
        ({"image": good, "langs": ["en"]}, 400, "langs", "langs"),
        ({"image": "A" * 4_000_100}, 413, None, "4000000 bytes"),
    ):  # fmt: skip
        reply = await http.post("/v1/ocr", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), reply.text
        assert message in error["message"], reply.text


async def test_a_deadline_is_over_the_whole(http: httpx.AsyncClient, engine: ProgramEngine) -> None:
    reply = await http.post("/v1/ocr", json={"image": encoded(page()), "timeout": 0.001})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_missed")
    many = page([f"line {at} of a page" for at in range(12)], 24)
    assert len((await read(http, encoded(many), timeout=600.0))["lines"]) == 12
    prices, shapes = engine.find("ocr-pp-v4-rec").prices, (("x", (1, 3, 48, 320)),)
    while (prices.usual(shapes) or 0.0) < 150.0:  # Twelve lines on two lanes take 900 s.
        prices.exceeded(shapes, 1000.0)
    reply = await http.post("/v1/ocr", json={"image": encoded(many), "timeout": 600.0})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (504, "deadline_missed"), reply.text
    assert "and those after it" in error["message"]


async def test_a_page_ends_with_its_client(engine: ProgramEngine, http: httpx.AsyncClient) -> None:
    left = asyncio.ensure_future(http.post("/v1/ocr", json={"image": encoded(page())}))
    while not engine.executor.running:
        await asyncio.sleep(0.001)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    while engine.executor.running:
        await asyncio.sleep(0.001)
    assert len(engine.executor.queue) == 0
    text = generate_latest(engine.registry).decode()
    assert 'headrace_program_jobs_total{model_name="ocr-pp-v4",outcome="left"} 1.0' in text


async def test_pictures_are_noise_or_flat_without_harm(http: httpx.AsyncClient) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 300, 3)).astype(np.uint8)
    stripes = np.zeros((300, 300, 3), np.uint8)
    stripes[::6] = 255
    for pixels in (noise, stripes):
        found = await read(http, encoded(Image.fromarray(pixels)))
        assert (found["width"], found["height"]) == (pixels.shape[1], pixels.shape[0])


async def test_a_colon_is_no_base64() -> None:
    assert picture_bytes("QUJD") == b"ABC"
    assert picture_bytes("DATA:image/png;BASE64,QUJD") == b"ABC"
