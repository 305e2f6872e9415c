"""LoRA adapters in PEFT's layout: a folder with a config and one safetensors file.

Adapters come from strangers: all that the files state is checked against the model before a tensor
is read. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.arch import ModelArch
from ..base.errors import Forbidden, ModelFileError, UnsupportedModel
from ..models.registry import describe
from .jsonfile import read_json
from .safetensors_file import StoredTensor
from .shards import PICKLES, read_headers

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OFF: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "arrow_config": ({},),
    "task_type": ("CAUSAL_LM",),
}
"""Options that change the result and are not supported: only these values (or their absence) are
accepted."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits its model; no tensor has been read."""

    path: Path
    weights: Path
    rank: int
    """Largest rank of its modules."""
    scales: dict[str, float]
    """Module ("model.layers.0.self_attn.q_proj") → factor of B · A."""


def within(path: str | Path, roots: Sequence[str | Path]) -> Path:
    """Return the folder, links followed, if it lies below one of the allowed ones; else raise
    `Forbidden`."""
    try:
        found = Path(path).expanduser().resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        found = None
    allowed = [Path(root).expanduser().resolve() for root in roots]
    # One error for both: callers must not be able to probe for paths outside.
    if found is None or not found.is_dir() or not any(found.is_relative_to(r) for r in allowed):
        raise Forbidden(
            "the adapter is not a folder below one of the folders from which adapters may be "
            "loaded (option adapter_roots)",
            param="lora_path",
        )
    return found


def open_adapter(folder: Path, arch: ModelArch, *, max_rank: int) -> AdapterFiles:
    """Check config and headers. Raises `ModelFileError` for damage, `UnsupportedModel` for
    everything else."""
    config = read_json(folder / CONFIG)
    rank, alpha = _read_config(config)
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickled = [
            name for name in ("adapter_model" + end for end in PICKLES) if (folder / name).exists()
        ]
        hint = f"; {pickled[0]} is pickled and is never read" if pickled else ""
        raise ModelFileError(f"{folder.name}: {WEIGHTS} is missing{hint}")
    shapes = {
        name.removesuffix(".weight"): shape
        for ref in describe(arch).weights()
        for name, shape in ref.tensors()
        if ref.role == "linear" and name.startswith("model.layers.")
    }
    found = _modules(read_headers((weights,)))
    scales: dict[str, float] = {}
    largest = 0
    for module, (a, b) in found.items():
        if module not in shapes:
            raise UnsupportedModel(
                f"{WEIGHTS}: {module!r:.120} is not a matrix of this {arch.family} model to which "
                "adapters are added (projections of attention and dense feed-forward)"
            )
        out, width = shapes[module]
        own_rank = _of(config, "rank_pattern", module, rank)
        own_alpha = _of(config, "alpha_pattern", module, alpha)
        if a.shape != (own_rank, width) or b.shape != (out, own_rank):
            raise ModelFileError(
                f"{WEIGHTS}: {module} has A {a.shape} and B {b.shape}; the model and r need "
                f"{(own_rank, width)} and {(out, own_rank)}"
            )
        if own_rank > max_rank:
            raise UnsupportedModel(
                f"{CONFIG}: rank {own_rank} is above the largest that is served, {max_rank} "
                "(option adapter_rank)"
            )
        root = math.sqrt(own_rank) if config.get("use_rslora") else own_rank
        scales[module] = own_alpha / root
        largest = max(largest, int(own_rank))
    return AdapterFiles(folder, weights, largest, scales)


def _read_config(config: Mapping[str, Any]) -> tuple[int, float]:
    """Return (r, lora_alpha)."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{CONFIG}: peft_type is {kind!r:.40}; supported: 'LORA'")
    for key, neutral in _OFF.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise UnsupportedModel(f"{CONFIG}: {key} is {value!r:.80}; supported: {neutral[0]!r}")
    if not isinstance(config.get("use_rslora", False), bool):
        raise ModelFileError(f"{CONFIG}: use_rslora must be true or false")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    return int(_number("r", rank, integer=True)), _number("lora_alpha", alpha)


def _number(key: str, value: Any, *, integer: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int if integer else int | float):
        raise ModelFileError(f"{CONFIG}: {key} must be a number, not {value!r:.40}")
    if not math.isfinite(value) or not (1 <= value <= 4096 if integer else abs(value) <= 1e6):
        raise ModelFileError(f"{CONFIG}: {key} is out of bounds: {value!r:.40}")
    return float(value)


def _of(config: Mapping[str, Any], key: str, module: str, default: float) -> float:
    """Return a module's own value in a pattern: keys are names or their ends, as PEFT writes
    them."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelFileError(f"{CONFIG}: {key} must be an object")
    for pattern, value in patterns.items():
        if not re.fullmatch(r"[\w.]+", pattern):
            raise UnsupportedModel(
                f"{CONFIG}: {key} has the pattern {pattern!r:.80}; supported: names of modules"
            )
        if module == pattern or module.endswith("." + pattern):
            return _number(f"{key}.{pattern}", value, integer=key == "rank_pattern")
    return default


def _modules(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, header in stored.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedModel(f"{WEIGHTS}: {name!r:.120} is not a LoRA matrix of a module")
        if header.dtype not in ("F32", "F16", "BF16"):
            raise UnsupportedModel(
                f"{WEIGHTS}: {name!r:.120} is {header.dtype}; supported: F32, F16, BF16"
            )
        halves.setdefault(match[1], {})[match[2]] = header
    for module, pair in halves.items():
        if len(pair) != 2:
            raise ModelFileError(f"{WEIGHTS}: {module!r:.120} has only lora_{min(pair)}")
    if not halves:
        raise ModelFileError(f"{WEIGHTS}: there is no tensor in it")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}
