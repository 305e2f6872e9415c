"""Gemma 4 (Gemma team 2026), text: layers that differ in their heads, and parts of an embedding."""

from __future__ import annotations

import math

from ..base.arch import ModelArch, Moe
from ..base.graph import (
    ActivationSpec,
    AddSpec,
    AttentionSpec,
    EmbedSpec,
    Graph,
    NormSpec,
    RouteSpec,
    ScaleSpec,
    Value,
)
from ..layers.description import Description, matrix, vector
from ..layers.embedding import embedding, head
from ..layers.feed_forward import experts, gated_linear

_HALF = math.sqrt(0.5)
"""Factor by which two parts of one variance sum up to that variance."""


def gemma4(arch: ModelArch) -> Graph:
    """Describe norms on both sides of each block. After them each layer adds a product of its own
    numbers of the token, and multiplies all by a number of its own."""
    to, uneven = Description(arch), arch.uneven
    assert uneven is not None
    x = embedding(to)
    own = _own_numbers(to, x, uneven.embedded) if uneven.embedded else []
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        mixed = _attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, to.rms_norm(mixed, f"{at}.post_attention_layernorm"))
        normed = to.rms_norm(x, f"{at}.pre_feedforward_layernorm")
        reads = uneven.wide and arch.kept_by(layer) != layer
        inner = gated_linear(to, normed, f"{at}.mlp", arch.intermediate * (2 if reads else 1))
        if arch.moe is not None:
            inner = to.rms_norm(inner, f"{at}.post_feedforward_layernorm_1")
            inner = to.add(inner, _mixture(to, x, at, arch.moe))
        x = to.add(x, to.rms_norm(inner, f"{at}.post_feedforward_layernorm"))
        if own:
            gate = to.linear(
                x, f"{at}.per_layer_input_gate", outputs=uneven.embedded, purpose="per_layer"
            )
            act = ActivationSpec(arch.activation)
            gated = to.node("multiply", (own[layer], gate), uneven.embedded, spec=act)
            wide = to.linear(
                gated, f"{at}.per_layer_projection", outputs=arch.hidden, purpose="per_layer"
            )
            x = to.add(x, to.rms_norm(wide, f"{at}.post_per_layer_input_norm"))
        x = _scaled(to, x, 1.0, f"{at}.layer_scalar")
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


def _scaled(to: Description, x: Value, factor: float, *names: str) -> Value:
    return to.node("scale", (x,), x.width, [vector([n], [1]) for n in names], ScaleSpec(factor))


def _own_numbers(to: Description, x: Value, size: int) -> list[Value]:
    """Return the numbers of each layer [N, size]: a look-up by token, plus the norm of a product of
    the token's embedding."""
    arch = to.arch
    all_layers = arch.layers * size
    table = matrix(
        ["model.embed_tokens_per_layer"], [arch.vocab_size], all_layers, "embed", purpose="embed"
    )
    spec = EmbedSpec(scale=math.sqrt(size) * _HALF)
    looked_up = to.parts(to.node("embed", (), all_layers, [table], spec), [size] * arch.layers)
    product = to.linear(
        x, "model.per_layer_model_projection", outputs=all_layers, purpose="per_layer"
    )
    # Scaled by hidden ** -0.5 before the norm: as good as a larger epsilon in it.
    norm = NormSpec("rms", arch.norm_eps * arch.hidden, arch.norm_offset)
    gain = vector(["model.per_layer_projection_norm.weight"], [size])
    found = []
    for each, made in zip(looked_up, to.parts(product, [size] * arch.layers), strict=True):
        normed = to.node("norm", (made,), size, [gain], norm)
        found.append(to.node("add", (each, normed), size, spec=AddSpec(_HALF)))
    return found


def _attention(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe attention: heads of q and k have norms with a gain, those of v without; scores are
    not scaled."""
    arch, uneven = to.arch, to.arch.uneven
    assert uneven is not None
    window, source = arch.window(layer), arch.kept_by(layer)
    kv_heads, size = arch.kv_shape(layer)
    rope = arch.rope if window is None else arch.local_rope
    one = uneven.one_product and window is None
    spec = AttentionSpec(source, arch.heads, kv_heads, size, arch.scale, rope, window)
    spec = spec._replace(eps=arch.norm_eps, values="keys" if one else "normed")
    if source != layer:
        spec = spec._replace(values="elsewhere")
    names = [f"{at}.{part}_proj" for part in "qkv"[: 1 + spec.kept]]
    outputs = [spec.queries, *[kv_heads * size] * spec.kept]
    qkv = to.linear(x, *names, outputs=outputs, purpose="qkv")
    norms = [vector([f"{at}.{part}_norm.weight"], [size]) for part in "qk"[: 1 + (spec.kept > 0)]]
    q = to.node("write", (qkv,), spec.queries, norms, spec)
    mixed = to.node("attend", (q,), spec.queries, spec=spec)
    return to.linear(mixed, f"{at}.o_proj", outputs=arch.hidden, purpose="output")


def _mixture(to: Description, x: Value, at: str, moe: Moe) -> Value:
    """Describe experts in parallel to the dense feed-forward. Their input has a norm of its own,
    and their router another one."""
    gain = vector([f"{at}.router.scale"], [x.width])
    norm = NormSpec("rms", to.arch.norm_eps)
    routed = to.node("norm", (x,), x.width, [gain], norm)
    logits = to.linear(routed, f"{at}.router.proj", outputs=moe.experts, purpose="router")
    logits = _scaled(to, logits, to.arch.hidden**-0.5)
    route = RouteSpec(moe.active, gained=True)
    gains = [f"{at}.router.per_expert_scale"]
    normed = to.rms_norm(x, f"{at}.pre_feedforward_layernorm_2")
    mixed = experts(to, normed, logits, f"{at}.experts.*", moe.intermediate, route, gains)
    return to.rms_norm(mixed, f"{at}.post_feedforward_layernorm_2")
