"""`headrace convert`: a model's numbers in another format, without loss.

Every matrix is read through the one loader. It gets codes of the new format with the same numbers,
or is reported with its error. The result is opened again, and each of its weights is compared with
the original's, number by number.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..base.config import EngineOptions
from ..base.errors import InvalidRequest, OptionError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..bench.accuracy import stdlib_corpus
from ..kernels.arrays import dtype_name
from ..kernels.weights import BlockWeight
from ..loader.gguf import DEFAULT_ALIGNMENT
from ..loader.gguf_model import gguf_of
from ..loader.jsonfile import read_json
from ..loader.open import open_local, open_model
from ..loader.partial import check_space, file_sha256
from ..loader.progress import Progress, Silent
from ..loader.quantised_safetensors import QuantisedMatrices, picked
from ..loader.safetensors_file import SIZES
from ..loader.sealed import SHARD, seal
from ..loader.shards import INDEX, read_headers
from ..loader.weight_source import read_weight
from ..loader.weights import load_weights
from ..loader.weights_gguf import norm_offset, permuted_rows
from ..models.registry import FAMILIES
from ..quant.ggml_types import BY_NAME, DENSE
from ..quant.schemes import scheme_of
from ..quantise.coded import Coding
from ..text.load import load_tokenizer
from . import to_compressed, to_gguf
from .counterpart import folder_files, metadata_of, tensor_names
from .moves import Host, Move, compared
from .quantise import named_after
from .to_gguf import FileTensor

PLAIN = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
KEEP = ("gguf", "safetensors")
"""Targets that change only the kind of file: dense numbers keep their type, codes become F32."""
TARGETS = (
    *KEEP, *PLAIN, *(one for one in to_gguf.TARGETS if one != to_gguf.MIX), *to_compressed.TARGETS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConvertWish:
    """Model, target, and whether losses are allowed."""

    engine: EngineOptions
    to: str
    out: Path | None = None
    """Place of the result; None: the current folder, named after both."""
    lossy: bool = False


class Converting:
    """One conversion, planned; `run` does it. Raises the errors of a wrong model or target."""

    def __init__(self, wish: ConvertWish, progress: Progress | None = None) -> None:
        self.wish, self._progress = wish, progress or Silent()
        engine = wish.engine
        self.files = open_model(
            engine.model, cache_dir=engine.cache_dir, offline=engine.offline, progress=progress
        )
        files, to = self.files, wish.to
        if files.format not in KEEP:
            raise UnsupportedModel(
                f"{files.name} is no folder of safetensors and no GGUF; these are converted",
                param="model",
            )
        self.ending = files.format
        if to in (*to_gguf.TARGETS, "gguf"):
            self.ending = "gguf"
        elif to in (*to_compressed.TARGETS, "safetensors"):
            self.ending = "safetensors"
        self.across = self.ending != files.format
        if to in KEEP and not self.across:
            raise InvalidRequest(
                f"the model is of {to} already; to must be another kind of file, or a format of "
                "its numbers",
                param="to",
            )
        single = self.ending == "gguf"
        self.out = wish.out or Path(named_after(files.name, to, single=single))
        self._work = self.out.with_name(f"{self.out.name}.convert")
        """Folder of the work in progress."""
        for one in (self.out, self._work):
            if os.path.lexists(one):
                raise InvalidRequest(
                    f"{one} exists; remove it, or choose another with --out", param="out"
                )
        if files.path.is_dir() and files.path.resolve() in self.out.resolve().parents:
            raise InvalidRequest(
                f"{self.out} is inside the model; choose another with --out", param="out"
            )
        if single and self.out.suffix != ".gguf":
            raise InvalidRequest(f"{self.out}: a GGUF's name must end in .gguf", param="out")
        self.coding: Coding | None = None
        self._small: dict[str, bytes] = {}
        self._entries = b"", 0
        if self.across:
            tensor_names(files.arch)  # Raises if the other format divides tensors differently.
        if self.across and single:
            self._entries = metadata_of(files)
        elif self.across:
            self._small = folder_files(files, _DTYPES.get(to, "float32"))
        self.shards = self._planned()
        if not self.across and all(one.stays for one in self.moves):
            raise InvalidRequest(
                f"every matrix is {to} already; there is nothing to do", param="to"
            )

    def _planned(self) -> dict[str, list[Move]]:
        """Return the tensors of each file of the result."""
        to = self.wish.to
        if self.ending == "gguf":
            found = _across_gguf(self.files) if self.across else _of_gguf(self.files)
            return {self.out.name: [_for_gguf(one, to, across=self.across) for one in found]}
        shards = (
            {"model.safetensors": [*_across_folder(self.files)]}
            if self.across
            else _of_folder(self.files)
        )
        if to in to_compressed.TARGETS:
            self.coding = to_compressed.TARGETS[to]
            if self.coding.strategy == "group":
                widths = {
                    one.shape[1] for moves in shards.values() for one in moves if _is_linear(one)
                }
                wished = self.coding.group or max(to_compressed.GROUPS)
                group = to_compressed.common_group(widths or {wished}, wished)
                self.coding = replace(self.coding, group=group)
        return {
            name: [_for_folder(one, to, self.coding) for one in moves]
            for name, moves in shards.items()
        }

    @property
    def moves(self) -> Iterator[Move]:
        for one in self.shards.values():
            yield from one

    def run(self, *, dry: bool = False) -> dict[str, Any]:
        """Move every tensor; publish the result if nothing is lost, or if loss is allowed. Returns
        the report; `dry`: nothing is written."""
        total = sum(int(np.prod(one.shape)) for one in self.moves)
        self._progress.start(total, "converting", share=True)
        work = self._work
        try:
            if dry:
                for one in self.moves:
                    one.data()
                    self._progress.advance(int(np.prod(one.shape)))
                return self._report({}, None)
            check_space(self.out.absolute(), sum(one.size for one in self.moves), "out")
            work.mkdir()  # Outside: what another has made there is not ours to remove.
            try:
                return self._published(work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise OptionError(f"{work} cannot be written: {error.strerror}", param="out") from None
        finally:
            self._progress.done()

    def _published(self, work: Path) -> dict[str, Any]:
        for name, moves in self.shards.items():
            with (work / name).open("w+b") as out:
                self._write(out, moves)
                if self.ending != "gguf":
                    seal(out, SHARD)
                out.flush()
                os.fsync(out.fileno())
        if self.ending != "gguf":
            self._write_small(work)
        lost = any(one.changed for one in self.moves)
        if lost and not self.wish.lossy:
            return self._report({}, None)
        single = work / self.out.name if self.ending == "gguf" else work
        opened = open_local(single, self.files.name)
        _check_kept(self.files, opened)
        proof = compared(self.files, opened)
        if proof["changed"] and not lost:
            raise UnsupportedModel(
                f"{proof['changed']:,} numbers would be read otherwise than they were written; "
                "nothing was published",
                param="to",
            )
        names = sorted(path.relative_to(work).as_posix() for path in work.rglob("*.*"))
        report = self._report({name: file_sha256(work / name) for name in names}, proof)
        os.replace(single, self.out)
        return report

    def _write(self, out: BinaryIO, moves: list[Move]) -> None:
        def data(one: Move) -> list[Host]:
            found = one.data()
            self._progress.advance(int(np.prod(one.shape)))
            return found

        if self.ending != "gguf":
            to_compressed.write_header(out, (part for one in moves for part in one.parts))
            for one in moves:
                for array in data(one):
                    out.write(np.ascontiguousarray(array).data)
            return
        align = DEFAULT_ALIGNMENT
        entries = self._entries
        if not self.across:
            file = gguf_of(self.files)
            align = file.metadata.get("general.alignment", align)
            entries = to_gguf.entries_of(file, self._file_type())
        tensors = [
            FileTensor(one.name, one.shape, BY_NAME[one.kind], partial(data, one)) for one in moves
        ]
        to_gguf.write_tensors(out, *entries, align, tensors)

    def _file_type(self) -> int:
        to = self.wish.to
        return FILE_TYPES[PLAIN[to]] if to in PLAIN else to_gguf.TARGETS[to].number

    def _write_small(self, work: Path) -> None:
        """Write all other files of a folder."""
        if self.across:
            for name, data in self._small.items():
                (work / name).write_bytes(data)
        else:
            folder = self.files.path
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(folder).as_posix()
                if path.is_file() and path.suffix != ".safetensors" and not name.startswith("."):
                    (work / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, work / name)
            if (work / INDEX).exists():
                parts = {
                    name: [part for one in moves for part in one.parts]
                    for name, moves in self.shards.items()
                }
                (work / INDEX).write_bytes(to_compressed.index_of(parts))
        config = read_json(work / "config.json")
        if self.wish.to in PLAIN:
            for key in ("torch_dtype", "dtype"):
                if key in config:
                    config[key] = _DTYPES[self.wish.to]
        (work / "config.json").write_bytes(to_compressed.config_of(config, self.coding))

    def _report(self, files: dict[str, str], proof: dict[str, int] | None) -> dict[str, Any]:
        moved = [one.said() for one in self.moves if not one.stays]
        return {
            "model": self.files.name, "to": self.wish.to,
            "lossless": all(one["lossless"] for one in moved), "moved": len(moved),
            "stay": sum(one.stays for one in self.moves), "proof": proof, "files": files,
            "tensors": moved,
        }  # fmt: skip


_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def _of_gguf(files: ModelFiles) -> Iterator[Move]:
    """Yield the tensors of a GGUF as they are."""
    file = gguf_of(files)
    for info in file.tensors.values():

        def read(name: str = info.name) -> Host:
            return file.view(name)

        yield Move(info.name, info.shape, info.type.name, info.type.name, read)


def _for_gguf(move: Move, to: str, *, across: bool) -> Move:
    """Choose a tensor's type in a GGUF."""
    name, shape, was = move.name, move.shape, move.was
    kind = was if was in BY_NAME else "F32"
    if across and len(shape) < 2:
        kind = "F32"  # As in llama.cpp's files.
    if to in (*PLAIN, *to_gguf.TARGETS) and to_gguf.is_matrix(name, shape):
        types: tuple[str, ...] = (PLAIN[to],) if to in PLAIN else to_gguf.TARGETS[to].inner
        if to in PLAIN or name not in to_gguf.ENDS:
            kind = next((one for one in types if shape[-1] % BY_NAME[one].block == 0), kind)
    read = move.read
    if kind == was or was in DENSE or was not in BY_NAME:
        return replace(move, kind=kind)

    def blocks() -> BlockWeight:
        data = read()
        rows = data.reshape(-1, data.shape[-1])
        return BlockWeight(was, rows, (len(rows), shape[-1]))

    return replace(move, kind=kind, read=blocks)


