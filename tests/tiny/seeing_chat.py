"""A small Idefics3 or SmolVLM with random weights, as the hub has it: a model that sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration
from transformers.models.smolvlm import SmolVLMConfig, SmolVLMForConditionalGeneration

from tiny.letters import byte_tokenizer

SPECIALS = (
    "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)  # fmt: skip
MERGES = [("Ċ", "Ċ")]
"""Two ends of lines are one token, as in real vocabularies: the processor writes two in a row."""
VOCAB = 256 + len(MERGES) + len(SPECIALS)
END, PLACE = (257 + SPECIALS.index(token) for token in ("<end_of_utterance>", "<image>"))
PATCH, TILE, LONGEST = 8, 32, 96
MEAN, DEVIATION = [0.5, 0.4, 0.45], [0.5, 0.25, 0.3]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""In the manner of the authors'."""
CLASSES = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
}


def make(
    folder: Path,
    kind: str = "smolvlm",
    text: dict[str, Any] | None = None,
    tile: int = TILE,
    **changes: Any,
) -> Any:
    """The model of transformers, kept in `folder`. `text`: changes of the language model's config;
    `changes`: of the encoder's. A tile of another side than `TILE` is the only one of a picture."""
    torch.manual_seed(38)
    vision = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        **changes,
    }
    written = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **(text or {}),
    }
    configured, model = CLASSES[kind]
    config = configured(
        vision_config=vision,
        text_config=written,
        image_token_id=PLACE,
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    made = model(config).eval().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.mul_(4.0) if value.ndim >= 2 else value.add_(0.05 * torch.randn_like(value))
            if "patch_embedding.weight" in name or "connector" in name:
                value.mul_(6.0)  # So that what is seen is seen.
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": "<end_of_utterance>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    processing = {
        "size": {"longest_edge": LONGEST if tile == TILE else tile},
        "max_image_size": {"longest_edge": tile},
        "image_mean": MEAN,
        "image_std": DEVIATION,
        "do_image_splitting": tile == TILE,
        "resample": 1,
        "video_sampling": {"fps": 1, "max_frames": 6, "video_size": {"longest_edge": 48}},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return made


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, one for an empty line, and the special ones."""
    return byte_tokenizer(SPECIALS, ["ĊĊ"], MERGES)
