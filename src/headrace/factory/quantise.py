"""The stage that quantises a model's dense weights.

Its outputs replace the fetched files: they are measured, listed, signed and published in their
place. The accuracy gate compares them with the original model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from ..base.errors import UnsupportedModel
from ..kernels.cpu.encode import encoder
from ..loader.progress import Silent
from ..loader.shards import INDEX
from . import to_compressed, to_gguf
from .checks import FILE_TYPE, Place, need
from .stage import Recipe, Result, Work
from .store import Descriptor, Store

TARGETS = (*to_gguf.TARGETS, *to_compressed.TARGETS)
CONFIG = "config.json"


def quantise(work: Work) -> Result:
    """Rewrite the weights in fewer bits. Raises `ModelFileError`; `UnsupportedModel` if nothing is
    dense, or if the target belongs to the other format."""
    place: Place = work.place
    to, files = work.stage.parameters["to"], need(work, "fetch").outputs
    ending = ".gguf" if to in to_gguf.TARGETS else ".safetensors"
    weights = {path: one for path, one in files.items() if path.endswith(ending)}
    if not weights:
        made = " or ".join(to_gguf.TARGETS if ending == ".safetensors" else to_compressed.TARGETS)
        raise UnsupportedModel(
            f"{to} is made of {ending} files, and the model has none; {made} may be made of it",
            param="quantise_to",
        )
    progress = place.progress or Silent()
    tally = to_gguf.Tally(progress.advance)
    progress.start(sum(one.size for one in weights.values()), f"quantising to {to}")
    outputs = dict(files)
    try:
        if ending == ".gguf":
            encode = encoder()
            for path, one in weights.items():
                with _appearing(work.store) as out:
                    to_gguf.write_gguf(work.store.blob(one.digest), out, to, encode, tally)
                    outputs[_named(path, to)] = _kept(work.store, out)
                del outputs[path]
        else:
            _compress(work, weights, outputs, to, tally)
    finally:
        progress.done()
    if not tally.matrices:
        raise UnsupportedModel(
            "no matrix of the model is dense: to quantise it a second time would add an error to "
            "the first; take a release in F32, F16 or BF16",
            param="quantise_to",
        )
    before, after = (sum(one.size for one in each.values()) for each in (files, outputs))
    kinds = sorted(tally.kinds)
    figures = {"to": to, "kinds": kinds, "matrices": tally.matrices, "bytes": after, "was": before}
    reason = f"{tally.matrices} matrices as {', '.join(kinds)}: {after / before:.0%} of the bytes"
    return Result(outputs, reason=reason, figures=figures)


def _compress(
    work: Work, weights: dict[str, Descriptor], outputs: dict[str, Descriptor], to: str,
    tally: to_gguf.Tally,
) -> None:  # fmt: skip
    folder = to_compressed.Folder(
        {path: work.store.blob(one.digest) for path, one in weights.items()}, to, encoder()
    )
    for path in weights:
        with _appearing(work.store) as out:
            folder.write(path, out, tally)
            outputs[path] = _kept(work.store, out)
    if CONFIG not in outputs:
        raise UnsupportedModel(f"the model has no {CONFIG}", param="quantise_to")
    config = folder.config(work.store.blob(outputs[CONFIG].digest))
    outputs[CONFIG] = work.store.put(config, FILE_TYPE)
    if INDEX in outputs:
        outputs[INDEX] = work.store.put(folder.index(), FILE_TYPE)


def _named(path: str, to: str) -> str:
    """Return the file's name with its new type in place of `-f16` and the like."""
    pure = PurePosixPath(path)
    stem = pure.stem
    for was in ("f32", "f16", "bf16"):
        for spelled in (was, was.upper()):
            stem = stem.removesuffix(f"-{spelled}").removesuffix(f".{spelled}")
    return str(pure.with_name(f"{stem}-{to}.gguf"))


@contextmanager
def _appearing(store: Store) -> Iterator[BinaryIO]:
    """Open a temporary file of the store, not yet visible."""
    with NamedTemporaryFile(dir=store.root / "tmp") as file:
        yield file  # type: ignore[misc]


def _kept(store: Store, file: BinaryIO) -> Descriptor:
    file.flush()
    file.seek(0)
    return store.put_stream(file, FILE_TYPE)


_CODE = (
    *("factory/quantise.py", "factory/to_gguf.py", "factory/to_compressed.py"),
    *("kernels/cpu", "kernels/cpu/csrc/encode.cpp"),
)
QUANTISING = {"quantise": Recipe(quantise, code=_CODE, tools=("numpy",))}
