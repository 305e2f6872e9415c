"""Random nodes as inputs: a program's noise comes from the request's seed.

A library draws its own numbers, so a sound could not be repeated. `rewritten` replaces each random
node of a file, byte by byte, by an input. Where the node's shape is known only in the run, the
input is a row of draws that is cut to it, and one more output tells how many were needed. Draw i
depends on seed, node and i alone, so a longer row begins with the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from ..base.errors import UnsupportedModel
from ..kernels.draws import numbers, streams
from .inspection import RANDOM
from .onnx import TYPES, Description, Node
from .wire import Walk, encoded, spans

_FLOAT, _INT64 = 1, 7
_REAL = {1: "float32", 10: "float16", 11: "float64"}
_PREFIX = "headrace.draw"
CUT_OPSET = 11
"""First opset with all operators that cut a row to a shape."""
FIRST = 4096
"""Draws of a node of unknown shape in the first run."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """An input that replaces a random node."""

    input: str
    op: str
    type: str
    dims: tuple[int, ...] | None
    """None: a row, cut in the program."""
    needed: str | None
    """Output with the number of draws that the run used, if `dims` is None."""
    low: float
    high: float
    """Bounds of a uniform distribution, or mean and deviation of a normal one."""

    def values(self, seed: int, at: int, count: int) -> npt.NDArray[np.generic]:
        """Return the draws of this node, the `at`-th: of its shape, or a row of `count`."""
        count = count if self.dims is None else prod(self.dims)
        stream = streams(np.array([seed], np.uint64), np.array([at], np.int64))
        if not self.op.startswith("RandomNormal"):
            found = self.low + (self.high - self.low) * numbers(stream, np.arange(count))
        else:  # Box and Muller, 1958.
            uniform = numbers(stream, np.arange(2 * count))
            radius = np.sqrt(-2.0 * np.log1p(-uniform[0::2]))
            found = self.low + self.high * radius * np.cos(2.0 * np.pi * uniform[1::2])
        return found.astype(self.type).reshape(self.dims or (-1 if self.dims is None else ()))


def random_nodes(described: Description) -> list[Node]:
    """Return the nodes that draw. Raises `UnsupportedModel` for one that no input can replace."""
    top = [node for node in described.graph.nodes if node.op in RANDOM and not node.domain]
    for node in described.nodes():
        if node.op in RANDOM and not node.domain:
            if node.op == "Multinomial" or not any(node is one for one in top):
                where = "" if node.op == "Multinomial" else ", inside a branch, loop or function"
                raise _refused(node, f"{where}; allowed: the others in the main graph")
            if node.op not in ("RandomNormal", "RandomUniform"):
                opset = described.opsets.get("", 0)
                if opset < CUT_OPSET:
                    raise _refused(node, f" in opset {opset}; allowed: {CUT_OPSET} and later")
            kept = node.attributes.get("dtype")
            if kept and kept.integer not in (TYPES if node.op == "Bernoulli" else _REAL):
                raise _refused(node, f" of type {kept.integer}; allowed: floats")
        mode = node.inputs[2] if node.op == "Dropout" and len(node.inputs) > 2 else ""
        if mode and _value(described, mode) is not False:
            raise _refused(node, " in training mode; export the model for inference")
    return top


def _refused(node: Node, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"operator {node.op} {node.name[:60]!r} draws numbers that no seed reaches{why}"
    )


def _value(described: Description, name: str) -> bool | None:
    """Return a stored boolean; None if it is computed."""
    for graph in described.graphs():
        tensors = [tensor for tensor in graph.tensors if tensor.name == name]
        for node in graph.nodes:
            if node.op == "Constant" and name in node.outputs:
                tensors += [one for each in node.attributes.values() for one in each.tensors]
        for tensor in tensors:
            if tensor.type == "bool" and len(tensor.raw) == 1:
                return bool(tensor.raw[0])
    return None


def rewritten(data: bytes, described: Description) -> tuple[bytes, tuple[Drawn, ...]]:
    """Return a file without random nodes, and the inputs in their places. Raises as
    `random_nodes`."""
    nodes = random_nodes(described)
    if not nodes:
        return data, ()
    walk = Walk(1_000_000, 8)
    view = memoryview(data)
    (graph, start, end) = next(
        (value, start, end) for number, _, value, start, end in spans(view, walk) if number == 7
    )
    assert isinstance(graph, memoryview)
    drawn: list[Drawn] = []
    out: list[bytes | memoryview] = []
    ports: list[bytes] = []
    place = -1
    for number, _, _, first, last in spans(graph, walk):
        place += number == 1
        node = described.graph.nodes[place] if number == 1 else None
        if node is None or not any(node is one for one in nodes):
            out.append(graph[first:last])
            continue
        found, body, more = _replaced(node, len(drawn))
        drawn.append(found)
        out += body
        ports += more
    inner = b"".join([*out, *ports])
    return b"".join([view[:start], encoded([(7, inner)]), view[end:]]), tuple(drawn)


def _replaced(node: Node, at: int) -> tuple[Drawn, list[bytes], list[bytes]]:
    """Return a node's replacement: its input, nodes of the graph, and ports of the graph."""
    attributes = node.attributes
    kept = attributes.get("dtype")
    code = kept.integer if kept is not None and kept.integer in _REAL else _FLOAT
    if node.op.startswith("RandomNormal"):
        names, default = ("mean", "scale"), (0.0, 1.0)
    else:
        names, default = ("low", "high"), (0.0, 1.0)
    low, high = (
        attributes[name].real if name in attributes else value
        for name, value in zip(names, default, strict=True)
    )
    if node.op in ("RandomNormal", "RandomUniform"):
        shape = attributes["shape"].integers if "shape" in attributes else ()
        drawn = Drawn(node.outputs[0], node.op, _REAL[code], shape, None, low, high)
        return drawn, [], [encoded([(11, _port(drawn.input, code, shape))])]
    code = _FLOAT if node.op == "Bernoulli" else code
    row, used = f"{_PREFIX}.{at}", f"{_PREFIX}.{at}.needed"
    drawn = Drawn(row, node.op, _REAL[code], None, used, low, high)

    def inner(name: str) -> str:
        return f"{row}.{name}"

    like, result = node.inputs[0], node.outputs[0]
    uniform = inner("uniform") if node.op == "Bernoulli" else result
    nodes = [
        _node("Shape", [like], inner("shape")),
        _node("Size", [like], used),
        _node("Size", [row], inner("length")),
        _constant(0, inner("zero")),
        _constant(1, inner("one")),
        _node("Range", [inner("zero"), used, inner("one")], inner("range")),
        # A row that is too short is repeated, so that the run ends and tells the number needed.
        _node("Mod", [inner("range"), inner("length")], inner("places")),
        _node("Gather", [row, inner("places")], inner("flat")),
        _node("Reshape", [inner("flat"), inner("shape")], uniform),
    ]
    if node.op == "Bernoulli":
        target = kept.integer if kept is not None else _FLOAT
        nodes += [
            _node("Cast", [like], inner("odds"), to=_FLOAT),
            _node("Less", [uniform, inner("odds")], inner("drawn")),
            _node("Cast", [inner("drawn")], result, to=target),
        ]
    ports = [
        encoded([(11, _port(row, code, (f"{row}.count",)))]),
        encoded([(12, _port(used, _INT64, ()))]),
    ]
    return drawn, nodes, ports


def _node(op: str, inputs: list[str], output: str, **numbers: int) -> bytes:
    fields: list[tuple[int, int | bytes]] = [(1, one.encode()) for one in inputs]
    fields += [(2, output.encode()), (3, output.encode()), (4, op.encode())]
    fields += [
        (5, encoded([(1, name.encode()), (3, value), (20, 2)])) for name, value in numbers.items()
    ]
    return encoded([(1, encoded(fields))])


def _constant(value: int, output: str) -> bytes:
    tensor = encoded([(2, _INT64), (9, value.to_bytes(8, "little"))])
    attribute = encoded([(1, b"value"), (5, tensor), (20, 4)])
    fields = [(2, output.encode()), (3, output.encode()), (4, b"Constant"), (5, attribute)]
    return encoded([(1, encoded(fields))])


def _port(name: str, code: int, dims: tuple[int | str, ...]) -> bytes:
    shape = encoded(
        (1, encoded([(1, dim) if isinstance(dim, int) else (2, dim.encode())])) for dim in dims
    )
    tensor = encoded([(1, code), (2, shape)])
    return encoded([(1, name.encode()), (2, encoded([(1, tensor)]))])
