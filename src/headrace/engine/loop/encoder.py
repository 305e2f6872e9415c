"""A model's encoder part before a start: its shape for the scheduler, its memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.config import Decision, EngineOptions
from ...base.encodings import EncoderShape
from ...base.graph import Graph
from ...base.groups import cross_groups, group_bytes
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.slices import slices
from ...base.step import GroupShape
from ...loader.towers import Tower, open_tower
from ...models.registry import describe
from ...roofline.memory import USABLE

SHARE = 0.25
"""Share of the usable memory that encodings may take if texts attend to them."""


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """The encoder part for the memory plan and the scheduler."""

    graph: Graph
    shape: EncoderShape
    step_bytes: int
    """Activations of the largest input."""
    decision: Decision
    cross: tuple[GroupShape, ...] = ()
    """Groups of the encodings that texts attend to, with their blocks."""

    @property
    def bytes(self) -> int:
        """Memory for it next to its weights."""
        return self.shape.bound + self.step_bytes


def plan_encoder(options: EngineOptions, files: ModelFiles, available: int) -> EncoderPlan | None:
    """Plan the encoder of a model; None if it has none, or if it does not serve with these options.
    `options` are resolved ones; `available`: bytes of the device. Raises `ModelFileError`,
    `UnsupportedModel`."""
    alone = Layout.parse(options.layout) == ONE and options.draft_model is None
    tower = open_tower(files) if alone and options.device == "cpu" else None
    if tower is None:
        return None
    graph = tower.graph
    cross: tuple[GroupShape, ...] = ()
    bound = tower.items * 4 * tower.width * tower.rows
    shape = EncoderShape(len(slices(graph)) - 1, tower.width, bound)
    if files.arch.cross is not None:
        shape, cross = _across(options, files, tower, shape, available)
    numbers = sum(ref.numbers for ref in graph.weights())
    reason = (
        f"encoder of {tower.reads}, {numbers / 1e6:.0f}M numbers in {shape.slices} slices a step "
        f"may stop between; {shape.bound / 2**20:.0f} MiB of encodings are kept at most"
    )
    decision = Decision("parts", "encoder, text", reason)
    return EncoderPlan(graph, shape, 4 * tower.units * _width(graph), decision, cross)


def _across(
    options: EngineOptions, files: ModelFiles, tower: Tower, shape: EncoderShape, available: int
) -> tuple[EncoderShape, tuple[GroupShape, ...]]:
    """Return the shape of encodings that texts attend to, as many as have room, and their groups.

    A slot more for each step in flight: it may still read one that has no room any more."""
    assert files.arch.cross is not None
    blocks = -(-files.arch.cross.rows // options.block_size)
    group = cross_groups(describe(files.arch), options.kv_dtype, blocks)
    slot = group_bytes(group, options.block_size)
    room = int(SHARE * USABLE["cpu"] * available) // slot
    items = max(1, min(tower.items, room))
    slots = items + (options.depth or 1)
    groups = tuple(one._replace(blocks=slots * blocks) for one in group)
    return shape._replace(bound=items * slot, slot=slot, whole=True), groups


_FED = "activate", "gated"


def _width(graph: Graph) -> int:
    """Return the numbers that a layer holds of a row: the residual, its norm, q, k and v, what
    attention mixes, and a feed-forward with its activation."""
    hidden = next(node.out[0].width for node in graph.nodes if node.kind == "add")
    inner = max(node.reads[0].width for node in graph.nodes if node.kind in _FED)
    return 6 * hidden + 2 * inner
