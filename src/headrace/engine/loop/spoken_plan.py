"""A model's codec part before a start: its files and its memory."""

from __future__ import annotations

from typing import NamedTuple

from ...base.config import Decision
from ...base.modelfiles import ModelFiles
from ...speech.voices import FILE, VoiceFiles, open_voices


class CodecPlan(NamedTuple):
    """The codec part for the memory plan."""

    voices: VoiceFiles
    bytes: int
    """Its weights, and the rows that the layers of `rows` sounds keep."""
    decision: Decision
    rows: int


def plan_codec(files: ModelFiles, rows: int) -> CodecPlan | None:
    """Plan the codec of a model; None if it has none. `rows`: sounds at the same time. Raises
    `ModelFileError`, `UnsupportedModel`."""
    if not (files.path / FILE).is_file():
        return None
    voices = open_voices(files.path, files.arch.vocab_size)
    codec = voices.codec
    reason = (
        f"a SNAC of {codec.weight_bytes / 2**20:,.0f} MiB makes {codec.rate:,} samples a second of "
        f"the text's tokens; each of {rows} sounds keeps {codec.stream_bytes / 2**10:,.0f} KiB"
    )
    size = codec.weight_bytes + rows * codec.stream_bytes
    return CodecPlan(voices, size, Decision("parts", "text, codec", reason), rows)
