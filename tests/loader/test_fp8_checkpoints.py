"""Checkpoints in fp8, as Hugging Face holds them: by tensor, by row, by block of 128 x 128."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.weights import Fp8Weight
from headrace.loader import open_model
from headrace.loader.weights import load_weights

from .fakes import hf_model, save_folder

FORMS = ("hub-tensor", "hub-static", "hub-block", "tensor", "channel", "block")
WIDE = {"hidden_size": 192, "intermediate_size": 320}
"""Matrices of several blocks, the last ones cut."""


def config_of(form: str) -> dict[str, Any]:
    if form.startswith("hub"):
        return {
            "quant_method": "fp8", "fmt": "e4m3",
            "activation_scheme": "static" if form == "hub-static" else "dynamic",
            "weight_block_size": [128, 128] if form == "hub-block" else None,
            "modules_to_not_convert": ["lm_head"],
        }  # fmt: skip
    weights = {"num_bits": 8, "type": "float", "strategy": form, "symmetric": True,
               "dynamic": False, "block_structure": [128, 128] if form == "block" else None}  # fmt: skip
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }  # fmt: skip


def quantise(tensor: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """→ (codes, stored scales, the values that they stand for)."""
    out, width = tensor.shape
    if form.endswith("block"):
        rows, columns = -(-out // 128), -(-width // 128)
        padded = torch.zeros(rows * 128, columns * 128)
        padded[:out, :width] = tensor
        scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
        wide = scales.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
    elif form == "channel":
        wide = scales = tensor.abs().amax(1, keepdim=True) / 448
    else:
        wide = tensor.abs().max() / 448
        scales = wide if form == "hub-tensor" else wide.reshape(1)
    codes = (tensor / wide).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def fp8_folder(folder: Path, form: str, kind: str = "Llama", **values: Any) -> dict[str, Any]:
    """A small model with its layers' matrices in fp8; → all dequantised values by name."""
    save_folder(hf_model(kind, **{**WIDE, **values}), folder)
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = dense[name] = tensor
        if name.endswith("_proj.weight"):
            codes, scales, dense[name] = quantise(tensor, form)
            suffix = "_scale_inv" if form == "hub-block" else "_scale"
            stored[name], stored[name + suffix] = codes, scales
            if form == "hub-static":
                stored[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": config_of(form)})
    )
    return dense


@pytest.mark.parametrize("form", FORMS)
def test_the_values_are_those_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    dense = fp8_folder(tmp_path, form)
    found = dict(load_weights(open_model(str(tmp_path))))
    assert set(found) == set(dense)
    for name, weight in found.items():
        if name.endswith("_proj.weight"):
            assert isinstance(weight, Fp8Weight), name
            assert weight.data.dtype == torch.float8_e4m3fn
            assert torch.equal(weight.values(), dense[name].float())
            assert weight.blocked == (form.endswith("block") and max(weight.shape) > 128)
        else:
            assert isinstance(weight, torch.Tensor), name


def test_experts_are_fp8_too(tmp_path: Path) -> None:
    dense = fp8_folder(
        tmp_path, "hub-block", "Qwen3Moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=160, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    found = dict(load_weights(open_model(str(tmp_path))))
    names = [name for name in found if ".experts." in name]
    assert len(names) == 2 * 4 * 3
    for name in names:
        weight = found[name]
        assert isinstance(weight, Fp8Weight)
        assert torch.equal(weight.values(), dense[name].float())


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(keys)
    (folder / "config.json").write_text(json.dumps(config))


def test_other_blocks_are_refused_at_open(tmp_path: Path) -> None:
    fp8_folder(tmp_path, "hub-block")
    change(tmp_path, weight_block_size=[64, 128])
    with pytest.raises(UnsupportedModel, match=r"weight_block_size is \[64, 128\]"):
        open_model(str(tmp_path))
    change(tmp_path, weight_block_size=[128, 128], fmt="e5m2")
    with pytest.raises(UnsupportedModel, match="e5m2"):
        open_model(str(tmp_path))


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    fp8_folder(tmp_path, "hub-block")
    change(tmp_path, weight_block_size=None)
    with pytest.raises(ModelFileError, match=r"weight_scale_inv has shape .* by tensor"):
        list(load_weights(open_model(str(tmp_path))))


@pytest.mark.parametrize(("value", "match"), [(float("nan"), "not finite"), (None, "has 0")])
def test_damaged_scales_are_refused(tmp_path: Path, value: float | None, match: str) -> None:
    fp8_folder(tmp_path, "channel")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    if value is None:
        del tensors[name]
    else:
        tensors[name][3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=match):
        list(load_weights(open_model(str(tmp_path))))
