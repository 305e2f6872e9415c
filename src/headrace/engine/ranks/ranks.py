"""Layouts that are served, and the reasons why others are not."""

from __future__ import annotations

from ...base.absorb import absorbed
from ...base.arch import ModelArch
from ...base.config import CPU_KERNELS, EngineOptions
from ...base.cut import cut, refusal
from ...base.errors import OptionError
from ...base.groups import graph_groups
from ...base.layout import Layout
from ...base.modelfiles import ModelFiles
from ...base.stages import stage_of
from ...base.step import GroupShape
from ...models.registry import describe


def shared_by(
    layout: Layout, options: EngineOptions, files: ModelFiles, device: str, threads: int
) -> str:
    """Explain how ranks share this model. Raises `OptionError` if they cannot."""
    for holds, why in (
        (layout.dp == 1, "replicas are servers of their own, behind `headrace route`"),
        (device == "cpu", f"ranks are served on a CPU, not on {device}"),
        (options.kernels in (*CPU_KERNELS, "ref"), f"{options.kernels} has no parts of weights"),
        (options.dtype in ("auto", "float32"), "ranks exchange float32"),
        (
            options.draft_model is None or options.launcher == "local",
            "ranks of a launcher have no draft model",
        ),
        (options.depth in (None, 1), "ranks have one step in flight (depth 1)"),
        (options.keep_packed, "ranks map the same kept weights (keep_packed)"),
    ):
        if not holds:
            raise OptionError(f"layout {layout}: {why}", param="layout")
    graph = absorbed(describe(files.arch))
    obstacle = refusal(graph, layout.tp, dealt=layout.ep)
    if obstacle is not None:
        raise OptionError(f"layout {layout}: no rank has its part, for {obstacle}", param="layout")
    where = f"with {threads} threads together"
    if options.launcher != "local":
        where = "of a launcher, each with the threads that it was given"
    whole = ", each with whole experts" if layout.ep else ""
    if layout.pp > 1:
        if files.arch.task != "tokens":
            raise OptionError(f"layout {layout}: an encoder has no stages", param="layout")
        stage_of(graph, layout.pp, 0)
        which = "each with" if layout.tp == 1 else f"{layout.tp} by {layout.tp} sharing"
        return (
            f"{layout.devices} processes {where}, {which} some layers{whole}; {layout.pp} steps "
            "are in flight, and answers are those of one"
        )
    return (
        f"{layout.tp} processes {where}{whole}; values are exchanged, nothing is "
        "summed across them, so answers are those of one"
    )


def rank_groups(
    layout: Layout, arch: ModelArch, kv_dtype: str
) -> tuple[tuple[GroupShape, ...], ...]:
    """Return the KV groups of each process of a layout; () if nothing is shared."""
    if layout.devices == 1:
        return ()
    graph, ranks = absorbed(describe(arch)), range(layout.tp)
    parts = [stage_of(graph, layout.pp, stage) for stage in range(layout.pp)]
    return tuple(
        graph_groups(cut(part, layout.tp, rank), kv_dtype) for part in parts for rank in ranks
    )
