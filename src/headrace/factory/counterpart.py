"""A model's small files in the other format: a GGUF's metadata as a folder's files, and back.

Keys come from the family's table (`models.family`), so both readers know them. Everything written
here is read back: a model whose architecture, tokenizer or end of turn would change is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, decoders, processors

from ..base.arch import ModelArch, Rope
from ..base.errors import HeadraceError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..loader import sealed
from ..loader.gguf_model import gguf_of
from ..loader.names import gguf_names
from ..models.common import FIELDS
from ..models.family import Family, Field
from ..models.reader import from_gguf, from_hf
from ..models.registry import ALL, describe
from ..text.from_gguf import library_of, tokenizer_from_gguf
from ..text.json_bpe import gguf_vocabulary
from ..text.pretokenize import PRE_TOKENIZERS
from .to_compressed import as_json

_U32, _F32, _BOOL, _STRING, _ARRAY, _I32 = 4, 6, 7, 8, 9, 5
_SAMPLING = {
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}  # fmt: skip
TEMPLATE = "tokenizer.chat_template"


def folder_files(files: ModelFiles, dtype: str) -> dict[str, bytes]:
    """Return `config.json` and the tokenizer's files of a GGUF model, by name. Raises
    `UnsupportedModel`."""
    config = _config(files.arch, dtype)
    metadata = gguf_of(files).metadata
    ends = {"eos_token_id": list(files.eos_ids)} if files.eos_ids else {}
    if files.bos_id is not None:
        ends["bos_token_id"] = files.bos_id  # type: ignore[assignment]
    generation = {**ends, **files.generation}
    if files.generation.get("temperature", 1.0) == 0.0:
        generation["do_sample"] = False
    tokenizer: dict[str, Any] = {
        **files.special,
        "add_bos_token": files.add_bos,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    named = {"default": files.chat_template, **files.named_templates}
    templates = [{"name": name, "template": one} for name, one in named.items() if one]
    if len(templates) == 1 and files.chat_template:
        tokenizer["chat_template"] = files.chat_template
    elif templates:
        tokenizer["chat_template"] = templates
    return {
        "config.json": as_json({**config, **ends}),
        "generation_config.json": as_json(generation),
        "tokenizer.json": _tokenizer_json(metadata, files.add_bos).encode(),
        "tokenizer_config.json": as_json(tokenizer),
    }


def _config(arch: ModelArch, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of an architecture, which reads back as the same."""
    family = _family(arch)
    kind, classes = next(iter(family.types.items()))
    found: dict[str, Any] = {
        "architectures": list(classes[:1]), "model_type": kind, "torch_dtype": dtype,
        "num_hidden_layers": arch.layers, "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim, "rope_theta": arch.rope.theta,
        "tie_word_embeddings": arch.tied_embedding,
    }  # fmt: skip
    for row, value in _rows(family, arch):
        if row.hf:
            found[row.hf[0]] = value
    # The family's own constant, which a key may not override.
    for key, allowed in family.allowed.items():
        if key in found and found[key] not in allowed:
            del found[key]
    try:
        back = from_hf(found)
    except HeadraceError as error:
        raise _unlike(arch, str(error)) from None
    _check(back, arch)
    return found


def _tokenizer_json(metadata: Mapping[str, Any], add_bos: bool) -> str:
    """Return the `tokenizer.json` of a byte-level vocabulary. Raises `UnsupportedModel` for another
    kind."""
    vocabulary = tokenizer_from_gguf(dict(metadata)).vocabulary
    if vocabulary.kind != "byte_level":
        raise UnsupportedModel(
            "a SentencePiece vocabulary cannot move to a tokenizer.json; byte-level ones can",
            param="tokenizer.ggml.model",
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    known = PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]
    library = library_of(ids, metadata["tokenizer.ggml.merges"], known)
    library.decoder = decoders.ByteLevel()
    for token, index in sorted(vocabulary.added.items(), key=lambda pair: pair[1]):
        special = index in vocabulary.special_ids
        library.add_tokens([AddedToken(token, special=special, normalized=False)])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    if add_bos and vocabulary.bos_id is not None:
        bos = tokens[vocabulary.bos_id]
        library.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary.bos_id)],
        )  # fmt: skip
    found: str = library.to_str()
    return found


