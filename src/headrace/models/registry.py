"""Families of models that are described and read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ..base.arch import ModelArch
from ..base.errors import UnsupportedModel
from ..base.graph import Graph
from ..base.verify import verify
from . import (
    arcee,
    bert,
    cohere2,
    deepseek,
    dit,
    dlrm,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llama4,
    minimax_m2,
    ministral3,
    nemotron_h,
    olmo2,
    phi3,
    pixart,
    qwen,
    qwen3_next,
    starcoder2,
    unet,
    whisper,
)
from .family import Family

FILES = (
    arcee, bert, cohere2, deepseek, dit, dlrm, gemma, gemma4, glm, gpt_oss, granite, lfm2, llama,
    llama4, minimax_m2, ministral3, nemotron_h, olmo2, phi3, pixart, qwen, qwen3_next, starcoder2,
    unet, whisper,
)  # fmt: skip
"""Families, one file per line."""
ALL: tuple[Family, ...] = tuple(family for file in FILES for family in file.FAMILIES)
FAMILIES: Mapping[str, Family] = {
    name: next(family for family in ALL if family.name == name)
    for name in sorted({family.name for family in ALL})
}
"""Families by `ModelArch.family`; of two with one name, the first."""
TYPES: Mapping[str, Family] = {kind: family for family in ALL for kind in family.types}
"""Families by the `model_type` of a `config.json`."""


@lru_cache(maxsize=64)
def describe(arch: ModelArch) -> Graph:
    """Describe the step graph of a model, for all rows; needs no file and no device.

    Raises `UnsupportedModel` for a family without a description.
    """
    family = FAMILIES.get(arch.family)
    if family is None:
        served = ", ".join(sorted(FAMILIES))
        named = f"the architecture {arch.family!r} is not supported; supported are: {served}"
        raise UnsupportedModel(named)
    graph = family.describe(arch)
    verify(graph)
    return graph
