"""A small InternVL with random weights, as transformers keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tiny.letters import byte_tokenizer

SPECIALS = ("<|im_start|>", "<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>")
VOCAB = 256 + len(SPECIALS)
END, PLACE = (256 + SPECIALS.index(token) for token in ("<|im_end|>", "<IMG_CONTEXT>"))
TILE, PATCH, MOST = 32, 8, 5
MEAN, DEVIATION = [0.5, 0.4, 0.45], [0.5, 0.25, 0.3]


def make(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of transformers, kept in `folder`. `changes`: of the encoder's config."""
    torch.manual_seed(38)
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
    vision = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        **changes,
    }
    config = InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=PLACE, tie_word_embeddings=False
    )
    made = InternVLForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lambda" in name or "cls" in name or "position" in name:
                value.copy_(torch.randn_like(value))
            else:
                value.mul_(4.0) if value.ndim >= 2 else value.add_(0.05 * torch.randn_like(value))
        made = made.to(dtype)
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    processor().save_pretrained(folder)
    return made.float()


def processor(most: int = MOST) -> GotOcr2ImageProcessorPil:
    return GotOcr2ImageProcessorPil(
        size={"height": TILE, "width": TILE},
        crop_to_patches=True,
        max_patches=most,
        image_mean=MEAN,
        image_std=DEVIATION,
    )


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and the special ones."""
    return byte_tokenizer(SPECIALS)
