"""Reader of a `config.json`, or of GGUF metadata, into a `ModelArch`, by the families' tables.

There are three kinds of keys: used ones; ones without effect on inference (training, tooling,
generation), which are ignored; and features that would change the result, which must be absent or
neutral. Unknown keys are ignored too, since every tool adds its own. If such a key changes the
structure, the loader's check of tensor names and shapes refuses the model.

GGUF leaves parts of the architecture to the reader's knowledge: these are defaults of fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from .common import DEFAULTS, DENSE, FIELDS, GGUF_DENSE, GGUF_NEUTRAL, NEUTRAL
from .family import Config, Family
from .registry import ALL, TYPES

GGUF_ARCHITECTURES = {family.gguf: family.name for family in ALL if family.gguf and not family.when}
"""Families by `general.architecture`. Mistral and Mixtral files have the name llama."""


def from_hf(config: Mapping[str, Any]) -> ModelArch:
    """Read the architecture that a `config.json` describes.

    Raises `UnsupportedModel` (unknown architecture or value: names it, lists supported ones) or
    `ModelFileError` (a key is missing or of the wrong type). Of a multimodal model only the text
    model is read.
    """
    outer = Fields(config, "config.json")
    family, classes = _family(outer)
    nested = any(name.endswith("ForConditionalGeneration") for name in classes)
    text = outer.mapping("text_config") if nested else None
    inner = text.get("model_type") if text is not None else None
    family = TYPES[inner] if inner in family.guests else family
    defaults = {**DEFAULTS, **family.defaults}
    fields = Fields(config if text is None else text, "config.json", defaults=defaults)
    # A multimodal model may have another family's text model: Mistral's in Mistral 3.
    fields.expect("model_type", *family.types, family.name)
    return _read(family, fields, NEUTRAL, DENSE, outer=outer)


def from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    factors: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> ModelArch:
    """Read the architecture of a GGUF file.

    `factors`: the content of the tensors that are part of the rope, if the file has them:
    `rope_freqs.weight`, `rope_factors_short.weight`, `rope_factors_long.weight`. Each has half as
    many numbers as are rotated. Raises `UnsupportedModel` or `ModelFileError`, as `from_hf` does.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF: general.architecture is {kind!r:.80}; supported: "
            f"{', '.join(sorted(GGUF_ARCHITECTURES))}",
            param="general.architecture",
        )
    fields = Fields(metadata, "GGUF", f"{kind}.")
    named = sorted((one for one in ALL if one.gguf == kind), key=lambda one: one.when is None)
    family = next(one for one in named if one.when is None or one.when(fields))
    read = {"tensors": tensor_names, "factors": factors}
    return _read(family, fields, GGUF_NEUTRAL, GGUF_DENSE, **read)


def _read(
    family: Family,
    fields: Fields,
    neutral: Mapping[str, tuple[Any, ...]],
    dense: Mapping[str, tuple[Any, ...]],
    **more: Any,
) -> ModelArch:
    """Refuse features that the family lacks, then read its fields."""
    gguf = bool(fields.prefix)
    if "moe.experts" not in family.fields:
        neutral = {**neutral, **dense}
    own = family.keys(gguf=gguf)
    stated = family.gguf_allowed if gguf else family.allowed
    for key, allowed in {**{k: v for k, v in neutral.items() if k not in own}, **stated}.items():
        fields.expect(key, *allowed)
    return Config(family, {**FIELDS, **family.fields}, fields, **more).arch()


def _family(fields: Fields) -> tuple[Family, tuple[str, ...]]:
    """Return the family of a `config.json`, and the classes that it may name."""
    named = fields.raw("architectures") or []
    if not isinstance(named, list):
        raise ModelFileError("config.json: architectures must be a list", param="architectures")
    kind = fields.raw("model_type")
    if kind is None and named:
        kind = next((k for k, one in TYPES.items() if named[0] in one.types[k]), None)
    family = TYPES.get(kind) if isinstance(kind, str) else None
    if family is None:
        what = kind or (named[0] if named else "nothing")
        raise UnsupportedModel(
            f"config.json: model_type is {what!r:.80}; supported: {', '.join(sorted(TYPES))}",
            param="model_type",
        )
    classes = family.types[kind]
    if named and named[0] not in classes:
        raise UnsupportedModel(
            f"config.json: architectures is {named!r:.120}; supported for model_type {kind}: "
            f"{', '.join(classes)}",
            param="architectures",
        )
    return family, classes
