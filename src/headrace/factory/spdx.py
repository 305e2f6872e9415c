"""The same bill of materials as SPDX 2.3, which other scanners read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from ..base.version import VERSION
from .key import canonical, digest_of

SPDX_TYPE = "application/spdx+json"
CREATED = "1970-01-01T00:00:00Z"
"""Placeholder for the required time: a real one would make each bill different."""
Pin = tuple[str, str, list[str]]
"""(package, version, SHA-256 of its files)."""


def spdx(model: dict[str, Any], pins: Iterable[Pin]) -> bytes:
    """Write SPDX 2.3 in JSON: the engine, the model with its files, the pins of a lock.

    `model`: name, licence and files as in a profile. Files are listed as packages: for files, SPDX
    requires a SHA-1, which proves nothing.
    """
    engine = _package("headrace", VERSION, licence="Apache-2.0")
    described = _package(model["name"], None, licence=model.get("licence"))
    files = [_file(described, one) for one in model["files"]]
    before = [_file(described, one, "before-") for one in model.get("quantised", {}).get("of", [])]
    packages = [_pinned(*pin) for pin in pins]
    related = [("SPDXRef-DOCUMENT", "DESCRIBES", engine), (engine["SPDXID"], "CONTAINS", described)]
    related += [(described["SPDXID"], "CONTAINS", one) for one in files]
    related += [(described["SPDXID"], "GENERATED_FROM", one) for one in before]
    related += [(engine["SPDXID"], "DEPENDS_ON", one) for one in packages]
    found = [engine, described, *files, *before, *packages]
    name = uuid5(NAMESPACE_URL, digest_of(canonical(found)))
    document = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"headrace-{VERSION}-{_plain(model['name'])}",
        "documentNamespace": f"urn:uuid:{name}",
        "creationInfo": {"created": CREATED, "creators": [f"Tool: headrace-{VERSION}"]},
        "packages": found,
        "relationships": [
            {"spdxElementId": of, "relationshipType": how, "relatedSpdxElement": to["SPDXID"]}
            for of, how, to in related
        ],
    }
    return canonical(document)


def _package(name: str, version: str | None, *, licence: str | None = None) -> dict[str, Any]:
    known = licence or "NOASSERTION"
    made = {
        "SPDXID": f"SPDXRef-{_plain(name)}" + (f"-{_plain(version)}" if version else ""),
        "name": name,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": known if re.fullmatch("[A-Z][A-Za-z0-9.+-]+", known) else "NOASSERTION",
        "copyrightText": "NOASSERTION",
    }
    return made | ({"versionInfo": version} if version else {})


def _file(model: dict[str, Any], one: dict[str, Any], state: str = "") -> dict[str, Any]:
    made = _package(f"{state}{one['path']}", None)
    made["SPDXID"] = f"{model['SPDXID']}-{_plain(state + one['path'])}"
    digest = one["digest"].removeprefix("sha256:")
    checksums = [{"algorithm": "SHA256", "checksumValue": digest}]
    return {**made, "packageFileName": one["path"], "checksums": checksums}


def _pinned(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    where = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": f"pkg:pypi/{name.lower()}@{version}",
    }
    wheels = f"sha256 of its wheels: {', '.join(hashes)}" if hashes else ""
    made = _package(name, version) | {"externalRefs": [where]}
    return made | ({"comment": wheels} if wheels else {})


def _plain(name: str) -> str:
    """Return the name without characters that an identifier may not contain."""
    return re.sub("[^A-Za-z0-9.-]+", "-", name)
