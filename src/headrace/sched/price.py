"""The number of drafts that a step verifies: the one that gives the most tokens for its time.

A draft's value is the chance that it is accepted with all before it. Its cost is the time that one
more row adds to the step. Both change with the text, the batch and the minute, so both are
measured. The chances come with the drafts; a step's seconds are a prediction corrected by what such
steps took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base.drafted import Verified
from ..base.step import DraftCosts, Drafting, StepPlan, StepResult
from ..speculate import MODEL

MEMORY = 0.1
"""Weight of the newest step, or draft, in an average of times."""
READING = 0.5
"""Weight of the newest reading of a part that drafts: readings are rare."""
RETRIED = 0.002
"""Share of the costs of drafts that each step without any forgets."""
FORGOTTEN = 100
"""Half-life of that average in steps: a slow moment must not count for ever."""
MOST = 100.0
"""Most steps of a size that are counted: more would take as long to forget as they took."""
TRUST = 2.0
"""Steps of a size after which their own times count as much as those of the size below."""
OUTLIER = 2.0
"""A step longer than this multiple of the expected time counts as this multiple."""
MARGIN = 1.05
"""Least gain that a step with drafts must promise over one without. A sequence that drafts gets
ahead, but all others wait for the longer step, and expectations are off by a few per cent."""
MOST_TOKENS, ALL_TOKENS = 1 << 14, 1 << 62
"""Bound of the search for tokens that a step has time for; no bound."""
LEAST = 0.2
"""Least time that a row adds to a step of one row, until steps show that it is less. A machine
shared with others looks memory-bound, so rows seem to cost nothing. Too high a guess is soon
corrected, since almost certain drafts are verified at this price, too."""

EACH, APART = 16, 8
"""Number of tokens up to which each is predicted, and the spacing of predictions beyond,
interpolated linearly: exact to 0.2 % (default model). A prediction takes the better part of a
millisecond."""


def least(tokens: int) -> float:
    """Return the least time of a step of `tokens`, that of one row being 1, before any ran."""
    return 1 - LEAST + LEAST * tokens


@dataclass(slots=True)
class _Knot:
    """The times of steps of about this number of tokens, relative to the prediction."""

    ratio: float
    seen: float
    """Number of these steps, each weighted by its nearness to the knot, fading."""
    last: int
    """Number of the last of them."""


class StepPrices:
    """Expected seconds of a step by its tokens; each of them yields a token of an answer.

    The ratio of real to predicted time is kept at powers of two and interpolated linearly. A batch
    that drafts hardly has two steps of one size, so each must inform its neighbours.
    """

    def __init__(self, predict: Callable[[int], float]) -> None:
        """`predict`: tokens of a step → its seconds. Only how it grows matters."""
        self._predict = predict
        self._predicted: dict[int, float] = {}
        self._knots: dict[int, _Knot] = {}
        """By exponent."""
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether a step has been observed. Until then only ratios of `seconds` mean anything."""
        return bool(self._knots)

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds of a step of `tokens`, as steps are now."""
        return self.rising(tokens, tokens)[0]

    def rising(self, least: int, most: int) -> list[float]:
        """Return `seconds` of each number of tokens from `least` to `most`, reading each knot once.
        Thirty sequences have two hundred drafts ready, and no step waits for their sum."""
        places = range(least.bit_length() - 1, most.bit_length() + 1)
        knots = {place: self._ratio(place) for place in places}
        found = []
        for tokens in range(least, most + 1):
            low, part = _between(tokens)
            ratio = knots[low] + part * (knots[low + 1] - knots[low])
            found.append(self._prior(tokens) * ratio)
        return found

    def observe(self, tokens: int, seconds: float) -> None:
        """Note the seconds of a step of `tokens` without chunks: tokens of chunks have no head."""
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
        """Return a knot's ratio, shrunk towards the next smaller known one; the smallest leans on
        the next larger. An engine that always drafts never measures small steps; one outlier among
        the last of them would make all drafts look free."""
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
        """Return the share of a knot's knowledge that has not faded."""
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
    """Return (exponent of the power of two at or below `tokens`, share of the way to the next)."""
    low = tokens.bit_length() - 1
    return low, tokens / (1 << low) - 1


def paying(running: int, prices: StepPrices) -> float:
    """Return the least chance of a draft at which a step verifies one for each of `running`
    sequences; above 1 it never does."""
    return MARGIN * prices.seconds(2 * running) / prices.seconds(running) - 1


