"""Ranks that Ray places for this engine, through a separate process: `placing`.

Ray's library ends its process when its cluster is lost, so the serving processes do not load it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import msgspec

from ...base.config import EngineOptions
from ...base.hardware import cpu
from ...dist.channel import PrivateFolder
from ..spawn import Child, explain_exit
from .group import JoinedRanks
from .joins import Joins, RanksAsked
from .launch import RankPlace

log = logging.getLogger("headrace.engine")
ASKED = "asked"
"""File in the placing process's folder: `RanksAsked`."""


class PlacedRanks(JoinedRanks):
    """Ranks that start and end with this engine."""

    def __init__(self, place: RankPlace, mine: Joins, options: EngineOptions) -> None:
        """Raises as `joining.lead`, and any error that keeps Ray from placing them."""
        self._place, self._options = place, options
        self._private = PrivateFolder()
        self._placing: Child | None = None
        try:
            super().__init__(place, mine, self._call)
        except BaseException:
            self._release()
            raise

    def _call(self, port: int) -> None:
        given = self._options
        # Paths are resolved in another working directory.
        asked = replace(
            given,
            threads=given.threads or cpu().physical_cores,
            model=os.path.abspath(given.model) if os.path.exists(given.model) else given.model,
            cache_dir=given.cache_dir and os.path.abspath(given.cache_dir),
        )
        first = replace(self._place, leader=replace(self._place.leader, port=port))
        (self._private.path / ASKED).write_bytes(msgspec.msgpack.encode(RanksAsked(asked, first)))
        self._placing = Child("headrace.engine.ranks.placing", [str(self._private.path)])
        self._placing.watch(_note)

    def close(self) -> None:
        super().close()
        self._release()

    def _release(self) -> None:
        if self._placing is not None:
            self._placing.kill()
            self._placing.release()
        self._private.close()


def _note(code: int) -> None:
    if code > 0:
        log.warning("the process that speaks to Ray %s", explain_exit(code))
