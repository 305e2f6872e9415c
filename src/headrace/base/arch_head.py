"""A head that drafts: one decoder layer that continues from the hidden states of a larger model.

Its input, for each place, is the token there and the target's result at the preceding place. It
predicts the next token: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-3 (Li et al. 2025, arXiv
2503.01840), and the layers of checkpoints that predict further tokens (DeepSeek-V3, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .arch import Caps, ModelArch
from .arch_fields import Fields
from .arch_reader import from_hf
from .errors import ModelFileError, UnsupportedModel

HeadKind = Literal["eagle", "eagle3", "mtp"]
PREDICTING = ("deepseek_v3", "glm4_moe")
"""Families whose checkpoints have a layer that predicts the token after the next."""
STATED = "speculators_model_type"
"""Key of a config that marks it as a head's."""


@dataclass(frozen=True, slots=True)
class HeadArch:
    """The parts of a head. `arch` is that of its one layer, and of its two ends."""

    kind: HeadKind
    arch: ModelArch
    vocab: int
    """Tokens of its vocabulary; fewer than the target's if a file lists them."""
    reads: tuple[int, ...] = ()
    """Layers of the target whose inputs it reads, mixed into one vector; empty: it reads the input
    of the target's head."""
    bias: bool = False
    """Whether the product that mixes token and state has a bias."""
    norms: bool = False
    """EAGLE alone: whether there are norms after the embedding, before the layer and before the
    head."""
    normed_residual: bool = False
    """EAGLE-3 alone: whether the residual is the state after its norm."""
    own_head: bool = False
    """Whether it has a logits matrix of its own; else the target's is used."""


def head_of(config: Mapping[str, Any], target: ModelArch, *, own_head: bool) -> HeadArch:
    """Read the head that a `config.json` in the format of "speculators" describes, for `target`.

    Raises `UnsupportedModel` or `ModelFileError`, which name the key.
    """
    fields = Fields(config, "config.json")
    kind = fields.word(STATED, ("eagle", "eagle3"))
    layer = fields.mapping("transformer_layer_config")
    if layer is None:
        raise ModelFileError(
            "config.json lacks transformer_layer_config", param="transformer_layer_config"
        )
    arch = from_hf({"model_type": "llama", **layer, "num_hidden_layers": 1, "architectures": None})
    if arch.moe is not None or arch.mla is not None or arch.encoder is not None or arch.windows:
        raise UnsupportedModel(
            "config.json: transformer_layer_config describes no plain layer; supported: a layer "
            "like that of llama or qwen3",
            param="transformer_layer_config",
        )
    for key, ours, its in (
        ("hidden_size", target.hidden, arch.hidden),
        ("vocab_size", target.vocab_size, arch.vocab_size),
    ):
        if ours != its:
            raise UnsupportedModel(
                f"config.json: {key} is {its}; must be {ours}, as the model's that it drafts for",
                param=key,
            )
    arch = replace(
        arch,
        tied_embedding=not own_head and target.tied_embedding,
        embedding_scale=target.embedding_scale,
        caps=Caps(logits=None if own_head else target.caps.logits),
        logits_scale=1.0 if own_head else target.logits_scale,
    )
    if kind == "eagle":
        return HeadArch(
            "eagle",
            arch,
            arch.vocab_size,
            bias=fields.flag("fusion_bias", False),
            norms=fields.flag("layernorms", False),
            own_head=own_head,
        )
    fields.expect("norm_before_fc", False)
    fields.expect("target_hidden_size", target.hidden)
    if not own_head:
        raise ModelFileError("a head of the kind eagle3 needs lm_head.weight", param="lm_head")
    return HeadArch(
        "eagle3",
        arch,
        fields.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size),
        reads=_layers(fields, target.layers),
        normed_residual=fields.flag("norm_before_residual", False),
        own_head=True,
    )


def predictor_of(config: Mapping[str, Any], target: ModelArch) -> HeadArch:
    """Read the layer after the last one of a checkpoint, which predicts the token after the next.
    Raises `UnsupportedModel` if there is no supported one."""
    fields = Fields(config, "config.json")
    if target.family not in PREDICTING:
        raise UnsupportedModel(
            f"layers of a {target.family} model that predict further tokens are not read; "
            f"supported: {', '.join(PREDICTING)}"
        )
    if not fields.integer("num_nextn_predict_layers", 0, 2**10, 0):
        raise UnsupportedModel(
            "config.json: num_nextn_predict_layers is 0; to draft the model needs one such layer",
            param="num_nextn_predict_layers",
        )
    assert target.moe is not None
    moe = replace(target.moe, dense_layers=0, dense_at=())
    return HeadArch("mtp", replace(target, layers=1, moe=moe), target.vocab_size)


def _layers(fields: Fields, count: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3 reads: as its config says, or the second of the middle and of
    the ends (paper, section 3.1; its checkpoints were trained with these numbers)."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = fields.raw(key)
    if named is None:
        named = [2, count // 2, count - 3]
    right = isinstance(named, list) and all(type(one) is int for one in named)
    if not right or not 1 <= len(named) <= 8 or not all(0 <= one <= count for one in named):
        raise UnsupportedModel(
            f"config.json: {key} is {named!r:.80}; must be one to eight numbers from 0 to {count}",
            param=key,
        )
    return tuple(named)
