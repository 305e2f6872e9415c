"""Composition of a step, reduced to the sums that every operator's cost is linear in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..base.arch import Cross, ModelArch
from ..base.step import StepPlan


class Attended(NamedTuple):
    """Work of attention in one layer of one window."""

    pairs: int
    """Σ over queries of the positions each sees."""
    kv_tokens: int
    """Σ over entries of the cached positions that any of its queries sees."""
    decoded: int = 0
    """The part seen by entries of one token with a past: as many pairs as positions."""

    def parts(self, step: Composition) -> tuple[tuple[Attended, int, int], ...]:
        """Return (work, tokens, entries) of the decoding entries and of the others; empty unless a
        step has both."""
        if not 0 < step.decodes < step.entries:
            return ()
        rest = Attended(self.pairs - self.decoded, self.kv_tokens - self.decoded)
        own = Attended(self.decoded, self.decoded)
        return (
            (own, step.decodes, step.decodes),
            (rest, step.tokens - step.decodes, step.entries - step.decodes),
        )


NOTHING = Attended(0, 0)


@dataclass(slots=True)
class Composition:
    """One step: N tokens of B entries with R sampled rows."""

    tokens: int
    entries: int
    samples: int
    decodes: int
    """Entries of one token with a past."""
    attended: dict[int | None, Attended]
    """Work of attention by window; None is full attention."""
    across: Attended = NOTHING
    """Work of attention to encoded inputs."""

    @property
    def kind(self) -> str:
        """decode, prefill or mixed."""
        if self.decodes == self.entries:
            return "decode"
        return "prefill" if self.decodes == 0 else "mixed"


def visible_pairs(start: int, count: int, window: int | None) -> int:
    """Return Σ over positions p = start … start + count - 1 of min(p + 1, window)."""
    return _triangle(start + count, window) - _triangle(start, window)


def visible_tokens(start: int, count: int, window: int | None) -> int:
    """Count the positions that the queries at start … start + count - 1 see together."""
    first = 0 if window is None else max(0, start + 1 - window)
    return start + count - first


def compose(
    arch: ModelArch,
    starts: Sequence[int],
    counts: Sequence[int],
    samples: int | None = None,
    inputs: Sequence[int] = (),
) -> Composition:
    """Compute the sums of a step; `samples` defaults to one per entry. `inputs`: positions of each
    entry's encoded input, by default as many as it may have."""
    windows: set[int | None] = set(arch.windows) if arch.windows else {None}
    entries = len(counts)
    if len(starts) != entries:
        raise ValueError(f"{len(starts)} starts for {entries} counts")
    # Most entries of most steps are single tokens: these are summed without a loop of Python's.
    pieces: list[tuple[int, int]] = []
    if counts.count(1) < entries:
        pieces = [(starts[at], count) for at, count in enumerate(counts) if count != 1]
    begun = [start for start, _ in pieces]
    first = starts.count(0) - begun.count(0)
    """Entries of one token without a past."""
    attended: dict[int | None, Attended] = {}
    for window in windows:
        seen = _seen(starts, window) - _seen(begun, window)
        pairs = seen + sum(visible_pairs(start, count, window) for start, count in pieces)
        cached = seen + sum(visible_tokens(start, count, window) for start, count in pieces)
        attended[window] = Attended(pairs, cached, seen - first)
    return Composition(
        tokens=sum(counts),
        entries=entries,
        samples=entries if samples is None else samples,
        decodes=entries - len(pieces) - first,
        attended=attended,
        across=Attended(0, 0)
        if arch.cross is None
        else _across(arch.cross, starts, counts, inputs),
    )


def _across(
    cross: Cross, starts: Sequence[int], counts: Sequence[int], inputs: Sequence[int]
) -> Attended:
    """Compute the work of attention in which each token of an entry sees its whole input."""
    entries = zip(starts, counts, inputs or [cross.rows] * len(counts), strict=True)
    pairs = seen = decoded = 0
    for start, count, rows in entries:
        pairs += count * rows
        seen += rows
        decoded += rows * (count == 1 and start > 0)
    return Attended(pairs, seen, decoded)


def _seen(starts: Sequence[int], window: int | None) -> int:
    """Count the positions that single tokens at `starts` see, each for itself."""
    if window is not None and starts and max(starts) >= window:
        return sum([min(start + 1, window) for start in starts])
    return sum(starts) + len(starts)


def compose_plan(arch: ModelArch, plan: StepPlan, inputs: Sequence[int] = ()) -> Composition:
    """See `compose`."""
    return compose(arch, plan.starts, plan.counts, sum(plan.samples) + plan.drafts, inputs)


def decode_step(arch: ModelArch, batch: int, context: int) -> Composition:
    """Compose a step of `batch` sequences that each compute the token after `context` others."""
    return compose(arch, [context] * batch, [1] * batch)


def verify_step(arch: ModelArch, batch: int, context: int, drafts: int) -> Composition:
    """Compose speculation: `batch` sequences verify `drafts` tokens each plus the next one."""
    each = 1 + drafts
    return compose(arch, [context] * batch, [each] * batch, batch * each)


def prefill_step(arch: ModelArch, lengths: Iterable[int], start: int = 0) -> Composition:
    """Compose prompts (or chunks from `start`) of these lengths in one step."""
    counts = list(lengths)
    return compose(arch, [start] * len(counts), counts)


def _triangle(count: int, window: int | None) -> int:
    if window is None or count <= window:
        return count * (count + 1) // 2
    return window * (window + 1) // 2 + (count - window) * window
