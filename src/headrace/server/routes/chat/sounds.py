"""Sounds in a conversation: the client's files, and their positions in the prompt."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

from ....base.errors import InvalidRequest, TooLarge
from ....base.spec import InputSpan

if TYPE_CHECKING:
    from ....engine.clients.listening import SoundListener
    from ...service import Service
    from .schema import Message

MOST_SOUNDS = 16
"""Maximum sounds of one conversation."""
PART = {"type": "audio", "audio_url": ""}
"""Message part by which templates recognise a sound."""


def sounds_of(messages: list[Message]) -> list[tuple[str, bytes]]:
    """List (field, bytes of the file) of each sound, in order. Raises `InvalidRequest`,
    `TooLarge`."""
    found: list[tuple[str, bytes]] = []
    for index, message in enumerate(messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "input_audio":
                continue
            where = f"messages.{index}.content.{place}.input_audio"
            if message.role != "user":
                raise InvalidRequest("only a user's message has sounds", param=where)
            found.append((f"{where}.data", _data(part.input_audio, where)))
    if len(found) > MOST_SOUNDS:
        raise TooLarge(
            f"the messages have {len(found)} sounds; at most {MOST_SOUNDS} are taken",
            param="messages",
        )
    return found


def _data(given: Any, where: str) -> bytes:
    if not isinstance(given, dict) or not isinstance(given.get("data"), str):
        raise InvalidRequest("input_audio must have its data as base64", param=f"{where}.data")
    try:
        return base64.b64decode(given["data"], validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data is not base64", param=f"{where}.data") from None


async def with_sounds(
    service: Service, listener: SoundListener, messages: list[Message], prompt: list[int]
) -> tuple[list[int], list[InputSpan]]:
    """Return the prompt with one token per embedding row of a sound, and the input embeddings.

    Raises `InvalidRequest`, `TooLarge`, `PackageAbsent`.
    """
    sounds = sounds_of(messages)
    if prompt.count(listener.place) != len(sounds):
        raise InvalidRequest(
            f"the messages have {len(sounds)} sounds, and the prompt has {listener.place!r}, which "
            f"stands for one, {prompt.count(listener.place)} times",
            param="messages",
        )
    ids: list[int] = []
    spans: list[InputSpan] = []
    after = 0
    for where, data in sounds:
        samples = await service.decoders.run(listener.decode, data, where)
        name, rows = await listener.hear(samples)
        at = prompt.index(listener.place, after)
        ids += prompt[after:at]
        spans.append(InputSpan(len(ids), len(rows), "sound", name, rows.tobytes()))
        ids += [listener.place] * len(rows)
        after = at + 1
    return ids + prompt[after:], spans
