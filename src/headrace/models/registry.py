"""Which families run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ..base.errors import UnsupportedModel
from ..kernels.arrays import Array
from ..kernels.operators import KvCache, Operators, StepBatch
from ..layers.build import Builder
from .bert import Bert
from .gemma3 import Gemma3
from .llama import Llama
from .mistral import Mistral
from .mixtral import Mixtral
from .qwen2 import Qwen2
from .qwen3 import Qwen3
from .qwen3_moe import Qwen3Moe


class Model(Protocol):
    """A built model: structure and weights."""

    def forward(self, ops: Operators, batch: StepBatch, cache: KvCache) -> tuple[Array, Array]:
        """See `kernels.operators.Forward`."""
        ...

    def logits(self, ops: Operators, hidden: Array, rows: Array) -> Array:
        """hidden [N, D], rows [R] → fp32 [R, V]."""
        ...


FAMILIES: Mapping[str, Callable[[Builder], Model]] = {
    "bert": Bert,
    "gemma3": Gemma3,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}
"""`ModelArch.family` → class. A new family is a file and a line."""


def build_model(build: Builder) -> Model:
    """The model of `build.arch.family`; raises `UnsupportedModel`, `ModelFileError`."""
    family = FAMILIES.get(build.arch.family)
    if family is None:
        raise UnsupportedModel(
            f"the architecture {build.arch.family!r} is not supported; supported are: "
            + ", ".join(sorted(FAMILIES))
        )
    return family(build)
