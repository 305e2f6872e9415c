"""Inspection of a program before any library sees it: what it is, and whether it may be loaded."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..base.errors import DoesNotFit, ModelFileError, OptionError, UnsupportedModel
from . import files
from .onnx import MOST, Call, OnnxModel, Port, description

DOMAINS = ("", "ai.onnx.ml", "com.microsoft")
"""Operators that ONNX Runtime has built in; others come from libraries, which are not loaded."""
REFUSED = {
    "com.microsoft.EPContext": "it names a compiled binary",
    "com.microsoft.PythonOp": "it runs Python",
    "com.microsoft.Snpe": "it names a compiled binary",
    "com.microsoft.Sampling": "it draws numbers that no seed reaches",
    "com.microsoft.BiasDropout": "it draws numbers that no seed reaches",
    "ImageDecoder": "pictures are decoded in a confined process",
}
"""Built-in operators that are not run, and why."""
OLDEST_OPSET = 7
DEEPEST = 64
"""Functions and graphs that may be nested."""
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
ELEMENTS = ("bool", "float16", "float32", "float64", *_INTEGERS)
"""Element types of inputs and outputs, as numpy calls them."""
LOOPS = ("Loop", "Scan")
DRAWN = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
RANDOM = (*DRAWN, "Bernoulli", "Multinomial")
"""Operators that draw numbers; the first can be replaced by inputs."""


_MOST = {"memory": 1 << 50, "nodes": 1 << 50, "seconds": 1_000_000, "load_seconds": 1_000_000}
"""Largest limits: clocks and libraries refuse larger ones, or take them as none."""


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits on one program. What exceeds them is refused before it is allocated or run."""

    memory: int = 4 << 30
    """Bytes of weights, and of values in a run."""
    nodes: int = 100_000
    """Nodes after the model's own functions are put in place."""
    seconds: float = 30.0
    """Time of one run."""
    load_seconds: float = 120.0

    def __post_init__(self) -> None:
        """Raise `OptionError` for a limit that is none."""
        for name, most in _MOST.items():
            if not 0 < getattr(self, name) <= most:
                allowed = f"allowed is more than 0, at most {most:,}"
                raise OptionError(f"{name} is {getattr(self, name)}; {allowed}", param=name)


