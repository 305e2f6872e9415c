"""Messages of the rendezvous between ranks that a launcher started: see `joining`."""

from __future__ import annotations

import msgspec

from ...base.config import EngineOptions
from .. import messages
from .launch import RankPlace


class Joins(msgspec.Struct, array_like=True, tag=True):
    """A rank's description of itself."""

    rank: int
    ranks: int
    version: str
    kernels: str
    """Digest of the kernels' sources."""
    layout: str
    weights: str
    """Digest of the model's files."""
    port: int
    """Port where it awaits the ranks after it."""


class RanksAsked(msgspec.Struct):
    """A request to Ray for all ranks of a layout except the first, which asks."""

    options: EngineOptions
    """Options of each rank, with its threads."""
    first: RankPlace


class Peers(msgspec.Struct, array_like=True, tag=True):
    """The answer once all ranks have come."""

    addresses: list[tuple[str, int]]
    """Address of each rank except the first, which all know."""


ToRank = Peers | messages.ToWorker
FromRank = Joins | messages.FromWorker
