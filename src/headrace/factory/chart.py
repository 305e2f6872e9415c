"""A Helm chart for one profile: templates are data; values, comments and schema are generated.

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
from textwrap import wrap
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

PROBES = "startSeconds", "readySeconds", "liveSeconds"
FRONTS = ("autoscale", "prometheus"), ("ingress", "host"), ("httpRoute", "gateway")
"""Values that KServe's own services and scaling stand in for."""
AROUND, STEP, GPU_HOST = 1 << 30, 1 << 28, 4 << 30
"""Bytes of interpreters and libraries beside the plan, the step to which a request is rounded up,
and the host memory of a pod with a GPU."""
ROUTER = {"cpu": "500m", "memory": "512Mi"}
"""Requests of a router's pod."""
WAYS = "load", "volume", "auto"
"""Ways for weights to reach a pod: its own loader, a mount of the cluster, or a mount where the
cluster is new enough."""
ABOUT = {
    "image": "The engine's image, by digest.",
    "profile": "The signed profile that every pod checks before it serves.",
    "profile.reference": "Published place, by digest.",
    "profile.digest": "Digest of the signed envelope.",
    "weights": "The model's files.",
    "weights.from": "load: an init container fetches them. volume: the cluster mounts them as "
    "image "
    "volumes. auto: volume from Kubernetes 1.35 on.",
    "weights.reference": "Published place, by digest.",
    "weights.path": "Path of the model in the mounted volume.",
    "weights.panels": "Published packed weights, by digest, for from: volume; empty: none.",
    "trusted": "Public keys (PEM) whose profiles are served, by file name.",
    "frame": "Deployment, StatefulSet, LeaderWorkerSet or InferenceService (KServe).",
    "replicas": "Pods. 0 needs autoscale.prometheus.",
    "options": "Options of the server, with their defaults:",
    "resources": "Requests and limits of the server's container.",
    "resources.requests": "cpu: the cores on which the profile was measured. memory: the memory "
    "plan and 1 GiB; "
    "the host's part on a GPU.",
    "resources.limits": "A memory limit below twice the request makes the KV pool smaller. A CPU "
    "limit slows "
    "tokens down at random. GPUs are set below.",
    "gpu": "GPUs of a pod.",
    "gpu.count": "Number, 0 for a CPU. One engine uses one GPU.",
    "gpu.resource": "Name of the device plugin's resource; for a MIG slice as in "
    "nvidia.com/mig-3g.71gb.",
    "gpu.runtimeClass": "RuntimeClass of the GPU's container runtime, as in nvidia; empty: the "
    "cluster's "
    "default.",
    "imagePullSecrets": 'Secrets for the registry, as in [{"name": "pull"}].',
    "nodeSelector": "Labels of nodes that may run a pod.",
    "tolerations": 'Taints that a pod tolerates, as in [{"key": "nvidia.com/gpu", "operator": '
    '"Exists"}].',
    "network": "The NetworkPolicy of the pods.",
    "network.from": "Peers that may ask; empty: all.",
    "network.egress": "Ways out: names and the registry. Serving needs none.",
    "probes": "Periods of the probes.",
    "probes.startSeconds": "Seconds in which a pod must be ready: download, check, load.",
    "probes.readySeconds": "Seconds between two questions whether it takes requests.",
    "probes.liveSeconds": "Seconds between two questions whether it lives; six failures restart "
    "it.",
    "disruptions": "Pods that a drain may end at once (PodDisruptionBudget).",
    "ingress": "An Ingress before the service, or before the router if there is one.",
    "ingress.host": "Host name; empty: no Ingress.",
    "ingress.class": "IngressClass; empty: the cluster's default.",
    "ingress.tlsSecret": "Secret with tls.crt and tls.key; empty: no TLS.",
    "ingress.annotations": "Answers are streams of minutes: raise the read timeout and turn "
    "buffering off, as "
    "your controller names them.",
    "httpRoute": "An HTTPRoute (Gateway API), like the Ingress.",
    "httpRoute.gateway": "Name of the Gateway; empty: no HTTPRoute.",
    "httpRoute.namespace": "The Gateway's namespace; empty: this one.",
    "httpRoute.hostnames": "Host names; empty: the listener's, which options.hosts or "
    "router.hosts must name.",
    "httpRoute.timeout": "Longest answer; 0s: no limit.",
    "router": "`headrace route` before the pods: by prefix and load; streams move if a pod dies.",
    "router.replicas": "Pods of the router; 0: none.",
    "router.hosts": "Further names of the router, by commas; those of ingress and httpRoute are "
    "known.",
    "router.resources": "Requests and limits of a router's container.",
    "monitor": "A ServiceMonitor, alerts and recording rules (Prometheus operator).",
    "autoscale": "A ScaledObject (KEDA), from replicas up.",
    "autoscale.prometheus": "Address of Prometheus; empty: no scaling.",
    "autoscale.maxReplicas": "Most pods.",
    "autoscale.wait": "Seconds of waiting that one more pod is started for.",
    "picker": "Service of an endpoint picker; makes an InferencePool. Empty: none.",
}
"""Comments of the values, by their place."""


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
    values = _values(profile, image, reference, weights, panels, trusted)
    documents = {
        "Chart.yaml": json.dumps(chart, indent=2) + "\n",  # JSON is YAML.
        "values.yaml": commented(values),
        "values.schema.json": json.dumps(schema(), indent=2) + "\n",
    }
    try:
        shutil.copytree(TEMPLATES, folder)
        for file, text in documents.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{folder} cannot be written: {error.strerror}", param="folder") from None


