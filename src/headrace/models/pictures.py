"""Encoders of pictures for language models, by the `model_type` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..base.graph import Graph
from ..base.verify import verify
from .gemma_pictures import GemmaPictures
from .idefics3 import Idefics3Pictures
from .internvl import InternVlPictures
from .picture_arch import PictureArch
from .pixtral import PixtralPictures
from .qwen_vl import QwenPictures

FAMILIES: tuple[type[PictureArch], ...] = (
    GemmaPictures,
    Idefics3Pictures,
    InternVlPictures,
    PixtralPictures,
    QwenPictures,
)
"""Families: a line for each."""
KINDS: Mapping[str, type[PictureArch]] = {
    kind: family for family in FAMILIES for kind in family.KINDS
}
"""Families by `model_type`."""


def picture_arch(
    config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
) -> PictureArch:
    """Read the encoder of a `config.json` of one of `KINDS`, and its processor's config. `hidden`:
    width of the language model. Raises `ModelFileError`, `UnsupportedModel`."""
    return KINDS[config["model_type"]].read(config, processing, hidden)


def describe_pictures(picture: PictureArch) -> Graph:
    """Describe the graph of an encoder: see `PictureArch.describe`."""
    graph = picture.describe()
    verify(graph)
    return graph
