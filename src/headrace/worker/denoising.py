"""Pictures that are drawn: what a step reads of each, and what it leaves of each.

A row keeps its picture and its solver's history from step to step. An entry of a plan is a step of
one picture, and one or two entries of the batch: with guidance the model runs with the picture's
class and without any, and the difference is stretched (Ho and Salimans 2022, arXiv 2207.12598).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.denoising import Denoiser, PictureWish
from ..base.outputs import PictureOutput
from ..base.step import Admission, StepPlan, StepResult
from ..kernels.arrays import Array, host, tensor
from ..kernels.operators import StepBatch
from ..kernels.program import EVERY, Outputs
from ..kernels.ranked import PicturedRows
from .arrays import fp32
from .features import RowWish
from .solvers import Floats, Trajectory, normal, time_features, verify

NAN = "the model's numbers are not finite: it computed NaN for this picture"


class _DrawnRow(NamedTuple):
    """A picture on its way."""

    wish: PictureWish
    path: Trajectory


class Denoising(RowWish[_DrawnRow]):
    """A step of each row that draws, and the pictures that are reported."""

    want = EVERY

    def __init__(self, denoiser: Denoiser, *, tensors: bool) -> None:
        """`tensors`: the batch has torch tensors. Raises `UnsupportedModel`."""
        super().__init__()
        verify(denoiser.solver)
        self._denoiser, self._tensors = denoiser, tensors
        self._shape = denoiser.channels, denoiser.size, denoiser.size

    def wish(self, admission: Admission) -> _DrawnRow | None:
        wish = admission.spec.picture
        if wish is None:
            return None
        draw = partial(normal, admission.spec.seed, wish.choice, shape=self._shape)
        return _DrawnRow(wish, Trajectory(self._denoiser.solver, wish.steps, draw))

    def batch(self, plan: StepPlan) -> StepBatch:
        """Make the batch of a step. A row without a picture, of a step that nobody reads, has an
        empty one."""
        tokens, patches, times, labels = self._denoiser.tokens, [], list[Floats](), list[int]()
        for _, drawn, entries in self._entries(plan):
            if drawn is None:
                given, time, label = np.zeros(self._shape, np.float32), 0.0, 0
            else:
                given, time, label = drawn.path.given(), drawn.path.time, drawn.wish.label
            patches += [self._patches(given)] * entries
            times += [time_features(time)] * entries
            labels += [label, self._denoiser.classes][:entries]
        count = len(labels)
        starts = np.arange(count + 1, dtype=np.int32) * tokens
        return StepBatch(
            tokens=self._array(np.zeros(count * tokens, np.int64)),
            positions=self._array(np.tile(np.arange(tokens), count)),
            query_starts=self._array(starts),
            lengths=self._array(np.full(count, tokens, np.int32)),
            groups=[],
            sample_rows=self._array(starts[:-1].astype(np.int64)),
            max_count=tokens,
            max_length=tokens,
            pictured=PicturedRows(
                np.concatenate(patches), np.stack(times), np.array(labels, np.int64)
            ),
        )

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        """Do a step of each picture with the model's outputs [N, ·]."""
        assert outputs.hidden is not None
        rows, begin, tokens = host(fp32(outputs.hidden)), 0, self._denoiser.tokens
        found = dict(result.outputs or {})
        for entry, drawn, entries in self._entries(plan):
            given = [
                self._picture_of(rows[begin + tokens * each : begin + tokens * (each + 1)])
                for each in range(entries)
            ]
            begin += tokens * entries
            if drawn is None:
                continue
            output = given[0]
            if entries > 1:
                output = given[1] + np.float32(drawn.wish.guidance) * (given[0] - given[1])
            drawn.path.advance(output)
            if not np.isfinite(drawn.path.picture).all():
                result.spoiled[entry] = NAN
            elif drawn.wish.reports(drawn.path.done):
                found[entry] = PictureOutput(drawn.path.picture.tobytes(), drawn.path.done)
        result.outputs = found

    def _entries(self, plan: StepPlan) -> Iterator[tuple[int, _DrawnRow | None, int]]:
        """Yield (entry of the plan, its picture, its entries in the batch)."""
        for entry, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            drawn = self._rows.get(row)
            tokens = self._denoiser.tokens
            yield entry, drawn, max(1, count // tokens) if drawn is None else drawn.wish.entries

    def _patches(self, picture: Floats) -> Floats:
        """Return the numbers of each patch [tokens, channels · patch²]: channel, row, column."""
        channels, size, _ = self._shape
        patch = self._denoiser.patch
        side = size // patch
        cut = picture.reshape(channels, side, patch, side, patch).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(cut).reshape(side * side, -1)

    def _picture_of(self, rows: Floats) -> Floats:
        """Return the picture of rows [tokens, patch² · outputs], without variances."""
        channels, size, _ = self._shape
        patch, outputs = self._denoiser.patch, self._denoiser.outputs
        side = size // patch
        cut = rows.reshape(side, side, patch, patch, outputs).transpose(4, 0, 2, 1, 3)
        return cut.reshape(outputs, size, size)[:channels]

    def _array(self, values: npt.NDArray[np.generic]) -> Array:
        return tensor(values) if self._tensors else values
