"""The parts of a model in a worker, and the choice of their kernels, before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..base import hardware
from ..base.absorb import absorbed
from ..base.config import Decision
from ..base.graph import Graph
from ..base.modelfiles import ModelFiles
from ..kernels.backend import Question, Shelf
from ..kernels.program import Provider
from ..kernels.select import choose
from ..loader.diffusers_folder import PART_WEIGHTS
from ..loader.heads import HeadFiles, head_weights, open_head, tap_name, tap_weights
from ..loader.open import open_model
from ..loader.towers import Tower, open_tower
from ..loader.weight_source import WeightSource
from ..loader.weights import load_weights
from ..models.heads import STATES, describe_head, tapped
from ..models.pipeline import parts_beside
from ..models.registry import describe
from .options import Resolved, WorkerOptions, resolve

READ = 256
"""Most tokens in a step of the part that drafts: all others wait meanwhile."""


class OpenPart(NamedTuple):
    """A part whose weights are not loaded."""

    files: ModelFiles | HeadFiles
    graph: Graph
    source: WeightSource
    tower: Tower | None = None
    """Sizes and layouts of an encoder; None for another part."""
    units: int = 0
    """Most rows of an item of a part of pictures."""


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
    graph, source = open_parts(files, options)["text"][1:3]
    return choose_operators(graph, options, resolved, source)[1]


def open_parts(files: ModelFiles, options: WorkerOptions) -> dict[str, OpenPart]:
    """Return the parts of a model by name: "text", "draft" if the options name a drafter, and
    "encoder" if the model takes inputs that are not text here, "texts" and "decoder" of a pipeline
    that draws.

    The drafter is a model or a head. The states that a head reads become outputs of the text's
    graph. Raises what `open_model` and `open_head` raise.
    """
    graph, weights = describe(files.arch), load_weights(files)
    parts: dict[str, OpenPart] = {}
    if options.draft_model is not None:
        head = open_head(options.draft_model, files)
        if head is None:
            model = open_model(options.draft_model)
            its = WeightSource(load_weights(model))
            parts["draft"] = OpenPart(model, describe(model.arch), its)
        else:
            states = np.zeros((READ, head.arch.arch.hidden), np.float32)
            its = WeightSource([*head_weights(head), (f"{STATES}.weight", states)])
            parts["draft"] = OpenPart(head, describe_head(head.arch, READ), its)
            if head.arch.reads:
                graph = tapped(graph, head.arch.reads, tap_name(head))
                weights = chain(weights, tap_weights(head))
    parts["text"] = OpenPart(files, graph, WeightSource(weights))
    for name, (own_graph, units) in parts_beside(files.arch).items():
        its = WeightSource(PART_WEIGHTS[name](files))
        parts[name] = OpenPart(files, own_graph, its, units=units)
    tower = open_tower(files) if encodes(options) else None
    if tower is not None:
        own = WeightSource(tower.weights())
        parts["encoder"] = OpenPart(files, tower.graph, own, tower)
    return parts


def encodes(options: WorkerOptions) -> bool:
    """Return whether a worker with these options has room for an encoder: alone, on a CPU, without
    a drafter, which would read ids where there are none."""
    alone = options.ranks == 1 and options.draft_model is None
    return alone and options.device == "cpu"


def inference_of(operators: Provider) -> Callable[[], AbstractContextManager[object]]:
    """Return the context in which their tensors are computed; an empty one for arrays of the
    host."""
    if operators.host:
        return nullcontext
    import torch  # Local: imported where it computes.

    return torch.inference_mode
