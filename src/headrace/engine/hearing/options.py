"""The options of an engine that apply to a transcription model."""

from __future__ import annotations

from dataclasses import fields

from ...base.config import EngineOptions
from ...base.errors import OptionError

TAKEN = frozenset(
    {"model", "device", "dtype", "kv_dtype", "threads", "max_waiting", "cache_dir", "offline"}
)
"""Options that apply to a transcription model."""
KV = ("float32", "bfloat16", "int8")


def verify(options: EngineOptions) -> None:
    """Raise `OptionError` for an option that was set and would have no effect here."""
    options.verify()
    plain = EngineOptions()
    for each in fields(options):
        name = each.name
        if name in TAKEN or (name == "context_cache" and options.context_cache == "0"):
            continue
        if getattr(options, name) != getattr(plain, name):
            raise OptionError(f"{name} means nothing to a speech model", param=name)
    if options.device == "cuda":
        raise OptionError("speech runs on a CPU alone", param="device")
    if options.dtype not in ("auto", "float32"):
        raise OptionError(
            "dtype of a speech model is auto (weights in 8 bits) or float32 (as the file has them)",
            param="dtype",
        )
    if options.kv_dtype not in ("auto", *KV):
        raise OptionError(f"kv_dtype of a speech model is one of {', '.join(KV)}", param="kv_dtype")
