"""Predicted speed of the models on this disk, for `headrace models --speed`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from ..base.errors import HeadraceError, InvalidRequest
from ..engine.simulator.described import make_case
from ..loader.cache import CachedModel
from ..roofline.composition import decode_step
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from ..roofline.step import step_time

CONTEXT = 1024
"""Tokens of context of the one sequence."""


def predicted(models: Iterable[CachedModel]) -> dict[str, float]:
    """Return tokens a second by name, for one sequence on this machine.

    Models that do not generate, and files that the roofline cannot describe, are left out. Raises
    `InvalidRequest` on an unmeasured machine.
    """
    path = calibration_path()
    if not path.exists():
        raise InvalidRequest(
            "this machine was not measured yet: headrace roofline --calibrate does it, and so does "
            "the first headrace serve",
            param="speed",
        )
    device = find_hardware("this", path)
    found = {}
    for model in models:
        with suppress(HeadraceError):
            case = make_case(model.name if model.task else str(model.path), device)
            if case.arch.task == "tokens":
                context = min(CONTEXT, case.arch.max_context - 1)
                step = decode_step(case.arch, 1, context)
                found[model.name] = 1 / step_time(case, device, step).seconds
    return found
