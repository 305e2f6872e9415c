"""The CPU kernels as a backend: what they can serve, and the reason where they cannot."""

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

_KINDS = """embed norm add linear write attend gated activate multiply route experts
    part scale absorb unpack short_conv delta_rule ssm"""
SERVED = frozenset(_KINDS.split())
OUTSIDE_GGUF = {"float32", "float16", "bfloat16", "packed4", "packed8", "fp8"}
"""Kinds of weights that are not in blocks of GGUF."""


class CpuBackend:
    """Serves each kind of node that it can; `write` and `attend` go together: its KV pages have a
    layout of their own."""

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
        beside = getattr(question.beside, "team", None)
        given = question.shelf, beside, question.quantise
        return CpuOperators(question.threads, self._level, *given)

    def decisions(self) -> list[Decision]:
        """The ISA level that serves, and why not the best one where it does not; which sources."""
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
    """Serves whoever names it: activations of dense products of bf16 are rounded to it
    (`csrc/rounded_dense.h`), and their bits are those of no other level. What serves an operator is
    in an engine's identity."""

    name = _level = PAIRS

    def supports(self, kind: str, question: Question) -> str | None:
        return super().supports(kind, question) or refused(PAIRS)


class AmxBackend(CpuBackend):
    """Serves whoever names it: dense products of bf16 go through tiles (`csrc/amx_dense.h`), whose
    bits are those of no other level, too."""

    name = _level = TILES

    def supports(self, kind: str, question: Question) -> str | None:
        return super().supports(kind, question) or tiles_refused()


class RoundedBackend(AmxBackend):
    """The same with activations that are rounded to bf16, as GPUs have them."""

    name = _level = ROUNDED


def _refusal(kind: str, question: Question) -> str | None:
    """What of the model one kind of its nodes cannot do; the others are served all the same."""
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
