"""An EAGLE head with random weights for any model in a folder, by NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def make(folder: Path, target: Path) -> None:
    """Save one in the format of "speculators" that fits the Llama in `target`."""
    config = json.loads((target / "config.json").read_text())
    wide, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "fusion_fc": (wide, 2 * wide),
        "transformer.self_attn.q_proj": (queries, wide),
        "transformer.self_attn.k_proj": (keys, wide),
        "transformer.self_attn.v_proj": (keys, wide),
        "transformer.self_attn.o_proj": (wide, queries),
        "transformer.mlp.gate_proj": (inner, wide),
        "transformer.mlp.up_proj": (inner, wide),
        "transformer.mlp.down_proj": (wide, inner),
        "transformer.post_attention_layernorm": (wide,),
    }
    chance = np.random.default_rng(3)
    tensors = {
        f"{name}.weight": chance.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    said = {"speculators_model_type": "eagle", "transformer_layer_config": config}
    (folder / "config.json").write_text(json.dumps(said))
