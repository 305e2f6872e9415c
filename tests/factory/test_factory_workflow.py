"""Generated workflows: published schemas take them, and their lines do what they say."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from factory_cell import AT_LEAST
from oci_registry import running

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.factory.build import BuildOptions
from headrace.factory.fleet import Cell, read_fleet
from headrace.factory.workflow import MATRIX, Platform, WorkflowOptions, workflow
from tiny import talker

IMAGE = "registry.example/headrace@sha256:" + "a" * 64
HOSTILE = [
    "-x",
    "--json",
    "a b; rm -rf ~",
    "it's",
    'say "x"',
    "$HOME",
    "`id`",
    "a&b|c>d",
    "ü*?",
    "a\\",
    "#x",
    "!x",
]
PACKAGE = "headrace[factory] @ https://files.example/headrace.whl"
IN_PODS = ("argo", "tekton", "kuberay")
FLEET = 'models = ["one", "it\'s two"]\nrecipes = [{}, {device = "cuda"}]\n'


def cell(model: str = "one", **options: Any) -> Cell:
    return Cell(EngineOptions(model=model, **options), BuildOptions())


def made(platform: str, cells: list[Cell], **asked: Any) -> dict[str, Any]:
    if platform in IN_PODS:
        asked = {"image": IMAGE, **asked}
    elif "package" not in asked:
        asked = {"package": PACKAGE, **asked}
    options = WorkflowOptions(**asked)
    found: dict[str, Any] = json.loads(workflow(Platform(platform), cells, options, FLEET))
    return found


@pytest.mark.parametrize("platform", ["github", "gitlab"])
def test_what_pip_installs_has_to_be_said(platform: str) -> None:
    """No index has this package: another's of its name would be installed."""
    with pytest.raises(OptionError, match="no index has this one") as caught:
        workflow(Platform(platform), [cell()], WorkflowOptions(), FLEET)
    assert caught.value.param == "package"


