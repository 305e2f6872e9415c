"""Rows of a program: which dimension counts them, and how they are joined and split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .inspection import State
from .onnx import Port

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether rows of one shape may go together."""

    count: int
    together: bool
    reason: str
    alone_ns: int = 0
    """Nanoseconds of the rows one by one, and of all at once; 0 if the bits already differ."""
    joined_ns: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimension of each input and output that counts rows; None for what rows must share."""

    inputs: dict[str, int | None]
    outputs: dict[str, int]

    @classmethod
    def of(
        cls, inputs: Sequence[Port], outputs: Sequence[Port], states: Sequence[State]
    ) -> Rows | str:
        """Find the dimensions: of a state the free one, else the first if it is free."""
        kept = {one.input: one.axis for one in states} | {one.output: one.axis for one in states}

        def axis(port: Port) -> int | None:
            if port.name in kept:
                return kept[port.name]
            return 0 if port.dims and not isinstance(port.dims[0], int) else None

        taken = {port.name: axis(port) for port in inputs}
        given = {port.name: axis(port) for port in outputs}
        if all(one is None for one in taken.values()):
            return "every input has a fixed first dimension: one row"
        found: dict[str, int] = {}
        for name, at in given.items():
            if at is None:
                return f"output {name} has no dimension that counts rows"
            found[name] = at
        return cls(taken, found)

    def shared_alike(self, feeds: Sequence[Feed]) -> bool:
        """Whether the inputs without rows are equal bit for bit."""
        return all(
            feed[name].tobytes() == feeds[0][name].tobytes()
            for name, axis in self.inputs.items()
            if axis is None
            for feed in feeds[1:]
        )


def join(feeds: Sequence[Feed], rows: Rows) -> dict[str, Array]:
    """Put rows behind each other; inputs without rows are the first one's."""
    return {
        name: feeds[0][name] if axis is None else np.concatenate([one[name] for one in feeds], axis)
        for name, axis in rows.inputs.items()
    }


def split(outputs: Feed, rows: Rows, count: int) -> list[dict[str, Array]] | str:
    """Take outputs apart, or tell why they cannot be."""
    parts: list[dict[str, Array]] = [{} for _ in range(count)]
    for name, value in outputs.items():
        axis = rows.outputs[name]
        if value.ndim <= axis or value.shape[axis] % count or not value.shape[axis]:
            return f"output {name} is {list(value.shape)} for {count} rows"
        for part, one in zip(parts, np.split(value, count, axis), strict=True):
            part[name] = one
    return parts


def varied(inputs: Feed, rows: Rows, seed: int) -> dict[str, Array]:
    """Return inputs of the same form with the sample's own values in another order; seed 0: as
    they are."""
    draw = np.random.default_rng(seed)
    return {
        name: draw.permuted(value.reshape(-1)).reshape(value.shape)
        if seed and rows.inputs[name] is not None
        else value
        for name, value in inputs.items()
    }
