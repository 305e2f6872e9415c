"""`headrace serve` as a rank other than the first, if a launcher started it so."""

from __future__ import annotations

import logging
import sys

from ..base.config import EngineOptions
from ..engine.ranks.following import follow
from ..engine.ranks.launch import place_of
from ..loader import open_model
from ..loader.progress import ProgressLine

log = logging.getLogger("headrace.rank")


def followed(options: EngineOptions) -> bool:
    """Serve rank 0 until it says stop; return False at once if this is rank 0.

    Raises `HeadraceError`.
    """
    options.verify()
    place = place_of(options)
    if place.rank == 0:
        return False
    with ProgressLine(sys.stderr) as bars:
        files = open_model(
            options.model, cache_dir=options.cache_dir, offline=options.offline, progress=bars
        )
    log.info("rank %d of %d comes to %s", place.rank, place.ranks, place.leader)
    follow(options, files, place)
    return True
