"""A bill of materials in CycloneDX: the model with its files, and the packages of the lock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from ..base.extras import needing
from ..base.version import VERSION
from .checks import model_files, need, undecided
from .key import canonical, digest_of
from .spdx import SPDX_TYPE, Pin, spdx
from .stage import Recipe, Result, Work
from .store import Descriptor

with needing("the factory needs", "factory"):
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType, Pedigree
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL
    from packaging.markers import Marker

SBOM_TYPE = "application/vnd.cyclonedx+json"
LOCK = Path(__file__).parents[3] / "deploy" / "requirements.lock"
"""The lock of the checkout, if this runs from one."""
_PIN = re.compile(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)(?: *; *([^\\\n]+))?", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


PYTHON = "3.11"
"""Version of the image's Python: Debian 12's."""
TARGET = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{PYTHON}.2",
    "python_version": PYTHON,
    "sys_platform": "linux",
}
"""Environment for the conditions of a lock, without the processor."""


def locked(text: str, machine: str) -> list[Pin]:
    """Return the pins of a lock with hashes that apply to an image for this processor."""
    pins = list(_PIN.finditer(text))
    ends = [pin.start() for pin in pins[1:]] + [len(text)]
    here = TARGET | {"platform_machine": machine}
    return [
        (pin[1], pin[2], sorted(_HASH.findall(text, pin.end(), end)))
        for pin, end in zip(pins, ends, strict=True)
        if pin[3] is None or Marker(pin[3]).evaluate(here)
    ]


def bill(model: dict[str, Any], pins: list[Pin]) -> bytes:
    """Write CycloneDX 1.6 in JSON; the same bytes for the same model and pins.

    `model`: name, licence and files as in a profile.
    """

    def sha256(hexadecimal: str) -> HashType:
        return HashType(alg=HashAlgorithm.SHA_256, content=hexadecimal)

    def files(listed: list[dict[str, Any]], below: str) -> list[Component]:
        return [
            Component(
                name=one["path"],
                type=ComponentType.FILE,
                bom_ref=f"{below}:{one['path']}",
                hashes=[sha256(one["digest"].removeprefix("sha256:"))],
            )
            for one in listed
        ]

    packages = [
        Component(
            name=name,
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"pypi:{name}@{version}",
            purl=PackageURL("pypi", name=name.lower(), version=version),
            properties=[Property(name="headrace:wheel:sha256", value=one) for one in hashes],
        )
        for name, version, hashes in pins
    ]
    known = model.get("licence")
    described = Component(
        name=model["name"],
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        licenses=[DisjunctiveLicense(name=known)] if known else [],
        components=files(model["files"], "file"),
    )
    if quantised := model.get("quantised"):
        before = Component(
            name=model["name"],
            type=ComponentType.MACHINE_LEARNING_MODEL,
            bom_ref="before",
            components=files(quantised["of"], "before"),
        )
        described.pedigree = Pedigree(ancestors=[before], notes=f"quantised to {quantised['to']}")
    engine = Component(
        name="headrace", version=VERSION, type=ComponentType.APPLICATION, bom_ref="headrace"
    )
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, digest_of(canonical([model, pins]))),
        components=[described, *packages],
        metadata=BomMetaData(component=engine),
    )
    bom.metadata.timestamp = None
    bom.register_dependency(engine, [described, *packages])
    text_of: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return text_of.encode()


def model_document(work: Work) -> dict[str, Any]:
    """Return a model's name, licence and files in the form of bill and profile; for a quantised
    model also the original files."""
    parameters = work.stage.parameters
    files, fetched = model_files(work), need(work, "fetch").outputs
    quantised = None
    if files is not fetched:
        quantised = {"to": need(work, "quantise").figures["to"], "of": listed(fetched)}
    return {
        "name": parameters["model"],
        "licence": parameters["licence"],
        "files": listed(files),
        **({} if quantised is None else {"quantised": quantised}),
    }


def listed(files: Mapping[str, Descriptor]) -> list[dict[str, Any]]:
    """List the path, digest and size of each file, in the form of documents."""
    return [
        {"path": path, "digest": one.digest, "size": one.size}
        for path, one in sorted(files.items())
    ]


def list_materials(work: Work) -> Result:
    """Write the bill of materials; without a lock it is not evaluated."""
    lock = work.place.lock
    if lock is None:
        return undecided("there is no lock to read (--lock FILE)")
    model, pins = model_document(work), locked(lock, work.stage.parameters["machine"])
    made = {
        "sbom.cdx.json": work.store.put(bill(model, pins), SBOM_TYPE),
        "sbom.spdx.json": work.store.put(spdx(model, pins), SPDX_TYPE),
    }
    return Result(made, reason=f"{len(pins)} packages pinned")


MATERIALS = {
    "sbom": Recipe(
        list_materials,
        code=("factory/sbom.py", "factory/spdx.py", "factory/checks.py"),
        tools=("cyclonedx-python-lib", "packageurl-python", "packaging"),
    )
}
