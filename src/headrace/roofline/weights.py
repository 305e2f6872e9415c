"""Bytes of the weights by role: assumed from a format, or known from the file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from ..base.arch import ModelArch
from ..base.errors import OptionError
from ..base.graph import WeightRef
from ..models.registry import describe
from .formats import weight_bits

_ROLE_PATTERNS = (
    ("embed", r"embed_tokens(_per_layer)?\.weight$|embeddings\.\w+_embeddings\.weight$"),
    ("head", r"lm_head\.weight$|pooler\.dense\.weight$|^classifier\.weight$"),
    ("qkv", r"attention\.self\.(query|key|value)\.weight$"),
    ("output", r"attention\.output\.dense\.weight$"),
    ("up", r"intermediate\.dense\.weight$"),
    ("down", r"\d\.output\.dense\.weight$"),
    (
        "qkv",
        r"(?:self_attn|mixer)\.(q|k|v|qkv|gate|(q|kv)_a|(q|kv|k|v)_b)_?proj(_with_mqa|\.[\d*]+)?\.weight$",
    ),
    ("output", r"(self_attn|mixer)\.o_proj\.weight$"),
    ("state_in", r"(conv|linear_attn|mamba|mixer)\.in_proj(_\w+)?\.weight$"),
    ("state_out", r"(conv|linear_attn|mamba|mixer)\.out_proj\.weight$"),
    ("shared", r"mlp\.shared_experts?\."),
    ("experts", r"\.experts\."),
    ("router", r"mlp\.(gate|shared_expert_gate)\.weight$|router\.proj\.weight$"),
    ("per_layer", r"per_layer_(model_projection|input_gate|projection)\.weight$"),
    ("up", r"mlp\.c_fc\.weight$|mixer\.up_proj\.weight$"),
    ("gate_up", r"mlp\.(gate|up|gate_up)_proj\.weight$"),
    ("down", r"(mlp|mixer)\.(down|c)_proj\.weight$"),
)

Which = Literal["all", "last", "others"]
"""Choice of layers."""


WIDE_ENDS: Mapping[str, str] = {"embed": "bfloat16", "head": "bfloat16"}
"""Roles that recipes for narrow weights leave wide."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("qkv", "output"),
    "mlp": ("gate_up", "up", "down"),
    **{role: (role,) for role, _ in _ROLE_PATTERNS},
}
"""Name in a format → roles."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of weights; `by_role` in all layers together, if known; the rest follows `format`."""

    format: str = "bfloat16"
    by_role: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    """Like `by_role` for the last layer, which recipes leave wider too; otherwise as `by_role`."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Formats of the roles that differ from the rest."""

    @property
    def name(self) -> str:
        """Name that `parse_format` reads."""
        own = {
            role: format for role, format in self.formats.items() if format != WIDE_ENDS.get(role)
        }
        return ",".join([self.format, *(f"{role}={format}" for role, format in own.items())])

    def format_of(self, role: str) -> str:
        return self.formats.get(role, self.format)

    def bits(self, role: str) -> float:
        return weight_bits(self.format_of(role))

    def of(self, role: str, parameters: float, layers: int, which: Which = "all") -> float:
        """Return the bytes of one layer's weight of `parameters` numbers in this role.

        `layers` layers have it. The result is the mean of all, of the last, or the mean of the
        others.
        """
        if role not in self.by_role:
            return parameters * self.bits(role) / 8
        mean = self.by_role[role] / max(1, layers)
        if which == "all" or role not in self.last:
            return mean
        last = self.last[role]
        return last if which == "last" else (self.by_role[role] - last) / max(1, layers - 1)


def parse_format(text: str) -> WeightBytes:
    """Parse `fp8`, or with exceptions by part `bfloat16,experts=mxfp4` or `int4,attention=fp8`.

    Embedding and head of a narrow format stay bfloat16 unless they are named. Parts: the roles of
    weights (embed, head, qkv, output, gate_up, up, down, experts, shared, router) and attention and
    mlp for several. Raises `OptionError`.
    """
    rest, formats = "", dict[str, str]()
    for word in text.replace(" ", "").split(","):
        part, equals, format = word.rpartition("=")
        weight_bits(format)
        if not equals and not rest:
            rest = format
        elif part in PARTS:
            formats.update(dict.fromkeys(PARTS[part], format))
        else:
            raise OptionError(
                f"format is FORMAT[,PART=FORMAT…] with parts {', '.join(PARTS)}, not {text!r}",
                param="format",
            )
    rest = rest or "bfloat16"
    narrow = weight_bits(rest) < weight_bits("bfloat16")
    return WeightBytes(rest, formats={**(WIDE_ENDS if narrow else {}), **formats})


def from_tensors(arch: ModelArch, sizes: Mapping[str, int], format: str) -> WeightBytes:
    """Return the bytes by role of a file's tensors, by their Hugging Face names.

    `format` decides how the products are computed (`Hardware.compute_type`) and fills roles without
    a tensor. A tied head is read as often as a head of its own.
    """
    found: dict[str, float] = {}
    last: dict[str, float] = {}
    for name, size in sizes.items():
        role = role_of_name(name)
        if role:
            found[role] = found.get(role, 0.0) + size
            if f".layers.{arch.layers - 1}." in name:
                last[role] = last.get(role, 0.0) + size
    if "head" not in found and arch.tied_embedding and "embed" in found:
        found["head"] = found["embed"]
    return WeightBytes(format, found, last)


def role_of(ref: WeightRef) -> str:
    """Return the role of a weight; empty for vectors, and weights without a price."""
    return "head" if ref.role == "logits" else role_of_name(ref.names[0])


@lru_cache(maxsize=4096)
def role_of_name(name: str) -> str:
    return next((role for role, pattern in _ROLE_PATTERNS if re.search(pattern, name)), "")


@lru_cache(maxsize=64)
def _numbers(arch: ModelArch) -> dict[str, tuple[int, int]]:
    """Return role → (numbers in all layers together, number of layers that have it)."""
    numbers: dict[str, int] = {}
    layers: dict[str, set[str]] = {}
    seen: set[str] = set()
    for ref in describe(arch).weights():
        role = role_of(ref)
        if ref.role == "vector" or not role:
            continue
        layer = re.search(r"\.(\d+)\.", ref.names[0])
        layers.setdefault(role, set()).add(layer[1] if layer else "")
        numbers[role] = numbers.get(role, 0) + ref.numbers * (ref.names[0] not in seen)
        seen.update(ref.names)
    return {role: (count, len(layers[role])) for role, count in numbers.items()}


def numbers_of(arch: ModelArch, role: str) -> tuple[int, int]:
    """Return the numbers of one layer's weights in this role, and how many layers have them."""
    count, layers = _numbers(arch)[role]
    if role == "head" and not count:
        count = _numbers(arch)["embed"][0]
    return count // layers, layers


def parameters(arch: ModelArch) -> dict[str, float]:
    """Count the numbers in the weights by role, all layers together; a tied head counts once
    (embed)."""
    return {role: count for role, (count, _) in _numbers(arch).items()}


def total_bytes(arch: ModelArch, weights: WeightBytes) -> float:
    """Return the bytes of all weights in memory; a tied head counts once."""
    total = 0.0
    for role, count in parameters(arch).items():
        if role == "head" and arch.tied_embedding:
            continue
        total += weights.by_role.get(role, count * weights.bits(role) / 8)
    return total
