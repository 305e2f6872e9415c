"""The step graph: what a model computes in one step, as data that every part reads.

A family in `models` describes itself once, for any number of rows, without computing or loading
anything. Backends lower or interpret the graph, the roofline prices its nodes, the loader reads the
names of its tensors, adapters mark its products. Values are made once and never changed; the
backend decides which of them share memory. Specs compare by their numbers. They are named tuples:
every start makes these classes, in an eighth of a dataclass's time. Values and nodes compare by
their identity.

| kind | reads → gives | weights | spec |
|---|---|---|---|
| `embed` | an index input of the step → [N, D] | table | `EmbedSpec` |
| `norm` | [·, D] → [·, D] | gain, and of `layer` perhaps a shift | `NormSpec` |
| `add` | residual, x → residual + scale · x | | `AddSpec`, perhaps |
| `scale` | x → factor · x | perhaps one number more | `ScaleSpec` |
| `linear` | [·, in] → [·, out] | matrix, perhaps bias | `LinearSpec` |
| `write` | qkv [N, (H + 2G) · E] → q [N, H · E]; latent: q, latent, rope part → q | head norms; of q alone where K and V are another layer's | `AttentionSpec`, `LatentSpec` |
| `absorb` | q, latent, rope part → q and key over latents [N, (H + 1) · E]; made by `base.absorb` alone | packing of q for each head | `LatentSpec` |
| `unpack` | sums over latents [·, H · E] → values [·, H · V]; made by `base.absorb` alone | unpacking of values for each head | `LatentSpec` |
| `attend` | q → [·, H · E]; bidirectional: qkv | sinks; latent: packing and unpacking | as `write` |
| `gated` | gate next to up [·, 2I] → act(gate) · up [·, I] | | `ActivationSpec` |
| `activate` | [·, I] → act(x) | | `ActivationSpec` |
| `route` | logits [·, experts] → experts [·, k], routing weights [·, k] | perhaps bias of the choice, gains of the routing weights | `RouteSpec` |
| `experts` | x, experts, routing weights → [·, D] | gate above up, down; a copy for each expert; perhaps biases of both | `ExpertsSpec` |
| `multiply` | x, gate → x · act(gate) | | `ActivationSpec` |
| `short_conv` | [N, C] → [N, C]; gated: [N, 3C] → [N, C] | kernel [C, taps], perhaps bias | `ConvSpec` |
| `delta_rule` | q, k, v [N, ·], gate z, b, a → [N, H · V] | log of the decay, bias of the step, gain | `DeltaSpec` |
| `ssm` | x, B, C [N, ·], gate z, dt → [N, H · P] | log of the decay, bias of the step, skip, gain | `SsmSpec` |
| `part` | columns of a value | | `PartSpec` |
| `select` | [N, D] → [R, D] of the sampled rows; made by `base.demand` alone | | |
| `exchange` | this rank's columns → the columns of all ranks; made by `base.cut` alone | | `ExchangeSpec` |

`short_conv`, `delta_rule` and `ssm` read and write the state of the row's sequence, token by token.
Reserved for future models: `gather` and `scatter` (rows by a named index input: patches, embeddings
over placeholders).
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from .arch import Scoring
from .attending import AttentionSpec as AttentionSpec
from .attending import LatentSpec as LatentSpec
from .errors import EngineFault
from .exchange import ExchangeSpec
from .recurrent import ConvSpec, DeltaSpec, SsmSpec

T = TypeVar("T")
Role = Literal["embed", "linear", "logits", "moe", "heads", "vector"]
"""Kind of a weight: decides the form in which a backend prepares it."""
Purpose = Literal[
    "", "embed", "head", "qkv", "output", "up", "down", "state_in", "state_out", "shared",
    "experts", "router", "per_layer", "gate_up",
]  # fmt: skip
"""Place of a matrix in the model, by which its bytes are counted; empty: none of these."""
Dtype = Literal["act", "f32", "i32"]
"""A value's type: the model's own, fp32 (logits), int32 (indices)."""


class Rows(NamedTuple):
    """Number of rows of a value: a symbol, known when a step comes."""

    name: str
    bound: int | None = None
    """Upper bound; None for the step's limits."""