LIMITS = ProgramLimits()
"""Limits that hold if no others are given."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """An output that feeds an input of the next run. It begins as zeros."""

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
    described: OnnxModel = field(repr=False)
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
        return Counter(node.full for node in self.described.nodes)

    @cached_property
    def weights(self) -> int:
        """Bytes of stored tensors."""
        return sum(tensor.bytes for tensor in self.described.tensors)

    @cached_property
    def states(self) -> tuple[StateTensor, ...]:
        """States found by their names and equal forms."""
        return tuple(_states(self.described))

    @property
    def loops(self) -> int:
        """Number of nodes that may run without end; only the time limit stops them."""
        return sum(self.operators[op] for op in LOOPS)


def inspected(path: Path, limits: ProgramLimits = LIMITS) -> Inspection:
    """Read and check an ONNX file with its external data.

    Raises `InvalidRequest`, `ModelFileError`, `UnsupportedModel`, `DoesNotFit`.
    """
    data = files.read(path)
    files.only_onnx(data, path.name)
    return inspected_bytes(data, path.name, limits, path.parent)


def inspected_bytes(
    data: bytes, name: str, limits: ProgramLimits = LIMITS, folder: Path | None = None
) -> Inspection:
    """Check the bytes of an ONNX file; external data is read below `folder`."""
    try:
        described = description(data)
    except ModelFileError as error:
        raise ModelFileError(f"{name}: {error.message}") from None
    for check in (_operators, _ports, _expanded, _memory):
        check(name, described, limits)
    inner = {id(one) for one in described.tensors} - {id(one) for one in described.graph.tensors}
    for tensor in described.tensors:
        if tensor.location is not None and id(tensor) in inner:
            why = "allowed are initialisers of the main graph"
            raise ModelFileError(f"{name}: tensor {tensor.name:.80} has external data; {why}")
    outside = files.gathered(folder, described.graph.tensors, limits.memory)
    return Inspection(name, data, described, outside)


def _operators(name: str, described: OnnxModel, limits: ProgramLimits) -> None:
    opset = described.opsets.get("")
    if opset is None or opset < OLDEST_OPSET:
        raise UnsupportedModel(f"{name}: opset {opset}; allowed: {OLDEST_OPSET} and later")
    for node in described.nodes:
        if why := REFUSED.get(node.full):  # A function of its name does not take its place.
            raise UnsupportedModel(f"{name}: operator {node.full} is not run: {why}")
        if (node.domain, node.op) in described.functions:
            continue
        if node.domain not in DOMAINS:
            raise UnsupportedModel(
                f"{name}: operator {node.full:.120} needs a library of its own, and none is "
                f"loaded; allowed domains: ai.onnx, {', '.join(DOMAINS[1:])}"
            )


def _ports(name: str, described: OnnxModel, limits: ProgramLimits) -> None:
    if not described.graph.outputs:
        raise ModelFileError(f"{name}: the graph has no output")
    for what, ports in (("input", described.inputs), ("output", described.graph.outputs)):
        names = Counter(port.name for port in ports)
        for port in ports:
            if not port.name or names[port.name] > 1:
                raise ModelFileError(f"{name}: {what} {port.name!r:.80} is unnamed or there twice")
            if port.type not in ELEMENTS:
                raise UnsupportedModel(
                    f"{name}: {what} {port.name:.80} is of {port.type or 'no tensor'} elements; "
                    f"allowed: {', '.join(ELEMENTS)}"
                )


def _expanded(name: str, described: OnnxModel, limits: ProgramLimits) -> None:
    """Count nodes as a library that puts functions in place would have them: ten functions, each
    calling the next ten times, are ten thousand million."""
    counts: dict[tuple[str, str], int] = {}

    def one(node: Call, path: tuple[tuple[str, str] | None, ...]) -> int:
        """`path`: functions that hold the node, None for a graph in a node."""
        key = node.domain, node.op
        if key in path or len(path) > DEEPEST:
            how = "calls itself" if key in path else f"is nested more than {DEEPEST} deep"
            what = "function" if key in described.functions else "node"
            raise ModelFileError(f"{name}: {what} {node.op:.80} {how}")
        graphs = (each for graph in node.graphs() for each in graph.nodes)
        inner = sum(one(each, (*path, None)) for each in graphs)
        if key not in described.functions:
            return inner + 1
        if key not in counts:
            found = sum(one(each, (*path, key)) for each in described.functions[key])
            counts[key] = min(found, MOST)
        return inner + counts[key]

    total = sum(one(node, ()) for node in described.graph.nodes)
    if total > limits.nodes:
        raise UnsupportedModel(f"{name}: {total:,} nodes, at most {limits.nodes:,} are loaded")


def _memory(name: str, described: OnnxModel, limits: ProgramLimits) -> None:
    weights = sum(tensor.bytes for tensor in described.tensors)
    for what, size in (("its weights", weights), *_sizes(described)):
        if size > limits.memory:
            raise DoesNotFit(
                f"{name}: {what:.80} of {size:,} bytes, the limit is {limits.memory:,}"
            )


def _sizes(described: OnnxModel) -> Iterator[tuple[str, int]]:
    """Yield values whose size the file itself tells."""
    for graph in described.graphs:
        stored = {tensor.name: tensor for tensor in graph.tensors}
        for node in graph.nodes:
            value = node.attributes.get("value")
            if node.op == "Constant" and value and value.tensors:
                stored.update(dict.fromkeys(node.outputs[:1], value.tensors[0]))
            shape = stored.get(node.inputs[0]) if node.inputs else None
            if node.op == "ConstantOfShape" and shape is not None:
                yield "a constant", 8 * _product(shape.integers() or [0])
            if node.op in RANDOM and "shape" in node.attributes:
                yield f"the output of {node.op}", 8 * _product(node.attributes["shape"].integers)
        for port in (*graph.inputs, *graph.outputs, *graph.values):
            yield f"value {port.name}", port.bytes


def _product(dims: Iterable[int]) -> int:
    """Multiply sizes, up to `MOST`: the dimensions of a hostile shape have thousands of digits."""
    found = 1
    for dim in dims:
        found = min(found * abs(dim), MOST)
    return found


def _states(described: OnnxModel) -> Iterator[StateTensor]:
    outputs = {port.name: port for port in described.graph.outputs}
    for port in described.inputs:
        name, old = port.name, port.name.removesuffix("_in")
        candidates = [name + end for end in ("N", "n", "_out", "_next")] + [f"{old}_out"]
        candidates += ["new_" + name, "next_" + name, name.replace("past", "present")]
        candidates += ["out_" + name.removeprefix("in_")] * name.startswith("in_")
        free = [at for at, dim in enumerate(port.dims or ()) if not isinstance(dim, int)]
        found = next((one for one in candidates if one in outputs and one != name), None)
        if found is None or len(free) > 1 or not _alike(port, outputs[found]):
            continue
        del outputs[found]
        assert port.type is not None
        assert port.dims is not None
        yield StateTensor(name, found, port.type, port.dims, free[0] if free else None)


def _alike(port: Port, other: Port) -> bool:
    """Whether an output may feed an input: equal types, and no dimension that differs."""
    if port.type != other.type or port.dims is None or other.dims is None:
        return False
    return len(port.dims) == len(other.dims) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int))
        for a, b in zip(port.dims, other.dims, strict=True)
    )
