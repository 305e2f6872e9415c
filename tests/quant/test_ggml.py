"""The block formats against the reference package's own dequantisation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from headrace.base.errors import UnsupportedModel
from headrace.kernels.weights import BlockWeight
from headrace.quant import dequantise, unpack
from headrace.quant.ggml_types import BY_NAME, BY_NUMBER, QUANTISED
from headrace.quant.rows import weights_of
from tiny.blocks import random_blocks


def weight(kind: str, rows: int = 6, columns: int = 512, seed: int = 0) -> BlockWeight:
    data = torch.from_numpy(random_blocks(kind, rows, columns, seed))
    return BlockWeight(kind, data, (rows, columns))


def reference(block: BlockWeight) -> np.ndarray:
    return gguf.quants.dequantize(block.data.numpy(), gguf.GGMLQuantizationType[block.kind])


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("shape", [(1, 256), (6, 512), (700, 768)])
def test_dequantise_equals_the_reference(kind: str, shape: tuple[int, int]) -> None:
    block = weight(kind, *shape)
    ours = dequantise(block).numpy()
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, reference(block))


@pytest.mark.parametrize("kind", QUANTISED)
def test_extreme_scales(kind: str) -> None:
    """The largest and the smallest fp16 numbers: nothing overflows that does not there."""
    block = weight(kind)
    raw = block.data.numpy().reshape(-1, BY_NAME[kind].nbytes)
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
    # MXFP4's scale is a byte, and the largest ones make infinities.
    for number, byte in ((65504.0, 250), (6e-8, 1), (0.0, 0)):
        raw[:, at : at + 2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
        if kind == "MXFP4":
            raw[:, 0] = byte
        np.testing.assert_array_equal(dequantise(block).numpy(), reference(block))


@pytest.mark.parametrize("kind", QUANTISED)
def test_unpack_loses_nothing(kind: str) -> None:
    block = weight(kind, 40, 768, seed=3)
    packed = unpack(block)
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.shape == block.shape
    assert packed.scales.dtype == torch.float32
    assert packed.scales.shape == (40, 768 // packed.group)
    assert int(packed.codes.max()) < 2**packed.bits
    assert torch.equal(weights_of(packed), dequantise(block))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_round_once(dtype: torch.dtype) -> None:
    block = weight("Q4_K")
    assert torch.equal(dequantise(block, dtype), dequantise(block).to(dtype))


def test_real_quantisation_round_trip() -> None:
    """Formats that the reference package can write: its error bound holds after ours."""
    rng = np.random.default_rng(7)
    dense = rng.normal(0, 1, (16, 256)).astype(np.float32)
    for kind, bound in (
        ("Q4_0", 0.4),
        ("Q4_1", 0.25),
        ("Q5_0", 0.2),
        ("Q5_1", 0.13),
        ("Q8_0", 0.02),
    ):
        data = gguf.quants.quantize(dense, gguf.GGMLQuantizationType[kind])
        back = dequantise(BlockWeight(kind, torch.from_numpy(data), (16, 256)))
        assert np.abs(back.numpy() - dense).max() < bound


def test_row_permutation_needs_no_decoding() -> None:
    block = weight("Q6_K", 8, 256)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    moved = BlockWeight(block.kind, block.data[order], block.shape)
    assert torch.equal(dequantise(moved), dequantise(block)[order])


@pytest.mark.parametrize("kind", ["IQ3_XXS", "IQ2_XXS", "TQ1_0"])
def test_other_types_are_refused_by_name(kind: str) -> None:
    entry = BY_NAME[kind]
    data = torch.zeros((1, entry.row_bytes(256)), dtype=torch.uint8)
    with pytest.raises(UnsupportedModel, match=rf"{kind}.*Q4_K"):
        dequantise(BlockWeight(kind, data, (1, 256)))


def test_the_type_table_is_the_specification() -> None:
    for number, entry in BY_NUMBER.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == entry.name
        assert gguf.GGML_QUANT_SIZES[kind] == (entry.block, entry.nbytes)
