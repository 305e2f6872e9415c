"""Feed-forward: gated (Shazeer 2020), dense or as a mixture of experts, and without a gate."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.arch import Moe
from ..base.graph import (
    TOKENS,
    ActivationSpec,
    ExpertsSpec,
    Node,
    Purpose,
    RouteSpec,
    Value,
)
from .description import Description, matrix, vector


def feed_forward(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe a dense feed-forward, or a mixture in layers that have one."""
    moe = to.arch.moe
    if moe is None or not moe.mixes(layer):
        return gated_linear(to, x, at, to.arch.intermediate)
    return mixture(to, x, at, moe)


def gated_linear(
    to: Description, x: Value, at: str, inner: int, purpose: Purpose | None = None
) -> Value:
    """Describe `{at}.{gate,up,down}_proj`, or `gate_up_proj` in one. `purpose`: of all of them."""
    ups, outputs = [f"{at}.gate_proj", f"{at}.up_proj"], [inner, inner]
    if "gate_up" in to.arch.fused:
        ups, outputs = [f"{at}.gate_up_proj"], [2 * inner]
    both = to.linear(x, *ups, outputs=outputs, purpose=purpose or "gate_up")
    gated = to.gated(both, ActivationSpec(to.arch.activation))
    down = purpose or "down"
    return to.linear(gated, f"{at}.down_proj", outputs=to.arch.hidden, purpose=down)


def two_products(
    to: Description,
    x: Value,
    up: str,
    down: str,
    activation: ActivationSpec,
    *,
    bias: bool = True,
) -> Value:
    """Describe a feed-forward without a gate: `down` · act(`up` · x)."""
    inner = to.linear(x, up, outputs=to.arch.intermediate, bias=bias, purpose="up")
    inner = to.activate(inner, activation)
    return to.linear(inner, down, outputs=to.arch.hidden, bias=bias, purpose="down")


def mixture(to: Description, x: Value, at: str, moe: Moe) -> Value:
    """Route each row by `{at}.gate` to `active` of `{at}.experts.N.{gate,up,down}_proj`; shared
    ones (`{at}.shared_experts`) see every row.

    A shared expert with a gate is a mixture of one expert: every row goes to it, with the routing
    weight of `{at}.shared_expert_gate`.
    """
    logits = to.linear(x, f"{at}.gate", outputs=moe.experts, bias=moe.clamped, purpose="router")
    route = RouteSpec(
        moe.active,
        moe.normalise,
        moe.scores,
        moe.scale,
        moe.groups,
        moe.active_groups,
        moe.best_of_group,
    )
    bias = [f"{at}.gate.e_score_correction_bias"] if moe.bias else []
    name = f"{at}.experts.*"
    inside, clamped = moe.inside, moe.clamped
    given = to, x, logits, name, moe.intermediate, route, bias
    mixed = experts(*given, clamped=clamped, inside=inside)
    if not moe.shared_intermediate:
        return mixed
    if moe.shared_gate:
        logits = to.linear(x, f"{at}.shared_expert_gate", outputs=1, purpose="router")
        route = RouteSpec(1, normalise=False, scores="sigmoid")
        at = f"{at}.shared_expert"
        shared = experts(to, x, logits, at, moe.shared_intermediate, route, purpose="shared")
    else:
        shared = gated_linear(to, x, f"{at}.shared_experts", moe.shared_intermediate, "shared")
    return to.node("add", (mixed, shared), mixed.width)


def experts(
    to: Description,
    x: Value,
    logits: Value,
    at: str,
    inner: int,
    route: RouteSpec,
    vectors: Sequence[str] = (),
    *,
    clamped: bool = False,
    inside: bool = False,
    purpose: Purpose = "experts",
) -> Value:
    """Describe the experts `{at}.{gate,up,down}_proj` with router `logits` [N, experts]. `vectors`:
    bias of the choice, gains of the routing weights; `clamped` experts have biases and a special
    gate; `inside`: routing weights multiply the experts' inputs."""
    count, hidden = logits.width, to.arch.hidden
    chosen, shares = to.nodes(
        Node(
            "route",
            (logits,),
            (Value(TOKENS, route.active, "i32"), Value(TOKENS, route.active, "f32")),
            tuple(vector([name], [count]) for name in vectors),
            route,
        )
    )
    matrices = [
        matrix([f"{at}.gate_proj", f"{at}.up_proj"], [inner, inner], hidden, "moe", count, purpose),
        matrix([f"{at}.down_proj"], [hidden], inner, "moe", count, purpose),
    ]
    if clamped:
        both = [f"{at}.gate_proj.bias", f"{at}.up_proj.bias"]
        down = [f"{at}.down_proj.bias"]
        biases = vector(both, [inner, inner], count), vector(down, [hidden], count)
        matrices += [bias._replace(purpose=purpose) for bias in biases]
    activation = to.arch.activation
    assert activation != "relu2", "experts have gates, and those none of this kind"
    spec = ExpertsSpec("clamped" if clamped else activation, inside)
    return to.node("experts", (x, chosen, shares), hidden, matrices, spec)
