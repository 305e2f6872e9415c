"""Mixing of a sequence's rows in a layer, in the way of its family."""

from __future__ import annotations

from ..base.graph import Value
from .attention import attention, latent_attention
from .description import Description
from .states import gated_delta_net, short_convolution, state_space

_STATES = {
    "conv": (short_convolution, "conv"),
    "delta": (gated_delta_net, "linear_attn"),
    "ssm": (state_space, "mamba"),
}
"""Description of each kind of layer with a state, and the name of its tensors."""


def mixing(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe `{at}.self_attn`, over latents if the architecture has them, or a layer with a
    state."""
    of, mla = to.arch.recurrence, to.arch.mla
    if of is not None and layer in of.layers:
        make, name = _STATES[of.kind]
        return make(to, layer, x, f"{at}.{name}")
    if mla is not None:
        return latent_attention(to, layer, x, f"{at}.self_attn", mla)
    return attention(to, layer, x, f"{at}.self_attn")
