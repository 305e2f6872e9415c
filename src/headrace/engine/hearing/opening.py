"""From a model's name to a transcriber that is ready."""

from __future__ import annotations

from pathlib import Path

from ...base.config import Decision, EngineOptions
from ...base.errors import UnsupportedModel
from ...base.modelfiles import ModelFiles
from ...kernels.cpu.library import LibraryAbsent, Team
from ...loader.jsonfile import read_json
from ...loader.progress import Progress
from ...loader.whisper import open_transcription, whisper_of
from ...speech.finding import DEFAULT_MODEL as DEFAULT_MODEL
from ...speech.finding import KINDS, find
from ...speech.frame_transcript import FrameTranscriber
from ...speech.moonshine import MoonshineNetwork
from ...speech.moonshine_files import open_moonshine
from ...speech.parakeet import ParakeetNetwork
from ...speech.parakeet_files import open_parakeet
from ...speech.product import Precision
from ...speech.transcript import Transcriber
from ..loop.build import Built, build
from .options import HearingForm, engine_options, form_of
from .runner import WalkRunner


def open_transcriber(
    name: str,
    threads: int,
    precision: Precision = "int8",
    kv: str = "auto",
    *,
    cache_dir: str | Path | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> Transcriber:
    """Open a transcription model by a catalog name, or a folder: of Whisper in CTranslate2's or
    Hugging Face's layout, or of Parakeet or Moonshine in the latter.

    `kv`: type of K and V of Whisper's decoder, by default as `form_of` has it. `keep`: Whisper's
    weights in eight bits are kept in the cache for the next start. Raises `ModelNotFound`,
    `DownloadError`, `ModelFileError`, `UnsupportedModel`, `DoesNotFit`.
    """
    folder = find(name, cache_dir=cache_dir, progress=progress)
    options = EngineOptions(
        model=name,
        threads=threads,
        dtype="auto" if precision == "int8" else "float32",
        kv_dtype=kv,
        cache_dir=None if cache_dir is None else str(cache_dir),
        keep_packed=keep,
    )
    return opened(options, folder)[0]


def opened(options: EngineOptions, folder: Path) -> tuple[Transcriber, list[Decision]]:
    """Open the transcriber of a folder by the options of an engine. Raises as `open_transcriber`
    does."""
    form = form_of(options)
    try:
        kind = read_json(folder / "config.json").get("model_type")
        if kind in KINDS[1:]:
            return _by_frames(folder, str(kind), form), form.decisions
        files = open_transcription(folder, coded=form.precision == "int8")
        built = build(engine_options(options, form), files)
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"speech runs on the CPU kernels alone: {absent}") from absent
    return transcriber_of(built, files), [*form.decisions, *built.decisions]


def transcriber_of(built: Built, files: ModelFiles) -> Transcriber:
    """Return the transcriber of a Whisper that an engine serves."""
    whisper = whisper_of(files)
    shape = built.encoder
    assert whisper is not None
    assert shape is not None
    return Transcriber(whisper.files, WalkRunner(built, shape.bound // shape.slot))


def _by_frames(folder: Path, kind: str, form: HearingForm) -> FrameTranscriber:
    if kind == "moonshine":
        files = open_moonshine(folder)
        return FrameTranscriber(MoonshineNetwork(files, Team(form.threads), form.precision))
    other = open_parakeet(folder)
    return FrameTranscriber(ParakeetNetwork(other, Team(form.threads), form.precision))
