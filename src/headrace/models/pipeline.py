"""Parts of a diffusion pipeline beside its denoiser."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.denoising import CausalEncoder
from ..base.graph import Graph
from . import clip, t5
from .vae import describe_decoder


def parts_beside(arch: ModelArch) -> dict[str, tuple[Graph, int]]:
    """Return graph and most rows of an item of each part beside a denoiser: texts, decoder."""
    denoiser, found = arch.denoiser, dict[str, tuple[Graph, int]]()
    if denoiser is not None and denoiser.reads is not None:
        module = clip if isinstance(denoiser.reads, CausalEncoder) else t5
        found["texts"] = module.describe_texts(arch), denoiser.texts
    if denoiser is not None and denoiser.decoder is not None:
        found["decoder"] = describe_decoder(arch), denoiser.size**2
    return found
