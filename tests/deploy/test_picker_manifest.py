"""The pool and its picker: definitions take them, and the command is one of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import running

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "deploy/picker/picker.yaml").read_text()
POOL, DEPLOYMENT, SERVICE = yaml.safe_load_all(TEXT)
(CONTAINER,) = DEPLOYMENT["spec"]["template"]["spec"]["containers"]


def test_the_pool_finds_its_picker() -> None:
    schemas = json.loads((ROOT / "tests/factory/crds.json").read_text())["schemas"]
    jsonschema.validate(POOL, schemas["InferencePool"])
    ref = POOL["spec"]["endpointPickerRef"]
    assert ref["name"] == SERVICE["metadata"]["name"]
    (port,) = SERVICE["spec"]["ports"]
    assert ref["port"]["number"] == port["port"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert port["targetPort"] == CONTAINER["ports"][0]["containerPort"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["grpc"]["port"] == port["targetPort"]
    spec = DEPLOYMENT["spec"]["template"]["spec"]
    (drain,) = [word for word in CONTAINER["command"] if word.startswith("--drain-seconds=")]
    assert spec["terminationGracePeriodSeconds"] > int(drain.partition("=")[2])


def test_kubernetes_takes_what_is_its_own() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for one in (DEPLOYMENT, SERVICE):
        validator.validate(one, "1.37", strict=True)


@pytest.mark.slow
def test_the_command_starts() -> None:
    pytest.importorskip("grpc")
    words = [sys.executable, *CONTAINER["command"][1:]]
    given = {
        "--port=8080": "--port=0",
        "--endpoint-picker=0.0.0.0:9002": "--endpoint-picker=127.0.0.1:0",
    }
    assert {*given} < {*words}
    with running([given.get(word, word) for word in words]) as gate:
        assert gate.await_line(r"endpoints are picked on port [1-9]")
        gate.signal()
        assert gate.wait() == 0
