"""The Helm chart of a profile: its schema is the options', and what it renders Kubernetes takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from test_factory_rings import Workshop

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError
from headrace.factory.chart import OURS, schema, write_chart

DIGEST = f"sha256:{'0' * 64}"
IMAGE, REFERENCE = f"registry.example/headrace@{DIGEST}", f"registry.example/models/one@{DIGEST}"
KEY = {"own.pem": "-----BEGIN PUBLIC KEY-----\n"}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    shop = Workshop(tmp_path / "cache")
    shop.profile("one")
    folder = tmp_path / "chart"
    profile = shop.rings.find("one")
    write_chart(folder, profile, image=IMAGE, reference=REFERENCE, trusted=KEY)
    for wrong in (
        {"image": "headrace:latest"},
        {"reference": "registry.example/one:1"},
        {"image": "", "reference": ""},
    ):
        named = {"image": IMAGE, "reference": REFERENCE, **wrong}
        with pytest.raises(OptionError, match="is no host/repository@sha256"):
            write_chart(tmp_path / "other", profile, trusted=KEY, **named)
    with pytest.raises(OptionError, match="cannot be written: File exists"):
        write_chart(folder, profile, image=IMAGE, reference=REFERENCE, trusted=KEY)
    return folder


def values(chart: Path, **changes: Any) -> Any:
    return json.loads((chart / "values.yaml").read_text()) | changes


def test_the_schema_is_one_and_takes_the_charts_own_values(chart: Path) -> None:
    written = json.loads((chart / "values.schema.json").read_text())
    assert written == schema()
    jsonschema.Draft7Validator.check_schema(written)
    jsonschema.validate(values(chart), written)
    properties = written["properties"]["options"]["properties"]
    assert set(properties) | set(OURS) == {spec.name for spec in fields(ServerOptions)}


def test_every_option_is_held_to_its_bounds(chart: Path) -> None:
    """The chart's schema and the server agree on what may be set."""
    tried = 0
    for spec in fields(ServerOptions):
        if spec.name in OURS:
            continue
        low, high = spec.metadata.get("low"), spec.metadata.get("high")
        bad = [low - 1] if low is not None else []
        bad += [high + 1] if high is not None else []
        bad += ["none of them"] if "choices" in spec.metadata else [[]]
        for value in bad:
            tried += 1
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(values(chart, options={spec.name: value}), schema())
            with pytest.raises(OptionError, match=spec.name):
                ServerOptions(**{spec.name: value}).verify()
        for value in [*spec.metadata.get("choices", ()), low, high]:
            if value is not None:
                jsonschema.validate(values(chart, options={spec.name: value}), schema())
    assert tried > 15


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "headrace:latest"},
        {"profile": {"reference": REFERENCE}},
        {"trusted": {}},
        {"replicas": -1},
        {"replica": 1},
        {"options": {"max_contxt": 1}},
        {"options": {"max_context": 64}},
        {"network": {"from": []}},
        {"monitor": "yes"},
        {"autoscale": {"prometheus": "prometheus:9090", "maxReplicas": 4, "wait": 2}},
        {"autoscale": {"prometheus": "", "maxReplicas": 0, "wait": 2}},
        {"autoscale": {"prometheus": "", "maxReplicas": 4, "wait": 0}},
        {"picker": "Not_A_Name"},
    ],
)
def test_wrong_values_are_refused(chart: Path, changes: dict[str, Any]) -> None:
    """Among them an option of the engine: those are bound by the profile."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values(chart, **changes), schema())


def rendered(chart: Path, *settings: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    words = [helm, "template", "river", str(chart)]
    words += [word for one in settings for word in ("--set", one)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


SETTINGS: list[tuple[str, ...]] = [
    (),
    ("options.log_format=json", "options.drain_seconds=7"),
    ("options.max_body=123456789", "replicas=0"),
    ("tolerations[0].operator=Exists", "imagePullSecrets[0].name=pull"),
    ("network.from[0].podSelector.matchLabels.app=gateway", "nodeSelector=null"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_three_versions_of_kubernetes_take_what_is_rendered(
    chart: Path, settings: tuple[str, ...]
) -> None:
    documents = rendered(chart, *settings)
    validator = pytest.importorskip("kubernetes_validate")
    assert {one["kind"] for one in documents} == {
        "ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"
    }  # fmt: skip
    for version in ("1.35", "1.36", "1.37"):
        for document in documents:
            validator.validate(document, version, strict=True)


FOREIGN = "monitor=true", "autoscale.prometheus=http://prometheus:9090", "picker=picker"


@pytest.mark.parametrize(
    "settings", [FOREIGN, (*FOREIGN, "replicas=0", "autoscale.wait=5")], ids=len
)
def test_custom_resources_are_what_their_definitions_take(
    chart: Path, settings: tuple[str, ...]
) -> None:
    """Held against what `crds.py` took of the definitions: a field that it lacks is refused."""
    schemas = json.loads((Path(__file__).parent / "crds.json").read_text())["schemas"]
    documents = {one["kind"]: one for one in rendered(chart, *settings)}
    assert set(schemas) == {"InferencePool", "ScaledObject", "ServiceMonitor"}
    for kind, found in schemas.items():
        jsonschema.Draft7Validator.check_schema(found)
        jsonschema.validate(documents[kind], found)
        for wrong in (
            {"selektor": 1},
            *({name: None} for name in found["properties"]["spec"]["required"]),
        ):
            spec = {k: v for k, v in {**documents[kind]["spec"], **wrong}.items() if v is not None}
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({**documents[kind], "spec": spec}, found)
    assert "replicas" not in documents["Deployment"]["spec"]
    query = documents["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    assert 'vllm:num_requests_waiting{namespace="default",service="river"}' in query


def test_pods_have_no_rights_and_know_what_they_serve(chart: Path) -> None:
    documents = rendered(chart, "options.max_body=123456789", "monitor=true")
    (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["image"] == IMAGE
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
    assert pod["initContainers"][0]["args"] == ["factory", "load", REFERENCE]
    digest = values(chart)["profile"]["digest"]
    assert pod["containers"][0]["args"][:4] == ["serve", "--offline", "--profile", digest]
    settings, trusted = [one["data"] for one in documents if one["kind"] == "ConfigMap"]
    assert settings["options.toml"] == 'host = "0.0.0.0"\nmax_body = 123456789\n'
    assert trusted == KEY
    assert [one["kind"] for one in documents].count("ServiceMonitor") == 1
