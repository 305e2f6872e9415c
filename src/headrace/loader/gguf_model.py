"""A GGUF file as a `ModelFiles`: architecture, tokenizer, chat template, end-of-turn ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..base.arch import ModelArch
from ..base.errors import HeadraceError, ModelFileError
from ..base.modelfiles import TOOL_USE, ModelFiles
from ..base.strings import StringArray
from ..models.reader import from_gguf
from ..models.ropes import LONG_FACTORS, ROPE_FACTORS
from . import sealed
from .gguf import HEAD, GgufFile

END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",  # Gemma 4
    "<|eot|>",  # Llama 4, and the next
    "<|eom|>",
    "<|end|>",
    "<EOT>",
)
"""Tokens that end a turn in a well-known chat format, whatever eos the metadata states."""
_HARMONY = ("<|return|>", "<|call|>", "<|endoftext|>")
"""Tokens that end a turn of gpt-oss, where `<|end|>` ends a message and the turn goes on."""

_TEMPLATE = "tokenizer.chat_template"
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONTROL = 3
PROJECTORS = {
    "idefics3": ("idefics3", "<image>"),
    "gemma3": ("gemma3", "<image_soft_token>"),
    "qwen2vl_merger": ("qwen2_vl", "<|image_pad|>"),
    "qwen2.5vl_merger": ("qwen2_5_vl", "<|image_pad|>"),
    "qwen3vl_merger": ("qwen3_vl", "<|image_pad|>"),
}
"""Kind of a picture encoder in a separate file (`mmproj`) → (`model_type` of a config, token that
stands for a picture's row)."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def open_gguf(path: Path, name: str, licence: str | None = None) -> ModelFiles:
    """Read the metadata of a GGUF file; the tensors stay where they are."""
    file = GgufFile(path)
    metadata = file.metadata
    if sealed.KEY in metadata:
        at = HEAD + file.entries().find(sealed.ENTRY) + len(sealed.ENTRY)
        sealed.check(path, metadata[sealed.KEY], at)
    factors: dict[str, list[float]] = {}
    for tensor in (ROPE_FACTORS, *LONG_FACTORS):
        if tensor in file.tensors:
            if file.tensors[tensor].type.name != "F32":
                raise ModelFileError(f"{path.name}: {tensor} must be F32")
            factors[tensor] = [float(value) for value in file.view(tensor).reshape(-1)]
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelFileError(
            f"{path.name} is one part of {metadata['split.count']}; merge the parts into one file"
        )
    arch = from_gguf(metadata, file.tensors, factors)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray):
        raise ModelFileError(f"{path.name}: tokenizer.ggml.tokens must be an array of strings")
    encoder = beside(path, arch, tokens)
    ids = {key: _token_id(metadata, field, len(tokens)) for key, field in _SPECIAL.items()}
    bos, eos = ids["bos_token"], ids["eos_token"]
    named = {}
    for key, text in metadata.items():
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            if not isinstance(text, str):
                raise ModelFileError(f"{path.name}: {key:.100} must be a string")
            named[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = text
    template = named.pop("default", None) or named.get(TOOL_USE)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = metadata.get("tokenizer.ggml.model") == "llama"
    return ModelFiles(
        name=name,
        format="gguf",
        path=path,
        weights=(path,) if encoder is None else (path, encoder),
        arch=arch,
        tokenizer={key: v for key, v in metadata.items() if key.startswith("tokenizer.")},
        chat_template=template,
        named_templates=named,
        special={key: tokens[value] for key, value in ids.items() if value is not None},
        bos_id=bos,
        add_bos=bool(add_bos) and bos is not None,
        eos_ids=with_rows(_end_ids(metadata, tokens, eos), arch),
        generation={
            key: metadata[f"general.sampling.{name}"]
            for name, key in _SAMPLING.items()
            if isinstance(metadata.get(f"general.sampling.{name}"), int | float)
        },
        licence=licence or _text(metadata.get("general.license")),
        opened=file,
    )


def candidates(path: Path) -> list[Path]:
    """List the files next to a GGUF file that are named as encoders are, in order."""
    if path.suffix != ".gguf" or "mmproj" in path.name.lower():
        return []
    try:
        return sorted(one for one in path.parent.glob("*.gguf") if "mmproj" in one.name.lower())
    except OSError:
        return []


def beside(path: Path, arch: ModelArch, tokens: StringArray) -> Path | None:
    """Return the first encoder next to a language model that has a known kind, fits the model's
    width and has its token in the vocabulary; None without one."""
    for one in candidates(path):
        try:
            metadata = GgufFile(one).metadata
        except HeadraceError:
            continue  # It may belong to another model: this one is served without it.
        width, kind = metadata.get("clip.vision.projection_dim"), projector(metadata)
        if width != arch.hidden or kind not in PROJECTORS:
            continue
        if tokens.find(PROJECTORS[kind][1]) is not None:
            return one
    return None


def projector(metadata: Mapping[str, Any]) -> str:
    """Return the kind of an encoder's file."""
    keys = "clip.vision.projector_type", "clip.projector_type"
    return str(next((metadata[key] for key in keys if key in metadata), ""))


def gguf_of(files: ModelFiles) -> GgufFile:
    """Return the open file of a GGUF model; open it only if this process has not done so."""
    return files.opened if isinstance(files.opened, GgufFile) else GgufFile(files.path)


def rest(files: ModelFiles) -> None:
    """Release the memory of the weights that were read, if the model is a mapped file."""
    if isinstance(files.opened, GgufFile):
        files.opened.rest()


def _token_id(metadata: dict[str, Any], field: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{field}")
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise ModelFileError(
            f"GGUF: tokenizer.ggml.{field} is {value!r:.40}; must be from 0 to {count - 1}"
        )
    return value


def end_of_turn(known: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the tokens that may end a turn in a vocabulary; `known`: whether it has a token."""
    return _HARMONY if known("<|channel|>") and known("<|return|>") else END_OF_TURN


def _end_ids(metadata: dict[str, Any], tokens: StringArray, eos: int | None) -> tuple[int, ...]:
    """List eos first, then eot and eom, then the well-known ones in the vocabulary."""
    count = len(tokens)
    fields = (_token_id(metadata, f"{kind}_token_id", count) for kind in ("eot", "eom"))
    found = [eos, *fields]
    types = metadata.get("tokenizer.ggml.token_type")
    for text in end_of_turn(lambda text: tokens.find(text) is not None):
        at = tokens.find(text)
        if at is not None and (types is None or len(types) != count or types[at] == _CONTROL):
            found.append(at)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def with_rows(ids: Iterable[int], arch: ModelArch) -> tuple[int, ...]:
    """Keep the ids that have a row in the model's matrices: no others are ever drawn."""
    return tuple(index for index in ids if index < arch.vocab_size)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
