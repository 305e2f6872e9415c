"""How many drafts a step verifies: as many as give the most tokens for its time.

A draft is worth its chance to be accepted with all before it; it costs what one more row makes a
step longer. Both change with the text, the batch and the minute, so both are measured: the chances
come with the drafts, and a step's seconds are a prediction corrected by what such steps took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base.drafted import Verified
from ..base.step import Drafting, StepPlan, StepResult
from ..speculate import MODEL

MEMORY = 0.1
"""Share of the newest step in what is known of steps about as large."""
FORGOTTEN = 100
"""Steps after which half of that is forgotten: a slow moment must not stand for ever."""
MOST = 100.0
"""Steps of a size that are counted at most: more would take as long to forget as they took."""
TRUST = 2.0
"""Steps of a size after which their own times count as much as those of the size below."""
OUTLIER = 2.0
"""A step that took so many times what was expected says no more than one that took this."""
MARGIN = 1.05
"""A step with drafts must promise so much more than one without: whoever drafts gets ahead, all
others wait for the longer step, and what is expected is not known to a few per cent."""
LEAST = 0.2
"""What a row adds to a step of one row at least, until steps show that it is less. A machine that
others use looks as if it waited for its memory only, so that rows seem to cost nothing; too dear a
guess is soon corrected, since what is as good as sure is verified at this price, too."""

EACH, APART = 16, 8
"""Numbers of tokens up to which each is predicted, and of tokens between two predictions beyond:
on a line, to 0.2 % (default model), since a prediction takes the better part of a millisecond."""


def least(tokens: int) -> float:
    """What a step of so many tokens takes at least, that of one row being 1, before any ran."""
    return 1 - LEAST + LEAST * tokens


@dataclass(slots=True)
class _Knot:
    """What steps of about so many tokens took over what was predicted."""

    ratio: float
    seen: float
    """Steps, each by how near to the knot it was, fading."""
    last: int
    """Number of the last of them."""


class StepPrices:
    """Expected seconds of a step by its tokens, all of which give a token of an answer.

    What steps took over what was predicted is kept at powers of two and read between them by line:
    a batch that drafts has hardly two steps of one size, so each must tell of its neighbours.
    """

    def __init__(self, predict: Callable[[int], float]) -> None:
        """`predict`: seconds of a step of so many tokens. Only how it grows matters."""
        self._predict = predict
        self._predicted: dict[int, float] = {}
        self._knots: dict[int, _Knot] = {}
        """By exponent."""
        self._steps = 0

    @property
    def known(self) -> bool:
        """Has a step been observed? Until then only ratios of `seconds` mean anything."""
        return bool(self._knots)

    def seconds(self, tokens: int) -> float:
        """Expect so long of a step of so many tokens, as steps are now."""
        return self.rising(tokens, tokens)[0]

    def rising(self, least: int, most: int) -> list[float]:
        """`seconds` of each number of tokens from `least` to `most`; a knot is read once for all,
        since thirty sequences have two hundred drafts ready, and no step waits for their sum."""
        places = range(least.bit_length() - 1, most.bit_length() + 1)
        knots = {place: self._ratio(place) for place in places}
        found = []
        for tokens in range(least, most + 1):
            low, part = _between(tokens)
            ratio = knots[low] + part * (knots[low + 1] - knots[low])
            found.append(self._prior(tokens) * ratio)
        return found

    def observe(self, tokens: int, seconds: float) -> None:
        """Note what a step of so many tokens took, without chunks: their tokens have no head."""
        if seconds <= 0:
            return
        self._steps += 1
        expected = self.seconds(tokens) if self._knots else seconds
        ratio = min(seconds, OUTLIER * expected) / self._prior(tokens)
        low, part = _between(tokens)
        for place, weight in ((low, 1 - part), (low + 1, part)):
            if not weight:
                continue
            knot = self._knots.setdefault(place, _Knot(ratio, 0.0, self._steps))
            knot.seen = min(weight + knot.seen * self._faded(knot), MOST)
            knot.last = self._steps
            knot.ratio += weight * max(MEMORY, min(1.0, 1 / knot.seen)) * (ratio - knot.ratio)

    def _ratio(self, place: int) -> float:
        """A knot's ratio, which leans on the next smaller one of which something is known; that of
        the smallest on the next larger: who always drafts runs no small steps, and one slow moment
        among the last of them would make all drafts look free."""
        knots = self._knots
        if not knots:
            return 1.0
        base = max((one for one in knots if one < place), default=None)
        own = knots.get(place)
        if own is None:
            return self._ratio(base) if base is not None else knots[min(knots)].ratio
        if base is None:
            above = min((one for one in knots if one > place), default=place)
            lean = knots[above].ratio
        else:
            lean = self._ratio(base)
        seen = own.seen * self._faded(own)
        return (TRUST * lean + seen * own.ratio) / (TRUST + seen)

    def _faded(self, knot: _Knot) -> float:
        """What is left of what was known."""
        return float(0.5 ** ((self._steps - knot.last) / FORGOTTEN))

    def _prior(self, tokens: int) -> float:
        found = self._predicted.get(tokens)
        if found is None:
            past = tokens % APART if tokens > EACH else 0
            if past:
                low = self._prior(tokens - past)
                found = low + past / APART * (self._prior(tokens - past + APART) - low)
            else:
                found = self._predict(tokens)
            self._predicted[tokens] = found
        return found


def _between(tokens: int) -> tuple[int, float]:
    """(exponent of the power of two at or below `tokens`, share of the way to the next)"""
    low = tokens.bit_length() - 1
    return low, tokens / (1 << low) - 1


def paying(running: int, prices: StepPrices) -> float:
    """The least chance of a draft, of so many sequences one each, at which a step verifies them;
    above 1 it never does."""
    return MARGIN * prices.seconds(2 * running) / prices.seconds(running) - 1


class DraftCounts:
    """What came of drafts since the start, as `StepStats` has it."""

    def __init__(self) -> None:
        self.totals = (0, 0, 0)
        """`drafts`, `draft_tokens` and `accepted_tokens`."""
        self.costs: tuple[float, float] | None = None
        """The latest of a draft model."""

    def drafting(self, told: Drafting | None) -> float:
        """Seconds that a step's drafts took, where a model made some."""
        if told is None:
            return 0.0
        self.costs = told.costs
        return told.seconds

    def note(
        self,
        tokens: int,
        decodes: int,
        verified: dict[int, Verified],
        prices: StepPrices | None,
        drafting: float = 0.0,
    ) -> None:
        """Count what a step of `tokens` and so many decodes verified, and price it.

        Drafts cost what they made the step longer, each row alike; those of a draft model also the
        seconds of `drafting`. Each that was accepted saves its sequence a step of the decodes
        alone.
        """
        drafts, tried, accepted = self.totals
        rows = sum(one.tried for one in verified.values())
        step = row = 0.0
        if prices is not None and prices.known:
            step = prices.seconds(decodes)
            row = max(0.0, prices.seconds(tokens) - prices.seconds(tokens - rows)) / rows
        made = sum(one.tried for one in verified.values() if one.drafter == MODEL)
        for entry, one in verified.items():
            each = row + (drafting / made if one.drafter == MODEL else 0.0)
            verified[entry] = one._replace(spent=each * one.tried, saved=step * one.accepted)
            accepted += one.accepted
        self.totals = drafts + len(verified), tried + rows, accepted


