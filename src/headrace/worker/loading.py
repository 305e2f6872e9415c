"""Choice of the kernels that serve a model in a worker, before and without loading its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

from ..base import hardware
from ..base.absorb import absorbed
from ..base.config import Decision
from ..base.graph import Graph
from ..base.modelfiles import ModelFiles
from ..kernels.backend import Question, Shelf
from ..kernels.program import Provider
from ..kernels.select import choose
from ..loader.heads import HeadFiles, open_head, tap_name, tap_weights
from ..loader.open import open_model
from ..loader.weight_source import WeightSource
from ..loader.weights import load_weights
from ..models.heads import tapped
from ..models.registry import describe
from .options import Resolved, WorkerOptions, resolve


def choose_operators(
    graph: Graph,
    options: WorkerOptions,
    resolved: Resolved,
    source: WeightSource,
    shelf: Shelf | None = None,
    beside: Provider | None = None,
) -> tuple[Provider, list[Decision]]:
    """Choose the kernels that serve this graph here, operator by operator, with reasons.

    `beside`: kernels of another model in this process, never computing at the same time.
    """
    question = Question(
        device=resolved.device,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        graph=absorbed(graph),
        weights=source.kinds(),
        threads=options.threads or hardware.cpu().cores,
        deterministic=options.deterministic,
        quantise=options.quantise,
        shelf=shelf,
        beside=beside,
    )
    return choose(question, options.kernels)


def kernel_decisions(files: ModelFiles, options: WorkerOptions) -> list[Decision]:
    """Return what a worker would choose, without loading a weight. Raises as `Worker` does."""
    resolved = resolve(options)
    graph, source, _ = open_weights(describe(files.arch), files, options)
    return choose_operators(graph, options, resolved, source)[1]


def open_weights(
    graph: Graph, files: ModelFiles, options: WorkerOptions
) -> tuple[Graph, WeightSource, ModelFiles | HeadFiles | None]:
    """Return a model's `graph`, its weights and its drafter.

    The drafter is a model, a head or None. The states that a head reads become outputs of the
    graph. Raises what `open_model` and `open_head` raise.
    """
    weights = load_weights(files)
    drafter: ModelFiles | HeadFiles | None = None
    if options.draft_model is not None:
        drafter = open_head(options.draft_model, files) or open_model(options.draft_model)
    if isinstance(drafter, HeadFiles) and drafter.arch.reads:
        graph = tapped(graph, drafter.arch.reads, tap_name(drafter))
        weights = chain(weights, tap_weights(drafter))
    return graph, WeightSource(weights), drafter


def inference_of(operators: Provider) -> Callable[[], AbstractContextManager[object]]:
    """Return the context in which their tensors are computed; an empty one for arrays of the
    host."""
    if operators.host:
        return nullcontext
    import torch  # Local: imported where it computes.

    return torch.inference_mode
