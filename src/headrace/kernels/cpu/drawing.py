"""Tokens from logits by the library: see `kernels.sampling` for the definitions."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import host_sampling
from ..arrays import tensor
from ..draws import Drawing, DrawParameters
from . import emit, records
from .library import Team
from .records import HrDraw, HrDrawRow, HrStep

_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("uniform", np.float64),
    ]
)
"""`HrDrawRow`."""
assert _ROW.itemsize == ctypes.sizeof(HrDrawRow)


def drawing(team: Team) -> Drawing:
    """Return a draw on a thread pool; rows beyond its room are drawn in numpy. Logits may be
    tensors, from a forward pass that cannot be recorded; tokens are tensors then."""

    def draw(logits: npt.NDArray[np.float32], parameters: DrawParameters) -> npt.NDArray[np.int64]:
        count, vocab = logits.shape
        assert logits.dtype == np.float32
        assert logits.strides[1] == logits.itemsize
        rows = np.empty(count, _ROW)
        for name in ("temperature", "min_p", "top_p", "uniform"):
            rows[name] = getattr(parameters, name)
        rows["top_k"] = np.minimum(parameters.top_k, 2**31 - 1)
        tokens = np.empty(count, np.int64)
        op = HrDraw(
            logits.ctypes.data,
            logits.strides[0] // logits.itemsize,
            rows.ctypes.data,
            tokens.ctypes.data,
            vocab,
            count,
        )
        team.run(emit.program([(records.DRAW, op)]), 1, HrStep())
        left = np.flatnonzero(tokens < 0)
        if len(left):
            some = DrawParameters(
                **{name: getattr(parameters, name)[left] for name in DrawParameters.__slots__}
            )
            tokens[left] = host_sampling.draw(logits[left], some)
        return tokens

    def drawn(logits: Any, parameters: DrawParameters) -> Any:
        if isinstance(logits, np.ndarray):
            return draw(logits, parameters)
        return tensor(
            draw(
                np.asarray(logits),
                DrawParameters(
                    **{n: np.asarray(getattr(parameters, n)) for n in DrawParameters.__slots__}
                ),
            )
        )

    def argmax(logits: Any) -> Any:
        found = host_sampling.argmax(np.asarray(logits))
        return found if isinstance(logits, np.ndarray) else tensor(found)

    return Drawing(drawn, argmax)
