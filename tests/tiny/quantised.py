"""Tiny checkpoints in each quantised format of safetensors, written by their published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from .checkpoints import SMALL, hf_model, save_folder
from .families import with_words

Host = npt.NDArray[Any]
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 32}


@dataclass(frozen=True)
class Form:
    """Quantisation of one checkpoint."""

    method: str
    """"awq", "gptq", "packed" or "int8"."""
    bits: int = 4
    group: int = 128
    symmetric: bool = True
    ordered: bool = False
    """By activation order: groups of inputs far apart."""
    scales: torch.dtype = torch.float16

    def config(self) -> dict[str, Any]:
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": 4,
                "group_size": self.group,
                "zero_point": True,
                "version": "gemm",
            }
        if self.method == "gptq":
            return {
                "quant_method": "gptq",
                "bits": self.bits,
                "group_size": self.group,
                "desc_act": self.ordered,
                "sym": self.symmetric,
            }
        channel = self.method == "int8"
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if channel else "group",
            "group_size": None if channel else self.group,
            "actorder": "group" if self.ordered else None,
        }
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if channel else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs if channel else None,
                }
            },
        }


FORMS = {
    "awq": Form("awq", symmetric=False),
    "gptq": Form("gptq"),
    "gptq order": Form("gptq", symmetric=False, ordered=True),
    "gptq int8": Form("gptq", bits=8, group=64),
    "int4": Form("packed", group=32),
    "int4 order": Form("packed", ordered=True, scales=torch.bfloat16),
    "int4 zeros": Form("packed", group=64, symmetric=False),
    "int8 packed": Form("packed", bits=8, group=32),
    "int8": Form("int8", bits=8, scales=torch.float32),
}


def words(values: Host, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned numbers [rows, n] as int32 words [rows, n · bits / 32], low bits first."""
    count = 32 // bits
    fields = values.reshape(len(values), -1, count)[..., list(order or range(count))]
    shifts = (np.arange(count) * bits).astype(np.uint32)
    packed = np.bitwise_or.reduce(fields.astype(np.uint32) << shifts, axis=-1)
    return torch.from_numpy(packed.view(np.int32).copy())


def quantise(form: Form, matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], Host]:
    """→ (the tensors by suffix, what they stand for in float64) of a matrix [out, in]."""
    dense = matrix.double().numpy()
    out, width = dense.shape
    group = width if form.method == "int8" else form.group
    of_input = np.arange(width) // group
    if form.ordered:
        # The inputs of one layer's products have one order, by what went through them.
        of_input = np.random.default_rng(width).permutation(of_input)
    order = np.argsort(of_input, kind="stable")
    grouped = dense[:, order].reshape(out, -1, group)
    last, middle = (1 << form.bits) - 1, 1 << (form.bits - 1)
    if form.symmetric:
        scales = np.abs(grouped).max(-1) / (middle - 1)
    else:
        scales = (grouped.max(-1) - grouped.min(-1)) / last
    # What is zero throughout has a scale all the same.
    stored = torch.from_numpy(np.where(scales > 0, scales, 1)).to(form.scales)
    scales = stored.double().numpy()
    zeros = np.full_like(scales, middle)
    if not form.symmetric:
        zeros = np.clip(np.rint(-grouped.min(-1) / scales), 1, last)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, last)
    values = np.empty_like(dense)
    values[:, order] = ((codes - zeros[..., None]) * scales[..., None]).reshape(out, width)
    unordered = np.empty((out, width), np.uint32)
    unordered[:, order] = codes.reshape(out, width)
    at = torch.from_numpy(of_input.astype(np.int32))
    if form.method == "awq":
        interleaved = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": words(unordered.T, 4, interleaved),
            "qzeros": words(zeros.T, 4, interleaved),
            "scales": stored.T.contiguous(),
        }, values
    if form.method == "gptq":
        return {
            "qweight": words(unordered, form.bits).T.contiguous(),
            "qzeros": words(zeros.T - 1, form.bits),
            "scales": stored.T.contiguous(),
            "g_idx": at,
        }, values
    if form.method == "int8":
        signed = torch.from_numpy((unordered.astype(np.int32) - 128).astype(np.int8))
        return {"weight": signed, "weight_scale": stored}, values
    tensors = {
        "weight_packed": words(unordered, form.bits),
        "weight_scale": stored,
        "weight_shape": torch.tensor([out, width]),
    }
    if not form.symmetric:
        tensors["weight_zero_point"] = words(zeros.T, form.bits).T.contiguous()
    if form.ordered:
        tensors["weight_g_idx"] = at
    return tensors, values


def folder(
    place: Path,
    form: Form,
    kind: str = "Qwen2",
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    **values: Any,
) -> dict[str, torch.Tensor]:
    """Write a small model whose layers' matrices are quantised; → all values by name."""
    with_words(save_folder(hf_model(kind, **{**WIDE, **values}), place), SMALL["vocab_size"])
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(place / "model.safetensors").items():
        stored[name] = dense[name] = tensor
        if name.endswith("_proj.weight"):
            del stored[name]
            parts, exact = quantise(form, tensor)
            module = name.removesuffix("weight")
            stored |= {module + suffix: part for suffix, part in parts.items()}
            dense[name] = torch.from_numpy(exact.astype(np.float32))
    change(stored)
    whole = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(whole, place / "model.safetensors")
    config = json.loads((place / "config.json").read_text())
    quantised = {**config, "quantization_config": form.config()}
    (place / "config.json").write_text(json.dumps(quantised))
    return dense
