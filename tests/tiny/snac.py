"""SNAC's decoder in plain torch, written from its description, and a folder of random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

CONFIG: dict[str, Any] = {
    "sampling_rate": 24000,
    "encoder_dim": 4,
    "encoder_rates": [2, 4, 8, 8],
    "decoder_dim": 128,
    "decoder_rates": [8, 8, 4, 2],
    "attn_window_size": None,
    "codebook_size": 64,
    "codebook_dim": 8,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}


class Snake(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(0.5 + torch.rand(1, width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.alpha * x) ** 2 / (self.alpha + 1e-9)


class Unit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        along = nn.Conv1d(width, width, 7, dilation=dilation, padding=3 * dilation, groups=width)
        across = nn.Conv1d(width, width, 1)
        self.block = nn.Sequential(
            Snake(width), weight_norm(along), Snake(width), weight_norm(across)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


class Noise(nn.Module):
    def __init__(self, width: int, place: int, drawn: Callable[[int, int], torch.Tensor]) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Conv1d(width, width, 1, bias=False))
        self.place, self.drawn = place, drawn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drawn(self.place, x.shape[-1]) * self.linear(x)


class Block(nn.Module):
    def __init__(self, width: int, rate: int, noise: Noise | None) -> None:
        super().__init__()
        up = nn.ConvTranspose1d(
            width, width // 2, 2 * rate, rate, math.ceil(rate / 2), output_padding=rate % 2
        )
        parts: list[nn.Module] = [Snake(width), weight_norm(up)]
        if noise is not None:
            parts.append(noise)
        self.block = nn.Sequential(*parts, *(Unit(width // 2, d) for d in (1, 3, 9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class Level(nn.Module):
    def __init__(self, latent: int, config: dict[str, Any]) -> None:
        super().__init__()
        self.codebook = nn.Embedding(config["codebook_size"], config["codebook_dim"])
        self.out_proj = weight_norm(nn.Conv1d(config["codebook_dim"], latent, 1))


class Decoder(nn.Module):
    """Codes of each level [n] to samples."""

    def __init__(self, config: dict[str, Any], drawn: Callable[[int, int], torch.Tensor]) -> None:
        super().__init__()
        self.config = config
        latent, width = config["encoder_dim"] << len(config["encoder_rates"]), config["decoder_dim"]
        layers: list[nn.Module] = [
            weight_norm(nn.Conv1d(latent, latent, 7, padding=3, groups=latent)),
            weight_norm(nn.Conv1d(latent, width, 1)),
        ]
        place = 1
        for rate in config["decoder_rates"]:
            noise = Noise(width // 2, place, drawn) if config["noise"] else None
            layers.append(Block(width, rate, noise))
            width, place = width // 2, place + (5 if config["noise"] else 4)
        layers += [Snake(width), weight_norm(nn.Conv1d(width, 1, 7, padding=3)), nn.Tanh()]
        self.quantizer = nn.Module()
        self.quantizer.quantizers = nn.ModuleList(
            Level(latent, config) for _ in config["vq_strides"]
        )
        self.decoder = nn.Module()
        self.decoder.model = nn.Sequential(*layers)

    @torch.no_grad()
    def forward(self, codes: list[torch.Tensor]) -> torch.Tensor:
        total: Any = 0
        for level, ids, stride in zip(
            self.quantizer.quantizers, codes, self.config["vq_strides"], strict=True
        ):
            rows = level.out_proj(level.codebook(ids).T[None])
            total = total + rows.repeat_interleave(stride, -1)
        return self.decoder.model(total)[0, 0]


def make_codec(
    folder: Path,
    drawn: Callable[[int, int], torch.Tensor],
    seed: int = 5,
    **changes: Any,
) -> Decoder:
    """The oracle, and its weights in `folder` as the authors' package names them."""
    torch.manual_seed(seed)
    config = {**CONFIG, **changes}
    made = Decoder(config, drawn).eval()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in made.state_dict().items()}, folder / "model.safetensors"
    )
    return made
