"""Rows of a program: which dimension counts them, and how they are joined and split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from .inspection import ELEMENTS, StateTensor
from .onnx import Port

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]
KINDS = {name: np.dtype(name) for name in ELEMENTS}
NAMES = {kind: name for name, kind in KINDS.items()}
"""Element types by name, and back; a type's own name takes numpy microseconds."""
MOST_RANK = 32
MOST_SIZE = 2**31
"""Sizes of a tensor from a client are below it."""


def fitting(ports: Mapping[str, Port], inputs: Feed) -> dict[str, Array]:
    """Return a program's inputs as the library takes them. Raises `InvalidRequest`."""
    if inputs.keys() != ports.keys():
        strange = sorted(inputs.keys() - ports.keys())
        missing = [name for name in ports if name not in inputs]
        raise InvalidRequest(
            f"input {strange[0]!r:.80} is not known; the inputs are: {', '.join(ports)}"
            if strange
            else f"input {missing[0]!r:.80} is missing",
            param="inputs",
        )
    return {name: _fitting(port, inputs[name]) for name, port in ports.items()}


def _fitting(port: Port, value: Array) -> Array:
    """Return an input in one piece. Raises `InvalidRequest`."""
    if not isinstance(value, np.ndarray) or NAMES.get(value.dtype) != port.type:
        given = getattr(value, "dtype", type(value).__name__)
        why = f"is {given}; it takes {port.type}"
    elif port.dims is not None and (
        len(port.dims) != value.ndim
        or any(
            isinstance(want, int) and want != size
            for want, size in zip(port.dims, value.shape, strict=True)
        )
    ):
        why = f"has the shape {list(value.shape)}; it takes {port}"
    elif value.flags.c_contiguous and value.flags.aligned:
        return value
    else:  # A tensor of a binary request begins at any byte of its body.
        return np.require(value, requirements=["C", "A"]).reshape(value.shape)
    raise InvalidRequest(f"input {port.name:.80} {why}", param="inputs")


@dataclass(frozen=True, slots=True)
class RowAxes:
    """Dimension of each input and output that counts rows; None for what rows must share."""

    inputs: dict[str, int | None]
    outputs: dict[str, int]

    @classmethod
    def of(
        cls, inputs: Sequence[Port], outputs: Sequence[Port], states: Sequence[StateTensor]
    ) -> RowAxes | str:
        """Find the dimensions: of a state the free one, else the first if it is free."""
        kept = {name: one.axis for one in states for name in (one.input, one.output)}

        def axis(port: Port) -> int | None:
            first = port.dims[0] if port.dims else 1
            return kept.get(port.name, None if isinstance(first, int) else 0)

        taken, given = ({port.name: axis(port) for port in ports} for ports in (inputs, outputs))
        if all(one is None for one in taken.values()):
            return "every input has a fixed first dimension: one row"
        for name, at in given.items():
            if at is None:
                return f"output {name} has no dimension that counts rows"
        return cls(taken, {name: at for name, at in given.items() if at is not None})

    def shared_alike(self, feeds: Sequence[Feed]) -> bool:
        """Whether the inputs without rows are equal bit for bit."""
        shared = [name for name, axis in self.inputs.items() if axis is None]
        return all(
            one[name].tobytes() == feeds[0][name].tobytes() for name in shared for one in feeds
        )


def join(feeds: Sequence[Feed], rows: RowAxes) -> dict[str, Array]:
    """Put rows behind each other; inputs without rows are the first one's."""
    return {
        name: feeds[0][name] if axis is None else np.concatenate([one[name] for one in feeds], axis)
        for name, axis in rows.inputs.items()
    }


def split(outputs: Feed, rows: RowAxes, count: int) -> list[dict[str, Array]] | str:
    """Take outputs apart, or tell why they cannot be."""
    parts: list[dict[str, Array]] = [{} for _ in range(count)]
    for name, value in outputs.items():
        axis = rows.outputs[name]
        if value.ndim <= axis or value.shape[axis] % count or not value.shape[axis]:
            return f"output {name} is {list(value.shape)} for {count} rows"
        for part, one in zip(parts, np.split(value, count, axis), strict=True):
            part[name] = one
    return parts


def varied(inputs: Feed, rows: RowAxes, seed: int) -> dict[str, Array]:
    """Return inputs of the same form with other values; seed 0: as they are."""
    draw = np.random.default_rng(seed)
    moved = [name for name, axis in rows.inputs.items() if seed and axis is not None]
    return {**inputs, **{name: _moved(inputs[name], draw) for name in moved}}


def _moved(value: Array, draw: np.random.Generator) -> Array:
    """Return the values in another order; where all are one, normal numbers, or integers from 0 to
    it, at least to 1."""
    flat = value.ravel()
    if not flat.size:
        return value
    first = flat[0]
    if (flat == first).all():
        if value.dtype.kind == "f":
            return draw.standard_normal(value.shape).astype(value.dtype)
        most = min(max(1, int(first)), 2**62)
        found = draw.integers(0, most, flat.shape, endpoint=True).astype(value.dtype)
        found[0] = 0 if first else 1
        return found.reshape(value.shape)
    other = draw.permuted(flat)
    return np.where((other == flat).all(), np.roll(flat, 1), other).reshape(value.shape)


def alike(feeds: Sequence[Feed], rows: RowAxes) -> str:
    """Name an input that counts rows and has the same bits in all of them; empty if none has."""
    for name, axis in rows.inputs.items():
        if axis is not None and len({feed[name].tobytes() for feed in feeds}) == 1:
            return name
    return ""


def differs(alone: Feed, together: Feed) -> str:
    """Name the output whose bits differ, and by how much; empty if none does."""
    for name, value in alone.items():
        other = together[name]
        if value.shape != other.shape:
            return f"output {name} is {list(other.shape)} instead of {list(value.shape)}"
        if value.tobytes() != other.tobytes():
            with np.errstate(invalid="ignore"):
                most = np.abs(value.astype(np.float64) - other.astype(np.float64)).max()
            return f"output {name} differs by {most:.1e}"
    return ""
