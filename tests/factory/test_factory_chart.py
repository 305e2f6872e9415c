"""The Helm chart of a profile: its schema is the options', and what it renders Kubernetes takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helm import linted, rendered
from test_factory_rings import Workshop

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError
from headrace.factory.chart import AROUND, OURS, PINNED, schema, write_chart
from headrace.server.hosts import read_hosts

DIGEST = f"sha256:{'0' * 64}"
IMAGE, REFERENCE = f"registry.example/headrace@{DIGEST}", f"registry.example/models/one@{DIGEST}"
MEMORY = 1_500_000_000
KEY = {"own.pem": "-----BEGIN PUBLIC KEY-----\n"}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    shop = Workshop(tmp_path / "cache")
    shop.profile("one", limits={"memory": MEMORY})
    folder = tmp_path / "chart"
    profile = shop.rings.find("one")
    asked = {"weights": DIGEST, "trusted": KEY}
    write_chart(folder, profile, image=IMAGE, reference=REFERENCE, **asked)
    for wrong in (
        {"image": "headrace:latest"},
        {"reference": "registry.example/one:1"},
        {"image": "", "reference": ""},
    ):
        named = {"image": IMAGE, "reference": REFERENCE, **wrong}
        with pytest.raises(OptionError, match="is no host/repository@sha256"):
            write_chart(tmp_path / "other", profile, **asked, **named)
    with pytest.raises(OptionError, match="cannot be written: File exists"):
        write_chart(folder, profile, image=IMAGE, reference=REFERENCE, **asked)
    return folder


def values(chart: Path, **changes: Any) -> Any:
    return yaml.safe_load((chart / "values.yaml").read_text()) | changes


def test_the_schema_is_one_and_takes_the_charts_own_values(chart: Path) -> None:
    written = json.loads((chart / "values.schema.json").read_text())
    assert written == schema()
    assert written["definitions"]["pinned"]["pattern"] == PINNED
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


SCALED = {"prometheus": "http://prometheus:9090", "maxReplicas": 4, "wait": 2}


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
        {"weights": {"from": "up", "reference": REFERENCE, "path": "/weights", "panels": ""}},
        {"weights": {"from": "volume", "reference": "models:1", "path": "/weights", "panels": ""}},
        {"weights": {"from": "load", "reference": REFERENCE, "path": "/weights", "panels": "one"}},
        {"frame": "DaemonSet"},
        {"replicas": 0},
        {"gpu": {"count": 2, "resource": "nvidia.com/gpu", "runtimeClass": ""}},
        {"gpu": {"count": 1, "resource": "gpu", "runtimeClass": ""}},
        {"gpu": 1},
        {"probes": {"startSeconds": 0, "readySeconds": 1, "liveSeconds": 1}},
        {"ingress": {"host": "A_B", "class": "", "tlsSecret": "", "annotations": {}}},
        {"router": {"replicas": -1, "hosts": "", "resources": {}}},
        {"httpRoute": {"gateway": "g", "namespace": "", "hostnames": [""], "timeout": "0s"}},
        {"httpRoute": {"gateway": "g", "namespace": "", "hostnames": [], "timeout": "long"}},
        {"frame": "InferenceService", "router": {"replicas": 1, "hosts": "", "resources": {}}},
        {"frame": "InferenceService", "monitor": True},
        {"frame": "InferenceService", "autoscale": SCALED},
    ],
)
def test_wrong_values_are_refused(chart: Path, changes: dict[str, Any]) -> None:
    """Among them an option of the engine: those are bound by the profile."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values(chart, **changes), schema())


