"""From a model's name to a transcriber that is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..base.errors import ModelNotFound, UnsupportedModel
from ..kernels.cpu.library import LibraryAbsent, Team
from ..loader import Progress
from ..loader.catalog import CATALOG
from ..loader.download import fetch_catalog
from .files import open_whisper
from .network import Network, Precision
from .transcript import Transcriber

DEFAULT_MODEL = "whisper-base"
KvKind = Literal["float32", "bfloat16", "int8"]


def open_transcriber(
    name: str,
    threads: int,
    precision: Precision = "int8",
    kv: KvKind = "float32",
    *,
    cache_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Transcriber:
    """`name`: a catalog name or a folder in CTranslate2's or Hugging Face's layout.

    Raises `ModelNotFound`, `DownloadError`, `ModelFileError`, `UnsupportedModel`.
    """
    known = CATALOG.get(name)
    if Path(name).is_dir():
        folder = Path(name)
    elif known is not None and known.speech:
        folder = fetch_catalog(known, cache_dir=cache_dir, progress=progress)
    else:
        speech = ", ".join(model.name for model in CATALOG.values() if model.speech)
        raise ModelNotFound(
            f"no speech model {name!r:.200}; it is a catalog name ({speech}) or a folder",
            param="model",
        )
    files = open_whisper(folder)
    try:
        team = Team(threads)
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"speech runs on the CPU kernels alone: {absent}") from absent
    return Transcriber(Network(files, team, precision, kv))
