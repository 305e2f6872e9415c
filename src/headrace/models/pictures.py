"""Encoders of pictures for language models: Idefics3's and SmolVLM's (Laurençon et al. 2024).

SigLIP's tower (Zhai et al. 2023) over the patches of a tile, then rows of each square of patches
side by side ("pixel shuffle"), and one product into the width of the language model. A picture is
so many tiles, each an input of its own. Patches come in the order of their squares, so that a
square is a `window`; the order changes nothing else, as all patches attend to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.arch import Activation, ModelArch
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import TOKENS, ActivationSpec, EmbedSpec, Graph, Node, Rows, Value, WindowSpec
from ..base.tiling import Tiling, cut
from ..base.verify import verify
from ..layers.description import Description
from ..layers.encoder import bidirectional, two_products

KINDS = ("idefics3", "smolvlm")
"""Values of `model_type` of configs with such an encoder."""
TOWER, JOINT = "model.vision_model", "model.connector.modality_projection.proj"
"""Names of the encoder's tensors, and of the product after it."""
PATCHES, PLACES = f"{TOWER}.embeddings.patch_embedding", f"{TOWER}.embeddings.position_embedding"
CHANNELS = 3
MOST_PATCHES = 1 << 14
"""Patches of a tile, all of which attend to all."""
_LANCZOS = 1
_ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@dataclass(frozen=True, slots=True)
class PictureArch:
    """An encoder of pictures, and what its processor makes of them. The unit of a step is a
    patch."""

    arch: ModelArch
    """Its layers; `max_context` counts the patches of a tile."""
    patch: int
    """Pixels of a side of a patch."""
    side: int
    """Patches of a side of a tile."""
    trained: int
    """Positions of a side of the table."""
    factor: int
    """Patches of a side of a square, which is one row of the language model."""
    hidden: int
    """Width of the language model."""
    place: int
    """Token that stands for a row of a picture."""
    tiling: Tiling
    """Sizes by which pictures are resized and split, unless a request wants them whole."""
    scale: float
    """Factor on a byte of a pixel, before the mean is taken off."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def most_tiles(self) -> int:
        """Tiles of the picture with the most of them, a square one."""
        return cut(1, 1, self.tiling).tiles

    @property
    def rows(self) -> int:
        """Rows of the language model for a tile."""
        return (self.side // self.factor) ** 2

    @property
    def width(self) -> int:
        """Numbers of a patch: rows of pixels of each channel."""
        return CHANNELS * self.patch**2

    def order(self) -> list[tuple[int, int]]:
        """List (row, column) in the tile of each patch, in the order of the encoder's input."""
        squares, inside = range(0, self.side, self.factor), range(self.factor)
        return [
            (row + below, column + right)
            for row in squares
            for column in squares
            for below in inside
            for right in inside
        ]

    def positions(self) -> list[int]:
        """List the row of the table of positions of each patch, in the same order.

        Such a row is that of the same place in a tile of the trained size. transformers computes it
        in fp32, which is off by one for some sides, such as 19; for those of the known models (26,
        27, 32) it is the same.
        """
        at = [place * self.trained // self.side for place in range(self.side)]
        return [at[row] * self.trained + at[column] for row, column in self.order()]


def picture_arch(
    config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
) -> PictureArch:
    """Read the encoder of a `config.json`, and its processor's config. `hidden`: width of the
    language model. Raises `ModelFileError`, `UnsupportedModel`."""
    fields = Fields(config, "config.json")
    given = fields.mapping("vision_config")
    if given is None:
        raise ModelFileError("config.json: vision_config is missing", param="vision_config")
    tower = Fields(given, "config.json: vision_config")
    width = tower.integer("hidden_size", 16, 4_096, 1_152)
    heads = tower.integer("num_attention_heads", 1, 64, 16)
    patch = tower.integer("patch_size", 1, 64, 32)
    trained = tower.integer("image_size", patch, 4_096, 224) // patch
    factor = fields.integer("scale_factor", 1, 8, 2)
    tower.expect("num_channels", CHANNELS)
    if width % heads:
        raise UnsupportedModel(
            "config.json: vision_config: hidden_size must be a multiple of num_attention_heads"
        )
    read = Fields(processing, "the config of pictures")
    tile = _edge(read, "max_image_size", 364)
    if tile % patch or tile // patch % factor:
        raise UnsupportedModel(
            f"max_image_size is {tile}; a tile must have whole squares of {factor} patches of "
            f"{patch} pixels",
            param="max_image_size",
        )
    if (tile // patch) ** 2 > MOST_PATCHES:
        raise UnsupportedModel(
            f"max_image_size is {tile}: a tile of {(tile // patch) ** 2:,} patches, at most "
            f"{MOST_PATCHES:,} are run",
            param="max_image_size",
        )
    for key in ("do_resize", "do_rescale", "do_normalize"):
        read.expect(key, True)
    read.expect("resample", _LANCZOS)
    side = tile // patch
    arch = ModelArch(
        family="pictures",
        vocab_size=1,
        hidden=width,
        layers=tower.integer("num_hidden_layers", 1, 128, 12),
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        intermediate=tower.integer("intermediate_size", 1, 1 << 15, 3_072),
        max_context=side**2,
        norm_eps=tower.number("layer_norm_eps", 1e-12, 1e-1, 1e-6),
        activation=_ACTIVATIONS[tower.word("hidden_act", _ACTIVATIONS, "gelu_pytorch_tanh")],
    )
    return PictureArch(
        arch,
        patch,
        side,
        trained,
        factor,
        hidden,
        fields.integer("image_token_id", 0, 2**24, 128_257),
        Tiling(_edge(read, "size", 4 * 364), tile, read.flag("do_image_splitting", True)),
        read.number("rescale_factor", 1e-6, 1.0, 1 / 255),
        _channels(read, "image_mean", -10.0),
        _channels(read, "image_std", 1e-6),
    )


def _edge(fields: Fields, key: str, default: int) -> int:
    stated = fields.mapping(key) or {"longest_edge": default}
    return Fields(stated, f"{fields.where}: {key}").integer("longest_edge", 1, 1 << 14)


def _channels(fields: Fields, key: str, low: float) -> tuple[float, ...]:
    stated = fields.raw(key)
    stated = [0.5] * CHANNELS if stated is None else stated
    stated = [stated] * CHANNELS if isinstance(stated, int | float) else stated
    if not isinstance(stated, Sequence) or len(stated) != CHANNELS:
        raise ModelFileError(f"{fields.where}: {key} must be three numbers", param=key)
    numbers = Fields({str(at): one for at, one in enumerate(stated)}, f"{fields.where}: {key}")
    return tuple(numbers.number(str(at), low, 10.0) for at in range(CHANNELS))


def describe_pictures(picture: PictureArch) -> Graph:
    """Describe the graph of a tile of N patches: patches [N, 3 · patch²] → `hidden` [N / factor²,
    D]."""
    arch = picture.arch
    to = Description(arch)
    square, patches = picture.factor**2, Value(TOKENS, picture.width)
    x = to.linear(patches, PATCHES, outputs=arch.hidden, bias=True)
    x = to.add(x, to.embed(PLACES, arch.max_context, EmbedSpec("positions")))
    for layer in range(arch.layers):
        at = f"{TOWER}.encoder.layers.{layer}"
        names = [f"{at}.self_attn.{letter}_proj" for letter in "qkv"]
        normed = to.layer_norm(x, f"{at}.layer_norm1")
        x = to.add(x, bidirectional(to, layer, normed, names, f"{at}.self_attn.out_proj"))
        normed = to.layer_norm(x, f"{at}.layer_norm2")
        products = f"{at}.mlp.fc1", f"{at}.mlp.fc2"
        x = to.add(x, two_products(to, normed, *products, ActivationSpec(arch.activation)))
    x = to.layer_norm(x, f"{TOWER}.post_layernorm")
    wide = Value(Rows("N", over=square), square * arch.hidden)
    to.nodes(Node("window", (x,), (wide,), (), WindowSpec(square, square)))
    graph = to.graph(hidden=to.linear(wide, JOINT, outputs=picture.hidden))
    graph = Graph(graph.nodes, graph.outputs, (patches,))
    verify(graph)
    return graph
