"""Encoders of pictures for language models, by the `model_type` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..base.graph import Graph
from ..base.tiling import Filming, Fitting
from ..base.verify import verify
from .gemma_pictures import GemmaPictures
from .idefics3 import Idefics3Pictures
from .internvl import InternVlPictures
from .llama4_pictures import Llama4Pictures
from .picture_arch import MOST_PATCHES, PictureArch
from .pixtral import PixtralPictures
from .qwen_vl import QwenPictures

FAMILIES: tuple[type[PictureArch], ...] = (
    GemmaPictures,
    Idefics3Pictures,
    InternVlPictures,
    Llama4Pictures,
    PixtralPictures,
    QwenPictures,
)
"""Families, one per line."""
KINDS: Mapping[str, type[PictureArch]] = {
    kind: family for family in FAMILIES for kind in family.KINDS
}
"""Families by `model_type`."""


def picture_arch(
    config: Mapping[str, Any],
    processing: Mapping[str, Any],
    hidden: int,
    filming: Mapping[str, Any] | None = None,
) -> PictureArch:
    """Read the encoder of a `config.json` of one of `KINDS`, and its processors' configs. `hidden`:
    width of the language model; `filming`: config of the video processor, if separate. Raises
    `ModelFileError`, `UnsupportedModel`."""
    found = KINDS[config["model_type"]].read(config, processing, hidden)
    videos = found.filming(config, processing if filming is None else filming)
    if videos is None:
        return found
    largest = found.arch.max_context
    if isinstance(videos.sizing, Fitting | Filming):
        largest = max(largest, min(videos.sizing.largest // found.patch**2, MOST_PATCHES))
    return replace(found, videos=videos, arch=replace(found.arch, max_context=largest))


def describe_pictures(picture: PictureArch) -> Graph:
    """Describe the graph of an encoder: see `PictureArch.describe`."""
    graph = picture.describe()
    verify(graph)
    return graph
