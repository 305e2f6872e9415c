"""A tiny model with a tokenizer and a chat template, written to a folder in the hub's layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = 256
"""Id of the end-of-turn token; ids below it are the bytes."""
MARK = 257
"""Id of a special token that ends nothing."""
VOCAB = 320
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_symbols() -> list[str]:
    """The 256 characters by which byte-level vocabularies write bytes, in the order of bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    fill = (byte for byte in range(256) if byte not in symbols)
    symbols |= {byte: chr(256 + place) for place, byte in enumerate(fill)}
    return [symbols[byte] for byte in range(256)]


THINKING = TEMPLATE.replace("<assistant>", "<assistant><think>") + "{# </think> #}"
"""A template whose answers begin with reasoning."""
THINK, UNTHINK = 258, 259


def write(folder: Path, *, context: int = 512, layers: int = 2, template: str = TEMPLATE) -> Path:
    """A Llama with random weights and a vocabulary of single bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, heads, kv_heads, size, inner = 64, 4, 2, 16, 96
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
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
        "eos_token_id": END,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(0, 0.15, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden) * 6,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(VOCAB, hidden),
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
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    vocabulary = {symbol: index for index, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, special=True) for text in ("<|end|>", "<|mark|>")]
    tokenizer.add_special_tokens(marks)
    marks = ["<think>", "</think>"]
    tokenizer.add_tokens([*marks, *(f"<extra{place}>" for place in range(VOCAB - THINK - 2))])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": template})
    )
    return folder
