"""How many drafts a step verifies: as many as give the most tokens for its time.

A draft is worth its chance to be accepted with all before it; it costs what one more row makes a
step longer. Both change with the text, the batch and the minute, so both are measured: the chances
come with the drafts, and a step's seconds are a prediction corrected by what such steps took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MEMORY = 0.1
"""Share of the newest step in what is known of steps of its size."""
FORGOTTEN = 500
"""Steps after which half of that is forgotten: a slow moment must not stand for ever."""
TRUST = 4.0
"""Steps of a size after which their own times count as much as those of all sizes."""
OUTLIER = 2.0
"""A step that took so many times what was expected says no more than one that took this."""


class StepPrices:
    """Expected seconds of a step by its tokens."""

    def __init__(self, predict: Callable[[int], float]) -> None:
        """`predict`: seconds of a step of so many tokens that sample. Only how it grows matters."""
        self._predict = predict
        self._predicted: dict[int, float] = {}
        self._ratio = 0.0
        """What steps took over what was predicted; 0: nothing was seen."""
        self._own: dict[int, tuple[float, float, int]] = {}
        """Tokens → (the same of such steps, how many were seen, the number of the last)."""
        self._steps = 0

    def seconds(self, tokens: int) -> float:
        """Expect so long of a step of so many tokens, as steps are now."""
        overall = self._ratio or 1.0
        ratio, seen, last = self._own.get(tokens, (overall, 0.0, 0))
        seen *= self._faded(last)
        return self._prior(tokens) * (TRUST * overall + seen * ratio) / (TRUST + seen)

    def observe(self, tokens: int, seconds: float) -> None:
        """Note that a step of so many tokens took so long."""
        if seconds <= 0:
            return
        self._steps += 1
        expected = self.seconds(tokens) if self._ratio else seconds
        ratio = min(seconds, OUTLIER * expected) / self._prior(tokens)
        before, seen, last = self._own.get(tokens, (ratio, 0.0, self._steps))
        seen = 1 + seen * self._faded(last)
        share = max(MEMORY, 1 / seen)
        self._own[tokens] = before + share * (ratio - before), seen, self._steps
        self._ratio += (MEMORY if self._ratio else 1.0) * (ratio - self._ratio)

    def _faded(self, last: int) -> float:
        """What is left of what was known at step `last`."""
        return float(0.5 ** ((self._steps - last) / FORGOTTEN))

    def _prior(self, tokens: int) -> float:
        found = self._predicted.get(tokens)
        if found is None:
            found = self._predicted[tokens] = self._predict(tokens)
        return found


class DraftCounts:
    """What came of drafts since the start, as `StepStats` has it."""

    def __init__(self) -> None:
        self.totals = (0, 0, 0)
        """`drafts`, `draft_tokens` and `accepted_tokens`."""

    def note(self, counts: Sequence[int], tokens: Sequence[list[int]]) -> None:
        """Count the decodes, which stand first in a step: their tokens, and what each gave."""
        drafts, tried, accepted = self.totals
        for count, new in zip(counts, tokens, strict=False):
            if count > 1 and new:
                drafts, tried, accepted = drafts + 1, tried + count - 1, accepted + len(new) - 1
        self.totals = drafts, tried, accepted


def draft_lengths(
    survivals: Sequence[bytes], tokens: int, room: int, prices: StepPrices | None
) -> list[int]:
    """How many drafts of each sequence a step of `tokens` others verifies, `room` together.

    `survivals`: of each sequence the chance (of 255) of each draft that is ready to be accepted
    with all before it. Prompts' tokens and decodes are sure, so they count as 1: the step that
    gives most expected tokens a second is taken, without any draft if that is the one. Without
    `prices` every draft is verified.
    """
    # By chance, and for equal ones by depth: so each sequence's drafts stay in their order.
    slots = sorted(
        (-chance, depth, place)
        for place, chances in enumerate(survivals)
        for depth, chance in enumerate(chances)
    )[: max(room, 0)]
    most = len(slots)
    if prices is not None:
        expected = float(tokens)
        best, most = expected / prices.seconds(tokens), 0
        for count, (chance, _, _) in enumerate(slots, 1):
            expected -= chance / 255
            rate = expected / prices.seconds(tokens + count)
            if rate > best:
                best, most = rate, count
    lengths = [0] * len(survivals)
    for _, _, place in slots[:most]:
        lengths[place] += 1
    return lengths
