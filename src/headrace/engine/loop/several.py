"""The models of an engine process: one memory plan, one loop, one worker's threads."""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from importlib import import_module
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ...base.config import EngineOptions
from ...base.errors import EngineDead, EngineFault, HeadraceError, InvalidRequest, Overloaded
from ...base.hardware import hardware
from ...base.modelfiles import ModelFiles
from ...dist.wake import Wake
from ...obs.flight import FlightRecorder
from ...obs.threads import THREADS
from .. import messages
from ..messages import Configure, Ready, WireError, WireFiles, WireModel
from ..preload import give_back
from .build import BuildOrder, Built, LoadedEngine, OnPhase, build, finish, load, unheard, whole
from .controls import Controls
from .core import Told
from .executor import Executor
from .prediction import drawing_seconds
from .start import Beside, beside_of, keeping

if TYPE_CHECKING:
    from ...base.request import Request
    from ..hearing.desk import Desk
    from .lending import Lender
    from .spoken import SpokenSounds

log = logging.getLogger("headrace.engine")
OpenFiles = Callable[[WireFiles, EngineOptions], ModelFiles]
HEARD = "whisper", "frames"
"""`ModelFiles.format` of transcription models."""
Loaded = LoadedEngine | Built


class Models:
    """The models that are served, by number; the loop has a lane for each."""

    def __init__(self, first: Built, files: ModelFiles, keep_kv: int, worker: str) -> None:
        """`keep_kv`: models of the start that keep KV. `worker`: names what loads a worker."""
        self.core = first.core
        self.built = {0: first}
        self.controls = {0: Controls(first, files)}
        self.desks: dict[int, Desk] = {}
        """Sounds of the transcription models."""
        self.spoken: dict[int, SpokenSounds] = {}
        """Sounds of the models that speak, whose codec has the lane `codec_of(number)`."""
        self._hear(0, files)
        self._keep_kv = keep_kv
        self._worker = worker
        self._loaded: SimpleQueue[tuple[WireModel, ModelFiles | Loaded | HeadraceError]]
        self._loaded = SimpleQueue()
        """Models whose opening or loading, in threads of their own, has ended."""
        self._finishing: deque[tuple[WireModel, ModelFiles, Generator[None, None, Built]]] = deque()
        """Loaded models on their way into the loop."""
        self._loading: dict[int, ModelFiles | None] = {}
        """Files of the models that are opened (None) or loaded."""

    @classmethod
    def start(
        cls,
        configure: Configure,
        open_files: OpenFiles,
        *,
        worker: str,
        flight: FlightRecorder,
        on_phase: OnPhase,
    ) -> Models:
        """Build all models. Raises what `build` raises, with everything closed."""
        files = open_files(configure.files, configure.options)
        coming = [open_files(one.files, one.options) for one in configure.beside]
        keep_kv = keeping([files, *coming])
        first = _build(
            configure.options,
            files,
            worker=worker,
            flight=flight,
            on_phase=on_phase,
            beside=beside_of((), coming, keep_kv),
        )
        models = cls(first, files, keep_kv, worker)
        try:
            for lane in models.core.lanes:
                models.core.weigh(lane, configure.weight)
            for place, model in enumerate(configure.beside):
                models._add(model, coming[place], coming[place + 1 :], on_phase)
        except BaseException:
            models.close()
            raise
        return models

    def _add(
        self, model: WireModel, files: ModelFiles, coming: Sequence[ModelFiles], on_phase: OnPhase
    ) -> None:
        built = _build(
            model.options,
            files,
            worker=self._worker,
            on_phase=on_phase,
            beside=self._beside(coming),
            executor=self.core.executor,
        )
        self._join(model, files, built)

    def _beside(self, coming: Sequence[ModelFiles]) -> Beside:
        return beside_of([one.memory for one in self.built.values()], coming, self._keep_kv)

    def _join(self, model: WireModel, files: ModelFiles, built: Built) -> None:
        self.core.join(model.number, built.core.first, model.weight)
        self.built[model.number] = built
        self.controls[model.number] = Controls(built, files)
        self._hear(model.number, files, model.weight)

    def _hear(self, number: int, files: ModelFiles, weight: float = 1.0) -> None:
        """Open the request queue of a model that transcribes, or the codec's lane of one that
        speaks."""
        if files.format in HEARD:
            self.desks[number] = _hearing().desk_of(self.built[number], files, self.core, number)
        if (codec := self.built[number].codec) is not None:
            self.spoken[number] = codec.spoken
            self.core.join(codec_of(number), codec.lane, weight)

    # Requests

    def add(self, request: Request, model: int) -> None:
        """Accept a request of a model. Raises what `Scheduler.add` raises, and `Overloaded`."""
        self.check_awake(model)
        self.core.add(request, model)
        if request.spec.task == "sound":
            self.spoken[model].begin(request)

    def abort(self, request_id: str, model: int) -> None:
        """End a request of a model in any state; its deltas come with the next turn."""
        if model in self.desks:
            self.desks[model].drop(request_id)
            return
        self.core.abort(request_id, model)
        if model in self.spoken:
            self.core.abort(request_id, codec_of(model))

    def step(self) -> list[Told]:
        """Make one turn of the loop: see `EngineCore.step`. What sounds were made of is not in
        the list, and what codecs made stands under their models."""
        found = []
        for model, lane, deltas in self.core.step():
            if model in self.desks:
                self.desks[model].take(deltas, lane.stats.seconds)
                found.append(Told(model, lane, []))
            elif model in self.spoken:
                found.append(Told(model, lane, self.spoken[model].take(deltas)))
            elif model >= 0:
                found.append(Told(model, lane, deltas))
            elif deltas:
                model = codec_of(model)
                found.append(Told(model, self.core.lanes[model], deltas))
        return found

    # Models that come and go while others are served

    def load(self, model: WireModel, open_files: OpenFiles) -> messages.ModelDone | None:
        """Begin to open and load a model, in threads; `turn` returns the outcome. An answer that is
        known at once is returned."""
        try:
            if any(controls.recording for controls in self.controls.values()):
                raise InvalidRequest("a profile of one model is being recorded; end it first")
            self._loading[model.number] = None
            self._aside(model, lambda: open_files(model.files, model.options))
        except Exception as fault:  # noqa: BLE001 - of this model; the others are served on
            self._loading.pop(model.number, None)
            return _not_loaded(model.number, fault)
        return None

    def _begin(self, model: WireModel, files: ModelFiles) -> None:
        """Begin to load the weights of a model whose files are open."""
        coming = [files for _, files, _ in self._finishing]
        coming += [one for one in self._loading.values() if one is not None]
        beside = self._beside(coming)
        here = hardware().cpu.available + sum(one.memory.taken for one in self.built.values())
        if beside.available is not None:
            beside = replace(beside, available=min(beside.available, here))
        wanted = BuildOrder(
            model.options, files, self._worker, beside, self.core.executor, aside=True
        )
        self._loading[model.number] = files
        self._aside(model, lambda: _load(wanted, unheard))

    def _aside(self, model: WireModel, work: Callable[[], ModelFiles | Loaded]) -> None:
        if THREADS.errand("load-model", self._work, model, work) is None:
            raise Overloaded("the system has no thread to load it in", retry_after=10.0)

    def _work(self, model: WireModel, work: Callable[[], ModelFiles | Loaded]) -> None:
        """Open or load a model, in a thread of its own."""
        try:
            found: ModelFiles | Loaded | HeadraceError = work()
        except HeadraceError as error:
            found = error
        except Exception as fault:
            log.exception("a model could not be loaded")
            found = EngineFault(f"{type(fault).__name__}: {fault}")
        self._loaded.put((model, found))
        wake = self.core.executor.wake
        if isinstance(wake, Wake):
            wake.ring()

    @property
    def busy(self) -> bool:
        """Whether `turn`, or a sound, has something to do though no step may follow."""
        if self._finishing or not self._loaded.empty():
            return True
        return any(desk.busy and not self._steps(number) for number, desk in self.desks.items())

    def turn(self) -> list[messages.ModelDone]:
        """Do a piece of what is to be done for loaded models; return the outcomes."""
        done = []
        while not self._loaded.empty():
            model, found = self._loaded.get()
            if isinstance(found, ModelFiles):
                try:
                    self._begin(model, found)
                except Exception as fault:  # noqa: BLE001 - as below
                    self._loading.pop(model.number)
                    done.append(_not_loaded(model.number, fault))
                continue
            files = self._loading.pop(model.number)
            if isinstance(found, HeadraceError):
                done.append(messages.ModelDone(model.number, error=WireError.of(found)))
            else:
                assert files is not None, "what is loaded was opened"
                self._finishing.append((model, files, _finish(found, files)))
        if not self._finishing:
            return done
        model, files, pieces = self._finishing[0]
        try:
            built = _next_piece(pieces)
            if built is None:
                return done
            self._join(model, files, built)
            gc.freeze()  # It stays: no collection need walk over it.
            done.append(messages.ModelDone(model.number, self._ready(model.number)))
        except Exception as fault:  # noqa: BLE001 - of this model; the others are served on
            done.append(_not_loaded(model.number, fault))
        self._finishing.popleft()
        return done

    def unload(self, number: int) -> messages.ModelDone:
        """Unload a model without requests and give its memory back."""
        if number not in self.built or not number:
            error: HeadraceError = InvalidRequest("there is no such model to unload")
        elif self._works(number):
            error = Overloaded("requests are still in work", retry_after=1.0)
        else:
            self.core.leave(number)
            del self.controls[number]
            self.desks.pop(number, None)
            if self.spoken.pop(number, None) is not None:
                self.core.leave(codec_of(number))
            self.built.pop(number).close()
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            give_back()
            return messages.ModelDone(number)
        return messages.ModelDone(number, error=WireError.of(error))

    def _steps(self, number: int) -> bool:
        lanes = self.core.lanes
        return any(lanes[one].has_work for one in (number, codec_of(number)) if one in lanes)

    def _works(self, number: int) -> bool:
        desk = self.desks.get(number)
        return self._steps(number) or (desk is not None and desk.busy)

    def ready(self) -> Ready:
        """Return the first model's message, with the others'."""
        ready = {number: self._ready(number) for number in self.built}
        first = next(iter(ready))
        ready[first].beside = {number: one for number, one in ready.items() if number != first}
        return ready[first]

    def _ready(self, number: int) -> Ready:
        built, desk = self.built[number], self.desks.get(number)
        facts = {
            "weight_bytes": float(built.facts.weight_bytes),
            "kv_bytes": float(built.memory.kv_bytes),
            "kv_tokens": float(built.memory.kv_tokens),
            **drawing_seconds(built.core.lanes[0].predict),
        }
        return Ready(
            built.core.max_context,
            built.memory.rows,
            built.decisions,
            facts,
            [*built.facts.features, *(["sound"] if number in self.spoken else [])],
            built.identity,
            languages=[] if desk is None else desk.languages,
        )

    @property
    def lender(self) -> Lender | None:
        """Lender of the first model's blocks, in a prefill/decode split."""
        return self.built[0].lender

    def check_awake(self, model: int) -> None:
        """Raise `Overloaded` if a model sleeps: its scheduler still has the blocks of the pool that
        was given back."""
        if self.controls[model].asleep:
            raise Overloaded("the engine sleeps", retry_after=messages.ASLEEP_RETRY)

    def operate(self, asked: messages.Operate) -> messages.Operated:
        """Perform an operator's action on all models."""
        several = len(self.controls) > 1 or self._loading or self._finishing
        if asked.action == "start_profile" and several:
            error = InvalidRequest("a profile is of one model, and this server has several")
            return messages.Operated(asked.number, {}, WireError.of(error))
        if asked.action == "sleep" and any(map(self._works, self.built)):
            busy = Overloaded("requests are still in work", retry_after=1.0)
            return messages.Operated(asked.number, {}, WireError.of(busy))
        facts: dict[str, float] = {}
        for controls in self.controls.values():
            answer = controls.perform(asked)
            if answer.error is not None:
                return answer
            for name, value in answer.facts.items():
                facts[name] = facts.get(name, 0.0) + value
        return messages.Operated(asked.number, facts)

    def tidy(self) -> None:
        """See `Controls.tidy`."""
        for controls in self.controls.values():
            controls.tidy()

    def close(self) -> None:
        """Close all models, the first one last."""
        for number in reversed(list(self.built)):
            self.built[number].close()


