"""From a model's name to a transcriber that is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..base.errors import UnsupportedModel
from ..kernels.cpu.library import LibraryAbsent, Team
from ..loader import Progress
from .files import open_whisper
from .finding import DEFAULT_MODEL as DEFAULT_MODEL
from .finding import find
from .network import Network, Precision
from .transcript import Transcriber

KvKind = Literal["float32", "bfloat16", "int8"]


def open_transcriber(
    name: str,
    threads: int,
    precision: Precision = "int8",
    kv: KvKind | None = None,
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Transcriber:
    """`name`: a catalog name or a folder in CTranslate2's or Hugging Face's layout.

    `kv`: type of K and V of cross attention, by default as `Network` has it.
    Raises `ModelNotFound`, `DownloadError`, `ModelFileError`, `UnsupportedModel`.
    """
    files = open_whisper(find(name, cache_dir=cache_dir, progress=progress))
    try:
        team = Team(threads)
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"speech runs on the CPU kernels alone: {absent}") from absent
    return Transcriber(Network(files, team, precision, kv))
