"""Layers that keep a state of fixed size in place of KV."""

from __future__ import annotations

from ..base.graph import Value, WeightRef
from ..base.recurrent import ConvSpec
from .description import Description, vector


def short_convolution(to: Description, layer: int, x: Value, at: str) -> Value:
    """LFM2 (Liquid AI 2025): c · conv(b · x) between two products, `{at}.{in,out}_proj`."""
    arch = to.arch
    assert arch.recurrence is not None
    bias, width = arch.recurrence.bias, arch.hidden
    spec = ConvSpec(layer, arch.recurrence.taps, gated=True)
    three = to.linear(x, f"{at}.in_proj", outputs=3 * width, bias=bias)
    mixed = to.node("short_conv", (three,), width, _taps(to, f"{at}.conv", width), spec)
    return to.linear(mixed, f"{at}.out_proj", outputs=width, bias=bias)


def _taps(to: Description, name: str, channels: int) -> list[WeightRef]:
    of = to.arch.recurrence
    assert of is not None
    taps = WeightRef((f"{name}.weight",), (channels,), of.taps, "vector")
    return [taps, vector([f"{name}.bias"], [channels])] if of.bias else [taps]
