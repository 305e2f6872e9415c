"""From a model's name to a transcriber that is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..base.errors import UnsupportedModel
from ..base.hardware import cpu
from ..kernels.cpu.library import LAYOUT, LibraryAbsent, Team
from ..loader import Progress
from ..loader.jsonfile import read_json
from ..loader.panels import PanelShelf, panel_folder
from ..roofline.hearing import HearingRoom, room_that_fits
from .decoding import MOST_BEAMS
from .files import WhisperFiles, open_whisper
from .finding import DEFAULT_MODEL as DEFAULT_MODEL
from .finding import KINDS, find
from .frame_transcript import FrameTranscriber
from .moonshine import MoonshineNetwork
from .moonshine_files import MoonshineFiles, open_moonshine
from .network import SEQUENCES, USUAL_KV, WINDOWS, Network, Precision
from .parakeet import ParakeetNetwork
from .parakeet_files import ParakeetFiles, open_parakeet
from .transcript import Transcriber

KvKind = Literal["float32", "bfloat16", "int8"]


def open_transcriber(
    name: str,
    threads: int,
    precision: Precision = "int8",
    kv: KvKind | None = None,
    *,
    cache_dir: str | Path | None = None,
    keep: bool = False,
    progress: Progress | None = None,
) -> Transcriber:
    """Open a transcription model by a catalog name, or a folder: of Whisper in CTranslate2's or
    Hugging Face's layout, or of Parakeet or Moonshine in the latter.

    `kv`: type of K and V of Whisper's decoder, by default as `Network` has it. `keep`: Whisper's
    weights in eight bits are kept in the cache for the next start. Raises `ModelNotFound`,
    `DownloadError`, `ModelFileError`, `UnsupportedModel`, `DoesNotFit`.
    """
    folder = find(name, cache_dir=cache_dir, progress=progress)
    kind = read_json(folder / "config.json").get("model_type")
    other: ParakeetFiles | MoonshineFiles | None = None
    if kind in KINDS[1:]:
        other = open_moonshine(folder) if kind == "moonshine" else open_parakeet(folder)
    try:
        team = Team(threads)
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"speech runs on the CPU kernels alone: {absent}") from absent
    if isinstance(other, ParakeetFiles):
        return FrameTranscriber(ParakeetNetwork(other, team, precision))
    if other is not None:
        return FrameTranscriber(MoonshineNetwork(other, team, precision))
    files, shelf = open_whisper(folder), None
    if keep and precision == "int8":
        shelf = PanelShelf(files, panel_folder(cache_dir), LAYOUT, progress=progress)
    room = room_here(files, precision, kv)
    return Transcriber(Network(files, team, precision, kv, *room, shelf=shelf))


def room_here(files: WhisperFiles, precision: Precision, kv: str | None) -> HearingRoom:
    """Return the windows and sequences that this machine has room for. Raises `DoesNotFit`."""
    given = files.arch, cpu().available, HearingRoom(WINDOWS, SEQUENCES)
    how = precision == "int8", kv or USUAL_KV[precision]
    return room_that_fits(*given, each=MOST_BEAMS, coded=how[0], kv=how[1])