class DraftCounts:
    """Counts of drafts and their outcomes since the start, as in `StepStats`."""

    def __init__(self) -> None:
        self.totals = (0, 0, 0)
        """`drafts`, `draft_tokens` and `accepted_tokens`."""
        self.costs: DraftCosts | None = None
        """Running costs of the part that drafts; None: there is none."""
        self._step = 0.0
        """Recent seconds of a step without them."""

    @property
    def making(self) -> float:
        """Seconds of one more draft of each sequence, if the part that drafts makes it."""
        return 0.0 if self.costs is None else self.costs.draft * self._step

    def learn(self, told: Drafting, seconds: float, *, decodes: bool) -> None:
        """Learn from the part that drafts in a step of `seconds`. `decodes`: the step computed
        nothing but decodes and drafts."""
        draft, read = self.costs or told.estimate
        if decodes:
            passed = seconds - told.seconds
            self._step += (MEMORY if self._step else 1.0) * (passed - self._step)
        if self._step > 0 and told.depth:
            draft += MEMORY * (told.making / told.depth / self._step - draft)
        else:
            # A part that was too expensive once is tried again.
            draft += RETRIED * (told.estimate.draft - draft)
        if self._step > 0 and told.read:
            reading = told.seconds - told.making
            read += READING * (reading / told.read / self._step - read)
        self.costs = DraftCosts(draft, read)

    def note(
        self,
        tokens: int,
        decodes: int,
        verified: dict[int, Verified],
        prices: StepPrices | None,
        drafting: float = 0.0,
    ) -> None:
        """Count what a step of `tokens` with `decodes` decodes verified, and price it.

        Drafts cost the time that they added to the step, each row alike; those of a draft model
        also the seconds of `drafting`. Each accepted draft saves its sequence a step of the decodes
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
    """Return the tokens that a step computed: with two steps in flight fewer drafts may have been
    ready than planned."""
    verified = result.verified or {}
    return plan.tokens - plan.drafts + sum(one.tried for one in verified.values())


def draft_lengths(
    survivals: Sequence[bytes],
    tokens: int,
    room: int,
    prices: StepPrices | None,
    making: Sequence[float] = (),
) -> list[int]:
    """Choose how many drafts of each sequence a step of `tokens` others verifies, `room` together.

    `survivals`: per sequence, for each ready draft, its chance (of 255) to be accepted with all
    before it. Tokens of prompts and decodes are certain, so they count as 1. The step with the most
    expected tokens a second is chosen. It verifies no draft if that gives less than `MARGIN` times
    the rate of a step without drafts. Without `prices` every draft is verified.

    `making`: seconds to make one more draft of a sequence, 0 if they are there. Those are made one
    after the other and for all sequences together, so the deepest determines how much longer a step
    is. If some are to be made, a step without these is considered, too.
    """
    # By chance, then by depth: so each sequence's drafts stay in their order.
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
    """Return the number of chosen drafts of each sequence."""
    lengths = [0] * len(survivals)
    for _, _, place in chosen:
        lengths[place] += 1
    return lengths


def tokens_that_fit(prices: StepPrices, decodes: int, seconds: float) -> int:
    """Return the most tokens of prompts, at least `FEWEST`, that fit next to `decodes` into a step
    of `seconds`."""
    low, high = FEWEST, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if prices.seconds(decodes + middle) <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


STEP_SECONDS, ALONE_SECONDS, WHOLE_SECONDS = 0.05, 0.25, 0.1
"""Most seconds of a step that computes slices of another part: while text is decoded, whose readers
wait for the step; without any, when only new requests wait; and where nobody waits for single
tokens: fewer, larger steps decode more at once."""
LONGER = 2.0
"""Most seconds of such a step next to decodes, as a multiple of theirs."""
FEWEST = 16
"""Tokens of prompts that such a step may compute however long they take."""


class MixedPrices:
    """Expected seconds of text and of slices, and the work of both that a step has time for."""

    def __init__(self, text: Callable[[int], float], slices: Callable[[int], float]) -> None:
        """`text`: tokens of a step → seconds; `slices`: units of an input times slices → seconds.
        Both are a first guess, which steps correct."""
        self._text, self._slices = StepPrices(text), StepPrices(slices)

    def room(self, decodes: int) -> float:
        """Return the seconds of a step with slices and so many decodes, which are read one by one.
        A slice longer than that has a step all the same."""
        if not decodes:
            return ALONE_SECONDS
        return min(STEP_SECONDS, LONGER * self._text.seconds(decodes))

    def tokens(self, decodes: int, seconds: float) -> int:
        """Return the most tokens of prompts that fit into so many seconds next to `decodes`."""
        return tokens_that_fit(self._text, decodes, seconds) if decodes else ALL_TOKENS

    def slices_that_fit(self, units: int, left: int, tokens: int, room: float) -> int:
        """Return the number of slices, at least 1 and at most `left`, of an input of `units` that
        fit into a step of `room` seconds next to `tokens`."""
        if tokens:
            room -= self._text.seconds(tokens)
        low, high = 1, left
        while low < high:
            middle = (low + high + 1) // 2
            if self._slices.seconds(units * middle) <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def slice_seconds(self, units: int) -> float:
        """Return the expected seconds of slices, by their number times the input's units."""
        return self._slices.seconds(units)

    def observe(self, tokens: int, text: float, units: int, encoding: float) -> None:
        """Learn from a step of `tokens` in `text` seconds, and of slices times `units` in
        `encoding` seconds."""
        if tokens:
            self._text.observe(tokens, text)
        if units:
            self._slices.observe(units, encoding)
