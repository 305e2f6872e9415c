"""Layers that keep a state, in both formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from .family import Config, flag, integer

_INNER = integer("", "ssm.inner_size", 1, 2**20)
_UNLIMITED = ([0.0, math.inf], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}])
"""Spellings of an unbounded time step."""
LINEAR = "linear_attention"
OLD_KINDS = {"mamba": LINEAR, "attention": "full_attention"}
"""Names of layers before transformers 5."""


def state_names(at: str) -> dict[str, str]:
    """Return names of a GGUF layer's state → ours, below `at`."""
    names = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_dt.bias": "dt_bias",
    }
    return {part: f"{at}.{name}" for part, name in names.items()}


def state_fields(
    heads: str,
    groups: str | tuple[str, ...],
    key_size: str,
    taps: str | tuple[str, ...],
    value_size: Callable[[Config], int],
) -> Mapping[str, Any]:
    """Return the fields of states with a matrix per head, by their keys in a `config.json`.
    `value_size` reads the numbers of a value there."""

    def size(config: Config) -> int:
        values, keys = config["recurrence.value_heads"], config["recurrence.key_heads"]
        if not config.gguf:
            return value_size(config)
        inner = int(config.read(_INNER))
        if inner % values or values % keys:
            raise config.refuse(
                "recurrence.value_heads",
                f"must divide ssm.inner_size ({inner}) and be a multiple of ssm.group_count "
                f"({keys})",
            )
        return inner // int(values)

    return {
        "recurrence.taps": integer(taps, "ssm.conv_kernel", 2, 16),
        "recurrence.channels": _channels,
        "recurrence.key_heads": integer(groups, "ssm.group_count", 1, 2**12),
        "recurrence.value_heads": integer(heads, "ssm.time_step_rank", 1, 2**12),
        "recurrence.key_size": integer(key_size, "ssm.state_size", 1, 2**12),
        "recurrence.value_size": size,
    }


def _channels(config: Config) -> int:
    """Return the width of the convolution: the values, and keys twice (q and k, or B and C)."""
    keys, values, key_size, value_size = (
        config[f"recurrence.{part}"]
        for part in ("key_heads", "value_heads", "key_size", "value_size")
    )
    return int(values * value_size + 2 * keys * key_size)


def conv_bias(key: str | tuple[str, ...]) -> Callable[[Config], bool]:
    """Make a reader of whether Mamba's convolution has a bias; a GGUF file then has the tensor."""

    def read(config: Config) -> bool:
        if config.gguf:
            return any(name.endswith("ssm_conv1d.bias") for name in config.tensors)
        _verify_steps(config.fields)
        return bool(config.read(flag(key, "", True)))

    return read


def _verify_steps(fields: Fields) -> None:
    for key in ("time_step_limit", "mamba_dt_limit"):
        limit = fields.raw(key)
        if limit is not None and limit not in _UNLIMITED:
            fields.expect(key, *_UNLIMITED)


def kv_heads_by_layer(config: Config) -> list[int]:
    """Return a GGUF's KV heads of each layer, zero without attention."""
    key, layers = "attention.head_count_kv", config["layers"]
    given = config.fields.raw(key)
    if not isinstance(given, list) or len(given) != layers:
        raise ModelFileError(
            f"GGUF: {config.fields.prefix}{key} must be a list of {layers} numbers", param=key
        )
    return given


def without_attention(config: Config) -> tuple[int, ...]:
    """Return a GGUF's layers without attention."""
    return tuple(at for at, heads in enumerate(kv_heads_by_layer(config)) if heads == 0)


def renamed(config: Config, key: str) -> list[Any] | None:
    """Return the kinds of layers by their current names; None if they are not listed."""
    given = config.fields.raw(key)
    if not isinstance(given, list):
        return given  # type: ignore[no-any-return]
    return [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in given]


def multiple(config: Config, path: str, part: str, key: str) -> None:
    """Raise `UnsupportedModel`, which names `key`, unless one number divides another."""
    if config[path] % config[part]:
        own, other = (config.key(config.table[one]) for one in (path, part))
        raise UnsupportedModel(
            f"{config.fields.where}: {own} is {config[path]}; must be a multiple of {other} "
            f"({config[part]})",
            param=key,
        )
