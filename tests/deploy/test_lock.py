"""The shipped lock: every dependency within its bounds, by hashes, with a listed licence.
`.ci/locked` installs it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
LOCK = (ROOT / "deploy" / "requirements.lock").read_text()


def locked() -> dict[str, list[tuple[str, str]]]:
    """Name → (version, the entry) of each of its entries; by marker there may be several."""
    found: dict[str, list[tuple[str, str]]] = {}
    for entry in re.split(r"\n(?=\S)", LOCK.strip()):
        match = re.match(r"([\w.-]+)==(\S+)", entry)
        assert match, entry
        name = canonicalize_name(match.group(1))
        found.setdefault(name, []).append((match.group(2), entry))
    return found


def test_every_dependency_is_locked_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = locked()
    for requirement in map(Requirement, project["dependencies"]):
        for version, _ in entries[canonicalize_name(requirement.name)]:
            assert version in requirement.specifier, f"{requirement} is locked at {version}"


def test_every_locked_package_has_hashes() -> None:
    for name, entries in locked().items():
        for _, entry in entries:
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name


def test_the_licence_of_every_locked_package_is_listed() -> None:
    table = (ROOT / "docs" / "dependencies.md").read_text()
    listed = {
        canonicalize_name(one.split(" ")[0])
        for packages in re.findall(r"^\| [^|]+ \| ([^|]+ \d[^|]*) \|$", table, re.M)
        for one in packages.split(", ")
    }
    assert not set(locked()) - listed


def test_the_image_has_the_same_packages_and_what_checks_profiles() -> None:
    """Each entry of the lock is one of the image's, hashes and all."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = re.split(r"\n(?=\S)", (ROOT / "deploy" / "image.lock").read_text().strip())
    assert not {entry for several in locked().values() for _, entry in several} - set(entries)
    pinned = {
        match[1]: match[2] for entry in entries if (match := re.match(r"([\w.-]+)==(\S+)", entry))
    }
    for requirement in map(Requirement, project["optional-dependencies"]["factory"]):
        version = pinned[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, f"{requirement} is locked at {version}"
