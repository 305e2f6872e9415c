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
from .wire import Walk, WireFields

_NAMES = """float32 uint8 int8 uint16 int16 int32 int64 string bool float16 float64 uint32 uint64
complex64 complex128 bfloat16 float8e4m3fn float8e4m3fnuz float8e5m2 float8e5m2fnuz uint4 int4
float4e2m1 float8e8m0 uint2 int2"""
_BITS = (32, 8, 8, 16, 16, 32, 64, 0, 8, 16, 64, 32, 64, 64, 128, 16, 8, 8, 8, 8, 4, 4, 4, 8, 2, 2)
TYPES = dict(enumerate(zip(_NAMES.split(), _BITS, strict=True), 1))
"""`TensorProto.DataType` → name and bits of an element; 0: of no fixed size."""
MOST = 2**63
"""Bits of a tensor stay below it: sizes are int64 in every library."""
MOST_RANK = 32
MOST_FIELDS, MOST_DEPTH = 1_000_000, 8
Dim = int | str | None


@dataclass(frozen=True, slots=True)
class OnnxTensor:
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

    def integers(self) -> list[int]:
        """Return small integers stored as raw bytes; of others none."""
        if self.type not in ("int64", "int32") or len(self.raw) != self.bytes or self.bytes > 4096:
            return []
        return [int(one) for one in np.frombuffer(self.raw, self.type)]


