"""Several models of one server on virtual time: the engine's start, loop, schedulers and arbiter.
Only their workers are simulated: a step takes what the roofline predicts for it.

The models are those of a server here: opened files, this machine's memory and its calibration.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ...base.config import EngineOptions
from ...base.encodings import SealedHandle
from ...base.errors import EngineFault, OptionError
from ...base.facts import WorkerFacts
from ...base.modelfiles import ModelFiles
from ...base.outputs import Vector
from ...base.request import Request, SequenceDelta
from ...base.sampling import SamplingParams
from ...base.spec import InputSpan, RequestSpec
from ...base.step import Admission, PoolShape, StepPlan, StepResult, TokenLogprobs
from ...base.workeroptions import WorkerOptions
from ...roofline.machine import this_hardware
from ..loop.build import Built, build
from ..loop.executor import InlineExecutor
from ..loop.prediction import StepPredictor
from ..loop.start import beside_of, keeping
from .sim_replica import NONE, ONE, TOKEN, Clock

WORKER = f"{__name__}:load_worker"


class SimWorker:
    """A worker that computes nothing. Until `predict` is set, its steps take no time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.predict: StepPredictor | None = None
        self.around: Callable[[int], float] = lambda rows: 0.0
        """Seconds of the loop around a step of so many rows."""
        self._rows: dict[int, Admission] = {}

    def allocate(self, pool: PoolShape) -> None:
        """Do nothing."""

    def warm_up(self) -> None:
        """Do nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Let a step's predicted time pass."""
        self._rows.update((one.row, one) for one in plan.admitted)
        result = StepResult(plan.number, [ONE if one else NONE for one in plan.samples])
        for entry in range(plan.texts, len(plan.rows)):
            result.tokens[entry] = NONE
        for entry, row in enumerate(plan.rows[: plan.texts]):
            self._answer(result, entry, self._rows[row], plan.starts[entry], plan.counts[entry])
        if self.predict is not None:
            result.seconds = self.predict(plan).seconds
            text = plan.first_part()
            result.encoding = result.seconds
            if text.rows:
                result.encoding -= self.predict(text).seconds if plan.parts else result.seconds
            self.clock.now += result.seconds + self.around(len(plan.rows))
        return result

    def _answer(
        self, result: StepResult, entry: int, admission: Admission, start: int, units: int
    ) -> None:
        """Give an entry the outputs that its request asked for."""
        spec, size = admission.spec, len(result.tokens)
        if not spec.generates:
            if result.tokens[entry]:
                result.outputs = {**(result.outputs or {}), entry: Vector([0.0])}
            result.tokens[entry] = NONE
        made = TokenLogprobs(-1.0, 1, [TOKEN], [-1.0])
        if spec.sampling.logprobs is not None:
            result.logprobs = result.logprobs or [[] for _ in range(size)]
            result.logprobs[entry] = [made] * len(result.tokens[entry])
        if spec.sampling.prompt_logprobs is not None:
            result.prompt_logprobs = result.prompt_logprobs or [[] for _ in range(size)]
            places = range(start + 1, min(start + units + 1, admission.prompt_length))
            result.prompt_logprobs[entry] = [made for _ in places]

    def prepare_grammar(
        self, source: str, owner: str = "", done: Callable[[], None] | None = None
    ) -> bool:
        return True

    def load_adapter(self, name: str, path: str) -> None:
        """Do nothing."""

    def unload_adapter(self, name: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def load_worker(
    files: ModelFiles, settings: WorkerOptions, beside: object = None
) -> tuple[SimWorker, WorkerFacts]:
    """Return the worker of a model: see `loop.real.load_worker`."""
    size = sum(path.stat().st_size for path in files.weights)
    features = ("pooling",) if files.arch.task != "tokens" else ()
    return SimWorker(), WorkerFacts(size, 0, features=features)


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one model, one after the other."""

    model: int
    """Its place among the models."""
    prompt: int
    """Tokens."""
    tokens: int = 0
    """Tokens of an answer; 0: it is a vector."""
    at_once: int = 1
    """Inputs of a request."""
    units: int = 0
    """Positions of an encoded input that each token attends to; 0: there is none."""
    every: float = 0.0
    """Least seconds from the begin of a request to that of the next."""


@dataclass(slots=True)
class Course:
    """Times of a load, in virtual seconds."""

    requests: list[float] = field(default_factory=list)
    """Time of each request."""
    gaps: list[float] = field(default_factory=list)
    """Times between two tokens of an answer."""
    began: float = 0.0
    latest: float = 0.0
    left: int = 0
    """Inputs of its request without an answer."""


class ModelsAtOnce:
    """The models of a server on virtual time."""

    def __init__(self, models: Sequence[tuple[EngineOptions, ModelFiles]]) -> None:
        """Start an engine for all models. Raises what `build` raises, and `OptionError` if this
        machine's figures are not known."""
        known = this_hardware("cpu")
        if known is None:
            raise OptionError(
                "this machine was not measured yet: run `headrace roofline --calibrate`",
                param="hardware",
            )
        self._loop = known.loop
        keep = keeping([files for _, files in models])
        self._built = built = list[Built]()
        try:
            for place, (options, files) in enumerate(models):
                coming = [one for _, one in models[place + 1 :]]
                beside = beside_of([one.memory for one in built], coming, keep)
                options = replace(
                    options, device="cpu", depth=1, speculate="off", context_cache="0"
                )
                built.append(build(options, files, worker=WORKER, beside=beside))
        except BaseException:
            self.close()
            raise
        self.core = built[0].core
        for number, one in enumerate(built[1:], 1):
            self.core.join(number, one.core.first)
        self.clock = Clock()
        for lane in self.core.lanes.values():
            assert isinstance(lane.executor, InlineExecutor)
            worker = lane.executor.worker
            assert isinstance(worker, SimWorker)
            assert isinstance(lane.predict, StepPredictor)
            worker.clock, worker.predict, worker.around = (
                self.clock,
                lane.predict,
                known.loop.around,
            )
        self._names = count()
        self._owners: dict[str, int] = {}
        """Load of each request in work."""

    def run(self, loads: Sequence[Load], seconds: float) -> list[Course]:
        """Begin requests for so many virtual seconds; return the course of each load, all of
        whose requests have then ended."""
        clock, core, loop = self.clock, self.core, self._loop
        courses = [Course(began=clock.now) for _ in loads]
        end = clock.now + seconds
        coming = [(clock.now + loop.gateway_seconds, place) for place in range(len(loads))]
        """Times at which requests reach the engine."""
        while coming or core.has_work:
            while coming and coming[0][0] <= clock.now:
                time, place = heapq.heappop(coming)
                self._begin(loads[place], place, courses[place], time)
            if not core.has_work:
                clock.now = coming[0][0] if coming else clock.now
                continue
            for told in core.step():
                for delta in told.deltas:
                    place = self._owners[delta.request_id]
                    course = courses[place]
                    self._take(delta, course)
                    if course.left:
                        continue
                    ended = clock.now + loop.answer_seconds
                    course.requests.append(ended - course.began)
                    course.began = max(ended, course.began + loads[place].every)
                    if course.began < end:
                        heapq.heappush(coming, (course.began + loop.gateway_seconds, place))
        return courses

    def _begin(self, load: Load, place: int, course: Course, time: float) -> None:
        """Send a request that comes at `time`, within the last step or now."""
        course.latest, course.left = 0.0, load.at_once
        for _ in range(load.at_once):
            name = f"{next(self._names)}"
            sampling = SamplingParams(temperature=0.0, max_tokens=load.tokens or 1, ignore_eos=True)
            spec = RequestSpec(sampling, seed=0, task="tokens" if load.tokens else "vector")
            if load.units:
                source = SealedHandle(0, 0, b"", load.units, 1)
                span = InputSpan(0, 0, "sound", name.encode(), source, load.units)
                spec = replace(spec, inputs=(span,))
            prompt = [TOKEN] * load.prompt
            self._owners[name] = place
            self.core.add(Request(name, prompt, spec, cache_salt=name, arrival=time), load.model)

    def _take(self, delta: SequenceDelta, course: Course) -> None:
        if delta.finish in ("error", "abort"):
            raise EngineFault(f"a simulated request ended: {delta.error or delta.finish}")
        for _ in delta.tokens:
            if course.latest:
                course.gaps.append(self.clock.now - course.latest)
            course.latest = self.clock.now
        if delta.finish is not None:
            del self._owners[delta.request_id]
            course.left -= 1

    def close(self) -> None:
        """Close all models, the first one last."""
        for one in reversed(self._built):
            one.close()
