"""The accuracy gate of a load: the measured server's answers compared with a kept reference.

After a point, the prompts kept by `bench accuracy --save` are sent again at that point's
concurrency. This exposes a server that is fast because its answers differ at that load.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest
from .accuracy import perplexity, stdlib_corpus
from .gate import GATED, hold, not_held
from .job import Target
from .options import RunOptions
from .reference import Reference, agreement, answers_of, load_reference
from .tasks import load_task, score_task

MOST_AT_ONCE = 256
ANSWER_TOKENS = 64
"""Tokens of an answer if the reference has no limit."""


@dataclass(frozen=True, slots=True)
class AccuracyGate:
    """Requirements on a server's answers, relative to a reference's."""

    path: Path
    reference: Reference
    deciding: frozenset[str]
    at_least: float

    @classmethod
    def read(cls, path: Path, deciding: str, at_least: float) -> AccuracyGate:
        """Read a gate; raise `InvalidRequest` for a bad reference file or an unknown kind."""
        return cls(path, load_reference(path), deciding_kinds(deciding), at_least)

    def passed(self, result: dict[str, Any]) -> bool | None:
        """Return this gate's verdict from a result, or None."""
        entry = result.get("accuracy") or {}
        mine = str(self.path), sorted(self.deciding), self.at_least
        if (entry.get("reference"), entry.get("deciding"), entry.get("at_least")) != mine:
            return None
        return bool(entry["passed"])

    def check(self, options: RunOptions, result: dict[str, Any]) -> dict[str, Any]:
        """Send the prompts to a result's server; return its entry. An impossible comparison
        fails."""
        found = result["figures"].get("concurrency", {"value": 1.0})["value"]
        target = Target(options.url, result["server"]["model"], api_key=options.api_key)
        entry: dict[str, Any] = {
            "reference": str(self.path),
            "deciding": sorted(self.deciding),
            "at_least": self.at_least,
            "concurrency": min(MOST_AT_ONCE, max(1, round(found))),
            "held": [],
        }
        try:
            entry["held"], entry["why"] = self._ask(target, entry["concurrency"])
        except HeadraceError as error:
            entry["why"] = [error.message]
        entry["passed"] = not entry["why"]
        return entry

    def _ask(self, target: Target, users: int) -> tuple[list[dict[str, Any]], list[str]]:
        """Return (comparisons with the reference, reasons for a failure)."""
        expected, deciding = self.reference, self.deciding
        agreed = measured = None
        scores = []
        if "tokens" in deciding:
            limit = expected.limit or ANSWER_TOKENS
            answers = answers_of(target, expected.prompts, limit, alternatives=0, concurrency=users)
            agreed = agreement(
                answers, expected.answers, limit=limit, reference_limit=expected.limit
            )
        if "tasks" in deciding:
            for key in expected.tasks or {}:
                name, _, items = key.rpartition("/")
                scores.append(score_task(target, name, load_task(name, int(items)), users))
        text, corpus = stdlib_corpus()
        theirs = expected.perplexity
        if "perplexity" in deciding and theirs is not None and theirs.corpus == corpus:
            measured = perplexity(target, text, corpus, limit=theirs.windows, concurrency=users)
        held = hold(expected, agreed=agreed, perplexity=measured, scores=scores)
        why = [
            f"{one.name} has {one.share:.1%} of the reference's"
            for one in held
            if not one.passes(self.at_least)
        ]
        missing = not_held(expected, held, deciding, perplexity=measured, scores=scores)
        return [asdict(one) for one in held], why + [f"not compared: {line}" for line in missing]


def deciding_kinds(text: str) -> frozenset[str]:
    """Parse `tokens,tasks` into a set; raise `InvalidRequest` for an unknown kind of gate."""
    kinds = frozenset(word.strip() for word in text.split(","))
    if not kinds <= set(GATED):
        raise InvalidRequest(f"gate must be of {', '.join(GATED)}, not {text!r}", param="gate")
    return kinds


def said(entry: dict[str, Any]) -> str:
    """Format a verdict as one line."""
    shares = ", ".join(f"{one['name']} {one['share']:.2%}" for one in entry["held"])
    verdict = "passed" if entry["passed"] else f"FAILED: {'; '.join(entry['why'])}"
    return f"accuracy against {entry['reference']} at {entry['at_least']:.1%}: {shares}; {verdict}"


def lowest(entry: dict[str, Any] | None) -> str:
    """Format a verdict as a cell of a table."""
    if entry is None:
        return "–"
    share = min((one["share"] for one in entry["held"]), default=0.0)
    return f"{share:.1%}" if entry["passed"] else f"{share:.1%} FAILED"
