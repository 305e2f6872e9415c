"""Configuration of each kernel, by architecture and shape bucket, from a table in the package.

`table.json` maps architecture → kernel → buckets, each a bound on a size (`up_to`) and a
configuration. The first bucket whose bound is not exceeded applies. An architecture that is `like`
another names only the kernels that differ: sm_86 (also 8.9) and sm_120 have 99 KB of shared memory
for a block, and smaller tiles where the others' take more. Tuning
(`python -m headrace.kernels.triton.tune`, on the GPU) writes the table; serving only reads it, so
nothing is tuned after start and the same shapes always run the same code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from .attention_decode import DecodeConfig
from .attention_prefill import PrefillConfig
from .moe_products import MoeConfig
from .product_dense import DenseConfig
from .product_fp8 import Fp8Config
from .product_packed import ProductConfig
from .product_packed_skinny import PackedSkinnyConfig
from .product_skinny import SkinnyConfig

PATH = Path(__file__).with_name("table.json")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

Config = TypeVar("Config")


@cache
def load_table(path: Path = PATH) -> dict[str, Any]:
    """Return the whole table, a file that ships with the package, so it never changes while we
    run."""
    table: dict[str, Any] = json.loads(path.read_text())
    for name, row in table.items():
        if like := row.pop("like", None):
            table[name] = {**table[like], **row}
    return table


def architecture(device: torch.device) -> str:
    """Return the table's row for a device: the newest one that is not newer than the device."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return max(
        (name for name in ARCHITECTURES if int(name[3:]) <= major * 10 + minor),
        key=lambda name: int(name[3:]),
        default=ARCHITECTURES[0],
    )


def multiplies_fp8(device: torch.device, row: str | None = None) -> bool:
    """Return whether the device has products of e4m3. They came with 8.9, between two rows of the
    table.

    `row`: decides alone if it is given; without a GPU, `architecture` decides.
    """
    if row is None and device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    return (row or architecture(device)) not in ("sm_80", "sm_86")


@dataclass(frozen=True, slots=True)
class Table:
    """The configurations of one architecture."""

    architecture: str

    def decode(self, width: int, *, coded: bool = False) -> DecodeConfig:
        """Find by head size; `coded`: for a cache in 8-bit codes."""
        return self._find(DecodeConfig, "attention_decode" + "_coded" * coded, width)

    def latents(self, heads: int) -> DecodeConfig:
        """Find by the heads of a tile over latents."""
        return self._find(DecodeConfig, "attention_latents", heads)

    def prefill(self, width: int, *, coded: bool = False) -> PrefillConfig:
        """Find by head size, for fp32 twice that: tiles of it must fit into shared memory. `coded`:
        for a cache in 8-bit codes."""
        return self._find(PrefillConfig, "attention_prefill" + "_coded" * coded, width)

    def packed(self, rows: int) -> ProductConfig:
        """Find by rows."""
        return self._find(ProductConfig, "product_packed", rows)

    def dense(self) -> DenseConfig:
        """Return the one for all: its cut is part of the result."""
        return self._find(DenseConfig, "product_dense", 0)

    def fp8(self, rows: int) -> Fp8Config:
        """Find by rows."""
        return self._find(Fp8Config, "product_fp8", rows)

    def skinny(self, rows: int, *, coded: bool = False) -> SkinnyConfig:
        """Find by rows; `coded`: for an fp8 weight with a scale per row."""
        return self._find(SkinnyConfig, "product_skinny" + "_coded" * coded, rows)

    def packed_skinny(self, rows: int) -> PackedSkinnyConfig:
        """Find by rows."""
        return self._find(PackedSkinnyConfig, "product_packed_skinny", rows)

    def moe(self, rows_per_expert: int) -> MoeConfig:
        """Find by the mean number of rows of an expert."""
        return self._find(MoeConfig, "moe", rows_per_expert)

    def _find(self, kind: type[Config], kernel: str, size: int) -> Config:
        for bucket in load_table()[self.architecture][kernel]:
            if bucket["up_to"] is None or size <= bucket["up_to"]:
                return kind(**{key: value for key, value in bucket.items() if key != "up_to"})
        raise AssertionError(f"the last bucket of {kernel} is open")
