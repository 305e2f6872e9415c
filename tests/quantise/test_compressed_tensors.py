"""What we write, read by compressed-tensors' own code: the same numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_rounding import matrix

from headrace.factory.to_compressed import TARGETS
from headrace.kernels.checkpoint_values import values
from headrace.quant.fp4 import fp4_weight
from headrace.quantise.rounding import Rounding

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

TYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
}


@pytest.mark.parametrize("to", TARGETS)
def test_their_reader_reads_our_numbers(to: str) -> None:
    coding = TARGETS[to]
    w, statistic = matrix(256, 256)
    fitted = coding.fitted(w, statistic.gram, "F32", float(np.abs(w).max()))
    codes, grid = Rounding().codes(w, fitted.grid, statistic)
    parts = coding.parts(*w.shape, "F32")
    shape = {"weight_shape": np.array(w.shape)}
    arrays = {parts[0][0]: coding.packed(codes), **shape, **fitted.stored(grid)}
    state = {}
    for name, dtype, shape in parts:
        array = torch.from_numpy(np.ascontiguousarray(arrays[name])).reshape(shape)
        state[name] = (
            array.view(torch.float8_e4m3fn) if dtype == "F8_E4M3" else array.to(TYPES[dtype])
        )
    scheme = QuantizationScheme.model_validate(coding.config())
    compressor = BaseCompressor.get_value_from_registry(coding.format)
    if to == "nvfp4":  # Its own `decompress` computes in bfloat16.
        packed = state["weight_packed"]
        found = dequantize(
            unpack_fp4_from_uint8(packed, *w.shape, dtype=torch.float32),
            state["weight_scale"].float(),
            args=scheme.weights,
            global_scale=state["weight_global_scale"],
            dtype=torch.float32,
        ).numpy()
    else:
        found = compressor.decompress(state, scheme)["weight"].float().numpy()
    exact = grid.values(codes)
    assert np.abs(found - exact).max() <= 1e-6 * np.abs(exact).max()
    if coding.symmetric:  # With a zero point the sum is rounded in another order.
        assert np.array_equal(found, exact)


@pytest.mark.parametrize("divisor", [2048.0, 1713.7])
def test_our_reader_reads_theirs_bit_for_bit(divisor: float) -> None:
    """Every byte of NVFP4, with any divisor."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (32, 128), np.uint8)
    scales = rng.integers(0, 0x7F, (32, 16), np.uint8)
    stored = {"weight_packed": packed, "weight_scale": scales}
    stored["weight_global_scale"] = np.array([divisor], np.float32)
    scheme = QuantizationScheme.model_validate(TARGETS["nvfp4"].config())
    theirs = dequantize(
        unpack_fp4_from_uint8(torch.from_numpy(packed), 32, 256, dtype=torch.float32),
        torch.from_numpy(scales).view(torch.float8_e4m3fn).float(),
        args=scheme.weights,
        global_scale=torch.tensor([divisor]),
        dtype=torch.float32,
    ).numpy()
    assert np.array_equal(values(fp4_weight(stored, "w")), theirs)
