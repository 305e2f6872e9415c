"""The options of an engine that apply to a transcription model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal, NamedTuple

from ...base.config import Decision, EngineOptions
from ...base.errors import OptionError
from ...base.hardware import cpu
from ...base.several import OWN, ModelChoice

TAKEN = frozenset(
    {"model", "device", "dtype", "kv_dtype", "threads", "max_waiting", "cache_dir", "offline"}
)
"""Options that apply to a transcription model."""
KV = ("float32", "bfloat16", "int8")
SEQUENCES = 48
"""Texts that Whisper decodes at a time: windows, their beams, and checks of them."""


class HearingForm(NamedTuple):
    """Resolved options of a transcription model (no "auto"), with reasons."""

    threads: int
    precision: Literal["exact", "int8"]
    kv: Literal["float32", "bfloat16", "int8"]
    decisions: list[Decision]


def form_of(options: EngineOptions) -> HearingForm:
    """Resolve the open options; `verify` has checked the others."""
    threads = options.threads or cpu().physical_cores
    precision: Literal["exact", "int8"] = "int8" if options.dtype == "auto" else "exact"
    kv = options.kv_dtype
    if kv == "auto":
        kv = "float32" if precision == "exact" else "int8"
    decisions = [
        Decision("threads", str(threads), "asked for" if options.threads else "one for each core"),
        Decision(
            "weights", precision, "dtype is auto" if precision == "int8" else "dtype is float32"
        ),
    ]
    return HearingForm(threads, precision, kv, decisions)  # type: ignore[arg-type]


def engine_options(options: EngineOptions, form: HearingForm) -> EngineOptions:
    """Return the options of an engine that serves Whisper."""
    return replace(
        options,
        device="cpu",
        dtype="auto",
        kv_dtype=form.kv,
        threads=form.threads,
        max_sequences=SEQUENCES,
        policy="priority",
        speculate="off",
        context_cache="0",
        max_waiting=1024,
        keep_packed=options.keep_packed and form.precision == "int8",
    )


def own_options(choice: ModelChoice, *, shared: bool) -> EngineOptions:
    """Return the options of a transcription model. In a `shared` server the other options are for
    the text models, except the server's own. Raises as `verify`."""
    options = choice.options
    if shared:
        plain, taken = EngineOptions(), (TAKEN - set(OWN)) | choice.own
        others = {each.name for each in fields(options)} - taken
        options = replace(options, **{name: getattr(plain, name) for name in others})
    verify(options)
    return options


def verify(options: EngineOptions) -> None:
    """Raise `OptionError` for an option that was set but has no effect here."""
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
