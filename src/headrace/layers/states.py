"""Mamba 2, and the convolution at the start of layers with a state."""

from __future__ import annotations

from ..base.graph import Value, WeightRef
from ..base.recurrent import ConvSpec, SsmSpec
from .description import Description, vector


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
    kernels, conv = taps(to, f"{at}.conv1d", spec.mixed), ConvSpec(layer, of.taps, "silu")
    mixed = to.node("short_conv", (mixed,), spec.mixed, kernels, conv)
    vectors = [vector([f"{at}.{name}"], [of.value_heads]) for name in ("A_log", "dt_bias", "D")]
    vectors.append(vector([f"{at}.norm.weight"], [spec.values]))
    out = to.node("ssm", (mixed, z, dt), spec.values, vectors, spec)
    return to.linear(out, f"{at}.out_proj", outputs=arch.hidden, purpose="state_out")


def taps(to: Description, name: str, channels: int) -> list[WeightRef]:
    """Return the kernels of a convolution, and its bias if it has one."""
    of = to.arch.recurrence
    assert of is not None
    kernels = WeightRef((f"{name}.weight",), (channels,), of.taps, "vector")
    return [kernels, vector([f"{name}.bias"], [channels])] if of.bias else [kernels]
