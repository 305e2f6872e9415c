"""A small Llama 4 that sees, with random weights, as transformers keeps it."""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
from PIL import Image
from transformers import Llama4Config, Llama4ForConditionalGeneration
from transformers.image_utils import SizeDict

from tiny.letters import byte_tokenizer

SPECIALS = (
    "<|header_start|>", "<|header_end|>", "<|eot|>", "<|image_start|>", "<|image_end|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|patch|>",
)  # fmt: skip
VOCAB = 256 + len(SPECIALS)
END, PLACE = (256 + SPECIALS.index(token) for token in ("<|eot|>", "<|patch|>"))
TILE, PATCH, MOST = 32, 8, 5
TEMPLATE = (
    "{% for message in messages %}<|header_start|>{{ message['role'] }}<|header_end|>\n\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n"
    "{% endif %}"
)
"""In the manner of the authors'."""


def make(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model of transformers, kept in `folder`. `changes`: of the encoder's config."""
    torch.manual_seed(38)
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "no_rope_layers": [1, 1, 0, 1],
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "attention_chunk_size": 48,
        "floor_scale": 20,
        "attn_scale": 0.5,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    width = changes.pop("hidden_size", 64)
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        "projector_input_dim": 80,
        "projector_output_dim": 80,
        "vision_output_dim": 80,
        **changes,
    }
    config = Llama4Config(text_config=text, vision_config=vision, image_token_index=PLACE)
    made = Llama4ForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "class" in name or "positional" in name:
                value.copy_(torch.randn_like(value))
            elif value.ndim < 2:
                value.add_(0.05 * torch.randn_like(value))
            else:
                value.copy_(torch.randn_like(value) * 1.5 * value.shape[-1] ** -0.5)
            value.data = value.data.to(dtype)  # Not by `made.to`: a table of its rope is complex.
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    said = {"chat_template": TEMPLATE, "eos_token": "<|eot|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    size = {"height": TILE, "width": TILE}
    processing = {"size": size, "max_patches": MOST, "resample": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processing))
    return made.float()  # Which leaves what is complex.


def processed(
    picture: Image.Image, most: int = MOST, tile: int = TILE
) -> tuple[torch.Tensor, tuple[int, int]]:
    """Tiles [n, 3, tile, tile] of a picture in bfloat16, and the rows and columns of its grid."""
    pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    found = _processor()._preprocess(
        [pixels], True, SizeDict(height=tile, width=tile), Image.Resampling.BILINEAR,
        True, 1 / 255, True, [0.5] * 3, [0.5] * 3, most, False, None, None,
    )  # fmt: skip
    rows, columns = found["aspect_ratios"][0].tolist()
    return found["pixel_values"][0], (rows, columns)


@cache
def _processor() -> Any:
    """The model's processor, which resizes with torchvision: here Pillow does, and of what else it
    takes from there a few lines of torch stand in, so that no test needs it."""
    functional = ModuleType("functional")
    vars(functional)["pad"] = _padded
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules = {name: ModuleType(name) for name in names}
    vars(modules[names[-1]])["functional"] = functional
    with patch.dict(sys.modules, modules):
        own = import_module("transformers.models.llama4.image_processing_llama4")

    base: Any = own.Llama4ImageProcessor

    class OnPillow(base):  # type: ignore[misc]
        def resize(self, image: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
            made = [
                Image.fromarray(one.permute(1, 2, 0).numpy()).resize(
                    (size.width, size.height), Image.Resampling.BILINEAR
                )
                for one in image
            ]
            return torch.from_numpy(np.stack([np.array(one) for one in made])).permute(0, 3, 1, 2)

        def normalize(self, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
            means, deviations = (torch.tensor(one, dtype=image.dtype) for one in (mean, std))
            return (image - means[:, None, None]) / deviations[:, None, None]

    return OnPillow()


def _padded(image: torch.Tensor, padding: list[int], fill: Any) -> torch.Tensor:
    assert padding[:2] == [0, 0]
    assert not any(fill)
    return torch.nn.functional.pad(image, (0, padding[2], 0, padding[3]))


def tokenizer() -> tokenizers.Tokenizer:
    """A token for each byte, and the special ones."""
    return byte_tokenizer(SPECIALS)