FULL: dict[str, Any] = {"registry": "registry.example/m", "ring": "staging", "on": "x,y;z"}
NODES = {**FULL, "on": "zone=a,gpu.example/kind=b;zone=c"}


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        ("github", ["vendor.github-workflows"]),
        ("gitlab", ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
    ],
)
def test_published_schemas_take_them(platform: str, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="NOT TESTED: pip install check-jsonschema")
    cells = [cell(one) for one in HOSTILE]
    files = []
    for name, asked in {"full": FULL, "least": {}, "kept": {**FULL, "cache": "/srv/c"}}.items():
        (tmp_path / f"{name}.yml").write_text(json.dumps(made(platform, cells, **asked)))
        files.append(str(tmp_path / f"{name}.yml"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", *words]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    (tmp_path / "wrong.yml").write_text(json.dumps({"jobs": {"a": {"steps": 1}}, "a": {"tags": 1}}))
    assert subprocess.run([*command, str(tmp_path / "wrong.yml")], capture_output=True).returncode


def test_argo_knows_every_field() -> None:
    models = pytest.importorskip("hera.workflows.models", reason="NOT TESTED: pip install hera")
    found = made("argo", [cell("one", device="cuda"), cell("two")], **NODES)
    kept = models.Workflow.model_validate(found).model_dump(
        exclude_unset=True, by_alias=True, mode="json"
    )
    assert kept == found  # A field that it does not know would be gone.


def test_a_pod_runs_the_steps_of_a_cell_in_turn() -> None:
    cells = [cell("one", device="cuda"), cell("it's two")]
    argo, tekton = made("argo", cells, **NODES), made("tekton", cells, **NODES)
    templates = argo["spec"]["templates"][1:]
    work, pods = tekton["spec"]["pipelineSpec"]["tasks"], tekton["spec"]["taskRunSpecs"]
    assert len(templates) == len(work) == len(pods) == 4
    claimed = {one["name"] for one in argo["spec"]["volumes"]}
    for template, task, pod in zip(templates, work, pods, strict=True):
        containers, steps = template["containerSet"]["containers"], task["taskSpec"]["steps"]
        assert template["name"] == task["name"] == pod["pipelineTaskName"]
        assert template["nodeSelector"] == pod["podTemplate"]["nodeSelector"]
        names = [one["name"] for one in steps]
        assert names == ["build", "verify", "publish", "promote"]
        assert [one["args"] for one in containers] == [one["args"] for one in steps]
        assert [one.get("dependencies") for one in containers] == [None, *([n] for n in names[:-1])]
        mounts = {one["name"] for one in template["containerSet"]["volumeMounts"]}
        assert mounts == claimed == {one["name"] for one in task["taskSpec"]["volumes"]}
    assert work[2]["taskSpec"]["steps"][0]["args"][-2:] == ["--", "it's two"]
    limits = [one["taskSpec"]["steps"][0].get("computeResources") for one in work]
    assert [bool(one) for one in limits] == [True, True, False, False]


@pytest.mark.parametrize("kinds", [["avx512", "gpu"], []])
def test_a_job_of_ray_builds_the_fleet_on_every_kind_of_machine(
    kinds: list[str], tmp_path: Path
) -> None:
    """Held against what `crds.py` took of KubeRay's definition, its pods against Kubernetes'."""
    (file := tmp_path / "fleet.toml").write_text(f"hardware = {kinds}\n{FLEET}" if kinds else FLEET)
    asked = WorkflowOptions(
        image=IMAGE, on="a.example/kind=avx512,zone=a;zone=b" if kinds else None
    )
    text = workflow(Platform.kuberay, read_fleet(file), asked, file.read_text())
    settings, job = json.loads(text)["items"]
    assert settings["data"]["fleet.toml"] == file.read_text()
    schema = json.loads(Path(__file__).with_name("crds.json").read_text())["schemas"]["RayJob"]
    jsonschema.validate(job, schema)
    cluster = job["spec"]["rayClusterSpec"]
    for wrong in ({"headGroupSpec": None}, {"workers": []}):
        spec = {**job["spec"], "rayClusterSpec": {**cluster, **wrong}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**job, "spec": spec}, schema)
    groups = cluster["workerGroupSpecs"]
    started = [one["rayStartParams"] for one in groups]
    if kinds:
        declared = [json.loads(shlex.split(one["resources"])[0]) for one in started]
        assert declared == [{"avx512": 1}, {"gpu": 1}]
        nodes = [one["template"]["spec"]["nodeSelector"] for one in groups]
        assert nodes == [{"a.example/kind": "avx512", "zone": "a"}, {"zone": "b"}]
    else:
        assert started == [{"num-cpus": "1"}]
    # What the job runs is a command, and it finds what the pods mount.
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:5] == ["python3", "-m", "headrace", "factory", "fleet"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    where = [one["mountPath"] for one in head["volumeMounts"]]
    assert Path(words[5]).parent == Path(where[2])
    assert Path(words[9]).is_relative_to(where[0])
    assert workflow(Platform.kuberay, read_fleet(file), asked, file.read_text()) == text
    validator = pytest.importorskip("kubernetes_validate")
    for one in (cluster["headGroupSpec"], *groups):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **one["template"]}
        for version in ("1.35", "1.36", "1.37"):
            validator.validate(pod, version, strict=True)
            validator.validate(settings, version, strict=True)


@pytest.mark.parametrize("platform", ["github", "gitlab"])
def test_a_shell_reads_hostile_names_as_one_word(platform: str) -> None:
    found = made(platform, [cell(one) for one in HOSTILE])
    rows = found["jobs"]["cells-1"]["strategy"]["matrix"]["include"] if platform == "github" else ()
    jobs = [one for name, one in found.items() if isinstance(one, dict) and "script" in one]
    lines = [row["build"] for row in rows] or [job["script"][0] for job in jobs]
    echo = (
        f'headrace() {{ {shlex.quote(sys.executable)} -c "import sys; print(sys.argv[-1])" "$@"; }}'
    )
    done = subprocess.run(["bash", "-c", "\n".join([echo, *lines])], capture_output=True, text=True)
    assert done.stdout.splitlines() == HOSTILE, done.stderr


