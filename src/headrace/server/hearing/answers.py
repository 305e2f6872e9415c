"""Responses of a transcription: OpenAI's JSON, captions, and the events of a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from ...engine.hearing.records import HeardSegment, SoundEnd
from ...speech.captions import srt, vtt
from ...speech.languages import name_of
from ..generation import Usage
from ..transcription_form import HeardToken, SecondsUsage
from ..wire import json_response
from .form import AudioForm

POSITIONS_A_SECOND = 50
"""Encoder positions per second of sound: each counts as a prompt token in a key's limits and in the
ledger."""


def used(seconds: float, pieces: Sequence[HeardSegment], model: str) -> Usage:
    """Return the usage that a key is charged."""
    found = Usage(model)
    found.known_prompt(0, round(seconds * POSITIONS_A_SECOND))
    found.completion = sum(len(piece.tokens) for piece in pieces)
    return found


def usage(seconds: float) -> SecondsUsage:
    """Return the whole seconds of a sound, as OpenAI bills them."""
    return {"type": "duration", "seconds": math.ceil(seconds)}


def logprobs(pieces: Sequence[HeardSegment]) -> list[HeardToken]:
    return [
        {"token": text, "logprob": share, "bytes": list(data)}
        for piece in pieces
        for text, share, data in piece.logprobs
    ]


def text_of(pieces: Sequence[HeardSegment]) -> str:
    return "".join(piece.text for piece in pieces).strip()


def answer(form: AudioForm, task: str, pieces: Sequence[HeardSegment], end: SoundEnd) -> Response:
    """Build the whole answer in the requested format."""
    kind = form.response_format
    if kind == "text":
        return Response(text_of(pieces) + "\n", media_type="text/plain; charset=utf-8")
    if kind == "srt":
        return Response(srt(pieces), media_type="application/x-subrip; charset=utf-8")
    if kind == "vtt":
        return Response(vtt(pieces), media_type="text/vtt; charset=utf-8")
    reply: dict[str, Any] = {"text": text_of(pieces)}
    if kind == "verbose_json":
        reply |= _verbose(form, task, pieces, end)
    elif form.include:
        reply["logprobs"] = logprobs(pieces)
    return json_response({**reply, "usage": usage(end.seconds)})


def _verbose(
    form: AudioForm, task: str, pieces: Sequence[HeardSegment], end: SoundEnd
) -> dict[str, Any]:
    return {
        "task": task,
        "language": name_of(end.language),
        "duration": round(end.seconds, 3),
        "left_out": [
            {"start": begin, "end": stop, "reason": reason} for begin, stop, reason in end.left_out
        ],
        **_times(form, pieces),
    }


def _times(form: AudioForm, pieces: Sequence[HeardSegment], first: int = 0) -> dict[str, Any]:
    """Return the segments, numbered from `first`, and words that the form asks for."""
    wanted = form.timestamp_granularities or ["segment"]
    found: dict[str, Any] = {}
    if "segment" in wanted:
        found["segments"] = [
            {
                "id": number,
                "seek": round(piece.start * 100),
                "start": piece.start,
                "end": piece.end,
                "text": piece.text,
                "tokens": piece.tokens,
                "temperature": piece.temperature,
                "avg_logprob": piece.log_share,
                "compression_ratio": piece.compression,
                "no_speech_prob": piece.no_speech,
            }
            for number, piece in enumerate(pieces, first)
        ]
    if "word" in wanted:
        found["words"] = [
            {"word": word.strip(), "start": start, "end": stop}
            for piece in pieces
            for word, start, stop in piece.words
        ]
    return found


def delta(form: AudioForm, pieces: Sequence[HeardSegment], first: int) -> dict[str, Any]:
    """Build the event of new segments, of which `first` were sent before."""
    event: dict[str, Any] = {
        "type": "transcript.text.delta",
        "delta": "".join(piece.text for piece in pieces),
    }
    if form.response_format == "verbose_json":
        return event | _times(form, pieces, first)
    return event | ({"logprobs": logprobs(pieces)} if form.include else {})


def done(
    form: AudioForm, task: str, pieces: Sequence[HeardSegment], end: SoundEnd
) -> dict[str, Any]:
    """Build the final event, with all of the text."""
    event: dict[str, Any] = {
        "type": "transcript.text.done",
        "text": text_of(pieces),
        "usage": usage(end.seconds),
    }
    if form.response_format == "verbose_json":
        return event | _verbose(form, task, pieces, end)
    return event | ({"logprobs": logprobs(pieces)} if form.include else {})