def computed(plan: StepPlan, result: StepResult) -> int:
    """Tokens that a step computed: with two steps in flight fewer drafts may have been ready than
    were planned."""
    verified = result.verified or {}
    return plan.tokens - plan.drafts + sum(one.tried for one in verified.values())


def draft_lengths(
    survivals: Sequence[bytes],
    tokens: int,
    room: int,
    prices: StepPrices | None,
    making: Sequence[float] = (),
) -> list[int]:
    """How many drafts of each sequence a step of `tokens` others verifies, `room` together.

    `survivals`: of each sequence the chance (of 255) of each draft that is ready to be accepted
    with all before it. Prompts' tokens and decodes are sure, so they count as 1: the step that
    gives most expected tokens a second is taken, and none of the drafts where that gives less than
    `MARGIN` times what a step without gives. Without `prices` every draft is verified.

    `making`: the seconds that it takes to make one more draft of a sequence, 0 where they are
    there. Those are made one behind the other and for all sequences together, so a step is longer
    by its deepest. Where some are to be made, a step without these is considered, too.
    """
    # By chance, and for equal ones by depth: so each sequence's drafts stay in their order.
    slots = sorted(
        (-chance, depth, place)
        for place, chances in enumerate(survivals)
        for depth, chance in enumerate(chances)
    )
    if prices is None:
        return _lengths(slots[: max(room, 0)], survivals)
    seconds = prices.rising(tokens, tokens + min(len(slots), max(room, 0)))
    best, chosen = MARGIN * tokens / seconds[0], slots[:0]
    dear = max(making, default=0.0)
    there = [slot for slot in slots if not making[slot[2]]] if dear else slots
    for some in (there, slots) if dear else (there,):
        expected, deepest = float(tokens), 0
        for count, (chance, depth, place) in enumerate(some[: max(room, 0)], 1):
            expected -= chance / 255
            if dear and making[place]:
                deepest = max(deepest, depth + 1)
            rate = expected / (seconds[count] + deepest * dear)
            if rate > best:
                best, chosen = rate, some[:count]
    return _lengths(chosen, survivals)


def _lengths(chosen: Sequence[tuple[int, int, int]], survivals: Sequence[bytes]) -> list[int]:
    """How many of the chosen drafts are of each sequence."""
    lengths = [0] * len(survivals)
    for _, _, place in chosen:
        lengths[place] += 1
    return lengths
