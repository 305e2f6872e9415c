"""NVFP4 of compressed-tensors: numbers by their definition, and files that lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.checkpoint_values import values
from headrace.quant.checkpoint import load
from headrace.quant.fp4 import E4M3
from headrace.quant.schemes import Scheme, scheme_of

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SCHEME = Scheme("nvfp4", 8, 16)


def stored(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "weight_packed": rng.integers(0, 256, (6, 24), np.uint8),
        "weight_scale": rng.integers(0, 0x7F, (6, 3), np.uint8),
        "weight_global_scale": np.array([7.5], np.float32),
    }


def test_every_byte_of_e4m3() -> None:
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    finite = np.isfinite(exact)
    assert finite.sum() == 254
    assert np.array_equal(E4M3[finite], exact[finite])


def test_numbers_are_read_by_their_definition() -> None:
    given = stored()
    signed = np.array([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    packed = given["weight_packed"]
    numbers = signed[np.stack([packed & 15, packed >> 4], -1).reshape(6, 48)]
    exact = numbers * np.repeat(E4M3[given["weight_scale"]].astype(np.float64), 16, 1) / 7.5
    found = values(load(SCHEME, given, "w"))
    assert np.abs(found - exact).max() <= 3e-6 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("weight_scale", None, "weight_scale is missing"),
        ("weight_scale", np.zeros((6, 2), np.uint8), "weight_scale is of shape"),
        ("weight_scale", np.full((6, 3), 0x7F, np.uint8), "finite"),
        ("weight_scale", np.zeros((6, 3), np.float32), "float8_e4m3fn"),
        ("weight_packed", np.zeros((6, 24), np.int8), "uint8"),
        ("weight_global_scale", None, "weight_global_scale must be"),
        ("weight_global_scale", np.array([np.nan], np.float32), "weight_global_scale must be"),
        ("weight_global_scale", np.array([0], np.float32), "weight_global_scale must be"),
        ("weight_global_scale", np.array([1, 2], np.float32), "weight_global_scale must be"),
    ],
)
def test_files_that_lie_are_refused(name: str, array: Any, says: str) -> None:
    given = stored()
    if array is None:
        del given[name]
    else:
        given[name] = array
    with pytest.raises(ModelFileError, match=f"w: .*{says}"):
        load(SCHEME, given, "w")


def test_other_sizes_are_refused_by_name() -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32}
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises((UnsupportedModel, ModelFileError), match="group_size"):
        scheme_of({"quantization_config": config})
    weights["group_size"] = 16
    assert scheme_of({"quantization_config": config}) == SCHEME
