"""Which families are described."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from ..base.arch import ModelArch
from ..base.errors import UnsupportedModel
from ..base.graph import Graph
from .bert import bert
from .deepseek import deepseek
from .gemma3 import gemma3
from .llama import llama

FAMILIES: Mapping[str, Callable[[ModelArch], Graph]] = {
    "bert": bert,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma3": gemma3,
    "glm4_moe": llama,
    "gpt_oss": llama,
    "granite": llama,
    "llama": llama,
    "mistral": llama,
    "mixtral": llama,
    "olmoe": llama,
    "qwen2": llama,
    "qwen2_moe": llama,
    "qwen3": llama,
    "qwen3_moe": llama,
    "smollm3": llama,
}
"""`ModelArch.family` → what describes it. A family that differs by numbers is a line, one of
another shape a file and a line."""


@lru_cache(maxsize=64)
def describe(arch: ModelArch) -> Graph:
    """The step graph of a model, for all rows; needs no file and no device.

    Raises `UnsupportedModel` for a family that nobody has described.
    """
    family = FAMILIES.get(arch.family)
    if family is None:
        named = f"the architecture {arch.family!r} is not supported; supported are: "
        raise UnsupportedModel(named + ", ".join(sorted(FAMILIES)))
    graph = family(arch)
    graph.verify()
    return graph
