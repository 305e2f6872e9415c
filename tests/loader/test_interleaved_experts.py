"""The experts of gpt-oss in MXFP4: from both kinds of file the numbers of the reference package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.errors import HeadraceError, ModelFileError, UnsupportedModel
from headrace.loader import open_model
from headrace.quant.schemes import scheme_of
from tiny.checkpoints import hf_model, save_folder
from tiny.gguf_files import save_gguf

from .test_gguf_families import LOCAL
from .test_weights import loaded

VALUES = {"num_hidden_layers": 2, **LOCAL}
MXFP4 = gguf.GGMLQuantizationType.MXFP4


def blocks_of(stack: torch.Tensor) -> np.ndarray:
    """[experts, in, out] → [experts, out, blocks, 17] as GGUF has MXFP4: scale, then numbers i and
    i + 16 in byte i."""
    rows = stack.swapaxes(1, 2).float().numpy()
    data = gguf.quants.quantize(np.ascontiguousarray(rows), MXFP4)
    return data.reshape(*rows.shape[:2], -1, 17)


def in_pairs(blocks: np.ndarray) -> np.ndarray:
    """Numbers 2i and 2i + 1 in byte i, as the published checkpoints have them."""
    numbers = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """(folder with MXFP4, the same numbers in a dense one, the same blocks in a GGUF)."""
    model = hf_model("GptOss", **VALUES)
    dense = save_folder(model, tmp_path / "dense")
    packed = save_folder(model, tmp_path / "packed")
    tensors = load_file(dense / "model.safetensors")
    plain: dict[str, torch.Tensor] = {}
    small: dict[str, torch.Tensor] = {}
    stored: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if not re.search(r"experts\.\w+_proj$", name):
            plain[name] = small[name] = tensor
            continue
        blocks = blocks_of(tensor)
        small[f"{name}_blocks"] = torch.from_numpy(in_pairs(blocks))
        small[f"{name}_scales"] = torch.from_numpy(blocks[..., 0].copy())
        flat = blocks.reshape(*blocks.shape[:2], -1)
        values = torch.from_numpy(gguf.quants.dequantize(flat, MXFP4)).swapaxes(1, 2)
        plain[name] = values.contiguous()
        at = f"blk.{name.split('.')[2]}.ffn_"
        if "gate_up" in name:
            stored[f"{at}gate_exps.weight"] = flat[:, ::2]
            stored[f"{at}up_exps.weight"] = flat[:, 1::2]
        else:
            stored[f"{at}down_exps.weight"] = flat
    save_file(plain, dense / "model.safetensors")
    save_file(small, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, dense, save_gguf(model, tmp_path / "m.gguf", "gpt-oss", extra=stored)


def test_mxfp4_of_both_kinds_of_file_is_the_reference_packages(
    folders: tuple[Path, Path, Path],
) -> None:
    packed, dense, path = map(loaded, folders)
    assert set(packed) == set(dense) == set(path)
    for name, tensor in dense.items():
        assert torch.equal(packed[name], tensor), name
        found = path[name]
        if name.endswith("_proj.weight") and ".experts." in name:
            assert found.kind == "MXFP4"
            found = torch.from_numpy(gguf.quants.dequantize(found.data, MXFP4))
        assert torch.equal(found.float(), tensor.float()), name


def changed(folder: Path, **values: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for name, change in values.items():
        full = f"model.layers.1.mlp.experts.{name}"
        made = change(tensors.pop(full))
        if made is not None:
            tensors[full] = made
    save_file(tensors, folder / "model.safetensors")
    return folder


def no_number(scales: torch.Tensor) -> torch.Tensor:
    scales[3, 5, 1] = 255
    return scales


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gate_up_proj_scales", lambda _: None, "gate_up_proj_blocks' lacks its scales"),
        (
            "down_proj_scales",
            lambda scales: scales[:, :-1].contiguous(),
            "down_proj_blocks' lacks its scales",
        ),
        ("down_proj_scales", lambda scales: scales.float(), "down_proj_blocks' lacks its scales"),
        ("down_proj_scales", no_number, "a scale of its experts is no number"),
        ("down_proj_blocks", lambda blocks: blocks[..., :8].contiguous(), "no stack of experts"),
        ("down_proj_blocks", lambda blocks: blocks.to(torch.int8), "down_proj_blocks is I8"),
        ("down_proj_blocks", lambda _: None, "down_proj_scales"),
        ("down_proj_bias", lambda _: None, "experts.0.down_proj.bias"),
        ("down_proj_bias", lambda bias: bias[:-1], "experts.3.down_proj.bias"),
        ("gate_up_proj_bias", lambda bias: bias[:, :-1].contiguous(), "up_proj.bias"),
    ],
)
def test_experts_that_do_not_fit_are_named(
    folders: tuple[Path, Path, Path], name: str, change: Any, words: str
) -> None:
    folder = changed(folders[0], **{name: change})
    with pytest.raises(HeadraceError, match=re.escape(words)) as caught:
        loaded(folder)
    assert isinstance(caught.value, ModelFileError | UnsupportedModel)


def test_another_model_in_mxfp4_is_refused(tmp_path: Path) -> None:
    assert scheme_of({"quantization_config": {"quant_method": "mxfp4"}}) is None
    model = hf_model("Mixtral", **LOCAL)
    folder = save_folder(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name)
    tensors[f"{name}_blocks"] = torch.zeros(tensors.pop(name).shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(HeadraceError, match="_blocks"):
        loaded(folder)
    assert open_model(str(folder)).arch.family == "mixtral"
