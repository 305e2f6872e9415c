"""Pooling of a model: read from the files of sentence-transformers next to its weights.

`modules.json` lists the parts of an embedding model; supported are a transformer, a pooling and a
normalisation. Without it an encoder takes the mean and a decoder its last token, normalised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ..base.arch import ModelArch, Pooling
from ..base.errors import ModelFileError, UnsupportedModel
from ..models.registry import describe
from .jsonfile import read_json, read_list

_MODES: dict[str, Literal["mean", "cls", "last"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_PREFIX = "pooling_mode_"


def read_pooling(folder: Path, config: dict[str, Any], arch: ModelArch) -> Pooling:
    """Read how vectors are made. Raises `UnsupportedModel` for parts and modes that would give
    different vectors."""
    shortens = bool(config.get("is_matryoshka") or config.get("matryoshka_dimensions"))
    if not (folder / "modules.json").is_file():
        both = any(each.kind == "bidirectional" for each in describe(arch).attentions())
        return Pooling("mean" if both else "last", shortens=shortens)
    kind: Literal["mean", "cls", "last"] | None = None
    normalise = False
    for module in read_list(folder / "modules.json"):
        name = str(module.get("type") if isinstance(module, dict) else module).rpartition(".")[2]
        if name == "Pooling":
            kind = _kind(folder, module.get("path"))
        elif name == "Normalize":
            normalise = True
        elif name != "Transformer":
            raise UnsupportedModel(
                f"modules.json: {name!r:.60} is not supported; supported are Transformer, Pooling "
                "and Normalize",
                param="modules.json",
            )
    if kind is None:
        raise UnsupportedModel("modules.json: there is no Pooling in it", param="modules.json")
    return Pooling(kind, normalise, shortens)


def _kind(folder: Path, path: object) -> Literal["mean", "cls", "last"]:
    if not isinstance(path, str) or Path(path).name != path:
        raise ModelFileError(f"modules.json: path is {path!r:.80}; it must name a folder beside it")
    where = f"{path}/config.json"
    config = read_json(folder / path / "config.json")
    modern = config.get("pooling_mode")
    chosen = {key for key, on in config.items() if key.startswith(_PREFIX) and on is not False}
    if isinstance(modern, str) and not chosen:
        names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
        chosen = {_PREFIX + names.get(modern, modern)}
    if len(chosen) != 1 or next(iter(chosen)) not in _MODES:
        raise UnsupportedModel(
            f"{where}: the pooling is {', '.join(sorted(chosen)) or 'none'}; supported is one of "
            + ", ".join(_MODES),
            param="pooling_mode",
        )
    return _MODES[next(iter(chosen))]