@pytest.mark.parametrize("platform", [one for one in Platform if one != "kuberay"])
@pytest.mark.parametrize("name", ["${{ secrets.X }}", "{{x}}", "$(x)", "$[[ x ]]", "a\nb"])
def test_expressions_are_refused(platform: str, name: str) -> None:
    """KubeRay knows none, and has names in a file alone."""
    with pytest.raises(OptionError, match="expression"):
        made(platform, [cell(name)])
    with pytest.raises(OptionError):
        made(platform, [cell()], registry=f"{name}/host:")
    with pytest.raises(OptionError):
        made(platform, [cell()], on=name)


@pytest.mark.parametrize(
    ("platform", "asked"),
    [
        ("argo", {"image": None}),
        ("tekton", {"image": "headrace:latest"}),
        ("argo", {"cache": "/there"}),
        ("tekton", {"on": "gpu"}),
        ("github", {"image": IMAGE}),
        ("kuberay", {"image": "rayproject/ray:latest"}),
        ("kuberay", {"cache": "/there"}),
        ("kuberay", {"on": "zone=a;zone=b"}),
        *(("kuberay", {name: FULL[name]}) for name in ("registry", "ring")),
        ("gitlab", {"cache": "relative"}),
        ("gitlab", {"ring": "rings"}),
        ("github", {"registry": "nowhere"}),
    ],
)
def test_what_a_platform_cannot_do_is_refused_by_name(platform: str, asked: Any) -> None:
    with pytest.raises(OptionError, match=next(iter(asked))):
        made(platform, [cell()], **asked)


def test_a_large_fleet_is_several_matrices_and_no_object_of_a_cluster() -> None:
    cells = [cell(f"m{at}") for at in range(2 * MATRIX + 1)] + [cell("m0")]
    jobs = made("github", cells)["jobs"].values()
    sizes = [len(one["strategy"]["matrix"]["include"]) for one in jobs]
    assert sizes == [MATRIX, MATRIX, 1]
    with pytest.raises(OptionError, match="split the fleet"):
        made("argo", cells)


def filled(row: dict[str, str]) -> Callable[[str], str]:
    return lambda text: re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: row[found[1]], text)


@pytest.mark.slow
def test_the_lines_of_a_workflow_build_publish_and_promote(tmp_path: Path) -> None:
    """A runner of GitHub's in ten lines: it installs nothing, and `headrace` is this one."""
    (tmp_path / "fleet.toml").write_text(
        f"models = [{json.dumps(str(talker.make(tmp_path / 'tiny')))}]\n"
        "recipes = [{threads = 1}]\n"
        f'[build]\nat_least = {AT_LEAST}\nwithout = "accuracy,sbom"\n'
    )
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "headrace"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m headrace "$@"\n')
    program.chmod(0o755)
    command = ["openssl", "genpkey", "-algorithm", "ed25519"]
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with running() as server:
        asked = {"registry": f"{server.host}/fleet", "ring": "staging"}
        job = made("github", read_fleet(tmp_path / "fleet.toml"), **asked)["jobs"]["cells-1"]
        (row,) = job["strategy"]["matrix"]["include"]
        environment = {
            **os.environ,
            **job["env"],
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "HEADRACE_KEY": key,
            "HEADRACE_REGISTRY": "{}",
        }
        for step in job["steps"]:
            if "run" in step and step["name"] != "install":
                line = ["bash", "-e", "-c", filled(row)(step["run"])]
                done = subprocess.run(
                    line, cwd=tmp_path, env=environment, capture_output=True, text=True
                )
                assert done.returncode == 0, f"{step['name']}: {done.stdout}{done.stderr}"
        assert row["cell"] in server.tags or any(row["cell"] in str(one) for one in server.tags)
    rings = {path.stem for path in (tmp_path / row["store"] / "rings").glob("*.json")}
    assert rings == {"dev", "staging"}
    assert not (tmp_path / "headrace-key.pem").exists()
