"""The RayJob that serves: KubeRay's definition takes it, and its command is one of ours."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from headrace.base.layout import Layout
from tiny import bytewise
from tiny.kept import Kept

ROOT = Path(__file__).parent.parent.parent


JOB, SERVICE = yaml.safe_load_all((ROOT / "deploy/ray/serve.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
GROUPS = CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]


def test_kuberay_takes_the_job_and_its_numbers_are_one(kept: Kept) -> None:
    schemas = json.loads((ROOT / "tests/factory/crds.json").read_text())["schemas"]
    jsonschema.validate(JOB, schemas["RayJob"])
    words = shlex.split(JOB["spec"]["entrypoint"])
    given = dict(zip(words[5::2], words[6::2], strict=True))
    assert Layout.parse(given["--layout"]).devices == 1 + GROUPS[1]["replicas"]
    for group in GROUPS:
        (container,) = group["template"]["spec"]["containers"]
        cpus = group["rayStartParams"]["num-cpus"]
        assert cpus == given["--threads"] == container["resources"]["requests"]["cpu"]
    labels = GROUPS[0]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    model = str(kept(bytewise.make))
    command = [sys.executable, *words[1:4], model, *words[5:], "--dry-run", "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 processes of a launcher" in done.stdout


def test_kubernetes_takes_its_pods() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    pods = [{"kind": "Pod", "metadata": {"name": "one"}, **one["template"]} for one in GROUPS]
    for one in (SERVICE, *pods):
        validator.validate({"apiVersion": "v1", **one}, "1.37", strict=True)