def _across_gguf(files: ModelFiles) -> Iterator[Move]:
    """Yield the tensors of a folder as a GGUF names and orders them."""
    arch, names = files.arch, tensor_names(files.arch)
    permuted = FAMILIES[arch.family].names.permuted
    for canonical, weight in load_weights(files):

        def read(weight: Any = weight, canonical: str = canonical) -> Any:
            found: Any = read_weight(weight)
            if permuted and (".q_proj." in canonical or ".k_proj." in canonical):
                heads = arch.heads if ".q_proj." in canonical else arch.kv_heads
                order = permuted_rows(heads, arch.head_dim)
                array = isinstance(found, np.ndarray)
                found = found[order] if array else picked(found, order, canonical)
            return found

        kind, shape = _kind_of(weight), tuple(weight.shape)
        yield Move(names[canonical], shape, kind, "", read, offset=norm_offset(canonical, arch))


def _of_folder(files: ModelFiles) -> dict[str, list[Move]]:
    """Return the tensors of each shard of a folder; codes are grouped with their scales."""
    stored = read_headers(files.weights)
    scheme = scheme_of(read_json(files.path / "config.json"))
    quantised = None if scheme is None else QuantisedMatrices(scheme, stored)
    found: dict[str, list[Move]] = {path.name: [] for path in files.weights}
    for name, one in stored.items():
        matrix = None if quantised is None else quantised.find(name)
        if matrix is None and quantised is not None and name in quantised.members:
            continue
        shard = found[one.shard.relative_to(files.path).as_posix()]
        if matrix is not None:
            shard.append(
                Move(f"{matrix.name}.weight", matrix.shape, matrix.host_dtype, "", matrix.read)
            )
        else:
            shard.append(Move(name, one.shape, one.dtype, one.dtype, one.read))
    return found