NAMED = "frame=StatefulSet"
SETTINGS: list[tuple[str, ...]] = [
    (),
    (NAMED, "replicas=3"),
    ("options.log_format=json", "options.drain_seconds=7"),
    ("options.max_body=123456789", "disruptions=0"),
    ("tolerations[0].operator=Exists", "imagePullSecrets[0].name=pull"),
    ("weights.from=volume",),
    ("weights.from=volume", f"weights.panels={REFERENCE}"),
    ("gpu.count=1", "gpu.resource=nvidia.com/mig-3g.71gb", "gpu.runtimeClass=nvidia"),
    ("probes.startSeconds=61", "resources.limits.memory=16Gi"),
    ("network.from[0].podSelector.matchLabels.app=gateway", "nodeSelector=null"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_three_versions_of_kubernetes_take_what_is_rendered(
    chart: Path, settings: tuple[str, ...]
) -> None:
    documents = rendered(chart, *settings)
    validator = pytest.importorskip("kubernetes_validate")
    frame = "StatefulSet" if NAMED in settings else "Deployment"
    assert {one["kind"] for one in documents} == {
        "ConfigMap", frame, "NetworkPolicy", "PodDisruptionBudget", "Service"
    }  # fmt: skip
    for version in ("1.35", "1.36", "1.37"):
        for document in documents:
            validator.validate(document, version, strict=True)


MONITORED = "monitor=true", "autoscale.prometheus=http://prometheus:9090"
PULLED = "picker=picker", "tolerations[0].operator=Exists", "imagePullSecrets[0].name=pull"
CUSTOM = {
    "InferencePool": MONITORED,
    "PrometheusRule": MONITORED,
    "ScaledObject": (*MONITORED, "replicas=0", "autoscale.wait=5"),
    "ServiceMonitor": MONITORED,
    "LeaderWorkerSet": (*MONITORED, "frame=LeaderWorkerSet"),
    "InferenceService": ("frame=InferenceService", "options.drain_seconds=7"),
}


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_resources_are_what_their_definitions_take(chart: Path, kind: str) -> None:
    """Held against what `crds.py` took of the definitions: a field that it lacks is refused."""
    schemas = json.loads((Path(__file__).parent / "crds.json").read_text())["schemas"]
    assert set(schemas) == {*CUSTOM, "RayJob"}
    (document,) = [one for one in rendered(chart, *PULLED, *CUSTOM[kind]) if one["kind"] == kind]
    found = schemas[kind]
    jsonschema.Draft7Validator.check_schema(found)
    jsonschema.validate(document, found)
    needed = found["properties"]["spec"].get("required", ())
    for wrong in ({"selektor": 1}, *({name: None} for name in needed)):
        spec = {k: v for k, v in {**document["spec"], **wrong}.items() if v is not None}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**document, "spec": spec}, found)


