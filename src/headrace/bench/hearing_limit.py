"""Roofline share of a transcription run: the least time that hardware needs with one Whisper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..loader.whisper_files import WhisperFiles
from ..roofline.hardware import Hardware
from ..roofline.hearing import WINDOW, token_parts, window_parts
from .sounds import HeardSound


def hearing_limit(
    heard: Sequence[HeardSound], files: WhisperFiles, hardware: Hardware, users: int
) -> dict[str, float]:
    """Return the least seconds for these sounds and texts, with weights and KV in eight bits.

    The encoder's windows have no silence after them. At most `users` sounds share the weights that
    a token reads. One user waits for both parts; with several, one may decode while another is
    encoded.
    """
    sizes = files.arch
    encoder = decoder = 0.0
    tokens = 0
    for one in heard:
        count = len(files.tokenizer.encode(one.text, add_special_tokens=False).ids)
        for begin in range(0, int(one.recording.seconds) + 1, int(WINDOW)):
            part = min(WINDOW, one.recording.seconds - begin)
            positions = files.frames * part / WINDOW
            share = count * part / one.recording.seconds
            flops = sum(each.flops for each in window_parts(sizes, positions))
            read = sum(each.bytes for each in token_parts(sizes, positions, users))
            encoder += flops / hardware.rate("int8")
            decoder += share * read / hardware.bandwidth
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
