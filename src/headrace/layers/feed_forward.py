"""Gated feed-forward (Shazeer 2020), dense or as a mixture of experts."""

from __future__ import annotations

from ..base.arch import Moe
from ..base.graph import TOKENS, ActivationSpec, ExpertsSpec, Node, RouteSpec, Value
from .description import Description, matrix


def feed_forward(to: Description, layer: int, x: Value, at: str) -> Value:
    """Dense; or, behind the first dense layers, a mixture where the architecture has one."""
    moe = to.arch.moe
    if moe is None or layer < moe.dense_layers:
        return gated_linear(to, x, at, to.arch.intermediate)
    return mixture(to, x, at, moe)


def gated_linear(to: Description, x: Value, at: str, inner: int) -> Value:
    """`{at}.{gate,up,down}_proj`."""
    both = to.linear(x, f"{at}.gate_proj", f"{at}.up_proj", outputs=[inner, inner])
    gated = to.gated(both, ActivationSpec(to.arch.activation))
    return to.linear(gated, f"{at}.down_proj", outputs=to.arch.hidden)


def mixture(to: Description, x: Value, at: str, moe: Moe) -> Value:
    """`{at}.gate` routes each row to `active` of `{at}.experts.N.{gate,up,down}_proj`; shared ones
    (`{at}.shared_experts`) see every row."""
    logits = to.linear(x, f"{at}.gate", outputs=moe.experts)
    chosen, shares = to.nodes(
        Node(
            "route",
            (logits,),
            (Value(TOKENS, moe.active, "i32"), Value(TOKENS, moe.active, "f32")),
            spec=RouteSpec(moe.active, moe.normalise),
        )
    )
    inner, hidden = moe.intermediate, to.arch.hidden
    each = [f"{at}.experts.*.{part}_proj" for part in ("gate", "up", "down")]
    experts = [
        matrix(each[:2], [inner, inner], hidden, "moe", moe.experts),
        matrix(each[2:], [hidden], inner, "moe", moe.experts),
    ]
    spec = ExpertsSpec(to.arch.activation)
    mixed = to.node("experts", (x, chosen, shares), hidden, experts, spec)
    if not moe.shared_intermediate:
        return mixed
    shared = gated_linear(to, x, f"{at}.shared_experts", moe.shared_intermediate)
    return to.add(mixed, shared)
