"""Decoders of latents: that of diffusers' `AutoencoderKL` (Rombach et al. 2022, 2112.10752)."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.denoising import Decoder, GroupNormSpec, PictureConvSpec
from ..base.errors import UnsupportedModel
from ..base.graph import TOKENS, AttentionSpec, Graph, Node, Rows, Value
from ..layers.description import Description, matrix, vector

CLASS = "AutoencoderKL"
EPS = 1e-6
UP, MID = "decoder.up_blocks", "decoder.mid_block"


def read_decoder(config: Mapping[str, Any], channels: int) -> Decoder:
    """Read the `config.json` of a decoder of latents. Raises `ModelFileError`,
    `UnsupportedModel`."""
    fields, widths = Fields(config, "vae/config.json"), config.get("block_out_channels")
    groups = fields.integer("norm_num_groups", 1, 1024, 32)
    sizes = widths if isinstance(widths, list) else []
    right = all(type(one) is int and 0 < one <= 4096 and not one % groups for one in sizes)
    if not 1 <= len(sizes) <= 6 or not right:
        raise UnsupportedModel(
            f"{fields.where}: block_out_channels is {widths!r:.80}; supported: 1 to 6 multiples of "
            f"norm_num_groups ({groups}) up to 4096",
            param="block_out_channels",
        )
    kinds = ["UpDecoderBlock2D"] * len(sizes)
    for key, *allowed in (
        ("_class_name", CLASS), ("act_fn", "silu"), ("latent_channels", channels),
        ("latents_mean",), ("latents_std",), ("out_channels", 1, 3), ("up_block_types", kinds),
    ):  # fmt: skip
        fields.expect(key, *allowed)
    return Decoder(
        channels=fields.integer("out_channels", 1, 3, 3),
        widths=tuple(reversed(sizes)),
        layers=fields.integer("layers_per_block", 1, 16, 1) + 1,
        groups=groups,
        attends=fields.flag("mid_block_add_attention", True),
        mixes=fields.flag("use_post_quant_conv", True),
        scaling=fields.number("scaling_factor", 1e-6, 1e6, 0.18215),
        shift=fields.number("shift_factor", -1e6, 1e6, 0.0),
    )


def describe_decoder(arch: ModelArch) -> Graph:
    """Describe the pictures [N · factor², channels], place by place, of latents [N, ·]."""
    denoiser = arch.denoiser
    assert denoiser is not None
    assert denoiser.decoder is not None, "latents are the pictures"
    decoder, side = denoiser.decoder, denoiser.size
    make = Pictures(Description(arch), side, decoder.groups, EPS)
    given = x = Value(TOKENS, denoiser.channels)
    if decoder.mixes:
        x = make.conv(x, "post_quant_conv", x.width, side=1)
    x = make.conv(x, "decoder.conv_in", (widths := decoder.widths)[0])
    x = make.residual(x, f"{MID}.resnets.0", widths[0])
    if decoder.attends:
        x = make.attention(x, f"{MID}.attentions.0")
    x = make.residual(x, f"{MID}.resnets.1", widths[0])
    for at, width in enumerate(widths):
        for layer in range(decoder.layers):
            x = make.residual(x, f"{UP}.{at}.resnets.{layer}", width)
        if at < len(widths) - 1:
            x = make.conv(x, f"{UP}.{at}.upsamplers.0.conv", width, up=2)
    x = make.norm(x, "decoder.conv_norm_out", silu=True)
    return make.to.graph([given], hidden=make.conv(x, "decoder.conv_out", decoder.channels))


class Pictures:
    """A graph of pictures in the making: their size, and the nodes of their blocks."""

    def __init__(self, to: Description, side: int, groups: int, eps: float) -> None:
        """`side`: lines and columns of the pictures in N rows; `groups`, `eps`: see `norm`."""
        self.to, self.side, self._first = to, side, side
        self._groups, self._eps = groups, eps

    def conv(self, x: Value, name: str, outputs: int, **more: int) -> Value:
        """Describe a convolution with a bias. `more`: fields of `PictureConvSpec`."""
        spec = PictureConvSpec(self.side, self.side, **more)
        self.side = spec.made[0]
        share = Fraction(self.side, self._first) ** 2
        out = Value(Rows("N", times=share.numerator, over=share.denominator), outputs)
        weight = matrix([name], [outputs], spec.side**2 * x.width, "linear", purpose="up")
        weights = weight, vector([f"{name}.bias"], [outputs])
        self.to.nodes(Node("conv", (x,), (out,), weights, spec))
        return out

    def norm(self, x: Value, name: str, *, silu: bool, eps: float | None = None) -> Value:
        """Describe a norm of groups of channels."""
        weights = [vector([f"{name}.{part}"], [x.width]) for part in ("weight", "bias")]
        spec = GroupNormSpec(self._groups, eps or self._eps, silu)
        return self.to.node("group_norm", (x,), x.width, weights, spec)

    def residual(self, x: Value, name: str, outputs: int, time: Value | None = None) -> Value:
        """Describe a residual block; `time` [R, ·] shifts all places of a picture. x may be read
        again: the sum lies where the second convolution's result was."""
        inner = self.conv(self.norm(x, f"{name}.norm1", silu=True), f"{name}.conv1", outputs)
        if time is not None:
            at = f"{name}.time_emb_proj"
            made = self.to.linear(time, at, outputs=outputs, bias=True, purpose="up")
            inner = self.to.node("modulate", (inner, made), outputs)
        inner = self.conv(self.norm(inner, f"{name}.norm2", silu=True), f"{name}.conv2", outputs)
        if x.width != outputs:
            at = f"{name}.conv_shortcut"
            x = self.to.linear(x, at, outputs=outputs, bias=True, purpose="up")
        return self.to.add(inner, x)

    def attention(self, x: Value, name: str) -> Value:
        normed, width = self.norm(x, f"{name}.group_norm", silu=False), x.width
        names = [f"{name}.to_{letter}" for letter in "qkv"]
        qkv = self.to.linear(normed, *names, outputs=[width] * 3, bias=True, purpose="qkv")
        spec = AttentionSpec(0, 1, 1, width, width**-0.5, bidirectional=True)
        mixed = self.to.node("attend", (qkv,), width, spec=spec)
        made = self.to.linear(mixed, f"{name}.to_out.0", outputs=width, bias=True, purpose="output")
        return self.to.add(x, made)
