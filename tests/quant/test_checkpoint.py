"""Quantised checkpoints against a definition of each format in float64, value by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.quant.checkpoint import pack
from headrace.quant.rows import weights_of
from headrace.quant.schemes import Scheme, scheme_of

OUT, IN = 48, 256


def compress(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned values → int32 words along the last axis, written out one by one."""
    count = 32 // bits
    order = order or tuple(range(count))
    words = np.zeros((values.shape[0], values.shape[1] // count), np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            for field, place in enumerate(order):
                code = int(values[row, word * count + place])
                words[row, word] |= np.uint32(code << (field * bits))
    return torch.from_numpy(words.view(np.int32))


def random(bits: int, group: int, *, symmetric: bool = False) -> tuple[np.ndarray, ...]:
    """(codes [OUT, IN], zeros [OUT, groups], fp16 scales [OUT, groups])."""
    rng = np.random.default_rng(bits * 1000 + group)
    groups = IN // group
    zeros = (
        np.full((OUT, groups), 1 << (bits - 1))
        if symmetric
        else rng.integers(0, (1 << bits) - 1, (OUT, groups)) + 1
    )
    scales = rng.normal(0, 0.01, (OUT, groups)).astype(np.float16)
    return rng.integers(0, 1 << bits, (OUT, IN)), zeros, scales


def definition(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """w = (code - zero) · scale in float64."""
    each = np.arange(IN) // group
    result: np.ndarray = (codes - zeros[:, each]).astype(np.float64) * scales.astype(np.float64)[
        :, each
    ]
    return result


def assert_equals(scheme: Scheme, tensors: dict[str, torch.Tensor], wanted: np.ndarray) -> None:
    packed = pack(scheme, tensors, "layer")
    assert packed.shape == (OUT, IN)
    assert packed.layout == "rows"
    assert packed.group <= 128
    assert packed.codes.dtype == torch.uint8
    assert int(packed.codes.max()) < 1 << packed.bits
    # fp16 scales: every product and sum is exact in fp32.
    np.testing.assert_array_equal(weights_of(packed).double().numpy(), wanted)


def half(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def awq(group: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales = random(4, group)
    tensors = {
        "qweight": compress(codes.T, 4, order),
        "qzeros": compress(zeros.T, 4, order),
        "scales": half(scales.T),
    }
    return tensors, definition(codes, zeros, scales, group)


def gptq(bits: int, group: int, shift: int) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    codes, zeros, scales = random(bits, group)
    tensors = {
        "qweight": compress(codes, bits).t().contiguous(),
        "qzeros": compress(zeros.T - shift, bits),
        "scales": half(scales.T),
        "g_idx": torch.arange(IN, dtype=torch.int32) // group,
    }
    return tensors, definition(codes, zeros, scales, group)


@pytest.mark.parametrize("group", [32, 128])
def test_awq(group: int) -> None:
    tensors, wanted = awq(group)
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    scheme = scheme_of({"quantization_config": config})
    assert scheme == Scheme("awq", 4, group)
    assert_equals(scheme, tensors, wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, IN])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_gptq(bits: int, group: int, stored: str) -> None:
    tensors, wanted = gptq(bits, group, 1 if stored == "gptq" else 0)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": -1 if group == IN else group,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": stored,
    }
    scheme = scheme_of({"quantization_config": config})
    assert scheme is not None
    assert_equals(scheme, tensors, wanted)


def compressed(layout: str, bits: int, strategy: str, group: int | None = None) -> Scheme:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": {"dynamic": True, "num_bits": 8} if bits == 8 else None,
            }
        },
    }
    scheme = scheme_of({"quantization_config": config})
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [64, IN])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed(bits: int, group: int, symmetric: bool) -> None:
    codes, zeros, scales = random(bits, group, symmetric=symmetric)
    tensors = {
        "weight_packed": compress(codes, bits),
        "weight_scale": half(scales),
        "weight_shape": torch.tensor([OUT, IN]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = compress(zeros.T, bits).t().contiguous()
    scheme = (
        compressed("pack-quantized", bits, "channel")
        if group == IN
        else compressed("pack-quantized", bits, "group", group)
    )
    assert_equals(scheme, tensors, definition(codes, zeros, scales, group))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_int8(strategy: str, symmetric: bool) -> None:
    codes, zeros, scales = random(8, IN, symmetric=symmetric)
    if strategy == "tensor":
        zeros, scales = np.full_like(zeros, zeros[0, 0]), np.full_like(scales, scales[0, 0])
    tensors = {
        "weight": half((codes - 128).astype(np.int8)),
        "weight_scale": half(scales if strategy == "channel" else scales[0]),
    }
    if not symmetric:
        signed = (zeros - 128).astype(np.int8)
        tensors["weight_zero_point"] = half(signed if strategy == "channel" else signed[0])
    scheme = compressed("int-quantized", 8, strategy)
    assert_equals(scheme, tensors, definition(codes, zeros, scales, IN))


def test_fp32_scales_round_once() -> None:
    codes, zeros, scales = random(4, 64)
    exact = (scales.astype(np.float64) * (1 + 1e-4)).astype(np.float32)
    tensors, _ = awq(64)
    tensors["scales"] = half(exact.T)
    order_free = definition(codes, zeros, exact, 64)
    found = weights_of(pack(Scheme("awq", 4, 64), tensors, "x")).double().numpy()
    bound = 2**-23 * 16 * np.abs(exact).max()
    assert np.abs(found - order_free).max() <= bound


def change(key: str, value: Any) -> dict[str, torch.Tensor]:
    tensors = gptq(4, 64, 1)[0]
    if value is None:
        del tensors[key]
    else:
        tensors[key] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (change("scales", None), "scales is missing"),
        (change("qzeros", None), "qzeros is missing"),
        (change("scales", torch.ones(3, OUT)), "scales has shape"),
        (change("scales", torch.full((4, OUT), torch.inf)), "not finite"),
        (change("qzeros", torch.zeros(4, 1, dtype=torch.int32)), "qzeros is of shape"),
        (change("qweight", torch.zeros(IN // 8, OUT)), "int32"),
        (change("qweight", torch.zeros(7, dtype=torch.int32)), "must be a matrix"),
        (change("qweight", torch.zeros(5, OUT, dtype=torch.int32)), "multiple of the group"),
    ],
)
def test_tensors_that_do_not_fit_together(tensors: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(ModelFileError, match=says):
        pack(Scheme("gptq", 4, 64, 1), tensors, "layer")


def test_activation_order_is_refused_only_where_it_matters() -> None:
    tensors = gptq(4, 64, 1)[0]
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    with pytest.raises(UnsupportedModel, match="desc_act"):
        pack(Scheme("gptq", 4, 64, 1), tensors, "layer")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: awq"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method is 'fbgemm_fp8'"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits is 3"),
        ({"quant_method": "gptq", "bits": 6, "group_size": 128}, "bits is 6"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "group_size is 100"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_schemes_that_are_not_loaded(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        scheme_of({"quantization_config": config})


def test_dense_checkpoints_have_no_scheme() -> None:
    assert scheme_of({}) is None
    assert scheme_of({"quantization_config": None}) is None
