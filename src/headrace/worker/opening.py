"""Parts of a worker's model, loaded: weights, ranks, adapters, what a step takes of a device."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base import hardware
from ..base.config import Decision
from ..base.facts import WorkerFacts
from ..base.modelfiles import ModelFiles
from ..base.spec import WORKER_FEATURES
from ..dist.commons import Commons
from ..kernels.cpu.meeting import meeting_of
from ..kernels.model import Model
from ..kernels.operators import StepLimits
from ..kernels.ranks import Ranks
from ..loader.panels import PanelShelf
from .device_memory import DeviceMemory, StepMemory
from .draft_slots import DraftPart
from .drafter import load_drafter
from .encoder import Encoder, load_encoder
from .items import ItemPart
from .loading import open_parts
from .options import Resolved, WorkerOptions
from .part import Part

if TYPE_CHECKING:
    from .adapters import Adapters


@dataclass(slots=True)
class OpenWorker:
    """A model on one device, without KV."""

    text: Part
    """The part whose steps are planned."""
    encoder: Encoder | None
    drafter: DraftPart[Any] | None
    adapters: Adapters | None
    memory: DeviceMemory | None
    """Memory of a device; None on a host."""
    facts: WorkerFacts
    drawing: dict[str, ItemPart]
    """Parts of a pipeline that draws, beside its denoiser."""


def open_worker(
    files: ModelFiles,
    options: WorkerOptions,
    resolved: Resolved,
    *,
    shelf: PanelShelf | None,
    memory: DeviceMemory | None,
    beside: Part | None,
    grammar: bool,
) -> OpenWorker:
    """Load a model's parts: see `Worker`. `grammar`: whether grammars are compiled."""
    device = resolved.device
    threads = options.threads or hardware.cpu().cores
    phases = {}
    begin = time.perf_counter()
    opened = open_parts(files, options)
    phases["open_weights"] = time.perf_counter() - begin
    if device == "cpu":
        set_torch_threads(threads)
    begin = time.perf_counter()
    graph, source = opened["text"][1:3]
    given = options, resolved, options.max_context
    text = Part(graph, source, *given, shelf=shelf, beside=beside)
    decisions = text.decisions
    with text.inference():
        encoder = None
        if "encoder" in opened:
            encoder = load_encoder(opened["encoder"], options, resolved, text, shelf)
        drawing = {
            name: ItemPart(open_part, options, resolved, text, shelf)
            for name, open_part in opened.items()
            if open_part.units
        }
        begin, phases["load_weights"] = (now := time.perf_counter()), now - begin
        # Before any rank takes its part of a matrix: packed weights are read from here on.
        if shelf is not None and shelf.finish():
            decisions.append(Decision("panels", shelf.outcome, shelf.reason))
        phases["keep_weights"] = time.perf_counter() - begin
        whole = text.model
        weight_bytes = whole.weights.nbytes
        if options.ranks > 1:
            commons = Commons(options.commons, options.ranks, options.rank, options.stages)
            ranks = Ranks(commons, meeting_of(commons), options.step_tokens)
            text.model = whole.part(ranks, dealt=options.dealt)
        decisions += getattr(text.operators, "told", ())
        adapters = _adapters(text, options, resolved) if whole.generates else None
        if adapters is not None:
            weight_bytes += adapters.nbytes
        drafter = None
        if "draft" in opened:
            drafter = load_drafter(opened["draft"], options, resolved, text, whole)
            weight_bytes += drafter.part.model.weights.nbytes
        weight_bytes += sum(one.part.model.weights.nbytes for one in drawing.values())
        if encoder is not None:
            weight_bytes += encoder.part.model.weights.nbytes
    if device == "cpu":
        set_torch_threads(threads)  # Again, if a weight was the first to need torch.
    memory = memory or _memory_of(device)
    measured = StepMemory(0, 0)
    if memory is not None and text.model.generates:
        begin = time.perf_counter()
        measured = _measured(text, files, options, resolved, memory)
        phases["measure_step"] = time.perf_counter() - begin
    able = {"grammar": grammar, "adapter": adapters is not None, "inputs": encoder is not None}
    facts = WorkerFacts(
        weight_bytes=weight_bytes,
        device_memory=hardware.cpu().available if memory is None else memory.free(),
        kernels=[*resolved.decisions, *decisions],
        phases=phases,
        features=_features(files.arch.task, whole, able),
        step_bytes=measured.step_bytes,
        graph_bytes=measured.graph_bytes,
    )
    return OpenWorker(text, encoder, drafter, adapters, memory, facts, drawing)


def _features(task: str, model: Model, able: dict[str, bool]) -> tuple[str, ...]:
    if task in WORKER_FEATURES:
        return (WORKER_FEATURES[task],)
    if not model.generates:
        return ("pooling", "score") if model.labels else ("pooling",)
    return ("pooling", "beams", *(name for name, there in able.items() if there))


def _adapters(text: Part, options: WorkerOptions, resolved: Resolved) -> Adapters | None:
    if not options.adapters:
        return None
    # Local: they are tensors everywhere.
    import torch

    from .adapters import Adapters

    return Adapters(
        text.model.products(),
        slots=options.adapters,
        rank=options.adapter_rank,
        device=resolved.device,
        dtype=getattr(torch, resolved.dtype),
    )


def _measured(
    text: Part, files: ModelFiles, options: WorkerOptions, resolved: Resolved, memory: DeviceMemory
) -> StepMemory:
    from .step_memory import measure_step  # Local: a matter of GPUs, on tensors.

    limits = StepLimits(options.step_tokens, options.rows, options.max_context)
    given = files.arch, resolved.kv_dtype, resolved.device, limits, memory
    with text.inference():
        return measure_step(text.model, text.operators, *given)


def _memory_of(device: str) -> DeviceMemory | None:
    if device != "cuda":
        return None
    from .step_memory import CudaMemory  # Local, as above.

    return CudaMemory(device)


def set_torch_threads(count: int) -> None:
    """Set torch's threads, the one setting that workers in a process share: the last one wins."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)
