"""The pass over the text: segment by segment, its statistic, then its tensors rounded at once.

A tensor is rounded as soon as the statistic of its input is known, and the statistic is dropped:
memory holds one segment's weights and Gram matrices, never the model's. The plan comes first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from ..base.errors import DoesNotFit, InvalidRequest
from ..base.graph import Value, WeightRef
from ..base.hardware import cpu
from ..base.modelfiles import ModelFiles
from ..kernels.prepared import Prepared
from ..loader.gguf_model import rest
from ..loader.prepare import prepare
from ..loader.progress import Progress, Silent
from ..loader.weight_source import WeightSource
from ..loader.weights import load_weights
from ..models.registry import describe
from .folding import Factors, Fold, divided, factors_of
from .imatrix import importance_of
from .passing import RecordingOperators, run_segment
from .segments import GraphSegment, segments
from .solve import SLICE, Floats
from .statistic import Statistic, Windows
from .target import Quantisable, Stats
from .work import WorkFolder

CHUNK = 4096
"""Tokens that go through a segment at a time."""
FEW = 32
"""Rows of an expert below which it is rounded on the inputs of all experts of its mixture."""


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """Bytes of a calibration at its largest segment."""

    weights: int
    grams: int
    values: int
    """Inputs and outputs of the segment for all tokens."""
    chunk: int
    """Values of one chunk."""
    solving: int
    tokens: int
    """Tokens of a chunk."""
    shared: bool
    """Whether experts of a mixture share one Gram matrix: their own would not fit."""

    @property
    def total(self) -> int:
        return self.weights + self.grams + self.values + self.chunk + self.solving


def memory_plan(
    cut: Sequence[GraphSegment],
    tokens: int,
    longest: int,
    limit: int,
    begun: Mapping[str, int] | None = None,
) -> CalibrationPlan:
    """Plan a calibration of `tokens` tokens within `limit` bytes. Raises `DoesNotFit`.

    A chunk has at least one window, of `longest` tokens. `begun`: `chunk` and `shared` of the run
    that goes on.
    """
    if begun:
        shared, chunk = bool(begun["shared"]), begun["chunk"]
        found = [_planned(one, tokens, chunk, 0, shared=shared) for one in cut]
        worst = max(found, key=lambda plan: plan.total)
        if worst.total > limit:
            raise DoesNotFit(
                f"the run was begun with more memory: it needs {worst.total:,} bytes, {limit:,} "
                "are free; free some, or delete its folder",
                param="work",
            )
        return worst
    for shared in (False, True):
        found = [_planned(one, tokens, longest, limit, shared=shared) for one in cut]
        worst = max(found, key=lambda plan: plan.total)
        if worst.total <= limit:
            chunk = min(plan.tokens for plan in found)
            return replace(worst, tokens=chunk)
    raise DoesNotFit(
        f"calibration needs {worst.total:,} bytes of memory, {limit:,} are free; fewer tokens of "
        f"text (now {tokens:,}) need less",
        param="tokens",
    )


def _planned(
    segment: GraphSegment, tokens: int, longest: int, limit: int, *, shared: bool
) -> CalibrationPlan:
    graph = segment.graph
    weights = sum(4 * ref.numbers for ref in graph.weights() if ref.role != "logits")
    inputs: dict[object, int] = {}
    for node in graph.nodes:
        for number, ref in enumerate(node.weights):
            if ref.role in ("linear", "logits"):
                inputs[node.reads[0]] = ref.width
            elif ref.role in ("moe", "heads"):
                copies = 1 if shared and ref.role == "moe" else ref.copies
                inputs |= {(node, number, copy): ref.width for copy in range(copies)}
    grams = sum(4 * width * width for width in inputs.values())
    solving = 12 * max((width * width for width in inputs.values()), default=0) + 16 * SLICE
    kept = [*graph.inputs, *graph.outputs.values()]
    vocabulary = max((ref.out for ref in graph.weights() if ref.role == "logits"), default=0)
    values = 4 * tokens * sum(value.width for value in kept if value.width != vocabulary)
    of_token = 12 * (segment.widest - vocabulary)
    room = limit - weights - grams - values - solving
    chunk = max(longest, min(CHUNK, tokens, room // max(1, of_token)))
    return CalibrationPlan(weights, grams, values, chunk * of_token, solving, chunk, shared)


def calibrate(
    files: ModelFiles,
    windows: Windows,
    targets: Sequence[Quantisable],
    folder: WorkFolder,
    progress: Progress | None = None,
    *,
    memory: int | None = None,
    places: Sequence[Fold] = (),
) -> list[dict[str, Any]]:
    """Run the text through the model and round every target; return what was said of each.

    The bytes of target i are the file `tensor<i>` of the folder. `memory`: bytes, at most; None:
    those that are free. `places`: where factors on input channels may be moved across; those of
    norms are left to the caller (see `vector_factors`). A run that goes on keeps its chunks, and
    whether experts share. Raises `DoesNotFit`, also for another number of threads than it was begun
    with; `InvalidRequest` for an empty text or numbers that are not finite; `ModelFileError`.
    """
    progress = progress or Silent()
    total, longest = sum(map(len, windows)), max(map(len, windows), default=0)
    if total < 2:
        raise InvalidRequest(
            f"the text has {total} tokens; calibration needs at least 2", param="text"
        )
    cut = segments(describe(files.arch))
    threads = blas_threads()
    if folder.plan.get("threads", threads) != threads:
        raise DoesNotFit(
            f"the run was begun with {folder.plan['threads']} threads, now numpy's library has "
            f"{threads} threads: give it as many (OPENBLAS_NUM_THREADS), or delete the folder",
            param="work",
        )
    plan = memory_plan(cut, total, longest, memory or cpu().available, folder.plan)
    folder.plan = {"chunk": plan.tokens, "shared": plan.shared, "threads": threads}
    values = _resumed(folder, cut, total)
    waiting = {
        number: one for number, one in enumerate(targets) if not folder.has(f"tensor{number}")
    }
    progress.start(total * len(cut), "calibrating", share=True)
    progress.advance(total * folder.done)
    try:
        for number, segment in enumerate(cut):
            if number < folder.done:
                continue
            with _Passing(files, segment, plan, longest) as passing:
                values = passing.run(windows, values, progress.advance)
                ready = [at for at, one in waiting.items() if passing.reaches(one)]
                factors = _fold(folder, places, [waiting[at] for at in ready], passing.statistics)
                said = [
                    _encoded(folder, at, waiting.pop(at), passing.statistics, factors)
                    for at in ready
                ]
            _commit(folder, number, cut, values, said)
            rest(files)
    finally:
        progress.done()
    return without_text(targets, folder)


def without_text(
    targets: Sequence[Quantisable],
    folder: WorkFolder,
    known: Callable[[Quantisable], Stats] = lambda one: [None] * len(one.names),
) -> list[dict[str, Any]]:
    """Round the targets that no text has reached; return what was said of each target.

    `known`: statistics of a target that come from elsewhere.
    """
    said = [
        _written(folder, at, one, known(one))
        for at, one in enumerate(targets)
        if not folder.has(f"tensor{at}")
    ]
    if said:
        folder.commit(folder.done, said, ())
    order = {one.file_name: number for number, one in enumerate(targets)}
    return sorted(folder.record, key=lambda one: order[one["tensor"]])


def blas_threads() -> int:
    """Return the number of threads of numpy's library; the usable cores if it does not say."""
    library = ctypes.CDLL(import_module("numpy.linalg._umath_linalg").__file__)
    for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads"):
        if asked := getattr(library, name, None):
            return int(asked())
    return cpu().cores


