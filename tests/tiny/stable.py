"""Small pipelines of Stable Diffusion with random weights, by diffusers and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import dit

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!'"
MERGES = ("t h", "th e</w>", "o a", "b oa", "a t</w>")
TEXTS: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32, "bos_token_id": 85, "eos_token_id": 86,
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "sample_size": 8, "block_out_channels": [16, 32], "norm_num_groups": 4, "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "attention_head_dim": 2,
}  # fmt: skip


def make(
    folder: Path,
    scheduler: dit.Scheduler = dit.DDIM,
    *,
    seed: int = 7,
    clip: Any = (),
    **config: Any,
) -> Path:
    """Write a folder of Stable Diffusion; return it."""
    diffusers, torch = pytest.importorskip("diffusers"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    texts = {**TEXTS, **dict(clip)}
    shape = {**SHAPE, "cross_attention_dim": texts["hidden_size"], **config}
    model = diffusers.UNet2DConditionModel(**shape)
    encoder = transformers.CLIPTextModel(transformers.CLIPTextConfig(**texts))
    for parameter in (*model.parameters(), *encoder.parameters()):
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder / "unet")
    encoder.save_pretrained(folder / "text_encoder")
    dit.write_index(folder, scheduler)
    dit._edit(
        folder / "model_index.json",
        _class_name="StableDiffusionPipeline",
        transformer=None,
        unet=["diffusers", "UNet2DConditionModel"],
        text_encoder=["transformers", "CLIPTextModel"],
        tokenizer=["transformers", "CLIPTokenizer"],
        id2label=None,
    )
    write_tokenizer(folder / "tokenizer")
    return dit.add_decoder(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters and two words in two files."""
    folder.mkdir(exist_ok=True)
    pieces = [*LETTERS, *(f"{one}</w>" for one in LETTERS)]
    pieces += ["".join(merge.split()) for merge in MERGES]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))


def tokenizer_of(folder: Path, most: int) -> Any:
    """The folder's tokenizer, by transformers."""
    transformers = pytest.importorskip("transformers")
    files = {name: str(folder / "tokenizer" / name) for name in ("vocab.json", "merges.txt")}
    made = transformers.CLIPTokenizer(vocab=files["vocab.json"], merges=files["merges.txt"])
    made.model_max_length = most
    return made


def drawn(
    folder: Path, texts: tuple[str, str], steps: int, guidance: float, noise: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The picture [rows, columns, 3] from 0 to 1 and the latents after each step, by diffusers."""
    import diffusers
    import torch
    import transformers

    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    encoder = transformers.CLIPTextModel.from_pretrained(folder / "text_encoder")
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer_of(folder, encoder.config.max_position_embeddings),
        unet=unet,
        scheduler=dit.scheduler_of(folder),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    found: list[np.ndarray] = []
    side = unet.config.sample_size * 2 ** (len(vae.config.block_out_channels) - 1)

    def note(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
        found.append(values["latents"][0].numpy().copy())
        return values

    made = pipeline(
        texts[0],
        height=side,
        width=side,
        num_inference_steps=steps,
        guidance_scale=guidance,
        negative_prompt=texts[1],
        latents=torch.from_numpy(noise)[None],
        output_type="np",
        callback_on_step_end=note,
    )
    return made.images[0], found
