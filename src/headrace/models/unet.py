"""UNets that read texts: those of Stable Diffusion (Rombach et al. 2022, arXiv 2112.10752).

A row is a place of a noisy picture. Blocks halve its lines and columns on the way down and double
them on the way up, where each also reads what a block of its size has made on the way down. After a
residual block places may attend to each other and to the rows of the encoded text. Folders are
those of diffusers' `StableDiffusionPipeline`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.denoising import Denoiser, GivenSpec, Unet, UnetLevel
from ..base.errors import UnsupportedModel
from ..base.graph import SAMPLED, TEXTS, ActivationSpec, AttentionSpec, Graph, Value
from ..layers.description import Description
from . import clip
from .dit import FAMILIES as CLASSES
from .dit import MOST_TOKENS, SILU, read_solver
from .family import Config
from .vae import Pictures, read_decoder

DOWN = {"DownBlock2D": False, "CrossAttnDownBlock2D": True}
UP = {"UpBlock2D": False, "CrossAttnUpBlock2D": True}
"""Types of blocks → whether their places attend."""
MIDDLE = "UNetMidBlock2DCrossAttn"
EPS = 1e-6
"""Added to the variance in the norm before transformer layers."""
MOST_LEVELS = 8
SCHEDULED = {"steps_offset": 1, "clip_sample": False}
"""Values that the pipeline of diffusers gives its scheduler, whatever its config says."""
ALLOWED = {
    "act_fn": ("silu",), "addition_embed_type": (), "attention_type": ("default",),
    "center_input_sample": (False,), "class_embed_type": (), "class_embeddings_concat": (False,),
    "conv_in_kernel": (3,), "conv_out_kernel": (3,), "cross_attention_norm": (),
    "downsample_padding": (1,), "dual_cross_attention": (False,), "encoder_hid_dim": (),
    "encoder_hid_dim_type": (), "flip_sin_to_cos": (True,), "freq_shift": (0,),
    "mid_block_only_cross_attention": (False,), "mid_block_scale_factor": (1,),
    "num_attention_heads": (), "num_class_embeds": (), "only_cross_attention": (False,),
    "resnet_out_scale_factor": (1,), "resnet_skip_time_act": (False,),
    "resnet_time_scale_shift": ("default",), "reverse_transformer_layers_per_block": (),
    "time_cond_proj_dim": (), "time_embedding_act_fn": (), "time_embedding_dim": (),
    "time_embedding_type": ("positional",), "timestep_post_act": (),
}  # fmt: skip
"""Keys of a config that would change its steps, and their only values."""


def unet(arch: ModelArch) -> Graph:
    """Describe the noise of each place, [N, outputs]."""
    denoiser = arch.denoiser
    assert denoiser is not None, "the architecture says nothing of a denoiser"
    assert denoiser.unet is not None, "the architecture says nothing of a UNet"
    assert denoiser.reads is not None, "the architecture says nothing of texts"
    return _UnetGraph(arch, denoiser, denoiser.unet, denoiser.reads.hidden).graph(denoiser.outputs)


class _UnetGraph:
    """The graph of a UNet in the making."""

    def __init__(self, arch: ModelArch, denoiser: Denoiser, shape: Unet, context: int) -> None:
        """`context`: numbers of a text's row."""
        self._to, self._shape, self._attentions = Description(arch), shape, 0
        to = self._to
        self._make = Pictures(to, denoiser.size, shape.groups, shape.eps)
        given = to.node("embed", (), denoiser.channels, spec=GivenSpec("patches"))
        time = to.node("embed", (), shape.width, spec=GivenSpec("times"), rows=SAMPLED)
        for number in (1, 2):
            at, wide = f"time_embedding.linear_{number}", 4 * shape.width
            time = to.activate(to.linear(time, at, outputs=wide, bias=True, purpose="up"), SILU)
        self._time = time
        self._texts = to.node("embed", (), context, spec=GivenSpec("texts"), rows=TEXTS)
        self._x = self._make.conv(given, "conv_in", shape.width)

    def graph(self, outputs: int) -> Graph:
        """Describe all blocks."""
        shape, make = self._shape, self._make
        kept, sides = [self._x], [make.side]
        for at, level in enumerate(shape.down):
            own = f"down_blocks.{at}"
            for layer in range(level.layers):
                self._residual(own, layer, level)
                kept.append(self._x)
            if at < len(shape.down) - 1:
                name = f"{own}.downsamplers.0.conv"
                self._x = make.conv(self._x, name, level.width, stride=2)
                kept.append(self._x)
                sides.append(make.side)
        if shape.middle is not None:
            self._residual("mid_block", 0, shape.middle)
            self._residual("mid_block", 1, shape.middle._replace(depth=0))
        sides.pop()
        for at, level in enumerate(shape.up):
            own = f"up_blocks.{at}"
            for layer in range(level.layers):
                x, other = self._x, kept.pop()
                self._x = self._to.node("beside", (x, other), x.width + other.width)
                self._residual(own, layer, level)
            if sides:
                cut, name = 2 * make.side - sides.pop(), f"{own}.upsamplers.0.conv"
                self._x = make.conv(self._x, name, level.width, up=2, cut=cut)
        x = make.norm(self._x, "conv_norm_out", silu=True)
        return self._to.graph(hidden=make.conv(x, "conv_out", outputs))

    def _residual(self, own: str, layer: int, level: UnetLevel) -> None:
        """Describe a residual block, and the transformer layers after it."""
        at = f"{own}.resnets.{layer}"
        self._x = self._make.residual(self._x, at, level.width, self._time)
        if level.depth:
            self._transformer(f"{own}.attentions.{layer}", level)

    def _transformer(self, own: str, level: UnetLevel) -> None:
        to, width = self._to, level.width
        x = self._make.norm(self._x, f"{own}.norm", silu=False, eps=EPS)
        x = to.linear(x, f"{own}.proj_in", outputs=width, bias=True, purpose="up")
        for layer in range(level.depth):
            at = f"{own}.transformer_blocks.{layer}"
            x = self._attention(x, f"{at}.norm1", f"{at}.attn1", level.heads, None)
            x = self._attention(x, f"{at}.norm2", f"{at}.attn2", level.heads, self._texts)
            normed, up = to.layer_norm(x, f"{at}.norm3"), f"{at}.ff.net.0.proj"
            both = to.linear(normed, up, outputs=8 * width, bias=True, purpose="up")
            value, gate = to.parts(both, [4 * width] * 2)
            spec, down = ActivationSpec("gelu"), f"{at}.ff.net.2"
            inner = to.node("multiply", (value, gate), 4 * width, spec=spec)
            x = to.add(x, to.linear(inner, down, outputs=width, bias=True, purpose="down"))
        made = to.linear(x, f"{own}.proj_out", outputs=width, bias=True, purpose="output")
        self._x = to.add(self._x, made)

    def _attention(self, x: Value, norm: str, at: str, heads: int, texts: Value | None) -> Value:
        """Describe attention to the own picture, or to the rows of texts."""
        to, width = self._to, x.width
        size, across = width // heads, texts is not None
        sizes = heads, heads, size, size**-0.5
        spec = AttentionSpec(self._attentions, *sizes, bidirectional=True, across=across)
        self._attentions += 1
        names, normed = [f"{at}.to_{letter}" for letter in "qkv"], to.layer_norm(x, norm)
        if texts is None:
            reads = [to.linear(normed, *names, outputs=[width] * 3, purpose="qkv")]
        else:
            q = to.linear(normed, names[0], outputs=width, purpose="qkv")
            reads = [q, to.linear(texts, *names[1:], outputs=[width] * 2, purpose="qkv")]
        mixed = to.node("attend", reads, width, spec=spec)
        made = to.linear(mixed, f"{at}.to_out.0", outputs=width, bias=True, purpose="output")
        return to.add(x, made)


