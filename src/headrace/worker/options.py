"""Options of a worker, and the values that replace "auto"."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.config import Decision, auto_kv_dtype
from ..base.errors import OptionError
from ..base.groups import KV_DTYPES
from ..base.hardware import torch_build

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of one worker; "auto" and None are resolved here, each with a `Decision`."""

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
    """Drafts of a row that are verified in one step, at most; 0: no drafting."""
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


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options without "auto"."""

    device: str
    """"cpu" or "cuda"."""
    dtype: str
    kv_dtype: str
    decisions: list[Decision]


def resolve(options: WorkerOptions) -> Resolved:
    """Resolve "auto" and None; raises `OptionError`."""
    decisions = []
    device = options.device
    if device == "auto":
        device = "cuda" if _has_cuda() else "cpu"
        decisions.append(
            Decision(
                "device",
                device,
                "an NVIDIA GPU was found" if device == "cuda" else "no NVIDIA GPU was found",
            )
        )
    if device == "cuda" and not _has_cuda():
        raise OptionError("device is cuda, but torch sees no NVIDIA GPU here", param="device")
    dtype = options.dtype
    if dtype == "auto":
        dtype, reason = (
            ("bfloat16", "the tensor cores' type")
            if device == "cuda"
            else ("float32", "faster than 16-bit types on this device")
        )
        decisions.append(Decision("dtype", dtype, reason))
    kv_dtype = options.kv_dtype
    if kv_dtype == "auto":
        kv_dtype, reason = auto_kv_dtype(device, dtype, options.kernels)
        decisions.append(Decision("kv_dtype", kv_dtype, reason))
    for param, value, allowed in (("dtype", dtype, DTYPES), ("kv_dtype", kv_dtype, KV_DTYPES)):
        if value not in allowed:
            raise OptionError(
                f"{param} must be one of auto, {', '.join(allowed)}, not {value!r}", param=param
            )
    return Resolved(device, dtype, kv_dtype, decisions)


def _has_cuda() -> bool:
    if torch_build()[1] is None:
        return False
    import torch  # Local: a build for CPUs is known by its name alone.

    return torch.cuda.is_available()
