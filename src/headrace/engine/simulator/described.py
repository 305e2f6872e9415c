"""Descriptions of a model for the roofline, the simulator, the planner and the bench.

A file is described by the sizes of its tensors, even if its family is not served, it is in parts,
or only its header exists. A `config.json` (alone, in a folder without weights, or of a hub id) and
the known architectures get their published formats. Any other catalog name stands for its file.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...base.arch import ModelArch
from ...base.errors import (
    DownloadError,
    HeadraceError,
    ModelFileError,
    ModelNotFound,
    UnsupportedModel,
)
from ...base.layout import Layout
from ...base.modelfiles import ModelFiles
from ...base.names import nearest
from ...loader import open_model
from ...loader.catalog import CATALOG
from ...loader.gguf import GgufFile
from ...loader.hub_model import CONFIG, fetch_hub, split_hub_name
from ...loader.jsonfile import read_json
from ...roofline.config import read_config
from ...roofline.counts import Case
from ...roofline.gguf import Stored, read_gguf
from ...roofline.hardware import Hardware
from ...roofline.known import KNOWN, known
from ...roofline.routing import typical_skew
from ...roofline.weights import WeightBytes, parse_format
from ..loop.prediction import serving_types, stored_weights

VARIANT = re.compile(r"-(instruct|chat|it|hf|fp8|bf16)\b.*")
"""End of a repository's name that no name of an architecture has."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model as numbers."""

    arch: ModelArch
    weights: WeightBytes
    """Bytes by role, from the files or from the published formats."""
    source: str
    files: ModelFiles | None = None
    """None: there is only a config."""


def describe_model(name: str) -> Described:
    """Describe the model of a name: a path, a name of the catalog, a known architecture, a hub id.

    Raises what `open_model` raises; the error for an unknown name lists all known ones.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return _of_config(path)
    if path.is_dir() and (path / "config.json").is_file() and not _has_weights(path):
        return _of_config(path / "config.json")
    if name.lower() in KNOWN and not path.exists():
        return Described(*known(name.lower()), "known architecture")
    hub = split_hub_name(name)
    if hub is not None and not path.exists() and name not in CATALOG:
        try:
            return _of_hub(name, *hub)
        except DownloadError as error:
            published = VARIANT.sub("", hub[0].rpartition("/")[2].lower())
            if near := nearest(published, KNOWN):
                raise DownloadError(f"{error.message}{near} (known without a file)") from None
            raise
    if path.is_file() and path.suffix == ".gguf":
        return _of_gguf(path, name)
    try:
        files = open_model(name)
    except UnsupportedModel:
        if path.is_dir() and (path / "config.json").is_file():
            return _of_config(path / "config.json")
        raise
    except ModelNotFound as error:
        near = nearest(name.lower(), [*KNOWN, *CATALOG])
        more = near or f"; known without a file: {', '.join(KNOWN)}; or a config.json"
        said = error.message.partition("; did you mean")[0]
        raise ModelNotFound(said + more, param="model") from None
    return Described(files.arch, stored_weights(files), "file", files)


def make_case(
    model: str | Described,
    device: Hardware,
    format: str | None = None,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    layout: Layout | None = None,
    skew: float | None = None,
) -> Case:
    """Make the case of a model on a device; missing options are as stored, or a server's
    defaults."""
    found = describe_model(model) if isinstance(model, str) else model
    wide = kv_wide = "float32" if device.kind == "cpu" else "bfloat16"
    if device.kind == "cpu" and found.files is not None:
        wide, kv_wide = serving_types(found.files)
    if dtype == "auto":
        dtype, kv_dtype = wide, kv_wide if kv_dtype == "auto" else kv_dtype
    case = Case(
        found.arch,
        found.weights if format is None else parse_format(format),
        dtype,
        dtype if kv_dtype == "auto" else kv_dtype,
        layout or Layout(),
        typical_skew(found.arch),
    )
    return case if skew is None else replace(case, skew=skew)


def _of_config(path: Path) -> Described:
    arch, weights = read_config(read_json(path))
    return Described(arch, weights, "config.json")


def _of_gguf(path: Path, name: str) -> Described:
    """Describe a file that can be served, or only the header of another: cut off, in parts, not
    served."""
    first = GgufFile(path, complete=False)
    files = _parts(path, first.metadata.get("split.count"))
    if len(files) == 1 and first.complete:
        with suppress(UnsupportedModel):
            served = open_model(name)
            return Described(served.arch, stored_weights(served), "file", served)
    headers = [first, *(GgufFile(file, complete=False) for file in files[1:])]
    tensors = {
        tensor.name: Stored(tensor.type.name, math.prod(tensor.shape[:-1]), tensor.nbytes)
        for header in headers
        for tensor in header.tensors.values()
    }
    return Described(*read_gguf(first.metadata, tensors), "GGUF header")


def _parts(path: Path, count: object) -> list[Path]:
    """Return all files of a model in parts, given the first one."""
    if not isinstance(count, int) or count < 2:
        return [path]
    found = re.fullmatch(r"(.+)-00001-of-(\d{5}).gguf", path.name)
    if found is None or int(found[2]) != count:
        raise ModelFileError(
            f"{path.name} is one part of {count}; name the first, …-00001-of-{count:05}.gguf",
            param="model",
        )
    return [path.with_name(f"{found[1]}-{n:05}-of-{found[2]}.gguf") for n in range(1, count + 1)]


def _of_hub(name: str, repo: str, selector: str) -> Described:
    """Describe a repository by its files if its weights are here, else fetch only its config."""
    try:
        files = open_model(name, offline=True)
        return Described(files.arch, stored_weights(files), "file", files)
    except (DownloadError, UnsupportedModel):
        pass
    if selector:
        raise HeadraceError(
            f"{name} is not in the cache; fetch it with `headrace models pull {name}`, or name "
            f"{repo} alone, of which the config is enough",
            param="model",
        )
    return _of_config(fetch_hub(repo, CONFIG) / CONFIG)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))
