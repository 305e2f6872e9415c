"""A model's layers split into pipeline stages: the pass that cuts a graph across.

A stage computes some layers of every token and sends rows of the residual stream to the next one.
The last has the head. The computation is the same as in one piece, and so are its bits.
"""

from __future__ import annotations

from .errors import OptionError
from .graph import TOKENS, Graph, Node, Value
from .verify import verify


def stages(graph: Graph, count: int) -> list[Graph]:
    """Split `graph`, described for all rows and with its latents absorbed, into `count` graphs.

    Each but the first begins with a node `receive`; each but the last outputs the next one's input
    as `hidden`. Their weights, which a decoding step reads, are as equal as layers allow.
    Raises `OptionError`.
    """
    places = _places(graph)
    if not places:
        raise OptionError(
            f"layout PP{count}: the model cannot be dealt out to stages, for its layers read more "
            "than one value of those before",
            param="layout",
        )
    cost, costs = 0, []
    for node in graph.nodes:
        cost += _cost(node)
        costs.append(cost)
    chosen: list[int] = []
    for number in range(1, count):
        later = [at for at in places if at > (chosen[-1] if chosen else 0)]
        later = later[: len(later) - (count - 1 - number)]
        if not later:
            raise OptionError(
                f"layout PP{count}: the model has {len(places) + 1} parts that can be stages",
                param="layout",
            )
        chosen.append(min(later, key=lambda at: abs(costs[at - 1] - cost * number / count)))
    bounds = [0, *chosen, len(graph.nodes)]
    return [_between(graph, bounds, number) for number in range(count)]


def stage_of(graph: Graph, count: int, stage: int) -> Graph:
    """Return one of `count` stages; the whole graph if there is one. Raises like `stages`."""
    return graph if count == 1 else stages(graph, count)[stage]


def _cost(node: Node) -> int:
    """Return the number of weights that a token reads."""
    refs = [ref for ref in node.weights if ref.role in ("linear", "moe")]
    return sum(ref.out * ref.width * min(ref.copies, 8) for ref in refs)


def _places(graph: Graph) -> list[int]:
    """Find the nodes before which only one value is alive, with whole layers on both sides."""
    ends = {value: len(graph.nodes) for name, value in graph.outputs.items() if name != "states"}
    alive: set[Value] = set()
    of_layers = [getattr(node.spec, "layer", None) for node in graph.nodes]
    found = []
    for at, node in enumerate(graph.nodes):
        alive = {
            value for value in alive if max([*graph.readers(value), -1]) >= at or value in ends
        }
        before, after = ({*half} - {None} for half in (of_layers[:at], of_layers[at:]))
        whole = before and after and before.isdisjoint(after)
        if whole and len(alive) == 1 and next(iter(alive)).rows == TOKENS:
            found.append(at)
        alive.update(node.out)
    return found


def _between(graph: Graph, bounds: list[int], number: int) -> Graph:
    first, last = bounds[number], bounds[number + 1]
    nodes = list(graph.nodes[first:last])
    if number:
        nodes.insert(0, Node("receive", (), (_handed(graph, first),)))
    outputs = {name: value for name, value in graph.outputs.items() if name != "states"}
    if last < len(graph.nodes):
        outputs = {"hidden": _handed(graph, last)}
    made = Graph(tuple(nodes), outputs)
    verify(made)
    return made


def _handed(graph: Graph, at: int) -> Value:
    """Return the value that is alive before node `at`."""
    made = {value for node in graph.nodes[:at] for value in node.out}
    (value,) = {value for node in graph.nodes[at:] for value in node.reads if value in made}
    return value
