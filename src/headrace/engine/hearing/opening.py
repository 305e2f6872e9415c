"""Opening of a transcription model: from its name to a transcriber that is ready."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...base.config import EngineOptions
from ...base.errors import UnsupportedModel
from ...base.modelfiles import ModelFiles
from ...kernels.cpu.library import LibraryAbsent
from ...loader.jsonfile import read_json
from ...loader.progress import Progress
from ...loader.whisper import open_transcription, whisper_of
from ...obs.flight import FlightRecorder
from ...speech.finding import DEFAULT_MODEL as DEFAULT_MODEL
from ...speech.finding import KINDS, find
from ...speech.product import Precision
from ...speech.transcript import Transcriber
from ..loop.build import BuildOrder, Built, LoadedEngine, OnPhase, build, finish, load
from ..loop.core import EngineCore
from .desk import Desk, warming
from .frames import FRAMES, build_frames, frame_transcriber, open_frames, transcriber_in
from .options import engine_options, form_of
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

    `kv`: type of K and V of Whisper's decoder, by default that of `form_of`. `keep`: keep Whisper's
    8-bit weights in the cache for the next start. Raises `ModelNotFound`, `DownloadError`,
    `ModelFileError`, `UnsupportedModel`, `DoesNotFit`.
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
    files = open_hearing(folder, options)
    form = form_of(options)
    with _on_our_kernels():
        if files.format == FRAMES:
            return frame_transcriber(files, form)
        return transcriber_of(build(engine_options(options, form), files), files)


@contextmanager
def _on_our_kernels() -> Iterator[None]:
    try:
        yield
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"speech runs on the CPU kernels alone: {absent}") from absent


def open_hearing(folder: Path, options: EngineOptions) -> ModelFiles:
    """Open the folder of a transcription model. Raises `ModelFileError`, `UnsupportedModel`."""
    kind = read_json(folder / "config.json").get("model_type")
    if kind in KINDS[1:]:
        return open_frames(folder, str(kind))
    return open_transcription(folder, coded=form_of(options).precision == "int8")


def load_hearing(wanted: BuildOrder, on_phase: OnPhase) -> LoadedEngine | Built:
    """Load a transcription model's weights; Parakeet and Moonshine are then complete. Raises as
    `build`, and `UnsupportedModel` without the CPU kernels."""
    with _on_our_kernels():
        if wanted.files.format == FRAMES:
            return build_frames(wanted)
        options = engine_options(wanted.options, form_of(wanted.options))
        return load(wanted._replace(options=options), on_phase)


def finish_hearing(
    loaded: LoadedEngine | Built,
    files: ModelFiles,
    flight: FlightRecorder | None,
    on_phase: OnPhase,
) -> Generator[None, None, Built]:
    """Allocate and warm up a loaded transcription model, in pieces; return it. Raises as
    `build`."""
    built = loaded if isinstance(loaded, Built) else (yield from finish(loaded, flight, on_phase))
    begin = time.monotonic()
    try:
        yield from warming(transcriber_of(built, files))
    except BaseException:
        built.close()
        raise
    on_phase("warm_up", time.monotonic() - begin)
    return built


def transcriber_of(
    built: Built, files: ModelFiles, core: EngineCore | None = None, number: int = 0
) -> Transcriber:
    """Return the transcriber of a loaded model. `core`: the loop, by default its own; `number`: its
    lane there."""
    if files.format == FRAMES:
        return transcriber_in(built)
    whisper, shape = whisper_of(files), built.encoder
    assert whisper is not None
    assert shape is not None
    windows = shape.bound // shape.slot
    return Transcriber(
        whisper.files, WalkRunner(core or built.core, windows, number, on_close=built.close)
    )


def desk_of(built: Built, files: ModelFiles, core: EngineCore, number: int) -> Desk:
    """Return the request queue of a model that has joined a loop."""
    return Desk(transcriber_of(built, files, core, number))
