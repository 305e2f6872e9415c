"""Inspection of a program before any library sees it: what it is, and whether it may be loaded."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

from ..base.errors import DoesNotFit, ModelFileError, UnsupportedModel
from . import files
from .onnx import Description, Node, Port, description

DOMAINS = ("", "ai.onnx.ml", "com.microsoft")
"""Operators that ONNX Runtime has built in; others come from libraries, which are not loaded."""
REFUSED = {
    "com.microsoft.EPContext": "it names a compiled binary",
    "com.microsoft.PythonOp": "it runs Python",
    "com.microsoft.Snpe": "it names a compiled binary",
    "ImageDecoder": "pictures are decoded in a confined process",
}
"""Built-in operators that are not run, and why."""
OLDEST_OPSET = 7
ELEMENTS = frozenset(
    {"bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"}
    | {"uint8", "uint16", "uint32", "uint64"}
)
"""Element types of inputs and outputs, as numpy calls them."""
LOOPS = ("Loop", "Scan")
RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
    | {"Bernoulli", "Multinomial"}
)
_STATE_MARKS = (
    ("", "N"),
    ("", "n"),
    ("", "_out"),
    ("", "_next"),
    ("_in", "_out"),
    ("in_", "out_"),
    ("past_", "present_"),
    ("past", "present"),
    ("", "new_"),
    ("", "next_"),
)
"""Beginnings or ends of a state's input and output, between which the names are equal."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on one program. What exceeds them is refused before it is allocated or run."""

    memory: int = 4 << 30
    """Bytes of weights, and of values in a run."""
    nodes: int = 100_000
    """Nodes after the model's own functions are put in place."""
    seconds: float = 30.0
    """Time of one run."""
    load_seconds: float = 120.0


LIMITS = Limits()
"""What holds if nothing else is said."""


