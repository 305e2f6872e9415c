"""Pictures and videos in a conversation of the terminal: files that are named or dropped, and their
place in the prompt of an engine in this process."""

from __future__ import annotations

import base64
import re
from importlib import import_module
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ..base.errors import ContextOverflow, InvalidRequest, TooLarge, file_errors
from ..media import PICTURE_REFUSALS, VIDEO_REFUSALS, PictureLimits, VideoLimits
from ..media.formats import FFMPEG, HEAD, container
from ..media.pictures import picture_format
from ..server.decoders import Decoders
from ..speech.finding import sees
from ..text import Foreign, encode_between

if TYPE_CHECKING:
    from ..base.spec import InputSpan
    from ..engine.clients.face import ServingEngine
    from ..engine.clients.kept_pictures import SealedPicture
    from ..engine.clients.pictures import PicturePrompts

LIMITS, VIDEO_LIMITS = PictureLimits(), VideoLimits()
_WORD = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|((?:\\.|[^\s\\])+))(?:\s+|$)""")
_FILE = re.compile(r"file://[^/]*")


def picture_part(path: Path) -> dict[str, Any]:
    """Read a picture's file as a part of a message. Raises `InvalidRequest`, `TooLarge`."""
    data = _content(path, LIMITS.bytes)
    format = picture_format(data[:12])
    if format is None:
        raise InvalidRequest(f"{path}: {PICTURE_REFUSALS['format']}")
    url = f"data:image/{format};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def film_part(path: Path) -> dict[str, Any]:
    """Read a video's file as a part of a message. Raises `InvalidRequest`, `TooLarge`."""
    data = _content(path, VIDEO_LIMITS.bytes)
    format = container(data[:HEAD])
    if format not in FFMPEG:
        raise InvalidRequest(f"{path}: {VIDEO_REFUSALS['format']}")
    url = f"data:video/{format};base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def _content(path: Path, most: int) -> bytes:
    with file_errors(InvalidRequest, f"cannot read {path}"):
        if not S_ISREG(path.stat().st_mode):
            raise InvalidRequest(f"{path} is no file")
        with path.open("rb") as file:
            data = file.read(most + 1)
    if len(data) > most:
        raise TooLarge(f"{path} has more than {most:,} bytes, which is what is taken")
    return data


def dropped(text: str) -> tuple[list[Path], str]:
    """Split a text from pictures dropped on the terminal before it: absolute paths and file URLs,
    quoted or escaped, of files with a picture's signature."""
    found: list[Path] = []
    while (word := _WORD.match(text)) is not None:
        single, double, plain = word.groups()
        name = single or double or re.sub(r"\\(.)", r"\1", plain or "")
        path = Path(unquote(_FILE.sub("", name)) if _FILE.match(name) else name)
        if not path.is_absolute() or not _is_picture(path):
            break
        found.append(path)
        text = text[word.end() :]
    return found, text


def _is_picture(path: Path) -> bool:
    try:
        if not path.is_file():  # Opening a pipe would block.
            return False
        with path.open("rb") as file:
            return picture_format(file.read(12)) is not None
    except (OSError, ValueError):
        return False


class LocalPictures:
    """Prompts with pictures and videos for an engine in this process."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        able = "inputs" in getattr(engine, "features", ()) and sees(engine.files.path)
        self._prompts: PicturePrompts | None = None
        """None: the model does not take pictures."""
        if able:
            # Not for every chat: only Linux has the shared memory.
            pictures = import_module("headrace.engine.clients.pictures")
            self._prompts = pictures.open_picture_prompts(engine.files, engine.tokenizer)
        self._decoders = Decoders()

    def __bool__(self) -> bool:
        return self._prompts is not None

    @property
    def films(self) -> bool:
        """Whether the model takes videos."""
        return self._prompts is not None and self._prompts.film_place is not None

    async def prompt(
        self, messages: list[dict[str, Any]]
    ) -> tuple[list[int], list[InputSpan], list[SealedPicture]]:
        """Return a conversation's ids, its inputs, and the pictures to hold until the answer has
        ended. Raises `InvalidRequest`, `TooLarge`, `ContextOverflow`."""
        engine, seen = self._engine, self._prompts
        assert seen is not None, "the model takes pictures"
        assert engine.template is not None, "the model talks"
        tokens = [engine.tokenizer.id_to_token(place) or "" for place in seen.places]
        chat = import_module("headrace.server.routes.chat.pictures")
        parted = chat.UNNAMED if seen.place == seen.film_place else chat.PARTS
        plain = [{**one, "content": _plain(one["content"], parted)} for one in messages]
        text = engine.template.render(Foreign(tokens, everywhere=True).cut(plain))
        ids = encode_between(engine.tokenizer, text)
        parts = [part for one in messages for part in _seen(one["content"])]
        if not self.films and any(part["type"] == "video_url" for part in parts):
            raise InvalidRequest(f"{engine.model_name} takes no videos")
        wanted = [seen.place_of(part["type"] == "video_url") for part in parts]
        if [one for one in ids if one in seen.places] != wanted:
            raise InvalidRequest("the model's chat template has no place for these pictures")
        held: list[SealedPicture] = []
        least = seen.picture.least_rows
        room = min(seen.most_rows, engine.max_context - len(ids))
        for number, part in enumerate(parts):
            film = part["type"] == "video_url"
            most = (room - (len(parts) - number - 1) * least) // seen.frames_of(film)
            if most < least:
                raise ContextOverflow("the pictures do not fit into the context: /clear, or fewer")
            url = part[part["type"]]["url"]
            name = "", url.encode(), -1 if film else False
            found = seen.kept.find(name)
            if found is None:
                data = base64.b64decode(url.partition(",")[2])
                given = (data, "video", 0, most) if film else (data, "picture", False, most)
                made = await self._decoders.run(seen.read_video if film else seen.read, *given)
                found = seen.kept.hold(name, *made)
            shape = found.shape
            room -= seen.check_rows(found.length, most, "picture", shape.film)
            held.append(found)
        ids, spans = seen.expand(ids, [one.shape for one in held], held)
        return ids, spans, held


def _seen(content: Any) -> list[dict[str, Any]]:
    return [one for one in content if one["type"] != "text"] if _parted(content) else []


def _plain(content: Any, parts: dict[str, list[Any]]) -> Any:
    """Return a content as templates read it, by the message parts of each part."""
    if not _parted(content):
        return content
    return [one for part in content for one in parts.get(part["type"], [part])]


def _parted(content: Any) -> bool:
    return isinstance(content, list)
