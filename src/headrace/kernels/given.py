"""Input embeddings of a step that no table has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import Array, tensor


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Input embeddings that come from elsewhere than from the table."""

    places: npt.NDArray[np.int64]
    """[M]: tokens of the step."""
    rows: npt.NDArray[np.float32]
    """[M, D]."""

    def onto(self, x: Array) -> None:
        """Write them into x [N, D], a host array or a tensor."""
        if isinstance(x, np.ndarray):
            x[self.places] = self.rows
        else:
            tensor(x)[tensor(self.places)] = tensor(self.rows).to(x)
