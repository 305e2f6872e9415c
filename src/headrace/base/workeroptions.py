"""Options of a worker, as they cross the border to its process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of one worker; `worker.options` resolves "auto" and None."""

    device: str = "cpu"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    quantise: str = "auto"
    deterministic: bool = False
    threads: int | None = None
    rows: int = 64
    """Sequences that can hold a row at the same time."""
    step_tokens: int = 2048
    max_context: int = 4096
    adapters: int = 0
    """LoRA adapters that can run at the same time; 0: not served."""
    adapter_rank: int = 16
    """Largest rank of an adapter."""
    drafts: int = 0
    """Maximum drafts of a row that are verified in one step; 0: no drafting."""
    drafters: str = "auto"
    """Drafter of `speculate.DRAFTERS`; auto: the best combination; draft: the draft model alone."""
    draft_model: str | None = None
    """Path of a model that drafts too; None: drafts come from text alone."""
    ranks: int = 1
    """Processes that share the model; this is `rank` of them."""
    rank: int = 0
    stages: int = 1
    """Pipeline stages: each has some layers, and each of its ranks a part of those."""
    dealt: bool = False
    """Ranks have whole experts instead of a part of each."""
    commons: int = -1
    """Descriptor of the memory that they share: `dist.commons`."""
    pool_file: int = -1
    """Descriptor of the memory with the KV pool, for another process that moves its blocks; -1:
    memory of this process alone."""
    lends: bool = False
    """Pool memory may be mapped by servers on this machine."""
    panels: str | None = None
    """Folder that keeps repacked weights between starts; None: they are repacked each time."""
