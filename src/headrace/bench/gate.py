"""The accuracy gate: each figure as a share of the reference's, compared with MLPerf's bounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .accuracy import Perplexity
from .reference import Agreement, Reference
from .tasks import TaskScore

GATES = (0.99, 0.999)
"""Shares of the reference's accuracy that MLPerf requires (closed division: normal, high)."""

GATED = ("tokens", "perplexity", "tasks")
"""Kinds of gate. Engines that round differently diverge at the first near-tie, so `tokens` is for
changes that must keep every bit. The other two are accuracy in MLPerf's sense."""


@dataclass(frozen=True, slots=True)
class Held:
    """One figure compared with the reference's."""

    kind: str
    """One of `GATED`."""
    name: str
    here: float
    reference: float
    share: float
    """Share of the reference; above 1 is better."""

    def passes(self, gate: float) -> bool:
        return self.share >= gate


def hold(
    reference: Reference,
    *,
    agreed: Agreement | None,
    perplexity: Perplexity | None,
    scores: Sequence[TaskScore],
) -> list[Held]:
    """Compare the figures that both sides have.

    Perplexity counts as reference / here, since less is better.
    """
    made = []
    if agreed is not None:
        made.append(Held("tokens", "token match", agreed.token_match, 1.0, agreed.token_match))
    theirs = reference.perplexity
    if perplexity is not None and theirs is not None and same_text(perplexity, theirs):
        share = theirs.value / perplexity.value
        made.append(Held("perplexity", "perplexity", perplexity.value, theirs.value, share))
    for score in scores:
        known = (reference.tasks or {}).get(task_key(score.name, score.items))
        if known is not None:
            # If the reference has nothing, nothing can be lost; and JSON has no infinity.
            share = score.score / known if known else 1.0
            made.append(Held("tasks", score.name, score.score, known, share))
    return made


def not_held(
    reference: Reference,
    held: Sequence[Held],
    deciding: Collection[str],
    *,
    perplexity: Perplexity | None,
    scores: Sequence[TaskScore],
) -> list[str]:
    """Return the reasons why deciding gates could not decide, one per line."""
    done = {one.kind for one in held}
    why = []
    if "perplexity" in deciding and "perplexity" not in done and reference.perplexity is not None:
        kept = reference.perplexity
        here = (
            "none was measured here (--limit)"
            if perplexity is None
            else f"here it is over {perplexity.windows} windows of {perplexity.corpus}"
        )
        why.append(
            f"perplexity: the reference's is over {kept.windows} windows of {kept.corpus}, {here}"
        )
    if "tasks" in deciding and reference.tasks:
        known, here_too = set(reference.tasks), {task_key(s.name, s.items) for s in scores}
        if missing := sorted(known - here_too):
            why.append(f"tasks: not asked here: {', '.join(missing)} (--tasks, --items)")
        if new := sorted(here_too - known):
            why.append(f"tasks: not in the reference: {', '.join(new)}")
    if not done & set(deciding) and not why:
        why.append(f"the reference holds nothing of {', '.join(sorted(deciding))}")
    return why


def same_text(one: Perplexity, other: Perplexity) -> bool:
    """Return whether two perplexities can be compared."""
    return (one.corpus, one.tokens, one.windows) == (other.corpus, other.tokens, other.windows)


def task_key(name: str, items: int) -> str:
    """Return the key of a score: another number of items is another set."""
    return f"{name.partition(':')[0]}/{items}"