def _denoiser(config: Config) -> Denoiser:
    """Read the shape of a pipeline. Raises `ModelFileError` and `UnsupportedModel`."""
    fields = config.fields
    channels = fields.integer("in_channels", 1, 64, 4)
    size = fields.integer("sample_size", 1, 512, 64)
    if size**2 > MOST_TOKENS:
        raise UnsupportedModel(
            f"{fields.where}: sample_size is {size}, {size**2} places; at most {MOST_TOKENS} are "
            "supported",
            param="sample_size",
        )
    outputs = fields.integer("out_channels", channels, channels, channels)
    texts, vae = fields.mapping("text_encoder"), fields.mapping("vae")
    assert texts is not None, "the pipeline has a text encoder"
    reads = clip.read_texts(texts, fields.integer("pad", 0, 2**20))
    fields.expect("cross_attention_dim", reads.hidden)
    return Denoiser(
        channels, size, 1, 0, outputs,
        read_solver({**(fields.mapping("scheduler") or {}), **SCHEDULED}),
        None if vae is None else read_decoder(vae, channels),
        unet=_levels(fields),
        clip=reads,
    )  # fmt: skip


def _levels(fields: Fields) -> Unet:
    """Read the blocks. Raises `ModelFileError` and `UnsupportedModel`."""
    groups = fields.integer("norm_num_groups", 1, 1024, 32)
    channels = range(groups, 8193, groups)
    widths = _each(fields, "block_out_channels", 0, channels, f"multiples of {groups} up to 8192")
    count = len(widths)
    down, up = (
        [kinds[one] for one in _each(fields, key, count, kinds, f"of {', '.join(kinds)}")]
        for key, kinds in (("down_block_types", DOWN), ("up_block_types", UP))
    )
    layers = _each(fields, "layers_per_block", count, range(1, 17), "from 1 to 16", 2)
    depths = _each(fields, "transformer_layers_per_block", count, range(1, 65), "from 1 to 64", 1)
    heads = _each(fields, key := "attention_head_dim", count, range(1, 1025), "from 1 to 1024", 8)
    if any(width % own for width, own in zip(widths, heads, strict=True)):
        raise UnsupportedModel(
            f"{fields.where}: {key} is {heads!r:.80}, numbers of heads whatever its name says; "
            f"supported: divisors of block_out_channels ({widths!r:.80})",
            param=key,
        )
    all_ = [*map(UnetLevel, widths, layers, depths, heads)]
    fields.expect("mid_block_type", MIDDLE)
    return Unet(
        tuple(one._replace(depth=one.depth * own) for one, own in zip(all_, down, strict=True)),
        tuple(
            one._replace(layers=one.layers + 1, depth=one.depth * own)
            for one, own in zip(reversed(all_), up, strict=True)
        ),
        None if fields.null("mid_block_type") else all_[-1],
        groups,
        fields.number("norm_eps", 1e-12, 1.0, 1e-5),
    )


