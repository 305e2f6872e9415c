"""Tokens from logits by the library: see `kernels.sampling` for what is computed."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from ..sampling import REFERENCE, Drawing, DrawParameters
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
    """The draw on a team of threads; what it has no room for goes to the reference."""

    def draw(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
        count, vocab = logits.shape
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        rows = np.empty(count, _ROW)
        for name in ("temperature", "min_p", "top_p", "uniform"):
            rows[name] = getattr(parameters, name).numpy()
        rows["top_k"] = np.minimum(parameters.top_k.numpy(), 2**31 - 1)
        tokens = np.empty(count, np.int64)
        op = HrDraw(
            logits.data_ptr(), logits.stride(0), rows.ctypes.data, tokens.ctypes.data, vocab, count
        )
        team.run(emit.program([(records.DRAW, op)]), 1, HrStep())
        left = np.flatnonzero(tokens < 0)
        if len(left):
            index = torch.from_numpy(left)
            some = DrawParameters(
                **{name: getattr(parameters, name)[index] for name in DrawParameters.__slots__}
            )
            tokens[left] = REFERENCE.draw(logits[index], some).numpy()
        return torch.from_numpy(tokens)

    return Drawing(draw, REFERENCE.argmax)
