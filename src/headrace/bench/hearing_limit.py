"""Share of the roofline of a run of sounds: what hardware needs to hear them with one Whisper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..roofline.hardware import Hardware
from ..speech.files import WhisperFiles
from .sounds import HeardSound

WINDOW = 30.0
"""Seconds that the encoder hears at a time."""


def hearing_limit(
    heard: Sequence[HeardSound], files: WhisperFiles, hardware: Hardware, users: int
) -> dict[str, float]:
    """The least seconds for these sounds and texts, with weights and K and V in eight bits.

    With D numbers a position, E and L layers, F positions of a window (50 a second of its sound,
    no silence behind it), the encoder needs, in FLOPs: 12 M D F for a convolution over three frames
    of M mels, two a position; 6 D² F for one over three of those, one a position; E times 24 D² F +
    4 F² D; and 4 L D² F for the decoder's K and V (Radford et al. 2022), all at the full rate. Each
    token of a text reads 14 L D² + V D weights, which at most `users` sounds share, and 2 L F D of
    K and V. One user waits for both; of several one may decode while another is encoded.
    """
    width, products, read = files.width, 0.0, 0.0
    weights = files.decoder_layers * 14 * width * width + files.vocab * width
    tokens = 0
    for one in heard:
        count = len(files.tokenizer.encode(one.text, add_special_tokens=False).ids)
        for begin in range(0, int(one.recording.seconds) + 1, int(WINDOW)):
            part = min(WINDOW, one.recording.seconds - begin)
            positions = files.frames * part / WINDOW
            products += (12 * files.mels + 6 * width) * width * positions
            products += files.encoder_layers * (24 * width + 4 * positions) * width * positions
            products += files.decoder_layers * 4 * width * width * positions
            share = count * part / one.recording.seconds
            read += share * 2 * files.decoder_layers * positions * width
        read += count * weights / users
        tokens += count
    encoder, decoder = products / hardware.rate("int8"), read / hardware.bandwidth
    least = encoder + decoder if users == 1 else max(encoder, decoder)
    return {"seconds": least, "encoder": encoder, "decoder": decoder, "tokens": float(tokens)}


def add_hearing_limit(
    result: dict[str, Any], limit: dict[str, float], name: str, hardware: Hardware
) -> None:
    """Beside what was measured: its share of the limit, and the rate at the limit."""
    seconds = limit["seconds"]
    result["roofline"] = {
        **limit,
        "model": name,
        "hardware": hardware.name,
        "rtfx": result["sound_seconds"] / seconds if seconds else 0.0,
        "share": seconds / result["seconds"] if result["seconds"] else 0.0,
    }
