"""Results of steps that went wrong, and the agreement of ranks on how a step ended."""

from __future__ import annotations

import logging
import time
from traceback import walk_tb

from ..base.errors import EngineFault
from ..base.step import StepPlan, StepResult
from ..kernels.model import Model
from .device_memory import DeviceMemory

log = logging.getLogger("headrace.worker")
_logged: set[str] = set()
"""Lines that raised an error in a step of this process."""


def failed_step(
    plan: StepPlan, begin: float, error: Exception, memory: DeviceMemory | None = None
) -> StepResult:
    """Return the result of a step that raised, with what a device says of it.

    Only the log has the stack: once for each line that raised, since every step may fail there.
    """
    result = StepResult(
        plan.number,
        tokens=[[] for _ in plan.rows],
        seconds=time.perf_counter() - begin,
        error=f"{type(error).__name__}: {' '.join(str(error).split())}",
    )
    places = [f"{at.f_code.co_filename}:{line}" for at, line in walk_tb(error.__traceback__)]
    if places and places[-1] not in _logged:
        _logged.add(places[-1])
        log.warning("step %d failed", plan.number, exc_info=error)
    if memory is not None:
        error.__traceback__ = None  # It holds the step's tensors.
        try:
            memory.free()  # Waits for the device, and empties torch's cache.
        except Exception:  # noqa: BLE001 - an error that stays: the context is lost
            result.cause = "device"
        else:
            # Of torch, of its libraries and of Triton, which have no class in common.
            short = ("out of memory", "ALLOC_FAILED")
            result.cause = "memory" if any(part in str(error) for part in short) else ""
    return result


def alike(model: Model, plan: StepPlan, begin: float, result: StepResult) -> StepResult:
    """Return the result of a step after all ranks that share the model have ended it, well or not.
    Otherwise the others would wait at an all-gather for a rank that failed alone."""
    ranks, commons, dealing = model.ranks, model.commons, model.dealing
    if ranks is not None and ranks.memory.ranks > 1:
        try:
            sign = 0 if dealing is None else dealing.sign
            ranks.meet(sign + (1 if result.error is None else 2))
        except EngineFault as fault:
            result = failed_step(plan, begin, fault)
    if commons is not None and commons.stages > 1 and result.error is not None:
        commons.tear()  # The later stages wait for values that will not come.
    if dealing is not None and result.error is not None:
        dealing.forget()
    return result
