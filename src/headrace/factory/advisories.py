"""Known vulnerabilities of the packages in a bill of materials, from data supplied by the user.

The data is OSV's: one JSON document per advisory, in a folder or a zip as OSV publishes them. Its
date is that of its newest document. Without data, or with data that is too old, nothing passes.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from ..base.errors import InvalidRequest, file_errors
from ..base.extras import needing
from ..base.foreign import any_json, json_reader
from .checks import need, undecided
from .key import digest_of
from .stage import Outcome, Recipe, Result, Work

with needing("the factory needs", "factory"):
    from packageurl import PackageURL
    from packaging.utils import canonicalize_name
    from packaging.version import InvalidVersion, Version

ECOSYSTEM = "PyPI"
MOST_FILES, MOST_BYTES = 200_000, 4 << 20
"""Limits: documents of a snapshot, and bytes of one document."""
MOST_TOLD = 20
"""Most findings named in a reason."""


class Package(msgspec.Struct, frozen=True):
    ecosystem: str = ""
    name: str = ""


class Range(msgspec.Struct):
    type: str = ""
    events: list[dict[str, str]] = []


class Affected(msgspec.Struct):
    package: Package = Package()
    ranges: list[Range] = []
    versions: list[str] = []


class Advisory(msgspec.Struct):
    """The fields of a document of OSV's schema 1 that are used here."""

    id: str
    modified: str
    withdrawn: str | None = None
    aliases: list[str] = []
    affected: list[Affected] = []


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Advisories about Python packages as of one day."""

    digest: str
    """Digest of the documents, the same for a folder and a zip."""
    newest: str
    """Latest `modified` time of its documents."""
    by_package: dict[str, list[tuple[Advisory, Affected]]]
    """Advisories by the package's normalised name."""

    def older_than(self, days: float) -> bool:
        return datetime.now(UTC) - datetime.fromisoformat(self.newest) > timedelta(days=days)


def read_advisories(path: Path) -> Snapshot:
    """Read the snapshot in a folder or a zip. Raises `InvalidRequest` if it is not one."""
    with file_errors(InvalidRequest, f"{path} cannot be read", "advisories"):
        found = path.stat()
        return _read(path, (found.st_mtime_ns, found.st_size))


_advisory = json_reader(Advisory)


@functools.lru_cache(maxsize=1)
def _read(path: Path, _state: tuple[int, int]) -> Snapshot:
    """Read a snapshot once per process and state of its path: a fleet has thousands of cells."""
    by_package: dict[str, list[tuple[Advisory, Affected]]] = {}
    digests, newest = [], ""
    for name, data in _documents(path):
        try:
            one = _advisory(data)
            changed = datetime.fromisoformat(one.modified).astimezone(UTC).isoformat()
        except ValueError as error:
            raise InvalidRequest(
                f"{path}: {name:.80} is no advisory of OSV: {error}", param="advisories"
            ) from None
        digests.append(digest_of(data))
        ours = [part for part in one.affected if part.package.ecosystem == ECOSYSTEM]
        if one.withdrawn is None and ours:
            newest = max(newest, changed)
        for part in ours if one.withdrawn is None else ():
            by_package.setdefault(canonicalize_name(part.package.name), []).append((one, part))
    if not by_package:
        raise InvalidRequest(f"{path} holds no advisory about {ECOSYSTEM}", param="advisories")
    return Snapshot(digest_of("".join(sorted(digests)).encode()), newest, by_package)


