"""The encoder of T5 (Raffel et al. 2019, arXiv 1910.10683), which reads the texts of pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.denoising import TextEncoder
from ..base.errors import UnsupportedModel
from ..base.graph import ActivationSpec, AttentionSpec, EmbedSpec, Graph
from ..layers.description import Description, vector

CLASS = "T5EncoderModel"
TABLE = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
"""Biases of each bucket and head."""
GRID = "relative_bias.grid"
"""Biases of each distance and head, which no file holds: see `AttentionSpec.reach`."""


def read_texts(config: Mapping[str, Any], most: int) -> TextEncoder:
    """Read the `config.json` of a text encoder. Raises `ModelFileError`, `UnsupportedModel`."""
    fields = Fields(config, "text_encoder/config.json")
    fields.expect("model_type", "t5")
    fields.expect("architectures", [CLASS])
    named = fields.word("feed_forward_proj", ("gated-gelu", "relu"), "relu")
    activation: Literal["gelu_tanh", "relu"] = "relu" if named == "relu" else "gelu_tanh"
    fields.expect("dense_act_fn", "relu" if named == "relu" else "gelu_new")
    buckets = fields.integer("relative_attention_num_buckets", 4, 4096, 32)
    distance = fields.integer("relative_attention_max_distance", 8, 65_536, 128)
    if distance <= (near := buckets // 4):
        raise UnsupportedModel(
            f"{fields.where}: relative_attention_max_distance is {distance}; supported: more than "
            f"a quarter of the buckets ({near})",
            param="relative_attention_max_distance",
        )
    return TextEncoder(
        fields.integer("vocab_size", 1, 2**20, 32128),
        fields.integer("d_model", 1, 65_536, 512),
        fields.integer("num_heads", 1, 1024, 8),
        fields.integer("d_kv", 1, 1024, 64),
        fields.integer("d_ff", 1, 2**18, 2048),
        fields.integer("num_layers", 1, 1024, 6),
        fields.number("layer_norm_epsilon", 1e-12, 1.0, 1e-6),
        buckets,
        distance,
        activation,
        named != "relu",
        most,
    )


def describe_texts(arch: ModelArch) -> Graph:
    """Describe the rows [N, hidden] of a text's tokens."""
    assert arch.denoiser is not None
    t5 = arch.denoiser.reads
    assert isinstance(t5, TextEncoder), "it reads its texts otherwise"
    to = Description(replace(arch, hidden=t5.hidden, norm_eps=t5.eps))
    heads = t5.heads, t5.heads, t5.size, 1.0
    grid = vector([GRID], [t5.heads * 2 * t5.reach])
    act = ActivationSpec(t5.activation)
    x = to.embed("shared", t5.vocabulary, EmbedSpec())
    for layer in range(t5.layers):
        at, end = (f"encoder.block.{layer}.layer.{part}" for part in (0, 1))
        spec = AttentionSpec(layer, *heads, bidirectional=True, reach=t5.reach)
        normed = to.rms_norm(x, f"{at}.layer_norm")
        names = [f"{at}.SelfAttention.{letter}" for letter in "qkv"]
        qkv = to.linear(normed, *names, outputs=[spec.queries] * 3, purpose="qkv")
        mixed = to.node("attend", (qkv,), spec.queries, [grid], spec)
        output = f"{at}.SelfAttention.o"
        x = to.add(x, to.linear(mixed, output, outputs=t5.hidden, purpose="output"))
        normed, inner = to.rms_norm(x, f"{end}.layer_norm"), f"{end}.DenseReluDense"
        if t5.gated:
            both = [f"{inner}.wi_0", f"{inner}.wi_1"]
            wide = to.gated(to.linear(normed, *both, outputs=[t5.inner] * 2, purpose="up"), act)
        else:
            up = to.linear(normed, f"{inner}.wi", outputs=t5.inner, purpose="up")
            wide = to.activate(up, act)
        x = to.add(x, to.linear(wide, f"{inner}.wo", outputs=t5.hidden, purpose="down"))
    return to.graph(hidden=to.rms_norm(x, "encoder.final_layer_norm"))
