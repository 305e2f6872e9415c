"""Which kernels serve a model in a worker, before and without loading its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ..base import hardware
from ..base.config import Decision
from ..base.modelfiles import ModelFiles
from ..kernels.backend import Question, Shelf
from ..kernels.program import Provider
from ..kernels.select import choose
from ..loader.weight_source import WeightSource
from ..loader.weights import load_weights
from ..models.registry import describe
from .options import Resolved, WorkerOptions, resolve


def choose_operators(
    files: ModelFiles,
    options: WorkerOptions,
    resolved: Resolved,
    source: WeightSource,
    shelf: Shelf | None = None,
    beside: Provider | None = None,
) -> tuple[Provider, list[Decision]]:
    """The kernels that serve this model here, operator by operator, with reasons. `beside`: those
    of another model in this process, never computing at the same time."""
    question = Question(
        device=resolved.device,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        graph=describe(files.arch),
        weights=source.kinds(),
        threads=options.threads or hardware.cpu().cores,
        deterministic=options.deterministic,
        quantise=options.quantise,
        shelf=shelf,
        beside=beside,
    )
    return choose(question, options.kernels)


def kernel_decisions(files: ModelFiles, options: WorkerOptions) -> list[Decision]:
    """What a worker would choose, without loading a weight. Raises as `Worker` does."""
    resolved = resolve(options)
    source = WeightSource(load_weights(files))
    return choose_operators(files, options, resolved, source)[1]


def inference_of(operators: Provider) -> Callable[[], AbstractContextManager[object]]:
    """What their tensors are computed in; nothing where arrays are the host's."""
    if operators.host:
        return nullcontext
    import torch  # Local: imported where it computes.

    return torch.inference_mode