def _each(
    fields: Fields, key: str, count: int, allowed: Container[Any], words: str, usual: Any = None
) -> list[Any]:
    """Read a list of `count` values, or one integer for all; `count` 0: of `MOST_LEVELS` at
    most."""
    value = fields.raw(key)
    value = usual if value is None else value
    values = [value] * count if type(value) is int else value
    right = isinstance(values, list) and len(values) in (
        [count] if count else range(1, MOST_LEVELS + 1)
    )
    if not right or not all(type(one) in (int, str) and one in allowed for one in values):
        many = count or f"1 to {MOST_LEVELS}"
        raise UnsupportedModel(
            f"{fields.where}: {key} is {value!r:.80}; supported: {many} {words}", param=key
        )
    return list(values)


FAMILIES = (
    CLASSES[0]._replace(
        name="unet", describe=unet, types={"unet": ("UNet2DConditionModel",)},
        fields={
            **CLASSES[0].fields, "beyond.denoiser": _denoiser,
            "hidden": lambda config: config["beyond.denoiser"].unet.width,
            "vocab_size": lambda config: config["beyond.denoiser"].reads.vocabulary,
            "layers": lambda config: len(config["beyond.denoiser"].unet.down),
            "heads": lambda config: config["beyond.denoiser"].unet.down[0].heads,
            "head_dim": lambda config: config["hidden"] // config["heads"],
            "norm_eps": 1e-5, "activation": "gelu", "qkv_bias": False,
        },
        allowed=ALLOWED,
    ),
)  # fmt: skip
