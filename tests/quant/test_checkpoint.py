"""Quantised checkpoints against a definition of each format in float64, value by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.checkpoint_values import values
from headrace.quant.checkpoint import pack
from headrace.quant.schemes import Scheme, scheme_of

OUT, IN = 48, 256


def compress(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Unsigned values → int32 words along the last axis, written out one by one."""
    count = 32 // bits
    order = order or tuple(range(count))
    words = np.zeros((values.shape[0], values.shape[1] // count), np.uint32)
    for row in range(words.shape[0]):
        for word in range(words.shape[1]):
            for field, place in enumerate(order):
                code = int(values[row, word * count + place])
                words[row, word] |= np.uint32(code << (field * bits))
    return words.view(np.int32)


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


def assert_equals(scheme: Scheme, tensors: dict[str, np.ndarray], wanted: np.ndarray) -> None:
    packed = pack(scheme, tensors, "layer")
    assert packed.shape == (OUT, IN)
    assert packed.layout == "rows"
    assert packed.group <= 128
    assert packed.codes.dtype == np.uint8
    assert int(packed.codes.max()) < 1 << packed.bits
    # fp16 scales: every product and sum is exact in fp32.
    np.testing.assert_array_equal(values(packed).astype(np.float64), wanted)


def awq(group: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales = random(4, group)
    tensors = {
        "qweight": compress(codes.T, 4, order),
        "qzeros": compress(zeros.T, 4, order),
        "scales": scales.T,
    }
    return tensors, definition(codes, zeros, scales, group)


def gptq(bits: int, group: int, shift: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, zeros, scales = random(bits, group)
    tensors = {
        "qweight": np.ascontiguousarray(compress(codes, bits).T),
        "qzeros": compress(zeros.T - shift, bits),
        "scales": scales.T,
        "g_idx": np.arange(IN, dtype=np.int32) // group,
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


def compressed(
    layout: str, bits: int, strategy: str, group: int | None = None, actorder: str | None = None
) -> Scheme:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
        "actorder": actorder,
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
        "weight_scale": scales,
        "weight_shape": np.array([OUT, IN]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(compress(zeros.T, bits).T)
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
        "weight": (codes - 128).astype(np.int8),
        "weight_scale": scales if strategy == "channel" else scales[0],
    }
    if not symmetric:
        signed = (zeros - 128).astype(np.int8)
        tensors["weight_zero_point"] = signed if strategy == "channel" else signed[0]
    scheme = compressed("int-quantized", 8, strategy)
    assert_equals(scheme, tensors, definition(codes, zeros, scales, IN))


def test_fp32_scales_round_once() -> None:
    codes, zeros, scales = random(4, 64)
    exact = (scales.astype(np.float64) * (1 + 1e-4)).astype(np.float32)
    tensors, _ = awq(64)
    tensors["scales"] = exact.T
    order_free = definition(codes, zeros, exact, 64)
    found = values(pack(Scheme("awq", 4, 64), tensors, "x")).astype(np.float64)
    bound = 2**-23 * 16 * np.abs(exact).max()
    assert np.abs(found - order_free).max() <= bound


def change(key: str, value: Any) -> dict[str, np.ndarray]:
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
        (change("scales", np.ones((3, OUT), np.float32)), "scales has shape"),
        (change("scales", np.full((4, OUT), np.inf, np.float32)), "not finite"),
        (change("qzeros", np.zeros((4, 1), np.int32)), "qzeros is of shape"),
        (change("qweight", np.zeros((IN // 8, OUT))), "int32"),
        (change("qweight", np.zeros(7, np.int32)), "must be a matrix"),
        (change("qweight", np.zeros((5, OUT), np.int32)), "multiple of the group"),
    ],
)
def test_tensors_that_do_not_fit_together(tensors: dict[str, np.ndarray], says: str) -> None:
    with pytest.raises(ModelFileError, match=says):
        pack(Scheme("gptq", 4, 64, 1), tensors, "layer")


@pytest.mark.parametrize("layout", ["gptq", "packed"])
def test_activation_order(layout: str) -> None:
    """Groups of inputs far apart: the values are where the model has its inputs."""
    codes, zeros, scales = random(4, 64, symmetric=True)
    of_input = np.random.default_rng(7).permutation(np.arange(IN) // 64).astype(np.int32)
    wanted = (codes - zeros[:, of_input]) * scales.astype(np.float64)[:, of_input]
    if layout == "gptq":
        tensors, scheme = gptq(4, 64, 0)[0], Scheme("gptq", 4, 64)
        tensors |= {
            "qweight": compress(codes, 4).T,
            "qzeros": compress(zeros.T, 4),
            "scales": scales.T,
            "g_idx": of_input,
        }
    else:
        scheme = compressed("pack-quantized", 4, "group", 64, actorder="group")
        tensors = {
            "weight_packed": compress(codes, 4),
            "weight_scale": scales,
            "weight_g_idx": of_input,
        }
    packed = pack(scheme, tensors, "layer")
    assert packed.order is not None
    assert (np.diff(of_input[packed.order]) >= 0).all()
    np.testing.assert_array_equal(values(packed).astype(np.float64), wanted)


@pytest.mark.parametrize(
    ("of_input", "says"),
    [
        (np.arange(IN) // 64 + 1, "below 4"),
        (np.zeros(IN - 1, np.int32), "for each of 256"),
        (np.zeros(IN, np.int32), "64 inputs"),
        (np.zeros(IN, np.float32), "for each of 256"),
    ],
)
def test_an_order_that_is_none_is_refused(of_input: np.ndarray, says: str) -> None:
    tensors = gptq(4, 64, 1)[0] | {"g_idx": of_input}
    with pytest.raises(ModelFileError, match=f"layer: g_idx .*{says}"):
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
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    ],
)
def test_schemes_that_are_not_loaded(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        scheme_of({"quantization_config": config})


def test_dense_checkpoints_have_no_scheme() -> None:
    assert scheme_of({}) is None
    assert scheme_of({"quantization_config": None}) is None
