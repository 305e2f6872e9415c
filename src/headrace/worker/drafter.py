"""The part that drafts for a worker's text, loaded: a model of its own, or a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..kernels.cpu.library import LAYOUT
from ..kernels.model import Model
from ..loader.heads import HeadFiles
from ..loader.panels import PanelShelf
from .draft_head import DraftHead
from .draft_model import DraftModel
from .draft_slots import DraftPart
from .loading import OpenPart
from .options import Resolved, WorkerOptions
from .part import Part


def load_drafter(
    opened: OpenPart, options: WorkerOptions, resolved: Resolved, text: Part, target: Model
) -> DraftPart[Any]:
    """Load the part that drafts for `text`; `target` is its model before ranks share it.

    Every rank drafts with all of it. It uses the threads of `text`, and a head its embedding and
    output head if it has none.
    """
    files, graph, source = opened[:3]
    if isinstance(files, HeadFiles):
        context = min(options.max_context, files.arch.arch.max_context)
        part = Part(graph, source, options, resolved, context, beside=text, shared=target.weights)
        return DraftHead(part, files, options, target)
    shelf = None
    if options.panels is not None and options.kernels in ("auto", "cpu"):
        shelf = PanelShelf(files, Path(options.panels), LAYOUT)
    context = min(options.max_context, files.arch.max_context)
    part = Part(graph, source, options, resolved, context, shelf=shelf, beside=text)
    if shelf is not None:
        shelf.finish()
    return DraftModel(part, files.arch, options, target)
