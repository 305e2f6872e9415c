"""Roofline share of a transcription run: the hardware's least time with one Whisper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.arch import ModelArch
from ..loader.whisper_files import WhisperFiles
from ..models.whisper import describe_encoder
from ..roofline.composition import compose
from ..roofline.counts import Case
from ..roofline.hardware import Hardware
from ..roofline.slices import least_seconds, part_work
from ..roofline.step import StepTime, step_time
from ..roofline.weights import WeightBytes
from .sounds import HeardSound

WINDOW = 30.0
"""Seconds of sound that the encoder takes at a time."""


def token_step(text: ModelArch, hardware: Hardware, place: int, rows: int, users: int) -> StepTime:
    """Price a step of the token at `place` in `users` texts, each with a sound of `rows` positions,
    with weights and KV in eight bits."""
    case = Case(text, WeightBytes("Q8_0"), "float32", "int8")
    step = compose(text, [place] * users, [1] * users, inputs=[rows] * users)
    return step_time(case, hardware, step)


def hearing_limit(
    heard: Sequence[HeardSound], files: WhisperFiles, hardware: Hardware, users: int
) -> dict[str, float]:
    """Return the least seconds for these sounds and texts, with weights and KV in eight bits.

    The encoder's windows are not padded with silence. At most `users` sounds share the weights that
    a token reads. One user waits for both parts; with several, one may decode while another is
    encoded.
    """
    graph, text = describe_encoder(files.arch), files.arch.text
    encoder = decoder = 0.0
    tokens = 0
    for one in heard:
        count = len(files.tokenizer.encode(one.text, add_special_tokens=False).ids)
        for begin in range(0, int(one.recording.seconds) + 1, int(WINDOW)):
            part = min(WINDOW, one.recording.seconds - begin)
            if part <= 0:
                continue
            rows = round(files.frames * part / WINDOW)
            share = count * part / one.recording.seconds
            encoder += least_seconds(
                work.floor(hardware) for work in part_work(graph, rows, coded=True)
            )
            # At the middle of the window's text.
            step = token_step(text, hardware, min(round(share / 2), text.max_context), rows, users)
            decoder += share * step.limit_seconds / users
        tokens += count
    least = encoder + decoder if users == 1 else max(encoder, decoder)
    return {"seconds": least, "encoder": encoder, "decoder": decoder, "tokens": float(tokens)}


def add_hearing_limit(
    result: dict[str, Any], limit: dict[str, float], name: str, hardware: Hardware
) -> None:
    """Add to a result its share of the limit, and the rate at the limit."""
    seconds = limit["seconds"]
    result["roofline"] = {
        **limit,
        "model": name,
        "hardware": hardware.name,
        "rtfx": result["sound_seconds"] / seconds if seconds else 0.0,
        "share": seconds / result["seconds"] if result["seconds"] else 0.0,
    }
