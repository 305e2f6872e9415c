"""Checks of a model's files before one of them is read as a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.config import EngineOptions
from ..base.errors import ModelFileError
from ..loader.partial import file_sha256
from .source import WEIGHTS, Source, model_folder
from .stage import Outcome, Recipe, Result, Work
from .store import Descriptor

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

    from ..bench.reference import Reference

FILE_TYPE = "application/vnd.headrace.model.file"
OPEN_LICENCES = ("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "isc", "cc0-1.0", "cc-by-4.0")
"""Licences that ask for nothing but a notice, by SPDX's names."""
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz", ".h5")
"""Endings of files that may run code when read, or of formats that may contain such files."""


@dataclass(frozen=True, slots=True)
class Place:
    """Inputs of a model's stages that do not change any result."""

    source: Source
    engine: EngineOptions
    """Folder of repacked weights, and whether the network may be used."""
    key: CryptoSigner | None = None
    reference: Reference | None = None
    lock: str | None = None
    progress: Any = None
    advisories: Any = None
    """The user's `Snapshot`, if any."""
    text: str | None = None
    """Name of the calibration text for quantisation: see `quantise.text_of`."""


def need(work: Work, name: str) -> Result:
    """Return the result of a stage that this one needs, of any model."""
    return next(one for key, one in work.inputs.items() if key.rpartition("/")[2] == name)


def model_files(work: Work) -> Mapping[str, Descriptor]:
    """Return the files to measure and sign, by path: the quantised ones if a stage made them,
    otherwise the fetched ones."""
    made = [one for key, one in work.inputs.items() if key.rpartition("/")[2] == "quantise"]
    return (made[0] if made else need(work, "fetch")).outputs


def undecided(reason: str, **figures: Any) -> Result:
    """Return the result of a gate that was not evaluated."""
    return Result(outcome=Outcome.NOT_EVALUATED, reason=reason, figures=figures)


def fetch(work: Work) -> Result:
    """Put the model's files into the store, each with the digest promised by its source."""
    place: Place = work.place
    folder = model_folder(place.engine, place.progress)
    outputs = {}
    for one in place.source.files:
        kept = work.store.put_file(folder / one.path, FILE_TYPE)
        if kept.digest != f"sha256:{one.sha256}":
            raise ModelFileError(
                f"{folder / one.path}: its SHA-256 is {kept.digest[7:23]}…, not {one.sha256[:16]}…"
            )
        outputs[one.path] = kept
    return Result(outputs, figures={"bytes": sum(one.size for one in outputs.values())})


def verify(work: Work) -> Result:
    """Check that the bytes in the store have the digests that the catalog pins."""
    files = need(work, "fetch").outputs
    expected = {path: digest for path, digest, _size in work.stage.parameters["files"]}
    wrong = [
        path
        for path, one in files.items()
        if f"sha256:{file_sha256(work.store.blob(one.digest))}" != expected.get(path)
    ]
    if wrong or set(files) != set(expected):
        return Result(outcome=Outcome.FAILED, reason=f"other bytes: {', '.join(wrong) or 'files'}")
    if not work.stage.parameters["pinned"]:
        return undecided("no digest is pinned for this model; those of today are recorded")
    return Result(reason=f"{len(files)} files have the digests that the catalog pins")


def check_format(work: Work) -> Result:
    """Check that the weights are in formats that hold numbers and no code."""
    files = need(work, "fetch").outputs
    pickled = [path for path in files if path.lower().endswith(PICKLED)]
    for path, one in files.items():
        with work.store.blob(one.digest).open("rb") as file:
            head = file.read(4)
        zipped = head == b"PK\x03\x04"
        if path not in pickled and (zipped or (head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5")):
            pickled.append(path)
    if pickled:
        return Result(
            outcome=Outcome.FAILED,
            reason=f"{', '.join(pickled[:3])}: may be a pickle, which runs code when it is read",
        )
    if not any(path.endswith(WEIGHTS) for path in files):
        return Result(outcome=Outcome.FAILED, reason=f"no weights ({' or '.join(WEIGHTS)})")
    return Result(reason=f"{len(files)} files, none of which may hold a pickle")


def check_licence(work: Work) -> Result:
    """Check that the licence is an accepted one."""
    licence, accepted = work.stage.parameters["licence"], work.stage.parameters["accepted"]
    if not licence:
        return undecided("the model names no licence")
    if licence.lower() in {*OPEN_LICENCES, *(one.lower() for one in accepted)}:
        return Result(reason=licence)
    return undecided(f"{licence}: read it, then --accept-licences {licence!r}")


_CODE = ("factory/checks.py",)
CHECKS = {
    "fetch": Recipe(fetch),
    "verify": Recipe(verify, code=_CODE),
    "format": Recipe(check_format, code=_CODE),
    "licence": Recipe(check_licence, code=_CODE),
}
