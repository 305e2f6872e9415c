"""Finds and checks the safetensors files of a folder: which, and what their headers say.

The `safetensors` library maps each file and refuses a header that lies about ranges, overlaps,
dtypes or shapes; its refusals become `ModelFileError` here. Pickled weights are never read.
Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from ..base.errors import ModelFileError
from .jsonfile import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "I8", "U8", "I32", "I64")


class StoredTensor(NamedTuple):
    """What a header says of one tensor."""

    shard: Path
    dtype: str
    shape: tuple[int, ...]


def find_shards(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a model folder, sorted by name."""
    if (folder / INDEX).is_file():
        mapping = read_json(folder / INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelFileError(f"{INDEX}: weight_map must name the file of each tensor")
        names = {str(value) for value in mapping.values()}
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelFileError(
                    f"{INDEX}: {name!r:.100} is not the name of a safetensors file of this folder"
                )
            if not (folder / name).is_file():
                raise ModelFileError(f"{folder}: {name} is missing, which {INDEX} names")
        return tuple(folder / name for name in sorted(names))
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise ModelFileError(f"{folder}: {len(found)} safetensors files, but no {INDEX}")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ModelFileError(
            f"{folder}: its weights are pickled ({pickles[0]}). Headrace never reads pickle, "
            "because loading one runs code that the file brings along. Convert them where you "
            "trust the file (safetensors.torch.save_file), or take a safetensors or GGUF release"
        )
    raise ModelFileError(f"{folder}: no safetensors file in it")


def read_headers(shards: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Name → what its header says, over all shards."""
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in tensors:
                        raise ModelFileError(
                            f"tensor {name!r:.100} is in {tensors[name].shard.name} and in "
                            f"{shard.name}"
                        )
                    header = file.get_slice(name)
                    shape, dtype = tuple(header.get_shape()), header.get_dtype()
                    if dtype not in DTYPES:
                        raise ModelFileError(
                            f"{shard.name}: tensor {name!r:.100} is {dtype}; read are "
                            f"{', '.join(DTYPES)}"
                        )
                    tensors[name] = StoredTensor(shard, dtype, shape)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{shard.name}: not a sound safetensors file: {error}") from None
    return tensors