class _Passing:
    """One segment with its weights, and the statistics of what it computed."""

    def __init__(
        self, files: ModelFiles, segment: GraphSegment, plan: CalibrationPlan, longest: int
    ) -> None:
        self._segment, self._plan = segment, plan
        self._recording = RecordingOperators(shared=plan.shared)
        source = WeightSource(load_weights(files, {*segment.graph.tensors()}))
        self._weights: Prepared = prepare(
            segment.graph, source, self._recording, device="cpu", dtype="float32",
            max_context=longest,
        ).weights  # fmt: skip
        self.statistics: dict[str, tuple[Statistic | None, bool]] = {}
        """By canonical name: the statistic, and whether it is the whole mixture's because the
        expert saw few rows."""

    def __enter__(self) -> _Passing:
        return self

    def __exit__(self, *_: object) -> None:
        self.statistics, self._weights = {}, Prepared()
        self._recording.watch((), self._weights)

    def run(
        self, windows: Windows, values: Mapping[Value, Floats], advance: Callable[[int], None]
    ) -> dict[Value, Floats]:
        """Return the segment's outputs, and the inputs that later segments read too."""
        total = sum(map(len, windows))
        kept = [v for v in self._segment.graph.outputs.values() if v.width]
        found: dict[Value, Floats] = {}
        before = 0
        for done, outputs in run_segment(
            self._segment, self._weights, self._recording, windows, values, self._plan.tokens
        ):
            for value in kept:
                if outputs[value].shape[1] != value.width:
                    continue  # Logits, which are not computed.
                room = found.setdefault(value, np.empty((total, value.width), np.float32))
                room[before:done] = outputs[value]
            advance(done - before)
            before = done
        self.statistics = _with_few(self._segment.products, self._recording.found)
        return {**values, **found}

    def reaches(self, target: Quantisable) -> bool:
        return any(name in self.statistics for name in target.names)


