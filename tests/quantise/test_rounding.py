"""Rounding: GPTQ against a float64 solve, and every format's bytes against foreign decoders."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ModelFileError
from headrace.factory.to_compressed import TARGETS
from headrace.kernels.checkpoint_values import values
from headrace.kernels.cpu.encode import BLOCKS, encoder
from headrace.quant.checkpoint import load
from headrace.quant.schemes import scheme_of
from headrace.quantise.blocks import FORMATS, integers
from headrace.quantise.coded import fp8, fp8_codes
from headrace.quantise.rounding import Rounding
from headrace.quantise.solve import DAMPING, Grid, Solver, factor, loss
from headrace.quantise.statistic import Statistic

Floats = np.ndarray[Any, Any]


def matrix(rows: int, width: int, seed: int = 0) -> tuple[Floats, Statistic]:
    """Weights, and the statistic of an input whose columns depend on each other."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((width, width)) * np.exp(0.7 * rng.standard_normal(width)) / 8
    x = (rng.standard_normal((4 * width, width)) @ mix).astype(np.float32)
    statistic = Statistic.empty(width)
    statistic.add(x)
    return (rng.standard_normal((rows, width)) * 0.05).astype(np.float32), statistic


def gptq64(w: Floats, gram: Floats, scale: Floats) -> Floats:
    """The paper's algorithm as it is written, in float64: the inverse is updated by elimination."""
    order = np.argsort(-np.diagonal(gram), kind="stable")
    h = gram.astype(np.float64) + DAMPING * np.diagonal(gram).mean() * np.eye(len(gram))
    inverse = np.linalg.inv(h)
    left, codes = w.astype(np.float64), np.zeros(w.shape)
    for at in order:
        codes[:, at] = np.clip(np.rint(left[:, at] / scale), -8, 7)
        error = (left[:, at] - codes[:, at] * scale) / inverse[at, at]
        left -= np.outer(error, inverse[at])
        left[:, at] = codes[:, at] * scale
        inverse -= np.outer(inverse[:, at], inverse[at]) / inverse[at, at]
    return codes


@pytest.mark.parametrize("width", [8, 70, 160])
def test_gptq_against_float64(width: int) -> None:
    w, statistic = matrix(12, width)
    scale = np.abs(w).max(1) / 7
    grid = Grid(width, scale[None].astype(np.float32), None, integers(-8, 7))
    found = Solver(statistic.gram).codes(w, grid)
    exact = gptq64(w, statistic.gram, scale)
    # A weight halfway between two codes may go either way, and those after it then differ.
    same = (found == exact).all(axis=1)
    assert same.mean() > 0.7
    errors = [loss(codes * scale[:, None] - w, statistic.gram) for codes in (found, exact)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
    assert errors[0] < 0.7 * loss(grid.values(grid.round(w)) - w, statistic.gram)


@given(st.integers(1, 300), st.integers(0, 5))
def test_the_factor_inverts(width: int, seed: int) -> None:
    x = np.random.default_rng(seed).standard_normal((width // 2 + 1, width)).astype(np.float32)
    gram = x.T @ x  # Of half its rank.
    upper = factor(gram).astype(np.float64)
    damped = gram + DAMPING * np.diagonal(gram).mean() * np.eye(width)
    assert np.abs(upper.T @ upper @ damped - np.eye(width)).max() < 2e-3
    assert np.allclose(upper, np.triu(upper))


def test_the_factor_of_nothing_is_rounding_to_the_nearest() -> None:
    w, _ = matrix(5, 64)
    grid = FORMATS["Q4_0"].fitted(w, None).grid
    assert np.array_equal(Solver(np.zeros((64, 64), np.float32)).codes(w, grid), grid.round(w))


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_against_the_decoder_of_gguf(kind: str, text: bool) -> None:
    w, statistic = matrix(130, 512)
    w[3] = 0
    w[4, 100:] = 0
    w[5] = np.abs(w[5])
    w[6] = 3e4
    w[7] *= 1e-7
    fmt = FORMATS[kind]
    rounding = Rounding()
    given_ = statistic if text else None
    fitted = fmt.fitted(w, None if given_ is None else given_.gram)
    codes, grid = rounding.codes(w, fitted.grid, given_)
    packed = fmt.pack(codes, fitted.stored(grid))
    found = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found, grid.values(codes))
    if text:
        assert rounding.errors.kept <= rounding.errors.nearest
        usual, plain = matrix(130, 512), FORMATS[kind]
        grid = plain.fitted(usual[0], statistic.gram).grid
        rounding = Rounding()
        rounding.codes(usual[0], grid, statistic)
        assert rounding.errors.kept < 0.6 * rounding.errors.nearest


@pytest.mark.parametrize("kind", sorted({*FORMATS} & {*BLOCKS}))
def test_the_search_on_a_text_loses_less_than_the_one_without(kind: str) -> None:
    w, statistic = matrix(130, 512)
    found = gguf.quants.dequantize(encoder()(kind, w), gguf.GGMLQuantizationType[kind])
    grid = FORMATS[kind].fitted(w, statistic.gram).grid
    here = loss(grid.values(grid.round(w)) - w, statistic.gram)
    assert here <= 1.001 * loss(found - w, statistic.gram)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e5])
def test_weights_without_a_scale_are_refused(bad: float) -> None:
    w, _ = matrix(2, 256)
    w[1, 17] = bad
    with pytest.raises(ModelFileError, match="not finite, or too large"):
        FORMATS["Q4_K"].fitted(w, None)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("to", TARGETS)
def test_checkpoints_against_our_own_reader(to: str, dtype: str) -> None:
    coding = TARGETS[to]
    w, statistic = matrix(264, 256)
    fitted = coding.fitted(w, statistic.gram, dtype, float(np.abs(w).max()))
    codes, grid = Rounding().codes(w, fitted.grid, statistic)
    parts = coding.parts(*w.shape, dtype)
    arrays = {parts[0][0]: coding.packed(codes), **fitted.stored(grid)}
    if coding.format == "pack-quantized":
        arrays["weight_shape"] = np.array(w.shape)
    assert list(arrays[parts[0][0]].shape) == parts[0][2]
    told = {"quantization_config": {
        "quant_method": "compressed-tensors", "format": coding.format,
        "config_groups": {"group_0": coding.config()},
    }}  # fmt: skip
    scheme = scheme_of(told)
    assert scheme is not None
    shaped = {name: np.ascontiguousarray(arrays[name]).reshape(shape) for name, _, shape in parts}
    read = load(scheme, shaped, "w")
    exact = grid.values(codes)
    found = values(read)
    assert np.abs(found - exact).max() <= 1e-6 * np.abs(exact).max()
    assert np.linalg.norm(found - w) < 0.3 * np.linalg.norm(w)


def test_fp8_is_rounded_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.standard_normal(5000) * 10.0 ** rng.integers(-4, 3, 5000), [0, -0.0, 448, -460, 1e9]]
    ).astype(np.float32)
    wanted = torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn)
    assert np.array_equal(fp8(x), wanted.float().numpy())
    assert np.array_equal(fp8_codes(fp8(x)), wanted.view(torch.uint8).numpy())
