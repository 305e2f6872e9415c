"""Drafts of a worker's rows: proposed after one step, verified in the next.

Verification does not know the drafter (Daliri, Musco and Suresh 2024, arXiv 2408.07978). The target
draws its own token at each position, with the random number of (seed, choice, position); a draft is
accepted if it is that token. The output is the same with any drafts and with none.

A decode of 1 + d tokens computes the last known token and d drafts after it. The drafts stand in
the table of tokens as if they were known: penalties, unwanted words and every other mask of a
position look at the tokens before it. If draft i is refused, everything computed after it is void
too. The next step overwrites it, and the prefix index never saw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from ..base.drafted import Verified
from ..base.step import Admission, StepPlan, StepResult
from ..kernels.arrays import Array
from ..speculate import MODEL, NOTHING, SURE, Drafts, Proposal, Speculation
from .draft_head import DraftHead
from .draft_slots import DraftPart
from .grammar import Form, GrammarMasks
from .rows import Rows

MOST_ASLEEP = 8
"""Steps for which a row may be left alone: copying is noticed that many tokens late."""
MATCHED = 4
"""Prior for a draft model's drafts before any was tried: a matched context of this many tokens."""


@dataclass(slots=True)
class _Row:
    drafts: Drafts
    ends: frozenset[int]
    """Ids that end the sequence: no draft follows one."""
    known: int
    """Tokens of the sequence that are known."""
    limit: int
    """Largest number of tokens that it may have in the end."""
    form: Form | None
    """Grammar of the row, which has masks only for drafts that were announced to it."""
    granted: bool
    """Tokens that the grammar forces are taken without the model's own choice."""
    ready: Proposal = NOTHING
    """Proposal for the next step."""
    promised: bool = False
    """Promise that the model drafts when the next step begins."""
    fresh: list[int] = field(default_factory=list)
    """Tokens that its drafters have not seen yet."""
    unused: int = 0
    """Number of consecutive proposals without any verified draft."""
    asleep: int = 0
    """Steps until its drafters are asked again."""


