"""UNets that read texts: those of Stable Diffusion (Rombach et al. 2022, arXiv 2112.10752).

A row is a place of a noisy picture. Blocks halve its lines and columns on the way down and double
them on the way up, where each also reads what a block of its size has made on the way down. After a
residual block places may attend to each other and to the rows of the encoded text. Folders are
those of diffusers' `StableDiffusionPipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.arch import ModelArch, Rope
from ..base.denoising import Denoiser, GivenSpec, Unet, UnetLevel
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import SAMPLED, TEXTS, ActivationSpec, AttentionSpec, Graph, Value
from ..layers.description import Description
from . import clip
from .dit import MOST_TOKENS, SILU, read_solver
from .family import Config, Family
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
    return _Unet(arch, denoiser, denoiser.unet, denoiser.reads.hidden).graph(denoiser.outputs)


class _Unet:
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
                self._x = self._to.beside(self._x, kept.pop())
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
        reads,
        unet=_levels(config),
    )  # fmt: skip


def _levels(config: Config) -> Unet:
    """Read the blocks. Raises `ModelFileError` and `UnsupportedModel`."""
    fields = config.fields
    groups = fields.integer("norm_num_groups", 1, 1024, 32)
    widths = _list(config, "block_out_channels", None, (320, 640, 1280, 1280))
    count = len(widths)
    if not 1 <= count <= MOST_LEVELS or any(not 0 < one <= 8192 or one % groups for one in widths):
        raise UnsupportedModel(
            f"{fields.where}: block_out_channels is {list(widths)!r:.80}; supported: 1 to "
            f"{MOST_LEVELS} multiples of norm_num_groups ({groups}) up to 8192",
            param="block_out_channels",
        )
    attends = [
        [kinds[one] for one in _words(config, key, kinds, usual, count)]
        for key, kinds, usual in (
            ("down_block_types", DOWN, ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]),
            ("up_block_types", UP, ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3),
        )
    ]
    layers = _list(config, "layers_per_block", count, 2)
    depths = _list(config, "transformer_layers_per_block", count, 1)
    heads = _list(config, "attention_head_dim", count, 8)  # Heads, whatever its name says.
    for key, values, most in (
        ("layers_per_block", layers, 16), ("transformer_layers_per_block", depths, 64),
        ("attention_head_dim", heads, 1024),
    ):  # fmt: skip
        if any(not 1 <= one <= most for one in values):
            raise UnsupportedModel(
                f"{fields.where}: {key} is {list(values)!r:.80}; supported: from 1 to {most}",
                param=key,
            )
    if any(width % own for width, own in zip(widths, heads, strict=True)):
        raise UnsupportedModel(
            f"{fields.where}: attention_head_dim is {list(heads)!r:.80}, numbers of heads; "
            f"supported: divisors of block_out_channels ({list(widths)!r:.80})",
            param="attention_head_dim",
        )
    down = tuple(map(UnetLevel, widths, layers, depths, heads))
    up = tuple(one._replace(layers=one.layers + 1) for one in reversed(down))
    middle = None if fields.null("mid_block_type") else down[-1]
    fields.expect("mid_block_type", MIDDLE)
    eps = fields.number("norm_eps", 1e-12, 1.0, 1e-5)
    return Unet(_where(down, attends[0]), _where(up, attends[1]), middle, groups, eps)


def _where(levels: Sequence[UnetLevel], attends: Sequence[bool]) -> tuple[UnetLevel, ...]:
    """Return the levels without transformer layers where places do not attend."""
    pairs = zip(levels, attends, strict=True)
    return tuple(one if own else one._replace(depth=0) for one, own in pairs)


def _list(config: Config, key: str, count: int | None, default: Any) -> tuple[int, ...]:
    """Read a list of integers, or one for all `count` levels."""
    value = config.fields.raw(key)
    value = default if value is None else value
    if count is not None and type(value) is int:
        return (value,) * count
    right = isinstance(value, list | tuple) and all(type(one) is int for one in value)
    if not right or (count is not None and len(value) != count):
        many = "a list" if count is None else f"an integer or a list of {count}"
        raise ModelFileError(
            f"{config.fields.where}: {key} is {value!r:.80}; it must be {many} of integers",
            param=key,
        )
    return tuple(value)


def _words(
    config: Config, key: str, kinds: dict[str, bool], usual: list[str], count: int
) -> list[str]:
    """Read the type of each level's block."""
    value = config.fields.raw(key)
    value = usual if value is None else value
    if (
        not isinstance(value, list)
        or len(value) != count
        or not all(isinstance(one, str) and one in kinds for one in value)
    ):
        raise UnsupportedModel(
            f"{config.fields.where}: {key} is {value!r:.160}; supported: {count} of "
            f"{', '.join(kinds)}",
            param=key,
        )
    return value


FAMILIES = (
    Family(
        "unet", unet, {"unet": ("UNet2DConditionModel",)},
        fields={
            "beyond.denoiser": _denoiser,
            "hidden": lambda config: config["beyond.denoiser"].unet.width,
            "vocab_size": lambda config: config["beyond.denoiser"].reads.vocabulary,
            "max_context": lambda config: max(8, config["beyond.denoiser"].tokens),
            "layers": lambda config: len(config["beyond.denoiser"].unet.down),
            "heads": lambda config: config["beyond.denoiser"].unet.down[0].heads,
            "kv_heads": lambda config: config["heads"],
            "head_dim": lambda config: config["hidden"] // config["heads"],
            "intermediate": lambda config: 4 * config["hidden"],
            "norm_eps": 1e-5, "activation": "gelu", "qkv_bias": False,
            "rope": Rope(), "windows": (), "output_bias": True, "tied_embedding": False,
        },
        allowed=ALLOWED,
    ),
)  # fmt: skip
