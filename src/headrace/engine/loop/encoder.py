"""A model's encoder part before a start: its shape for the scheduler, its memory."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.arch import ModelArch
from ...base.config import Decision, EngineOptions
from ...base.encodings import EncoderShape
from ...base.graph import Graph
from ...base.groups import cross_groups, group_bytes
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.slices import slices
from ...base.step import GroupShape
from ...loader.towers import Tower, open_tower
from ...models.pipeline import parts_beside
from ...models.registry import describe
from ...roofline.memory import USABLE
from ...roofline.memory_parts import laid_bytes, values_bytes

SHARE = 0.25
"""Share of the usable memory that encodings may take if texts attend to them."""


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """The encoder part for the memory plan and the scheduler."""

    graph: Graph
    shape: EncoderShape
    step_bytes: int
    """Activations of the largest input, and what is kept beside the encodings of `shape.bound`."""
    decision: Decision
    atom: int = 0
    """`Tower.atom`."""
    cross: tuple[GroupShape, ...] = ()
    """Groups of the encodings that texts attend to, with their blocks."""
    coded: bool = False
    """Whether products compute in eight bits: see `loader.towers.Tower`."""

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
    step_bytes = 4 * tower.units * _width(graph)
    if files.arch.cross is not None:
        shape, cross = _across(options, files, tower, shape, available)
        step_bytes += _beside(options, shape, cross)
    numbers = sum(ref.numbers for ref in graph.weights())
    reason = (
        f"encoder of {tower.reads}, {numbers / 1e6:.0f}M numbers in {shape.slices} slices a step "
        f"may stop between; {shape.bound / 2**20:.0f} MiB of encodings are kept at most"
    )
    decision = Decision("parts", "encoder, text", reason)
    coded = tower.coded or (options.quantise == "int8" and files.arch.cross is None)
    return EncoderPlan(graph, shape, step_bytes, decision, tower.atom, cross=cross, coded=coded)


def _across(
    options: EngineOptions, files: ModelFiles, tower: Tower, shape: EncoderShape, available: int
) -> tuple[EncoderShape, tuple[GroupShape, ...]]:
    """Return the shape of encodings that texts attend to, as many as have room, and their groups.

    A slot more for each step in flight: it may still read one that has no room any more."""
    assert files.arch.cross is not None
    blocks = -(-files.arch.cross.rows // options.block_size)
    group = cross_groups(describe(files.arch), options.kv_dtype, blocks)
    # Each may be one whose K of the aligned layers is kept in fp32, too.
    aligned = {layer for layer, _ in files.arch.cross.aligned}
    keys = 4 * files.arch.cross.rows * files.arch.heads * files.arch.head_dim * len(aligned)
    slot = group_bytes(group, options.block_size) + keys
    room = int(SHARE * USABLE["cpu"] * available) // slot
    items = max(1, min(tower.items, room))
    slots = items + (options.depth or 1)
    groups = tuple(one._replace(blocks=slots * blocks) for one in group)
    return shape._replace(bound=items * slot, slot=slot, whole=True), groups


def _beside(options: EngineOptions, shape: EncoderShape, cross: tuple[GroupShape, ...]) -> int:
    """Return the bytes of the slots for steps in flight, and of the K and V that each layer of the
    encoder uses in turn."""
    depth = options.depth or 1
    slots = shape.bound // shape.slot + depth
    layers = sum(len(group.layers) for group in cross)
    return depth * shape.slot + group_bytes(cross, options.block_size) // (slots * layers)


def decoding_bytes(arch: ModelArch, rows: int, threads: int = 0) -> int:
    """Return the bytes of the values of a pipeline's decoder, of the texts of pictures in so many
    rows and what they keep between slices, and of keys and values that each thread lays out."""
    if (denoiser := arch.denoiser) is None:
        return 0
    kept = 0 if denoiser.reads is None else 2 * denoiser.reads.most * denoiser.reads.hidden
    laid = 0 if denoiser.unet is None else laid_bytes(describe(arch), denoiser.tokens)
    made = 0
    if (part := parts_beside(arch).get("decoder")) is not None:
        graph, units = part
        made, laid = values_bytes(graph, units), max(laid, laid_bytes(graph, units))
        kept += max(one.rows.of(units) * one.width for node in graph.nodes for one in node.out)
    return made + 4 * rows * kept + threads * laid


_FED = "activate", "gated"


def _width(graph: Graph) -> int:
    """Return the numbers that a layer holds of a row: the residual, its norm, q, k and v, what
    attention mixes, and a feed-forward with its activation."""
    hidden = next(node.out[0].width for node in graph.nodes if node.kind == "add")
    inner = max(node.reads[0].width for node in graph.nodes if node.kind in _FED)
    return 6 * hidden + 2 * inner
