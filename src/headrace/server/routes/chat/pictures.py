"""Pictures and videos in a conversation: the client's files, and their positions in the prompt."""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ....base.errors import ContextOverflow, InvalidRequest, NotFound, TooLarge
from ....loader.towers import MOST_INPUTS
from ....media.fetching import fetch
from ...caller import CALLER

if TYPE_CHECKING:
    from ....base.spec import InputSpan
    from ....dist.payloads import SealedInput
    from ....engine.clients.kept_pictures import PictureShape, PreparedPicture, SealedPicture
    from ....engine.clients.pictures import PicturePrompts
    from ....media import OnChild
    from ...service import Service
    from .schema import Message

PART = {"type": "image"}
"""Message part by which templates recognise a picture."""
PARTS = {"image_url": [PART], "video_url": [{"type": "video"}]}
"""Client's part → message parts of templates."""
UNNAMED = {"image_url": [PART], "video_url": [{"type": "text", "text": ""}, PART]}
"""Message parts for templates that write the pictures' token for videos too. The empty text makes a
message that begins with a video look like one that begins with text."""
VIDEO_TOO_LONG = "a video lasts longer than the context has positions"
MOST_FRAMES = 1 << 12
"""Largest `max_frames`."""
_DETAILS = {"low": True, "high": False, "auto": False, None: False}
"""Value of `detail` → whether the picture gets little detail, whatever its size."""


class GivenPicture(NamedTuple):
    """A client's picture, not read yet. Converters of other interfaces put it in place of
    `image_url`: a client's JSON cannot hold one."""

    where: str
    """Name of the field in errors."""
    data: str = ""
    """File in base64."""
    small: bool = False
    """Whether little detail is requested."""
    file_id: str = ""
    """Id of an uploaded file, in place of `data`."""
    url: str = ""
    """An http(s) address, in place of `data`."""
    frames: int | None = None
    """Maximum frames of a video (0: as many as the processor takes); None: a picture."""

    @property
    def detail(self) -> bool | int:
        """Last part of `kept_pictures.Name`."""
        return self.small if self.frames is None else -1 - self.frames


class LoadedPicture(NamedTuple):
    """A picture whose bytes are decoded, or whose file is found."""

    given: GivenPicture
    name: bytes
    """Key that is equal for equal contents of one owner."""
    data: bytes | Path


def pictures_of(messages: list[Message]) -> list[GivenPicture]:
    """List the pictures and videos in order. Raises `InvalidRequest`, `TooLarge`."""
    found: list[tuple[str, Any, bool]] = []
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type not in PARTS:
                continue
            where, film = f"messages.{index}.content.{place}.{part.type}", part.type == "video_url"
            given = part.video_url if film else part.image_url
            if message.role != "user":
                where = given.where if isinstance(given, GivenPicture) else where
                raise InvalidRequest("only a user's message has pictures", param=where)
            found.append((where, given, film))
    if len(found) > MOST_INPUTS:
        raise TooLarge(
            f"the messages have {len(found)} pictures; at most {MOST_INPUTS} are taken",
            param="messages",
        )
    return [_film(one, where) if film else _given(one, where) for where, one, film in found]