def _with_few(
    products: Sequence[WeightRef], found: Mapping[str, Statistic]
) -> dict[str, tuple[Statistic | None, bool]]:
    """Give experts that saw few rows the statistic of all experts of their mixture."""
    made: dict[str, tuple[Statistic | None, bool]] = {
        name: (one, False) for name, one in found.items()
    }
    for ref in products:
        if ref.role != "moe":
            continue
        copies = [ref.copy(number).names for number in range(ref.copies)]
        counts = [found[names[0]].count if names[0] in found else 0 for names in copies]
        if min(counts) >= FEW:
            continue
        every = Statistic.empty(ref.width)
        for one in {
            id(found[names[0]]): found[names[0]] for names in copies if names[0] in found
        }.values():
            every.count += one.count
            every.gram += one.gram
            np.maximum(every.top, one.top, out=every.top)
        for names, count in zip(copies, counts, strict=True):
            if count < FEW:
                made |= dict.fromkeys(names, (every, True))
    return made


def _fold(
    folder: WorkFolder,
    places: Sequence[Fold],
    ready: Sequence[Any],
    statistics: Mapping[str, tuple[Statistic | None, bool]],
) -> dict[str, Factors]:
    """Choose factors at the places whose readers are all ready; return those of each target by its
    name."""
    mine = {name: one for one in ready for name in one.names}
    found = {one.file_name: Factors() for one in ready}
    for number, place in enumerate(places):
        readers = [mine.get(name) for name in place.readers]
        statistic = statistics.get(place.readers[0], (None, False))[0]
        maker = None if place.rows is None else mine.get(place.rows)
        whole = maker is not None and maker.names == (place.rows,)
        if statistic is None or None in readers or not (place.vectors or whole):
            continue
        each = {id(one): one for one in readers}.values()
        factors = factors_of(statistic, [one for one in each if one is not None])
        seen = divided(statistic, factors)
        for one in each:
            mixed = found[one.file_name]  # type: ignore[union-attr]
            mixed.columns, mixed.seen = factors, seen
        if maker is not None:
            found[maker.file_name].rows = factors
        folder.write(f"factors{number}", [factors])
    return found


def _encoded(
    folder: WorkFolder,
    number: int,
    target: Quantisable,
    statistics: Mapping[str, tuple[Statistic | None, bool]],
    factors: Mapping[str, Factors],
) -> dict[str, Any]:
    pairs = [statistics.get(name, (None, False)) for name in target.names]
    some = [one for one, _ in pairs]
    said = _written(folder, number, target, some, factors[target.file_name])
    few = [name for name, (_, few) in zip(target.names, pairs, strict=True) if few]
    return said | ({"few": few} if few else {})


def _written(
    folder: WorkFolder,
    number: int,
    target: Quantisable,
    stats: Stats,
    factors: Factors | None = None,
) -> dict[str, Any]:
    """Round a target, and keep the importance of its inputs; return what is said of it."""
    seen = None if factors is None else factors.seen
    arrays, said = target.encode(stats if seen is None else [seen] * len(stats), factors)
    folder.write(f"tensor{number}", arrays)
    counts: list[int] = []
    if importance := importance_of(stats, target.matrices):
        folder.write(f"importance{number}", [importance.sums])
        counts = importance.counts.tolist()
    return {"tensor": target.file_name, **said, "counts": counts}


def _names_of(cut: Sequence[GraphSegment], number: int) -> Iterator[tuple[str, Value]]:
    """Yield the file and the value of all that segments after `number` read."""
    made = [value for one in cut[: number + 1] for value in one.graph.outputs.values()]
    read = {value for one in cut[number + 1 :] for value in one.graph.inputs}
    for at, value in enumerate(made):
        if value in read:
            yield f"values{at}", value


def _commit(
    folder: WorkFolder,
    number: int,
    cut: Sequence[GraphSegment],
    values: dict[Value, Floats],
    said: list[dict[str, Any]],
) -> None:
    names = dict(_names_of(cut, number))
    for name, value in names.items():
        if not folder.has(name):
            folder.write(name, [values[value]])
    for value in [one for one in values if one not in names.values()]:
        del values[value]
    folder.commit(number + 1, said, names)


def _resumed(folder: WorkFolder, cut: Sequence[GraphSegment], total: int) -> dict[Value, Floats]:
    """Return the values that the finished segments left."""
    if not folder.done:
        return {}
    return {
        value: folder.array(name, np.float32).reshape(total, value.width)
        for name, value in _names_of(cut, folder.done - 1)
    }
