"""Bytes of the weights by what they are for: assumed from a format, or known from the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..base.arch import ModelArch
from .formats import weight_bits

_ROLE_PATTERNS = (
    ("embed", r"embed_tokens\.weight$|embeddings\.\w+_embeddings\.weight$"),
    ("head", r"lm_head\.weight$|pooler\.dense\.weight$|^classifier\.weight$"),
    ("qkv", r"attention\.self\.(query|key|value)\.weight$"),
    ("output", r"attention\.output\.dense\.weight$"),
    ("up", r"intermediate\.dense\.weight$"),
    ("down", r"\d\.output\.dense\.weight$"),
    ("qkv", r"self_attn\.(q|k|v|q_a|q_b|kv_a|kv_b|kv_a_with_mqa|qkv)_?proj(_with_mqa)?\.weight$"),
    ("output", r"self_attn\.o_proj\.weight$"),
    ("shared", r"mlp\.shared_experts?\."),
    ("experts", r"mlp\.experts\."),
    ("router", r"mlp\.gate\.weight$"),
    ("gate_up", r"mlp\.(gate|up|gate_up)_proj\.weight$"),
    ("down", r"mlp\.down_proj\.weight$"),
)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """`by_role`: bytes in all layers together, where known; the rest follows `format`."""

    format: str = "bfloat16"
    by_role: Mapping[str, float] = field(default_factory=dict)
    head_format: str | None = None
    """Format of embedding and head, which many recipes leave wider; None: as the rest."""

    def bits(self, role: str) -> float:
        wide = role in ("embed", "head") and self.head_format is not None
        return weight_bits(self.head_format if wide and self.head_format else self.format)

    def of(self, role: str, parameters: float, layers: int) -> float:
        """Bytes of one layer's weight of `parameters` numbers in this role."""
        if role in self.by_role:
            return self.by_role[role] / max(1, layers)
        return parameters * self.bits(role) / 8


def from_tensors(arch: ModelArch, sizes: Mapping[str, int], format: str) -> WeightBytes:
    """The bytes by role of a file's tensors, by their Hugging Face names.

    `format` says how the products are computed (`ceilings.compute_type`) and fills what no
    tensor was found for. A tied head is read as often as a head of its own.
    """
    found: dict[str, float] = {}
    for name, size in sizes.items():
        for role, pattern in _ROLE_PATTERNS:
            if re.search(pattern, name):
                found[role] = found.get(role, 0.0) + size
                break
    if "head" not in found and arch.tied_embedding and "embed" in found:
        found["head"] = found["embed"]
    return WeightBytes(format, found)


def parameters(arch: ModelArch) -> dict[str, float]:
    """Numbers in the weights by role, all layers together; a tied head counts once (embed)."""
    if arch.encoder is not None:
        labels, hidden = arch.encoder.labels, arch.hidden
        return {
            "embed": (arch.vocab_size + arch.max_context + arch.encoder.types) * hidden,
            "qkv": 3 * hidden * hidden * arch.layers,
            "output": hidden * hidden * arch.layers,
            "up": hidden * arch.intermediate * arch.layers,
            "down": hidden * arch.intermediate * arch.layers,
            "head": (hidden + labels) * hidden if labels else 0,
        }
    dense, sparse = arch.layers, 0
    queries = arch.heads * arch.head_dim
    if arch.mla is not None:
        mla = arch.mla
        query_in = arch.hidden if mla.q_rank is None else mla.q_rank
        qkv = query_in * arch.heads * (mla.nope_dim + mla.rope_dim)
        qkv += 0 if mla.q_rank is None else arch.hidden * mla.q_rank
        qkv += arch.hidden * (mla.kv_rank + mla.rope_dim)
        qkv += mla.kv_rank * arch.heads * (mla.nope_dim + mla.v_dim)
        output = arch.heads * mla.v_dim * arch.hidden
    else:
        qkv = arch.hidden * (queries + 2 * arch.kv_heads * arch.head_dim)
        output = queries * arch.hidden
    result: dict[str, float] = {
        "embed": arch.vocab_size * arch.hidden,
        "qkv": qkv * arch.layers,
        "output": output * arch.layers,
    }
    if arch.moe is not None:
        dense = arch.moe.dense_layers
        sparse = arch.layers - dense
        result["router"] = sparse * arch.hidden * arch.moe.experts
        result["experts"] = sparse * arch.moe.experts * 3 * arch.hidden * arch.moe.intermediate
        result["shared"] = sparse * 3 * arch.hidden * arch.moe.shared_intermediate
    result["gate_up"] = dense * 2 * arch.hidden * arch.intermediate
    result["down"] = dense * arch.hidden * arch.intermediate
    result["head"] = 0 if arch.tied_embedding else arch.vocab_size * arch.hidden
    return result


def total_bytes(arch: ModelArch, weights: WeightBytes) -> float:
    """All weights in memory; a tied head counts once."""
    total = 0.0
    for role, count in parameters(arch).items():
        if role == "head" and arch.tied_embedding:
            continue
        total += weights.by_role.get(role, count * weights.bits(role) / 8)
    return total