@dataclass(frozen=True, slots=True)
class State:
    """A state tensor: an output that feeds an input of the next run. It begins as zeros."""

    input: str
    output: str
    type: str
    dims: tuple[int | str | None, ...]
    axis: int | None
    """Dimension that counts rows; None if the state has none."""


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection."""

    name: str
    data: bytes = field(repr=False)
    described: Description = field(repr=False)
    outside: dict[str, bytes] = field(repr=False)
    """External data by location."""

    @cached_property
    def sha256(self) -> str:
        """Digest of the file, and of its external data in the order of their names."""
        digest = hashlib.sha256(self.data)
        for name in sorted(self.outside):
            digest.update(self.outside[name])
        return digest.hexdigest()

    @cached_property
    def operators(self) -> Counter[str]:
        return Counter(node.full for node in self.described.nodes())

    @cached_property
    def weights(self) -> int:
        """Bytes of stored tensors."""
        return sum(tensor.bytes for tensor in self.described.tensors())

    @cached_property
    def states(self) -> tuple[State, ...]:
        """States found by their names and equal forms."""
        return tuple(_states(self.described))

    @property
    def loops(self) -> int:
        """Number of nodes that may run without end; only the time limit stops them."""
        return sum(self.operators[op] for op in LOOPS)


def inspected(path: Path, limits: Limits = LIMITS) -> Inspection:
    """Read and check an ONNX file with its external data.

    Raises `InvalidRequest`, `ModelFileError`, `UnsupportedModel`, `DoesNotFit`.
    """
    data = files.read(path)
    if files.kind(data, path.name) != "onnx":
        raise UnsupportedModel(f"{path.name} is a torch.export archive, which is no ONNX file")
    return inspected_bytes(data, path.name, limits, path.parent)


def inspected_bytes(
    data: bytes, name: str, limits: Limits = LIMITS, folder: Path | None = None
) -> Inspection:
    """Check the bytes of an ONNX file; external data is read below `folder`."""
    try:
        described = description(data)
    except ModelFileError as error:
        raise ModelFileError(f"{name}: {error.message}") from None
    for check in (_operators, _ports, _expanded, _memory):
        check(name, described, limits)
    return Inspection(
        name, data, described, files.gathered(folder, [*described.tensors()], limits.memory)
    )


def _operators(name: str, described: Description, limits: Limits) -> None:
    opset = described.opsets.get("", described.opsets.get("ai.onnx"))
    if opset is None or opset < OLDEST_OPSET:
        raise UnsupportedModel(f"{name}: opset {opset}; allowed: {OLDEST_OPSET} and later")
    own = described.functions
    for node in described.nodes():
        if (node.domain, node.op) in own:
            continue
        if node.domain not in DOMAINS:
            raise UnsupportedModel(
                f"{name}: operator {node.full:.120} needs a library of its own, and none is "
                f"loaded; allowed domains: ai.onnx, {', '.join(DOMAINS[1:])}"
            )
        if node.full in REFUSED:
            raise UnsupportedModel(f"{name}: operator {node.full} is not run: {REFUSED[node.full]}")


def _ports(name: str, described: Description, limits: Limits) -> None:
    if not described.graph.outputs:
        raise ModelFileError(f"{name}: the graph has no output")
    for what, ports in (("input", described.inputs), ("output", described.graph.outputs)):
        seen = set()
        for port in ports:
            if not port.name or port.name in seen:
                raise ModelFileError(f"{name}: {what} {port.name!r:.80} is unnamed or there twice")
            seen.add(port.name)
            if port.type not in ELEMENTS:
                raise UnsupportedModel(
                    f"{name}: {what} {port.name:.80} is of {port.type or 'no tensor'} elements; "
                    f"allowed: {', '.join(sorted(ELEMENTS))}"
                )


def _expanded(name: str, described: Description, limits: Limits) -> None:
    """Count nodes as a library that puts functions in place would have them: a function that
    calls two others twice, 30 times over, is a billion."""
    counts: dict[tuple[str, str], int] = {}

    def size(key: tuple[str, str], path: frozenset[tuple[str, str]]) -> int:
        if key in path:
            raise ModelFileError(f"{name}: function {key[1]:.80} calls itself")
        if len(path) > 64:
            raise ModelFileError(f"{name}: functions are nested more than 64 deep")
        if key not in counts:
            counts[key] = sum(one(node, path | {key}) for node in described.functions[key])
        return counts[key]

    def one(node: Node, path: frozenset[tuple[str, str]]) -> int:
        inner = sum(one(each, path) for graph in node.graphs() for each in graph.nodes)
        key = node.domain, node.op
        return inner + (size(key, path) if key in described.functions else 1)

    total = sum(one(node, frozenset()) for node in described.graph.nodes)
    if total > limits.nodes:
        raise UnsupportedModel(f"{name}: {total:,} nodes, at most {limits.nodes:,} are loaded")


def _memory(name: str, described: Description, limits: Limits) -> None:
    weights = sum(tensor.bytes for tensor in described.tensors())
    if weights > limits.memory:
        raise DoesNotFit(f"{name}: {weights:,} bytes of weights, the limit is {limits.memory:,}")
    for what, size in _sizes(described):
        if size > limits.memory:
            raise DoesNotFit(
                f"{name}: {what:.80} has {size:,} bytes, the limit is {limits.memory:,}"
            )


def _sizes(described: Description) -> Iterator[tuple[str, int]]:
    """Yield values whose size the file itself tells."""
    for graph in described.graphs():
        stored = {tensor.name: tensor for tensor in graph.tensors}
        for node in graph.nodes:
            for attribute in node.attributes.values():
                if node.op == "Constant" and attribute.name == "value" and attribute.tensors:
                    stored.update(dict.fromkeys(node.outputs[:1], attribute.tensors[0]))
            shape = stored.get(node.inputs[0]) if node.inputs else None
            if node.op == "ConstantOfShape" and shape is not None:
                yield "a constant", 8 * prod(shape.integers() or [0])
            if node.op in RANDOM and "shape" in node.attributes:
                yield f"the output of {node.op}", 8 * prod(node.attributes["shape"].integers)
        for port in (*graph.inputs, *graph.outputs, *graph.values):
            yield f"value {port.name}", port.bytes


def _states(described: Description) -> Iterator[State]:
    outputs = {port.name: port for port in described.graph.outputs}
    for port in described.inputs:
        for ours, theirs in _STATE_MARKS:
            for name in _renamed(port.name, ours, theirs):
                found = outputs.get(name)
                if found is not None and _alike(port, found):
                    del outputs[name]
                    yield _state(port, found)
                    break
            else:
                continue
            break


def _renamed(name: str, ours: str, theirs: str) -> Iterable[str]:
    if ours.endswith("_") or theirs.endswith("_"):  # Beginnings.
        return [theirs + name.removeprefix(ours)] if name.startswith(ours) else []
    if ours == "past":
        return [name.replace(ours, theirs)] if ours in name else []
    return [name.removesuffix(ours) + theirs] if name.endswith(ours) else []


def _alike(port: Port, other: Port) -> bool:
    """Whether an output may feed an input: equal types, no dimension that differs, one free."""
    if port.type != other.type or port.dims is None or other.dims is None:
        return False
    if sum(not isinstance(dim, int) for dim in port.dims) > 1:
        return False
    return len(port.dims) == len(other.dims) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int))
        for a, b in zip(port.dims, other.dims, strict=True)
    )


def _state(port: Port, output: Port) -> State:
    assert port.type is not None
    assert port.dims is not None
    free = [at for at, dim in enumerate(port.dims) if not isinstance(dim, int)]
    return State(port.name, output.name, port.type, port.dims, free[0] if free else None)
