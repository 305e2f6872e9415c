"""A small Moonshine with random weights, as the hub has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import MoonshineConfig, MoonshineForConditionalGeneration

from .parakeet import VOCAB, write_tokenizer


def make(folder: Path, **changes: Any) -> Any:
    """A small model with random weights, as the hub has them."""
    torch.manual_seed(6)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 2,
    }
    made = MoonshineForConditionalGeneration(MoonshineConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.mul_(4.0) if value.ndim >= 2 else value.add_(0.1 * torch.randn_like(value))
            if "decoder.layers" in name and value.ndim == 2:
                value.mul_(4.0)  # So that a token is not its own likeliest neighbour.
    made.save_pretrained(folder)
    write_tokenizer(folder)
    return made
