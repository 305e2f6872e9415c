"""Tokens that a grammar forces: keys of JSON, frames of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .acceptance import SURE
from .drafter import NOTHING, Proposal


class Forcing(Protocol):
    """The state of a sequence's grammar, which follows the sequence by itself."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next regardless of the model; empty if it may choose."""


class ForcedDrafter:
    """Drafter of the tokens that a grammar forces: the only allowed token is drawn, at any
    temperature."""

    name = SURE

    def __init__(self, grammar: Forcing) -> None:
        self._grammar = grammar

    def extend(self, tokens: Sequence[int]) -> None:
        """Do nothing: the grammar follows the sequence by itself."""

    def propose(self, most: int) -> Proposal:
        forced = self._grammar.forced() if most > 0 else ()
        return Proposal(list(forced[:most]), 0, self.name) if forced else NOTHING
