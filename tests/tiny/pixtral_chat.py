"""A small Pixtral, or Mistral Small 3.1, with random weights, as transformers keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from tiny.letters import byte_tokenizer

SPECIALS = ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
VOCAB = 256 + len(SPECIALS)
PLACE, BREAK, END = (256 + at for at in range(2, 5))
PATCH, LONGEST = 8, 60
MEAN, DEVIATION = [0.5, 0.4, 0.45], [0.5, 0.25, 0.3]
FACTORS = {"llava": 1, "mistral3": 2}


def make(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of transformers, kept in `folder`. `changes`: of the encoder's config, and `whole`
    of the whole config."""
    torch.manual_seed(38)
    text = {
        "model_type": "mistral",
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        **changes.pop("text", {}),
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": LONGEST,
        "patch_size": PATCH,
        **changes,
    }
    whole = vision.pop("whole", {})
    both = {"text_config": text, "vision_config": vision, "image_token_index": PLACE}
    both |= {"tie_word_embeddings": False, **whole}
    if kind == "llava":
        both |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        made: Any = LlavaForConditionalGeneration(LlavaConfig(**both))
    else:
        made = Mistral3ForConditionalGeneration(Mistral3Config(**both))
    made = made.eval().float()
    with torch.no_grad():
        for value in made.parameters():
            value.mul_(4.0) if value.ndim >= 2 else value.add_(0.05 * torch.randn_like(value))
        made = made.to(dtype)
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[/INST]"}))
    processor(1).save_pretrained(folder)
    return made.float()


def processor(factor: int, longest: int = LONGEST) -> PixtralImageProcessorPil:
    """The processor, whose patches are those of a row of the language model."""
    return PixtralImageProcessorPil(
        size={"longest_edge": longest},
        patch_size={"height": factor * PATCH, "width": factor * PATCH},
        image_mean=MEAN,
        image_std=DEVIATION,
    )


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and the special ones."""
    return byte_tokenizer(SPECIALS)
