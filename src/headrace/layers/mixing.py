"""What a layer makes of a sequence's rows together, whichever way its family has for that."""

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
"""What goes on from a state, and what its tensors are called."""


def mixing(to: Description, layer: int, x: Value, at: str) -> Value:
    """`{at}.self_attn`, by latents where the architecture has them; or a state's."""
    of, mla = to.arch.recurrence, to.arch.mla
    if of is not None and layer in of.layers:
        make, name = _STATES[of.kind]
        return make(to, layer, x, f"{at}.{name}")
    if mla is not None:
        return latent_attention(to, layer, x, f"{at}.self_attn", mla)
    return attention(to, layer, x, f"{at}.self_attn")
