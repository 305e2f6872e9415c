"""A small Qwen2-Audio with random weights, as the hub has it: a language model that hears."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from tiny.letters import byte_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_bos|>", "<|AUDIO|>")
SPECIALS = (*SPECIALS, "<|audio_eos|>")
VOCAB = 256 + len(SPECIALS)
PLACE = 256 + SPECIALS.index("<|AUDIO|>")
"""The token that stands for a sound."""
MELS = 16
TEMPLATE = (
    "{% set sounds = namespace(count=0) %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}{% set sounds.count = sounds.count + 1 %}"
    "Audio {{ sounds.count }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of the authors'."""


def make(folder: Path, **changes: Any) -> Any:
    """The model of transformers, kept in `folder`. `changes`: of the encoder's config."""
    torch.manual_seed(8)
    sound = {
        "num_mel_bins": MELS,
        "d_model": 128,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 512,
        **changes,
    }
    text = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **sound},
        text_config=text,
        audio_token_index=PLACE,
    )
    made = Qwen2AudioForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "embed_positions" not in name:
                value.mul_(4.0) if value.ndim >= 2 else value.add_(0.05 * torch.randn_like(value))
            if "projector" in name and value.ndim == 2:
                value.mul_(4.0)  # So that what is heard is heard.
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return made


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and the special ones."""
    return byte_tokenizer(SPECIALS)
