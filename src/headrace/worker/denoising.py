"""Pictures that are drawn: what a step reads of each, and what it leaves of each.

A row keeps its picture and its solver's history from step to step. An entry of a plan is one phase
of a picture: a slice of a text is encoded, a step done, or a slice of the picture decoded. A step
is one or two entries of the batch: with guidance the model runs with the picture's class or text
and without any, and the difference is stretched (Ho and Salimans 2022, arXiv 2207.12598).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.denoising import Denoiser, Phase, PictureWish
from ..base.outputs import PictureOutput
from ..base.step import Admission, StepPlan, StepResult
from ..kernels.arrays import Array, host, tensor
from ..kernels.operators import StepBatch
from ..kernels.program import EVERY, Outputs
from ..kernels.ranked import PicturedRows
from .arrays import fp32
from .features import RowWish
from .items import ItemPart
from .solvers import Floats, Trajectory, normal, time_features, verify

NAN = "the model's numbers are not finite: it computed NaN for this picture"


@dataclass(slots=True)
class _DrawnText:
    """A text, encoded for all pictures of its tenant that are on their way."""

    tokens: tuple[int, ...]
    item: Any
    done: int = 0
    """Slices that are computed."""
    rows: Floats | None = None
    """[tokens, hidden], once all are."""


@dataclass(slots=True)
class _DrawnRow:
    """A picture on its way."""

    wish: PictureWish
    tenant: str
    path: Trajectory
    phases: list[Phase]
    texts: list[_DrawnText] = field(default_factory=list)
    decoded: Any = None
    """The item of the decoder, from its first slice to its last."""


class Denoising(RowWish[_DrawnRow]):
    """A step of each row that draws, and the pictures that are reported."""

    want = EVERY

    def __init__(self, denoiser: Denoiser, parts: Mapping[str, ItemPart], *, tensors: bool) -> None:
        """`tensors`: the batch has torch tensors. Raises `UnsupportedModel`."""
        super().__init__()
        self._parts = parts
        verify(denoiser.solver)
        self._denoiser, self._tensors = denoiser, tensors
        self._shape = denoiser.channels, denoiser.size, denoiser.size
        self._numbers = denoiser.channels * denoiser.patch**2
        width = 0 if denoiser.reads is None else denoiser.reads.hidden
        self._empty = np.zeros((min(1, width), width), np.float32)

    def wish(self, admission: Admission) -> _DrawnRow | None:
        wish = admission.spec.picture
        if wish is None:
            return None
        draw = partial(normal, admission.spec.seed, wish.choice, shape=self._shape)
        path = Trajectory(self._denoiser.solver, wish.steps, draw)
        return _DrawnRow(wish, admission.tenant, path, self._denoiser.phases(wish))

    def batch(self, plan: StepPlan) -> StepBatch:
        """Make the batch of the pictures that do a step. A row without a picture, of a step that
        nobody reads, has an empty one."""
        tokens, late = self._denoiser.tokens, 1 - bool(self._denoiser.reads)
        features = self._denoiser.features
        patches, times = [np.zeros((0, self._numbers), np.float32)], list[Floats]()
        labels, texts = list[int](), [self._empty[:0]]
        for _, drawn, entries in self._entries(plan):
            if drawn is None:
                given, time, label = np.zeros(self._shape, np.float32), 0.0, 0
                texts += [self._empty] * entries
            else:
                given, time, label = drawn.path.given(), drawn.path.time, drawn.wish.label
                texts += [one.rows for one in drawn.texts[:entries] if one.rows is not None]
            patches += [self._patches(given)] * entries
            times += [time_features(time, late, features)] * entries
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
                np.concatenate(patches),
                np.stack(times) if times else np.zeros((0, features), np.float32),
                np.array(labels, np.int64),
                np.concatenate(texts),
                np.cumsum([len(one) for one in texts], dtype=np.int32),
            ),
        )

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        """Do a step of each picture with the model's outputs [N, ·], and the other phases."""
        assert outputs.hidden is not None
        found, bare = dict(result.outputs or {}), self._denoiser.decoder is None
        stepped = [(*one, bare) for one in self._stepped(plan, host(fp32(outputs.hidden)))]
        decoded = [(*one, True) for one in self._done_else(plan)]
        for entry, drawn, picture, finished in stepped + decoded:
            if not np.isfinite(picture).all():
                result.spoiled[entry] = NAN
            elif finished and drawn.wish.reports(drawn.path.done):
                found[entry] = PictureOutput(picture.tobytes(), drawn.path.done)
        result.outputs = found

    def _stepped(self, plan: StepPlan, rows: Floats) -> Iterator[tuple[int, _DrawnRow, Floats]]:
        """Do steps; yield (entry of the plan, its picture, the latent)."""
        begin, tokens = 0, self._denoiser.tokens
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
            yield entry, drawn, drawn.path.picture

    def _done_else(self, plan: StepPlan) -> Iterator[tuple[int, _DrawnRow, Floats]]:
        """Do the other phases; yield (entry of the plan, its picture, the pixels) of each that is
        decoded."""
        for entry, drawn, (phase, at) in self._phases(plan):
            if drawn is None or phase == "step":
                continue
            if phase == "text":
                self._encode(drawn, at)
            elif (pixels := self._decoded(drawn, at)) is not None:
                yield entry, drawn, pixels

    def _encode(self, drawn: _DrawnRow, at: int) -> None:
        """Encode a slice of a text, unless another picture of the tenant was faster."""
        part, reads = self._parts["texts"], self._denoiser.reads
        assert reads is not None
        number, piece = divmod(at, reads.slices)
        if number == len(drawn.texts):
            drawn.texts.append(self._text(drawn, drawn.wish.texts[number]))
        text = drawn.texts[number]
        if piece < text.done:
            return
        part.run(text.item, piece + 1)
        text.done = piece + 1
        if text.done == reads.slices:
            text.rows, text.item = part.rows(text.item), None

    def _text(self, drawn: _DrawnRow, tokens: tuple[int, ...]) -> _DrawnText:
        """Find a text among those of the tenant's pictures, or begin it."""
        for other in self._rows.values():
            if other.tenant == drawn.tenant:
                for known in other.texts:
                    if known.tokens == tokens:
                        return known
        return _DrawnText(tokens, self._parts["texts"].begin(np.array(tokens, np.int64)))

    def _decoded(self, drawn: _DrawnRow, at: int) -> Floats | None:
        """Decode a slice of a picture; return it after the last one."""
        part, decoder = self._parts["decoder"], self._denoiser.decoder
        assert decoder is not None
        if not at:
            latent = drawn.path.picture / np.float32(decoder.scaling) + np.float32(decoder.shift)
            rows = latent.reshape(len(latent), -1).T
            places = np.arange(len(rows))
            drawn.decoded = part.begin(places, np.ascontiguousarray(rows))
        part.run(drawn.decoded, at + 1)
        if at + 1 < decoder.slices:
            return None
        picture = part.rows(drawn.decoded).T.reshape(self._denoiser.shape)
        drawn.decoded = None
        return np.ascontiguousarray(picture)

    def _entries(self, plan: StepPlan) -> Iterator[tuple[int, _DrawnRow | None, int]]:
        """Yield (entry of the plan, its picture, its entries in the batch) of those that do a
        step."""
        for entry, drawn, (phase, _) in self._phases(plan):
            if drawn is None:
                yield entry, drawn, max(1, plan.counts[entry] // self._denoiser.tokens)
            elif phase == "step":
                yield entry, drawn, drawn.wish.entries

    def _phases(self, plan: StepPlan) -> Iterator[tuple[int, _DrawnRow | None, Phase]]:
        """Yield (entry of the plan, its picture, what it does): its units are those of a phase."""
        for entry, row in enumerate(plan.rows):
            drawn = self._rows.get(row)
            at = plan.starts[entry] // plan.counts[entry]
            yield entry, drawn, ("step", 0) if drawn is None else drawn.phases[at]

    def _patches(self, picture: Floats) -> Floats:
        """Return the numbers of each patch [tokens, channels · patch²]: channel, row, column."""
        channels, size, _ = self._shape
        patch = self._denoiser.patch
        side = size // patch
        cut = picture.reshape(channels, side, patch, side, patch).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(cut).reshape(side * side, -1)

    def _picture_of(self, rows: Floats) -> Floats:
        """Return the picture of rows [tokens, patch² · outputs], without variances, in memory of
        its own: the next step overwrites the rows, and solvers keep outputs."""
        channels, size, _ = self._shape
        patch, outputs = self._denoiser.patch, self._denoiser.outputs
        side = size // patch
        cut = rows.reshape(side, side, patch, patch, outputs).transpose(4, 0, 2, 1, 3)
        return cut.reshape(outputs, size, size)[:channels].copy()

    def _array(self, values: npt.NDArray[np.generic]) -> Array:
        return tensor(values) if self._tensors else values
