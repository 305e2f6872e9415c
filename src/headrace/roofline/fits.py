"""Memory check of a step on a device: a step that does not fit is refused, never timed."""

from __future__ import annotations

from dataclasses import replace

from ..base.errors import DoesNotFit
from ..base.groups import graph_groups, kept_bytes
from ..base.layout import Layout
from ..models.registry import describe
from .composition import Composition
from .counts import Case, device_bytes, kv_share
from .hardware import Hardware

GB = 1e9


def step_kv_bytes(case: Case, step: Composition) -> float:
    """Return the KV bytes that a step's sequences keep on one device."""
    arch = case.arch
    if arch.encoder is not None:
        return 0.0
    kept = (one for one in graph_groups(describe(arch), case.kv_dtype) if not one.state)
    size = sum(
        len(one.layers) * step.attended[one.window].kv_tokens * kept_bytes(one.arrays)
        for one in kept
    )
    return size / kv_share(case) / case.layout.pp


def verify_fits(case: Case, hardware: Hardware, step: Composition) -> None:
    """Raise `DoesNotFit` if weights and the step's KV exceed a device's whole memory."""
    weights, kv = device_bytes(case), step_kv_bytes(case, step)
    if weights + kv <= hardware.memory:
        return
    text = (
        f"{weights / GB:,.1f} GB of weights and {kv / GB:,.1f} GB of KV on each device, "
        f"{hardware.name} has {hardware.memory / GB:,.0f} GB"
    )
    for tp in (2, 4, 8, 16, 32, 64):
        moe = case.arch.moe is not None
        spread = replace(case, layout=Layout(tp, case.layout.pp, case.layout.ep or moe))
        if tp <= case.layout.tp or spread.layout.refusal(case.arch) or not hardware.link_bandwidth:
            continue
        if device_bytes(spread) + step_kv_bytes(spread, step) <= hardware.memory:
            text += f"; it would fit with --layout {spread.layout}"
            break
    raise DoesNotFit(f"does not fit: {text}", param="hardware")
