"""A diffusion transformer trained on scikit-learn's handwritten digits, and their reader.

    cd tests; python -m tiny.digits FOLDER

It takes about 40 seconds of one core, writes a folder of diffusers' `DiTPipeline` without a
decoder (8 × 8, one channel, ten classes) and prints the share of its pictures that the reader, the
nearest neighbour among the digits, takes for what they should be.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiny import dit

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SHAPE: dict[str, Any] = {
    "num_layers": 3, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 1,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip
SCHEDULER: dit.Scheduler = (
    "DDIMScheduler",
    {
        "beta_schedule": "squaredcos_cap_v2",
        "prediction_type": "v_prediction",
        "clip_sample": False,  # Clipped predictions and guidance of 4 would diverge.
    },
)
STEPS = 600
UNNAMED = 0.1
"""Share of pictures without a class, for guidance."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures [1797, 1, 8, 8] from -1 to 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images / 8 - 1).astype(np.float32)[:, None], found.target


def read(pictures: np.ndarray) -> np.ndarray:
    """The class of the nearest digit of each picture [n, 1, 8, 8]."""
    known, labels = digits()
    rows, these = known.reshape(len(known), -1), pictures.reshape(len(pictures), -1)
    distances = (these**2).sum(1)[:, None] - 2 * these @ rows.T + (rows**2).sum(1)
    found: np.ndarray = labels[distances.argmin(1)]
    return found


def train(folder: Path, steps: int = STEPS, *, seed: int = 1) -> None:
    """Train and write the folder."""
    import diffusers

    torch.manual_seed(seed)
    batch = 128
    scheduler = getattr(diffusers, SCHEDULER[0])(**SCHEDULER[1])
    model = diffusers.DiTTransformer2DModel(**SHAPE).eval()  # Classes are left out here, by hand.
    _begin(model)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    known, labels = (torch.from_numpy(one) for one in digits())
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - step / steps)
        chosen = torch.randint(len(known), (batch,))
        pictures, classes = known[chosen], labels[chosen].clone()
        classes[torch.rand(batch) < UNNAMED] = SHAPE["num_embeds_ada_norm"]
        noise, times = torch.randn_like(pictures), torch.randint(1000, (batch,))
        noisy = scheduler.add_noise(pictures, noise, times)
        wanted = scheduler.get_velocity(pictures, noise, times)
        found = model(noisy, timestep=times, class_labels=classes).sample
        loss = torch.nn.functional.mse_loss(found, wanted)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():  # A mean of late weights, over the last tenth of the steps so far.
            decay = min(0.995, 1 - 10 / (step + 11))
            for name, value in model.named_parameters():
                kept[name].lerp_(value, 1 - decay)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(kept[name])
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder / "transformer")
    dit.write_index(folder, SCHEDULER, WORDS)


def _begin(model: Any) -> None:
    """Begin as Peebles and Xie do: every block changes nothing, and the output is nought."""
    for block in model.transformer_blocks:
        for value in block.norm1.linear.parameters():
            torch.nn.init.zeros_(value)
    for last in (model.proj_out_1, model.proj_out_2):
        for value in last.parameters():
            torch.nn.init.zeros_(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    begin = time.monotonic()
    train(given.folder, given.steps)
    print(f"{given.steps} steps in {time.monotonic() - begin:.0f} s")
    from headrace.base.config import EngineOptions
    from headrace.base.denoising import PictureWish
    from headrace.base.outputs import PictureOutput
    from headrace.base.request import Request
    from headrace.base.sampling import SamplingParams
    from headrace.base.spec import RequestSpec
    from headrace.engine.loop.build import build
    from headrace.loader.open import open_model

    options = EngineOptions(model=str(given.folder), device="cpu")
    built, found = build(options, open_model(str(given.folder))), {}
    for at in range(400):
        spec = RequestSpec(
            SamplingParams(), seed=7, task="picture", picture=PictureWish(at % 10, 20, 2.0, at)
        )
        built.core.add(Request(id=str(at), prompt=[at % 10], spec=spec))
    while built.core.has_work:
        for delta in built.core.turn():
            if isinstance(delta.output, PictureOutput):
                found[int(delta.request_id)] = np.frombuffer(delta.output.values, np.float32)
    built.close()
    seen = read(np.clip(np.stack([found[at] for at in range(400)]), -1, 1))
    print(f"{(seen == np.arange(400) % 10).mean():.1%} are read as they should be")


if __name__ == "__main__":
    main()
