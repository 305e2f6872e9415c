"""A conversation without a terminal: its messages, its settings, its slash commands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest, file_errors
from .pictures import dropped, film_part, picture_part
from .voice import Message, SamplingOptions, Voice

Write = Callable[[str], None]

HELP = "Enter sends, Alt-Enter breaks the line, Ctrl-C stops, Ctrl-D leaves; /help for commands"
COMMANDS = {
    "/help": "this list",
    "/image FILE": "send a picture with the next message; dropping its file here does the same",
    "/video FILE": "send a video with the next message",
    "/system [TEXT]": "show or set the system message",
    "/clear": "forget the conversation",
    "/retry": "answer the last message again",
    "/undo": "take back the last message and its answer",
    "/params [NAME VALUE]": "show or set sampling; none unsets",
    "/save FILE": "write the conversation as JSON",
    "/load FILE": "read one that was saved",
    "/stats": "show or hide tokens and speed after each answer",
    "/quit": "leave",
}


class Conversation:
    """One conversation; `take` receives the user's text and writes the output."""

    def __init__(self, voice: Voice, sampling: SamplingOptions, system: str | None = None) -> None:
        self._voice = voice
        self.sampling = sampling
        self.messages: list[Message] = []
        self.over = False
        self._stats = False
        self._pictures: list[Message] = []
        """Parts to send with the next message."""
        if system:
            self.messages.append({"role": "system", "content": system})

    async def take(self, text: str, write: Write) -> None:
        """Take a message or a command. Raises `HeadraceError` without any change."""
        paths, text = dropped(text)
        for path in paths:
            await self._attach(path, write)
        if not text.strip():
            return
        if text.startswith("/") and not text.startswith("//"):
            await self._command(text, write)
            return
        # "//" starts a message with one slash.
        text, pictures = text.removeprefix("/"), self._pictures
        content = [*pictures, {"type": "text", "text": text}] if pictures else text
        asked = {"role": "user", "content": content}
        self.messages.append(asked)
        self._pictures = []
        try:
            await self._answer(write)
        except HeadraceError:
            if asked not in self.messages:
                self._pictures = pictures
            raise

    async def _film(self, path: Path, write: Write) -> None:
        if not await self._voice.sees("video"):
            raise InvalidRequest(f"{self._voice.name} takes no videos")
        self._pictures.append(film_part(path))
        write(f"[{path.name}: a video for the next message]\n")

    async def _attach(self, path: Path, write: Write) -> None:
        if not await self._voice.sees():
            raise InvalidRequest(f"{self._voice.name} takes no pictures")
        self._pictures.append(picture_part(path))
        count = len(self._pictures)
        write(f"[{path.name}: {count} picture{'s' * (count > 1)} for the next message]\n")

    async def _answer(self, write: Write) -> None:
        """Append the answer to the last message; of a cancelled one, the part received."""
        parts: list[str] = []
        tokens = 0
        begin = time.perf_counter()
        first: float | None = None
        finish = None
        try:
            async with aclosing(self._voice.chat(self.messages, self.sampling)) as pieces:
                async for piece in pieces:
                    first = first or time.perf_counter()
                    parts.append(piece.text)
                    tokens += piece.tokens
                    finish = piece.finish or finish
                    write(piece.text)
        finally:
            text = "".join(parts)
            if text:
                self.messages.append({"role": "assistant", "content": text})
            elif self.messages[-1]["role"] == "user":
                self.messages.pop()
        write("\n")
        if finish == "length":
            write("[cut: the token limit or the end of the context]\n")
        if self._stats and first is not None:
            rate = tokens / max(time.perf_counter() - first, 1e-9)
            write(f"[{tokens} tokens, first after {first - begin:.2f} s, {rate:.1f}/s]\n")

    async def _command(self, text: str, write: Write) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                width = max(map(len, COMMANDS))
                write("".join(f"{usage:<{width}}  {what}\n" for usage, what in COMMANDS.items()))
            case "/system":
                self._system(rest, write)
            case "/image":
                await self._attach(_path(rest, name), write)
            case "/video":
                await self._film(_path(rest, name), write)
            case "/clear":
                self._pictures = []
                self.messages = [m for m in self.messages if m["role"] == "system"]
            case "/retry":
                self._drop_answer()
                await self._answer(write)
            case "/undo":
                self._drop_answer()
                self.messages.pop()
            case "/params":
                self._params(rest, write)
            case "/save":
                self._save(_path(rest, name), write)
            case "/load":
                self._load(_path(rest, name))
            case "/stats":
                self._stats = not self._stats
            case "/quit" | "/exit":
                self.over = True
            case _:
                raise InvalidRequest(f"there is no {name}; /help lists what there is")

    def _system(self, text: str, write: Write) -> None:
        at_start = bool(self.messages) and self.messages[0]["role"] == "system"
        if not text:
            write((self.messages[0]["content"] if at_start else "(none)") + "\n")
            return
        if at_start:
            self.messages.pop(0)
        self.messages.insert(0, {"role": "system", "content": text})

    def _drop_answer(self) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise InvalidRequest("there is no message yet")

    def _params(self, text: str, write: Write) -> None:
        if text:
            name, _, value = text.partition(" ")
            self.sampling.set(name, value.strip())
            return
        given = self.sampling.given()
        write(
            "".join(f"{name} {value}\n" for name, value in given.items()) or "(the model's own)\n"
        )

    def _save(self, path: Path, write: Write) -> None:
        with file_errors(InvalidRequest, f"cannot write {path}"):
            path.write_text(
                json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1), "utf-8"
            )
        write(f"{len(self.messages)} messages in {path}\n")

    def _load(self, path: Path) -> None:
        try:
            messages = json.loads(path.read_text("utf-8"))["messages"]
            read = [{"role": str(m["role"]), "content": _content(m["content"])} for m in messages]
        except OSError as error:
            raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise InvalidRequest(f"{path} is no saved conversation") from None
        self.messages = read


def _content(read: Any) -> Any:
    """Return a saved message's content: a text, or parts with pictures. Raises `TypeError`,
    `LookupError`."""
    if not isinstance(read, list):
        return str(read)
    parts: list[Message] = []
    for part in read:
        kind = part["type"]
        if kind in ("image_url", "video_url"):
            parts.append({"type": kind, kind: {"url": str(part[kind]["url"])}})
        else:
            parts.append({"type": "text", "text": str(part["text"])})
    return parts


def _path(text: str, name: str) -> Path:
    if not text:
        raise InvalidRequest(f"{name} needs a file name")
    return Path(text).expanduser()
