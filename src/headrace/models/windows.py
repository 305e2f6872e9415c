"""Layers with a sliding window, in both formats."""

from __future__ import annotations

from collections.abc import Callable

from ..base.errors import ModelFileError, UnsupportedModel
from .family import Config, Field, integer
from .ropes import MAX_CONTEXT

Windows = tuple[int | None, ...]
WINDOW = integer(
    "sliding_window", "attention.sliding_window", 1, MAX_CONTEXT, None, zero=True, null=True
)
_PATTERN = integer("sliding_window_pattern", "attention.sliding_window_pattern", 1, 2**10)


def no_window(config: Config) -> None:
    """Return None for a family without windows. A GGUF may have one that is unused."""
    if config.gguf:
        config.fields.expect("attention.sliding_window", 0, config["max_context"])


def no_windows(config: Config) -> Windows:
    """Return no windows, for a family whose `layer_types` mean something else."""
    no_window(config)
    return ()


def stated_window(config: Config) -> int | None:
    """Read the window; 4096 if a `config.json` has no key at all, as in transformers."""
    absent = not config.gguf and not config.fields.present("sliding_window")
    found: int | None = 4096 if absent else config.read(WINDOW)
    return found


def windowed(config: Config) -> Windows:
    """Return the window of each layer; () if no window is shorter than the context. Layers with a
    separate rope keep theirs."""
    slides, window = config["_slides"], config["_window"]
    if not any(slides):
        return ()
    if window is None:
        fields, key = config.fields, "sliding_window"
        stated = not config.gguf and fields.raw("layer_types") is not None
        needed = not config.gguf and fields.null(key) and key in fields.defaults
        if (stated or needed) and isinstance(config.table["_window"], Field):
            raise ModelFileError(
                f"{fields.where}: {key} is absent or null, but layers have sliding_attention",
                param=key,
            )
        return ()
    if window >= config["max_context"] and "local_rope" not in config.table:
        return ()
    return tuple(window if slide else None for slide in slides)


def unwindowed(config: Config) -> tuple[bool, ...]:
    """Return the layers without a window, which have no positions either."""
    return tuple(not slide for slide in config["_slides"])


def sliding(rule: Callable[[Config], list[bool]]) -> Callable[[Config], list[bool]]:
    """Make a reader of the layers that have a window: from `layer_types`, or the family's rule."""

    def read(config: Config) -> list[bool]:
        kinds = None if config.gguf else config.fields.raw("layer_types")
        if kinds is None:
            return rule(config)
        own = layer_kinds(config, ("full_attention", "sliding_attention"))
        return [kind == "sliding_attention" for kind in own]

    return read


def layer_kinds(
    config: Config, allowed: tuple[str, ...], kinds: object = None, key: str = "layer_types"
) -> list[str]:
    """Return the kind of each layer; `kinds` in place of the key's own. Raises for others than
    `allowed`."""
    given = config.fields.raw(key) if kinds is None else kinds
    where, layers = config.fields.where, config["layers"]
    if not isinstance(given, list) or len(given) != layers:
        raise ModelFileError(f"{where}: {key} must be a list of {layers} names", param=key)
    for kind in given:
        if kind not in allowed:
            supported = ", ".join(allowed)
            raise UnsupportedModel(
                f"{where}: {key} has {kind!r:.60}; supported: {supported}", param=key
            )
    return given


def layer_numbers(config: Config, key: str, given: object) -> list[int]:
    """Return layers that a key lists by number. Raises `ModelFileError` for one that the model does
    not have."""
    layers = config["layers"]
    if not isinstance(given, list) or not all(
        type(one) is int and 0 <= one < layers for one in given
    ):
        raise ModelFileError(
            f"{config.fields.where}: {key} must be a list of numbers from 0 to {layers - 1}",
            param=key,
        )
    return given


def every(period: int) -> Callable[[Config], list[bool]]:
    """Make the rule that every n-th layer has no window; a config may have another n, or letters
    (EXAONE), and a GGUF flags."""

    def rule(config: Config) -> list[bool]:
        fields, layers = config.fields, config["layers"]
        # transformers 5 writes the key with an underscore.
        key = config.key(_PATTERN)
        if not config.gguf and fields.raw(f"_{key}") is not None:
            key = f"_{key}"
        given = fields.raw(key)
        if config.gguf and given is not None and not isinstance(given, int):
            each = list(given) if hasattr(given, "__len__") and not isinstance(given, str) else []
            if len(each) != layers or not all(one in (0, 1) for one in each):
                raise ModelFileError(
                    f"GGUF: {fields.prefix}{key} must be a number or {layers} flags", param=key
                )
            return [bool(one) for one in each]
        own = fields.integer(key, 1, 2**10, period)
        return [(layer + 1) % own != 0 for layer in range(layers)]

    return sliding(rule)


def unrotated(config: Config) -> tuple[bool, ...]:
    """Return the layers without positions: zeros in `no_rope_layers`, or every n-th layer, n from
    `no_rope_layer_interval` or 4."""
    layers, key = config["layers"], "no_rope_layers"
    rotated = None if config.gguf else config.fields.raw(key)
    if rotated is None or rotated == []:
        every = 4
        if not config.gguf:
            every = config.fields.integer("no_rope_layer_interval", 1, 2**10, 4)
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    flags = rotated if isinstance(rotated, list) else []
    if len(flags) != layers or not all(isinstance(one, int) and one in (0, 1) for one in flags):
        raise ModelFileError(
            f"{config.fields.where}: {key} must be a list of {layers} zeros and ones", param=key
        )
    return tuple(not one for one in flags)