def codec_of(model: int) -> int:
    """Return the number of the lane of a model's codec; of that number, the model's."""
    return ~model


def _hearing() -> Any:
    """Return what builds transcription models; engines of text do without its imports."""
    return import_module("headrace.engine.hearing.opening")


def _load(wanted: BuildOrder, on_phase: OnPhase) -> Loaded:
    """Load a model of either kind: see `build.load`."""
    if wanted.files.format not in HEARD:
        return load(wanted, on_phase)
    found: Loaded = _hearing().load_hearing(wanted, on_phase)
    return found


def _finish(
    loaded: Loaded,
    files: ModelFiles,
    flight: FlightRecorder | None = None,
    on_phase: OnPhase = unheard,
) -> Generator[None, None, Built]:
    """Finish a model of either kind: see `build.finish`."""
    if isinstance(loaded, LoadedEngine) and files.format not in HEARD:
        return finish(loaded, flight, on_phase)
    pieces: Generator[None, None, Built]
    pieces = _hearing().finish_hearing(loaded, files, flight, on_phase)
    return pieces


def _build(
    options: EngineOptions,
    files: ModelFiles,
    *,
    worker: str,
    on_phase: OnPhase,
    beside: Beside,
    flight: FlightRecorder | None = None,
    executor: Executor | None = None,
) -> Built:
    """Build a model of either kind: see `build`."""
    if files.format not in HEARD:
        given = {"flight": flight, "on_phase": on_phase, "beside": beside, "executor": executor}
        return build(options, files, worker=worker, **given)  # type: ignore[arg-type]
    loaded = _load(BuildOrder(options, files, worker, beside, executor), on_phase)
    return whole(_finish(loaded, files, flight, on_phase))


def _next_piece(pieces: Generator[None, None, Built]) -> Built | None:
    """Do one piece of the work; return the model after the last."""
    try:
        next(pieces)
    except StopIteration as ended:
        built: Built = ended.value
        return built
    return None


def _not_loaded(number: int, fault: Exception) -> messages.ModelDone:
    """Return the answer about a model that could not be loaded. `EngineDead` is raised again: it
    is of all models."""
    if isinstance(fault, EngineDead):
        raise fault
    if not isinstance(fault, HeadraceError):
        log.error("a model could not be loaded", exc_info=fault)
        fault = EngineFault(f"{type(fault).__name__}: {fault}")
    return messages.ModelDone(number, error=WireError.of(fault))
