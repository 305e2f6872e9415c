"""Layers that keep a state of fixed size in place of KV."""

from __future__ import annotations

from ..base.graph import Value, WeightRef
from ..base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from .description import Description, vector


def short_convolution(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe LFM2's convolution (Liquid AI 2025): c · conv(b · x) between two products,
    `{at}.{in,out}_proj`."""
    arch = to.arch
    assert arch.recurrence is not None
    bias, width = arch.recurrence.bias, arch.hidden
    spec = ConvSpec(layer, arch.recurrence.taps, gated=True)
    three = to.linear(x, f"{at}.in_proj", outputs=3 * width, bias=bias, purpose="state_in")
    mixed = to.node("short_conv", (three,), width, _taps(to, f"{at}.conv", width), spec)
    return to.linear(mixed, f"{at}.out_proj", outputs=width, bias=bias, purpose="state_out")


def gated_delta_net(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe a Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024): `{at}.in_proj_{qkv,z,b,a}`, a
    convolution over q, k and v, the delta rule, and `{at}.out_proj`."""
    arch, of = to.arch, to.arch.recurrence
    assert of is not None
    sizes = of.key_heads, of.value_heads, of.key_size, of.value_size
    spec = DeltaSpec(layer, *sizes, arch.norm_eps, of.tiled)
    widths = [spec.mixed, spec.values, of.value_heads, of.value_heads]
    names = [f"{at}.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    all_four = to.linear(x, *names, outputs=widths, purpose="state_in")
    mixed, *gates = to.parts(all_four, widths)
    taps, conv = _taps(to, f"{at}.conv1d", spec.mixed), ConvSpec(layer, of.taps, "silu")
    mixed = to.node("short_conv", (mixed,), spec.mixed, taps, conv)
    heads = of.value_heads
    vectors = [vector([f"{at}.{name}"], [heads]) for name in ("A_log", "dt_bias")]
    vectors.append(vector([f"{at}.norm.weight"], [of.value_size]))
    out = to.node("delta_rule", (mixed, *gates), spec.values, vectors, spec)
    return to.linear(out, f"{at}.out_proj", outputs=arch.hidden, purpose="state_out")


def state_space(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe Mamba 2 (Dao and Gu 2024): `{at}.in_proj` to gate, x, B, C and step, a convolution
    over x, B and C, the recurrence with its norm, and `{at}.out_proj`."""
    arch, of = to.arch, to.arch.recurrence
    assert of is not None
    sizes = of.key_heads, of.value_heads, of.key_size, of.value_size
    spec = SsmSpec(layer, *sizes, arch.norm_eps, of.key_heads)
    widths = [spec.values, spec.mixed, of.value_heads]
    all_three = to.linear(x, f"{at}.in_proj", outputs=sum(widths), purpose="state_in")
    z, mixed, dt = to.parts(all_three, widths)
    taps, conv = _taps(to, f"{at}.conv1d", spec.mixed), ConvSpec(layer, of.taps, "silu")
    mixed = to.node("short_conv", (mixed,), spec.mixed, taps, conv)
    vectors = [vector([f"{at}.{name}"], [of.value_heads]) for name in ("A_log", "dt_bias", "D")]
    vectors.append(vector([f"{at}.norm.weight"], [spec.values]))
    out = to.node("ssm", (mixed, z, dt), spec.values, vectors, spec)
    return to.linear(out, f"{at}.out_proj", outputs=arch.hidden, purpose="state_out")


def _taps(to: Description, name: str, channels: int) -> list[WeightRef]:
    of = to.arch.recurrence
    assert of is not None
    taps = WeightRef((f"{name}.weight",), (channels,), of.taps, "vector")
    return [taps, vector([f"{name}.bias"], [channels])] if of.bias else [taps]
