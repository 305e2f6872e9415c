"""The step graph: what a model computes in one step, as data that every part reads.

A family in `models` describes itself once, for any number of rows, without computing or loading
anything. Backends lower or interpret the graph, the roofline prices its nodes, the loader reads the
names of its tensors, adapters mark its products. Values are made once and never changed; the
backend decides which of them share memory. Specs compare by their numbers. They are named tuples:
every start makes these classes, in an eighth of a dataclass's time. Values and nodes compare by
their identity.

| kind | reads → gives | weights | spec |
|---|---|---|---|
| `embed` | an index input of the step → [N, D]; of a ranking: perhaps x → x, numbers and bags side by side; of pictures: their numbers | table, or one for each bag | `EmbedSpec`, `BagsSpec`, `GivenSpec` |
| `norm` | [·, D] → [·, D]; adaptive: x, gains and shifts [R, D] of each entry | gain, and of `layer` perhaps a shift | `NormSpec` |
| `modulate` | residual, x, factors [R, D] of each entry → residual + factor · x; residual, factors → their sum | | |
| `add` | residual, x → residual + scale · x | | `AddSpec`, perhaps |
| `scale` | x → factor · x | perhaps one number more | `ScaleSpec` |
| `linear` | [·, in] → [·, out] | matrix, perhaps bias | `LinearSpec` |
| `write` | qkv [N, (H + 2G) · E] → q [N, H · E], with H = 0 where others attend to K and V; bidirectional: qkv → qkv; latent: q, latent, rope part → q | head norms; of q alone where K and V are another layer's | `AttentionSpec`, `LatentSpec` |
| `absorb` | q, latent, rope part → q and key over latents [N, (H + 1) · E]; made by `base.absorb` alone | packing of q for each head | `LatentSpec` |
| `unpack` | sums over latents [·, H · E] → values [·, H · V]; made by `base.absorb` alone | unpacking of values for each head | `LatentSpec` |
| `attend` | q → [·, H · E]; bidirectional: qkv; across: q of other tokens than K and V; both: q [N], kv [T] | sinks; biases by distance; latent: packing and unpacking | as `write` |
| `gated` | gate next to up [·, 2I] → act(gate) · up [·, I] | | `ActivationSpec` |
| `activate` | [·, I] → act(x) | | `ActivationSpec` |
| `route` | logits [·, experts] → experts [·, k], routing weights [·, k] | perhaps bias of the choice, gains of the routing weights | `RouteSpec` |
| `experts` | x, experts, routing weights → [·, D] | gate above up, down; a copy for each expert; perhaps biases of both | `ExpertsSpec` |
| `multiply` | x, gate → x · act(gate) | | `ActivationSpec` |
| `short_conv` | [N, C] → [N, C]; gated: [N, 3C] → [N, C] | kernel [C, taps], perhaps bias | `ConvSpec` |
| `delta_rule` | q, k, v [N, ·], gate z, b, a → [N, H · V] | log of the decay, bias of the step, gain | `DeltaSpec` |
| `ssm` | x, B, C [N, ·], gate z, dt → [N, H · P] | log of the decay, bias of the step, skip, gain | `SsmSpec` |
| `part` | columns of a value | | `PartSpec` |
| `beside` | [·, A], [·, B] → [·, A + B] | | |
| `select` | [N, D] → [R, D] of the sampled rows; made by `base.demand` alone | | |
| `scatter` | x → x with rows of other parts' outputs at their places, or plus these; made by `base.scatter` alone | | `ScatterSpec` |
| `window` | rows of x → each with the rows after it, side by side | | `WindowSpec` |
| `conv` | pictures [·, C] → [·, out] | matrix [out, side² · C], bias | `PictureConvSpec` |
| `group_norm` | pictures [·, D] → [·, D] | gain, shift | `GroupNormSpec` |
| `exchange` | this rank's columns → the columns of all ranks; made by `base.cut` alone | | `ExchangeSpec` |
| `reduce` | this rank's partial sums → the sums of all ranks; made by `base.sums` alone, to be priced | | `ReduceSpec` |

`short_conv`, `delta_rule` and `ssm` read and write the state of the row's sequence, token by token.
A convolution is a `window` and a `linear`.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from .arch import Scoring
from .attending import AttentionSpec as AttentionSpec
from .attending import LatentSpec as LatentSpec
from .denoising import GivenSpec as GivenSpec
from .denoising import GroupNormSpec as GroupNormSpec
from .denoising import PictureConvSpec as PictureConvSpec
from .exchange import ExchangeSpec
from .ranking import BagsSpec as BagsSpec
from .recurrent import ConvSpec, DeltaSpec, SsmSpec

T = TypeVar("T")
Role = Literal["embed", "bag", "linear", "logits", "moe", "heads", "vector"]
"""Kind of a weight: decides the form in which a backend prepares it."""
Purpose = Literal[
    "", "embed", "head", "qkv", "output", "up", "down", "state_in", "state_out", "shared",
    "experts", "router", "per_layer", "gate_up",
]  # fmt: skip
"""Place of a matrix in the model, by which its bytes are counted; empty: none of these."""
Dtype = Literal["act", "f32", "i32", "codes"]
"""A value's type: the model's own, fp32 (logits), int32 (indices), 8-bit codes (joined nodes)."""


class Rows(NamedTuple):
    """Number of rows of a value: a symbol, known when a step comes."""

    name: str
    bound: int | None = None
    """Upper bound; None for the step's limits."""
    times: int = 1
    over: int = 1
    more: int = 0

    def of(self, count: int) -> int:
        """Return the number of rows where the symbol stands for `count`: count · times // over +
        more."""
        return count * self.times // self.over + self.more


