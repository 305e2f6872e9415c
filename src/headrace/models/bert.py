"""BERT (Devlin et al. 2018): an encoder for embeddings, or with a head that scores pairs."""

from __future__ import annotations

from ..base.arch import ModelArch, Rope
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import ActivationSpec, EmbedSpec, Graph
from ..layers.description import Description
from ..layers.encoder import bidirectional
from ..layers.feed_forward import two_products
from .family import Config, Family, Names, integer, number, word


def bert(arch: ModelArch) -> Graph:
    """Describe norm(x + attention(x)), then norm(x + feed_forward(x)); the norms come after.

    The head, if there is one, is described for every row but applied only to an entry's first.
    """
    encoder = arch.encoder
    assert encoder is not None, "the architecture says nothing of an encoder"
    to = Description(arch)
    types = to.embed(_table("token_type"), encoder.types, EmbedSpec("types"))
    words = to.embed(_table("word"), arch.vocab_size)
    places = to.embed(_table("position"), arch.max_context, EmbedSpec("positions"))
    x = to.layer_norm(to.add(to.add(words, types), places), "embeddings.LayerNorm")
    for layer in range(arch.layers):
        at = f"encoder.layer.{layer}"
        names = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
        mixed = bidirectional(to, layer, x, names, f"{at}.attention.output.dense")
        x = to.layer_norm(to.add(x, mixed), f"{at}.attention.output.LayerNorm")
        products = f"{at}.intermediate.dense", f"{at}.output.dense"
        inner = two_products(to, x, *products, ActivationSpec(arch.activation))
        x = to.layer_norm(to.add(x, inner), f"{at}.output.LayerNorm")
    if not encoder.labels:
        return to.graph(hidden=x)
    pooled = to.linear(x, "pooler.dense", outputs=arch.hidden, bias=True, purpose="head")
    pooled = to.activate(pooled, ActivationSpec("tanh"))
    labels = to.linear(pooled, "classifier", outputs=encoder.labels, bias=True, purpose="head")
    return to.graph(hidden=x, labels=labels)


def _table(name: str) -> str:
    return f"embeddings.{name}_embeddings"


def _head_dim(config: Config) -> int:
    if config["hidden"] % config["heads"]:
        raise config.refuse(
            "hidden", f"must be a multiple of num_attention_heads ({config['heads']})"
        )
    return int(config["hidden"] // config["heads"])


def _labels(config: Config) -> int:
    """Return 1 for a score, 0 without a head. Raises `UnsupportedModel` for classifiers with
    several labels."""
    fields = config.fields
    named = fields.raw("architectures")
    if not named or not named[0].endswith("ForSequenceClassification"):
        return 0
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


_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
FAMILIES = (
    Family(
        "bert", bert, {"bert": ("BertModel", "BertForSequenceClassification")},
        defaults={
            "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12,
            "num_attention_heads": 12, "intermediate_size": 3072, "max_position_embeddings": 512,
            "type_vocab_size": 2, "layer_norm_eps": 1e-12,
        },
        fields={
            "kv_heads": lambda config: config["heads"], "head_dim": _head_dim,
            "max_context": integer("max_position_embeddings", "", 8, 2**20),
            "norm_eps": number("layer_norm_eps", "", 1e-15, 1e-1),
            "activation": word("hidden_act", "", _ACTIVATIONS, "gelu"), "rope": Rope(),
            "windows": (), "qkv_bias": True, "output_bias": True, "tied_embedding": True,
            "encoder.types": integer("type_vocab_size", "", 1, 64), "encoder.labels": _labels,
        },
        allowed={
            "position_embedding_type": ("absolute",), "is_decoder": (False,), "embedding_size": (),
            "problem_type": _PROBLEMS,
        },
        names=Names(hf={"bert.": ""}, unread=r"(bert\.)?embeddings\.(position|token_type)_ids"),
    ),
)  # fmt: skip
