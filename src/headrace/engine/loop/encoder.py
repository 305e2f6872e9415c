"""A model's encoder part before a start: its shape for the scheduler, its memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.config import Decision, EngineOptions
from ...base.encodings import EncoderShape
from ...base.graph import Graph
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.slices import slices
from ...loader.sounds import open_sounds
from ...models.sounds import POSITIONS, describe_sounds

ITEMS = 16
"""Inputs of the largest size whose encodings are kept: as many as a conversation may have."""


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """The encoder part for the memory plan and the scheduler."""

    graph: Graph
    shape: EncoderShape
    step_bytes: int
    """Activations of the largest input."""
    decision: Decision

    @property
    def bytes(self) -> int:
        """Memory for it next to its weights."""
        return self.shape.bound + self.step_bytes


def plan_encoder(options: EngineOptions, files: ModelFiles) -> EncoderPlan | None:
    """Plan the encoder of a model; None if it has none, or if it does not serve with these options.
    `options` are resolved ones. Raises `ModelFileError`, `UnsupportedModel`."""
    alone = Layout.parse(options.layout) == ONE and options.draft_model is None
    sounds = open_sounds(files) if alone and options.device == "cpu" else None
    if sounds is None:
        return None
    graph = describe_sounds(sounds)
    largest = 4 * sounds.hidden * sounds.encoded(POSITIONS)
    shape = EncoderShape(len(slices(graph)) - 1, sounds.hidden, ITEMS * largest)
    arch = sounds.arch
    # The residual, its norm, q, k and v, what attention mixes, and a feed-forward with its
    # activation.
    width = 6 * arch.hidden + 2 * arch.intermediate
    numbers = sum(ref.numbers for ref in graph.weights())
    reason = (
        f"encoder of sounds, {numbers / 1e6:.0f}M numbers in {shape.slices} slices a step may stop "
        f"between; {shape.bound / 2**20:.0f} MiB of encodings are kept at most"
    )
    decision = Decision("parts", "encoder, text", reason)
    return EncoderPlan(graph, shape, 4 * POSITIONS * width, decision)
