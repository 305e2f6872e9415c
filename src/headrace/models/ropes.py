"""Rotary embeddings, in both formats: plain, stretched, and of a part of each head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base.arch import Rope
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from .family import Config, Field, flag, integer, number, plain, word

MAX_CONTEXT = 2**27
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_LLAMA3 = {"low_freq_factor": 1.0, "original_context": 8192}
_HIGH = (4.0, 1.0)
"""Parameters that Llama 3.1, 3.2 and 3.3 share; only `factor` differs (8 or 32). Llama 4 has
another `high_freq_factor`."""

AXES = 3
"""Axes of M-RoPE: time, row, column."""
GROWTH = "llama_4_scaling_beta"
_SHARE = "partial_rotary_factor"
THETA = number("rope_theta", "rope.freq_base", 1.0, 1e12, 1e4)
FACTOR = number("factor", "rope.scaling.factor", 1.0, 1e4)
_KINDS = {"default": "plain", **{kind: kind for kind in ("linear", "llama3", "yarn")}}
_GGUF_KINDS = {"none": "plain", "linear": "linear", "yarn": "yarn"}
_KIND = word(("rope_type", "type"), "", _KINDS, "default")


def _unnamed(config: Config) -> str:
    """Return the kind of a GGUF that does not name it: a factor alone is linear, as in
    llama.cpp."""
    factor = config.fields.number(FACTOR.gguf, 0.0, 1e4, 0.0)
    return "none" if factor in (0.0, 1.0) else "linear"


GGUF_KIND = word((), "rope.scaling.type", _GGUF_KINDS, _unnamed)
_ORIGINAL = integer(
    "original_max_position_embeddings", "rope.scaling.original_context_length", 1, MAX_CONTEXT
)
_LOW = number("low_freq_factor", "", 1e-3, 1e3)
_HIGHER = number("high_freq_factor", "", 1e-3, 1e3)
_FAST = number("beta_fast", "rope.scaling.yarn_beta_fast", 1e-3, 1e5, 32.0)
_SLOW = number("beta_slow", "rope.scaling.yarn_beta_slow", 1e-3, 1e5, 1.0)
GROWN = number("attention_factor", "rope.scaling.attn_factor", 0.0, 1e3, None)
_TRUNCATE = flag("truncate", "", True)


def parameters(config: Config) -> dict[str, Any]:
    """Return the rope's own object in a `config.json`: transformers 5's, else the earlier one, else
    the family's default."""
    if config.gguf:
        return {}
    fields = config.fields
    own = Fields(fields.values, fields.where)
    keys = ("rope_parameters", "rope_scaling")
    found = [each.mapping(key) for each in (own, fields) for key in keys]
    return dict(next(filter(None, found), {}))


def rope(config: Config) -> Rope:
    """Read the rope of a family with one rope for all layers."""
    given = parameters(config)
    if "rope.share" in config.table:
        given.pop(_SHARE, None)
    return rope_of(config, given)


def rope_by_axes(config: Config) -> Rope:
    """Read a rope whose pairs turn by time, row and column (M-RoPE, Wang et al. 2024): in sections,
    or interleaved if the family says so in `_interleaved` (Qwen3-VL)."""
    given, pairs = parameters(config), int(config["head_dim"]) // 2
    key, stated = "mrope_section", given.pop("mrope_section", None)
    given.pop("mrope_interleaved", None)
    if config.gguf:
        key = "rope.dimension_sections"
        stated = config.fields.raw(key)
        if isinstance(stated, list) and not any(stated[AXES:]):
            stated = stated[:AXES]
    given = {key: "default" if value == "mrope" else value for key, value in given.items()}
    interleaved = config.table["_interleaved"]
    section = ([24, 20, 20] if interleaved else [16, 24, 24]) if stated is None else stated
    numbers = isinstance(section, list) and all(type(one) is int and one >= 0 for one in section)
    if not numbers or len(section) != AXES or sum(section) != pairs:
        raise UnsupportedModel(
            f"{config.fields.where}: {key} is {section!r:.80}; must be {AXES} numbers of pairs, "
            f"{pairs} together",
            param=key,
        )
    axes = [axis for axis, count in enumerate(section) for _ in range(count)]
    if interleaved:
        axes = [at % AXES if at < AXES * section[at % AXES] else 0 for at in range(pairs)]
    return replace(rope_of(config, given), axes=tuple(axes))