TOKENS = Rows("N")
"""All tokens of the step."""
SAMPLED = Rows("R")
"""Tokens whose logits are wanted."""
TEXTS = Rows("T")
"""Rows of the texts that pictures attend to."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A matrix [rows, width] that one node makes; heads lie side by side in the width."""

    rows: Rows
    width: int
    dtype: Dtype = "act"


class WeightRef(NamedTuple):
    """Tensors of the model, one below the other, in the form for one role.

    (names, role) is the key of the prepared weight everywhere.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    """Outputs of each tensor."""
    width: int
    """Columns; 0 for vectors. The kernel of a convolution [C, width] is `width` vectors over its
    channels."""
    role: Role
    copies: int = 1
    """Number of weights of this kind (experts): `*` in the names stands for the number of each."""
    first: int = 0
    """The first of the copies that a rank reads."""
    cut: tuple[tuple[int, int, int], ...] = ()
    """The rows that a rank computes: (tensor's index, first row, count), one below the other; ()
    for all."""
    purpose: Purpose = ""

    @property
    def key(self) -> tuple[tuple[str, ...], Role]:
        return self.names, self.role

    @property
    def out(self) -> int:
        """Rows of all tensors together, or those of a cut."""
        return sum(count for _, _, count in self.cut) if self.cut else sum(self.rows)

    @property
    def numbers(self) -> int:
        return self.out * max(1, self.width) * self.copies

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each."""
        for copy in range(self.copies):
            for name, rows in zip(self.names, self.rows, strict=True):
                shape = (rows, self.width) if self.width else (rows,)
                yield name.replace("*", str(copy)) if self.copies > 1 else name, shape

    def copy(self, number: int) -> WeightRef:
        """Return one of the copies, under its own names."""
        names = tuple(name.replace("*", str(number)) for name in self.names)
        return WeightRef(names, self.rows, self.width, self.role, purpose=self.purpose)


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    index: Literal["tokens", "positions", "types", "labels"] = "tokens"
    """Numbers of the step that select rows; labels are those of the sampled rows [R]."""
    scale: float = 1.0


class NormSpec(NamedTuple):
    """`rms`: x / rms(x) · (gain + offset); `layer`: (x - mean) / deviation · gain, plus a shift if
    it has one; adaptive: (gain + offset) too."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0


class AddSpec(NamedTuple):
    scale: float
    """Factor on x."""


class ScaleSpec(NamedTuple):
    """x by `factor`, and by the one number of a vector, if the node has one."""

    factor: float = 1.0


class LinearSpec(NamedTuple):
    """scale · (x · weightᵀ + bias); `softcap` c replaces y by c · tanh(y / c). Only a head has
    these two."""

    softcap: float | None = None
    scale: float = 1.0


class ActivationSpec(NamedTuple):
    name: Literal["silu", "gelu_tanh", "gelu", "tanh", "sigmoid", "relu2", "relu", "identity"]


class RouteSpec(NamedTuple):
    """The `active` experts with the highest scores per row; ties go to the first.

    A bias, if `route` has one, is added to the scores for the choice alone (Wang et al. 2024). With
    several groups, the choice is then made from those whose best scores have the largest sum.
    """

    active: int
    normalise: bool = True
    """Whether routing weights of the chosen are scaled to sum to one."""
    scores: Scoring = "softmax"
    scale: float = 1.0
    """Factor on the routing weights."""
    groups: int = 1
    active_groups: int = 1
    best: int = 2
    """Number of a group's best experts whose scores rank it."""
    gained: bool = False
    """Whether the last vector is a factor on each expert's routing weight."""

    def split(self, vectors: Iterable[T]) -> tuple[T | None, T | None]:
        """Split a node's vectors into (bias of the choice, gains of the routing weights)."""
        given = list(vectors)
        gains = given.pop() if self.gained else None
        return (given[0] if given else None), gains


class ExpertsSpec(NamedTuple):
    """Gated feed-forward of each row's experts, summed by their routing weights.

    "clamped" (gpt-oss) is gate · sigmoid(1.702 gate) · (up + 1) in place of act(gate) · up. Its
    gate is at most 7, its up between -7 and 7.
    """

    activation: Literal["silu", "gelu_tanh", "gelu", "clamped"]
    inside: bool = False
    """Whether routing weights multiply the experts' inputs."""
    inner: ExchangeSpec | None = None
    """The part of each expert's inner columns that a rank makes, if ranks meet between up and
    down."""
    dealt: int | None = None
    """The mixture's number, if whole experts are placed on ranks."""


class WindowSpec(NamedTuple):
    """Row n of the result: `width` rows of x from row n · stride − before on, side by side. Rows
    before the first are zeros."""

    width: int
    stride: int = 1
    before: int = 0

    def rows(self, count: int) -> int:
        """Return the rows of the result for `count` rows of x."""
        return (count + self.before - self.width) // self.stride + 1


class ScatterSpec(NamedTuple):
    """Columns `first` to `first` + the result's width of other parts' rows."""

    first: int = 0
    adds: bool = False
    """Whether they are added to x, not in its place."""


class PartSpec(NamedTuple):
    """Columns `first` to `first` + the result's width: a view."""

    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation of the model."""

    kind: str
    reads: tuple[Value, ...]
    out: tuple[Value, ...]
    weights: tuple[WeightRef, ...] = ()
    spec: object = None
    """Numbers and names, by kind."""


ROW_WISE = frozenset(
    ("norm", "add", "linear", "gated", "activate", "multiply", "route", "experts", "part")
) | {"beside", "absorb", "unpack", "exchange", "reduce", "scale"}
"""Kinds whose output row depends on that row of the inputs alone."""
RECURRENT = frozenset(("short_conv", "delta_rule", "ssm"))
"""Kinds that go on from the state of the row's sequence, and leave it for the following tokens."""
KINDS = ROW_WISE | RECURRENT | {"embed", "receive", "write", "attend", "select"}
KINDS |= {"modulate", "scatter", "window", "conv", "group_norm"}
"""Further inputs of the other kinds: `embed`: an index of the step. `modulate`, adaptive norms: its
entries, which sample a row each. `receive`: the output of the preceding stage. `write`: positions.
`attend`: the KV of the row's own sequence. `select`: the sampled rows. `scatter`: rows of other
parts and their places."""


@dataclass(frozen=True, eq=False)
class Graph:
    """A model's step, or one stage of it. Effects (`write`) happen in the order of `nodes`."""

    nodes: tuple[Node, ...]
    outputs: Mapping[str, Value]
    """`hidden`, after the last norm; `logits` of a head over the vocabulary; or `labels` of a head
    that is only used on chosen rows; `states`, for a head that drafts from other layers."""
    inputs: tuple[Value, ...] = ()
    """Values made elsewhere: the hidden rows that are a head's input."""
    _readers: dict[Value, list[int]] = field(init=False, default_factory=dict, repr=False)
    _makers: dict[Value, int] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            for value in node.reads:
                self._readers.setdefault(value, []).append(index)
            for value in node.out:
                self._makers[value] = index

    def readers(self, value: Value) -> list[int]:
        """Return the indices of the nodes that read it."""
        return self._readers.get(value, [])

    def maker(self, value: Value) -> int:
        """Return the index of the node that makes it; -1 for an input."""
        return self._makers.get(value, -1)

    def weights(self) -> Iterator[WeightRef]:
        """Yield each weight once, in the order of use: the order in which they are prepared."""
        seen = set()
        for node in self.nodes:
            for ref in node.weights:
                if ref.key not in seen:
                    seen.add(ref.key)
                    yield ref

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name → shape of every tensor of a model with this graph."""
        return dict(tensor for ref in self.weights() for tensor in ref.tensors())

    def attentions(self) -> list[AttentionSpec | LatentSpec]:
        """Return the spec of each layer that attends, in order."""
        return [
            node.spec
            for node in self.nodes
            if node.kind == "attend" and isinstance(node.spec, AttentionSpec | LatentSpec)
        ]

    def recurrent(self) -> list[ConvSpec | DeltaSpec | SsmSpec]:
        """Return the spec of each node that keeps a state, in order."""
        return [
            node.spec
            for node in self.nodes
            if isinstance(node.spec, ConvSpec | DeltaSpec | SsmSpec)
        ]
