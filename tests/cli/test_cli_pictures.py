"""Pictures in `headrace chat`: named, dropped, refused, saved, and seen as a server sees them."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
from PIL import Image

from headrace.base.errors import EngineFault, InvalidRequest, TooLarge
from headrace.cli.conversation import Conversation
from headrace.cli.pictures import LIMITS, dropped, film_part, picture_part
from headrace.cli.voice import Piece, SamplingOptions

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import fake_server, headrace, running


class Said:
    """A voice that keeps what it is asked."""

    name = "tiny"

    def __init__(self, *, sees: bool = True) -> None:
        self.asked: list[Any] = []
        self.fault: Exception | None = None
        self._sees = sees

    async def sees(self, kind: str = "image") -> bool:
        return self._sees and kind in ("image", "video")

    async def chat(self, messages: list[Any], options: SamplingOptions) -> AsyncGenerator[Piece]:
        del options
        self.asked.append(json.loads(json.dumps(messages)))
        if self.fault is not None:
            raise self.fault
        yield Piece("Yes.", 1, "stop")

    def complete(self, prompt: str, options: SamplingOptions) -> AsyncGenerator[Piece]:
        raise NotImplementedError


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a cat.png"
    draw = Image.effect_noise((70, 40), 90).convert("RGB")
    draw.save(path)
    return path


async def talk(voice: Said, *lines: str) -> tuple[Conversation, str]:
    out = io.StringIO()
    conversation = Conversation(voice, SamplingOptions())
    for line in lines:
        await conversation.take(line, out.write)
    return conversation, out.getvalue()


async def test_a_picture_goes_with_the_next_message(picture: Path) -> None:
    voice = Said()
    _, shown = await talk(voice, f"/image {picture}", f"/image {picture}", "What?", "And now?")
    url = picture_part(picture)
    assert url["image_url"]["url"].startswith("data:image/png;base64,")
    first = [url, url, {"type": "text", "text": "What?"}]
    assert voice.asked[0] == [{"role": "user", "content": first}]
    assert voice.asked[1][-1] == {"role": "user", "content": "And now?"}
    assert voice.asked[1][0]["content"] == first, "it stays in the conversation"
    assert "[a cat.png: 2 pictures for the next message]" in shown


@pytest.mark.parametrize("form", ["'{}'", '"{}"', "{escaped}", "{uri}", "  '{}'  "])
async def test_a_dropped_file_is_its_path(picture: Path, form: str) -> None:
    typed = form.format(picture, escaped=str(picture).replace(" ", "\\ "), uri=picture.as_uri())
    for text in ("What is it?", "/slash"):
        assert dropped(f"{typed} {text}") == ([picture], text)
    assert dropped(f"{typed.strip()} {typed.strip()}") == ([picture, picture], "")
    voice = Said()
    await talk(voice, typed, "What?")
    await talk(voice, f"{typed} What?")
    assert voice.asked[0] == voice.asked[1]
    assert voice.asked[0][0]["content"][0] == picture_part(picture)


def test_other_words_are_words(picture: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.png"
    text.write_text("no picture")
    for words in (
        "hello", "", "/help", "'", '"', "\\", picture.name, f"see {picture}", str(tmp_path),
        str(text), "/proc/self/mem x", "/dev/null", "file://[", "/a\0b", "file:///etc/passwd",
    ):  # fmt: skip
        assert dropped(words) == ([], words)


async def test_what_cannot_be_sent_is_named(picture: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="tiny takes no pictures"):
        await talk(Said(sees=False), f"/image {picture}")
    with pytest.raises(InvalidRequest, match="tiny takes no pictures"):
        await talk(Said(sees=False), f"'{picture}' What?")
    with pytest.raises(InvalidRequest, match="/image needs a file name"):
        await talk(Said(), "/image")
    with pytest.raises(InvalidRequest, match=r"cannot read .*absent"):
        await talk(Said(), f"/image {tmp_path / 'absent'}")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        assert dropped(f"{other} x")[0] == []
        with pytest.raises(InvalidRequest, match="is no file"):
            await talk(Said(), f"/image {other}")
    text = tmp_path / "a.txt"
    text.write_text("no picture")
    with pytest.raises(InvalidRequest, match="jpeg, png, webp, bmp and gif"):
        await talk(Said(), f"/image {text}")
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(LIMITS.bytes + 1)
    with pytest.raises(TooLarge, match="more than"):
        picture_part(large)


async def test_a_refused_message_leaves_its_pictures(picture: Path) -> None:
    voice = Said()
    conversation, _ = await talk(voice, f"/image {picture}")
    voice.fault = EngineFault("no")
    out = io.StringIO()
    with pytest.raises(EngineFault):
        await conversation.take("What?", out.write)
    assert conversation.messages == []
    voice.fault = None
    await conversation.take("What?", out.write)
    assert voice.asked[0] == voice.asked[1]
    await conversation.take(f"/image {picture}", out.write)
    await conversation.take("/clear", out.write)
    await conversation.take("Hello", out.write)
    assert voice.asked[-1] == [{"role": "user", "content": "Hello"}]


async def test_a_video_goes_with_the_next_message(picture: Path, tmp_path: Path) -> None:
    film, path, voice = tmp_path / "a.mp4", tmp_path / "talk.json", Said()
    film.write_bytes(b"\0\0\0\x20ftypisom" + bytes(64))
    lines = f"/video {film}", f"/image {picture}", "What?", f"/save {path}"
    first, shown = await talk(voice, *lines)
    part = film_part(film)
    assert part["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert voice.asked[0][0]["content"] == [
        part, picture_part(picture), {"type": "text", "text": "What?"}
    ]  # fmt: skip
    assert "[a.mp4: a video for the next message]" in shown
    second, _ = await talk(voice, f"/load {path}", "/retry")
    assert second.messages == first.messages
    with pytest.raises(InvalidRequest, match="tiny takes no videos"):
        await talk(Said(sees=False), f"/video {film}")
    with pytest.raises(InvalidRequest, match="mp4"):
        await talk(Said(), f"/video {picture}")


async def test_a_saved_conversation_keeps_its_pictures(picture: Path, tmp_path: Path) -> None:
    path, voice = tmp_path / "talk.json", Said()
    first, _ = await talk(voice, f"/image {picture}", "What?", f"/save {path}")
    second, _ = await talk(voice, f"/load {path}", "/retry")
    assert second.messages == first.messages
    assert voice.asked[0] == voice.asked[1]
    for content in ([5], [{"type": "image_url"}], [{"type": "image_url", "image_url": "x"}], [{}]):
        path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
        with pytest.raises(InvalidRequest, match="no saved conversation"):
            await talk(voice, f"/load {path}")


@pytest.mark.slow
def test_the_terminal_sees_what_a_server_sees(run: Any, picture: Path, tmp_path: Path) -> None:
    from tiny.filmed import drawn as frames_of
    from tiny.filmed import file_of
    from tiny.seeing_chat import make

    pytest.importorskip("av", reason="needs the extra av")
    folder = tmp_path / "seeing"
    make(folder)
    small = ("--threads", "2", "--kv-dtype", "float32", "--max-context", "512")
    film, lines = tmp_path / "a.mp4", f"/image {picture}\nWhat is it? <image>\nAnd now?\n"
    film.write_bytes(file_of(frames_of(30, 48, 32)))
    lines += f"'{picture}' The same?\n/clear\n/video {film}\nAnd this?\n"
    asked = ("--max-tokens", "8", "--temperature", "0")
    here = run("chat", str(folder), *small, *asked, stdin=lines)
    assert here.returncode == 0, here.stderr
    with running(headrace("serve", str(folder), "--port", "0", *small)) as server:
        there = run("chat", "--url", server.url, *asked, stdin=lines)
    assert there.returncode == 0, there.stderr
    assert here.stdout == there.stdout
    assert len(here.stdout.splitlines()) >= 7


@pytest.mark.slow
def test_a_model_without_eyes_refuses_by_name(run: Any, picture: Path, model: Path) -> None:
    small = ("--threads", "1", "--max-sequences", "4", "--kv-memory", "8MiB")
    done = run("chat", str(model), *small, stdin=f"/image {picture}\n")
    assert (done.returncode, done.stderr) == (2, f"error: {model.name} takes no pictures\n")
    with running(fake_server()) as server:
        done = run("chat", "--url", server.url, stdin=f"'{picture}'\n")
    assert (done.returncode, done.stderr) == (2, "error: fake takes no pictures\n")
    assert "/image FILE" in run("chat", "--help").stdout
