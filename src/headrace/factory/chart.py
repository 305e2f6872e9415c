"""A Helm chart for one profile: its templates are data, its values and their schema are generated.

The chart binds image and profile by digest, and the public keys that its pods trust. Its values can
set the server's options, with the bounds that they have here. The profile binds those of the
engine.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

from ..base.config import ServerOptions
from ..base.errors import OptionError
from ..base.version import VERSION
from .profile import SignedProfile
from .source import model_path

TEMPLATES = Path(__file__).parent / "chart"
OURS = ("host", "port", "store", "files", "keys", "tls_cert", "tls_key", "tls_clients")
"""Options that the chart itself sets, or that need a file which it does not mount."""
KINDS = {"str": "string", "bool": "boolean", "int": "integer", "float": "number"}
PINNED = r"^[^@\s]+/[^@\s]+@sha256:[0-9a-f]{64}$"
"""A reference to a registry by digest."""
FRAMES = "Deployment", "StatefulSet", "LeaderWorkerSet", "InferenceService"
"""Kubernetes kinds that keep replicas of the one pod running."""


WAYS = "load", "volume", "auto"
"""Ways for weights to reach a pod: its own loader, a mount of the cluster, or a mount where the
cluster is new enough."""


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
    files, repository = profile.body.model.files, reference.partition("@")[0]
    values: dict[str, Any] = {
        "image": image,
        "profile": {"reference": reference, "digest": profile.digest},
        "weights": {
            "from": WAYS[0],
            "reference": f"{repository}@{weights}",
            "path": str(model_path(PurePosixPath("/weights"), [one.path for one in files])),
            "panels": f"{repository}@{panels}" if panels else "",
        },
        "trusted": trusted,
        "frame": FRAMES[0],
        "replicas": 2,
        "options": {},
        "resources": {"requests": {"cpu": str(profile.body.hardware["cores"])}},
        "imagePullSecrets": [],
        "nodeSelector": {"kubernetes.io/arch": _architecture(profile)},
        "tolerations": [],
        "network": {
            "from": [],
            "egress": [{"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}, {"port": 443}]}],
        },
        "monitor": False,
        "autoscale": {"prometheus": "", "maxReplicas": 4, "wait": 2},
        "picker": "",
    }
    name = re.sub("[^a-z0-9]+", "-", profile.body.name.lower()).strip("-")
    chart = {
        "apiVersion": "v2",
        "name": name,
        "version": VERSION,
        "appVersion": profile.digest,
        "description": f"{profile.body.model.name}, served by headrace as its profile binds it",
        "kubeVersion": ">=1.30.0-0",
    }
    try:
        shutil.copytree(TEMPLATES, folder)
        documents = {"Chart.yaml": chart, "values.yaml": values, "values.schema.json": schema()}
        for file, document in documents.items():  # JSON is YAML.
            (folder / file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{folder} cannot be written: {error.strerror}", param="folder") from None


def schema() -> dict[str, Any]:
    """Build the JSON schema of the chart's values (draft 7, which Helm reads)."""
    text, objects = {"type": "string"}, {"type": "array", "items": {"type": "object"}}
    pinned = {"type": "string", "pattern": PINNED}
    digest = {"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"}
    options = {
        spec.name: _rule(str(spec.type), dict(spec.metadata))
        for spec in fields(ServerOptions)
        if spec.name not in OURS
    }
    scale = {
        "prometheus": {"type": "string", "pattern": r"^(https?://[^\s\"]+)?$"},
        "maxReplicas": {"type": "integer", "minimum": 1},
        "wait": {"type": "number", "exclusiveMinimum": 0},
    }
    values = {
        "global": {"type": "object"},
        "image": pinned,
        "profile": _object({"reference": pinned, "digest": digest}, needed=True),
        "weights": _object(
            {
                "from": {"enum": list(WAYS)},
                "reference": pinned,
                "path": text,
                "panels": {"type": "string", "pattern": f"^$|{PINNED}"},
            },
            needed=True,
        ),
        "trusted": {"type": "object", "minProperties": 1, "additionalProperties": text},
        "frame": {"enum": list(FRAMES)},
        "replicas": {"type": "integer", "minimum": 0},
        "options": _object(options),
        "resources": {"type": "object"},
        "imagePullSecrets": objects,
        "nodeSelector": {"type": "object", "additionalProperties": text},
        "tolerations": objects,
        "network": _object({"from": objects, "egress": objects}, needed=True),
        "monitor": {"type": "boolean"},
        "autoscale": _object(scale, needed=True),
        "picker": {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"},
    }
    # KServe creates services and scales on its own.
    own = {"monitor": {"const": False}, "autoscale": {"properties": {"prometheus": {"const": ""}}}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_object(values),
        "required": ["image", "profile", "trusted"],
        "if": {"properties": {"frame": {"const": "InferenceService"}}, "required": ["frame"]},
        "then": {"properties": own},
    }


def _rule(hint: str, rules: dict[str, Any]) -> dict[str, Any]:
    """Build the schema of one option. `hint`: the text of its type."""
    made: dict[str, Any] = {"type": KINDS[hint.split(" | ")[0]], "description": rules["help"]}
    if "choices" in rules:
        made["enum"] = list(rules["choices"])
    names = {"low": "minimum", "high": "maximum"}
    return made | {names[rule]: value for rule, value in rules.items() if rule in names}


def _object(properties: dict[str, Any], needed: bool = False) -> dict[str, Any]:
    made = {"type": "object", "additionalProperties": False, "properties": properties}
    return made | ({"required": list(properties)} if needed else {})


def _architecture(profile: SignedProfile) -> str:
    machine = str(profile.body.hardware["machine"])
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
