"""A small Gemma 3 that sees, with random weights, as transformers keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tiny.letters import byte_tokenizer

SPECIALS = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
)
LINES = ("ĊĊ", "ĊĊĊ", "ĊĊĊĊ")
"""Tokens of several lines."""
BYTES = 256 + len(LINES)
VOCAB = BYTES + len(SPECIALS)
END, BEGIN, PLACE, CLOSE = (BYTES + at for at in range(1, 5))
TILE, PATCH, TOKENS = 32, 4, 16
MEAN, DEVIATION = [0.5, 0.4, 0.45], [0.5, 0.25, 0.3]
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def make(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of transformers, kept in `folder`. `changes`: of the encoder's config, and `text`
    of the language model's, `config` of both, `pans` of the processor's."""
    torch.manual_seed(38)
    pans = changes.pop("pans", {})
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": len(KINDS),
        "layer_types": KINDS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 10,
        "query_pre_attn_scalar": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": END,
        **changes.pop("text", {}),
    }
    whole = changes.pop("config", {})
    vision = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        **changes,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS,
        image_token_index=PLACE,
        boi_token_index=BEGIN,
        eoi_token_index=CLOSE,
        **whole,
    )
    made = Gemma3ForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "position" in name or "mm_input" in name:
                value.copy_(torch.randn_like(value) * 0.3)
            else:
                value.mul_(4.0) if value.ndim >= 2 else value.add_(0.05 * torch.randn_like(value))
        made = made.to(dtype)
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    said = {"eos_token": "<end_of_turn>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    processor(**pans).save_pretrained(folder)
    return made.float()


def processor(**pans: Any) -> Gemma3ImageProcessorPil:
    return Gemma3ImageProcessorPil(
        size={"height": TILE, "width": TILE}, image_mean=MEAN, image_std=DEVIATION, **pans
    )


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, for some runs of lines, and the special ones."""
    return byte_tokenizer(SPECIALS, LINES, [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ")])
