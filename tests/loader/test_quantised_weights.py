"""A quantised checkpoint on disk: its matrices come out packed, the rest as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.kernels.arrays import tensor
from headrace.kernels.checkpoint_values import values
from headrace.loader import open_model
from headrace.loader.quantised_safetensors import QuantisedMatrix
from headrace.loader.safetensors_file import StoredTensor
from headrace.loader.weights import load_weights
from tiny.checkpoints import hf_model, save_folder

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}


def quantised_folder(folder: Path, extra: dict[str, torch.Tensor] | None = None) -> Any:
    """A tiny Qwen2 with its layers' matrices in INT8; → the model."""
    model = hf_model("Qwen2")
    save_folder(model, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = stored.abs().amax(1, keepdim=True) / 127
            tensors[name] = (stored / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = stored
    save_file({**tensors, **(extra or {})}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    return model


def test_int8_checkpoint(tmp_path: Path) -> None:
    model = quantised_folder(tmp_path)
    loaded = dict(load_weights(open_model(str(tmp_path))))
    state = model.state_dict()
    assert set(loaded) == set(state)
    for name, weight in loaded.items():
        if name.endswith("_proj.weight"):
            assert isinstance(weight, QuantisedMatrix)
            found = torch.from_numpy(values(weight.read()))
            torch.testing.assert_close(found, state[name], atol=2e-3, rtol=0)
        else:
            assert isinstance(weight, StoredTensor)
            assert torch.equal(tensor(weight.read()), state[name])


def test_a_bias_of_zeros_that_the_writer_added(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    quantised_folder(tmp_path, {name: torch.zeros(96)})
    assert name not in dict(load_weights(open_model(str(tmp_path))))
    quantised_folder(tmp_path, {name: torch.ones(96)})
    with pytest.raises(ModelFileError, match="a bias that the model has not"):
        list(load_weights(open_model(str(tmp_path))))


def test_an_unknown_scheme_is_refused_at_open(tmp_path: Path) -> None:
    quantised_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quip"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quip"):
        open_model(str(tmp_path))


def test_codes_without_a_scheme_are_refused(tmp_path: Path) -> None:
    quantised_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ModelFileError, UnsupportedModel)):
        list(load_weights(open_model(str(tmp_path))))
