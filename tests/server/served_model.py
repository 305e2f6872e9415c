"""A complete small model as a hub would hold it: random weights, a real tokenizer, ChatML."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 400
CONTEXT = 512
CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'raise' %}"
    "{{ raise_exception('no such conversation') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The headrace carries water to the turbine, and the turbine turns the water into work.",
    "Die Brücke über den Fluß wurde früher gebaut, und 水 flows under it: 流れる水。",
    "def carry(water: int) -> int:\n    return water * 2  # naïve\n",
    'A list of words: one, two, three; "quoted", (bracketed) and 12345 numbers! 🙂🚀',
]


def make_tiny_model(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer(folder)
    _weights(folder, hidden, layers)
    return folder


def _tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _weights(folder: Path, hidden: int, layers: int) -> None:
    heads, kv_heads, size, inner = 4, 2, hidden // 4, hidden * 2
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
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(7)

    def matrix(rows: int, columns: int, scale: float = 0.15) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, 1.0),
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
    # The end-of-turn row is small: random text rarely ends by itself.
    weights["lm_head.weight"][2] = 0.0
    save_file(weights, str(folder / "model.safetensors"))
