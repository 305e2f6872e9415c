"""The executor for a layout."""

from __future__ import annotations

from ...base.config import EngineOptions
from ...base.errors import OptionError
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.workeroptions import WorkerOptions
from .group import GroupExecutor, JoinedRanks, LocalRanks
from .joining import joins
from .launch import place_of
from .multiproc import MultiprocExecutor
from .placed import PlacedRanks
from .stages import StagesExecutor


def in_processes(
    files: ModelFiles,
    settings: WorkerOptions,
    worker: str,
    options: EngineOptions,
    *,
    share_pool: bool,
) -> MultiprocExecutor | GroupExecutor:
    """Make the executor of one worker in its own process, or of several that share the model.
    `share_pool` applies to one worker only. Raises as `joining.lead`."""
    layout = Layout.parse(options.layout)
    if layout == ONE:
        return MultiprocExecutor(files, settings, worker, share_pool=share_pool)
    met = _joined(files, options) if options.launcher != "local" else None
    kind = StagesExecutor if layout.pp > 1 else GroupExecutor
    return kind(files, settings, worker, met or LocalRanks(worker, layout.devices), layout)


def _joined(files: ModelFiles, options: EngineOptions) -> JoinedRanks:
    place = place_of(options)
    if options.launcher == "ray":
        return PlacedRanks(place, joins(place, options, files), options)
    if place.rank:
        raise OptionError(
            f"rank {place.rank} of {place.ranks} answers nobody: `headrace serve` lets it join "
            "rank 0",
            param="launcher",
        )
    return JoinedRanks(place, joins(place, options, files))
