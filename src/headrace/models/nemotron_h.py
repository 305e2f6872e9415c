"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624): Mamba 2, attention or a feed-forward, one a layer."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import ActivationSpec, Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.states import state_space


def nemotron_h(arch: ModelArch) -> Graph:
    """Describe x + mixer(norm(x)); attention has no positions, the feed-forward no gate: relu
    squared."""
    assert arch.recurrence is not None, "the architecture says nothing of states"
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}.mixer"
        normed = to.rms_norm(x, f"model.layers.{layer}.norm")
        if layer in arch.recurrence.layers:
            mixed = state_space(to, layer, normed, at)
        elif layer in arch.recurrence.bare:
            inner = to.linear(normed, f"{at}.up_proj", outputs=arch.intermediate, purpose="up")
            inner = to.activate(inner, ActivationSpec(arch.activation))
            mixed = to.linear(inner, f"{at}.down_proj", outputs=arch.hidden, purpose="down")
        else:
            mixed = attention(to, layer, normed, at)
        x = to.add(x, mixed)
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
