"""Parts that run for one item at a time, in slices: a text's encoder, a latent's decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.slices import blocks
from ..kernels.arrays import Array, host, tensor
from ..kernels.backend import Shelf
from ..kernels.cpu.pieces import pieces_of
from ..kernels.in_pieces import NOTHING, InPieces, InterpretedPieces
from ..kernels.operators import KvCache, StepBatch
from .arrays import fp32
from .loading import OpenPart
from .options import Resolved, WorkerOptions
from .part import Part

Floats = npt.NDArray[np.float32]


def run_in_slices(part: Part, units: int, cache: KvCache = NOTHING) -> InPieces:
    """Lower a part for items of at most so many units, once its weights are where they stay."""
    given = part.operators, part.model.graph, part.model.weights
    return pieces_of(*given, units, cache) or InterpretedPieces(*given, cache)


def one_entry(part: Part, tokens: npt.NDArray[np.int64]) -> StepBatch:
    """Return the step of one entry, whose rows see each other."""
    count = len(tokens)
    bounds, lengths = np.array([0, count], np.int32), np.array([count], np.int32)
    arrays: list[Array] = [tokens, np.arange(count), bounds, lengths, np.zeros(0, np.int64)]
    if not part.operators.host:
        arrays = list(map(tensor, arrays))
    ids, places, starts, ends, sampled = arrays
    return StepBatch(ids, places, starts, ends, [], sampled, count, count)


class ItemPart:
    """A loaded part; every item has rows of its own, and nothing of it depends on others."""

    def __init__(
        self,
        opened: OpenPart,
        options: WorkerOptions,
        resolved: Resolved,
        text: Part,
        shelf: Shelf | None,
    ) -> None:
        """Load the weights. It computes with the threads of `text`."""
        given = options, resolved, opened.units
        self.part = Part(opened.graph, opened.source, *given, shelf=shelf, beside=text)
        self._units, self._bounds = opened.units, blocks(opened.graph)
        self._output = opened.graph.outputs["hidden"]
        self._run: InPieces

    def bind(self) -> None:
        """Lower the graph, once the weights are where they stay."""
        self._run = run_in_slices(self.part, self._units)

    def begin(self, tokens: npt.NDArray[np.int64], *rows: Floats) -> Any:
        """Begin an item of so many tokens, with the rows of the graph's inputs."""
        batch = one_entry(self.part, tokens)
        with self.part.inference():
            return self._run.begin(batch, *map(self.part.activations, rows))

    def run(self, item: Any, slices: int) -> None:
        """Compute an item up to its first `slices` slices."""
        with self.part.inference():
            self._run.run(item, self._bounds[slices])

    def rows(self, item: Any) -> Floats:
        """Return the result of an item right after its last slice."""
        found: Floats = host(fp32(self._run.rows(item, self._output))).copy()
        return found
