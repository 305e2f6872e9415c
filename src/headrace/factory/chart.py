"""A Helm chart for one profile: its files are data in `chart`, completed here.

The chart binds image and profile by digest, and the public keys that its pods trust. Its values can
set the server's options, with the same bounds as here. The profile binds the engine's options.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

from ..base.config import ServerOptions
from ..base.errors import OptionError, file_errors
from ..base.version import VERSION
from .profile import SignedProfile
from .source import model_path

TEMPLATES = Path(__file__).parent / "chart"
OURS = ("host", "port", "store", "files", "keys", "tls_cert", "tls_key", "tls_clients")
"""Options that the chart sets itself, or that need a file which it does not mount."""
KINDS = {"str": "string", "bool": "boolean", "int": "integer", "float": "number"}
PINNED = r"^[^@\s]+/[^@\s]+@sha256:[0-9a-f]{64}$"
"""A reference to a registry by digest."""
AROUND, STEP, GPU_HOST = 1 << 30, 1 << 28, 4 << 30
"""Bytes of interpreters and libraries in addition to the memory plan; the unit to which a request
is rounded up; the host memory of a pod with a GPU."""


def write_chart(
    folder: Path,
    profile: SignedProfile,
    *,
    image: str,
    reference: str,
    weights: str,
    panels: str | None = None,
    trusted: dict[str, str],
) -> None:
    """Write the chart. `image`, `reference` (the published profile): by digest.

    `weights`, `panels`: digests of their manifests, which are published next to the profile.
    `trusted`: public keys (PEM) by file name. Raises `OptionError`.
    """
    for param, given in (("image", image), ("reference", reference)):
        if not re.match(PINNED, given):
            raise OptionError(f"{given!r:.100} is no host/repository@sha256:…", param=param)
    name = re.sub("[^a-z0-9]+", "-", profile.body.name.lower()).strip("-")
    chart = {
        "apiVersion": "v2",
        "name": name,
        "version": VERSION,
        "appVersion": profile.digest,
        "description": f"{profile.body.model.name}, served by headrace as its profile binds it",
        "kubeVersion": ">=1.30.0-0",
    }
    repository, on_gpu = reference.partition("@")[0], bool(profile.body.hardware.get("gpus"))
    files = [one.path for one in profile.body.model.files]
    values = {
        "image": image,
        "reference": reference,
        "digest": profile.digest,
        "weights": f"{repository}@{weights}",
        "path": str(model_path(PurePosixPath("/weights"), files)),
        "panels": f"{repository}@{panels}" if panels else "",
        "trusted": trusted,
        "requests": _requests(profile, on_gpu),
        "gpus": int(on_gpu),
        "architecture": _architecture(profile),
    }
    documents = {
        "Chart.yaml": json.dumps(chart, indent=2) + "\n",  # JSON is YAML.
        "values.yaml": _values(values),
        "values.schema.json": json.dumps(schema(), indent=2) + "\n",
    }
    with file_errors(OptionError, f"{folder} cannot be written", "folder"):
        shutil.copytree(TEMPLATES, folder)
        for file, text in documents.items():
            (folder / file).write_text(text, encoding="utf-8")


def _requests(profile: SignedProfile, on_gpu: bool) -> dict[str, str]:
    """Return the resources that a pod requests."""
    requests = {"cpu": str(profile.body.hardware["cores"])}
    if memory := profile.body.limits.get("memory"):
        # On a GPU the plan is of its memory; the host only reads the weights through.
        needed = GPU_HOST if on_gpu else memory + AROUND
        requests["memory"] = f"{-(-needed // STEP) * (STEP >> 20)}Mi"
    return requests


def _values(values: dict[str, Any]) -> str:
    """Fill in the `<name>`s of the chart's values; list the server's options as comments."""
    text = (TEMPLATES / "values.yaml").read_text(encoding="utf-8")
    text = re.sub(r"<(\w+)>", lambda name: json.dumps(values[name[1]]), text)
    listed = "".join(
        f"#   {spec.metadata['help']}\n#   {spec.name}: {json.dumps(spec.default)}\n"
        for spec in fields(ServerOptions)
        if spec.name not in OURS
    )
    return text.replace("options: {}\n", f"options: {{}}\n{listed}")


def schema() -> dict[str, Any]:
    """Return the JSON schema of the chart's values (draft 7, which Helm reads)."""
    found: dict[str, Any] = json.loads((TEMPLATES / "values.schema.json").read_bytes())
    found["properties"]["options"]["properties"] = {
        spec.name: _rule(str(spec.type), dict(spec.metadata))
        for spec in fields(ServerOptions)
        if spec.name not in OURS
    }
    return found


def _rule(hint: str, rules: dict[str, Any]) -> dict[str, Any]:
    """Build the schema of one option. `hint`: the text of its type."""
    made: dict[str, Any] = {"type": KINDS[hint.split(" | ")[0]], "description": rules["help"]}
    if "choices" in rules:
        made["enum"] = list(rules["choices"])
    names = {"low": "minimum", "high": "maximum"}
    return made | {names[rule]: value for rule, value in rules.items() if rule in names}


def _architecture(profile: SignedProfile) -> str:
    machine = str(profile.body.hardware["machine"])
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
