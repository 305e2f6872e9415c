"""Books of a model's encodings, with the prices from which they begin."""

from __future__ import annotations

from collections.abc import Callable

from ...base.graph import Graph
from ...roofline.slices import slice_seconds
from ...sched.encodings import Encodings
from ...sched.price import MixedPrices
from .encoder import EncoderPlan
from .prediction import StepPredictor

GUESSED = 5e10
"""Multiplications a second of a machine that the roofline does not know."""


def encodings_of(
    plan: EncoderPlan, predict: StepPredictor | None, step_tokens: int, device: str
) -> Encodings:
    """Return the books of encodings, with prices by the roofline until steps show more."""
    units = slice_seconds(plan.graph, device, coded=plan.coded)
    count = plan.shape.slices

    def of_slices(size: int) -> float:
        return units(size) / count if units is not None else _guessed(plan.graph, size) / count

    return Encodings(plan.shape, MixedPrices(_text(predict, step_tokens), of_slices))


def _guessed(graph: Graph, units: int) -> float:
    return units * sum(ref.numbers for ref in graph.weights()) / GUESSED


def _text(predict: StepPredictor | None, step_tokens: int) -> Callable[[int], float]:
    if predict is None:
        return lambda tokens: 1e-3 * tokens
    return lambda tokens: predict.prefill(0, tokens, step_tokens)
