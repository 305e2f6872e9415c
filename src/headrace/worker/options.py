"""Values that replace "auto" in the options of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.config import Decision, auto_kv_dtype
from ..base.errors import OptionError
from ..base.groups import KV_DTYPES
from ..base.hardware import torch_build
from ..base.workeroptions import WorkerOptions as WorkerOptions

DTYPES = ("float32", "bfloat16", "float16")


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
