"""Parakeet and Moonshine in the loop: a lane whose steps are slices of one window.

Their networks are numpy between products, so the worker has no graph of them (ADR 0059): the
conductor chooses the slices, and a step of the lane runs one.
"""

from __future__ import annotations

from pathlib import Path

from ...base.arch import ModelArch
from ...base.errors import DoesNotFit
from ...base.facts import WorkerFacts
from ...base.hardware import hardware
from ...base.identity import Identity
from ...base.modelfiles import ModelFiles
from ...base.step import PoolShape
from ...kernels.cpu.library import Team
from ...kv.holdings import Holdings
from ...loader.content import content_digest
from ...roofline.memory import USABLE, MemoryPlan
from ...speech.frame_transcript import FrameTranscriber
from ...speech.moonshine import MoonshineNetwork
from ...speech.moonshine_files import MoonshineFiles, open_moonshine
from ...speech.parakeet import ParakeetNetwork
from ...speech.parakeet_files import ParakeetFiles, open_parakeet
from ...speech.transcript import Transcriber
from ..loop.build import BuildOrder, Built
from ..loop.core import EngineCore
from ..loop.executor import InlineExecutor
from ..loop.sliced import SlicePlanner, SliceWorker
from .options import HearingForm, form_of

FRAMES = "frames"
"""`ModelFiles.format` of these models' folders."""


def open_frames(folder: Path, kind: str) -> ModelFiles:
    """Open a folder of this `model_type`; the sizes are those of its encoder. Raises
    `ModelFileError`, `UnsupportedModel`."""
    opened: MoonshineFiles | ParakeetFiles
    if kind == "moonshine":
        opened = open_moonshine(folder)
        layers, heads = opened.layers[0], opened.heads[0]
    else:
        opened = open_parakeet(folder)
        layers, heads = opened.layers, opened.heads
    arch = ModelArch(
        family=kind,
        vocab_size=opened.vocab,
        hidden=opened.width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=opened.width // heads,
        intermediate=opened.inner,
        max_context=1,
        norm_eps=1e-5,
    )
    return ModelFiles(
        name=folder.name,
        format=FRAMES,
        path=folder,
        weights=(folder / "model.safetensors",),
        arch=arch,
        tokenizer=folder / "tokenizer.json",
        chat_template=None,
        opened=opened,
    )


def build_frames(wanted: BuildOrder) -> Built:
    """Load such a model into its own lane. Raises `DoesNotFit`, `ModelFileError`,
    `LibraryAbsent`."""
    files, beside, other = wanted.files, wanted.beside, wanted.executor
    form, options = form_of(wanted.options), wanted.options
    assert other is None or isinstance(other, InlineExecutor)
    executor = InlineExecutor(lambda: _loaded(files, form), beside=other, aside=wanted.aside)
    facts = executor.load()
    here = hardware().cpu.available if beside.available is None else beside.available
    left = here - facts.weight_bytes - beside.bytes
    if left < (1 - USABLE["cpu"]) * here:
        executor.close()
        raise DoesNotFit(
            f"{files.name} takes {facts.weight_bytes / 2**20:,.0f} MiB beside "
            f"{beside.bytes / 2**20:,.0f} MiB of other models, of {here / 2**20:,.0f} MiB; free "
            "some, or serve fewer models",
            param="model",
        )
    transcriber = _in(executor)
    sizes = here, facts.weight_bytes, 0, 0, 0, 0, 0, left, 0
    rows = transcriber.network.windows
    pool = PoolShape(1, ())
    memory = MemoryPlan(pool, rows, 1, 1, form.kv, *sizes, (), beside_bytes=beside.bytes)
    core = EngineCore(SlicePlanner(transcriber.conductor), executor)
    identity = Identity.of(content_digest(files), files.arch, options, form.decisions)
    return Built(core, memory, facts, form.decisions, identity, Holdings([], 1))


def transcriber_in(built: Built) -> Transcriber:
    """Return the transcriber that `build_frames` loaded."""
    assert isinstance(built.core.executor, InlineExecutor)
    return _in(built.core.executor)


def _in(executor: InlineExecutor) -> FrameTranscriber:
    assert isinstance(executor.worker, FrameWorker)
    return executor.worker.transcriber


def _loaded(files: ModelFiles, form: HearingForm) -> tuple[FrameWorker, WorkerFacts]:
    size = sum(path.stat().st_size for path in files.weights)
    return FrameWorker(frame_transcriber(files, form)), WorkerFacts(size, 0)


def frame_transcriber(files: ModelFiles, form: HearingForm) -> FrameTranscriber:
    """Load the transcriber of such a model. Raises `ModelFileError`, `LibraryAbsent`."""
    opened, team = files.opened, Team(form.threads)
    if isinstance(opened, MoonshineFiles):
        return FrameTranscriber(MoonshineNetwork(opened, team, form.precision))
    return FrameTranscriber(ParakeetNetwork(opened, team, form.precision))


class FrameWorker(SliceWorker):
    """Worker that computes one slice of the conductor's next window in a step."""

    def __init__(self, transcriber: FrameTranscriber) -> None:
        super().__init__(transcriber.conductor)
        self.transcriber = transcriber

    def close(self) -> None:
        self.transcriber.close()
