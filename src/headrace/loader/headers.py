"""A config checked against the headers of its weights: if they differ, the weights are right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..base.arch import ModelArch
from ..base.config import Decision
from .names import EMBEDDING, HEAD, from_hf_name, kv_scales, some
from .safetensors_file import StoredTensor
from .shards import read_headers

_CODES = ("qweight", "weight_packed")
"""Suffixes of tensors that hold a quantised matrix under a name other than `weight`."""


def hold(arch: ModelArch, shards: tuple[Path, ...]) -> tuple[ModelArch, tuple[Decision, ...]]:
    """Return the file's true architecture, and the differences from its config.

    A head that differs from the embedding is the model's own, whatever `tie_word_embeddings` says.
    Raises `ModelFileError` for a damaged header.
    """
    stored, decisions = read_headers(shards), []
    untied = replace(arch, tied_embedding=False)
    if arch.task == "tokens" and arch.tied_embedding and (own := _own_head(untied, stored)):
        arch = untied
        decisions.append(
            Decision("head", "own", f"tie_word_embeddings is true, but the file has {own}")
        )
    if scales := kv_scales(stored):
        reason = f"{some(scales)}: K and V are cached in kv_dtype, which needs no scale of a file"
        decisions.append(Decision("kv_scales", "left out", reason))
    return arch, tuple(decisions)


def _own_head(untied: ModelArch, stored: Mapping[str, StoredTensor]) -> str:
    """Describe the head of a file whose config ties it; empty if it has no head, or an equal
    one."""
    named: dict[str | None, str] = {}
    for name in stored:
        stem, _, suffix = name.rpartition(".")
        plain = f"{stem}.weight" if suffix in _CODES else name
        # Encoders of sound and images have their own names, which mean nothing here.
        named.setdefault(from_hf_name(plain, untied), name)
    if HEAD not in named:
        return ""
    head, table = stored[named[HEAD]], stored.get(named.get(EMBEDDING, ""))
    if table is None or not head.equals(table):
        return f"{named[HEAD]}, which is not equal to its embedding"
    return ""
