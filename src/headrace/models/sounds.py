"""Encoders of sounds for language models: Qwen2-Audio's (Chu et al. 2024).

Whisper's encoder (Radford et al. 2022) over the positions with sound, the mean of each two
positions, a norm, and one product into the width of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import (
    TOKENS,
    ActivationSpec,
    EmbedSpec,
    Graph,
    Node,
    Rows,
    ScaleSpec,
    Value,
    WindowSpec,
)
from ..base.verify import verify
from ..layers.description import Description
from ..layers.encoder import bidirectional
from ..layers.feed_forward import two_products

KIND = "qwen2_audio"
"""Value of `model_type` of configs with such an encoder."""
TOWER, JOINT = "audio_tower", "multi_modal_projector.linear"
"""Names of the encoder's tensors, and of the product after it."""
HEAD_SIZE = 64
POSITIONS = 1_500
"""Positions of 30 seconds."""
_GELU = ActivationSpec("gelu")
_FRAMES, _INPUT, _PAIRS = (
    Rows("N", times=2),
    Rows("N", times=2, more=1),
    Rows("N", over=2),
)
"""Rows for N positions: frames, frames with the one after them, and rows for the language model."""


@dataclass(frozen=True, slots=True)
class SoundArch:
    """An encoder of sounds. The unit of a step is a position: 20 ms, two frames of features."""

    arch: ModelArch
    """Its layers; `max_context` counts positions."""
    mels: int
    """Width of the features."""
    hidden: int
    """Width of the language model."""
    place: int
    """Token that stands for a row of a sound."""

    def encoded(self, positions: int) -> int:
        """Return the number of rows that the language model gets."""
        return _PAIRS.of(positions)

    def read(self, positions: int) -> int:
        """Return the number of frames that are read."""
        return _INPUT.of(positions)


def sound_arch(config: Mapping[str, Any], hidden: int) -> SoundArch:
    """Read the encoder of a `config.json`; `hidden`: width of the language model. Raises
    `ModelFileError`, `UnsupportedModel`."""
    fields = Fields(config, "config.json")
    given = fields.mapping("audio_config")
    if given is None:
        raise ModelFileError("config.json: audio_config is missing", param="audio_config")
    sound = Fields(given, "config.json: audio_config")
    width = sound.integer("d_model", HEAD_SIZE, 4_096)
    heads = sound.integer("encoder_attention_heads", 1, 64)
    inner = sound.integer("encoder_ffn_dim", 1, 1 << 15)
    if width != HEAD_SIZE * heads or inner != 4 * width:
        raise UnsupportedModel(
            f"config.json: audio_config: heads of {HEAD_SIZE} and a feed-forward of four times the "
            "width are run"
        )
    sound.expect("activation_function", "gelu")
    sound.expect("scale_embedding", False)
    sound.expect("max_source_positions", POSITIONS)
    arch = ModelArch(
        family="sounds",
        vocab_size=1,
        hidden=width,
        layers=sound.integer("encoder_layers", 1, 64),
        heads=heads,
        kv_heads=heads,
        head_dim=HEAD_SIZE,
        intermediate=inner,
        max_context=POSITIONS,
        norm_eps=1e-5,
    )
    mels, place = (
        sound.integer("num_mel_bins", 1, 256),
        fields.integer("audio_token_index", 0, 2**24),
    )
    return SoundArch(arch, mels, hidden, place)


def describe_sounds(sound: SoundArch) -> Graph:
    """Describe the graph of a sound of N positions: features [2N + 1, mels] → `hidden` [N / 2,
    D]."""
    arch = sound.arch
    to = Description(arch)
    features, x = describe_tower(to, sound.mels, TOWER, ["q_proj", "k_proj", "v_proj"])
    pairs = _node(to, "window", x, _PAIRS, 2 * arch.hidden, WindowSpec(2, 2))
    halves = [to.part(pairs, first, arch.hidden) for first in (0, arch.hidden)]
    halves = [_node(to, "scale", half, _PAIRS, arch.hidden, ScaleSpec(0.5)) for half in halves]
    mean = to.layer_norm(to.add(*halves), f"{TOWER}.layer_norm")
    graph = to.graph((features,), hidden=to.linear(mean, JOINT, outputs=sound.hidden, bias=True))
    verify(graph)
    return graph


def describe_tower(
    to: Description, mels: int, at: str, parts: Sequence[str]
) -> tuple[Value, Value]:
    """Describe Whisper's convolutions and layers; return the features [2N + 1, mels] and the rows
    [N, D] before the last norm. `parts`: names of the product with q, k and v in a layer."""
    features = Value(_INPUT, mels)
    frames = _convolution(to, features, f"{at}.conv1", WindowSpec(3, 1, before=1), _FRAMES)
    x = _convolution(to, frames, f"{at}.conv2", WindowSpec(3, 2, before=1), TOKENS)
    table = EmbedSpec("positions")
    x = to.add(x, to.embed(f"{at}.embed_positions", to.arch.max_context, table))
    for layer in range(to.arch.layers):
        x = _layer(to, x, layer, f"{at}.layers.{layer}", parts)
    return features, x


def _node(to: Description, kind: str, x: Value, rows: Rows, width: int, spec: object) -> Value:
    (out,) = to.nodes(Node(kind, (x,), (Value(rows, width),), (), spec))
    return out


def _convolution(to: Description, x: Value, name: str, spec: WindowSpec, rows: Rows) -> Value:
    """Apply a convolution and a GELU: concatenated consecutive rows, then one product."""
    wide = _node(to, "window", x, rows, spec.width * x.width, spec)
    made = to.linear(wide, name, outputs=to.arch.hidden, bias=True)
    return to.activate(made, _GELU)


def _layer(to: Description, x: Value, layer: int, at: str, parts: Sequence[str]) -> Value:
    """Describe a layer whose norms come before attention and feed-forward."""
    normed = to.layer_norm(x, f"{at}.self_attn_layer_norm")
    names = [f"{at}.self_attn.{part}" for part in parts]
    x = to.add(x, bidirectional(to, layer, normed, names, f"{at}.self_attn.out_proj"))
    return feed_forward(to, x, at)


def feed_forward(to: Description, x: Value, at: str) -> Value:
    """Add a norm and a feed-forward with a GELU."""
    normed = to.layer_norm(x, f"{at}.final_layer_norm")
    return to.add(x, two_products(to, normed, f"{at}.fc1", f"{at}.fc2", _GELU))
