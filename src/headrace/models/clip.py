"""The text encoder of CLIP (Radford et al. 2021, arXiv 2103.00020), which reads the texts of
pictures. A token sees those before it: a bias of each distance hides all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.denoising import CausalEncoder
from ..base.errors import UnsupportedModel
from ..base.graph import ActivationSpec, AttentionSpec, EmbedSpec, Graph
from ..layers.description import Description, vector
from .t5 import GRID

CLASS = "CLIPTextModel"
QUICK = 1.702
"""Its quick GELU is x · sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""


def read_texts(config: Mapping[str, Any], pad: int) -> CausalEncoder:
    """Read the `config.json` of a text encoder; `pad`: token that pads its texts. Raises
    `ModelFileError`, `UnsupportedModel`."""
    fields = Fields(config, "text_encoder/config.json")
    fields.expect("model_type", "clip_text_model")
    fields.expect("architectures", [CLASS])
    hidden = fields.integer("hidden_size", 1, 65_536, 512)
    heads = fields.integer("num_attention_heads", 1, 1024, 8)
    if hidden % heads:
        raise UnsupportedModel(
            f"{fields.where}: num_attention_heads is {heads}; supported: divisors of hidden_size "
            f"({hidden})",
            param="num_attention_heads",
        )
    activation: Any = fields.word("hidden_act", ("quick_gelu", "gelu"), "quick_gelu")
    return CausalEncoder(
        fields.integer("vocab_size", pad + 1, 2**20, 49408),
        hidden,
        heads,
        fields.integer("intermediate_size", 1, 2**18, 2048),
        fields.integer("num_hidden_layers", 1, 1024, 12),
        fields.number("layer_norm_eps", 1e-12, 1.0, 1e-5),
        activation,
        fields.integer("max_position_embeddings", 1, 4096, 77),
        pad,
    )


def describe_texts(arch: ModelArch) -> Graph:
    """Describe the rows [N, hidden] of a text's tokens."""
    assert arch.denoiser is not None
    clip = arch.denoiser.reads
    assert isinstance(clip, CausalEncoder), "it reads its texts otherwise"
    to = Description(replace(arch, hidden=clip.hidden, norm_eps=clip.eps))
    size = clip.hidden // clip.heads
    grid = vector([GRID], [clip.heads * 2 * clip.reach])
    x = to.add(
        to.embed("embeddings.token_embedding", clip.vocabulary),
        to.embed("embeddings.position_embedding", clip.most, EmbedSpec("positions")),
    )
    for layer in range(clip.layers):
        at = f"encoder.layers.{layer}"
        heads = clip.heads, clip.heads, size, size**-0.5
        spec = AttentionSpec(layer, *heads, bidirectional=True, reach=clip.reach)
        normed = to.layer_norm(x, f"{at}.layer_norm1")
        names = [f"{at}.self_attn.{letter}_proj" for letter in "qkv"]
        qkv = to.linear(normed, *names, outputs=[clip.hidden] * 3, bias=True, purpose="qkv")
        mixed = to.node("attend", (qkv,), clip.hidden, [grid], spec)
        output = f"{at}.self_attn.out_proj"
        x = to.add(x, to.linear(mixed, output, outputs=clip.hidden, bias=True, purpose="output"))
        normed = to.layer_norm(x, f"{at}.layer_norm2")
        up = to.linear(normed, f"{at}.mlp.fc1", outputs=clip.inner, bias=True, purpose="up")
        if clip.activation == "gelu":
            wide = to.activate(up, ActivationSpec("gelu"))
        else:
            wide = to.activate(to.scale(up, QUICK), ActivationSpec("silu"))
            wide = to.scale(wide, 1 / QUICK)
        down = f"{at}.mlp.fc2"
        x = to.add(x, to.linear(wide, down, outputs=clip.hidden, bias=True, purpose="down"))
    return to.graph(hidden=to.layer_norm(x, "final_layer_norm"))
