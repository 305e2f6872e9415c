"""Sounds in a conversation: the client's files, and their positions in the prompt."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from ....base.errors import InvalidRequest, TooLarge
from ....base.spec import InputSpan
from ...caller import CALLER

if TYPE_CHECKING:
    from ....dist.payloads import SealedInput
    from ...service import Service
    from .schema import Message

MOST_SOUNDS = 16
"""Maximum sounds of one conversation."""
PART = {"type": "audio", "audio_url": ""}
"""Message part by which templates recognise a sound."""


def sounds_of(messages: list[Message]) -> list[tuple[str, bytes]]:
    """List (field, bytes of the file) of each sound, in order. Raises `InvalidRequest`,
    `TooLarge`."""
    found: list[tuple[str, Any]] = []
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "input_audio":
                continue
            where = f"messages.{index}.content.{place}.input_audio"
            if message.role != "user":
                raise InvalidRequest("only a user's message has sounds", param=where)
            found.append((where, part.input_audio))
    if len(found) > MOST_SOUNDS:
        raise TooLarge(
            f"the messages have {len(found)} sounds; at most {MOST_SOUNDS} are taken",
            param="messages",
        )
    return [(f"{where}.data", _data(given, where)) for where, given in found]


def _data(given: Any, where: str) -> bytes:
    if not isinstance(given, dict) or not isinstance(given.get("data"), str):
        raise InvalidRequest("input_audio must have its data as base64", param=f"{where}.data")
    try:
        return base64.b64decode(given["data"], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data is not base64", param=f"{where}.data") from None


async def with_sounds(
    service: Service, messages: list[Message], prompt: list[int], *, counts: bool
) -> tuple[list[int], list[InputSpan], list[SealedInput]]:
    """Return the prompt with one token per row of a sound, its inputs, and the objects that keep
    them in memory. The caller holds these until the request has ended. `counts`: the prompt is only
    counted, so nothing has to be held.

    Raises `InvalidRequest`, `TooLarge`, `Overloaded`, `PackageAbsent`.
    """
    listened = service.sounds
    assert listened is not None, "the model takes sounds"
    sounds, place = sounds_of(messages), listened.place
    if prompt.count(place) != len(sounds):
        token = service.engine.tokenizer.id_to_token(place)
        raise InvalidRequest(
            f"the messages have {len(sounds)} sounds, and the prompt has {token!r}, which "
            f"stands for one, {prompt.count(place)} times",
            param="messages",
        )
    ids: list[int] = []
    spans: list[InputSpan] = []
    held: list[SealedInput] = []
    after = 0
    for where, data in sounds:
        made = await service.decoders.run(listened.read, data, where)
        source = None
        if not counts:
            held.append(listened.payloads.hold(CALLER.get().owner, made.features))
            source = held[-1].source
        at = prompt.index(place, after)
        ids += prompt[after:at]
        spans.append(InputSpan(len(ids), made.rows, "sound", made.digest, source, made.positions))
        ids += [place] * made.rows
        after = at + 1
    return ids + prompt[after:], spans, held
