"""Random nodes as inputs: a program's noise comes from the request's seed.

A library draws its own numbers, so a sound could not be repeated. `rewritten` replaces each random
node of a file, byte by byte, by an input. Where the node's shape is known only in the run, the
input is a row of draws that is cut to it, and one more output tells how many were needed. Draw i
depends on seed, node and i alone, so a longer row begins with the shorter one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from ..base.errors import UnsupportedModel
from ..kernels.draws import numbers, streams
from .inspection import DRAWN, RANDOM
from .onnx import MOST_FIELDS, Call, OnnxModel
from .wire import Walk, encoded, spans

_FLOAT, _INT64 = 1, 7
_REAL = {1: "float32", 10: "float16", 11: "float64"}
_CUT = """Shape like shape, Size like needed, Size row length, Range zero needed one range,
Mod range length places, Gather row places flat, Reshape flat shape result"""
"""Nodes that cut a row to the shape of `like`: operator, inputs, output. A row that is too short is
repeated, so that the run ends and tells the number needed."""
CUT_OPSET = 11
"""First opset with all of them."""
FIRST = 4096
"""Draws of a node of unknown shape in the first run."""
PIECE = 1 << 18
"""Draws that are made at once: in double precision they take several times their own bytes."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """An input that replaces a random node."""

    input: str
    normal: bool
    type: str
    dims: tuple[int, ...] | None
    """None: a row, cut in the program."""
    needed: str | None
    """Output with the number of draws that the run used, if `dims` is None."""
    low: float
    high: float
    """Mean and deviation if it is `normal`, else bounds of a uniform distribution."""

    def values(self, seed: int, at: int, count: int) -> npt.NDArray[np.generic]:
        """Return the draws of this node, the `at`-th: of its shape, or a row of `count`."""
        count = count if self.dims is None else prod(self.dims)
        stream = streams(np.array([seed], np.uint64), np.array([at], np.int64))
        found = np.empty(count, self.type)
        for first in range(0, count, PIECE):
            some = slice(first, min(first + PIECE, count))
            if not self.normal:
                uniform = numbers(stream, np.arange(some.start, some.stop))
                found[some] = self.low + (self.high - self.low) * uniform
            else:  # Box and Muller, 1958.
                uniform = numbers(stream, np.arange(2 * some.start, 2 * some.stop))
                radius = np.sqrt(-2.0 * np.log1p(-uniform[0::2]))
                found[some] = self.low + self.high * radius * np.cos(2.0 * np.pi * uniform[1::2])
        return found.reshape(self.dims or (-1 if self.dims is None else ()))


def random_nodes(described: OnnxModel) -> list[Call]:
    """Return the nodes that draw. Raises `UnsupportedModel` for one that no input can replace."""
    top = [node for node in described.graph.nodes if node.op in RANDOM and not node.domain]
    places, opset = {id(node) for node in top}, described.opsets.get("", 0)
    false = _stored_false(described)
    for node in described.nodes:
        mode = node.inputs[2] if node.op == "Dropout" and len(node.inputs) > 2 else ""
        if mode and mode not in false:
            raise _refused(node, " in training mode; export the model for inference")
        if node.op not in RANDOM or node.domain:
            continue
        if node.op not in DRAWN:
            raise _refused(node, f"; allowed: {', '.join(DRAWN)}")
        if id(node) not in places:
            raise _refused(node, " inside a branch, loop or function; allowed: the main graph")
        if node.op.endswith("Like") and opset < CUT_OPSET:
            raise _refused(node, f" in opset {opset}; allowed: {CUT_OPSET} and later")
        if "dtype" in node.attributes and node.attributes["dtype"].integer not in _REAL:
            raise _refused(node, " of no float type")
        if not node.outputs or (node.op.endswith("Like") and not node.inputs):
            raise _refused(node, "; it has no output, or no input")
    return top


def _refused(node: Call, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"operator {node.op} {node.name[:60]!r} draws numbers that no seed reaches{why}"
    )


def _stored_false(described: OnnxModel) -> set[str]:
    """Return the names of values that are stored once, and false."""
    found = [(tensor.name, tensor) for tensor in described.tensors]
    for node in described.nodes:
        if node.op == "Constant":
            tensors = [one for each in node.attributes.values() for one in each.tensors]
            found += [(name, one) for name in node.outputs for one in tensors]
    counts = Counter(name for name, _ in found)
    return {name for name, one in found if counts[name] == 1 and bytes(one.raw[:2]) == b"\0"}


def rewritten(data: bytes, described: OnnxModel) -> tuple[bytes, tuple[Drawn, ...]]:
    """Return a file without random nodes, and the inputs in their places. Raises as
    `random_nodes`."""
    nodes = random_nodes(described)
    if not nodes:
        return data, ()
    view, walk = memoryview(data), Walk(2 * MOST_FIELDS)
    graph, start, end = next(found[1:] for found in spans(view, walk) if found[0] == 7)
    assert isinstance(graph, memoryview)
    places, drawn = {id(node) for node in nodes}, list[Drawn]()
    out: list[bytes | memoryview] = []
    ports: list[bytes] = []
    place = -1
    for number, _, first, last in spans(graph, walk):
        place += number == 1
        node = described.graph.nodes[place] if number == 1 else None
        if node is None or id(node) not in places:
            out.append(graph[first:last])
            continue
        found, body, more = _replaced(node, len(drawn))
        drawn.append(found)
        out += body
        ports += more
    inner = b"".join([*out, *ports])
    return b"".join([view[:start], encoded([(7, inner)]), view[end:]]), tuple(drawn)


def _replaced(node: Call, at: int) -> tuple[Drawn, list[bytes], list[bytes]]:
    """Return a node's replacement: its input, nodes of the graph, and ports of the graph."""
    attributes, normal = node.attributes, node.op.startswith("RandomNormal")
    code = attributes["dtype"].integer if "dtype" in attributes else _FLOAT
    ends = [attributes.get(name) for name in (("mean", "scale") if normal else ("low", "high"))]
    low, high = (
        default if one is None else one.real for one, default in zip(ends, (0.0, 1.0), strict=True)
    )
    row, result = f"headrace.draw.{at}", node.outputs[0]
    if not node.op.endswith("Like"):
        shape = attributes["shape"].integers if "shape" in attributes else ()
        drawn = Drawn(row, normal, _REAL[code], shape, None, low, high)
        return drawn, [_node("Identity", [row], result)], [encoded([(11, _port(row, code, shape))])]
    names = {"like": node.inputs[0], "row": row, "result": result}
    nodes = [_constant(value, f"{row}.{name}") for value, name in enumerate(("zero", "one"))]
    for line in _CUT.split(","):
        op, *inputs, output = line.split()
        *given, made = (names.get(one, f"{row}.{one}") for one in (*inputs, output))
        nodes.append(_node(op, given, made))
    used = f"{row}.needed"
    inner, outer = _port(row, code, (f"{row}.count",)), _port(used, _INT64, ())
    drawn = Drawn(row, normal, _REAL[code], None, used, low, high)
    return drawn, nodes, [encoded([(11, inner)]), encoded([(12, outer)])]


def _node(op: str, inputs: list[str], output: str) -> bytes:
    ends = [(1, one.encode()) for one in inputs]
    named = [(2, output.encode()), (3, output.encode()), (4, op.encode())]
    return encoded([(1, encoded([*ends, *named]))])


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
