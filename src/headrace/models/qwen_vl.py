"""Encoders of pictures of Qwen2-VL (Wang et al. 2024), Qwen2.5-VL (Bai et al. 2025) and Qwen3-VL.

A picture keeps its shape: a grid of patches, each rotated by its row and column. Most layers of
Qwen2.5-VL attend within windows of the grid, so its patches come window by window, and its rows are
put back into the order of the grid. Qwen3-VL adds positions from a table, read between its rows,
and gives further rows for the first layers of the language model (DeepStack, Meng et al. 2024). A
patch has two frames; a picture is repeated. Each tile of a video attends to itself only. In the
language model tiles differ by their time (Qwen3-VL writes it before them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, TypeVar

from ..base.arch import ModelArch, Rope
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.filming import Film, Sampling, single
from ..base.graph import TOKENS, ActivationSpec, Graph, Value
from ..base.tiling import Filming, Fitting
from ..layers.description import Description
from ..layers.encoder import bidirectional, side_by_side
from ..layers.feed_forward import two_products
from .picture_arch import (
    ACTIVATIONS,
    CHANNELS,
    CLIP,
    MOST_PATCHES,
    Laid,
    PictureArch,
    Videos,
    head_size,
    pixel_numbers,
    squares,
    tower_fields,
)

TOWER = "visual"
PATCHES, PLACES = f"{TOWER}.patch_embed.proj", f"{TOWER}.pos_embed"
FRAMES = 2
"""Frames of a patch."""
QUICK = 1.702
"""x · sigmoid(1.702 x) is the activation of Qwen2-VL (Hendrycks and Gimpel 2016)."""
_BICUBIC = 3
_EPS = 1e-6
"""Epsilon of all norms of these encoders, which no config states."""
_RATE = 2.0
"""Frames per second in the authors' own reader; most configs lack the key."""
_OPEN, _CLOSE = "<|vision_start|>", "<|vision_end|>"
Rule = TypeVar("Rule", bound=Fitting | Filming)
_GATED: Mapping[str, Any] = {"silu": "silu", **ACTIVATIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenPictures(PictureArch):
    """See `PictureArch`."""

    window: int = 0
    """Squares along a side of a window; 0: all layers attend to the whole picture."""
    whole: tuple[int, ...] = ()
    """Layers that attend to the whole picture, if others have windows."""
    trained: int = 0
    """Positions along a side of the table; 0: no table."""
    deep: tuple[int, ...] = ()
    """Layers after which further rows are made."""
    ticks: float = 0.0
    """Positions per second of a video; 0: one per tile (Qwen2-VL)."""

    PATCHES = PATCHES
    KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    PREFIXES = (f"{TOWER}.",)
    RENAMED = {f"model.{TOWER}.": f"{TOWER}."}  # noqa: RUF012

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> QwenPictures:
        kind = str(config.get("model_type"))
        tower, read = tower_fields(config), Fields(processing, "the config of pictures")
        patch = tower.integer("patch_size", 1, 64, 16 if kind.startswith("qwen3") else 14)
        factor = tower.integer("spatial_merge_size", 1, 8, 2)
        for fields, key, value in (
            (tower, "in_channels", CHANNELS),
            (tower, "temporal_patch_size", FRAMES),
            (read, "temporal_patch_size", FRAMES),
            (read, "patch_size", patch),
            (read, "merge_size", factor),
        ):
            fields.expect(key, value)
        rope = tower.mapping("rope_parameters") or {}
        theta = Fields(rope, tower.where).number("rope_theta", 1.0, 1e12, 1e4)
        own = _OWN[kind](tower, patch, factor)
        sizing = _fitting(read, patch, factor)
        most = sizing.largest // patch**2
        arch = _arch(tower, kind, theta, own.pop("hidden", None), most)
        stated = "hidden_size" if kind == "qwen2_vl" else "out_hidden_size"
        if tower.integer(stated, 1, 1 << 16, 3_584) != hidden:
            raise ModelFileError(
                f"{tower.where}: {stated} must be the width of the language model, {hidden}",
                param=stated,
            )
        place = Fields(config, "config.json").integer("image_token_id", 0, 2**24, 151_655)
        return cls(
            kind=kind,
            arch=arch,
            patch=patch,
            factor=factor,
            hidden=hidden,
            place=place,
            sizing=sizing,
            **own,
            **pixel_numbers(read, _BICUBIC, *CLIP),
        )

    def filming(self, config: Mapping[str, Any], processing: Mapping[str, Any]) -> Videos | None:
        read = Fields(processing, "the config of videos")
        for key, value in (
            ("temporal_patch_size", FRAMES),
            ("patch_size", self.patch),
            ("merge_size", self.factor),
            ("cap_pixels_per_frame", False),
        ):
            read.expect(key, value)
        third = self.kind.startswith("qwen3")
        square, room = self.factor * self.patch, MOST_PATCHES * self.patch**2
        unit = 32 * 32 if third else 28 * 28
        least, most = _bounds(read, 128 * unit, 768 * unit)
        sizing: Fitting | Filming = Fitting(square, least, min(most, room))
        if third:
            sizing = Filming(square, least, min(most, 1 << 28), FRAMES)
        _checked(sizing._replace(most=min(most, room)), read, self.patch)
        rate = read.number("fps", 0.01, 1_000.0, _RATE)
        fewest = read.integer("min_frames", 1, 1 << 12, 4)
        frames = read.integer("max_frames", fewest, 1 << 12, 768)
        place = Fields(config, "config.json").integer("video_token_id", 0, 2**24, 151_656)
        numbers = [[0.5] * CHANNELS] * 2 if third else CLIP
        return Videos(
            Sampling("spread" if third else "even", rate, fewest, frames, FRAMES),
            sizing,
            place=place,
            written=place,
            **pixel_numbers(read, _BICUBIC, *numbers),
        )

    def prompt_of(self, token: str, film: Film) -> str:
        tiles = film.tiles(FRAMES)
        if not self.kind.startswith("qwen3"):
            return token * tiles
        times = film.times + film.times[-1:]
        # The template's start and end tokens stay around all of these, as in transformers; vLLM
        # considers its removal of them a bug (issue 46817).
        means = [(times[2 * tile] + times[2 * tile + 1]) / 2 for tile in range(tiles)]
        return "".join(f"<{mean:.1f} seconds>{_OPEN}{token}{_CLOSE}" for mean in means)

    def times(self, film: Film) -> list[int] | None:
        if self.kind.startswith("qwen3"):
            return None
        # transformers multiplies in fp32.
        tick = single(self.ticks * single(FRAMES / (len(film.frames) / film.seconds)))
        step = tick if self.kind == "qwen2_5_vl" else 1.0
        return [int(single(tile * step)) for tile in range(film.tiles(FRAMES))]

    @property
    def gridded(self) -> bool:
        return True

    @property
    def frames(self) -> int:
        return FRAMES

    @property
    def beside(self) -> dict[str, tuple[int, ...]]:
        shape = self.trained**2, self.arch.hidden
        return {f"{PLACES}.weight": shape} if self.trained else {}

    def laid(self, rows: int, columns: int) -> Laid:
        """Lay out the patches square by square; with windows, window by window."""
        if not self.window:
            return Laid(squares(rows, columns, self.factor))
        high, wide, side = rows // self.factor, columns // self.factor, self.window
        windows = [
            [
                row * wide + column
                for row in range(top, min(top + side, high))
                for column in range(left, min(left + side, wide))
            ]
            for top in range(0, high, side)
            for left in range(0, wide, side)
        ]
        taken = [square for window in windows for square in window]
        square, every = self.factor**2, squares(rows, columns, self.factor)
        order = [each for at in taken for each in every[at * square : (at + 1) * square]]
        back, bounds = [0] * len(taken), [0]
        for number, at in enumerate(taken):
            back[at] = number
        for window in windows:
            bounds.append(bounds[-1] + square * len(window))
        return Laid(order, bounds, back)

    def prompt(self, token: str, rows: int, columns: int) -> str:
        return token

    def describe(self) -> Graph:
        to = Description(self.arch)
        patches, places = Value(TOKENS, FRAMES * self.width), Value(TOKENS, self.arch.hidden)
        x = to.linear(patches, PATCHES, outputs=self.arch.hidden, bias=bool(self.trained))
        if self.trained:
            x = to.add(x, places)
        further: dict[str, Value] = {}
        for layer in range(self.arch.layers):
            at = f"{TOWER}.blocks.{layer}"
            normed = self._norm(to, x, f"{at}.norm1")
            window = (self.window * self.factor) ** 2
            mixed = bidirectional(
                to,
                layer,
                normed,
                [f"{at}.attn.qkv"],
                f"{at}.attn.proj",
                self.arch.rope,
                window if self.window and layer not in self.whole else None,
            )
            x = to.add(x, mixed)
            x = to.add(x, self._feed(to, self._norm(to, x, f"{at}.norm2"), f"{at}.mlp"))
            if layer in self.deep:
                number = self.deep.index(layer)
                at = f"{TOWER}.deepstack_merger_list.{number}"
                further[f"deep{number}"] = self._merged(to, x, at, after=True)
        hidden = self._merged(to, x, f"{TOWER}.merger", after=False)
        inputs = (patches, places) if self.trained else (patches,)
        return to.graph(inputs, hidden=hidden, **further)

    def _norm(self, to: Description, x: Value, name: str) -> Value:
        return to.rms_norm(x, name) if self.kind == "qwen2_5_vl" else to.layer_norm(x, name)

    def _feed(self, to: Description, x: Value, at: str) -> Value:
        """Describe a layer's feed-forward, which depends on the family."""
        arch = self.arch
        if self.kind == "qwen2_5_vl":
            names = f"{at}.gate_proj", f"{at}.up_proj"
            both = [arch.intermediate] * 2
            inner = to.linear(x, *names, outputs=both, bias=True, purpose="gate_up")
            inner = to.gated(inner, ActivationSpec(arch.activation))
            down = f"{at}.down_proj"
            return to.linear(inner, down, outputs=arch.hidden, bias=True, purpose="down")
        if self.kind == "qwen2_vl":
            inner = to.linear(x, f"{at}.fc1", outputs=arch.intermediate, bias=True, purpose="up")
            inner = to.scale(inner, QUICK)
            inner = to.scale(to.activate(inner, ActivationSpec("silu")), 1 / QUICK)
            down = f"{at}.fc2"
            return to.linear(inner, down, outputs=arch.hidden, bias=True, purpose="down")
        products = f"{at}.linear_fc1", f"{at}.linear_fc2"
        return two_products(to, x, *products, ActivationSpec(arch.activation))

    def _merged(self, to: Description, x: Value, at: str, *, after: bool) -> Value:
        """Describe two products over the concatenated rows of squares. `after`: the norm is over a
        square, not over each of its patches."""
        square = self.factor**2
        third = self.kind.startswith("qwen3")
        norm = f"{at}.norm" if third else f"{at}.ln_q"
        names = ("linear_fc1", "linear_fc2") if third else ("mlp.0", "mlp.2")
        if not after:
            x = self._norm(to, x, norm)
        x = side_by_side(to, x, square)
        x = to.layer_norm(x, norm) if after else x
        x = to.linear(x, f"{at}.{names[0]}", outputs=x.width, bias=True, purpose="up")
        x = to.activate(x, ActivationSpec("gelu"))
        return to.linear(x, f"{at}.{names[1]}", outputs=self.hidden, bias=True, purpose="down")


def _arch(tower: Fields, kind: str, theta: float, inner: int | None, most: int) -> ModelArch:
    """Read the layers. `inner`: width of their feed-forward in widths of a patch, if no key has it;
    `most`: patches of the largest picture."""
    own = "embed_dim" if kind == "qwen2_vl" else "hidden_size"
    width = tower.integer(own, 16, 4_096, {"qwen2_vl": 1_280, "qwen2_5_vl": 3_584}.get(kind, 1_152))
    heads = tower.integer("num_heads", 1, 64, 16)
    size = head_size(width, heads)
    if size % 4:
        raise UnsupportedModel(
            f"{tower.where}: heads have {size} numbers, which must be a multiple of 4",
            param="num_heads",
        )
    if inner is None:
        inner = tower.integer("intermediate_size", 1, 1 << 15, 4_304)
    else:
        inner *= width
    acts: dict[str, Any] = {"qwen2_vl": {"quick_gelu": "silu"}, "qwen2_5_vl": _GATED}
    words = acts.get(kind, ACTIVATIONS)
    return ModelArch(
        family="pictures",
        vocab_size=1,
        hidden=width,
        layers=tower.integer("depth", 1, 128, 27 if kind.startswith("qwen3") else 32),
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        intermediate=inner,
        max_context=most,
        norm_eps=_EPS,
        activation=words[tower.word("hidden_act", words, next(iter(words)))],
        rope=Rope(theta, "axial", axes=(0,) * (size // 4) + (1,) * (size // 4)),
    )


def _plain(tower: Fields, patch: int, factor: int) -> dict[str, Any]:
    return {"hidden": tower.integer("mlp_ratio", 1, 16, 4)}


def _windowed(tower: Fields, patch: int, factor: int) -> dict[str, Any]:
    size = tower.integer("window_size", 1, 1 << 14, 112)
    if size < patch * factor:
        raise UnsupportedModel(
            f"{tower.where}: window_size is {size}; a window must have a square of {factor} "
            f"patches of {patch} pixels",
            param="window_size",
        )
    whole = tower.raw("fullatt_block_indexes")
    return {
        "ticks": tower.number("tokens_per_second", 0.01, 1_000.0, 4.0),
        "window": size // factor // patch,
        "whole": _layers(
            tower, "fullatt_block_indexes", [7, 15, 23, 31] if whole is None else whole
        ),
    }


def _deep(tower: Fields, patch: int, factor: int) -> dict[str, Any]:
    numbers = tower.integer("num_position_embeddings", 1, 1 << 20, 2_304)
    if isqrt(numbers) ** 2 != numbers:
        raise UnsupportedModel(
            f"{tower.where}: num_position_embeddings is {numbers}, which is no square",
            param="num_position_embeddings",
        )
    deep = tower.raw("deepstack_visual_indexes")
    found = _layers(tower, "deepstack_visual_indexes", [8, 16, 24] if deep is None else deep)
    return {"trained": isqrt(numbers), "deep": found}


_OWN = {
    "qwen2_vl": _plain,
    "qwen2_5_vl": _windowed,
    "qwen3_vl": _deep,
    "qwen3_vl_moe": _deep,
}


def _layers(tower: Fields, key: str, stated: Any) -> tuple[int, ...]:
    """Return numbers of layers, ascending."""
    right = isinstance(stated, list) and all(type(one) is int and 0 <= one < 128 for one in stated)
    if not right or sorted(set(stated)) != stated:
        raise ModelFileError(
            f"{tower.where}: {key} must be numbers of layers, ascending", param=key
        )
    return tuple(stated)


def _fitting(read: Fields, patch: int, factor: int) -> Fitting:
    """Read the bounds of a picture's pixels, at most `MOST_PATCHES` patches."""
    least, most = _bounds(read, 56 * 56, 28 * 28 * 1_280)
    return _checked(Fitting(factor * patch, least, min(most, MOST_PATCHES * patch**2)), read, patch)


def _bounds(read: Fields, least: int, most: int) -> tuple[int, int]:
    size = Fields(read.mapping("size") or {}, f"{read.where}: size")
    least = size.integer("shortest_edge", 1, 1 << 30, least)
    most = size.integer("longest_edge", 1, 1 << 30, most)
    return (
        read.integer("min_pixels", 1, 1 << 30, least),
        read.integer("max_pixels", 1, 1 << 30, most),
    )


def _checked(found: Rule, read: Fields, patch: int) -> Rule:
    if found.least > found.most or found.largest > MOST_PATCHES * patch**2:
        raise UnsupportedModel(
            f"{read.where}: a picture has at least {found.least:,} pixels and at most "
            f"{found.most:,}",
            param="min_pixels",
        )
    return found
