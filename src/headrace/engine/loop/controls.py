"""An operator's actions on a running engine, on the side of the engine process.

Between two turns of the loop: forget the prefixes, give the KV pool back and take it again, record
the steps for a timeline.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.errors import EngineDead, HeadraceError, InvalidRequest, Overloaded
from ...base.modelfiles import ModelFiles
from ...base.step import PoolShape
from ...roofline.machine import this_hardware
from ...roofline.step import StepModel
from ...sched import Scheduler
from .. import messages
from ..messages import WireError
from .executor import Executor
from .prediction import case_of
from .recording import RecordingExecutor
from .timeline import timeline

if TYPE_CHECKING:
    from .build import Built

MOST_ENTRIES = 50_000
"""Bound of one recording (`RecordingExecutor`). Its timeline is made in the engine's only thread.
At this bound that takes a second or two, in which the supervisor gets no sign of life."""
SLEEPING_BLOCKS = 2
"""Blocks of each group that stay: the null block, and one that is never handed out."""


class Controls:
    """Executor of `messages.Operate` requests."""

    def __init__(self, built: Built, files: ModelFiles) -> None:
        self.asleep = False
        self._built = built
        self._files = files
        self._recording: RecordingExecutor | None = None
        self._before: Executor | None = None

    def perform(self, asked: messages.Operate) -> messages.Operated:
        """Perform an action; every refusal is an answer. An exception ends the process,
        `EngineDead` too: without its worker the engine can serve nothing."""
        try:
            match asked.action:
                case "reset_prefix_cache":
                    facts = self._reset()
                    if self._built.context is not None:
                        self._built.context.tiers.store.forget()
                case "sleep":
                    facts = self._sleep()
                case "wake":
                    facts = self._wake()
                case "start_profile":
                    facts = self._start_profile()
                case "stop_profile":
                    facts = self._stop_profile(Path(asked.argument))
                case other:
                    raise InvalidRequest(f"the engine cannot {other}")
        except EngineDead:
            raise
        except HeadraceError as error:
            return messages.Operated(asked.number, {}, WireError.of(error))
        return messages.Operated(asked.number, facts)

    @property
    def recording(self) -> bool:
        """Whether a profile is being recorded."""
        return self._recording is not None

    def tidy(self) -> None:
        """Take back the blocks whose movements in lower tiers have ended, while no step does."""
        if self._built.context is not None:
            self._built.context.tiers.turn()

    def _reset(self) -> dict[str, float]:
        scheduler = self._built.core.scheduler
        if not isinstance(scheduler, Scheduler):
            return {"blocks": 0.0}  # Parakeet and Moonshine have no pool.
        blocks = sum(len(pool.index) for pool in scheduler.kv.pools)
        if self._built.context is not None:
            self._built.context.settle()
        scheduler.reset()
        return {"blocks": float(blocks)}

    def _sleep(self) -> dict[str, float]:
        if self._built.core.has_work:
            raise Overloaded("requests are still in work", retry_after=1.0)
        memory = self._built.memory
        if not self.asleep:
            facts = self._reset()
            small = tuple(
                group._replace(blocks=min(group.blocks, SLEEPING_BLOCKS))
                for group in memory.pool.groups
            )
            slots, cross = (
                tuple(group._replace(blocks=0) for group in groups)
                for groups in (memory.pool.slots, memory.pool.cross)
            )
            asleep = PoolShape(memory.pool.block_size, small, slots, cross)
            self._built.core.executor.allocate(asleep)
            self.asleep = True
        else:
            facts = {"blocks": 0.0}
        return facts | {"kv_bytes": float(memory.kv_bytes)}

    def _wake(self) -> dict[str, float]:
        if self.asleep:
            self._built.core.executor.allocate(self._built.memory.pool)
            self._built.core.executor.warm_up()
            self.asleep = False
        return {"kv_bytes": float(self._built.memory.kv_bytes)}

    def _start_profile(self) -> dict[str, float]:
        if self._recording is not None:
            raise InvalidRequest("a profile is being recorded; stop it first")
        if self._files.format in ("whisper", "frames"):
            raise InvalidRequest("a profile is of a text model", param="model")
        if this_hardware(self._decided("device", "cpu")) is None:
            raise InvalidRequest(
                "this hardware is not known to the roofline: run `headrace roofline --calibrate`"
            )
        core = self._built.core
        self._before = core.executor
        recording = RecordingExecutor(core.executor, most_entries=MOST_ENTRIES)
        self._recording = core.executor = recording
        return {}

    def _stop_profile(self, path: Path) -> dict[str, float]:
        if self._recording is None or self._before is None:
            raise InvalidRequest("no profile is being recorded")
        steps = [step for step in self._recording.steps if step.ended]
        left_out = self._recording.left_out
        self._built.core.executor, self._recording, self._before = self._before, None, None
        device = self._decided("device", "cpu")
        hardware = this_hardware(device)
        assert hardware is not None, "start_profile asked"
        dtype = self._decided("dtype", "float32")
        case = case_of(self._files, dtype=dtype, kv_dtype=self._decided("kv_dtype", dtype))
        model = StepModel(case, hardware)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_text(json.dumps(timeline(steps, model, left_out=left_out)))
        except OSError as error:
            raise Overloaded(
                f"the timeline cannot be written: {error.strerror}", retry_after=10.0
            ) from None
        return {"steps": float(len(steps)), "left_out": float(left_out)}

    def _decided(self, name: str, default: str) -> str:
        values = {decision.name: decision.value for decision in self._built.decisions}
        return values.get(name, default)
