"""A small diffusion transformer of random weights in a folder of diffusers' `DiTPipeline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

CONFIG: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 1,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip
DDIM = ("DDIMScheduler", {"clip_sample": False})
WORDS = ["zero, nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make(
    folder: Path, scheduler: tuple[str, dict[str, Any]] = DDIM, *, seed: int = 3, **config: Any
) -> Any:
    """Write a folder; return diffusers' transformer of the same numbers."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(seed)
    model = diffusers.DiTTransformer2DModel(**{**CONFIG, **config}).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.1)
    write(model, folder, getattr(diffusers, scheduler[0])(**scheduler[1]))
    return model


def write(model: Any, folder: Path, scheduler: Any, words: list[str] = WORDS) -> None:
    """Write a folder without a decoder."""
    model.save_pretrained(folder / "transformer")
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "DiTPipeline",
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "scheduler": ["diffusers", type(scheduler).__name__],
        "vae": [None, None],
        "id2label": {str(number): names for number, names in enumerate(words)},
    }
    (folder / "model_index.json").write_text(json.dumps(index))


@torch.no_grad()
def drawn(
    model: Any,
    scheduler: Any,
    label: int,
    steps: int,
    guidance: float,
    noises: list[np.ndarray],
) -> list[np.ndarray]:
    """Latents [channels, size, size] after each step by diffusers, from these normal numbers."""
    scheduler.set_timesteps(steps)
    latent = torch.from_numpy(noises[0])[None] * float(
        scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else 1.0
    )
    found = []
    for at, time in enumerate(scheduler.timesteps):
        given = latent
        if hasattr(scheduler, "scale_model_input"):
            given = scheduler.scale_model_input(latent, time)
        null = model.config.num_embeds_ada_norm
        labels = torch.tensor([label, null] if guidance > 1 else [label])
        given = given.expand(len(labels), -1, -1, -1)
        output = model(given, timestep=time.expand(len(labels)), class_labels=labels).sample
        output = output[:, : latent.shape[1]]
        if guidance > 1:
            output = output[1:] + guidance * (output[:1] - output[1:])
        latent = stepped(scheduler, output, time, latent, noises[at + 1])
        found.append(latent[0].numpy())
    return found


def stepped(scheduler: Any, output: Any, time: Any, latent: Any, noise: np.ndarray) -> Any:
    """A scheduler's step, whose random numbers are these."""
    module = __import__(type(scheduler).__module__, fromlist=["randn_tensor"])
    before = getattr(module, "randn_tensor", None)
    if before is not None:
        module.randn_tensor = lambda *_, **__: torch.from_numpy(noise)[None]
    try:
        return scheduler.step(output, time, latent).prev_sample
    finally:
        if before is not None:
            module.randn_tensor = before
