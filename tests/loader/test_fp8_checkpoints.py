"""Checkpoints in fp8, as Hugging Face holds them: by tensor, by row, by block of 128 x 128."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.checkpoint_values import values
from headrace.kernels.weights import Fp8Weight
from headrace.loader import open_model
from headrace.loader.quantised_safetensors import QuantisedMatrix
from headrace.loader.safetensors_file import StoredTensor
from headrace.loader.weights import load_weights
from oracle.checkpoints import FORMS, fp8_folder


def loaded(weight: object) -> Fp8Weight:
    assert isinstance(weight, QuantisedMatrix)
    read = weight.read()
    assert isinstance(read, Fp8Weight)
    return read


def read_all(folder: Path) -> None:
    for _, weight in load_weights(open_model(str(folder))):
        assert isinstance(weight, StoredTensor | QuantisedMatrix)
        weight.read()


@pytest.mark.parametrize("form", FORMS)
def test_the_values_are_those_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    dense = fp8_folder(tmp_path, form)
    found = dict(load_weights(open_model(str(tmp_path))))
    assert set(found) == set(dense)
    for name, weight in found.items():
        if name.endswith("_proj.weight"):
            read = loaded(weight)
            assert torch.equal(torch.from_numpy(values(read)), dense[name].float())
            assert read.blocked == (form.endswith("block") and max(read.shape) > 128)
        else:
            assert isinstance(weight, StoredTensor), name


def test_experts_are_fp8_too(tmp_path: Path) -> None:
    dense = fp8_folder(
        tmp_path,
        "hub-block",
        "Qwen3Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=160,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    found = dict(load_weights(open_model(str(tmp_path))))
    names = [name for name in found if ".experts." in name]
    assert len(names) == 2 * 4 * 3
    for name in names:
        assert torch.equal(torch.from_numpy(values(loaded(found[name]))), dense[name].float())


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
        read_all(tmp_path)


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
        read_all(tmp_path)
