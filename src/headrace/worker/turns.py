"""Positions of the tokens of a prompt with pictures: those by which ropes with axes turn them
(M-RoPE), and the last that each of them sees.

A text's tokens have one position on all axes (time, row, column). A picture's have one time, and
the row and column of their place in its grid; the text after it goes on after the longer side of
the grid (Wang et al. 2024, section 2.1). The grids of a video all begin at one position. Its time
does not move the text after it, as transformers 5.24 reads prompts; there a generated token still
counts the time (`rope_deltas`), as text did before (transformers pull request 35569), but here a
token has one position, generated or read again. A picture's tokens may see each other (Gemma 3).
All of it follows from the prompt's spans, so it is the same after a preemption, behind a prefix
that was found, and in every chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..base.spec import InputSpan

AXES = 3


def reach_of(spans: Sequence[InputSpan], start: int, count: int) -> npt.NDArray[np.int64] | None:
    """Return `StepBatch.reach` [count] of the tokens from `start` on; None if none of them sees
    beyond itself."""
    found: npt.NDArray[np.int64] | None = None
    for span in spans:
        low, high = max(span.first, start), min(span.end, start + count)
        if span.mutual and low < high - 1:
            assert high == span.end, "one step computes tokens that see each other"
            found = np.arange(start, start + count) if found is None else found
            found[low - start : high - start] = high - 1
    return found


def turns_of(spans: Sequence[InputSpan], start: int, count: int) -> npt.NDArray[np.int64]:
    """Return [3, count]: the positions of the tokens from `start` on. Spans without a grid count as
    text."""
    places = np.arange(start, start + count)
    found = np.broadcast_to(places, (AXES, count)).copy()
    saved = 0
    """Positions that pictures before have saved."""
    for span in spans:
        if not span.columns:
            continue
        longer = max(span.columns, span.length // span.columns)
        begin, after = span.first - saved - (longer if span.follows else 0), span.end
        if after > start and span.first < start + count:
            inside = slice(max(0, span.first - start), min(count, after - start))
            row, column = np.divmod(places[inside] - span.first, span.columns)
            found[:, inside] = np.stack([0 * row + span.time, row, column]) + begin
        saved += span.length - (0 if span.follows else longer)
        later = slice(min(count, max(0, after - start)), None)
        found[:, later] = places[later] - saved
    return found
