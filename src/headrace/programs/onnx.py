"""ONNX files as descriptions: graphs, tensors and their sizes, read without the `onnx` package.

Field numbers are those of `onnx/onnx.proto`. Nothing is allocated for a tensor: its bytes stay a
view of the file. `description` raises `ModelFileError` for whatever is not a model.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from ..base.errors import ModelFileError
from .wire import (
    Fields,
    Walk,
    fields_of,
    message,
    messages,
    number,
    numbers,
    text,
    texts,
)

TYPES = {
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    4: ("uint16", 16),
    5: ("int16", 16),
    6: ("int32", 32),
    7: ("int64", 64),
    8: ("string", 0),
    9: ("bool", 8),
    10: ("float16", 16),
    11: ("float64", 64),
    12: ("uint32", 32),
    13: ("uint64", 64),
    14: ("complex64", 64),
    15: ("complex128", 128),
    16: ("bfloat16", 16),
    17: ("float8e4m3fn", 8),
    18: ("float8e4m3fnuz", 8),
    19: ("float8e5m2", 8),
    20: ("float8e5m2fnuz", 8),
    21: ("uint4", 4),
    22: ("int4", 4),
    23: ("float4e2m1", 4),
    24: ("float8e8m0", 8),
    25: ("uint2", 2),
    26: ("int2", 2),
}
"""`TensorProto.DataType` → name and bits of an element."""
MOST = 2**63
"""Elements and bytes of a tensor stay below it: they are int64 in every library."""
MOST_RANK = 32
Dim = int | str | None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor."""

    name: str
    type: str
    dims: tuple[int, ...]
    bytes: int
    """Size of its elements, wherever they are."""
    location: str | None = None
    """File below the model's folder that holds them."""
    offset: int = 0
    raw: memoryview = field(default=memoryview(b""), repr=False)

    def integers(self) -> list[int] | None:
        """Return small integers stored as raw bytes; None for others."""
        if self.type not in ("int64", "int32") or len(self.raw) != self.bytes or self.bytes > 4096:
            return None
        return [int(one) for one in np.frombuffer(self.raw, self.type)]


@dataclass(frozen=True, slots=True)
class Attribute:
    name: str
    integer: int = 0
    real: float = 0.0
    integers: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    graphs: tuple[Graph, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Attribute]

    @property
    def full(self) -> str:
        """Operator with its domain, if that is not ONNX's own."""
        return f"{self.domain}.{self.op}" if self.domain else self.op

    def graphs(self) -> Iterator[Graph]:
        for attribute in self.attributes.values():
            yield from attribute.graphs


@dataclass(frozen=True, slots=True)
class Port:
    """An input, output or inner value: element type and dimensions; both None if undeclared."""

    name: str
    type: str | None
    dims: tuple[Dim, ...] | None

    @property
    def fixed(self) -> bool:
        """Whether every dimension is a number."""
        return self.dims is not None and all(isinstance(dim, int) for dim in self.dims)

    @property
    def bytes(self) -> int:
        """Size if it is fixed, else 0."""
        bits = next((bits for name, bits in TYPES.values() if name == self.type), 0)
        return prod(dim for dim in self.dims or () if isinstance(dim, int)) * bits // 8 * self.fixed

    def __str__(self) -> str:
        dims = "?" if self.dims is None else ", ".join(str(dim or "?") for dim in self.dims)
        return f"{self.name} {self.type or '?'} [{dims}]"


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    values: tuple[Port, ...]

    def walk(self) -> Iterator[Graph]:
        """Yield this graph and all graphs in its nodes."""
        yield self
        for node in self.nodes:
            for inner in node.graphs():
                yield from inner.walk()


@dataclass(frozen=True)
class Description:
    """A whole file, read."""

    ir: int
    opsets: dict[str, int]
    producer: str
    graph: Graph
    functions: dict[tuple[str, str], tuple[Node, ...]]
    """(domain, name) → body of the model's own functions."""
    metadata: dict[str, str]

    @cached_property
    def inputs(self) -> tuple[Port, ...]:
        """Inputs that a caller gives: an initialiser of the same name is a default."""
        stored = {tensor.name for tensor in self.graph.tensors}
        return tuple(port for port in self.graph.inputs if port.name not in stored)

    def graphs(self) -> Iterator[Graph]:
        yield from self.graph.walk()
        for nodes in self.functions.values():
            for node in nodes:
                for inner in node.graphs():
                    yield from inner.walk()

    def nodes(self) -> Iterator[Node]:
        """Yield every node, of inner graphs and functions too."""
        for graph in self.graphs():
            yield from graph.nodes
        for nodes in self.functions.values():
            yield from nodes

    def tensors(self) -> Iterator[Tensor]:
        """Yield every stored tensor."""
        for graph in self.graphs():
            yield from graph.tensors
        for node in self.nodes():
            for attribute in node.attributes.values():
                yield from attribute.tensors


