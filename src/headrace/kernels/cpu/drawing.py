"""Tokens from logits by the library: see `kernels.sampling` for the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import host_sampling
from ..arrays import tensor
from ..draws import Drawing, DrawParameters
from . import emit
from .library import Team
from .records import HEADER, HrStep

_ROW: np.dtype[Any] = np.dtype(HEADER.struct("HrDrawRow"))


def drawing(team: Team) -> Drawing:
    """Return a draw on a thread pool; rows beyond its capacity are drawn in numpy. Logits may be
    tensors, if the forward pass cannot be recorded; then tokens are tensors, too."""

    def draw(logits: npt.NDArray[np.float32], parameters: DrawParameters) -> npt.NDArray[np.int64]:
        count, vocab = logits.shape
        rows = np.empty(count, _ROW)
        for name in ("temperature", "min_p", "top_p", "uniform"):
            rows[name] = getattr(parameters, name)
        rows["top_k"] = np.minimum(parameters.top_k, 2**31 - 1)
        tokens = np.empty(count, np.int64)
        op = emit.record("DRAW", emit.matrix(logits), rows, tokens, vocab, count)
        team.run(emit.program([op]), 1, HrStep())
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
