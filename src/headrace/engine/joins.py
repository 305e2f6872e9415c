"""What ranks that a launcher started say to each other before they work: see `joining`."""

from __future__ import annotations

import msgspec

from ..base.config import EngineOptions
from . import messages
from .launch import RankPlace


class Joins(msgspec.Struct, array_like=True, tag=True):
    """A rank says what it is."""

    rank: int
    ranks: int
    version: str
    kernels: str
    """Digest of their sources."""
    layout: str
    weights: str
    """Digest of the model's files."""
    port: int
    """Where it awaits ranks behind it."""


class RanksAsked(msgspec.Struct):
    """What Ray is asked for: all ranks of a layout but the first, which asks."""

    options: EngineOptions
    """Each rank's, with its threads."""
    first: RankPlace


class Peers(msgspec.Struct, array_like=True, tag=True):
    """Everybody has come."""

    addresses: list[tuple[str, int]]
    """Where each rank listens, but for the first, which all know."""


ToRank = Peers | messages.ToWorker
FromRank = Joins | messages.FromWorker
