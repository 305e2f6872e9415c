"""fp8 checkpoints on disk, in every form that Hugging Face has, and what runs a step of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace.base.arch import ModelArch
from headrace.kernels.backend import Question
from headrace.kernels.operators import GroupBatch, KvCache, KvLayer, Operators, StepBatch
from headrace.kernels.select import choose
from oracle import graphs
from tiny.checkpoints import hf_model, save_folder

FORMS = ("hub-tensor", "hub-static", "hub-block", "tensor", "channel", "block")
WIDE = {"hidden_size": 192, "intermediate_size": 320}
"""Matrices of several blocks, the last ones cut."""


def config_of(form: str) -> dict[str, Any]:
    if form.startswith("hub"):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if form == "hub-static" else "dynamic",
            "weight_block_size": [128, 128] if form == "hub-block" else None,
            "modules_to_not_convert": ["lm_head"],
        }
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": form,
        "symmetric": True,
        "dynamic": False,
        "block_structure": [128, 128] if form == "block" else None,
    }
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
    }


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


def operators(name: str) -> Operators:
    """Operators of a backend by name, in fp32 on the CPU."""
    question = Question(
        "cpu", "float32", "float32", graphs.decoder(16), frozenset({"fp8"}), threads=1
    )
    return choose(question, name)[0]


def cache_of(arch: ModelArch, blocks: int) -> KvCache:
    """Empty KV in blocks of 16."""
    shape = (blocks, arch.kv_heads, 16, arch.head_dim)
    layers = [KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(arch.layers)]
    return KvCache(layers, [0] * arch.layers, [None])


def prompt_step(tokens: int, cache: KvCache) -> StepBatch:
    """A prompt of ids 1, 2 … in blocks 1, 2 …"""
    places = torch.arange(tokens)
    table = torch.arange(1, 1 + -(-tokens // 16), dtype=torch.int32).view(1, -1)
    slots = table[0, places // 16].long() * 16 + places % 16
    return StepBatch(
        places + 1,
        places,
        torch.tensor([0, tokens], dtype=torch.int32),
        torch.tensor([tokens], dtype=torch.int32),
        [GroupBatch(table, slots, None)],
        torch.tensor([tokens - 1]),
        tokens,
        tokens,
    )