MOST_FIELDS, MOST_DEPTH = 1_000_000, 8


def description(data: bytes) -> Description:
    """Read a model. Raises `ModelFileError` for damage, or too many fields or nested graphs."""
    return _Reader(Walk(MOST_FIELDS, MOST_DEPTH)).model(memoryview(data))


class _Reader:
    def __init__(self, walk: Walk) -> None:
        self.walk = walk

    def model(self, view: memoryview) -> Description:
        fields = fields_of(view, self.walk)
        graph = message(fields, 7, "graph")
        if graph is None:
            raise ModelFileError("no ONNX model: it has no graph")
        opsets: dict[str, int] = {}
        for one in messages(fields, 8, "opset_import"):
            inner = fields_of(one, self.walk)
            opsets[text(inner, 1, "domain of an opset")] = number(inner, 2, "version of an opset")
        functions = {}
        for one in messages(fields, 25, "functions"):
            inner = fields_of(one, self.walk)
            key = text(inner, 10, "domain of a function"), text(inner, 1, "name of a function")
            if key in functions:
                raise ModelFileError(f"function {key[0]}.{key[1]:.80} is defined twice")
            functions[key] = self.nodes(inner, 7, 0)
        return Description(
            number(fields, 1, "ir_version"),
            opsets,
            text(fields, 2, "producer_name"),
            self.graph(graph, 0),
            functions,
            dict(self.pairs(fields, 14, "metadata_props")),
        )

    def graph(self, view: memoryview, depth: int) -> Graph:
        self.walk.within(depth, "a graph")
        fields = fields_of(view, self.walk)
        if 15 in fields:
            raise ModelFileError("sparse initialisers are not read; store them dense")
        return Graph(
            self.nodes(fields, 1, depth),
            tuple(self.tensor(one) for one in messages(fields, 5, "initializer")),
            *(
                tuple(self.port(one) for one in messages(fields, at, what))
                for at, what in ((11, "input"), (12, "output"), (13, "value_info"))
            ),
        )

    def nodes(self, fields: Fields, at: int, depth: int) -> tuple[Node, ...]:
        return tuple(self.node(one, depth) for one in messages(fields, at, "node"))

    def node(self, view: memoryview, depth: int) -> Node:
        fields = fields_of(view, self.walk)
        op = text(fields, 4, "op_type")
        if not op:
            raise ModelFileError("a node has no op_type")
        attributes = {}
        for one in messages(fields, 5, "attribute"):
            read = self.attribute(one, depth)
            if read.name in attributes:
                raise ModelFileError(f"{op:.80} has the attribute {read.name:.80} twice")
            attributes[read.name] = read
        domain = text(fields, 7, "domain of a node")
        return Node(
            op,
            "" if domain == "ai.onnx" else domain,
            text(fields, 3, "name of a node"),
            tuple(texts(fields, 1, "input of a node")),
            tuple(texts(fields, 2, "output of a node")),
            attributes,
        )

    def attribute(self, view: memoryview, depth: int) -> Attribute:
        fields = fields_of(view, self.walk)
        real = fields.get(2, [memoryview(b"\0\0\0\0")])[-1]
        if isinstance(real, int) or len(real) != 4:
            raise ModelFileError("a float attribute has not four bytes")
        if 22 in fields or 23 in fields:
            raise ModelFileError("sparse attributes are not read; store them dense")
        inner = [message(fields, 6, "g"), *messages(fields, 11, "graphs")]
        stored = [message(fields, 5, "t"), *messages(fields, 10, "tensors")]
        return Attribute(
            text(fields, 1, "name of an attribute"),
            number(fields, 3, "i"),
            float(struct.unpack("<f", real)[0]),
            tuple(numbers(fields, 8, self.walk)),
            tuple(self.tensor(one) for one in stored if one is not None),
            tuple(self.graph(one, depth + 1) for one in inner if one is not None),
        )

    def tensor(self, view: memoryview) -> Tensor:
        fields = fields_of(view, self.walk)
        name = text(fields, 8, "name of a tensor")
        type, bits = self.type(number(fields, 2, "data_type"), name)
        dims = tuple(numbers(fields, 1, self.walk))
        if len(dims) > MOST_RANK or any(dim < 0 for dim in dims):
            raise ModelFileError(f"tensor {name:.80} has the shape {dims[:MOST_RANK]}")
        if (count := prod(dims)) * max(bits, 8) >= MOST:
            raise ModelFileError(f"tensor {name:.80} {list(dims)} has more than 2^63 bits")
        raw = message(fields, 9, f"raw data of {name:.80}")
        if type == "string":
            strings = messages(fields, 6, "string_data")
            return Tensor(name, type, dims, sum(32 + len(one) for one in strings))
        size = (count * bits + 7) // 8
        if number(fields, 14, "data_location") == 1:
            place = dict(self.pairs(fields, 13, "external_data"))
            location, offset = place.get("location", ""), place.get("offset", "0")
            length = place.get("length", str(size))
            if not (offset.isascii() and offset.isdecimal() and len(offset) < 19):
                raise ModelFileError(f"tensor {name:.80}: offset {offset:.40} in {location:.80}")
            if length != str(size):
                raise ModelFileError(
                    f"tensor {name:.80} has {size:,} bytes by its shape, and {length:.40} in "
                    f"{location:.80}"
                )
            return Tensor(name, type, dims, size, location, int(offset))
        if raw is not None and len(raw) != size:
            raise ModelFileError(
                f"tensor {name:.80} has {size:,} bytes by its shape, and {len(raw):,} are stored"
            )
        if raw is None:
            self.typed(fields, name, count)
        return Tensor(name, type, dims, size, raw=memoryview(b"") if raw is None else raw)

    def typed(self, fields: Fields, name: str, count: int) -> None:
        """Compare the shape with the numbers stored in typed fields: at least two bits each."""
        stored = sum(
            8 * (8 if isinstance(value, int) else len(value))
            for at in (4, 5, 7, 10, 11)
            for value in fields.get(at, ())
        )
        if count > 4 * stored:
            raise ModelFileError(
                f"tensor {name:.80} has {count:,} elements by its shape, and {stored // 8:,} "
                "bytes of them are stored"
            )

    def pairs(self, fields: Fields, at: int, what: str) -> Iterator[tuple[str, str]]:
        for one in messages(fields, at, what):
            inner = fields_of(one, self.walk)
            yield text(inner, 1, f"key of {what}"), text(inner, 2, f"value of {what}")

    def port(self, view: memoryview) -> Port:
        fields = fields_of(view, self.walk)
        name = text(fields, 1, "name of a value")
        type = message(fields, 2, f"type of {name:.80}")
        tensor = None if type is None else message(fields_of(type, self.walk), 1, "tensor_type")
        if tensor is None:  # A sequence, a map, an optional value, or undeclared.
            return Port(name, None, None)
        inner = fields_of(tensor, self.walk)
        shape = message(inner, 2, f"shape of {name:.80}")
        element = self.type(number(inner, 1, "elem_type"), name)[0]
        if shape is None:
            return Port(name, element, None)
        dims = []
        for one in messages(fields_of(shape, self.walk), 1, "dim"):
            size = fields_of(one, self.walk)
            named = text(size, 2, "dim_param")
            value = number(size, 1, "dim_value") if 1 in size else None
            if value is not None and (value < -1 or value >= MOST):
                raise ModelFileError(f"value {name:.80} has a dimension of {value}")
            # Some exporters write 0 or -1 where the size is unknown.
            dims.append(value if value is not None and value > 0 else named or None)
        if len(dims) > MOST_RANK:
            raise ModelFileError(f"value {name:.80} has {len(dims)} dimensions")
        if prod(dim for dim in dims if isinstance(dim, int)) >= MOST // 16:
            raise ModelFileError(f"value {name:.80} {dims} has more than 2^63 bytes")
        return Port(name, element, tuple(dims))

    def type(self, code: int, name: str) -> tuple[str, int]:
        if code not in TYPES:
            raise ModelFileError(f"{name:.80} has the element type {code}, which is not known")
        return TYPES[code]
