"""Workflows of GitHub, GitLab, Argo and Tekton: the factory's own commands for each cell.

A cell is one task, whose steps run in turn: build, verify, publish, promote. On KubeRay one command
runs the whole fleet and distributes the cells to the machines of a Ray cluster. The constant part
is data in `workflows`; the rest is filled in here and written as JSON, which is YAML. A shell gets
quoted words, Kubernetes lists of words. Text that a platform reads as an expression is refused.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..base.config import option, verify_options
from ..base.errors import OptionError
from .chart import PINNED
from .fleet import Cell
from .key import canonical, digest_of
from .release import Ring
from .sbom import PYTHON

Platform = StrEnum("Platform", ["github", "gitlab", "argo", "tekton", "kuberay"])
MATRIX = 256  # Jobs that GitHub makes of one matrix, at most.
MOST_BYTES = 1 << 20  # An object that a cluster takes; etcd's limit is half as much again.
EXPRESSION = re.compile(r"\{\{|\$\(|\$\[\[")
"""Beginnings of expressions: `${{` of GitHub, `{{` of Argo, `$(` of Tekton, `$[[` of GitLab."""
IN_PODS = "argo", "tekton", "kuberay"
IMAGES = {"github": "", "gitlab": r"[\w./:@-]+", **dict.fromkeys(IN_PODS, PINNED)}
LABEL = r"[A-Za-z0-9][\w./:-]*"


@dataclass(slots=True)
class WorkflowOptions:
    """Options of a workflow, in addition to its cells."""

    on: str | None = option(None, "Kinds of machines, as in arm,big;gpu or zone=a;zone=b.")
    cache: str | None = option(None, "Folder that runners keep; none: the platform's cache.")
    registry: str | None = option(None, "host/repository to publish to; none: nothing is.")
    ring: str | None = option(None, "What is promoted to; none: dev.", choices=tuple(Ring))
    unevaluated: str | None = option(None, "Gates that may be open, as of `promote`.")
    image: str | None = option(None, "What steps run in: on Kubernetes host/repository@digest.")
    package: str | None = option(None, "What pip installs for a shell.")

    def verify(self) -> None:
        """Raise `OptionError` naming the first field outside its rules."""
        verify_options(self)


@dataclass(frozen=True, slots=True)
class CellTask:
    """A cell on one kind of machine."""

    name: str  # Letters, digits and hyphens, at most 49; made of all options.
    labels: list[str]
    store: str
    gpu: bool
    steps: dict[str, list[str]]  # Words after `headrace`, by the step's name.

    @property
    def lines(self) -> dict[str, str]:
        """The steps as shell commands."""
        return {step: f"headrace {shlex.join(words)}" for step, words in self.steps.items()}

    def command(self, step: str, resources: str) -> dict[str, Any]:
        """Return a container's command: the image has no shell. `resources`: the platform's name of
        limits."""
        uses = self.gpu and step == "build"
        limits = {resources: {"limits": {"nvidia.com/gpu": "1"}}} if uses else {}
        python = [f"/usr/bin/python{PYTHON}", "-m", "headrace"]
        return {"name": step, "command": python, "args": self.steps[step], **limits}

    @property
    def selector(self) -> dict[str, Any]:
        """The node selector, if labels were given."""
        return _selector(self.labels)


def workflow(
    platform: Platform, cells: Iterable[Cell], asked: WorkflowOptions, text: str = ""
) -> str:
    """Write the file for a platform. `text`: the fleet's file. Raises `OptionError` for values that
    are unsafe there."""
    asked.verify()
    in_pods = platform in IN_PODS
    label = rf"{LABEL}={LABEL}" if in_pods else LABEL
    rules = {
        "on": (rf"{label}([,;]{label})*", "labels joined by commas, kinds by semicolons"),
        "registry": (r"[\w.-]+(:\d+)?/[\w./-]+", "host/repository"),
        "cache": ("" if in_pods else r"/[\w./-]+", f"a folder that runners of {platform} keep"),
        "image": (
            IMAGES[platform],
            f"what {platform} runs steps in (GitHub: nothing, pods: by digest)",
        ),
    }
    for param, (pattern, wanted) in rules.items():
        given = getattr(asked, param) or ("none" if param == "image" and in_pods else None)
        if given is not None and not re.fullmatch(pattern, given, re.ASCII):
            raise OptionError(f"{param} {given!r:.100} is not {wanted}", param=param)
    if platform is Platform.kuberay:
        made = kuberay(list(cells), asked, text)
    else:
        made = WRITERS[platform](tasks(cells, asked, in_pods), asked)
    found = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    if in_pods and len(found.encode()) > MOST_BYTES:
        raise OptionError(f"{platform} takes {MOST_BYTES:,} bytes: split the fleet", param="fleet")
    return found


def tasks(cells: Iterable[Cell], asked: WorkflowOptions, in_pods: bool) -> list[CellTask]:
    """Return every cell on every kind of machine, once. Raises `OptionError` naming an unsafe
    word."""
    root = "/cache" if in_pods else asked.cache or "headrace-cache"
    key = "/run/headrace/key.pem" if in_pods else "headrace-key.pem"
    found = {}
    for cell in cells:
        if cell.hardware:
            raise OptionError("a workflow names machines with --on, not in its file", param="fleet")
        model = cell.engine.model
        for labels in (asked.on or "").split(";"):
            about = digest_of(canonical([cell.words(), labels]))[7:15]
            short = re.sub("[^a-z0-9]+", "-", model.lower())[-40:].strip("-") or "model"
            name = f"{short}-{about}"
            store = f"{root}/cells/{name}"
            at = ["--store", store]
            build = Cell(cell.engine, replace(cell.wanted, store=store, key=key, ring="dev"))
            words = [_safe(word) for word in build.words()]
            steps = {"build": words, "verify": ["factory", "verify", *at]}
            if asked.registry:
                target = f"{asked.registry}:{name}"
                steps["publish"] = ["factory", "publish", "dev", target, *at]
            if asked.ring and asked.ring != "dev":
                opened = asked.unevaluated and f"--unevaluated={_safe(asked.unevaluated)}"
                words = ["factory", "promote", "dev", asked.ring, *at, "--key", key]
                steps["promote"] = [*words, opened] if opened else words
            gpu = cell.engine.device == "cuda"
            found[name] = CellTask(name, labels.split(",") if labels else [], store, gpu, steps)
    return list(found.values())


def github(made: list[CellTask], asked: WorkflowOptions) -> dict[str, Any]:
    """Make a file of `.github/workflows`: the cells as matrices."""
    found = _fixed("github")
    job = found["jobs"].pop("cells")
    lacking = {"publish", "promote"} - made[0].steps.keys()
    lacking |= ({"cache"} if asked.cache else set()) | (set() if asked.registry else {"registry"})
    job["steps"] = [one for one in job["steps"] if one["name"].split()[0] not in lacking]
    next(one for one in job["steps"] if one["name"] == "install")["run"] = _install(asked)
    job["env"] = {"HEADRACE_CACHE": asked.cache or "headrace-cache"}
    job |= {"environment": asked.ring} if asked.ring else {}
    rows = [
        {"cell": one.name, "on": one.labels or ["ubuntu-24.04"], "store": one.store, **one.lines}
        for one in made
    ]
    for at in range(0, len(rows), MATRIX):
        strategy = job["strategy"] | {"matrix": {"include": rows[at : at + MATRIX]}}
        found["jobs"][f"cells-{at // MATRIX + 1}"] = job | {"strategy": strategy}
    return found


def gitlab(made: list[CellTask], asked: WorkflowOptions) -> dict[str, Any]:
    """Make a `.gitlab-ci.yml`, or the file of a child pipeline: the cells as jobs."""
    found, root = _fixed("gitlab"), asked.cache or "headrace-cache"
    found["variables"] = {"HEADRACE_CACHE": root}
    found["default"] |= {"image": asked.image} if asked.image else {}
    before = found["default"]["before_script"]
    before.insert(0, _install(asked))
    if asked.registry:
        before.append('install -D -m 600 "$HEADRACE_REGISTRY" ~/.docker/config.json')
    for one in made:
        job: dict[str, Any] = {"stage": "cells", "script": list(one.lines.values())}
        job |= {"tags": one.labels} if one.labels else {}
        job |= {"environment": asked.ring} if asked.ring else {}
        if not asked.cache:  # The platform keeps files of the checkout only.
            job["cache"] = {"key": f"headrace-{one.name}", "paths": [f"{root}/"]}
            job["artifacts"] = {"when": "always", "paths": [f"{one.store}/evidence/"]}
        found[one.name] = job | {"resource_group": f"headrace-{one.name}"}
    return found


def argo(made: list[CellTask], asked: WorkflowOptions) -> dict[str, Any]:
    """Make a `Workflow`: a graph of cells, each a pod with its steps as containers, one by one."""
    shared = _fixed("pod")
    graph = [{"name": one.name, "template": one.name} for one in made]
    # A failing cell stops no other.
    first = {"name": "cells", "dag": {"failFast": False, "tasks": graph}}
    templates: list[dict[str, Any]] = [first]
    for one in made:
        containers = []
        for before, step in zip(("", *one.steps), one.steps, strict=False):
            after = {"dependencies": [before]} if before else {}
            command = {"image": asked.image, **one.command(step, "resources")}
            containers.append({**command, **shared["container"], **after})
        group = {"volumeMounts": shared["volumeMounts"], "containers": containers}
        templates.append({"name": one.name, **one.selector, "containerSet": group})
    spec = {"entrypoint": "cells", "volumes": shared["volumes"], **shared["pod"]}
    return _object("argoproj.io/v1alpha1", "Workflow", {**spec, "templates": templates})


def tekton(made: list[CellTask], asked: WorkflowOptions) -> dict[str, Any]:
    """Make a `PipelineRun`: the cells as independent tasks."""
    shared = _fixed("pod")
    common = {"image": asked.image, "volumeMounts": shared["volumeMounts"], **shared["container"]}
    work, pods = [], []
    for one in made:
        steps = [one.command(step, "computeResources") for step in one.steps]
        spec = {"volumes": shared["volumes"], "stepTemplate": common, "steps": steps}
        work.append({"name": one.name, "taskSpec": spec})
        template = {**shared["pod"], **one.selector}
        pods.append({"pipelineTaskName": one.name, "podTemplate": template})
    spec = {"timeouts": {"pipeline": "0"}, "pipelineSpec": {"tasks": work}, "taskRunSpecs": pods}
    return _object("tekton.dev/v1", "PipelineRun", spec)


def kuberay(cells: list[Cell], asked: WorkflowOptions, text: str) -> dict[str, Any]:
    """Make a `RayJob` with a group of workers for each kind of machine, and the fleet's file."""
    for param in ("registry", "ring", "unevaluated", "package"):
        if getattr(asked, param):
            raise OptionError(f"a RayJob builds and ships nothing: no {param}", param=param)
    kinds = list(dict.fromkeys(cell.hardware for cell in cells))
    nodes = (asked.on or ";" * (len(kinds) - 1)).split(";")
    if len(nodes) != len(kinds):
        raise OptionError(f"on names {len(nodes)} kinds, the fleet's file {len(kinds)}", param="on")
    name = f"headrace-{digest_of(canonical([text, asked.image, nodes]))[7:19]}"
    shared = _fixed("pod")
    fleet = {"name": "fleet", "configMap": {"name": name}}
    mine = ("cache", "tmp")
    volumes = [*(one for one in shared["volumes"] if one["name"] in mine), fleet]
    mounts = [one for one in shared["volumeMounts"] if one["name"] in mine]
    mounts.append({"name": "fleet", "mountPath": "/etc/headrace", "readOnly": True})

    def group(labels: str, started: dict[str, str], *, gpu: bool = False) -> dict[str, Any]:
        container = {
            "name": "ray",
            "image": asked.image,
            "volumeMounts": mounts,
            **shared["container"],
            "env": [one for one in shared["container"]["env"] if one["name"] == "HEADRACE_CACHE"],
            "resources": {"limits": {"nvidia.com/gpu": "1"}} if gpu else {},
        }
        spec = shared["pod"] | {"volumes": volumes, "containers": [container]}
        spec |= _selector([one for one in labels.split(",") if one])
        return {"rayStartParams": started, "template": {"spec": spec}}

    workers = []
    for number, (kind, labels) in enumerate(zip(kinds, nodes, strict=True)):
        gpu = any(cell.hardware == kind and cell.engine.device == "cuda" for cell in cells)
        # One unit, so one cell at a time; a shell reads it.
        started = {"resources": shlex.quote(json.dumps({kind: 1}))} if kind else {"num-cpus": "1"}
        count = {"groupName": f"kind-{number}", "replicas": 1, "minReplicas": 1, "maxReplicas": 1}
        workers.append({**count, **group(labels, started, gpu=gpu)})
    command = "python3 -m headrace factory fleet /etc/headrace/fleet.toml --on ray"
    head = group("", {"num-cpus": "0"})
    job = {"entrypoint": f"{command} --store /cache/store", "shutdownAfterJobFinishes": True,
           "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": workers}}  # fmt: skip
    items = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"fleet.toml": text},
        },
        {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": job},
    ]
    return {"apiVersion": "v1", "kind": "List", "items": items}


WRITERS = {"github": github, "gitlab": gitlab, "argo": argo, "tekton": tekton}


def _selector(labels: Iterable[str]) -> dict[str, Any]:
    chosen = dict(one.split("=") for one in labels)
    return {"nodeSelector": chosen} if chosen else {}


def _fixed(name: str) -> dict[str, Any]:
    path = Path(__file__).parent / "workflows" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _object(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    named = {"generateName": "headrace-"}
    return {"apiVersion": version, "kind": kind, "metadata": named, "spec": spec}


def _install(asked: WorkflowOptions) -> str:
    if not asked.package:
        raise OptionError(
            "package must say what pip installs, as no index has this one: "
            "'headrace[factory] @ https://HOST/WHEEL', or a file of the checkout",
            param="package",
        )
    return f"python -m pip install {shlex.quote(_safe(asked.package))}"


def _safe(word: str) -> str:
    """Return the word if every platform takes it literally. Raises `OptionError`."""
    if not word.isprintable() or EXPRESSION.search(word):
        what = "an expression of a workflow, or what cannot be printed"
        raise OptionError(f"{word!r:.100} holds {what}", param="fleet")
    return word
