"""Small random encoders, with and without a head, as a hub would hold them, with WordPiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = [
    "the",
    "water",
    "wheel",
    "turns",
    "a",
    "river",
    "carries",
    "stone",
    "and",
    "light",
    "over",
    "under",
    "mill",
    "race",
    "head",
    "old",
    "new",
    "what",
    "is",
    "where",
    "runs",
    "fast",
    "slow",
    "deep",
    "cold",
    "blue",
    "green",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?水é"
VOCABULARY = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
CONTEXT = 160


def make(folder: Path, *, labels: int = 0, activation: str = "gelu", **more: Any) -> Path:
    """Save a model to `folder`; `labels`: a classification head. `more` goes into the config."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(set(VOCABULARY)),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=200,
        max_position_embeddings=CONTEXT,
        hidden_act=activation,
        initializer_range=0.15,
        **more,
    )
    torch.manual_seed(11)
    if labels:
        config.num_labels = labels
        model: Any = transformers.BertForSequenceClassification(config)
    else:
        model = transformers.BertModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # Norms and biases start as ones and zeros.
                parameter += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**names, "tokenizer_class": "BertTokenizer"})
    )
    return folder


def write_modules(folder: Path, mode: str, *, normalise: bool, extra: str | None = None) -> Path:
    """The files of sentence-transformers: `mode` is a key such as pooling_mode_cls_token."""
    parts = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    parts += [extra] if extra else []
    modules = [
        {
            "idx": place,
            "name": str(place),
            "type": f"sentence_transformers.models.{part}",
            "path": "" if part == "Transformer" else f"{place}_{part}",
        }
        for place, part in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, mode: True}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 96, **modes})
    )
    return folder


def _tokenizer() -> Tokenizer:
    vocabulary = {token: place for place, token in enumerate(dict.fromkeys(VOCABULARY))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return tokenizer
