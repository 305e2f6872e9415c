"""Config and random weights of a Llama, by NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_llama(
    folder: Path,
    vocabulary: int,
    end: int,
    *,
    hidden: int = 64,
    layers: int = 2,
    context: int = 512,
) -> Path:
    """Write `config.json` and `model.safetensors` in fp32, the same each time.

    `end` is the token that ends an answer; its row of the head is zero, so that random text rarely
    ends by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    heads, kv_heads, size, inner = 4, 2, hidden // 4, hidden * 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int, scale: float = 0.15) -> np.ndarray:
        return random.normal(0, scale, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, 1.0),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(vocabulary, hidden),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(heads * size, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(kv_heads * size, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(kv_heads * size, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, heads * size),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    weights["lm_head.weight"][end] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
