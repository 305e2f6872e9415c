"""The specification of graphs on both levels: every family passes, however a backend joins its
products, and no change of a graph does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast
from zlib import crc32

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.base.absorb import absorbed
from headrace.base.cut import cut, refusal
from headrace.base.demand import demand
from headrace.base.errors import EngineFault
from headrace.base.graph import ActivationSpec, Graph, LinearSpec, Node, NormSpec, Value, WeightRef
from headrace.base.joins import JOINED, AroundSpec, CodesSpec
from headrace.base.stages import stages
from headrace.base.verify import verify
from headrace.kernels.fuse import Way, fused
from headrace.models.registry import describe
from headrace.roofline.known import KNOWN, known

MIXED = (
    "llama-3.1-8b",
    "qwen2.5-0.5b",
    "gemma-3-1b",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "lfm2-1.2b",
)


class Weights:
    """Weights that are only named."""

    def weight(self, ref: WeightRef) -> WeightRef:
        return ref


def joined(graph: Graph, ways: Callable[[WeightRef], Way] | None) -> Graph:
    """Join the nodes of a graph, each product in its way."""
    plan: Any = None if ways is None else lambda weight, rows: ways(weight)
    nodes = fused(graph, cast(Any, Weights()), plan, {"N": 4, "R": 2})
    return Graph(tuple(nodes), graph.outputs, graph.inputs)


@cache
def described(name: str) -> Graph:
    return demand(absorbed(describe(known(name)[0])), "sampled", logits=True)


@cache
def mixed(name: str) -> Graph:
    """Every way somewhere."""

    def way(ref: WeightRef) -> Way:
        ways: tuple[Way, ...] = ("library", "around", "codes")
        return ways[crc32(ref.names[0].encode()) % 3]

    return joined(described(name), way)


@pytest.mark.parametrize("name", list(KNOWN))
def test_every_family_passes_however_it_is_joined(name: str) -> None:
    """`mixed` verifies what it joins."""
    verify(describe(known(name)[0]))
    verify(described(name))
    assert {node.kind for node in joined(described(name), None).nodes} & JOINED <= {"add_norm"}
    assert "around" in {node.kind for node in mixed(name).nodes}
    verify(mixed(name), joined=True)


@pytest.mark.parametrize("name", [*MIXED, "nemotron-h-56b", "qwen3-next-80b-a3b"])
def test_every_rank_and_stage_of_a_family_passes(name: str) -> None:
    for part in stages(absorbed(describe(known(name)[0])), 2):
        assert refusal(part, 2) is None
        for rank in (0, 1):
            verify(joined(cut(part, 2, rank), None), joined=True)


def test_joined_kinds_are_of_the_second_level() -> None:
    with pytest.raises(EngineFault, match=r"node \d+ \(\w+\): no such kind"):
        verify(mixed(MIXED[0]))


Change = Callable[[Node], Node | None]
"""Change of a node that leaves no graph; None: it does not concern this kind."""


def _wider(node: Node) -> Node | None:
    """More columns of the first weight, with the same names."""
    if not node.weights:
        return None
    first, *rest = node.weights
    return replace(node, weights=(first._replace(width=first.width + 1), *rest))


def _more_outputs(node: Node) -> Node | None:
    if not node.weights or node.kind == "embed" or node.weights[0].cut:
        return None
    first, *rest = node.weights
    return replace(node, weights=(first._replace(rows=(first.rows[0] + 1, *first.rows[1:])), *rest))


def _another_role(node: Node) -> Node | None:
    if not node.weights:
        return None
    first, *rest = node.weights
    role: Any = "vector" if first.role == "embed" else "embed"
    return replace(node, weights=(first._replace(role=role), *rest))


def _no_weights(node: Node) -> Node | None:
    optional = node.kind in ("write", "attend", "route", "scale")
    return replace(node, weights=()) if node.weights and not optional else None


def _around(node: Node, **change: Any) -> Node | None:
    spec = node.spec
    return replace(node, spec=spec._replace(**change)) if isinstance(spec, AroundSpec) else None


def _gate(node: Node) -> Node | None:
    gated = isinstance(node.spec, AroundSpec) and node.spec.gate is not None
    return None if gated else _around(node, gate=ActivationSpec("silu"))


def _other_norm(node: Node) -> Node | None:
    spec = node.spec
    if isinstance(spec, AroundSpec) and spec.norm is not None:
        return _around(node, norm=spec.norm._replace(kind="layer"))
    if isinstance(spec, CodesSpec) and isinstance(spec.of, NormSpec):
        return replace(node, spec=spec._replace(of=spec.of._replace(kind="layer")))
    joins = node.kind == "add_norm" and isinstance(spec, NormSpec)
    return replace(node, spec=spec._replace(kind="layer")) if joins else None


def _other_consumer(node: Node) -> Node | None:
    spec = node.spec
    if not isinstance(spec, CodesSpec):
        return None
    return replace(node, spec=spec._replace(consumer=spec.consumer._replace(names=("other",))))


def _a_norm_alone(node: Node) -> Node | None:
    spec = node.spec
    if not isinstance(spec, AroundSpec):
        return None
    return _around(node, gain=None) if spec.norm else _around(node, norm=NormSpec("rms", 1e-5))


CHANGES: dict[str, Change] = {
    "a kind that is not there": lambda node: replace(node, kind="scan"),
    "another spec": lambda node: replace(node, spec=object()),
    "one read more": lambda node: replace(node, reads=(*node.reads, Value(node.out[0].rows, 3))),
    "no reads": lambda node: replace(node, reads=()) if node.reads else None,
    "no results": lambda node: replace(node, out=()),
    "wider weight": _wider,
    "more outputs": _more_outputs,
    "another role": _another_role,
    "no weights": _no_weights,
    "a gate too": _gate,
    "a norm that is not RMS": _other_norm,
    "codes for another product": _other_consumer,
    "a norm without gain, or the reverse": _a_norm_alone,
    "a bias of another size": lambda node: _around(node, bias=WeightRef(("b",), (7,), 0, "vector")),
    "a capped product of codes": lambda node: (
        replace(node, spec=LinearSpec(softcap=1.0)) if node.kind == "linear_codes" else None
    ),
}


def refused(graph: Graph, kinds: set[str]) -> None:
    """The sentence names a node, by number and kind, and then says the rule; or a weight."""
    with pytest.raises(EngineFault) as raised:
        verify(graph, joined=True)
    text = str(raised.value)
    named = re.search(r"node (\d+) \((\w+)\)(: \w+| \w+) .*\w", text)
    if named is None:
        assert re.search(r"has two shapes$|two weights of one role$|is never made$", text), text
    else:
        assert named[2] in kinds
        assert graph.nodes[int(named[1])].kind == named[2]


@settings(max_examples=100)
@given(st.sampled_from(MIXED), st.booleans(), st.sampled_from(list(CHANGES)), st.randoms())
def test_a_changed_node_is_refused(name: str, joins: bool, change: str, random: Any) -> None:
    graph = mixed(name) if joins else described(name)
    places = [at for at, node in enumerate(graph.nodes) if CHANGES[change](node) is not None]
    assume(places)
    at = random.choice(places)
    nodes = list(graph.nodes)
    nodes[at] = cast(Node, CHANGES[change](nodes[at]))
    refused(Graph(tuple(nodes), graph.outputs), {node.kind for node in nodes})


@settings(max_examples=100)
@given(st.sampled_from(MIXED), st.booleans(), st.booleans(), st.randoms())
def test_a_changed_value_is_refused(name: str, joins: bool, width: bool, random: Any) -> None:
    """One column more, or another type, wherever it is made and read."""
    graph = mixed(name) if joins else described(name)
    old = random.choice([value for node in graph.nodes for value in node.out])
    dtype: Any = "i32" if old.dtype != "i32" else "act"
    new = replace(old, width=old.width + 1) if width else replace(old, dtype=dtype)

    def changed(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(new if value is old else value for value in values)

    nodes = [
        replace(node, reads=changed(node.reads), out=changed(node.out)) for node in graph.nodes
    ]
    outputs = {name: changed((value,))[0] for name, value in graph.outputs.items()}
    refused(Graph(tuple(nodes), outputs), {node.kind for node in nodes})


@settings(max_examples=60)
@given(
    st.sampled_from(MIXED), st.booleans(), st.sampled_from(["late", "twice", "gone"]), st.randoms()
)
def test_a_changed_order_is_refused(name: str, joins: bool, change: str, random: Any) -> None:
    graph = mixed(name) if joins else described(name)
    nodes = list(graph.nodes)
    read = [at for at, node in enumerate(nodes) if graph.readers(node.out[0])]
    at = random.choice(read)
    if change == "late":
        nodes.append(nodes.pop(at))
    elif change == "gone":
        del nodes[at]
    else:
        nodes.insert(at, nodes[at])
    refused(Graph(tuple(nodes), graph.outputs), {node.kind for node in nodes})
