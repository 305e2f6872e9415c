"""Messages between the API process, the engine process and the worker process.

One message carries all results of a step. The format is tagged arrays in msgpack: compact, and the
decoder refuses a message of the wrong shape.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..base import errors
from ..base.arch import ModelArch, Pooling
from ..base.config import Decision, EngineOptions
from ..base.errors import HeadraceError
from ..base.facts import WorkerFacts
from ..base.identity import Identity
from ..base.modelfiles import ModelFiles
from ..base.request import Request, SequenceDelta, StepStats
from ..base.step import PoolShape, StepPlan, StepResult
from ..base.workeroptions import WorkerOptions
from ..kv.holdings import BlockEvent
from .hearing.records import HeardSegment, HearOptions, SoundEnd

ASLEEP_RETRY = 5.0
"""Seconds after which a client refused by a sleeping engine should retry."""


class WireFiles(msgspec.Struct, array_like=True):
    """`ModelFiles` without its tokenizer, which only the API process needs."""

    name: str
    format: str
    path: str
    weights: list[str] = []
    arch: ModelArch | None = None
    """None for a transcription model, whose folder the engine process opens."""
    eos_ids: list[int] = []
    pooling: Pooling = Pooling()
    decisions: list[Decision] = []

    @classmethod
    def of(cls, files: ModelFiles) -> WireFiles:
        weights = [str(path) for path in files.weights]
        return cls(
            files.name,
            files.format,
            str(files.path),
            weights,
            files.arch,
            list(files.eos_ids),
            files.pooling,
            list(files.decisions),
        )

    def open(self) -> ModelFiles:
        assert self.arch is not None
        return ModelFiles(
            name=self.name,
            format=self.format,
            path=Path(self.path),
            weights=tuple(Path(path) for path in self.weights),
            arch=self.arch,
            tokenizer={},
            chat_template=None,
            eos_ids=tuple(self.eos_ids),
            pooling=self.pooling,
            decisions=tuple(self.decisions),
        )


class WireError(msgspec.Struct, array_like=True):
    """A typed error on its way to another process."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @classmethod
    def of(cls, error: HeadraceError) -> WireError:
        return cls(type(error).__name__, error.message, error.param, error.retry_after)

    def error(self) -> HeadraceError:
        kind = getattr(errors, self.kind, errors.EngineFault)
        made = kind(self.message, param=self.param, retry_after=self.retry_after)
        assert isinstance(made, HeadraceError)
        return made


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# The first message of both children.


class Hello(_Message):
    pid: int


class Phase(_Message):
    """The end of one phase of the start."""

    name: str
    seconds: float


class Failed(_Message):
    """The error that ends a process."""

    error: WireError


# API process → engine process.


class WireModel(msgspec.Struct, array_like=True):
    """One of several models of a server."""

    number: int
    """Its number in these messages; 0: the first, whose messages are sent bare."""
    options: EngineOptions
    files: WireFiles
    weight: float = 1.0


class Configure(_Message):
    options: EngineOptions
    files: WireFiles
    flight: str
    """Path of the flight recorder's file."""
    weight: float = 1.0
    beside: list[WireModel] = []
    """Further models, in the order in which they are loaded."""


class Submit(_Message):
    request: Request


class Abort(_Message):
    request_id: str


class Hear(_Message):
    """A sound to transcribe: `count` fp32 samples at 16 kHz in a file of the private folder."""

    request_id: str
    path: str
    count: int
    options: HearOptions


class AbortChoice(_Message):
    request_id: str
    choice: int


class LoadAdapter(_Message):
    """An adapter to load; engine process → worker process too. Answered by `AdapterDone`."""

    name: str
    path: str


class UnloadAdapter(_Message):
    """An adapter to unload; the worker forgets it when its last request has ended."""

    name: str


class AdapterDone(_Message):
    name: str
    error: WireError | None = None


class Operate(_Message):
    """An operator's action (`engine.loop.controls`); answered by `Operated` with its number."""

    number: int
    action: str
    argument: str = ""


class Inspect(_Message):
    """A question for a `Report`: whether everything is released while nothing is served."""


class LoadModel(_Message):
    """A further model to load; answered by `ModelDone`."""

    model: WireModel


class UnloadModel(_Message):
    """A model without requests, to unload; answered by `ModelDone`."""

    number: int


