"""Search for a folder's safetensors files and their tensors. Pickled weights are never read."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ModelFileError
from .jsonfile import read_json
from .safetensors_file import StoredTensor, read_header

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_shards(folder: Path, stem: str = "model") -> tuple[Path, ...]:
    """List the safetensors files of a model folder, sorted by name; `stem`: beginning of the name
    of a single file and of the index."""
    single, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if (folder / index).is_file():
        mapping = read_json(folder / index).get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelFileError(f"{index}: weight_map must name the file of each tensor")
        names = {str(value) for value in mapping.values()}
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelFileError(
                    f"{index}: {name!r:.100} is not the name of a safetensors file of this folder"
                )
            if not (folder / name).is_file():
                raise ModelFileError(f"{folder}: {name} is missing, which {index} names")
        return tuple(folder / name for name in sorted(names))
    if (folder / single).is_file():
        return (folder / single,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise ModelFileError(f"{folder}: {len(found)} safetensors files, but no {index}")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ModelFileError(
            f"{folder}: its weights are pickled ({pickles[0]}); Headrace never reads pickle, "
            "because loading one runs code that the file brings along: convert them where you "
            "trust the file (safetensors.torch.save_file), or take a safetensors or GGUF release"
        )
    raise ModelFileError(f"{folder}: no safetensors file in it")


def read_headers(shards: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Return name → tensor, over all shards, in the order of their bytes. Raises
    `ModelFileError`."""
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_header(shard).items():
            if name in tensors:
                raise ModelFileError(
                    f"tensor {name!r:.100} is in {tensors[name].shard.name} and in {shard.name}"
                )
            tensors[name] = tensor
    return tensors
