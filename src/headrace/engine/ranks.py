"""Which layouts are served, and why others are not."""

from __future__ import annotations

from ..base.absorb import absorbed
from ..base.arch import ModelArch
from ..base.config import EngineOptions
from ..base.cut import cut, kv_heads, refusal
from ..base.errors import OptionError
from ..base.layout import ONE, Layout
from ..base.modelfiles import ModelFiles
from ..models.registry import describe


def shared_by(
    layout: Layout, options: EngineOptions, files: ModelFiles, device: str, threads: int
) -> str:
    """How ranks share this model, as a reason. Raises `OptionError` where they cannot."""
    for holds, why in (
        (layout == Layout(tp=layout.tp), "only TP is served yet"),
        (device == "cpu", f"ranks are served on a CPU, not on {device}"),
        (options.kernels in ("auto", "cpu"), "ranks want the CPU kernels"),
        (not options.max_adapters, "ranks serve no adapters (max_adapters 0)"),
        (options.draft_model is None, "ranks have no draft model"),
        (options.depth == 1, "ranks have one step in flight (depth 1)"),
        (options.keep_packed, "ranks map the same kept weights (keep_packed)"),
    ):
        if not holds:
            raise OptionError(f"layout {layout}: {why}", param="layout")
    obstacle = refusal(absorbed(describe(files.arch)), layout.tp)
    if obstacle is not None:
        raise OptionError(f"layout {layout}: no rank has its part, for {obstacle}", param="layout")
    return (
        f"{layout.tp} processes with {threads} threads together; values are exchanged, nothing is "
        "summed across them, so answers are those of one"
    )


def kept_heads(layout: Layout, arch: ModelArch) -> tuple[dict[int, int], ...]:
    """The KV heads by layer that each rank keeps; (): nothing is shared."""
    if layout == ONE:
        return ()
    graph = absorbed(describe(arch))
    return tuple(kv_heads(cut(graph, layout.tp, rank)) for rank in range(layout.tp))
