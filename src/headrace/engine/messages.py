"""What the API process, the engine process and the worker process say to each other.

One message carries everything that one step has to say. Tagged arrays in msgpack: compact, and a
message of the wrong shape is refused by the decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from ..kv.holdings import BlockEvent

ASLEEP_RETRY = 5.0
"""Seconds after which a client that met a sleeping engine should ask again."""


class WireFiles(msgspec.Struct, array_like=True):
    """`ModelFiles` without its tokenizer, which only the API process needs."""

    name: str
    format: str
    path: str
    weights: list[str]
    arch: ModelArch
    eos_ids: list[int]
    pooling: Pooling
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


# Both children say this first.


class Hello(_Message):
    pid: int


class Phase(_Message):
    """One phase of the start has ended."""

    name: str
    seconds: float


class Failed(_Message):
    """The process cannot go on and ends."""

    error: WireError


# API process → engine process.


class Configure(_Message):
    options: EngineOptions
    files: WireFiles
    flight: str
    """Path of the flight recorder's file."""


class Submit(_Message):
    request: Request


class Abort(_Message):
    request_id: str


class AbortChoice(_Message):
    request_id: str
    choice: int


class LoadAdapter(_Message):
    """An adapter to load; engine process → worker process too. Answered by `AdapterDone`."""

    name: str
    path: str


class UnloadAdapter(_Message):
    """Let an adapter go; the worker forgets it when the last request that has it has ended."""

    name: str


class AdapterDone(_Message):
    name: str
    error: WireError | None = None


class Operate(_Message):
    """What an operator wants (`engine.controls`); answered by `Operated` with its number."""

    number: int
    action: str
    argument: str = ""


class Inspect(_Message):
    """Ask for a `Report`: is everything given back when nobody is served?"""


class Stop(_Message):
    pass


# Engine process → API process.


class Started(_Message):
    """The start is done: what is sent from now on is served."""


class Ready(Started):
    max_context: int
    rows: int
    decisions: list[Decision]
    facts: dict[str, float]
    features: list[str]
    identity: Identity


class News(_Message):
    """One turn of the loop: all deltas and the statistics."""

    deltas: list[SequenceDelta]
    stats: StepStats


class PrefixNews(_Message):
    """What the prefix cache gained and lost in a turn (`kv.holdings.Gains`)."""

    held: list[int]
    gone: list[int]
    blocks: list[BlockEvent]


class Refused(_Message):
    request_id: str
    error: WireError


class Beat(_Message):
    """Nothing to do, and well."""

    step: int


class ThreadNews(_Message):
    """A change in the threads of the engine process (`obs.threads`)."""

    failed: list[str]
    """Names of those that met an error, once for each."""
    down: dict[str, str]
    """Threads that do not run and should: name → what ended them."""


class Busy(_Message):
    """The step that begins now may be silent for so long."""

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
    """What `check_integrity` found wrong; empty: nothing."""


ToEngine = (
    Configure
    | Submit
    | Abort
    | AbortChoice
    | LoadAdapter
    | UnloadAdapter
    | Operate
    | Inspect
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
)


# Engine process → worker process.


class Load(_Message):
    files: WireFiles
    settings: dict[str, Any]


class Allocate(_Message):
    pool: PoolShape


class WarmUp(_Message):
    pass


class Execute(_Message):
    plan: StepPlan


class Learn(_Message):
    """What was sampled behind places of rows, for a stage without the head."""

    rows: list[int]
    places: list[int]
    tokens: list[list[int]]


class Prepare(_Message):
    """Compile a grammar, and say whether that is done."""

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
    """A grammar that was not done is now: ask again."""


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
