"""Owns: drafts: guesses of a sequence's next tokens, from text alone.
Takes → gives: tokens that became part of a sequence → proposals, and how likely they are accepted.
Does not know: the model, arrays, steps; whether a proposal pays off.
Invariant: no proposal depends on the text of another tenant.
Where does my change go: a new way to guess is a drafter; the choice among several, `speculation`.
"""

from __future__ import annotations

from .acceptance import SURE, Acceptance
from .drafter import NOTHING, Drafter, Proposal
from .forced import ForcedDrafter, Forcing
from .ngram import NGramDrafter
from .predicted import PredictedDrafter
from .speculation import DEFAULT, DRAFTERS, MODEL, Drafts, Speculation, names_of
from .suffix import SuffixDrafter

__all__ = [
    "DEFAULT", "DRAFTERS", "MODEL", "NOTHING", "SURE", "Acceptance", "Drafter", "Drafts",
    "ForcedDrafter", "Forcing", "NGramDrafter", "PredictedDrafter", "Proposal", "Speculation",
    "SuffixDrafter", "names_of",
]  # fmt: skip
