"""Reader of a BERT-style encoder's config: the part of `arch_reader` for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .arch import Activation, Encoder, ModelArch
from .arch_fields import Fields
from .errors import ModelFileError, UnsupportedModel

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
ENCODERS: Mapping[str, tuple[str, ...]] = {"bert": ("BertModel", "BertForSequenceClassification")}
"""Classes that each `model_type` may name."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "embedding_size": (),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "problem_type": ("single_label_classification", "multi_label_classification", "regression"),
}
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def encoder_arch(outer: Fields) -> ModelArch:
    """Read the architecture. Raises as `arch_reader.from_hf` does."""
    kind = str(outer.raw("model_type"))
    fields = Fields(outer.values, outer.where, defaults=_DEFAULTS)
    for key, allowed in _NEUTRAL.items():
        fields.expect(key, *allowed)
    named = fields.raw("architectures") or [ENCODERS[kind][0]]
    if not isinstance(named, list) or named[0] not in ENCODERS[kind]:
        raise UnsupportedModel(
            f"{outer.where}: architectures is {named!r:.120}; supported for model_type {kind}: "
            f"{', '.join(ENCODERS[kind])}",
            param="architectures",
        )
    hidden = fields.integer("hidden_size", 1, 2**17)
    heads = fields.integer("num_attention_heads", 1, 2**12)
    if hidden % heads:
        raise UnsupportedModel(
            f"{outer.where}: hidden_size is {hidden}; must be a multiple of "
            f"num_attention_heads ({heads})"
        )
    return ModelArch(
        family=kind,
        vocab_size=fields.integer("vocab_size", 1, 2**24),
        hidden=hidden,
        layers=fields.integer("num_hidden_layers", 1, 2**10),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.integer("intermediate_size", 1, 2**20),
        max_context=fields.integer("max_position_embeddings", 8, 2**20),
        norm_eps=fields.number("layer_norm_eps", 1e-15, 1e-1),
        activation=_ACTIVATIONS[fields.word("hidden_act", _ACTIVATIONS)],
        qkv_bias=True,
        output_bias=True,
        tied_embedding=True,
        encoder=Encoder(
            types=fields.integer("type_vocab_size", 1, 64),
            labels=_labels(fields) if named[0].endswith("ForSequenceClassification") else 0,
        ),
    )


def _labels(fields: Fields) -> int:
    """Return one, for a score. Raises `UnsupportedModel` for classifiers of several labels."""
    names = fields.mapping("id2label")
    count = fields.integer("num_labels", 1, 2**16, 2 if names is None else len(names))
    if names is not None and len(names) != count:
        raise ModelFileError(
            f"{fields.where}: num_labels is {count} but id2label has {len(names)}",
            param="num_labels",
        )
    if count != 1:
        raise UnsupportedModel(
            f"{fields.where}: the classifier has {count} labels; supported is 1 (a score)",
            param="id2label",
        )
    return count
