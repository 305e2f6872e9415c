"""Rows of another part's output in a step, and the positions that they take."""

from __future__ import annotations

from dataclasses import dataclass

from .arrays import Array


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Input of the node `scatter`. Of the kind of the step's other arrays."""

    places: Array
    """[M] int64: tokens of the step, each once."""
    rows: Array
    """[M, D], in the type of activations."""