def within(config: Config, given: Mapping[str, Any]) -> Config:
    """Return a reader of a rope's object within a `config.json`; GGUF has none."""
    if config.gguf:
        return config
    return Config(config.family, config.table, Fields(given, "config.json rope_parameters"))


def rope_of(config: Config, given: Mapping[str, Any], theta: Field = THETA) -> Rope:
    """Read one rope. `given`: its parameters in a `config.json`; `theta`: used if they lack it. Of
    Llama 3's scaling a GGUF file has only the divisors."""
    inner, base = within(config, given), config.read(theta)
    if config.gguf:
        size, kind = rotated(config), config.read(GGUF_KIND)
        if ROPE_FACTORS in config.factors:
            if kind != "plain":
                raise UnsupportedModel(
                    f"GGUF: {ROPE_FACTORS} together with rope.scaling.type {kind}"
                )
            return llama3_rope(base, config.factors[ROPE_FACTORS], size)
    else:
        base, kind = inner.read(THETA, base), inner.read(_KIND)
        inner.fields.expect(_SHARE, 1.0)
        inner.fields.expect("mrope_section")
        if "growth" not in config.table:
            inner.fields.expect(GROWTH)
        if kind != "yarn":
            inner.fields.expect("truncate", True)
    if kind == "plain":
        return Rope(base)
    factor = inner.read(FACTOR)
    if kind == "linear":
        return Rope(base, "linear", factor)
    if kind == "llama3":
        low, high = inner.read(_LOW), inner.read(_HIGHER)
        if high < low:
            raise UnsupportedModel(
                f"config.json: high_freq_factor ({high:g}) must not be below low_freq_factor "
                f"({low:g})"
            )
        return Rope(base, "llama3", factor, low, high, inner.read(_ORIGINAL))
    return Rope(
        base,
        "yarn",
        factor,
        original_context=inner.read(_ORIGINAL, config["max_context"]),
        beta_fast=inner.read(_FAST),
        beta_slow=inner.read(_SLOW),
        attention_factor=_grown(inner, factor),
        truncate=inner.read(_TRUNCATE),
    )


def _grown(config: Config, factor: float) -> float:
    """Return the factor on rotated q and k under YaRN."""
    fields, stated = config.fields, config.read(GROWN)
    if not config.gguf:
        scale, over = (fields.optional_number(k, 0.0, 1e3) for k in ("mscale", "mscale_all_dim"))
        if stated is None and scale and over:
            return yarn_growth(factor, scale) / yarn_growth(factor, over)
        return yarn_growth(factor) if stated is None else float(stated)
    for end in ("ext", "attn"):
        fields.expect(f"rope.scaling.yarn_{end}_factor", 1.0, -1.0)
    if "_log_multiplier" not in config.table:
        fields.expect("rope.scaling.yarn_log_multiplier", 0.0)
    elif config["_log_multiplier"]:
        return 1.0 if stated is None else float(stated)  # The rest is in the attention scale.
    return (1.0 if stated is None else float(stated)) * yarn_growth(factor)


def yarn_growth(factor: float, scale: float | None = None) -> float:
    """Return the growth of attention's temperature with the stretch (Peng et al. 2023, section
    3.4)."""
    return 0.1 * (scale or 1.0) * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rotated(config: Config) -> int:
    """Return the count of rotated numbers of a head in a GGUF; all, unless the family has a
    share."""
    for name in (ROPE_FACTORS, *LONG_FACTORS):
        if name in config.tensors and name not in config.factors:
            raise ModelFileError(f"GGUF: the content of {name} was not read")
    size = int(config["mla.rope_dim" if "mla.rope_dim" in config.table else "head_dim"])
    key = "rope.dimension_count"
    if "rope.share" not in config.table:
        config.fields.expect(key, size)
    turned = config.fields.integer(key, 2, size, size)
    if turned % 2:
        raise UnsupportedModel(f"GGUF: {key} is {turned}; must be even", param=key)
    return size


