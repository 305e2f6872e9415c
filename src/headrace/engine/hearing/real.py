"""The transcriber that a transcription process loads, by the options of the engine."""

from __future__ import annotations

from pathlib import Path

from ...base.config import Decision, EngineOptions
from ...base.hardware import cpu
from ...speech.opening import open_transcriber
from ...speech.transcript import Transcriber


def opened(options: EngineOptions, folder: Path) -> tuple[Transcriber, list[Decision]]:
    """Open a model's transcriber. Raises `ModelFileError`, `UnsupportedModel`."""
    threads = options.threads or cpu().physical_cores
    precision = "int8" if options.dtype == "auto" else "exact"
    usual = "float32" if precision == "exact" else "int8"
    kv = usual if options.kv_dtype == "auto" else options.kv_dtype
    decisions = [
        Decision("threads", str(threads), "asked for" if options.threads else "one for each core"),
        Decision(
            "weights", precision, "dtype is auto" if precision == "int8" else "dtype is float32"
        ),
    ]
    made = open_transcriber(
        str(folder),
        threads,
        precision,  # type: ignore[arg-type]
        kv,  # type: ignore[arg-type]
        cache_dir=options.cache_dir,
        keep=options.keep_packed,
    )
    if not made.at_once:
        decisions.append(Decision("kv_dtype", kv, "of all K and V of the decoder"))
    return made, decisions
