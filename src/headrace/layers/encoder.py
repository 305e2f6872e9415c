"""What an encoder is made of: learned positions, bidirectional attention, norms that come after."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import EncoderOperators, StepBatch
from .build import Builder
from .linear import Linear


class LayerNorm:
    """Ba, Kiros and Hinton 2016: `{name}.weight` and `{name}.bias`."""

    def __init__(self, build: Builder, name: str) -> None:
        self.weight = build.vector(f"{name}.weight", sizes=[build.arch.hidden])
        self.bias = build.vector(f"{name}.bias", sizes=[build.arch.hidden])
        self.eps = build.arch.norm_eps

    def __call__(self, ops: EncoderOperators, x: Array) -> Array:
        """x [N, D] → [N, D]."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class InputEmbedding:
    """Word + position + token type, normed."""

    def __init__(self, build: Builder, types: int) -> None:
        arch = build.arch

        def table(name: str, rows: int) -> tuple[str, int]:
            return f"embeddings.{name}_embeddings.weight", rows

        self.words, self.places, self.types = (
            build.matrix(name, rows=[rows], width=arch.hidden, role="embed")
            for name, rows in (
                table("word", arch.vocab_size),
                table("position", arch.max_context),
                table("token_type", types),
            )
        )
        self.norm = LayerNorm(build, "embeddings.LayerNorm")

    def __call__(self, ops: EncoderOperators, batch: StepBatch) -> Array:
        """→ [N, D]."""
        assert batch.types is not None, "an encoder's batch has token types"
        x = ops.add(
            ops.embed(batch.types, self.types, 1.0), ops.embed(batch.tokens, self.words, 1.0)
        )
        return self.norm(ops, ops.add(ops.embed(batch.positions, self.places, 1.0), x))


class EncoderLayer:
    """norm(x + attention(x)), then norm(x + feed_forward(x))."""

    def __init__(self, build: Builder, at: str) -> None:
        arch = build.arch
        hidden, inner = arch.hidden, arch.intermediate
        self.heads, self.scale, self.activation = arch.heads, arch.scale, arch.activation
        own = (f"{at}attention.self.{part}" for part in ("query", "key", "value"))
        self.qkv = Linear(build, *own, rows=hidden, width=hidden)
        self.out = Linear(build, f"{at}attention.output.dense", rows=hidden, width=hidden)
        self.attention_norm = LayerNorm(build, f"{at}attention.output.LayerNorm")
        self.up = Linear(build, f"{at}intermediate.dense", rows=inner, width=hidden)
        self.down = Linear(build, f"{at}output.dense", rows=hidden, width=inner)
        self.norm = LayerNorm(build, f"{at}output.LayerNorm")

    def __call__(self, ops: EncoderOperators, x: Array, batch: StepBatch) -> Array:
        """x [N, D] → [N, D]."""
        mixed = ops.encoder_attention(self.qkv(ops, x), self.heads, batch, self.scale)
        x = self.attention_norm(ops, ops.add(self.out(ops, mixed), x))
        inner = ops.activate(self.up(ops, x), self.activation)
        return self.norm(ops, ops.add(self.down(ops, inner), x))
