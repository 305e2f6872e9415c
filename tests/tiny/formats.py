"""One small model in every format of weights that is read, beside the values that the format
defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch

from oracle import checkpoints as fp8
from tiny import quantised
from tiny.blocks import random_blocks
from tiny.checkpoints import SMALL, hf_model, save_folder
from tiny.families import with_words
from tiny.gguf_files import WORDS, save_gguf

WIDE = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 32,
}
"""Rows of whole blocks of 256."""
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ROUNDED = 2e-4
"""A distance of log-probabilities, as a part of their spread, that fp32 explains."""
IN_CODES = 3e-2
"""One that activations in eight bits explain, in a model of random weights."""


@dataclass(frozen=True)
class Format:
    write: Callable[[Path], tuple[Path, Any]]
    """→ (what to open, the model of transformers with these values) of an empty folder."""
    near: float = IN_CODES
    """Tolerance of the CPU kernels' values; of the values before packing, if they pack."""
    quantise: str = "auto"


def dense(dtype: torch.dtype) -> Callable[[Path], tuple[Path, Any]]:
    def write(place: Path) -> tuple[Path, Any]:
        model = hf_model("Qwen2", **WIDE).to(dtype)
        with_words(save_folder(model, place), SMALL["vocab_size"])
        return place, model.float()

    return write


def _with(state: dict[str, torch.Tensor]) -> Any:
    model = hf_model("Qwen2", **WIDE)
    model.load_state_dict({name: one.float() for name, one in state.items()})
    return model


def packed(form: str) -> Callable[[Path], tuple[Path, Any]]:
    return lambda place: (place, _with(quantised.folder(place, quantised.FORMS[form], **WIDE)))


def eight(form: str) -> Callable[[Path], tuple[Path, Any]]:
    def write(place: Path) -> tuple[Path, Any]:
        state = fp8.fp8_folder(place, form, "Qwen2", **WIDE)
        return with_words(place, SMALL["vocab_size"]), _with(state)

    return write


def blocks(kind: str) -> Callable[[Path], tuple[Path, Any]]:
    """A GGUF whose matrices of layers are of a type."""

    @torch.no_grad()
    def write(place: Path) -> tuple[Path, Any]:
        model, stored = hf_model("Qwen2", **WIDE), {}
        qtype = gguf.GGMLQuantizationType[kind]
        for name, parameter in model.named_parameters():
            layer, _, module = name.removeprefix("model.layers.").partition(".")
            called = GGUF_NAMES.get(module.removesuffix(".weight"))
            if called is None:
                continue
            make = partial(random_blocks, kind, *parameter.shape, seed=len(stored))
            spread = float(gguf.quants.dequantize(make(scale=1.0), qtype).std())
            data = make(scale=0.1 / spread)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(data, qtype)))
            stored[f"blk.{layer}.{called}.weight"] = data
        kinds = dict.fromkeys(stored, kind)
        file, more = place / "m.gguf", {"extra": stored, "quantise": kinds, "metadata": WORDS}
        return save_gguf(model, file, "qwen2", **more), model

    return write


FORMATS: dict[str, Format] = {
    "F32": Format(dense(torch.float32), ROUNDED),
    "F16": Format(dense(torch.float16), ROUNDED),
    "BF16": Format(dense(torch.bfloat16), ROUNDED),
    "BF16, `--quantise int8`": Format(dense(torch.bfloat16), quantise="int8"),
    "BF16, `--quantise int4`": Format(dense(torch.bfloat16), 0.15, quantise="int4"),
    "AWQ": Format(packed("awq")),
    "GPTQ": Format(packed("gptq")),
    "GPTQ by activation order": Format(packed("gptq order")),
    "GPTQ, 8 bits": Format(packed("gptq int8")),
    "compressed-tensors INT4": Format(packed("int4")),
    "compressed-tensors INT4 by activation order": Format(packed("int4 order")),
    "compressed-tensors INT4 with zero points": Format(packed("int4 zeros")),
    "compressed-tensors INT8, packed": Format(packed("int8 packed")),
    "compressed-tensors INT8": Format(packed("int8")),
    "compressed-tensors FP8 by tensor": Format(eight("tensor"), ROUNDED),
    "compressed-tensors FP8 by channel": Format(eight("channel"), ROUNDED),
    "compressed-tensors FP8 by block": Format(eight("block"), ROUNDED),
    "FP8 by tensor": Format(eight("hub-tensor"), ROUNDED),
    "FP8 by tensor, static": Format(eight("hub-static"), ROUNDED),
    "FP8 by block": Format(eight("hub-block"), ROUNDED),
    "GGUF Q2_K": Format(blocks("Q2_K")),
    "GGUF Q3_K": Format(blocks("Q3_K")),
    "GGUF Q4_0": Format(blocks("Q4_0")),
    "GGUF Q4_1": Format(blocks("Q4_1")),
    "GGUF Q4_K": Format(blocks("Q4_K")),
    "GGUF Q5_0": Format(blocks("Q5_0")),
    "GGUF Q5_1": Format(blocks("Q5_1")),
    "GGUF Q5_K": Format(blocks("Q5_K")),
    "GGUF Q6_K": Format(blocks("Q6_K")),
    "GGUF Q8_0": Format(blocks("Q8_0")),
    "GGUF MXFP4": Format(blocks("MXFP4")),
    "GGUF IQ4_NL": Format(blocks("IQ4_NL")),
    "GGUF IQ4_XS": Format(blocks("IQ4_XS")),
}