@dataclass(frozen=True, slots=True)
class Attribute:
    integer: int
    real: float
    integers: tuple[int, ...]
    tensors: tuple[OnnxTensor, ...]
    graphs: tuple[Net, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A node."""

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

    def graphs(self) -> Iterator[Net]:
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
class Net:
    """A graph."""

    nodes: tuple[Call, ...]
    tensors: tuple[OnnxTensor, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    values: tuple[Port, ...]


@dataclass(frozen=True)
class OnnxModel:
    """A whole file, read."""

    ir: int
    opsets: dict[str, int]
    producer: str
    graph: Net
    functions: dict[tuple[str, str], tuple[Call, ...]]
    """(domain, name) → body of the model's own functions."""
    metadata: dict[str, str]

    @cached_property
    def inputs(self) -> tuple[Port, ...]:
        """Inputs that a caller gives: an initialiser of the same name is a default."""
        stored = {tensor.name for tensor in self.graph.tensors}
        return tuple(port for port in self.graph.inputs if port.name not in stored)

    @cached_property
    def graphs(self) -> tuple[Net, ...]:
        """All graphs, those in nodes and functions too."""
        found = [self.graph]
        bodies = [self.graph.nodes, *self.functions.values()]
        while bodies:
            inner = [graph for node in bodies.pop() for graph in node.graphs()]
            found += inner
            bodies += [graph.nodes for graph in inner]
        return tuple(found)

    @cached_property
    def nodes(self) -> tuple[Call, ...]:
        bodies = [*(graph.nodes for graph in self.graphs), *self.functions.values()]
        return tuple(node for body in bodies for node in body)

    @cached_property
    def tensors(self) -> tuple[OnnxTensor, ...]:
        kept = [tensor for graph in self.graphs for tensor in graph.tensors]
        own = [
            tensor
            for node in self.nodes
            for one in node.attributes.values()
            for tensor in one.tensors
        ]
        return (*kept, *own)


def _need(right: bool, message: str) -> None:
    if not right:
        raise ModelFileError(message)


def description(data: bytes) -> OnnxModel:
    """Read a model. Raises `ModelFileError` for damage, or too many fields or nested graphs."""
    file = WireFields(memoryview(data), Walk(MOST_FIELDS))
    graph = file.one(7, "graph")
    if graph is None:
        raise ModelFileError("no ONNX model: it has no graph")
    opsets = {one.text(1, "domain"): one.number(2, "version") for one in file.all(8, "opset")}
    functions = {}
    for one in file.all(25, "functions"):
        key = one.text(10, "domain of a function"), one.text(1, "name of a function")
        _need(key not in functions, f"function {key[0]:.80}.{key[1]:.80} is defined twice")
        functions[key] = _nodes(one, 7, 0)
    return OnnxModel(
        file.number(1, "ir_version"),
        {"" if domain == "ai.onnx" else domain: version for domain, version in opsets.items()},
        file.text(2, "producer_name"),
        _graph(graph, 0),
        functions,
        _pairs(file, 14, "metadata_props"),
    )


def _graph(file: WireFields, depth: int) -> Net:
    _need(depth <= MOST_DEPTH, f"a graph is nested more than {MOST_DEPTH} deep")
    _need(15 not in file.fields, "sparse initialisers are not read; store them dense")
    ports = ((11, "input"), (12, "output"), (13, "value_info"))
    return Net(
        _nodes(file, 1, depth),
        tuple(_tensor(one) for one in file.all(5, "initializer")),
        *(tuple(_port(one) for one in file.all(at, what)) for at, what in ports),
    )


def _nodes(file: WireFields, at: int, depth: int) -> tuple[Call, ...]:
    return tuple(_node(one, depth) for one in file.all(at, "node"))


def _node(file: WireFields, depth: int) -> Call:
    op, domain = file.text(4, "op_type"), file.text(7, "domain of a node")
    _need(op != "", "a node has no op_type")
    attributes = {}
    for one in file.all(5, "attribute"):
        name = one.text(1, "name of an attribute")
        _need(name not in attributes, f"{op:.80} has the attribute {name:.80} twice")
        attributes[name] = _attribute(one, depth)
    name, domain = file.text(3, "name of a node"), "" if domain == "ai.onnx" else domain
    inputs, outputs = file.texts(1, "input of a node"), file.texts(2, "output of a node")
    return Call(op, domain, name, tuple(inputs), tuple(outputs), attributes)


def _attribute(file: WireFields, depth: int) -> Attribute:
    real = file.fields.get(2, [b"\0\0\0\0"])[-1]
    if not isinstance(real, bytes) or len(real) != 4:
        raise ModelFileError("a float attribute has not four bytes")
    _need(not {22, 23} & file.fields.keys(), "sparse attributes are not read; store them dense")
    graphs = [*file.all(6, "g"), *file.all(11, "graphs")]
    tensors = [*file.all(5, "t"), *file.all(10, "tensors")]
    _need(all(len(file.fields.get(at, ())) < 2 for at in (5, 6)), "an attribute has two values")
    return Attribute(
        file.number(3, "i"),
        float(struct.unpack("<f", real)[0]),
        tuple(file.numbers(8)),
        tuple(_tensor(one) for one in tensors),
        tuple(_graph(one, depth + 1) for one in graphs),
    )


def _tensor(file: WireFields) -> OnnxTensor:
    name = file.text(8, "name of a tensor")
    type, bits = _type(file.number(2, "data_type"), name)
    dims = tuple(file.numbers(1))
    small = len(dims) <= MOST_RANK and all(dim >= 0 for dim in dims)
    _need(small, f"tensor {name:.80} has the shape {dims[:MOST_RANK]}")
    count = prod(dims)
    _need(count * max(bits, 8) < MOST, f"tensor {name:.80} {list(dims)} has more than 2^63 bits")
    if type == "string":
        return OnnxTensor(
            name, type, dims, sum(32 + len(one) for one in file.bytes(6, "string_data"))
        )
    size = (count * bits + 7) // 8
    sized = f"tensor {name:.80} has {size:,} bytes by its shape, and"
    where = file.number(14, "data_location")
    # Libraries keep the low 32 bits.
    _need(where in (0, 1), f"tensor {name:.80} has the data location {where}; allowed: 0, 1")
    if where == 1:
        place = _pairs(file, 13, "external_data")
        location, offset = place.get("location", ""), place.get("offset", "0")
        decimal = offset.isascii() and offset.isdecimal() and len(offset) < 19
        _need(decimal, f"tensor {name:.80}: offset {offset:.40} in {location:.80}")
        length = place.get("length", str(size))
        _need(length == str(size), f"{sized} {length:.40} in {location:.80}")
        return OnnxTensor(name, type, dims, size, location, int(offset))
    raw = file.bytes(9, "raw_data")
    _need(len(raw) < 2, f"tensor {name:.80} has raw data twice")
    _need(not raw or len(raw[0]) == size, f"{sized} {sum(map(len, raw)):,} are stored")
    # Numbers in typed fields: an element has at least two bits.
    typed = [value for at in (4, 5, 7, 10, 11) for value in file.fields.get(at, ())]
    held = sum(8 if isinstance(value, int) else len(value) for value in typed)
    _need(bool(raw) or count <= 32 * held, f"{sized} {held:,} are stored")
    return OnnxTensor(name, type, dims, size, raw=raw[0] if raw else memoryview(b""))


def _pairs(file: WireFields, at: int, what: str) -> dict[str, str]:
    entries = file.all(at, what)
    return {one.text(1, f"key of {what}"): one.text(2, f"value of {what}") for one in entries}


def _port(file: WireFields) -> Port:
    name = file.text(1, "name of a value")
    type = file.one(2, f"type of {name:.80}")
    tensor = None if type is None else type.one(1, "tensor_type")
    if tensor is None:  # A sequence, a map, an optional value, or undeclared.
        return Port(name, None, None)
    element = _type(tensor.number(1, "elem_type"), name)[0]
    shape = tensor.one(2, f"shape of {name:.80}")
    if shape is None:
        return Port(name, element, None)
    dims: list[Dim] = []
    for one in shape.all(1, "dim"):
        value = one.number(1, "dim_value")
        _need(value >= -1, f"value {name:.80} has a dimension of {value}")
        # Some exporters write 0 or −1 where the size is unknown.
        dims.append(value if value > 0 else one.text(2, "dim_param") or None)
    _need(len(dims) <= MOST_RANK, f"value {name:.80} has {len(dims)} dimensions")
    count = prod(dim for dim in dims if isinstance(dim, int))
    _need(count < MOST // 128, f"value {name:.80} {dims} has more than 2^63 bits")
    return Port(name, element, tuple(dims))


def _type(code: int, name: str) -> tuple[str, int]:
    _need(code in TYPES, f"{name:.80} has the element type {code}, which is not known")
    return TYPES[code]
