"""Measured GPU memory of a step: see `device_memory`."""

from __future__ import annotations

import torch

from ..base.arch import ModelArch
from ..base.groups import graph_groups
from ..base.hardware import cpu
from ..base.step import PoolShape
from ..kernels.cuda_graphs import null_step
from ..kernels.model import Model
from ..kernels.operators import StepLimits
from ..kernels.program import CallByCall, Provider, want
from .device_memory import DeviceMemory, StepMemory
from .kv_tensors import allocate_kv

SAMPLING_COPIES = 4
"""Number of fp32 arrays [R, V] in addition to the logits while penalties are computed; filters need
fewer."""


class CudaMemory:
    def __init__(self, device: str) -> None:
        self._device = device
        self._held = 0

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free = int(torch.cuda.mem_get_info(self._device)[0])
        if torch.cuda.get_device_properties(self._device).is_integrated:
            free = max(free, cpu().available)  # File pages are used to the driver, and given back.
        return free

    def watch(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held = torch.cuda.memory_allocated(self._device)

    def growth(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._held


def measure_step(
    model: Model,
    operators: Provider,
    arch: ModelArch,
    kv_dtype: str,
    device: str,
    limits: StepLimits,
    memory: DeviceMemory,
) -> StepMemory:
    """Run the largest steps on null blocks, and capture the largest graphs.

    There are two largest steps. One has prompts alone. The other has one token each of as many long
    contexts as fit with a prompt; its attention holds partial sums for each of them.
    """
    cache = allocate_kv(PoolShape(16, graph_groups(model.graph, kv_dtype)), device)
    # As many rows as possible want logits.
    rows = min(limits.entries, limits.tokens)
    steps = [
        null_step(limits.tokens, cache, limits.max_context, decodes=decodes)
        for decodes in {0: 0, rows - 1: 0}
    ]
    plain = CallByCall(model, operators, cache, operators.drawing)
    everything = want(logits=True, hidden="every")
    operators.compile_kernels(plain, limits)
    for step in steps:
        step.sample_rows = torch.arange(rows, device=device)
        plain.step(step, everything)  # Libraries make their workspaces.
    memory.watch()
    for step in steps:
        plain.step(step, everything)
    peak = memory.growth() + SAMPLING_COPIES * rows * arch.vocab_size * 4
    return StepMemory(peak, operators.graph_bytes(plain, limits))
