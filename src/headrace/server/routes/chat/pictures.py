"""Pictures in a conversation: the client's files, and their positions in the prompt."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....base.errors import ContextOverflow, InvalidRequest, TooLarge
from ....base.spec import InputSpan
from ....loader.towers import MOST_INPUTS
from ...caller import CALLER

if TYPE_CHECKING:
    from ....dist.payloads import SealedInput
    from ....engine.clients.pictures import PreparedPicture
    from ...service import Service
    from .schema import Message

PART = {"type": "image"}
"""Message part by which templates recognise a picture."""
_DETAILS = {"low": True, "high": False, "auto": False, None: False}
"""Values of `detail` → whether the picture is taken with little detail, whatever its size."""


class GivenPicture(NamedTuple):
    """A client's picture."""

    where: str
    """The field that errors name."""
    data: bytes
    small: bool
    """Whether little detail is wanted."""


def pictures_of(messages: list[Message]) -> list[GivenPicture]:
    """List the pictures in order. Raises `InvalidRequest`, `TooLarge`."""
    found: list[tuple[str, Any]] = []
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "image_url":
                continue
            where = f"messages.{index}.content.{place}.image_url"
            if message.role != "user":
                raise InvalidRequest("only a user's message has pictures", param=where)
            found.append((where, part.image_url))
    if len(found) > MOST_INPUTS:
        raise TooLarge(
            f"the messages have {len(found)} pictures; at most {MOST_INPUTS} are taken",
            param="messages",
        )
    return [_given(one, where) for where, one in found]


def _given(given: Any, where: str) -> GivenPicture:
    given = {"url": given} if isinstance(given, str) else given
    if not isinstance(given, dict) or not isinstance(given.get("url"), str):
        raise InvalidRequest("image_url must have a url", param=f"{where}.url")
    detail = given.get("detail")
    if not isinstance(detail, str | None) or detail not in _DETAILS:
        raise InvalidRequest("detail must be low, high or auto", param=f"{where}.detail")
    head, comma, data = given["url"].partition(",")
    where = f"{where}.url"
    if not comma or not head[:5].lower() == "data:" or not head.lower().endswith(";base64"):
        raise InvalidRequest(
            "a picture is taken as a data URL (data:image/png;base64,…); nothing is fetched",
            param=where,
            code="unsupported_content",
        )
    try:
        return GivenPicture(where, base64.b64decode(data, validate=True), _DETAILS[detail])
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data is not base64", param=where) from None


async def with_pictures(
    service: Service, messages: list[Message], prompt: list[int], *, counts: bool
) -> tuple[list[int], list[InputSpan], list[SealedInput]]:
    """Return the prompt with the tokens of each picture, its inputs (one for each tile), and what
    holds them: the caller keeps it until the request has ended. `counts`: the prompt is only
    counted, so it need not fit, and nothing has to be held.

    A picture that does not fit is refused once its header is read. Raises `InvalidRequest`,
    `ContextOverflow`, `TooLarge`, `Overloaded`, `PackageAbsent`.
    """
    seen = service.pictures
    assert seen is not None, "the model takes pictures"
    pictures, place = pictures_of(messages), seen.place
    if prompt.count(place) != len(pictures):
        token = service.engine.tokenizer.id_to_token(place)
        raise InvalidRequest(
            f"the messages have {len(pictures)} pictures, and the prompt has {token!r}, which "
            f"stands for one, {prompt.count(place)} times",
            param="messages",
        )
    most, owner = service.engine.max_context, CALLER.get().owner
    room, least = most - len(prompt), seen.picture.least_rows
    if not counts and len(pictures) * least > room:
        raise ContextOverflow(
            f"the prompt has {len(prompt)} tokens and {len(pictures)} pictures of at least "
            f"{least}; together they must fit into a context of {most}",
            param="messages",
        )
    room = min(room, seen.most_rows)
    ids: list[int] = []
    spans: list[InputSpan] = []
    held: list[SealedInput] = []
    after = 0
    for number, given in enumerate(pictures):
        # The pictures after this one take some, too.
        mine = seen.most_rows if counts else room - (len(pictures) - number - 1) * least
        made = await service.decoders.run(seen.read, given.data, given.where, given.small, mine)
        room -= made.length
        own = None
        if not counts:
            patches = np.concatenate([tile.patches for tile in made.tiles])
            own = seen.payloads.hold(owner, patches, seen.levels)
            held.append(own)
        at = prompt.index(place, after)
        ids += prompt[after:at]
        tokens = seen.ids(made.rows, made.columns, made.tiles[0].rows)
        spans += _spans(made, tokens, len(ids), place, own)
        ids += tokens
        after = at + 1
    return ids + prompt[after:], spans, held


def _spans(
    made: PreparedPicture,
    tokens: tuple[int, ...],
    begin: int,
    place: int,
    held: SealedInput | None,
) -> list[InputSpan]:
    """Return the inputs of a picture whose tokens begin at `begin`, one for each tile."""
    spans, at = [], 0
    for number, tile in enumerate(made.tiles):
        at, units = tokens.index(place, at), len(tile.patches)
        source = None if held is None else held.part(number * units, units)
        shape = units, tile.columns
        spans.append(InputSpan(begin + at, tile.rows, "picture", tile.digest, source, *shape))
        at += tile.rows
    return spans
