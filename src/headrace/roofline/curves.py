"""Curves of well-tuned GPU kernels, by device and class of operator (`curves.txt`).

Fitted to the operator tables of `aiconfigurator-core` 0.12.0 (H100, H200, B200, A100, L40S; the
best of TensorRT-LLM, vLLM and SGLang for each shape).
docs/roofline.md has the errors, on shapes that were fitted and on shapes that were not. A class
missing here was not measured there, or not fitted well enough to be better than the assumed shares
(the collectives of L40S).
"""

from __future__ import annotations

from pathlib import Path

from ..base.sections import read_rows
from .efficiency import Curve


def _read(path: Path) -> dict[str, dict[str, Curve]]:
    found: dict[str, dict[str, Curve]] = {}

    def read(row: str) -> None:
        device, operators, *numbers = row.split()
        compute, memory, overlap, floor, deep, pieces = map(float, numbers)
        curve = Curve(compute, memory, overlap, 1e-6 * floor, 1e-6 * deep, 1e-6 * pieces)
        found.setdefault(device, {})[operators] = curve

    read_rows(path, read)
    return found


CURVES = _read(Path(__file__).with_suffix(".txt"))
"""Device → class (`step.curve_names`) → curve."""