def _documents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of each JSON file, bounded in number and size."""
    if path.is_dir():
        files = sorted(one for one in path.rglob("*.json") if one.is_file())
        if len(files) > MOST_FILES:
            raise InvalidRequest(f"{path}: more than {MOST_FILES:,} files", param="advisories")
        for one in files:
            with one.open("rb") as file:
                yield one.name, _bounded(one.name, file.read(MOST_BYTES + 1))
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = [one for one in archive.namelist() if one.endswith(".json")]
            if len(names) > MOST_FILES:
                raise InvalidRequest(f"{path}: more than {MOST_FILES:,} files", param="advisories")
            for name in names:
                with archive.open(name) as packed:
                    yield name, _bounded(name, packed.read(MOST_BYTES + 1))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InvalidRequest(f"{path} is no zip: {error}", param="advisories") from None


def _bounded(name: str, data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise InvalidRequest(f"{name:.80}: more than {MOST_BYTES:,} bytes", param="advisories")
    return data


def affects(part: Affected, version: Version) -> bool | None:
    """Return whether this version is vulnerable by OSV's rules; None if a bound is not a valid
    Python version.

    https://ossf.github.io/osv-schema/#evaluation: a version that is listed or in a range: from
    `introduced` on, before `fixed` or up to `last_affected`, and below every `limit`.
    """
    unknown = False
    for named in part.versions:
        try:
            if Version(named) == version:
                return True
        except InvalidVersion:
            continue  # A lock cannot contain such a version.
    for one in part.ranges:
        if one.type != "ECOSYSTEM":
            continue  # Commits, which wheels do not name; PyPI has no other kind of range.
        try:
            if _within(one.events, version):
                return True
        except InvalidVersion:
            unknown = True
    return None if unknown else False


def _within(events: list[dict[str, str]], version: Version) -> bool:
    known = [
        (Version("0.dev0" if text == "0" else text), kind)
        for event in events
        for kind, text in event.items()
        if (kind, text) != ("limit", "*")
    ]
    inside = False
    # A version both fixed and introduced again at the same bound is inside.
    order = {"fixed": 0, "introduced": 1, "last_affected": 2, "limit": 3}
    for bound, kind in sorted(known, key=lambda one: (one[0], order.get(one[1], 4))):
        if kind == "introduced" and version >= bound:
            inside = True
        elif (kind == "fixed" and version >= bound) or (
            kind == "last_affected" and version > bound
        ):
            inside = False
    return inside and all(version < bound for bound, kind in known if kind == "limit")


def hold_advisories(work: Work) -> Result:
    """Check every package of the bill against the user's snapshot."""
    asked, found = work.stage.parameters, work.place.advisories
    listed = need(work, "sbom").outputs.get("sbom.cdx.json")
    if found is None:
        return undecided("there is no data to hold the packages against (--advisories)")
    if listed is None:
        return undecided("there is no bill of materials")
    figures: dict[str, Any] = {"newest": found.newest, "data": found.digest}
    if asked["stale"]:
        days = asked["most_days"]
        return undecided(
            f"the data is of {found.newest[:10]}, more than {days:g} days old", **figures
        )
    packages = 0
    vulnerable: list[str] = []
    unsure: list[str] = []
    accepted: list[str] = []
    for name, text in _packages(any_json(work.store.read(listed.digest))):
        packages += 1
        for one, part in found.by_package.get(canonicalize_name(name), ()):
            try:
                affected = affects(part, Version(text))
            except InvalidVersion:
                affected = None
            line = f"{name} {text}: {one.id}"
            if affected is None:
                unsure.append(line)
            elif affected:
                known = {one.id, *one.aliases} & set(asked["accepted"])
                (accepted if known else vulnerable).append(line)
    lists = {"found": vulnerable, "accepted": accepted, "unsure": unsure}
    figures |= {name: sorted(set(lines)) for name, lines in lists.items() if lines}
    on = f"as of {found.newest[:10]}"
    if vulnerable:
        shown = ", ".join(sorted(set(vulnerable))[:MOST_TOLD])
        return Result(outcome=Outcome.FAILED, reason=f"{shown} ({on})", figures=figures)
    if unsure:
        return undecided(f"{unsure[0]} cannot be told by its versions ({on})", **figures)
    said = f"nothing is known against {packages} packages, {on}"
    return Result(
        reason=said + (f"; {len(accepted)} accepted" if accepted else ""), figures=figures
    )


def _packages(bill: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, version) of each Python package of a CycloneDX document."""
    for one in bill.get("components", []):
        if one.get("purl"):
            known = PackageURL.from_string(one["purl"])
            if known.type == "pypi" and known.version:
                yield known.name, known.version


HELD = {
    "advisories": Recipe(
        hold_advisories,
        code=("factory/advisories.py", "factory/sbom.py"),
        tools=("packaging", "packageurl-python"),
    )
}
