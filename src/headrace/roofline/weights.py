"""Bytes of the weights by role: assumed from a format, or known from the file."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import commonprefix
from typing import Literal, get_args

from ..base.arch import ModelArch
from ..base.errors import OptionError
from ..base.graph import Purpose, WeightRef
from ..models.registry import describe
from .formats import weight_bits

_LAYER = re.compile(r"\.(\d+)\.")
Which = Literal["all", "last", "others"]
"""Choice of layers."""


WIDE_ENDS: Mapping[str, str] = {"embed": "bfloat16", "head": "bfloat16"}
"""Roles that recipes for narrow weights leave wide."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("qkv", "output"),
    "mlp": ("gate_up", "up", "down"),
    **{role: (role,) for role in get_args(Purpose) if role},
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
    """Return the bytes by role of a file's tensors, by their Hugging Face names; see `from_roles`.

    A tensor that the graph does not name (a stack, scales, several matrices in one) is counted with
    the matrix whose name begins most like its own.
    """
    # A tied head is the embedding: the first of the two counts.
    refs = reversed([*describe(arch).weights()])
    graph = {name: ref for ref in refs for name in ref.names}
    matrices = sorted(name for name, ref in graph.items() if ref.role != "vector")

    def role_of_name(name: str) -> str:
        if name not in graph:
            at = bisect(matrices, name)
            near = matrices[max(at - 1, 0) : at + 1]
            # By letters, not by components: in_proj_qkvz is near in_proj_qkv.
            name = max(near, key=lambda other: len(commonprefix((name, other))))  # noqa: RUF071
        return graph[name].purpose

    def parts() -> Iterator[tuple[str, int | None, float]]:
        for name, size in sizes.items():
            layer = _LAYER.search(name)
            yield role_of_name(name), int(layer[1]) if layer else None, size

    return from_roles(arch, parts(), format)


def from_roles(
    arch: ModelArch, sizes: Iterable[tuple[str, int | None, float]], format: str
) -> WeightBytes:
    """Return the bytes by role from (role, layer, bytes) of each tensor.

    `format` decides how the products are computed (`Hardware.compute_type`) and fills roles without
    a tensor. A tied head is read as often as a head of its own.
    """
    found: dict[str, float] = {}
    last: dict[str, float] = {}
    for role, layer, size in sizes:
        if role:
            found[role] = found.get(role, 0.0) + size
            if layer == arch.layers - 1:
                last[role] = last.get(role, 0.0) + size
    if "head" not in found and arch.tied_embedding and "embed" in found:
        found["head"] = found["embed"]
    return WeightBytes(format, found, last)


def role_of(ref: WeightRef) -> str:
    """Return the role of a weight; empty for vectors, and weights without a price."""
    return ref.purpose


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
        layer = _LAYER.search(ref.names[0])
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
