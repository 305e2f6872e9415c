"""The stage that quantises a model's dense weights, and the same work for `headrace quantise`.

Its outputs replace the fetched files: they are measured, listed, signed and published in their
place. The accuracy gate compares them with the original model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..bench.accuracy import stdlib_corpus, windows
from ..loader.gguf import GgufFile
from ..loader.gguf_model import gguf_of
from ..loader.jsonfile import read_json
from ..loader.open import open_local
from ..loader.progress import Progress
from ..loader.shards import INDEX
from ..models.registry import describe
from ..quantise.folding import Fold, folds, vector_factors
from ..quantise.imatrix import Importance, fits, statistics_of
from ..quantise.target import Quantisable, Stats
from ..quantise.text import Text, TextSample, read_text, sample
from ..quantise.work import WorkFolder
from . import to_compressed, to_gguf
from .checks import FILE_TYPE, Place, need
from .key import canonical, code_digest, digest_of
from .source import model_path
from .stage import Recipe, Result, Work
from .store import Descriptor, Store

TARGETS = (*to_gguf.TARGETS, *to_compressed.TARGETS)
CONFIG = "config.json"
BUILT_IN, NO_TEXT = "built-in", "none"
"""Values of the option `text` instead of a file."""
HELD_OUT = 1500, 8
"""Characters and number of windows at the beginning of the built-in text that only the accuracy
gate reads."""
Calibration = tuple[ModelFiles, TextSample] | Mapping[str, Importance] | None
"""The opened model and a calibration text; an importance matrix; or None."""
Writing = Callable[[str, Callable[[BinaryIO], None]], None]
"""Function that makes a file of this name, filled by the given function."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """A model in fewer bits."""

    names: Mapping[str, str]
    """New name of each replaced file, by the old one."""
    single: bool
    """Whether the model is a single file, a GGUF."""
    tensors: list[dict[str, Any]]
    """Report of each tensor: its type, the rows of text that its input had, its relative error on
    the text."""
    dense: Sequence[str] = ()
    """Matrices that stay dense: their rows are not whole blocks."""

    def figures(self) -> dict[str, Any]:
        """Return a summary as plain JSON."""
        reached = [one for one in self.tensors if one["rows"]]
        few = [name for one in self.tensors for name in one.get("few", ())]
        said: dict[str, Any] = {
            "kinds": sorted({one["kind"] for one in self.tensors}),
            "matrices": len(self.tensors),
        }
        said |= {"dense": [*self.dense]} if self.dense else {}
        if reached:
            unseen = [one["tensor"] for one in self.tensors if not one["rows"]]
            said |= {"calibrated": len(reached), "without_text": unseen}
            said |= {"few_rows": few} if few else {}
        return said


def text_of(named: str | None, held_out: int = HELD_OUT[1]) -> Text | None:
    """Return the text that an option names: a file, `built-in` or `none`.

    `held_out`: windows at the beginning of the built-in text to leave to the gate, `HELD_OUT` at
    least. Raises `InvalidRequest`.
    """
    if named in (None, NO_TEXT):
        return None
    if named != BUILT_IN:
        return read_text(Path(str(named)))
    whole, name = stdlib_corpus()
    characters, least = HELD_OUT
    rest = whole[sum(map(len, windows(whole, characters, max(least, held_out)))) :]
    return Text(name, "PSF-2.0", (rest,), digest_of(rest.encode()).removeprefix("sha256:"))


def recipe_of(to: str, text: Text | None, tokens: int, budget: str | None = None) -> dict[str, str]:
    """Return the digests that identify a work folder's run, except the model's."""
    about = {"to": to, "tokens": tokens, "code": code_digest(_CODE)}
    parameters = canonical(about if budget is None else {**about, "budget": budget})
    return {"text": "none" if text is None else text.digest, "recipe": digest_of(parameters)}


def quantise_files(
    sources: Mapping[str, Path],
    to: str,
    chosen: Calibration,
    folder: WorkFolder,
    write: Writing,
    progress: Progress | None = None,
    mix: Mapping[str, str] | None = None,
) -> Quantised:
    """Make the files of a model in fewer bits.

    `sources`: its files by path; `chosen`: the calibration text, or an importance matrix; `mix`:
    types of a GGUF's matrices by name, if not the target's. Raises `ModelFileError`;
    `UnsupportedModel` if nothing is dense, or if the target belongs to the other format; and the
    errors of `quantise.calibrate`.
    """
    ending = ".gguf" if to in to_gguf.TARGETS else ".safetensors"
    weights = {name: path for name, path in sources.items() if name.endswith(ending)}
    if not weights:
        made = " or ".join(to_gguf.TARGETS if ending == ".safetensors" else to_compressed.TARGETS)
        raise UnsupportedModel(
            f"{to} is made of {ending} files, and the model has none; {made} may be made of it",
            param="to",
        )
    if ending == ".gguf":
        return _gguf(weights, to, chosen, folder, write, progress, mix)
    return _compressed(weights, sources, to, chosen, folder, write, progress)


def _gguf(
    weights: Mapping[str, Path],
    to: str,
    chosen: Calibration,
    folder: WorkFolder,
    write: Writing,
    progress: Progress | None,
    mix: Mapping[str, str] | None,
) -> Quantised:
    arch = chosen[0].arch if isinstance(chosen, tuple) else None
    files = {name: GgufFile(path) for name, path in weights.items()}
    if isinstance(chosen, tuple) and len(files) == 1:
        files = dict.fromkeys(files, gguf_of(chosen[0]))  # One mapping, whose pages are given back.
    dense = [name for file in files.values() for name in to_gguf.unfit(file)]
    made = {name: to_gguf.tensors(file, arch, to, mix) for name, file in files.items()}
    targets = [one for some in made.values() for one in some]
    tensors = _rounded(targets, chosen, folder, progress)
    data_of = _data_of(targets, folder)
    for name, file in files.items():

        def body(out: BinaryIO, name: str = name, file: GgufFile = file) -> None:
            to_gguf.write_gguf(file, out, to, made[name], data_of)

        write(_named(name, to), body)
    return Quantised({name: _named(name, to) for name in files}, True, tensors, dense)


def _compressed(
    weights: Mapping[str, Path],
    sources: Mapping[str, Path],
    to: str,
    chosen: Calibration,
    folder: WorkFolder,
    write: Writing,
    progress: Progress | None,
) -> Quantised:
    if CONFIG not in sources:
        raise UnsupportedModel(f"the model has no {CONFIG}", param="to")
    was = read_json(sources[CONFIG]).get("quantization_config")
    if was is not None:
        method = was.get("quant_method") if isinstance(was, dict) else was
        raise UnsupportedModel(
            f"the model is quantised already ({CONFIG} says {method!r:.60}): a second "
            "quantisation would add an error to the first and lose how to read it; take a release "
            "in F32, F16 or BF16",
            param="to",
        )
    arch = chosen[0].arch if isinstance(chosen, tuple) else None
    made = to_compressed.Folder(weights, to, arch)
    places = [*folds(describe(arch))] if arch is not None and made.folds else []
    tensors = _rounded(made.tensors, chosen, folder, progress, places)
    made.factors = vector_factors(places, folder)
    data_of = _data_of(made.tensors, folder)
    for name in weights:
        write(name, lambda out, name=name: made.write(name, out, data_of))  # type: ignore[misc]
    config, index = made.config(sources[CONFIG]), made.index()
    write(CONFIG, lambda out: _put(out, config))
    if INDEX in sources:
        write(INDEX, lambda out: _put(out, index))
    replaced = [*weights, CONFIG, *([INDEX] if INDEX in sources else [])]
    return Quantised({name: name for name in replaced}, False, tensors)


def _put(out: BinaryIO, data: bytes) -> None:
    out.write(data)


def _rounded(
    targets: list[Any],
    chosen: Calibration,
    folder: WorkFolder,
    progress: Progress | None,
    places: Sequence[Fold] = (),
) -> list[dict[str, Any]]:
    # Local: torch, which the plan of a build does not need.
    from ..quantise.calibrate import calibrate, without_text

    if not targets:
        raise UnsupportedModel(
            "no matrix of the model is dense: to quantise it a second time would add an error to "
            "the first; take a release in F32, F16 or BF16",
            param="to",
        )
    if chosen is None:
        return without_text(targets, folder)
    if isinstance(chosen, Mapping):
        if not any(fits(chosen.get(one.file_name), one.names, one.width) for one in targets):
            raise InvalidRequest(
                f"the importance matrix is of another model: it has {min(chosen):.100} and the "
                f"like, which fit none of this model's matrices, such as {targets[0].file_name}",
                param="text",
            )

        def known(one: Quantisable) -> Stats:
            return statistics_of(chosen.get(one.file_name), one.names, one.width)

        return without_text(targets, folder, known)
    files, text = chosen
    return calibrate(files, text.windows, targets, folder, progress, places=places)


def importances(made: Quantised, folder: WorkFolder) -> dict[str, Importance]:
    """Return the importance of each tensor that a text has reached, before the folder is gone."""
    found = {}
    for number, one in enumerate(made.tensors):
        if counts := one["counts"]:
            sums = folder.array(f"importance{number}", np.float32).reshape(len(counts), -1)
            found[one["tensor"]] = Importance(sums, np.array(counts, np.int64))
    return found


def _data_of(targets: list[Any], folder: WorkFolder) -> Callable[[Any], Iterator[npt.NDArray[Any]]]:
    number = {one.file_name: at for at, one in enumerate(targets)}

    def read(one: Quantisable) -> Iterator[npt.NDArray[Any]]:
        yield folder.array(f"tensor{number[one.file_name]}", np.uint8)

    return read


def quantise(work: Work) -> Result:
    """Rewrite the weights in fewer bits: the stage; see `quantise_files`."""
    place: Place = work.place
    parameters, files = work.stage.parameters, need(work, "fetch").outputs
    to, store = parameters["to"], work.store
    text = text_of(place.text, parameters["held_out"])
    if (text and text.digest) != parameters["text"]:
        raise InvalidRequest(f"{place.text} has changed since the plan", param="quantise_text")
    chosen: Calibration = None
    if text is not None:
        opened = open_local(model_path(store.checkout(files), list(files)), place.source.name)
        chosen = text.importance or (opened, sample(text, opened, parameters["tokens"]))
    model = digest_of(canonical({name: one.digest for name, one in files.items()}))
    about = {"model": model, **recipe_of(to, text, parameters["tokens"])}
    path = store.root / "tmp" / f"quantise-{digest_of(canonical(about))[7:23]}"
    folder = WorkFolder(path, about)
    outputs = dict(files)
    try:
        sources = {name: store.blob(one.digest) for name, one in files.items()}
        made: dict[str, Descriptor] = {}

        def write(name: str, body: Callable[[BinaryIO], None]) -> None:
            with _appearing(store) as out:
                body(out)
                made[name] = _kept(store, out)

        found = quantise_files(sources, to, chosen, folder, write, place.progress)
        for old in found.names:
            del outputs[old]
        outputs |= made
    except BaseException:
        if not folder.done:
            shutil.rmtree(path)
        raise
    finally:
        folder.close()
    shutil.rmtree(path)
    before, after = (sum(one.size for one in each.values()) for each in (files, outputs))
    figures = {"to": to, **found.figures(), "bytes": after, "was": before}
    if text is not None:
        counts = chosen[1].said() if isinstance(chosen, tuple) else {}
        figures["text"] = {"name": text.name, "licence": text.licence, **counts}
    kinds = ", ".join(figures["kinds"])
    reason = f"{figures['matrices']} matrices as {kinds}: {after / before:.0%} of the bytes"
    return Result(outputs, reason=reason, figures=figures)


def _named(path: str, to: str) -> str:
    """Return the file's name with its new type in place of `-f16` and the like."""
    pure = PurePosixPath(path)
    return str(pure.with_name(f"{typeless(pure.stem)}-{to}.gguf"))


def typeless(stem: str) -> str:
    """Return a file's stem without a dense type at its end."""
    for was in ("f32", "f16", "bf16", "F32", "F16", "BF16"):
        stem = stem.removesuffix(f"-{was}").removesuffix(f".{was}")
    return stem


def named_after(model: str, to: str, *, single: bool) -> str:
    """Return the name of a model's files in a format; `single`: they are one GGUF."""
    stem = typeless(Path(model).name.removesuffix(".gguf"))
    return f"{stem}-{to}.gguf" if single else f"{stem}-{to}"


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
    *("factory/quantise.py", "factory/to_gguf.py", "factory/to_compressed.py", "quantise"),
    *("kernels", "quant", "loader", "models", "layers", "base"),
)
QUANTISING = {"quantise": Recipe(quantise, code=_CODE, tools=("numpy", "torch", "tokenizers"))}
