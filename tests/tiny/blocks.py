"""Random weights in the block formats of GGUF: every bit of a format is in use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.quant.ggml_types import BY_NAME

_HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Places of the fp16 numbers of a block, if not at its beginning."""
_TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def random_blocks(
    kind: str, rows: int, columns: int, seed: int = 0, scale: float = 0.05
) -> npt.NDArray[np.uint8]:
    """Random bytes [rows, bytes of a row], but for their fp16 numbers, which are normal numbers
    times `scale`; MXFP4's scales, which are a byte, lie between 2^-16 and 2^-8."""
    rng = np.random.default_rng(seed)
    entry = BY_NAME[kind]
    count = rows * columns // entry.block
    blocks = rng.integers(0, 256, (count, entry.nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(112, 120, count)
        return blocks.reshape(rows, -1)
    for at in _HALVES.get(kind, (0, 2) if kind in _TWO else (0,)):
        numbers = (rng.standard_normal(count) * scale).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(count, 2)
    return blocks.reshape(rows, -1)
