"""The weights of a model, one by one in file order, under their canonical names.

Arrays of a GGUF are views of a mapping wherever the file's own order can be kept, so memory grows
only as pages are read. Dense tensors of safetensors are read when they are taken.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from ..base.modelfiles import ModelFiles
from ..models.registry import describe
from .diffusers_folder import FORMAT, denoiser_weights
from .gguf_model import gguf_of
from .weight_source import Named
from .weights_gguf import from_gguf
from .weights_safetensors import from_safetensors
from .whisper import whisper_of, whisper_weights

Loaded = Named


def load_weights(
    files: ModelFiles, only: Container[str] | None = None
) -> Iterator[tuple[str, Loaded]]:
    """Yield (canonical name, weight) of every tensor of the model; `only`: of these names.

    Raises `ModelFileError` before the first one if a tensor is missing, unknown, or not of the
    architecture's shape; `UnsupportedModel` if its type is not read.
    """
    if files.format == "gguf":
        found: Iterator[tuple[str, Loaded]] = from_gguf(gguf_of(files), files.arch, only)
    elif (whisper := whisper_of(files)) is not None:
        found = whisper_weights(whisper, describe(files.arch))
    elif files.format == FORMAT:
        found = denoiser_weights(files)
    else:
        found = from_safetensors(files)
    return found if only is None else (pair for pair in found if pair[0] in only)
