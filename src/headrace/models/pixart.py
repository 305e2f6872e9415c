"""Diffusion transformers that read texts: PixArt-α and -Σ (Chen et al., arXiv 2310.00426 and
2403.04692).

A block is DiT's with attention to the rows of the encoded text between its two halves. All blocks
share one product that makes what modulates them of the time step, and add a table of their own.
Folders are those of diffusers' `PixArtAlphaPipeline` and `PixArtSigmaPipeline`.
"""

from __future__ import annotations

from functools import partial

from ..base.arch import ModelArch
from ..base.denoising import TIMES, GivenSpec
from ..base.graph import SAMPLED, TEXTS, ActivationSpec, AttentionSpec, EmbedSpec, Graph, Value
from ..layers.description import Description, matrix
from .dit import EPS, SILU, block, patches
from .dit import FAMILIES as CLASSES
from .family import number


def pixart(arch: ModelArch) -> Graph:
    """Describe the noise of each patch, [N, patch² · outputs], patch by patch."""
    denoiser = arch.denoiser
    assert denoiser is not None, "the architecture says nothing of a denoiser"
    assert denoiser.reads is not None, "the architecture says nothing of texts"
    to, hidden, area = Description(arch), arch.hidden, denoiser.patch**2
    x = patches(to, denoiser)
    times = to.node("embed", (), TIMES, spec=GivenSpec("times"), rows=SAMPLED)
    time = _two(to, times, "adaln_single.emb.timestep_embedder", SILU)
    shared = to.linear(
        to.activate(time, SILU), "adaln_single.linear", outputs=6 * hidden, bias=True, purpose="up"
    )
    texts = to.node("embed", (), denoiser.reads.hidden, spec=GivenSpec("texts"), rows=TEXTS)
    texts = _two(to, texts, "caption_projection", ActivationSpec("gelu_tanh"))
    for layer in range(arch.layers):
        at = f"transformer_blocks.{layer}"
        across = partial(_across, to, texts, arch.layers + layer, f"{at}.attn2")
        x = block(to, layer, x, to.add(_table(to, at, 6), shared), arch.norm_eps, across)
    shift, gain = (to.add(part, time) for part in to.parts(_table(to, "", 2), [hidden] * 2))
    x = to.adaptive_norm(x, gain, shift, EPS)
    out = area * denoiser.outputs
    return to.graph(hidden=to.linear(x, "proj_out", outputs=out, bias=True, purpose="head"))


def _two(to: Description, x: Value, at: str, between: ActivationSpec) -> Value:
    hidden = to.arch.hidden
    inner = to.linear(x, f"{at}.linear_1", outputs=hidden, bias=True, purpose="up")
    inner = to.activate(inner, between)
    return to.linear(inner, f"{at}.linear_2", outputs=hidden, bias=True, purpose="up")


def _table(to: Description, at: str, rows: int) -> Value:
    """Describe a table of `rows` · hidden numbers, the same for each entry."""
    name, width = ".".join(filter(None, (at, "scale_shift_table"))), rows * to.arch.hidden
    table = matrix([name], [1], width, "embed", purpose="embed")
    return to.node("embed", (), width, [table], EmbedSpec("labels"), rows=SAMPLED)


def _across(to: Description, texts: Value, layer: int, at: str, x: Value) -> Value:
    """Describe attention to the rows of the entry's text."""
    arch = to.arch
    sizes = arch.heads, arch.heads, arch.head_dim, arch.scale
    spec = AttentionSpec(layer, *sizes, bidirectional=True, across=True)
    q = to.linear(x, f"{at}.to_q", outputs=arch.hidden, bias=arch.qkv_bias, purpose="qkv")
    names = f"{at}.to_k", f"{at}.to_v"
    kv = to.linear(texts, *names, outputs=[arch.hidden] * 2, bias=arch.qkv_bias, purpose="qkv")
    mixed = to.node("attend", (q, kv), spec.queries, spec=spec)
    return to.linear(mixed, f"{at}.to_out.0", outputs=arch.hidden, bias=True, purpose="output")


FAMILIES = (
    CLASSES[0]._replace(
        name="pixart", describe=pixart, types={"pixart": ("PixArtTransformer2DModel",)},
        fields={
            **CLASSES[0].fields, "norm_eps": number("norm_eps", "", 1e-12, 1.0, 1e-6),
            "vocab_size": lambda config: config["beyond.denoiser"].reads.vocabulary,
        },
        allowed={**CLASSES[0].allowed, "norm_type": ("ada_norm_single",)},
    ),
)  # fmt: skip
