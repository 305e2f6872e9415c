"""Quantised matrices that a file holds as one and the model as several: picked rows, heads of a
latent's matrix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.base.errors import UnsupportedModel
from headrace.kernels.checkpoint_values import values
from headrace.loader import latent_heads
from headrace.loader.quantised_safetensors import QuantisedMatrices, QuantisedMatrix
from headrace.loader.safetensors_file import read_header
from headrace.quant.schemes import Scheme
from oracle import checkpoints
from tiny import quantised

FP8 = {"tensor": "tensor", "channel": "channel", "block": "hub-block"}


def matrix(place: Path, form: str) -> tuple[QuantisedMatrix, Any]:
    """A matrix [384, 256] as a file holds it, and its values."""
    torch.manual_seed(0)
    dense = torch.randn(384, 256) * 0.1
    if form in FP8:
        codes, scales, exact = checkpoints.quantise(dense, FP8[form])
        parts, wanted = {"weight": codes, "weight_scale": scales}, exact.numpy()
        scheme = Scheme("fp8", 8, None, strategy=form)
    else:
        parts, found = quantised.quantise(quantised.FORMS[form], dense)
        wanted, scheme = found.astype(np.float32), Scheme("gptq", 4, 128, 1)
    named = {f"m.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(named, place / "one.safetensors")
    matrices = QuantisedMatrices(scheme, read_header(place / "one.safetensors"))
    ((_, main, _),) = matrices.shapes()
    one = matrices.find(main)
    assert one is not None
    return one, wanted


@pytest.mark.parametrize("form", ["gptq", "gptq order", *FP8])
def test_rows(tmp_path: Path, form: str) -> None:
    one, wanted = matrix(tmp_path, form)
    order = np.r_[256:384, 0:128]
    picked = replace(one, shape=(256, 256), order=order)
    assert picked.read().shape == (256, 256)
    np.testing.assert_array_equal(values(picked.read()), wanted[order])


@pytest.mark.parametrize("order", [np.r_[64:192], np.r_[0:64, 128:192], np.r_[0:100]])
def test_rows_across_blocks_are_refused(tmp_path: Path, order: Any) -> None:
    one, _ = matrix(tmp_path, "block")
    with pytest.raises(UnsupportedModel, match="m: rows of several matrices share a block's scale"):
        replace(one, shape=(len(order), 256), order=order).read()


@pytest.mark.parametrize("form", ["gptq order", "block"])
def test_heads_of_latents(tmp_path: Path, form: str) -> None:
    one, wanted = matrix(tmp_path, form)
    mla = SimpleNamespace(nope_dim=64, v_dim=32, kv_rank=256)
    arch: Any = SimpleNamespace(heads=4, mla=mla)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    shapes = latent_heads.shapes(name, one.shape, arch)
    found = dict(latent_heads.stored(name, one, arch))
    assert found.keys() == shapes.keys()
    by_head = wanted.reshape(4, 96, 256)
    for head in range(4):
        at = name.replace("kv_b_proj.weight", "")
        for part, rows in (("k", by_head[head, :64].T), ("v", by_head[head, 64:])):
            each = found[f"{at}{part}_b_proj.{head}.weight"]
            assert each.host_dtype == "float32"
            assert tuple(each.shape) == shapes[f"{at}{part}_b_proj.{head}.weight"]
            np.testing.assert_array_equal(each.read(), rows)