class Verification:
    """Rows that draft. Tokens lie in host memory. Calls come from the worker's thread."""

    def __init__(
        self,
        rows: Rows,
        speculation: Speculation,
        most: int,
        masks: GrammarMasks | None,
        model: DraftPart[Any] | None = None,
    ) -> None:
        """Start without rows. `most`: drafts of one row and step.

        `masks`: of rows with a grammar, which were admitted there before. `model`: a drafter too,
        bound to `rows`; a head gets the states of each step.
        """
        self._table, self._speculation, self._most = rows, speculation, most
        self._masks, self._model = masks, model
        self.hidden = isinstance(model, DraftHead)
        """Flag: a step's hidden states must be those of all of its tokens."""
        self._rows: dict[int, _Row] = {}
        self._verified: dict[int, Verified] = {}
        """Results of verification, for the step's result."""

    def admit(self, admission: Admission) -> None:
        """Begin to draft for a row that generates tokens."""
        spec, row = admission.spec, admission.row
        if not spec.generates:
            return
        known = len(admission.tokens)
        form = None if self._masks is None else self._masks.form(row)
        # Tokens from before a preemption were remembered then.
        drafts = self._speculation.begin(
            admission.tenant, prompt=known, expected=spec.expected, grammar=form
        )
        drafts.extend(admission.tokens)
        limit = admission.prompt_length + (spec.sampling.max_tokens or 0)
        # A budget of reasoning counts drawn tokens.
        granted = form is not None and spec.sampling.logprobs is None and spec.reasoning is None
        self._rows[row] = _Row(drafts, frozenset(spec.stop_ids), known, limit, form, granted)

    def clear(self) -> None:
        """Forget what an interrupted step left for its result. Call it when a step begins."""
        self._verified = {}
        if self._model is not None:
            self._model.clear()

    def release(self, rows: Sequence[int]) -> None:
        left = {row: self._rows.pop(row) for row in rows if row in self._rows}
        for found in left.values():
            found.drafts.extend(found.fresh)
            found.drafts.end()
        if self._model is not None:
            self._model.release({row: found.known for row, found in left.items()})

    def begin(self, plan: StepPlan) -> tuple[StepPlan, list[int] | None]:
        """Put drafts after the known tokens.

        Returns the plan as it is computed, with the true starts and no more drafts than are ready,
        and the drafts of each entry, or None without any. A negative number of drafts is granted: a
        grammar forces them, so they take no row of the head.
        """
        starts, counts, drafted = plan.starts, plan.counts, [0] * len(plan.rows)
        if self._model is not None:
            for write in plan.slots:
                self._model.take(write)
            if plan.draft_costs is not None:
                self._model.costs = plan.draft_costs
            self._draft(self._model, plan)
        changed = False
        for entry, row in enumerate(plan.rows):
            found = self._rows.get(row)
            if found is None or starts[entry] + counts[entry] < found.known:
                continue
            count = counts[entry]
            if starts[entry] + count == found.known:
                continue  # The rest of a prompt, or a token alone.
            if not changed:
                changed, starts, counts = True, starts.copy(), counts.copy()
            ready = found.ready
            drafted[entry] = some = min(count - 1, len(ready))
            found.unused = found.asleep = 0
            starts[entry], counts[entry] = found.known - 1, 1 + some
            self._table.host_tokens[row, found.known : found.known + some] = ready.tokens[:some]
            if found.granted and ready.drafter == SURE and found.form is not None:
                found.form.passed, drafted[entry] = some, -some
        if not changed:
            return plan, None
        return replace(plan, starts=starts, counts=counts), drafted if any(drafted) else None

    def _draft(self, model: DraftPart[Any], plan: StepPlan) -> None:
        """Have the model make those promised drafts that the plan includes."""
        wishes: dict[int, tuple[int, int]] = {}
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            found = self._rows.get(row)
            if found is not None and found.promised and start + count > found.known and count > 1:
                wishes[row] = found.known, min(count - 1, model.room(found.known))
        if wishes:
            for row, tokens in model.draft(wishes).items():
                found = self._rows[row]
                # A step may begin twice.
                found.promised, found.ready = False, _before_end(_by_model(tokens), found.ends)
                if found.form is not None:
                    found.ready = self._announced(row, found.ready)

    def accept(
        self, plan: StepPlan, drafted: list[int], entries: Iterable[int], chosen: Sequence[int]
    ) -> list[list[int]]:
        """Return the tokens of each of these entries that follow from accepted ones.

        `chosen` has one token for each of their rows of the head. The result has the granted
        tokens, and those of `chosen` up to the first that differs from its draft. The last one is
        written after the others, which stand in the table as drafts.
        """
        news, at, table = list[list[int]](), 0, self._table
        self._verified = {}
        for entry in entries:
            row, some, right = plan.rows[entry], drafted[entry], 0
            line = list(self._rows[row].ready.tokens[:-some]) if some < 0 else []
            before, at = at, at + 1 + max(0, some)
            line += chosen[before:at]
            if some:
                right = self._settle(entry, row, line[: abs(some)])
            end = plan.starts[entry] + plan.counts[entry]
            table.computed[row] = known = end - abs(some) + right
            table.host_tokens[row, known] = line[right]
            news.append(line[: 1 + right])
        return news

    def _settle(self, entry: int, row: int, chosen: Sequence[int]) -> int:
        """Count a row's right drafts; `chosen` are the target's own tokens there."""
        found = self._rows[row]
        right, ready = 0, found.ready
        while right < len(chosen) and chosen[right] == ready.tokens[right]:
            right += 1
        found.drafts.settle(_cut(ready, len(chosen)), right)
        self._verified[entry] = Verified(ready.drafter, len(chosen), right)
        return right

    def propose(self, plan: StepPlan, result: StepResult, states: Array) -> None:
        """Add each sequence's new tokens, and report in the result the drafts that are ready next.
        `states`: the step's, of all its tokens if `hidden` is set.

        A row without verified drafts is asked seldom, and then gets all its new tokens at once. Of
        many rows that do not draft, about one is asked in a step (of more than `MOST_ASLEEP`, a
        few).
        """
        proposed: list[bytes] | None = None
        model, entries = self._model, list[int]()
        if isinstance(model, DraftHead):
            model.note(plan, self._rows.keys(), states)
        for entry, (row, new) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            found = self._rows.get(row)
            if found is None:
                continue
            if entry in result.failures:
                # It has ended, but a step may have been planned for it before that was known.
                found.known, found.ready = int(self._table.computed[row]) + 1, NOTHING
                found.promised = False
            if not new:
                continue
            found.promised = False
            found.known += len(new)
            if model is not None:
                model.settle(row, found.known)
            found.fresh += new
            if found.asleep:
                found.asleep, found.ready = found.asleep - 1, NOTHING
                continue
            found.drafts.extend(found.fresh)
            found.fresh = []
            found.unused += 1
            # A grammar forces tokens now and then, and those are always right.
            patience = 1 if found.form is not None else min(len(plan.rows), 1 + MOST_ASLEEP)
            found.asleep = min(found.unused, patience) - 1
            found.ready = _before_end(found.drafts.propose(self._most), found.ends)
            alive = found.drafts.survival(found.ready)
            if model is not None and (promise := self._promise(model, row, found, sum(alive))):
                alive, found.ready, found.promised = promise, NOTHING, True
                entries.append(entry)
            elif found.form is not None:
                found.ready = self._announced(row, found.ready)
                alive = alive[: len(found.ready)]
            if proposed is None:
                proposed = [b""] * len(plan.rows)
            if alive:
                proposed[entry] = bytes([round(255 * one) for one in alive])
        result.proposed = proposed
        if result.logprobs is not None:  # Without those after a refused draft.
            pairs = zip(result.logprobs, result.tokens, strict=True)
            result.logprobs = [found[: len(new)] for found, new in pairs]
        if self._verified:
            result.verified, self._verified = self._verified, {}
        if model is not None:
            model.read()
            result.drafting = model.account(entries)

    def _promise(self, model: DraftPart[Any], row: int, found: _Row, looked: float) -> list[float]:
        """Return the chances of the drafts that the model would make for a row.

        Empty if it cannot draft at once, or if its time is better spent on `looked`, the expected
        number of accepted drafts without it.
        """
        most = min(self._most, model.room(found.known))
        chances = found.drafts.survival(_by_model([0] * most))
        worth = max(accumulate(chance - model.costs.draft for chance in chances), default=0.0)
        if looked and worth <= looked:
            return []
        saves = worth / (1 + worth) * (found.limit - found.known) if worth > 0 else 0.0
        if not most or not model.ready(row, found.known, saves):
            return []
        return chances

    def _announced(self, row: int, proposal: Proposal) -> Proposal:
        """Return the part of a proposal that the row's grammar allows; its masks are computed
        then."""
        assert self._masks is not None
        return _cut(proposal, self._masks.announce(row, proposal.tokens))


def _before_end(proposal: Proposal, ends: frozenset[int]) -> Proposal:
    """Return the proposal up to the first id that ends its sequence."""
    for place, token in enumerate(proposal.tokens):
        if token in ends:
            return _cut(proposal, place)
    return proposal


def _by_model(tokens: Sequence[int]) -> Proposal:
    return Proposal(tokens, MATCHED, MODEL)


def _cut(proposal: Proposal, length: int) -> Proposal:
    """Return its first `length` tokens."""
    if length == len(proposal):
        return proposal
    return replace(proposal, tokens=proposal.tokens[:length])
