"""Families of models that are described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from ..base.arch import ModelArch
from ..base.errors import UnsupportedModel
from ..base.graph import Graph
from ..base.verify import verify
from .bert import bert
from .cohere2 import cohere2
from .gemma import gemma, glm4
from .gemma4 import gemma4
from .llama import llama
from .nemotron_h import nemotron_h
from .olmo2 import olmo2
from .starcoder2 import starcoder2

_PRE_NORM = """deepseek_v2 deepseek_v3 ernie4_5 gemma glm glm4_moe gpt_oss granite granitemoe
    granitemoehybrid lfm2 llama llama4 minimax_m2 mistral mixtral olmoe phi3 qwen2 qwen2_moe qwen3
    qwen3_5 qwen3_5_moe qwen3_moe qwen3_next seed_oss smollm3"""
FAMILIES: Mapping[str, Callable[[ModelArch], Graph]] = {
    "bert": bert,
    "cohere": cohere2,
    "cohere2": cohere2,
    "exaone4": olmo2,
    "gemma2": gemma,
    "gemma3": gemma,
    "gemma4": gemma4,
    "glm4": glm4,
    "nemotron_h": nemotron_h,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "starcoder2": starcoder2,
    **dict.fromkeys(_PRE_NORM.split(), llama),
}
"""Description of each `ModelArch.family`. A family that differs by numbers is a line, one of
another shape a file and a line."""


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
    graph = family(arch)
    verify(graph)
    return graph