class ToModel(_Message):
    """A message about a model other than the first."""

    number: int
    message: Submit | Hear | Abort | AbortChoice | LoadAdapter | UnloadAdapter | Inspect


class Stop(_Message):
    pass


# Engine process → API process.


class Started(_Message):
    """The end of the start: messages sent from now on are served."""


class Ready(Started):
    max_context: int
    rows: int
    decisions: list[Decision]
    facts: dict[str, float]
    features: list[str]
    identity: Identity
    beside: dict[int, Ready] = {}
    """Messages of the other models, by number."""
    languages: list[str] = []
    """Language codes of a transcription model; empty: English alone."""


class News(_Message):
    """One turn of the loop: all deltas and the statistics."""

    deltas: list[SequenceDelta]
    stats: StepStats


class PrefixNews(_Message):
    """Changes of the prefix cache in a turn (`kv.holdings.Gains`)."""

    held: list[int]
    gone: list[int]
    blocks: list[BlockEvent]


class Refused(_Message):
    request_id: str
    error: WireError


class Beat(_Message):
    """A sign of life of an idle engine."""

    step: int


class ThreadNews(_Message):
    """A change in the threads of the engine process (`obs.threads`)."""

    failed: list[str]
    """Names of the threads that met an error, one entry for each."""
    down: dict[str, str]
    """Threads that should run but do not: name → reason."""


class Busy(_Message):
    """A warning that the step now starting may be silent for this time."""

    seconds: float


class Operated(_Message):
    number: int
    facts: dict[str, float]
    error: WireError | None = None


class Report(_Message):
    running: int
    waiting: int
    kv_usage: float
    integrity: str
    """The error that `check_integrity` found; empty if none."""


class ModelDone(_Message):
    """The outcome of loading (`ready`) or unloading a model, or the `error`."""

    number: int
    ready: Ready | None = None
    error: WireError | None = None


class HeardSoFar(_Message):
    """New segments of a sound, and the seconds of it transcribed so far."""

    request_id: str
    pieces: list[HeardSegment]
    upto: float
    end: SoundEnd | None = None


class HearingLoad(_Message):
    """The sounds of a transcription model, sent when they change and twice a second."""

    running: int
    waiting: int
    busy_seconds: float
    """Seconds of steps since the start."""


ModelNews = News | PrefixNews | Refused | AdapterDone | Report | HeardSoFar | HearingLoad


class OfModel(_Message):
    """A message of a model other than the first."""

    number: int
    message: ModelNews


ToEngine = (
    Configure
    | Submit
    | Hear
    | Abort
    | AbortChoice
    | LoadAdapter
    | UnloadAdapter
    | Operate
    | Inspect
    | LoadModel
    | UnloadModel
    | ToModel
    | Stop
)
FromEngine = (
    Hello
    | Phase
    | Failed
    | Ready
    | News
    | PrefixNews
    | ThreadNews
    | Refused
    | Beat
    | Busy
    | Report
    | AdapterDone
    | Operated
    | ModelDone
    | HeardSoFar
    | HearingLoad
    | OfModel
)


# Engine process → worker process.


class Load(_Message):
    files: WireFiles
    settings: WorkerOptions


class Allocate(_Message):
    pool: PoolShape


class WarmUp(_Message):
    pass


class Execute(_Message):
    plan: StepPlan


class Learn(_Message):
    """Tokens sampled after positions of rows, for a pipeline stage without the head."""

    rows: list[int]
    places: list[int]
    tokens: list[list[int]]


class Prepare(_Message):
    """A grammar to compile; the answer says whether it is ready."""

    grammar: str
    owner: str = ""


# Worker process → engine process.


class Loaded(_Message):
    facts: WorkerFacts


class Done(_Message):
    seconds: float


class Executed(_Message):
    result: StepResult


class Prepared(_Message):
    """The answer to the oldest `Prepare`."""

    done: bool


class Compiled(_Message):
    """A notice that a grammar is ready: ask again."""


ToWorker = (
    Failed
    | Load
    | Allocate
    | WarmUp
    | Execute
    | Learn
    | Prepare
    | LoadAdapter
    | UnloadAdapter
    | Stop
)
FromWorker = Hello | Failed | Loaded | Done | Executed | Prepared | Compiled | AdapterDone
