"""Blocks to the bit as the oracle makes them, and as ggml's own reader decodes them."""

from functools import partial

import gguf
import numpy as np
import pytest

from headrace.base.errors import ModelFileError
from headrace.kernels.cpu.encode import BLOCKS, Encoder
from headrace.kernels.cpu.library import Team
from oracle import encoders

SIMPLE = ("Q8_0", "Q4_0", "Q5_0")
"""Types of which ggml's Python package has a quantiser too."""
MOST = {"Q6_K": 0.022, "Q4_K": 0.085}
"""Error of the weights below: a bound that a wrong bit does not keep."""
TYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def encode() -> Encoder:
    return Encoder(Team(2))


def weights() -> np.ndarray:
    """Heavy tails as real matrices have; rows of zeros, of one sign, of one number."""
    made = np.random.default_rng(0).standard_t(5, (64, 512)).astype(np.float32) * 0.02
    made[1], made[2], made[3] = 0, np.abs(made[2]) + 0.5, 0.25
    made[4], made[5, :256], made[6] = -0.25, 0, -np.abs(made[6])
    return made


def odd_weights() -> np.ndarray:
    """Weights that are mostly zeros, of few values, with one that is large, and by powers of ten
    from the largest that has a scale to the least that there is."""
    made, drawn = weights(), np.random.default_rng(1)
    few = np.where(drawn.random(made.shape) < 0.05, made, 0)
    steps = np.round(made * 100) / 100
    outlier = made.copy()
    outlier[:, 100] = 59_999
    sizes = 10.0 ** np.arange(-45, 5)[:, None]
    scaled = (made[10:60] / np.abs(made[10:60]).max(axis=1)[:, None] * sizes).astype(np.float32)
    some = np.where(drawn.random(scaled.shape) < 0.5, scaled, 0)
    ends = np.where(drawn.random((40, 512)) < 0.5, 1.5, -1.5) * drawn.random((40, 1))
    return np.concatenate([few, steps, outlier, scaled, some, ends]).astype(np.float32)


def error(exact: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(((found - exact) ** 2).sum() / (exact**2).sum()))


def decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_ggml_and_close(kind: str, encode: Encoder) -> None:
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", BLOCKS)
def test_bits_are_the_oracles(kind: str, dtype: str, encode: Encoder) -> None:
    made = np.concatenate([weights(), odd_weights()])
    given = made
    if dtype == "float16":
        given = made.astype(np.float16)
        made = given.astype(np.float32)
    if dtype == "bfloat16":
        given = (made.view(np.uint32) >> 16).astype(np.uint16)
        made = (given.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        wanted = encoders.encode(kind, made)
    assert np.array_equal(encode(kind, given), wanted)
    width = 32 * 7 if BLOCKS[kind][0] == 32 else 256  # The last pieces are not whole.
    assert np.array_equal(
        Encoder(Team(3))(kind, given[:5, :width]), encoders.encode(kind, made[:5, :width])
    )


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_scales_are_the_oracles(size: int, encode: Encoder) -> None:
    groups = np.concatenate([weights(), odd_weights()]).reshape(-1, size)[:-3]
    with np.errstate(all="ignore"):
        wanted = encoders.symmetric(groups, 8)
    assert np.array_equal(encode.symmetric(groups, 8), wanted)


@pytest.mark.parametrize("kind", [*BLOCKS, "scales"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 1e30, -60_001])
def test_numbers_without_a_scale_are_refused(kind: str, number: float, encode: Encoder) -> None:
    exact = weights()
    exact[9, 9] = number
    make = (
        partial(encode, kind) if kind in BLOCKS else lambda rows: encode.symmetric(rows[:, :64], 8)
    )
    with pytest.raises(ModelFileError, match="not finite, or too large"):
        make(exact)