TOKENS = Rows("N")
"""All tokens of the step."""
SAMPLED = Rows("R")
"""Tokens whose logits are wanted."""


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
    index: Literal["tokens", "positions", "types"] = "tokens"
    scale: float = 1.0


class NormSpec(NamedTuple):
    """`rms`: x / rms(x) · (gain + offset); `layer`: (x - mean) / deviation · gain, plus a shift if
    it has one."""

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
    name: Literal["silu", "gelu_tanh", "gelu", "tanh", "sigmoid", "relu2"]


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
) | {"absorb", "unpack", "exchange", "scale"}
"""Kinds whose output row depends on that row of the inputs alone."""
RECURRENT = frozenset(("short_conv", "delta_rule", "ssm"))
"""Kinds that go on from the state of the row's sequence, and leave it for the following tokens."""
KINDS = ROW_WISE | RECURRENT | {"embed", "receive", "write", "attend", "select"}
"""Further inputs of the other kinds: `embed` an index of the step, `receive` the output of the
preceding stage, `write` positions, `attend` the KV of the row's own sequence, `select` the sampled
rows."""


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

    def verify(self) -> None:
        """Raise `EngineFault` unless this is a graph that backends may run: the specification."""
        made = set(self.inputs)
        written: set[int] = set()
        for index, node in enumerate(self.nodes):
            at = f"node {index} ({node.kind})"
            _check(node.kind in KINDS, f"{at}: no such kind")
            _check(made.issuperset(node.reads), f"{at} reads what nobody has made")
            _check(made.isdisjoint(node.out), f"{at} makes a value again")
            _check_rows(at, node)
            _check_widths(at, node)
            if isinstance(node.spec, AttentionSpec | LatentSpec):
                layer = node.spec.layer
                elsewhere = isinstance(node.spec, AttentionSpec) and node.spec.kept == 0
                if node.kind == "write" and not elsewhere:
                    _check(layer not in written, f"{at}: layer {layer} is written twice")
                    written.add(layer)
                elif node.kind == "attend" and node.spec.kind != "bidirectional":
                    _check(layer in written, f"{at}: layer {layer} is not written yet")
            made.update(node.out)
        for value in made:
            read = value in self._readers or value in self.outputs.values()
            _check(read or self._is_effect(value), "a value is made that nobody reads")
        for name, value in self.outputs.items():
            _check(value in made, f"the output {name} is never made")
        self._verify_weights()

    def _is_effect(self, value: Value) -> bool:
        """Return whether this is the value of a node that also has an effect."""
        if value not in self._makers:
            return False
        kind = self.nodes[self._makers[value]].kind
        return kind == "write" or kind in RECURRENT

    def _verify_weights(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {}
        stacks: dict[tuple[str, Role], tuple[str, ...]] = {}
        for node in self.nodes:
            for ref in node.weights:
                for name, rows in zip(ref.names, ref.rows, strict=True):
                    shape = rows, ref.width, ref.copies
                    _check(shapes.setdefault(name, shape) == shape, f"{name} has two shapes")
                    stack = stacks.setdefault((name, ref.role), ref.names)
                    _check(stack == ref.names, f"{name} is part of two weights of one role")


def _check(holds: bool, why: str) -> None:
    if not holds:
        raise EngineFault(f"the model's graph is wrong: {why}")


def _check_rows(at: str, node: Node) -> None:
    rows = {value.rows for value in (*node.reads, *node.out)}
    if node.kind == "select":
        (x,), (y,) = node.reads, node.out
        _check(x.rows == TOKENS and y.rows == SAMPLED, f"{at} goes from N to R")
        _check(x.width == y.width and x.dtype == y.dtype, f"{at} keeps width and type")
    elif node.kind in ("embed", "receive", "write", *RECURRENT):
        _check(rows == {TOKENS}, f"{at} is of all tokens")
    else:
        _check(len(rows) == 1, f"{at} mixes numbers of rows")


def _check_widths(at: str, node: Node) -> None:
    ins, outs = [v.width for v in node.reads], [v.width for v in node.out]
    refs, spec = node.weights, node.spec
    vectors = [ref.out for ref in refs if ref.role == "vector"]
    match node.kind, spec:
        case "embed", EmbedSpec():
            right = not ins and [refs[0].width] == outs
        case "receive", None:
            right = not ins
        case "norm", NormSpec():
            right = ins == outs and vectors in (ins, ins * (1 if spec.kind == "rms" else 2))
        case "add", None | AddSpec():
            right = len(ins) == 2 and set(ins) == set(outs)
        case "scale", ScaleSpec():
            right = ins == outs and vectors in ([], [1])
        case "linear", LinearSpec():
            matrix, *bias = refs
            right = ins == [matrix.width] and outs == [matrix.out]
            right = right and vectors == [matrix.out] * len(bias)
        case "write", AttentionSpec():
            right = ins == [spec.stacked] and outs == [spec.queries] and not spec.bidirectional
            norms = [spec.size] * 2
            if spec.whole_norm:
                norms = [spec.queries, spec.kv_heads * spec.size]
            if spec.kept == 0:
                norms = norms[:1]
            right = right and vectors in ([], norms)
        case "write", LatentSpec():
            right = ins == [spec.queries, spec.rank, spec.rope_size] and outs == [spec.queries]
        case "attend", AttentionSpec():
            right = ins == [spec.stacked if spec.bidirectional else spec.queries]
            right = right and outs == [spec.queries]
            right = right and vectors in ([], [] if spec.bidirectional else [spec.heads])
        case "attend", LatentSpec():
            right = ins == [spec.queries] and outs == [spec.heads * spec.value_size]
            shapes = [(ref.copies, ref.out, ref.width) for ref in refs]
            packing = spec.heads, spec.rank, spec.plain_size
            right = right and shapes == [packing, (spec.heads, spec.value_size, spec.rank)]
        case "absorb", LatentSpec():
            right = ins == [spec.queries, spec.rank, spec.rope_size]
            right = right and outs == [(spec.heads + 1) * spec.size]
            right = right and (refs[0].copies, refs[0].out) == (spec.heads, spec.rank)
        case "unpack", LatentSpec():
            right = ins == [spec.heads * spec.size] and outs == [spec.heads * spec.value_size]
            right = right and (refs[0].copies, refs[0].width) == (spec.heads, spec.rank)
        case "gated", ActivationSpec():
            right = ins == [2 * width for width in outs]
        case "activate", ActivationSpec():
            right = ins == outs
        case "route", RouteSpec():
            right = len(ins) == 1 and outs == [spec.active] * 2
            right = right and [v.dtype for v in node.out] == ["i32", "f32"]
            gains = ins * spec.gained
            right = right and vectors in (gains, ins + gains) and ins[0] % spec.groups == 0
        case "experts", ExpertsSpec():
            up, down, *biases = refs
            _, inner = spec.inner.mine if spec.inner else (0, down.width)
            right = (up.copies, up.width, up.out) == (down.copies, ins[0], 2 * inner)
            right = right and [down.out] == outs and vectors in ([], [up.out, down.out])
            right = right and all(bias.copies == up.copies for bias in biases)
        case "multiply", ActivationSpec():
            right = len(ins) == 2 and set(ins) == set(outs)
        case "short_conv", ConvSpec():
            right = ins == [3 * width if spec.gated else width for width in outs]
            right = right and refs[0].width == spec.taps and vectors in (outs, outs * 2)
        case "delta_rule", DeltaSpec():
            heads, values = spec.value_heads, spec.values
            right = ins == [spec.mixed, values, heads, heads] and outs == [values]
            right = right and vectors == [heads, heads, spec.value_size]
        case "ssm", SsmSpec():
            heads, values = spec.value_heads, spec.values
            right = ins == [spec.mixed, values, heads] and outs == [values]
            right = right and vectors == [heads, heads, heads, values]
        case "part", PartSpec():
            right = spec.first >= 0 and spec.first + outs[0] <= ins[0]
        case "select", None:
            right = True
        case "exchange", ExchangeSpec():
            first, last = spec.bounds[spec.rank : spec.rank + 2]
            right = ins == [last - first] and outs == [spec.bounds[-1]]
        case _:
            right = False
    _check(right, f"{at}: widths, weights and spec do not agree")
