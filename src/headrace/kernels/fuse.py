"""Joins of nodes for backends that run operator by operator, found from each value's readers.

* a sum and the following norm are one operator everywhere;
* a product that is served by a kernel of few rows also takes the preceding norm, the following gate
  and the residual that it is added to;
* if a product takes codes, the preceding norm or gate writes them.

The joined nodes are kinds of their own: `base.joins`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from ..base.graph import ActivationSpec, Graph, Node, NormSpec, Value
from ..base.joins import (
    AroundSpec,
    CodesSpec,
    is_rms,
    norm_after,
    norm_before,
    only_reader,
    reader_of_kind,
    sum_after,
)
from ..base.verify import verify
from .arrays import Array
from .weights import Weight

if TYPE_CHECKING:
    import torch

    from .prepared import Prepared

Way = Literal["library", "around", "codes"]
"""Ways in which a backend computes a product: alone; with the nodes around it; from codes."""
Plan = Callable[[Weight, int], Way]


class Norm(NamedTuple):
    """An RMS norm that the following product takes."""

    gain: Array
    """[D]."""
    eps: float
    offset: float


class Joining(Protocol):
    """Joined nodes as a backend computes them. Codes are 8-bit activations [N, D] e4m3 with fp32
    scales [N, 1], or [N, ceil(D / 128)] where the product's weight has one per block."""

    def plan_product(self, weight: Weight, rows: int) -> Way:
        """Return the way to compute the product of this prepared weight for this number of rows."""
        ...

    def row_class(self, rows: int, device: torch.device) -> object:
        """Return the class of a row count; there are few. `plan_product` depends only on it and the
        weight."""
        ...

    def linear_around(
        self,
        x: Array,
        weight: Weight,
        bias: Array | None,
        norm: Norm | None,
        activation: str,
        residual: Array | None,
    ) -> Array:
        """Compute act(norm(x) · weightᵀ + bias) + residual, each if given; x [N, in] → [N, out].
        `activation`, if not "": the weight is gate over up [2I, in], the result [N, I]."""
        ...

    def norm_codes(
        self, x: Array, residual: Array | None, norm: Norm, consumer: Weight
    ) -> tuple[Array, Array, Array]:
        """Return codes and scales of norm(residual + x), as input of `consumer`; and the sum."""
        ...

    def gated_codes(self, gate_up: Array, activation: str, consumer: Weight) -> tuple[Array, Array]:
        """Return codes and scales of `gated`, as input of `consumer`."""
        ...

    def linear_codes(
        self, codes: Array, scales: Array, weight: Weight, bias: Array | None
    ) -> Array:
        """Compute `linear` from the codes and scales of one of the others."""
        ...

    def logits(self, x: Array, weight: Weight, softcap: float | None, home: Array) -> Array:
        """Compute `Operators.logits`, in `home` [R, V] fp32 if the product can write there."""
        ...


def fused(
    graph: Graph, weights: Prepared, plan: Plan | None, rows: Mapping[str, int]
) -> Sequence[Node]:
    """Return the nodes to run in place of `graph.nodes`. Values of symbol s have rows[s] rows."""
    return _Fusing(graph, weights, plan, rows).run()