def _film(given: Any, where: str) -> GivenPicture:
    given = {"url": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or (given.get("url") is None) == (given.get("file_id") is None):
        raise InvalidRequest("video_url must have either url or file_id", param=where)
    name, frames = ("url", "file_id")[given.get("url") is None], given.get("max_frames", 0)
    if not isinstance(given[name], str):
        raise InvalidRequest(f"{name} must be a string", param=f"{where}.{name}")
    if frames is not None and (type(frames) is not int or not 0 <= frames <= MOST_FRAMES):
        raise InvalidRequest(
            f"max_frames must be from 0 to {MOST_FRAMES:,}", param=f"{where}.max_frames"
        )
    made = GivenPicture(f"{where}.{name}", frames=frames or 0)
    if name == "file_id":
        return made._replace(file_id=given["file_id"])
    return given_url(given["url"], made)


def _given(given: Any, where: str) -> GivenPicture:
    if isinstance(given, GivenPicture):
        return given
    given = {"url": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or not isinstance(given.get("url"), str):
        raise InvalidRequest("image_url must have a url", param=f"{where}.url")
    small = is_small(given.get("detail"), f"{where}.detail")
    return given_url(given["url"], GivenPicture(f"{where}.url", small=small))


def is_small(detail: Any, where: str) -> bool:
    """Whether `detail` asks for little. Raises `InvalidRequest`."""
    if not isinstance(detail, str | None) or detail not in _DETAILS:
        raise InvalidRequest("detail must be low, high or auto", param=where)
    return _DETAILS[detail]


def given_url(url: str, picture: GivenPicture) -> GivenPicture:
    """Return a picture with the base64 of a data URL, or with an http(s) address. Raises
    `InvalidRequest` for other URLs."""
    if url[:8].lower().startswith(("http://", "https://")):
        return picture._replace(url=url)
    head, comma, data = url.partition(",")
    if not comma or not head[:5].lower() == "data:" or not head.lower().endswith(";base64"):
        raise InvalidRequest(
            "a picture is taken as a data URL (data:image/png;base64,…)",
            param=picture.where,
            code="unsupported_content",
        )
    return picture._replace(data=data)


async def _prepared(
    service: Service, seen: PicturePrompts, given: GivenPicture, most: int, *, counts: bool
) -> tuple[PictureShape, int, SealedPicture | None]:
    """Find a kept picture or video, or make one of at most `most` rows; return its shape, its rows
    and the object that keeps it in memory (`counts`: None). Raises `HeadraceError`.

    One file of a request is in memory at a time; a fetched one is charged like a body.
    """
    fetched: dict[str, Any] = {}
    try:
        picture = await _loaded(service, seen, given, fetched)
        name = CALLER.get().owner, picture.name, given.detail
        found = seen.kept.find(name)
        if found is not None:
            return found.shape, found.length, found
        film = given.frames is not None
        made = await service.decoders.run(_read, seen, picture, most, long=film)
        return made.shape, made.length, None if counts else seen.kept.hold(name, *made)
    finally:
        service.bodies.give(fetched)


async def _loaded(
    service: Service, seen: PicturePrompts, given: GivenPicture, fetched: dict[str, Any]
) -> LoadedPicture:
    """Decode a picture's base64, or find or fetch its file, within its limits. Raises
    `HeadraceError`."""
    most = (seen.limits if given.frames is None else seen.video_limits).bytes
    if given.url:
        return await _fetched(service, given, most, fetched)
    if given.file_id:
        return await _file(service, given, most)
    return await service.hands.beside(_decoded, given)


async def _fetched(
    service: Service, given: GivenPicture, most: int, fetched: dict[str, Any]
) -> LoadedPicture:
    """Fetch a picture in a separate process; charge its bytes to `fetched`. Raises
    `InvalidRequest`, `Overloaded`."""
    hosts = service.fetch_hosts
    if not hosts:
        raise InvalidRequest(
            "this server fetches nothing (option fetch_hosts); send the file as a data URL "
            "(data:image/png;base64,…)",
            param=given.where,
            code="unsupported_content",
        )
    data = await service.fetches.run(fetch, given.url, hosts, most, given.where)
    service.bodies.take(fetched, len(data))
    return LoadedPicture(given, blake2b(data, digest_size=32).digest(), data)


def _decoded(given: GivenPicture) -> LoadedPicture:
    try:
        data = base64.b64decode(given.data, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data is not base64", param=given.where) from None
    return LoadedPicture(given, blake2b(data, digest_size=32).digest(), data)


async def _file(service: Service, given: GivenPicture, most: int) -> LoadedPicture:
    if service.files is None:
        raise InvalidRequest(
            "this server keeps no files (option files); send the picture as a data URL",
            param=given.where,
            code="files_off",
        )
    try:
        path = await service.files.readable(given.file_id, CALLER.get().owner, most)
    except (NotFound, TooLarge) as error:
        error.param = given.where
        raise
    return LoadedPicture(given, f"file {given.file_id}".encode(), path)


def _read(
    seen: PicturePrompts, picture: LoadedPicture, most: int, on_child: OnChild | None = None
) -> PreparedPicture:
    """Decode a picture; read its file only now, because few are decoded at a time."""
    data, given = picture.data, picture.given
    if isinstance(data, Path):
        try:
            data = data.read_bytes()
        except OSError:
            raise NotFound(f"the content of {given.file_id} is gone", param=given.where) from None
    if given.frames is not None:
        return seen.read_video(data, given.where, given.frames, most, on_child)
    return seen.read(data, given.where, given.small, most, on_child)


async def with_pictures(
    service: Service, messages: list[Message], prompt: list[int], *, counts: bool
) -> tuple[list[int], list[InputSpan], list[SealedInput]]:
    """Return the prompt with each picture's tokens, its inputs (one per tile), and the objects that
    keep them in memory. The caller holds these until the request has ended. `counts`: the prompt is
    only counted, so it need not fit, and nothing has to be held.

    A picture that does not fit is refused once its header is read. Raises `InvalidRequest`,
    `ContextOverflow`, `TooLarge`, `Overloaded`, `PackageAbsent`.
    """
    seen = service.pictures
    assert seen is not None, "the model takes pictures"
    pictures = await service.hands.beside(pictures_of, messages)
    _check_places(
        service, seen, prompt, [seen.place_of(one.frames is not None) for one in pictures]
    )
    most = service.engine.max_context
    room, least, space = most - len(prompt), seen.picture.least_rows, seen.most_rows
    if not counts and len(pictures) * least > room:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and {len(pictures)} pictures of at least "
            f"{least}; together they must fit into a context of {most}",
            param="messages",
        )
    shapes: list[PictureShape] = []
    held: list[SealedPicture] = []
    for number, given in enumerate(pictures):
        # Leave room for the pictures after this one.
        rest = 0 if counts else (len(pictures) - number - 1) * least
        size = seen.frames_of(given.frames is not None)
        fit = (space - rest) // size
        mine = max(1, fit if counts else min(fit, room - rest))
        shape, length, found = await _prepared(service, seen, given, mine, counts=counts)
        seen.check_rows(length, mine, given.where, shape.film)
        shapes.append(shape)
        if not counts:
            room, space = room - length, space - length * size
            held += [] if found is None else [found]
    ids, spans = seen.expand(prompt, shapes, held)
    if any(span.time and span.first + span.time >= most for span in spans):
        raise InvalidRequest(VIDEO_TOO_LONG, param="messages")
    return ids, spans, [one.sealed for one in held]


def _check_places(
    service: Service, seen: PicturePrompts, prompt: list[int], wanted: list[int]
) -> None:
    """Raise `InvalidRequest` unless the prompt has the placeholder tokens of its pictures and
    videos, in order."""
    places = {*wanted, *seen.places}
    if [token for token in prompt if token in places] == wanted:
        return
    tokens = ", ".join(repr(service.engine.tokenizer.id_to_token(one)) for one in sorted(places))
    raise InvalidRequest(
        f"the messages have {len(wanted)} pictures and videos; the prompt that the model's chat "
        f"template writes has {sum(token in places for token in prompt)} tokens that stand for one "
        f"({tokens}), or in another order",
        param="messages",
    )
