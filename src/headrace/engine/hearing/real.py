"""The transcriber that a transcription process loads, by the options of the engine."""

from __future__ import annotations

from pathlib import Path

from ...base.config import Decision, EngineOptions
from ...speech.opening import open_transcriber
from ...speech.transcript import Transcriber
from .options import form_of, of_whisper


def opened(options: EngineOptions, folder: Path) -> tuple[Transcriber, list[Decision]]:
    """Open a model's transcriber. Raises `ModelFileError`, `UnsupportedModel`."""
    form = form_of(options)
    made = open_transcriber(
        str(folder),
        form.threads,
        form.precision,
        form.kv,
        cache_dir=options.cache_dir,
        keep=options.keep_packed,
    )
    if made.at_once:
        return made, form.decisions
    return made, [*form.decisions, *of_whisper(form, made.network.windows, made.network.sequences)]