class _Fusing:
    def __init__(
        self, graph: Graph, weights: Prepared, plan: Plan | None, rows: Mapping[str, int]
    ) -> None:
        self._graph, self._weights, self._plan, self._rows = graph, weights, plan, rows
        self._gone: set[int] = set()
        """Nodes computed as parts of other nodes."""
        self._made: dict[int, Node] = {}

    def run(self) -> Sequence[Node]:
        nodes = self._graph.nodes
        ways = [self._way(node) for node in nodes]
        around = [index for index, way in enumerate(ways) if way == "around"]
        for index in around:
            self._gate_inside(index)
        for index in around:
            self._add_inside(index)
        for index in range(len(nodes) - 1):
            self._join_sum(index)
        for index in around:
            self._norm_inside(index)
        for index, way in enumerate(ways):
            if way == "codes":
                self._codes_before(index)
        left = (index for index in range(len(nodes)) if index not in self._gone)
        made = tuple(self._made.get(index, nodes[index]) for index in left)
        graph = Graph(made, self._graph.outputs, self._graph.inputs)
        verify(graph, joined=True)
        return made

    def _way(self, node: Node) -> Way:
        if self._plan is None or node.kind != "linear" or node.weights[0].role != "linear":
            return "library"
        return self._plan(self._weights.weight(node.weights[0]), self._rows[node.out[0].rows.name])

    def _product(self, index: int) -> Node:
        """Return product `index` as a node, joined with its surroundings as far as possible."""
        node = self._graph.nodes[index]
        bias = node.weights[1] if len(node.weights) > 1 else None
        return self._made.get(
            index, Node("around", node.reads, node.out, node.weights[:1], AroundSpec(bias))
        )

    def _gate_inside(self, index: int) -> None:
        nodes = self._graph.nodes
        reader = reader_of_kind(self._graph, index, "gated")
        if reader < 0 or len(nodes[index].weights) > 1:
            return
        gate = nodes[reader].spec
        assert isinstance(gate, ActivationSpec)
        made = self._product(index)
        self._made[index] = Node(
            made.kind, made.reads, nodes[reader].out, made.weights, AroundSpec(None, gate=gate)
        )
        self._gone.add(reader)

    def _add_inside(self, index: int) -> None:
        """Join x · w + residual, unless something reads the product in between."""
        nodes, reader = self._graph.nodes, sum_after(self._graph, index)
        if index in self._made or reader < 0:
            return
        made, residual = self._product(index), nodes[reader].reads[0]
        self._made[index] = Node(
            made.kind, (*made.reads, residual), nodes[reader].out, made.weights, made.spec
        )
        self._gone.add(reader)

    def _join_sum(self, index: int) -> None:
        """Join a sum and the norm right after it."""
        after = norm_after(self._graph, index)
        if after < 0 or index in self._gone or not is_rms(self._graph.nodes[after]):
            return
        add, norm = self._graph.nodes[index : index + 2]
        self._made[index + 1] = Node(
            "add_norm", add.reads, (*norm.out, *add.out), norm.weights, norm.spec
        )
        self._gone.add(index)

    def _norm_inside(self, index: int) -> None:
        nodes = self._graph.nodes
        before = norm_before(self._graph, index)
        if before < 0 or before in self._made:
            return
        norm, made = nodes[before], self._product(index)
        assert isinstance(norm.spec, NormSpec)
        assert isinstance(made.spec, AroundSpec)
        spec = AroundSpec(made.spec.bias, norm.spec, norm.weights[0], made.spec.gate)
        self._made[index] = Node(
            made.kind, (*norm.reads, *made.reads[1:]), made.out, made.weights, spec
        )
        self._gone.add(before)

    def _codes_before(self, index: int) -> None:
        """Let the norm or the gate before a product of codes write the codes."""
        nodes = self._graph.nodes
        product = nodes[index]
        source = product.reads[0]
        if only_reader(self._graph, source) != index:
            return
        before = self._graph.maker(source)
        if before in self._gone or nodes[before].kind not in ("gated", "norm"):
            return
        node = self._made.get(before, nodes[before])
        spec = node.spec
        assert isinstance(spec, NormSpec | ActivationSpec)
        if isinstance(spec, NormSpec) and spec.kind != "rms":
            return
        codes = CodesSpec(spec, product.weights[0])
        kind = "gated_codes" if node.kind == "gated" else "norm_codes"
        written = Value(source.rows, source.width, "codes"), Value(source.rows, 0, "f32")
        out = (*written, *node.out[1:])
        self._made[before] = Node(kind, node.reads, out, node.weights, codes)
        self._made[index] = Node(
            "linear_codes", written, product.out, product.weights, product.spec
        )
