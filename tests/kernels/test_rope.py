"""Rotary tables: powers, cosines and sines are rounded once; those of transformers a hair less so.

torch's fp32 `pow`, `cos` and `sin` are off by up to 0.6 units in the last place, so that about one
in fifty of its wavelengths and one in twenty of its cosines are not the nearest fp32. All else is
the same arithmetic in the same order.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from headrace.base.arch import Rope
from headrace.kernels.rope import BLOCK, inverse_frequencies, rope_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}


def ulps(ours: np.ndarray, theirs: torch.Tensor) -> np.ndarray:
    """Count the fp32 numbers between them."""
    assert ours.dtype == np.float32
    return np.abs(ours.view(np.int32).astype(np.int64) - theirs.numpy().view(np.int32))


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    ("kind", "values", "original"),
    [("linear", {"factor": 8.0}, 8192), ("llama3", LLAMA3, 8192), ("yarn", YARN, 4096)],
)
def test_scaled(kind: str, values: dict, original: int, theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig  # Seconds, which no worker pays that runs other files.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": kind, "rope_theta": theta, **values}
    if kind != "linear":
        parameters["original_max_position_embeddings"] = original
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=32768,
        rope_parameters=parameters,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    rope = Rope(theta, kind, original_context=original, **values)
    off = ulps(inverse_frequencies(rope, head_dim), expected)
    assert off.max() <= 1
    # Bit for bit, where torch rounds the power to the nearest.
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    exact = power(theta, exponents.numpy())
    same = (theta**exponents).numpy() == exact
    assert same.sum() >= len(same) - 1
    assert not off[same].any()
    if kind == "yarn":
        assert factor == pytest.approx(1.1386294, abs=1e-6)


@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("theta", [1e4, 1.5e5, 1e6])
def test_plain_frequencies_are_rounded_once(theta: float, head_dim: int) -> None:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    expected = np.float32(1) / power(theta, exponents)
    assert np.array_equal(inverse_frequencies(Rope(theta), head_dim), expected)


def power(base: float, exponents: np.ndarray) -> np.ndarray:
    """The nearest fp32, by thirty decimal digits."""
    with localcontext() as context:
        context.prec = 30
        return np.array([float(Decimal(base) ** Decimal(float(x))) for x in exponents], np.float32)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_plain_table(theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    frequencies = inverse_frequencies(Rope(theta), 64)
    angles = np.arange(4096, dtype=np.float32)[:, None] * frequencies
    for ours, function, other in zip(
        rope_table(Rope(theta), 64, 4096), (math.cos, math.sin), theirs, strict=True
    ):
        exact = np.array([function(angle) for angle in angles.ravel().tolist()])
        assert np.array_equal(ours.ravel(), exact.astype(np.float32))
        off = ulps(ours, other[0, :, :32].contiguous())
        assert off.max() <= 1
        assert (off > 0).mean() < 0.06


@pytest.mark.parametrize("positions", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_table_is_the_beginning_of_a_longer_one(positions: int) -> None:
    whole = rope_table(Rope(), 32, 4 * BLOCK)
    for part, table in zip(rope_table(Rope(), 32, positions), whole, strict=True):
        assert part.shape == (positions, 16)
        assert part.dtype == np.float32
        assert np.array_equal(part, table[:positions])


def test_attention_factor_scales_both() -> None:
    plain = rope_table(Rope(), 8, 4)
    scaled = rope_table(Rope(attention_factor=2.0), 8, 4)
    for ours, twice in zip(plain, scaled, strict=True):
        assert np.array_equal(twice, ours * 2)
