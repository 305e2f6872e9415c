"""Small models of the Qwen-VL families with random weights, as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiny.letters import byte_tokenizer

SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>",
    "<|video_pad|>",
)  # fmt: skip
MERGES = [("Ċ", "Ċ")]
"""Files of llama.cpp must have one."""
VOCAB = 256 + len(MERGES) + len(SPECIALS)
FILM = VOCAB - 1
END, PLACE = (257 + SPECIALS.index(token) for token in ("<|im_end|>", "<|image_pad|>"))
PATCH, SQUARE = 4, 8
LEAST, MOST = 3 * SQUARE**2, 36 * SQUARE**2
MEAN, DEVIATION = [0.5, 0.4, 0.45], [0.5, 0.25, 0.3]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the manner of the authors'."""
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 64, "hidden_size": 96, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 112,
        "out_hidden_size": 96,
        "window_size": 2 * SQUARE,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 112,
        "out_hidden_size": 96,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
}
_VISION["qwen3_vl_moe"] = _VISION["qwen3_vl"]
_CLASSES: dict[str, Any] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
}
KINDS = tuple(_CLASSES)


def make(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of transformers, kept in `folder`. `changes`: of the encoder's config."""
    torch.manual_seed(38)
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
        },
    }  # fmt: skip
    if kind.startswith("qwen3_vl"):
        text |= {"head_dim": 16}
    if kind == "qwen3_vl_moe":
        text |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    configured, model = _CLASSES[kind]
    vision = {"num_heads": 4, "patch_size": PATCH} | _VISION[kind] | changes
    config = configured(
        text_config=text,
        vision_config=vision,
        image_token_id=PLACE,
        video_token_id=VOCAB - 1,
        tie_word_embeddings=False,
    )
    made = model(config).eval().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.mul_(4.0) if value.ndim >= 2 else value.add_(0.05 * torch.randn_like(value))
            if "patch_embed" in name or "merger" in name or "pos_embed" in name:
                value.mul_(3.0)  # So that what is seen is seen.
        made = made.to(dtype)
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    processor().save_pretrained(folder)
    return made.float()


def processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": LEAST, "longest_edge": MOST},
        patch_size=PATCH,
        image_mean=MEAN,
        image_std=DEVIATION,
    )


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, one for an empty line, and the special ones."""
    return byte_tokenizer(SPECIALS, ["ĊĊ"], MERGES)
