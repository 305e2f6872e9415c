"""Parts of a bidirectional transformer encoder: attention of all rows to all, and two products.

BERT's layers (Devlin et al. 2018) have their norms after these, Whisper's and SigLIP's (Zhai et al.
2023) before them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.arch import Rope
from ..base.graph import ActivationSpec, AttentionSpec, Node, Rows, Value, WindowSpec
from .description import Description, vector
from .feed_forward import two_products


def bidirectional(
    to: Description,
    layer: int,
    x: Value,
    names: Sequence[str],
    output: str,
    rope: Rope | None = None,
    window: int | None = None,
    *,
    norms: Sequence[str] = (),
    bias: bool = True,
    output_bias: bool = True,
) -> Value:
    """Describe attention by the products `names`: one for queries, keys and values each or one for
    all, with `bias`, then the output's, with `output_bias`. `window`: see `AttentionSpec`; `norms`:
    RMS norms of q and k over all heads."""
    arch = to.arch
    sizes = arch.heads, arch.heads, arch.head_dim, arch.scale
    spec = AttentionSpec(layer, *sizes, rope, window, eps=arch.norm_eps, bidirectional=True)
    spec = spec._replace(whole_norm=bool(norms))
    outputs = [3 * spec.queries // len(names)] * len(names)
    qkv = to.linear(x, *names, outputs=outputs, bias=bias, purpose="qkv")
    if rope is not None or norms:
        gains = [vector([f"{name}.weight"], [spec.queries]) for name in norms]
        qkv = to.node("write", (qkv,), spec.stacked, gains, spec)
    mixed = to.node("attend", (qkv,), spec.queries, spec=spec)
    return to.linear(mixed, output, outputs=arch.hidden, bias=output_bias, purpose="output")


def side_by_side(to: Description, x: Value, square: int) -> Value:
    """Describe the concatenation of `square` successive rows of x into one."""
    wide = Value(Rows("N", over=square), square * x.width)
    to.nodes(Node("window", (x,), (wide,), (), WindowSpec(square, square)))
    return wide


def siglip(to: Description, x: Value, at: str) -> Value:
    """Describe the layers of SigLIP's tower `at`, and the norm after them."""
    for layer in range(to.arch.layers):
        own = f"{at}.encoder.layers.{layer}"
        names = [f"{own}.self_attn.{letter}_proj" for letter in "qkv"]
        normed = to.layer_norm(x, f"{own}.layer_norm1")
        x = to.add(x, bidirectional(to, layer, normed, names, f"{own}.self_attn.out_proj"))
        normed, products = (
            to.layer_norm(x, f"{own}.layer_norm2"),
            (f"{own}.mlp.fc1", f"{own}.mlp.fc2"),
        )
        x = to.add(x, two_products(to, normed, *products, ActivationSpec(to.arch.activation)))
    return to.layer_norm(x, f"{at}.post_layernorm")
