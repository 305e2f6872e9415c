"""The CPU kernels as a backend: the supported kinds, and the reasons against the others."""

from __future__ import annotations

from ...base.config import CPU_VALUES, Decision
from ...base.graph import LatentSpec
from ...base.recurrent import DeltaSpec, SsmSpec
from ..backend import Question
from ..program import Provider
from .library import (
    LEVELS,
    PAIRS,
    ROUNDED,
    TILES,
    LibraryAbsent,
    level,
    load,
    refused,
    sources,
    tiles_refused,
)
from .operators import CpuOperators
from .recoded import RECODED
from .records import KINDS

_KINDS = """embed norm add linear write attend gated activate multiply modulate route experts
    part beside scale scatter window absorb unpack short_conv delta_rule ssm
    conv group_norm"""
SERVED = frozenset(_KINDS.split())
OUTSIDE_GGUF = {"float32", "float16", "bfloat16", "packed4", "packed8", "fp8"}
"""Kinds of weights that are not in blocks of GGUF."""


class CpuBackend:
    """Backend of the CPU kernels, for each kind of node that they can serve. `write` and `attend`
    go together: their KV blocks have a special layout."""

    name = "cpu"
    _level: str | None = None

    def supports(self, kind: str, question: Question) -> str | None:
        if kind not in SERVED:
            return f"has no {kind}"
        if question.device != "cpu":
            return "the device is not the CPU"
        try:
            load()
        except LibraryAbsent as absent:
            return str(absent)
        if question.quantise not in ("auto", *CPU_VALUES["quantise"]):
            return f"does not quantise weights to {question.quantise}"
        if question.dtype not in CPU_VALUES["dtype"]:
            return "activations are float32 on the CPU"
        return _refusal(kind, question)

    def build(self, question: Question) -> Provider:
        team = getattr(question.beside, "team", None)
        given = question.shelf, team, question.quantise
        return CpuOperators(question.threads, self._level, *given)

    def decisions(self) -> list[Decision]:
        """Report the ISA level in use, why it is not the best one, and the sources."""
        served = level(self._level)
        assert served is not None  # `supports` has loaded the library
        if self._level is not None:
            reason = "asked for"
        else:
            why = refused(LEVELS[-1])
            reason = "the best of this CPU" if why is None else f"not {LEVELS[-1]}: {why}"
            named = TILES if tiles_refused() is None else PAIRS
            if level(named):
                reason += f"; dense bf16 weights are faster with --kernels {named}, in other bits"
        return [
            Decision("kernels.level", served, reason),
            Decision("kernels.sources", sources(), "digest of the CPU kernels' sources"),
        ]


class PairsBackend(CpuBackend):
    """Backend used only if named: activations of dense bf16 products are rounded to bf16
    (`csrc/rounded_dense.h`). Its bits differ from those of all other levels. An operator's backend
    is part of an engine's identity."""

    name = _level = PAIRS

    def supports(self, kind: str, question: Question) -> str | None:
        return super().supports(kind, question) or refused(PAIRS)


class AmxBackend(CpuBackend):
    """Backend used only if named: dense bf16 products use tiles (`csrc/amx_dense.h`). Its bits,
    too, differ from those of all other levels."""

    name = _level = TILES

    def supports(self, kind: str, question: Question) -> str | None:
        return super().supports(kind, question) or tiles_refused()


class RoundedBackend(AmxBackend):
    """`AmxBackend` with activations rounded to bf16, as on GPUs."""

    name = _level = ROUNDED


def _refusal(kind: str, question: Question) -> str | None:
    """Return the reason why the model's nodes of one kind cannot be served, if any; it does not
    affect other kinds."""
    if kind in ("write", "attend"):
        if question.kv_dtype not in CPU_VALUES["kv_dtype"]:
            return f"no {question.kv_dtype} KV cache"
        for size in question.head_sizes():
            if size % 16:
                return f"the head size {size} is no multiple of 16"
            if size > 1024 and question.kv_dtype in ("int8", "k8v4"):
                return f"a sum over a head of {size} codes is no int32 (1,024 are the most)"
    if kind in ("short_conv", "delta_rule", "ssm"):
        for each in question.graph.recurrent():
            if isinstance(each, DeltaSpec | SsmSpec) and (each.key_size | each.value_size) % 16:
                head = f"{each.key_size} × {each.value_size}"
                return f"a state of {head} numbers a head, which are no multiples of 16"
    blocks = question.weights - OUTSIDE_GGUF
    if kind in ("absorb", "unpack"):
        for spec in {node.spec for node in question.nodes("absorb")}:
            assert isinstance(spec, LatentSpec)
            sizes = spec.rope_size, spec.rank, spec.plain_size
            if blocks and any(size % 32 for size in sizes):
                return f"the sizes {sizes} of latents and weights in blocks are not multiples of 32"
    unknown = sorted(blocks - set(KINDS) - RECODED)
    if unknown and kind in ("embed", "linear", "experts", "absorb"):
        return f"no kernel for weights of type {', '.join(unknown)}"
    return None