def test_what_scales_and_what_warns_find_the_pods(chart: Path) -> None:
    documents = {one["kind"]: one for one in rendered(chart, *MONITORED)}
    assert "replicas" not in documents["Deployment"]["spec"]
    query = documents["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]
    assert 'vllm:num_requests_waiting{namespace="default",service="river"}' in query
    assert documents["ScaledObject"]["spec"]["scaleTargetRef"] == {"name": "river"}
    # The rules know servers by a job's name, which is the value of the service's label.
    label = documents["ServiceMonitor"]["spec"]["jobLabel"]
    assert documents["Service"]["metadata"]["labels"][label] == "headrace"
    groups = documents["PrometheusRule"]["spec"]["groups"]
    assert [one["name"] for one in groups] == ["headrace", "headrace-recording"]
    (down,) = [one for one in groups[0]["rules"] if one.get("alert") == "HeadraceDown"]
    assert re.fullmatch(down["expr"].split('"')[1], "headrace")
    assert "{{ $labels.instance }}" in down["annotations"]["summary"]


@pytest.mark.parametrize(
    ("way", "version", "mounted"),
    [("auto", "1.34.9", False), ("auto", "1.35.0", True), ("load", "1.37.0", False)],
)
def test_weights_are_mounted_where_the_cluster_can(
    chart: Path, way: str, version: str, mounted: bool
) -> None:
    words = ("--kube-version", version)
    settings = f"weights.from={way}", f"weights.panels={REFERENCE}"
    documents = rendered(chart, *settings, words=words)
    (pod,) = [one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment"]
    images = {one["name"]: one["image"] for one in pod["volumes"] if "image" in one}
    (serve,) = pod["containers"]
    assert ("initContainers" in pod) != mounted
    assert set(images) == ({"profile", "weights", "panels"} if mounted else set())
    where = {one["name"]: one for one in serve["volumeMounts"]}
    assert ("store" in where) != mounted
    if mounted:
        assert images["profile"]["reference"] == REFERENCE
        assert images["weights"]["reference"] == REFERENCE  # Their digest is nought as well.
        assert images["panels"]["reference"] == REFERENCE
        assert where["panels"] == {"name": "panels", "mountPath": "/panels", "readOnly": True}
        assert where["weights"] == {"name": "weights", "mountPath": "/weights", "readOnly": True}
        profile = "/profile/profile.dsse.json"
        assert "--no-keep-packed" not in serve["args"], "panels are mounted"
        assert serve["args"][:5] == ["serve", "/weights", "--offline", "--profile", profile]


def test_a_frames_pods_have_names_for_an_endpoint_picker(chart: Path) -> None:
    """The names are a StatefulSet's: its own, a number, and the headless service that it names."""
    documents = rendered(chart, NAMED, *MONITORED, *PULLED)
    named = {(one["kind"], one["metadata"]["name"]): one.get("spec") for one in documents}
    pods = named["StatefulSet", "river"]
    headless, balanced = named["Service", pods["serviceName"]], named["Service", "river"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert "clusterIP" not in balanced
    labels = pods["template"]["metadata"]["labels"]
    assert headless["selector"] == balanced["selector"] == labels
    assert named["InferencePool", "river"]["selector"]["matchLabels"] == labels
    assert named["ScaledObject", "river"]["scaleTargetRef"] == {
        "name": "river",
        "kind": "StatefulSet",
    }
    labelled = [
        one for one in documents if one["kind"] == "Service" and "labels" in one["metadata"]
    ]
    assert len(labelled) == 1, "what scrapes services by their label would scrape every pod twice"
    assert not [one for one in rendered(chart) if one["metadata"]["name"] == "river-pods"]


def test_every_frame_has_one_pod(chart: Path) -> None:
    """Results of trying the pod in one frame hold in the others."""
    found = {}
    for frame in schema()["properties"]["frame"]["enum"]:
        documents = {one["kind"]: one for one in rendered(chart, f"frame={frame}")}
        spec = documents[frame]["spec"]
        place = spec.get("leaderWorkerTemplate", spec)
        found[frame] = place.get("template") or place.get("workerTemplate") or spec["predictor"]
        assert ("Service" in documents) == (frame != "InferenceService")
    deployed = found["Deployment"]
    assert found["LeaderWorkerSet"] == found["StatefulSet"] == deployed
    predictor = found["InferenceService"]
    assert predictor["containers"][0].pop("name") == "kserve-container"
    assert deployed["spec"]["containers"][0].pop("name") == "serve"
    assert {name: predictor[name] for name in deployed["spec"]} == deployed["spec"]
    assert {name: predictor[name] for name in deployed["metadata"]} == deployed["metadata"]
    scaled = rendered(chart, "frame=LeaderWorkerSet", *MONITORED)
    (target,) = [one["spec"]["scaleTargetRef"] for one in scaled if one["kind"] == "ScaledObject"]
    assert target["kind"] == "LeaderWorkerSet"


LET_PASS = {
    "CKV_K8S_11": "a limit of the processor slows a server down at random",
    "CKV_K8S_12": "no profile says how much memory its options need: whoever installs it does",
    "CKV_K8S_13": "the same",
    "CKV_K8S_21": "the namespace is whoever installs it's",
    "CKV_K8S_43": "image and weights are bound by digest; the rule wants it said twice",
}
"""Rules of the policy that the chart breaks on purpose, and why."""


def test_a_policy_finds_nothing(chart: Path, tmp_path: Path) -> None:
    """Checkov's rules about pods, their rights and their network."""
    checkov = shutil.which("checkov")
    documents = rendered(chart, *MONITORED, *PULLED)
    if checkov is None:
        pytest.skip("checkov is not installed")
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    words = [checkov, "--compact", "--framework", "kubernetes", "--output", "json"]
    words += ["--file", str(file), "--skip-check", ",".join(LET_PASS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["passed"] > 50
    assert found["results"]["failed_checks"] == []


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
    args = pod["containers"][0]["args"]
    assert args[:4] == ["serve", "--offline", "--profile", digest]
    assert args[-1] == "--no-keep-packed", "a pod's cache ends with it"
    settings, trusted = [one["data"] for one in documents if one["kind"] == "ConfigMap"]
    assert settings["options.toml"] == 'host = "0.0.0.0"\nmax_body = 123456789\n'
    assert trusted == KEY
    assert [one["kind"] for one in documents].count("ServiceMonitor") == 1


# Ways in, GPUs, values that explain themselves


def test_the_values_have_a_comment_each(chart: Path) -> None:
    text = (chart / "values.yaml").read_text()
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if re.match(r" *[a-zA-Z]+:", line):
            assert lines[place - 1].lstrip().startswith("# "), line
    for spec in fields(ServerOptions):
        assert (f"#   {spec.name}: {json.dumps(spec.default)}" in lines) == (spec.name not in OURS)
    assert max(map(len, (line for line in lines if "#" in line))) < 500


def test_memory_is_requested_as_the_plan_needs_it(chart: Path, tmp_path: Path) -> None:
    requests = values(chart)["resources"]["requests"]
    asked = int(requests["memory"].removesuffix("Mi")) << 20
    assert MEMORY + AROUND <= asked < MEMORY + AROUND + (1 << 28)
    shop = Workshop(tmp_path / "older")
    shop.profile("older")
    folder, profile = tmp_path / "older_chart", shop.rings.find("older")
    write_chart(folder, profile, image=IMAGE, reference=REFERENCE, weights=DIGEST, trusted=KEY)
    assert "memory" not in values(folder)["resources"]["requests"], "the profile says none"


def test_a_profile_of_a_gpu_asks_for_one(tmp_path: Path) -> None:
    shop = Workshop(tmp_path / "cache")
    hardware = {"machine": "x86_64", "cores": 8, "gpus": ["NVIDIA H200 139 GiB"]}
    shop.profile("gpu", hardware=hardware, limits={"memory": 120 << 30})
    folder, profile = tmp_path / "gpu_chart", shop.rings.find("gpu")
    write_chart(folder, profile, image=IMAGE, reference=REFERENCE, weights=DIGEST, trusted=KEY)
    assert values(folder)["resources"]["requests"] == {"cpu": "8", "memory": "4096Mi"}
    settings = ("gpu.runtimeClass=nvidia", "resources.limits.memory=64Gi")
    (pod,) = pods_of(rendered(folder, *settings), "Deployment")
    assert pod["runtimeClassName"] == "nvidia"
    for container in (*pod["initContainers"], *pod["containers"]):
        limits = container["resources"]["limits"]
        assert limits == {"nvidia.com/gpu": "1", "memory": "64Gi"}
    (pod,) = pods_of(rendered(folder, "gpu.count=0"), "Deployment")
    assert "runtimeClassName" not in pod
    assert "limits" not in pod["containers"][0]["resources"]


def pods_of(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one["spec"]["template"]["spec"] for one in documents if one["kind"] == kind]


FRONT = (
    "ingress.host=river.example.com",
    "ingress.class=nginx",
    "ingress.tlsSecret=river",
    "ingress.annotations.a\\.example/b=c",
    "httpRoute.gateway=gate",
    "httpRoute.namespace=gates",
    "httpRoute.hostnames[0]=*.example.org",
    "router.replicas=2",
    "router.hosts=one.example",
    "network.from[0].podSelector.matchLabels.app=gateway",
)


def test_ways_in_lead_to_the_router_and_the_router_to_the_pods(chart: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    documents = rendered(chart, *FRONT)
    kinds = [one["kind"] for one in documents]
    assert kinds.count("Deployment") == kinds.count("NetworkPolicy") == kinds.count("Service") == 2
    for one in documents:
        if one["kind"] != "HTTPRoute":
            validator.validate(one, "1.37", strict=True)
    named = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    ingress, route = named["Ingress", "river"]["spec"], named["HTTPRoute", "river"]["spec"]
    (path,) = ingress["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "river-router", "port": {"name": "http"}}
    assert ingress["tls"] == [{"hosts": ["river.example.com"], "secretName": "river"}]
    assert route["parentRefs"] == [{"name": "gate", "namespace": "gates"}]
    (rule,) = route["rules"]
    assert rule["backendRefs"] == [{"name": "river-router", "port": 80}]
    assert rule["timeouts"] == {"request": "0s"}
    service = named["Service", "river-router"]["spec"]
    router = named["Deployment", "river-router"]["spec"]["template"]
    assert service["selector"] == router["metadata"]["labels"]
    args = router["spec"]["containers"][0]["args"]
    assert args[:2] == ["route", "k8s://default/river:http"]
    names = args[args.index("--hosts") + 1].split(",")
    assert names == [
        ".cluster.local", "river-router", "river-router.default", "one.example",
        "river.example.com", ".example.org",
    ]  # fmt: skip
    assert read_hosts(",".join(names))
    (ours,) = [one for one in documents if one["kind"] == "Role"]
    assert ours["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]
    (rule,) = named["NetworkPolicy", "river"]["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": router["metadata"]["labels"]}} in rule["from"]
    assert len(rule["from"]) == 2
    ports = [one["name"] for one in named["Service", "river"]["spec"]["ports"]]
    assert ports == ["http"], "the router asks for the port of this name"


def test_the_routers_command_is_one_of_ours(chart: Path, tmp_path: Path) -> None:
    """Without a cluster it says that it is in none."""
    (pod,) = [
        one["spec"]["template"]["spec"]
        for one in rendered(chart, *FRONT)
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "river-router"
    ]
    words = [sys.executable, "-m", "headrace", *pod["containers"][0]["args"]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no KUBERNETES_SERVICE_HOST is set here" in done.stderr


def test_without_a_router_ways_in_lead_to_the_service(chart: Path) -> None:
    documents = rendered(chart, "ingress.host=a.example", "httpRoute.gateway=gate")
    named = {one["kind"]: one.get("spec") for one in documents}
    (path,) = named["Ingress"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == "river"
    assert "tls" not in named["Ingress"]
    assert named["HTTPRoute"]["rules"][0]["backendRefs"][0]["name"] == "river"
    assert "ServiceAccount" not in named


def test_pods_answer_under_the_names_that_lead_to_them(chart: Path) -> None:
    """An Ingress passes its host's name on, and a server without keys refuses unknown names."""

    def told(*settings: str) -> tuple[set[str], str]:
        documents = rendered(chart, *settings)
        (text,) = [
            one["data"]["options.toml"] for one in documents
            if one["kind"] == "ConfigMap" and one["metadata"]["name"] == "river-settings"
        ]  # fmt: skip
        (pod,) = [
            one["spec"]["template"]["metadata"]["annotations"]["headrace.dev/settings"]
            for one in documents
            if one["kind"] == "Deployment" and one["metadata"]["name"] == "river"
        ]
        return set(read_hosts(tomllib.loads(text).get("hosts"))), pod

    plain, ways = told(), ("ingress.host=a.example", "httpRoute.gateway=gate",
                           "httpRoute.hostnames[0]=*.b.example")  # fmt: skip
    assert plain[0] == set()
    assert told("options.hosts=c.example")[0] == {"c.example"}
    names, pod = told(*ways, "options.hosts=c.example")
    assert names == {"a.example", ".b.example", "c.example"}
    assert pod not in (plain[1], told("options.hosts=c.example")[1]), "pods start anew"
    assert told(*ways, "router.replicas=1") == plain, "the router is asked by these names"


def test_helm_finds_nothing_wrong(chart: Path) -> None:
    assert linted(chart) == []
