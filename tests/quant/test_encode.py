"""Blocks as ggml's own reader decodes them, beside what its simple quantisers make."""

import gguf
import numpy as np
import pytest

from headrace.base.errors import ModelFileError
from headrace.quant.encode import ENCODERS, encode

SIMPLE = ("Q8_0", "Q4_0", "Q5_0")
"""Types of which ggml's Python package has a quantiser too."""
MOST = {"Q6_K": 0.022, "Q4_K": 0.085}
"""Error of the weights below: a bound that a wrong bit does not keep."""


def weights() -> np.ndarray:
    """Heavy tails as real matrices have; rows of zeros, of one sign, of one number."""
    made = np.random.default_rng(0).standard_t(5, (64, 512)).astype(np.float32) * 0.02
    made[1], made[2], made[3] = 0, np.abs(made[2]) + 0.5, 0.25
    made[4], made[5, :256], made[6] = -0.25, 0, -np.abs(made[6])
    return made


def error(exact: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(((found - exact) ** 2).sum() / (exact**2).sum()))


def decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_are_those_of_ggml_and_close(kind: str) -> None:
    exact = weights()
    blocks = encode(kind, exact)
    found = decoded(kind, blocks)
    assert np.isfinite(found).all()
    assert not found[1].any()
    assert error(exact[3:5], found[3:5]) < 0.01  # A group of one number loses nothing but bits.
    if kind in SIMPLE:
        simple = gguf.quants.quantize(exact, gguf.GGMLQuantizationType[kind])
        limit = error(exact[7:], decoded(kind, simple)[7:])
        assert kind != "Q8_0" or np.array_equal(blocks, simple)
    else:
        limit = MOST[kind]
    assert error(exact[7:], found[7:]) <= limit
    assert np.array_equal(encode(kind, exact[9:10]), blocks[9:10])  # No row knows of another.


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_numbers_without_a_scale_are_refused(kind: str, number: float) -> None:
    exact = weights()
    exact[9, 9] = number
    with pytest.raises(ModelFileError, match="not finite, or too large"):
        encode(kind, exact)
