"""A step graph under construction: each call adds a node and returns its value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ..base.arch import ModelArch
from ..base.graph import (
    SAMPLED,
    TOKENS,
    ActivationSpec,
    AddSpec,
    Dtype,
    EmbedSpec,
    Graph,
    LinearSpec,
    Node,
    NormSpec,
    PartSpec,
    Purpose,
    Role,
    Rows,
    ScaleSpec,
    Value,
    WeightRef,
)


class Description:
    """Builder of a graph, handed down while a model describes itself, then dropped.

    Names of weights are Hugging Face's, without `.weight` and `.bias`.
    """

    def __init__(self, arch: ModelArch) -> None:
        self.arch = arch
        self._nodes: list[Node] = []

    def graph(self, inputs: Sequence[Value] = (), /, **outputs: Value) -> Graph:
        """Return the graph so far; `inputs`: values that no node makes."""
        return Graph(tuple(self._nodes), outputs, tuple(inputs))

    def node(
        self,
        kind: str,
        reads: Sequence[Value],
        width: int,
        weights: Sequence[WeightRef] = (),
        spec: object = None,
        dtype: Dtype = "act",
        rows: Rows = TOKENS,
    ) -> Value:
        """Add a node with one result, with as many rows as its inputs; `rows`: if it has none."""
        out = Value(reads[0].rows if reads else rows, width, dtype)
        self._nodes.append(Node(kind, tuple(reads), (out,), tuple(weights), spec))
        return out

    def nodes(self, node: Node) -> tuple[Value, ...]:
        """Add a node with several results."""
        self._nodes.append(node)
        return node.out

    def embed(
        self,
        name: str,
        rows: int,
        spec: EmbedSpec = EmbedSpec(),  # noqa: B008 - frozen
    ) -> Value:
        """Look up rows of the table `name` by an index of the step."""
        table = matrix([name], [rows], self.arch.hidden, "embed", purpose="embed")
        of = SAMPLED if spec.index == "labels" else TOKENS
        return self.node("embed", (), self.arch.hidden, [table], spec, rows=of)

    def add(self, residual: Value, x: Value) -> Value:
        """Add residual + x, by `ModelArch.residual_scale`."""
        scale = self.arch.residual_scale
        spec = None if scale == 1.0 else AddSpec(scale)
        return self.node("add", (residual, x), residual.width, spec=spec)

    def linear(
        self,
        x: Value,
        *names: str,
        outputs: int | Sequence[int],
        bias: bool = False,
        role: Role = "linear",
        purpose: Purpose = "",
        spec: LinearSpec = LinearSpec(),  # noqa: B008 - frozen
    ) -> Value:
        """Multiply by the matrices `names`, with these `outputs`, one below the other."""
        sizes = [outputs] if isinstance(outputs, int) else list(outputs)
        refs = [matrix(names, sizes, x.width, role, purpose=purpose)]
        if bias:
            refs.append(vector([f"{name}.bias" for name in names], sizes))
        dtype: Dtype = "f32" if role == "logits" else "act"
        return self.node("linear", (x,), sum(sizes), refs, spec, dtype)

    def rms_norm(self, x: Value, name: str) -> Value:
        """Apply an RMS norm (Zhang and Sennrich 2019)."""
        spec = NormSpec("rms", self.arch.norm_eps, self.arch.norm_offset)
        return self.node("norm", (x,), x.width, [vector([f"{name}.weight"], [x.width])], spec)

    def layer_norm(self, x: Value, name: str, *, bias: bool = True) -> Value:
        """Apply a layer norm (Ba, Kiros and Hinton 2016)."""
        parts = ("weight", "bias") if bias else ("weight",)
        vectors = [vector([f"{name}.{part}"], [x.width]) for part in parts]
        return self.node("norm", (x,), x.width, vectors, NormSpec("layer", self.arch.norm_eps))

    def adaptive_norm(self, x: Value, gains: Value, shifts: Value, eps: float) -> Value:
        """Apply a layer norm by 1 + gain and a shift of each entry (Peebles and Xie 2022)."""
        return self.node("norm", (x, gains, shifts), x.width, spec=NormSpec("layer", eps, 1.0))

    def modulate(self, residual: Value, x: Value, factors: Value) -> Value:
        """Add x, by factors of each entry."""
        return self.node("modulate", (residual, x, factors), x.width)

    def scale(self, x: Value, factor: float) -> Value:
        """Multiply by a number."""
        return self.node("scale", (x,), x.width, spec=ScaleSpec(factor))

    def activate(self, x: Value, activation: ActivationSpec) -> Value:
        return self.node("activate", (x,), x.width, spec=activation)

    def gated(self, x: Value, activation: ActivationSpec) -> Value:
        """Compute act(first half of the columns) · second half."""
        return self.node("gated", (x,), x.width // 2, spec=activation)

    def part(self, x: Value, first: int, width: int) -> Value:
        return self.node("part", (x,), width, spec=PartSpec(first))

    def parts(self, x: Value, widths: Sequence[int]) -> list[Value]:
        """Split the columns of x into parts of these widths."""
        ends = list(accumulate(widths))
        return [self.part(x, end - width, width) for width, end in zip(widths, ends, strict=True)]


def matrix(
    names: Sequence[str],
    rows: Sequence[int],
    width: int,
    role: Role,
    copies: int = 1,
    purpose: Purpose = "",
) -> WeightRef:
    own = tuple(f"{name}.weight" for name in names)
    return WeightRef(own, tuple(rows), width, role, copies, purpose=purpose)


def vector(names: Sequence[str], sizes: Sequence[int], copies: int = 1) -> WeightRef:
    return WeightRef(tuple(names), tuple(sizes), 0, "vector", copies)
