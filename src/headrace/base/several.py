"""Several models in one server: the options of each on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .config import EngineOptions
from .errors import OptionError
from .names import hint

OWN = (
    "quantise", "kv_dtype", "kv_memory", "max_context", "max_sequences", "max_waiting",
    "step_tokens", "block_size", "prefix_cache", "policy", "speculate", "max_adapters",
    "adapter_rank", "items",
)  # fmt: skip
"""Options that each model of a server may have of its own; the others are the server's."""
SHORT = {"kv": "kv_memory", "quantize": "quantise"}
ALONE: dict[str, Any] = {
    "layout": "1",
    "launcher": "local",
    "role": "both",
    "executor": "inline",
    "draft_model": None,
    "kv_events": None,
    "context_cache_trace": None,
}
"""Options that have one value for all models of a server."""
WORD = re.compile(r"(?P<model>.+?):(?P<own>[A-Za-z_-]+=[^,]*(,[A-Za-z_-]+=[^,]*)*)")
SWITCH = {"true": True, "on": True, "false": False, "off": False}


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One of the models that a server shall serve."""

    options: EngineOptions
    names: tuple[str, ...] = ()
    """Names under which it is served; empty: its own name."""
    weight: float = 1.0
    """Share of the time, relative to other models, while several have work."""
    own: frozenset[str] = frozenset()
    """Options that were set for this model alone."""
    hears: bool = False
    """Flag: it is a transcription model."""

    @property
    def served(self) -> tuple[str, ...]:
        """Names under which it is served."""
        return self.names or (own_name(self.options.model),)


def own_name(model: str) -> str:
    """Return a model's default name: that of its folder or file, if it is one."""
    local = Path(model).expanduser()
    return local.resolve().name if local.exists() else model


def read_models(words: Sequence[str], options: EngineOptions) -> list[ModelChoice]:
    """Return the models that `NAME[:option=value,...]` name, each with `options` and its own.

    `name` is a name under which the model is served (several times: several), `weight` its share of
    the time, `kv` short for `kv_memory`. Raises `OptionError`.
    """
    chosen = [_read(word, options) for word in words]
    if len(chosen) > 1:
        check_together(chosen)
    return chosen


def check_together(chosen: Sequence[ModelChoice]) -> None:
    """Raise `OptionError` if these models cannot be served by one server."""
    for choice in chosen:
        for option, value in ALONE.items():
            if getattr(choice.options, option) != value:
                raise OptionError(
                    f"a server of several models has no {option}: serve the model that needs it "
                    "alone",
                    param=option,
                )
        if choice.options.device == "cuda":
            raise OptionError("several models are served on a CPU only", param="device")
    names = [name for choice in chosen for name in choice.served]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(
                f"two models have the name {name!r:.100}; give one another, as in MODEL:name=OTHER",
                param="model",
            )


def _read(word: str, options: EngineOptions) -> ModelChoice:
    found = WORD.fullmatch(word)
    if found is None:
        return ModelChoice(replace(options, model=word))
    names: list[str] = []
    weight = 1.0
    own: dict[str, Any] = {}
    for pair in found["own"].split(","):
        key, _, value = pair.partition("=")
        key = key.replace("-", "_")
        key = SHORT.get(key, key)
        if not value:
            raise OptionError(f"{key} of {word!r:.100} has no value", param="model")
        if key == "name":
            names.append(value)
        elif key == "weight":
            weight = _weight(value)
        elif key in OWN:
            own[key] = _value(key, value)
        else:
            known = ("name", "weight", *OWN)
            raise OptionError(
                f"a model has no option {key!r:.60} of its own; allowed: {', '.join(known)}"
                f"{hint(key, known)}",
                param="model",
            )
    chosen = replace(options, model=found["model"], **own)
    chosen.verify()
    return ModelChoice(chosen, tuple(names), weight, frozenset(own))


def _weight(value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0.01 <= weight <= 100:
        raise OptionError(f"weight must be from 0.01 to 100, not {value!r:.60}", param="weight")
    return weight


def _value(key: str, text: str) -> Any:
    """Return an option's value from its text."""
    kinds = next(str(spec.type) for spec in fields(EngineOptions) if spec.name == key)
    if "int" in kinds:
        try:
            return int(text)
        except ValueError:
            raise OptionError(
                f"{key} must be a whole number, not {text!r:.60}", param=key
            ) from None
    if "bool" in kinds:
        if text.lower() not in SWITCH:
            raise OptionError(f"{key} must be on or off, not {text!r:.60}", param=key)
        return SWITCH[text.lower()]
    return text