def _across_folder(files: ModelFiles) -> Iterator[Move]:
    """Yield the tensors of a GGUF as a folder names and orders them."""
    for name, weight in load_weights(files):
        yield Move(name, tuple(weight.shape), _kind_of(weight), "", partial(read_weight, weight))


def _is_linear(move: Move) -> bool:
    known = move.was in DENSE or move.was not in _STORED_TYPES
    return len(move.shape) == 2 and known and to_compressed.is_linear(move.name)


def _for_folder(move: Move, to: str, coding: Coding | None) -> Move:
    """Choose a tensor's type in a folder."""
    kind = move.was if move.was in _STORED_TYPES else "F32"
    if coding is not None and _is_linear(move):
        return replace(move, kind=coding.format, coding=coding)
    if to in PLAIN and len(move.shape) > 1 and (move.was in DENSE or move.was not in _STORED_TYPES):
        kind = PLAIN[to]
    return replace(move, kind=kind)


_STORED_TYPES = frozenset(SIZES)


def _kind_of(weight: Any) -> str:
    """Return the type of a loaded weight as named in files."""
    if isinstance(weight, BlockWeight):
        return weight.kind
    found: str = dtype_name(weight) if isinstance(weight, np.ndarray) else weight.host_dtype
    return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(found, found)


def _check_kept(was: ModelFiles, now: ModelFiles) -> None:
    """Raise `UnsupportedModel` unless everything except the weights is read back unchanged."""
    names = ["arch", "chat_template", "named_templates", "bos_id", "add_bos", "generation"]
    lost = [name for name in names if getattr(was, name) != getattr(now, name)]
    lost += ["eos_ids"] * ({*was.eos_ids} != {*now.eos_ids})
    if was.format != now.format:
        text = stdlib_corpus()[0][:_SAMPLE] + "".join(was.special.values()) + _ODD
        both = [load_tokenizer(one.tokenizer, one.arch.vocab_size) for one in (was, now)]
        same = {tuple(one.encode(text, add_bos=True)) for one in both}
        marked = {tuple(one.encode_with_specials(text)) for one in both}
        lost += ["tokenizer"] * (max(len(same), len(marked)) > 1)
    if lost:
        raise UnsupportedModel(
            f"a {was.arch.family} model's {', '.join(lost)} would be read otherwise from the other "
            "kind of file; the same kind of file is possible",
            param="to",
        )


_SAMPLE = 20_000
"""Characters that both tokenizers must turn into the same ids."""
_ODD = "\tnaïve 水 流れる 🙂🚀  1234567 \r\n\n x"