def metadata_of(files: ModelFiles) -> tuple[bytes, int]:
    """Return the entries of a folder's model as GGUF metadata with room for a digest, and their
    number. Raises `UnsupportedModel`."""
    arch = files.arch
    family = _family(arch)
    if not family.gguf:
        raise _unlike(arch, "the family has no GGUF")
    values: dict[str, Any] = {
        "block_count": arch.layers, "attention.head_count_kv": arch.kv_heads,
        "attention.key_length": arch.head_dim, "attention.value_length": arch.head_dim,
        "rope.freq_base": float(arch.rope.theta),
    }  # fmt: skip
    for row, value in _rows(family, arch):
        if row.gguf and not row.tensors:
            values[row.gguf] = value
    found: dict[str, Any] = {"general.architecture": family.gguf}
    found |= {f"{family.gguf}.{key}": value for key, value in values.items()}
    if isinstance(files.licence, str):
        found["general.license"] = files.licence
    for name, key in _SAMPLING.items():
        if name in files.generation:
            found[f"general.sampling.{key}"] = files.generation[name]
    found |= gguf_vocabulary(files.tokenizer, arch.vocab_size)  # type: ignore[arg-type]
    for name, one in {"": files.chat_template, **files.named_templates}.items():
        if one:
            found[f"{TEMPLATE}.{name}" if name else TEMPLATE] = one
    ids = {text: number for number, text in enumerate(found["tokenizer.ggml.tokens"])}
    if files.bos_id is not None:
        found["tokenizer.ggml.bos_token_id"] = files.bos_id
    for name, key in (("unk_token", "unknown"), ("pad_token", "padding")):
        if files.special.get(name) in ids:
            found[f"tokenizer.ggml.{key}_token_id"] = ids[files.special[name]]
    for key, end in zip(("eos", "eot", "eom"), files.eos_ids, strict=False):
        found[f"tokenizer.ggml.{key}_token_id"] = end
    found["tokenizer.ggml.add_bos_token"] = files.add_bos
    try:
        back = from_gguf(found, tensor_names(arch).values())
    except HeadraceError as error:
        raise _unlike(arch, str(error)) from None
    _check(back, arch)
    data = b"".join(_entry(key, value) for key, value in found.items())
    for key, number in (("general.file_type", 0), ("general.quantization_version", 2)):
        data += _entry(key, number)
    return data + sealed.ENTRY + sealed.EMPTY.encode(), len(found) + 3


def tensor_names(arch: ModelArch) -> dict[str, str]:
    """Return canonical name → name in a GGUF of every tensor. Raises `UnsupportedModel` for a model
    whose tensors GGUF divides differently."""
    found = gguf_names(arch)
    wanted = describe(arch).tensors()
    missing = [name for name in wanted if name not in found]
    if missing:
        raise _unlike(arch, f"GGUF stores {missing[0]} together with others")
    return {name: found[name] for name in wanted}


def _family(arch: ModelArch) -> Family:
    return next(one for one in ALL if one.name == arch.family)


def _rows(family: Family, arch: ModelArch) -> Iterator[tuple[Field, Any]]:
    """Yield the keys of a family's table with the architecture's values."""
    for path, row in {**FIELDS, **family.fields}.items():
        if not isinstance(row, Field) or path[0] == "_":
            continue
        value: Any = arch
        for part in path.split("."):
            value = None if value is None else getattr(value, part)
        if row.words:
            value = next((word for word, one in row.words.items() if one == value), None)
        if value is not None:
            yield row, value


def _check(back: ModelArch, arch: ModelArch) -> None:
    """Raise `UnsupportedModel` unless an architecture is read back unchanged."""
    if back != arch:
        names = [name for name in arch.__slots__ if getattr(back, name) != getattr(arch, name)]
        raise _unlike(arch, f"{', '.join(names)} would be read otherwise")


def _unlike(arch: ModelArch, why: str) -> UnsupportedModel:
    plain = "" if arch.rope == Rope(theta=arch.rope.theta) else "; its rope is not a plain one"
    return UnsupportedModel(
        f"a {arch.family} model cannot move to the other kind of file: {why:.300}{plain}; the same "
        "kind of file is possible",
        param="to",
    )


def _entry(key: str, value: Any) -> bytes:
    """Return one entry of GGUF metadata."""
    return _string(key) + _typed(value)


def _typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _I32, len(value), *value)
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
