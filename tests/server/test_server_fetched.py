"""Pictures and videos of one request: files that are fetched count as bodies do, one at a time, and
rows of a video count for all their frames."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
pytest.importorskip("av", reason="needs the extra av")

from headrace.base.errors import InvalidRequest, Overloaded
from headrace.engine.clients.pictures import open_picture_prompts
from headrace.loader import open_model
from headrace.server.body import BodiesInFlight
from headrace.server.decoders import Decoders
from headrace.server.hands import Hands
from headrace.server.routes.chat.pictures import with_pictures
from headrace.server.routes.chat.schema import Message
from headrace.text import load_tokenizer
from tiny import filmed
from tiny.qwen_chat import FILM, make

pytestmark = pytest.mark.slow
FILE = filmed.file_of(filmed.drawn(10, 48, 32), 10)


class Host(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        Host.asked += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(FILE)

    def log_message(self, *words: object) -> None:
        pass


class Watched(Decoders):
    """Decoders that note what was fetched and is held when each begins."""

    def __init__(self, bodies: BodiesInFlight) -> None:
        super().__init__()
        self.bodies, self.seen = bodies, list[tuple[int, int]]()

    async def run(self, work: Any, *arguments: Any, long: bool = False) -> Any:
        self.seen.append((Host.asked, self.bodies.held))
        return await super().run(work, *arguments, long=long)


@pytest.fixture
def host() -> Iterator[str]:
    Host.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{one.server_port}"
        one.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = tmp_path_factory.mktemp("qwen")
    make(found, "qwen2_5_vl")
    return found


def service_of(folder: Path, host: str, most: int) -> Any:
    """What a request needs of a server whose bodies may have `most` bytes."""
    files = open_model(str(folder))
    tokenizer, bodies = load_tokenizer(files.tokenizer, files.arch.vocab_size), BodiesInFlight(most)
    return SimpleNamespace(
        pictures=open_picture_prompts(files, tokenizer),
        engine=SimpleNamespace(max_context=512, tokenizer=tokenizer),
        hands=Hands(),
        decoders=Watched(bodies),
        fetches=Decoders(),
        fetch_hosts=(host,),
        bodies=bodies,
        files=None,
    )


async def ask(service: Any, host: str, *frames: int) -> Any:
    """Ask about a video for each of `frames`, the most of its frames."""
    parts = [
        {"type": "video_url", "video_url": {"url": f"http://{host}/", "max_frames": most}}
        for most in frames
    ]
    message = Message.model_validate({"role": "user", "content": parts})
    return await with_pictures(service, [message], [5, *[FILM] * len(frames)], counts=False)


async def test_fetched_files_are_counted_and_held_one_at_a_time(folder: Path, host: str) -> None:
    service = service_of(folder, host, len(FILE))
    _, spans, held = await ask(service, host, 2, 4, 6)
    assert len(held) == 3
    assert len(spans) == 5
    assert service.decoders.seen == [(number, len(FILE)) for number in (1, 2, 3)]
    assert service.bodies.held == 0
    scarce = service_of(folder, host, len(FILE) - 1)
    with pytest.raises(Overloaded):
        await ask(scarce, host, 2)
    assert not scarce.decoders.seen
    assert scarce.bodies.held == 0


async def test_rows_of_a_video_count_for_each_frame(folder: Path, host: str) -> None:
    service = service_of(folder, host, 1 << 20)
    _, spans, held = await ask(service, host, 2)
    row = service.pictures.picture.factor**2 * service.pictures.picture.width
    rows = 2 * spans[0].length
    assert held[0].size >= rows * row
    service.pictures.most_rows = rows
    await ask(service, host, 2)
    service.pictures.kept.clear()
    service.pictures.most_rows = rows - 1
    with pytest.raises(InvalidRequest, match="max_frames takes fewer"):
        await ask(service, host, 2)