def _values(
    profile: SignedProfile,
    image: str,
    reference: str,
    weights: str,
    panels: str | None,
    trusted: dict[str, str],
) -> dict[str, Any]:
    """Return the chart's own values."""
    files, repository = profile.body.model.files, reference.partition("@")[0]
    requests = {"cpu": str(profile.body.hardware["cores"])}
    on_gpu = bool(profile.body.hardware.get("gpus"))
    if memory := profile.body.limits.get("memory"):
        # On a GPU the plan is of its memory, and the host reads the weights through.
        needed = GPU_HOST if on_gpu else memory + AROUND
        requests["memory"] = f"{-(-needed // STEP) * (STEP >> 20)}Mi"
    return {
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
        "resources": {"requests": requests, "limits": {}},
        "gpu": {"count": int(on_gpu), "resource": "nvidia.com/gpu", "runtimeClass": ""},
        "imagePullSecrets": [],
        "nodeSelector": {"kubernetes.io/arch": _architecture(profile)},
        "tolerations": [],
        "network": {
            "from": [],
            "egress": [{"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53}, {"port": 443}]}],
        },
        "probes": {"startSeconds": 600, "readySeconds": 5, "liveSeconds": 10},
        "disruptions": 1,
        "ingress": {"host": "", "class": "", "tlsSecret": "", "annotations": {}},
        "httpRoute": {"gateway": "", "namespace": "", "hostnames": [], "timeout": "0s"},
        "router": {"replicas": 0, "hosts": "", "resources": {"requests": ROUTER}},
        "monitor": False,
        "autoscale": {"prometheus": "", "maxReplicas": 4, "wait": 2},
        "picker": "",
    }


def commented(values: dict[str, Any]) -> str:
    """Write the values as YAML, each with its comment."""
    lines = [
        "# Values of the chart; values.schema.json refuses what is not listed here.",
        "# Image, profile and weights are bound by digest: write another chart for other ones.",
    ]

    def write(document: dict[str, Any], path: str, depth: int) -> None:
        for name, value in document.items():
            here, space = f"{path}.{name}" if path else name, "  " * depth
            if depth == 0:
                lines.append("")
            lines.extend(f"{space}# {line}" for line in wrap(ABOUT[here], 96 - len(space)))
            if isinstance(value, dict) and any(f"{here}.{key}" in ABOUT for key in value):
                lines.append(f"{space}{name}:")
                write(value, here, depth + 1)
            else:
                lines.append(f"{space}{name}: {json.dumps(value)}")

    write(values, "", 0)
    place = lines.index("options: {}") + 1
    lines[place:place] = [
        line
        for spec in fields(ServerOptions)
        if spec.name not in OURS
        for line in (
            f"#   {spec.metadata['help']}",
            f"#   {spec.name}: {json.dumps(spec.default)}",
        )
    ]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """Build the JSON schema of the chart's values (draft 7, which Helm reads)."""
    text, objects = {"type": "string"}, {"type": "array", "items": {"type": "object"}}
    pinned, count = {"type": "string", "pattern": PINNED}, {"type": "integer", "minimum": 0}
    name = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?$"}
    host = {"type": "string", "pattern": r"^((\*\.)?[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"}
    resources = _object({"requests": {"type": "object"}, "limits": {"type": "object"}})
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
        "replicas": count,
        "options": _object(options),
        "resources": resources,
        "gpu": _object(
            {
                "count": {"type": "integer", "minimum": 0, "maximum": 1},
                "resource": {
                    "type": "string",
                    "pattern": r"^[a-z0-9.-]+/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
                },
                "runtimeClass": name,
            },
            needed=True,
        ),
        "imagePullSecrets": objects,
        "nodeSelector": {"type": "object", "additionalProperties": text},
        "tolerations": objects,
        "network": _object({"from": objects, "egress": objects}, needed=True),
        "probes": _object({key: {"type": "integer", "minimum": 1} for key in PROBES}, needed=True),
        "disruptions": {"type": "integer", "minimum": 0},
        "ingress": _object(
            {
                "host": host,
                "class": name,
                "tlsSecret": name,
                "annotations": {"type": "object", "additionalProperties": text},
            },
            needed=True,
        ),
        "httpRoute": _object(
            {
                "gateway": name,
                "namespace": name,
                "hostnames": {"type": "array", "items": {**host, "minLength": 1}, "maxItems": 16},
                "timeout": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
            },
            needed=True,
        ),
        "router": _object({"replicas": count, "hosts": text, "resources": resources}, needed=True),
        "monitor": {"type": "boolean"},
        "autoscale": _object(scale, needed=True),
        "picker": name,
    }
    # KServe creates services and scales on its own.
    own: dict[str, Any] = {name: {"properties": {key: {"const": ""}}} for name, key in FRONTS}
    own |= {"monitor": {"const": False}, "router": {"properties": {"replicas": {"const": 0}}}}
    scaled = {"properties": {"autoscale": {"properties": {"prometheus": {"minLength": 1}}}}}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_object(values),
        "required": ["image", "profile", "trusted"],
        "if": {"properties": {"frame": {"const": "InferenceService"}}, "required": ["frame"]},
        "then": {"properties": own},
        "anyOf": [{"properties": {"replicas": {"minimum": 1}}}, scaled],
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
