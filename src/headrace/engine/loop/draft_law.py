"""The cost of a draft before steps were timed, and the success of drafts in the simulator: measured
per class of text, or one chance for every draft.

A class's law is two numbers at 1, 3 and 7 drafts a step, of the drafters that are on by default
(`benchmarks/results/speculation_accept.json`: `suffix, past answers too`). The first is the tokens
of a step, 1 + E[min(accepted, length)]. The second is the share of drafts accepted, which gives
E[min(proposed, length)]. Differences of each are sums of P(· ≥ i) over the places between, which
fall geometrically there.

Steps are drawn one by one. The law omits that copying comes in runs, and that a drafter knows when
it is good. So a price has less to choose among than in reality.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...base.errors import OptionError
from ...roofline.composition import verify_step
from ...roofline.step import StepModel
from ...sched.price import least

USUAL = 512
"""Context for which a draft's row is priced: its cost in a step hardly depends on it."""
LENGTHS = (1, 3, 7)
MEASURED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "code-edit": ((1.679, 2.505, 3.3), (0.902, 0.808, 0.657)),
    "tool-loop": ((1.756, 2.788, 3.912), (0.883, 0.768, 0.615)),
    "conversation": ((1.332, 1.589, 1.749), (0.818, 0.674, 0.487)),
    "prose": ((1.144, 1.23, 1.276), (0.54, 0.353, 0.209)),
    "translation": ((1.033, 1.049, 1.054), (0.556, 0.333, 0.178)),
    "retrieval": ((1.932, 3.577, 6.35), (0.98, 0.946, 0.908)),
}
"""Class → (tokens of a step, share of the drafts accepted) at `LENGTHS`."""


def verifying(model: StepModel, tokens: int) -> float:
    """Return the seconds of a step that verifies `tokens` of one sequence of `USUAL` tokens.
    Without fitted steps of this machine, it is at least the bound of `sched.price.least`."""
    one, all = (model.seconds(verify_step(model.case.arch, 1, USUAL, n - 1)) for n in (1, tokens))
    return max(all, one * least(tokens) * model.hardware.efficiency.source.startswith("assumed"))


@dataclass(frozen=True, slots=True)
class DraftLaw:
    """The law of a step: the number of drafts proposed, and the number of these that are right."""

    name: str
    proposed: tuple[float, ...]
    """Chance that at least 1, 2, … 7 drafts are proposed."""
    chances: tuple[float, ...]
    """Chance that each is right if those before it are."""

    @property
    def synthetic(self) -> bool:
        """True for a chosen number, False for a law measured on text."""
        return self.name not in MEASURED

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """Draw (drafts proposed, drafts that are right) of one step."""
        threshold = chance.random()
        count = sum(one > threshold for one in self.proposed)
        right = 0
        while right < count and chance.random() < self.chances[right]:
            right += 1
        return count, right

    @property
    def accepted(self) -> tuple[float, ...]:
        """Chance that at least 1, 2, … drafts of a step are accepted."""
        right = self.survival(len(self.proposed))
        return tuple(one * alive for one, alive in zip(self.proposed, right, strict=True))

    def survival(self, count: int) -> list[float]:
        """Return the chance of each of `count` drafts to be accepted with all before it."""
        alive, found = 1.0, []
        for one in self.chances[:count]:
            alive *= one
            found.append(alive)
        return found


def draft_law(wish: str) -> DraftLaw:
    """Return the law of a class of text by its name. A number from 0 to 1 is the chance of every
    draft to be right, and seven are always proposed. Raises `OptionError` for anything else."""
    if wish in MEASURED:
        tokens, shares = MEASURED[wish]
        accepted = [each - 1 for each in tokens]
        right = _tail(accepted)
        proposed = _tail([all / share for all, share in zip(accepted, shares, strict=True)])
        # P(right ≥ i) = P(proposed ≥ i) · the chances up to i.
        alive = [min(one / all, 1.0) for one, all in zip(right, proposed, strict=True)]
        chances = (after / before for before, after in pairwise((1.0, *alive)))
        return DraftLaw(wish, tuple(proposed), tuple(min(one, 1.0) for one in chances))
    try:
        chance = float(wish)
    except ValueError:
        chance = -1.0
    if not 0 <= chance <= 1:
        raise OptionError(
            f"speculate must be off, {', '.join(MEASURED)} or a chance from 0 to 1, not {wish!r}",
            param="speculate",
        )
    return DraftLaw(f"synthetic {chance:g}", (1.0,) * LENGTHS[-1], (chance,) * LENGTHS[-1])


def _tail(expected: Sequence[float]) -> list[float]:
    """Return P(X ≥ 1), P(X ≥ 2), … from E[min(X, length)] at `LENGTHS`."""
    found = [expected[0]]
    for (low, before), (high, after) in pairwise(zip(LENGTHS, expected, strict=True)):
        least, most = 0.0, 1.0
        for _ in range(40):
            rate = (least + most) / 2
            total = sum(found[low - 1] * rate**place for place in range(1, high - low + 1))
            least, most = (rate, most) if total < after - before else (least, rate)
        found += [found[low - 1] * most**place for place in range(1, high - low + 1)]
    return found
