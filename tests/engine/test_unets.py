"""Stable Diffusion through the one loop: CLIP's encoder, a UNet's steps, a decoder; diffusers' own
latents and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_denoiser import opened, same
from test_pipelines import latents, shade

from headrace.base.denoising import PictureWish
from headrace.base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from headrace.loader.open import open_model
from headrace.text import load_tokenizer
from headrace.worker.solvers import normal
from tiny import dit, stable

__all__ = ["latents"]
TEXTS = "The boat at 3!", "fog, the fog"
V: dit.Scheduler = (
    "DDIMScheduler",
    {"prediction_type": "v_prediction", "clip_sample": False, "beta_schedule": "scaled_linear"},
)
EULER: dit.Scheduler = (
    "EulerDiscreteScheduler",
    {"timestep_spacing": "leading", "steps_offset": 1, "beta_schedule": "scaled_linear"},
)
DPM: dit.Scheduler = ("DPMSolverMultistepScheduler", {"beta_schedule": "scaled_linear"})


def ids(folder: Path, text: str) -> tuple[int, ...]:
    files = open_model(str(folder))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    found = tuple(tokenizer.encode_with_specials(text))
    assert files.arch.denoiser is not None
    reads = files.arch.denoiser.reads
    assert reads is not None
    assert reads.pad is not None
    return found + (reads.pad,) * (reads.most - len(found))


def wish(
    folder: Path, steps: int, guidance: float, choice: int = 0, partial: int = 0
) -> PictureWish:
    texts = tuple(ids(folder, one) for one in TEXTS[: 1 + (guidance > 1)])
    return PictureWish(0, steps, guidance, choice, partial, texts)


def check(
    folder: Path, found: list[np.ndarray], within: float = 1e-4, **options: Any
) -> None:
    """Hold latents and pictures to diffusers', with guidance and without."""
    engine = opened(folder, **options)
    shape = engine.files.arch.denoiser
    assert shape is not None
    noise = normal(5, 0, 0, (shape.channels, shape.size, shape.size))
    for steps, guidance in ((5, 4.0), (2, 1.0)):
        found.clear()
        mine = engine.drawn({"one": (wish(folder, steps, guidance), 5)})["one"][-1]
        picture, wanted = stable.drawn(folder, TEXTS, steps, guidance, noise)
        assert len(found) == len(wanted) == steps
        for one, other in zip(found, wanted, strict=True):
            assert np.abs(one - other).max() <= within * max(1.0, np.abs(other).max())
        assert np.abs(shade(mine, len(picture)) - picture).max() <= within
        assert np.std(picture) > 0.02, "it shows something"
    engine.built.close()


@pytest.mark.slow
@pytest.mark.parametrize("solver", [dit.DDIM, V, EULER, DPM])
def test_a_text_becomes_the_picture_of_diffusers(
    tmp_path: Path, latents: list[np.ndarray], solver: dit.Scheduler
) -> None:
    check(stable.make(tmp_path, solver), latents)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "ref"])
@pytest.mark.parametrize(
    ("clip", "config"),
    [
        # Three sizes, the odd 7, 4 and 2; attention on the largest alone; a layer list.
        (
            {"hidden_act": "gelu", "hidden_size": 40, "num_attention_heads": 4},
            {
                "sample_size": 7,
                "block_out_channels": [8, 12, 20],
                "layers_per_block": [1, 2, 1],
                "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
                "up_block_types": ["UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"],
                "attention_head_dim": [1, 3, 5],
                "use_linear_projection": True,
            },
        ),
        # Attention on the smaller size alone, two layers of it, not the same way up as down.
        (
            {},
            {
                "layers_per_block": 2,
                "transformer_layers_per_block": [1, 2],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
                "norm_eps": 0.01,
                "norm_num_groups": 8,
            },
        ),
        # One size, without a block in the middle.
        (
            {"hidden_act": "gelu"},
            {
                "sample_size": 5,
                "block_out_channels": [16],
                "down_block_types": ["CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D"],
                "mid_block_type": None,
            },
        ),
    ],
)
def test_other_shapes(
    tmp_path: Path,
    latents: list[np.ndarray],
    clip: dict[str, Any],
    config: dict[str, Any],
    kernels: str,
) -> None:
    stable.make(tmp_path, EULER, clip=clip, **config)
    # diffusers draws sizes that are multiples of 8 alone: four sizes of the decoder.
    blocks = {f"{way.lower()}_block_types": [f"{way}{kind}Block2D"] * 4
              for way, kind in (("Down", "Encoder"), ("Up", "Decoder"))}  # fmt: skip
    dit.add_decoder(tmp_path, block_out_channels=[8, 8, 8, 16], **blocks)
    check(tmp_path, latents, kernels=kernels)


@pytest.mark.slow
def test_eight_bits_and_half_precision(tmp_path: Path, latents: list[np.ndarray]) -> None:
    """Widths of whole units, so that products have int8 codes; weights are stored in fp16."""
    config = {"block_out_channels": [32, 64], "cross_attention_dim": 32}
    clip = {"hidden_size": 32, "intermediate_size": 64}
    stable.make(tmp_path, DPM, clip=clip, **config)
    check(tmp_path, latents, 0.15, quantise="int8")
