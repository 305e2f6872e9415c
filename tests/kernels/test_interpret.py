"""A graph run node by node: what is joined, what is kept, what is skipped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import make_batch

from headrace.base.arch import ModelArch
from headrace.base.graph import KINDS, Graph, Node, Value, WeightRef
from headrace.base.joins import JOINED, AroundSpec
from headrace.base.verify import verify
from headrace.kernels.fuse import fused
from headrace.kernels.interpret import Interpreter, _Run
from headrace.kernels.model import Model
from headrace.kernels.operators import KvCache, KvLayer
from headrace.kernels.prepared import Prepared
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import DenseWeight
from headrace.layers.description import Description
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import WeightSource
from headrace.models.registry import describe

ARCH = ModelArch(
    family="llama",
    vocab_size=40,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    max_context=64,
    norm_eps=1e-5,
)


class Noting(ReferenceOperators):
    """The reference, which notes what it is called for and which results still live."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.calls: list[str] = []
        self.alive: list[int] = []
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in (
            "linear",
            "gated",
            "attend",
            "rms_norm",
            "add_rms_norm",
            "write",
        ):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            result = found(*arguments)
            if name == "linear":
                self._made.append(weakref.ref(result))
            self.alive.append(sum(made() is not None for made in self._made))
            return result

        return call


def model_of(ops: ReferenceOperators, arch: ModelArch = ARCH) -> Model:
    torch.manual_seed(0)
    named = {name: torch.randn(shape) for name, shape in describe(arch).tensors().items()}
    return prepare(
        describe(arch),
        WeightSource(named.items()),
        ops,
        device="cpu",
        dtype="float32",
        max_context=64,
    )


def cache_of(arch: ModelArch = ARCH) -> KvCache:
    shape = 16, arch.kv_heads, 16, arch.head_dim
    layers = [KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(arch.layers)]
    return KvCache(layers, [0] * arch.layers)


def test_values_die_behind_their_last_reader() -> None:
    """However deep the model: a long prompt would else hold every layer's."""
    found = []
    for layers in (2, 8):
        ops = Noting()
        arch = replace(ARCH, layers=layers)
        batch, _ = make_batch([(0, 9)], vocabulary=ARCH.vocab_size)
        gc.disable()
        try:
            model_of(ops, arch).forward(ops, batch, cache_of(arch))
        finally:
            gc.enable()
        found.append(max(ops.alive))
    assert found[0] == found[1] <= 3


def test_where_nobody_samples_only_the_kv_is_made() -> None:
    ops = Noting()
    batch, _ = make_batch([(0, 5)], vocabulary=ARCH.vocab_size)
    batch.sample_rows = batch.sample_rows[:0]
    hidden, logits = model_of(ops).forward(ops, batch, cache_of())
    assert hidden.shape == (0, ARCH.hidden)
    assert logits.shape == (0, ARCH.vocab_size)
    assert logits.dtype == torch.float32
    assert ops.calls[-1] == "write"
    assert ops.calls.count("attend") == ARCH.layers - 1


def test_a_residual_that_is_read_again_is_kept() -> None:
    """Operators may write into the residual that they are given."""

    class Reusing(ReferenceOperators):
        def add(self, x: torch.Tensor, residual: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return residual.add_(x, alpha=factor)

    to = Description(ARCH)
    x = to.embed("table", 40)
    doubled = to.add(x, x)
    graph = to.graph(hidden=to.add(x, doubled))
    table = torch.randn(40, 32)
    weights = Prepared({(("table.weight",), "embed"): DenseWeight(table)})
    batch, _ = make_batch([(0, 4)], vocabulary=40)
    (found,) = Interpreter(graph.nodes, weights, tuple(graph.outputs.values())).run(
        Reusing(torch.float32), batch, None, {}
    )
    assert torch.equal(found, 3 * table[batch.tokens])


def test_a_part_is_a_view_of_columns() -> None:
    given = Value(describe(ARCH).nodes[0].out[0].rows, 12)
    to = Description(ARCH)
    part = to.part(given, 3, 4)
    graph = Graph(to.graph(hidden=part).nodes, {"hidden": part}, (given,))
    verify(graph)
    x = torch.arange(24.0).view(2, 12)
    (found,) = Interpreter(graph.nodes, Prepared(), (part,)).run(
        ReferenceOperators(torch.float32), None, None, {given: x}
    )
    assert torch.equal(found, x[:, 3:7])
    assert found.data_ptr() == x[:, 3:].data_ptr()


def kinds(nodes: Iterable[Node]) -> list[str]:
    return [node.kind for node in nodes]


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(ReferenceOperators(torch.float32))


def test_a_sum_and_its_norm_are_one(model: Model) -> None:
    nodes = fused(model.variant("sampled"), model.weights, None, {})
    layer = ["linear", "write", "attend", "linear", "add_norm", "linear", "gated", "linear"]
    last = [*layer[:3], "select", *layer[3:]]
    assert kinds(nodes) == [
        "embed",
        "norm",
        *layer,
        "add_norm",
        "select",
        *last,
        "add_norm",
        "linear",
    ]


def test_a_product_takes_what_lies_around_it(model: Model) -> None:
    nodes = fused(model.variant("every"), model.weights, lambda *_: "around", {"N": 4, "R": 1})
    layer = ["around", "write", "attend", "around", "around", "around"]
    assert kinds(nodes) == ["embed", *layer, *layer, "norm", "select", "linear"]
    specs = [node.spec for node in nodes if isinstance(node.spec, AroundSpec)]
    around = [(spec.norm is not None, spec.gate is not None) for spec in specs]
    assert around == [(True, False), (False, False), (True, True), (False, False)] * 2
    onto = [len(node.reads) == 2 for node in nodes if node.kind == "around"]
    assert onto == [False, True, False, True] * 2


def test_a_product_of_codes_is_given_codes(model: Model) -> None:
    nodes = fused(model.variant("every"), model.weights, lambda *_: "codes", {"N": 4, "R": 1})
    assert kinds(nodes)[:9] == [
        "embed",
        "norm_codes",
        "linear_codes",
        "write",
        "attend",
        "linear",
        "norm_codes",
        "linear_codes",
        "gated_codes",
    ]


def test_what_is_added_to_products_sees_each_of_them(model: Model) -> None:
    """By the names of its tensors, with the values before and behind it."""
    seen: list[tuple[str, ...]] = []

    def adding(ref: WeightRef, x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append(ref.names)
        assert (x.shape[1], y.shape[1]) == (ref.width, ref.out)
        y += 1

    ops = ReferenceOperators(torch.float32)
    batch, _ = make_batch([(0, 5)], vocabulary=ARCH.vocab_size)
    plain, _ = model.forward(ops, batch, cache_of())
    added, _ = model.forward(ops, batch, cache_of(), adding)
    assert seen == [ref.names for ref in model.products()]
    assert not torch.equal(plain, added)


def test_every_kind_of_node_is_interpreted() -> None:
    """`reduce` is priced alone."""
    runs = {name.removeprefix("_") for name in vars(_Run)}
    assert (KINDS | JOINED) - runs == {"reduce"}
