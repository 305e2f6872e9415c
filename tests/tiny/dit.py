"""A small diffusion transformer of random weights in a folder of diffusers' `DiTPipeline`, and
diffusers' own steps with the same random numbers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 1,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip
Scheduler = tuple[str, dict[str, Any]]
DDIM: Scheduler = ("DDIMScheduler", {"clip_sample": False})
WORDS = ["zero, nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make(folder: Path, scheduler: Scheduler = DDIM, *, seed: int = 3, **config: Any) -> Path:
    """Write a folder without a decoder; return it."""
    whole = {**CONFIG, **config}
    transformer = folder / "transformer"
    transformer.mkdir(parents=True, exist_ok=True)
    save_file(_weights(whole, seed), transformer / "diffusion_pytorch_model.safetensors")
    _write(transformer / "config.json", {"_class_name": "DiTTransformer2DModel", **whole})
    write_index(folder, scheduler)
    return folder


def write_index(folder: Path, scheduler: Scheduler, words: Sequence[str] = WORDS) -> None:
    """Write the files of a pipeline around its transformer."""
    (folder / "scheduler").mkdir(exist_ok=True)
    named = {"_class_name": scheduler[0], **scheduler[1]}
    _write(folder / "scheduler" / "scheduler_config.json", named)
    _write(
        folder / "model_index.json",
        {
            "_class_name": "DiTPipeline",
            "transformer": ["diffusers", "DiTTransformer2DModel"],
            "scheduler": ["diffusers", scheduler[0]],
            "vae": [None, None],
            "id2label": {str(number): names for number, names in enumerate(words)},
        },
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    channels, patch = config["in_channels"], config["patch_size"]
    outputs = config.get("out_channels") or channels
    found: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        found[name] = (0.1 * draws.standard_normal(shape)).astype(np.float32)

    def linear(name: str, out: int, given: int) -> None:
        add(f"{name}.weight", out, given)
        add(f"{name}.bias", out)

    add("pos_embed.proj.weight", width, channels, patch, patch)
    add("pos_embed.proj.bias", width)
    for layer in range(config["num_layers"]):
        at = f"transformer_blocks.{layer}"
        known = f"{at}.norm1.emb"
        linear(f"{known}.timestep_embedder.linear_1", width, 256)
        linear(f"{known}.timestep_embedder.linear_2", width, width)
        classes = config["num_embeds_ada_norm"] + 1
        add(f"{known}.class_embedder.embedding_table.weight", classes, width)
        linear(f"{at}.norm1.linear", 6 * width, width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(f"{at}.attn1.{part}", width, width)
        linear(f"{at}.ff.net.0.proj", 4 * width, width)
        linear(f"{at}.ff.net.2", width, 4 * width)
    linear("proj_out_1", 2 * width, width)
    linear("proj_out_2", patch * patch * outputs, width)
    return found


def opened(folder: Path) -> tuple[Any, Any]:
    """The folder's transformer and scheduler, by diffusers."""
    diffusers = pytest.importorskip("diffusers")
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    model = diffusers.DiTTransformer2DModel.from_pretrained(folder / "transformer")
    return model.eval(), getattr(diffusers, config["_class_name"]).from_config(config)


def drawn(
    folder: Path, label: int, steps: int, guidance: float, noises: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Latents [channels, size, size] after each step by diffusers, from these normal numbers."""
    import torch

    model, scheduler = opened(folder)
    module = importlib.import_module(type(scheduler).__module__)
    scheduler.set_timesteps(steps)
    first = float(getattr(scheduler, "init_noise_sigma", 1.0))
    latent, found = torch.from_numpy(noises[0])[None] * first, list[np.ndarray]()
    labels = torch.tensor([label, model.config.num_embeds_ada_norm][: 2 if guidance > 1 else 1])
    patch = pytest.MonkeyPatch()
    with torch.no_grad(), patch.context() as patched:
        for at, time in enumerate(scheduler.timesteps):
            scale = getattr(scheduler, "scale_model_input", lambda one, _: one)
            given = scale(latent, time).expand(len(labels), -1, -1, -1)
            output = model(given, timestep=time.expand(len(labels)), class_labels=labels).sample
            output = output[:, : latent.shape[1]]
            if guidance > 1:
                output = output[1:] + guidance * (output[:1] - output[1:])
            noise = torch.from_numpy(noises[at + 1])[None]
            if hasattr(module, "randn_tensor"):
                patched.setattr(module, "randn_tensor", lambda *_, one=noise, **__: one)
            latent = scheduler.step(output, time, latent).prev_sample
            found.append(latent[0].numpy())
    return found
