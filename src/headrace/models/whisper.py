"""Whisper (Radford et al. 2022, section 2.2): an encoder of sounds, and a decoder of text.

The encoder's output is K and V of the decoder's cross attention: one part writes them once for all
requests about a sound, another part reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base.arch import Cross, ModelArch
from ..base.graph import AttentionSpec, EmbedSpec, Graph, Purpose, Value
from ..base.verify import verify
from ..layers.description import Description
from .family import Family
from .sounds import HEAD_SIZE, describe_tower, feed_forward

ENCODER, DECODER, HEAD = "model.encoder", "model.decoder", "proj_out"
"""Names of the parts' tensors, and of the decoder's head."""
QUERIES = "queries"
"""Name of a decoder output, before a layer's number: q of its cross-attention."""


@dataclass(frozen=True, slots=True)
class WhisperArch:
    """The sizes of a Whisper. A feed-forward has four times the width."""

    width: int
    encoder_layers: int
    decoder_layers: int
    mels: int
    """Width of the features."""
    vocab: int
    frames: int = 1_500
    """Positions of a whole window, 20 ms each."""
    context: int = 448
    """Tokens of the decoder."""
    file_bytes: int = 2
    """Bytes of a number in the file."""
    aligned: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the decoder's cross-attention that follows the sound."""

    @property
    def text(self) -> ModelArch:
        """Return the sizes of the decoder."""
        cross = Cross(self.across(0), self.frames, self.aligned)
        return replace(self.part(self.decoder_layers, self.context), cross=cross)

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    def part(self, layers: int, rows: int) -> ModelArch:
        """Return the sizes of a part with this many layers and positions."""
        return ModelArch(
            family="whisper",
            vocab_size=self.vocab,
            hidden=self.width,
            layers=layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=HEAD_SIZE,
            intermediate=4 * self.width,
            max_context=rows,
            norm_eps=1e-5,
            tied_embedding=True,
        )

    def across(self, layer: int) -> int:
        """Return the number of the cross attention of a layer of the decoder, in both parts."""
        return max(self.encoder_layers, self.decoder_layers) + layer


def describe_encoder(whisper: WhisperArch) -> Graph:
    """Describe the graph of a sound of N positions: features [2N + 1, mels] → `hidden` [N, D], and
    K and V of each layer of the decoder, which are written."""
    arch = whisper.part(whisper.encoder_layers, whisper.frames)
    to = Description(arch)
    features, x = describe_tower(to, whisper.mels, ENCODER, ["qkv_proj"])
    hidden = to.layer_norm(x, f"{ENCODER}.layer_norm")
    for layer in range(whisper.decoder_layers):
        name = f"{DECODER}.layers.{layer}.encoder_attn.kv_proj"
        kv = to.linear(hidden, name, outputs=2 * arch.hidden, bias=True, purpose="qkv")
        kept = AttentionSpec(whisper.across(layer), 0, arch.heads, HEAD_SIZE, arch.scale)
        to.node("write", (kv,), kept.queries, spec=kept)
    graph = to.graph((features,), hidden=hidden)
    verify(graph)
    return graph


def describe_text(arch: ModelArch) -> Graph:
    """Describe the graph of the tokens of a step, each of which attends to its window. Further
    outputs besides hidden states and logits: q of the cross-attention of each aligned layer."""
    to = Description(arch)
    x = to.embed(f"{DECODER}.embed_tokens", arch.vocab_size)
    places = to.embed(f"{DECODER}.embed_positions", arch.max_context, EmbedSpec("positions"))
    x = to.add(x, places)
    queries: dict[str, Value] = {}
    for layer in range(arch.layers):
        x, queries[f"{QUERIES}.{layer}"] = _layer(to, x, layer, f"{DECODER}.layers.{layer}")
    hidden = to.layer_norm(x, f"{DECODER}.layer_norm")
    logits = to.linear(hidden, HEAD, outputs=arch.vocab_size, role="logits", purpose="head")
    assert arch.cross is not None
    aligned = {f"{QUERIES}.{layer}" for layer, _ in arch.cross.aligned}
    wanted = {name: value for name, value in queries.items() if name in aligned}
    graph = to.graph(hidden=hidden, logits=logits, **wanted)
    verify(graph)
    return graph


def describe_decoder(whisper: WhisperArch) -> Graph:
    """Describe the decoder of a Whisper: see `describe_text`."""
    return describe_text(whisper.text)


def _layer(to: Description, x: Value, layer: int, at: str) -> tuple[Value, Value]:
    """Describe a layer: attention to the text, to the sound, and a feed-forward. Return its result,
    and q of the attention to the sound."""
    arch = to.arch
    assert arch.cross is not None
    own = AttentionSpec(layer, arch.heads, arch.heads, HEAD_SIZE, arch.scale)
    cross = own._replace(layer=arch.cross.first + layer, across=True)

    def product(value: Value, name: str, purpose: Purpose, times: int = 1) -> Value:
        width = times * arch.hidden
        return to.linear(value, f"{at}.{name}", outputs=width, bias=True, purpose=purpose)

    normed = to.layer_norm(x, f"{at}.self_attn_layer_norm")
    q = to.node("write", (product(normed, "self_attn.qkv_proj", "qkv", 3),), own.queries, spec=own)
    mixed = to.node("attend", (q,), own.queries, spec=own)
    x = to.add(x, product(mixed, "self_attn.out_proj", "output"))
    normed = to.layer_norm(x, f"{at}.encoder_attn_layer_norm")
    q = product(normed, "encoder_attn.q_proj", "qkv")
    mixed = to.node("attend", (q,), cross.queries, spec=cross)
    x = to.add(x, product(mixed, "encoder_attn.out_proj", "output"))
    return feed_forward(to, x, at), q


FAMILIES = (Family("whisper", describe_text, types={}),)
