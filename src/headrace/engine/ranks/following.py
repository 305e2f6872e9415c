"""A rank other than the first that a launcher started: it serves rank 0."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from ...base.config import EngineOptions
from ...base.errors import EngineDead, HeadraceError
from ...base.facts import WorkerFacts
from ...base.hardware import cpu
from ...base.modelfiles import ModelFiles
from ...dist.channel import Channel, PeerGone
from ...dist.wake import Wake
from ...loader import open_model
from ...loader.panels import panel_folder
from .. import messages
from ..loop.executor import LoadedWorker
from ..loop.real import REAL_WORKER, worker_loader
from .joining import PATIENCE, Patience, join, joins
from .launch import RankPlace
from .worker_process import serve

_WORD = 1.0
"""Seconds in which rank 0 says why another rank is gone."""


def follow(
    options: EngineOptions,
    files: ModelFiles,
    place: RankPlace,
    *,
    worker: str = REAL_WORKER,
    patience: Patience = PATIENCE,
) -> None:
    """Execute rank 0's commands until it stops this rank. Raises `EngineDead` naming the rank that
    ended the group, `OptionError` if this one does not belong to it."""
    began = time.monotonic()
    circle, channel = join(place, lambda port: joins(place, options, files, port), patience)
    wake = Wake()
    circle.calls.append(lambda rank, why: wake.ring())
    channel.watch(wake.fileno())

    def load(asked: messages.Load) -> tuple[LoadedWorker, WorkerFacts]:
        """Load the model that rank 0 chose, with this host's files, threads and memory."""
        here = replace(
            asked.settings,
            rank=place.rank,
            commons=circle.descriptor,
            threads=options.threads or cpu().physical_cores,
            panels=str(panel_folder(options.cache_dir)) if options.keep_packed else None,
        )
        return worker_loader(worker)(files, here)

    def check() -> None:
        wake.clear()
        circle.check()

    try:
        ended = serve(channel, load, began, check)
        if circle.lost and _stopped(channel, wake):
            ended = None
    except PeerGone:
        ended = None
        deadline = time.monotonic() + _WORD  # The pulse knows the reason.
        while not circle.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        circle.check()
        raise EngineDead(f"{circle.names[0]} closed its connection") from None
    finally:
        channel.close()
        circle.close()
        wake.close()
    if ended is not None:
        raise ended


def _stopped(channel: Channel, wake: Wake) -> bool:
    """Whether rank 0 stops the group: ranks that it stopped earlier close their connections, which
    may be noticed before its word arrives."""
    deadline = time.monotonic() + _WORD
    with suppress(PeerGone):
        while (left := deadline - time.monotonic()) > 0:
            wake.clear()
            message = channel.receive_one(left)
            if isinstance(message, messages.Stop | messages.Failed):
                return isinstance(message, messages.Stop)
    return False


class RayRank:
    """An actor of Ray: a rank in a process of its own, on a host that Ray chose."""

    def follow(self, options: EngineOptions, place: RankPlace) -> str:
        """Follow rank 0; return the error that ended the rank, or "" if rank 0 stopped it."""
        try:
            files = open_model(options.model, cache_dir=options.cache_dir, offline=options.offline)
            follow(options, files, place)
        except HeadraceError as error:
            return error.message
        return ""