def share(config: Config) -> float:
    """Return the rotated share of a head."""
    size, fields = int(config["head_dim"]), config.fields
    if config.gguf:
        turned = fields.integer("rope.dimension_count", 2, size, size)
        return turned / size
    inner, rotary = parameters(config).get(_SHARE), fields.raw("rotary_dim")
    if inner is None and rotary is not None:
        found = fields.integer("rotary_dim", 2, size) / size
    else:
        named = Fields({_SHARE: fields.raw(_SHARE) if inner is None else inner}, fields.where)
        found = named.number(_SHARE, 0.01, 1.0, 1.0)
    turned = int(size * found)
    if turned < 2 or turned % 2:
        raise UnsupportedModel(
            f"{fields.where}: {_SHARE} is {found:g}; {turned} of a head's {size} numbers would be "
            "rotated, which must be even",
            param=_SHARE,
        )
    return found


def full_rope(config: Config) -> Rope:
    """Read the rope of layers without a window, if windowed ones have a different one."""
    given = _by_kind(config)
    full = parameters(config) if given is None else given[0]
    return rope_of(config, full, config.table["_theta"])


def local_rope(config: Config) -> Rope:
    """Read the rope of windowed layers. Without a separate entry it is not stretched."""
    theta, given = config.table["_local_theta"], _by_kind(config)
    return Rope(config.read(theta)) if given is None else rope_of(config, given[1], theta)


def _by_kind(config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return transformers 5's parameters of (full layers, windowed layers), if it has both."""
    if config.gguf:
        return None
    nested = within(config, config.fields.mapping("rope_parameters") or {}).fields
    full, local = (nested.mapping(f"{kind}_attention") for kind in ("full", "sliding"))
    return None if full is None and local is None else (full or {}, local or {})


def llama3_rope(theta: float, factors: Sequence[float], head_dim: int) -> Rope:
    """Return the Llama 3.1 scaling whose frequency divisors [head_dim / 2] are `factors`.

    Only the divisors are stored, so the parameters are recovered. The largest divisor is the
    factor; the others are the same for the whole family. They must reproduce every divisor to 1e-4.
    """
    if len(factors) != head_dim // 2 or not all(math.isfinite(f) and f >= 1.0 for f in factors):
        raise ModelFileError(
            f"GGUF: {ROPE_FACTORS} must hold {head_dim // 2} finite numbers from 1 up"
        )
    factor = plain(max(factors))
    if factor == 1.0:
        return Rope(theta=theta)
    wrong = 0
    for high in _HIGH:
        own = {**_LLAMA3, "factor": factor, "high_freq_factor": high}
        found = Rope(theta=theta, kind="llama3", **own)  # type: ignore[arg-type]
        each = (llama3_divisor(found, i, head_dim) for i in range(len(factors)))
        alike = [math.isclose(*both, rel_tol=1e-4) for both in zip(factors, each, strict=True)]
        if all(alike):
            return found
        wrong = wrong or alike.index(False)
    raise UnsupportedModel(
        f"GGUF: {ROPE_FACTORS}[{wrong}] is {factors[wrong]:g}; supported: the scaling of "
        "Llama 3.1, 3.2, 3.3 and 4",
        param=ROPE_FACTORS,
    )


def llama3_divisor(rope: Rope, i: int, head_dim: int) -> float:
    """Return the divisor of frequency i of a head (Llama 3.1, section 3.4)."""
    wavelength: float = 2 * math.pi * rope.theta ** (2 * i / head_dim)
    if wavelength < rope.original_context / rope.high_freq_factor:
        return 1.0
    if wavelength > rope.original_context / rope.low_freq_factor:
        return rope.factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / span
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)
