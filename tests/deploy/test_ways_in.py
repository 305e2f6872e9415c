"""Units, quadlet, compose file, Containerfile: what they start is a command of ours."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.base.version import VERSION
from headrace.cli.main import main
from headrace.factory.image import CUDA_ENVIRONMENT, ENVIRONMENT, USER
from headrace.route.roster import read_servers

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "headrace.service"
QUADLET = DEPLOY / "container" / "headrace.container"
COMPOSE = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()
KEYS = frozenset(
    """
    AddCapability AddDevice Annotation ContainerName DropCapability Environment EnvironmentFile
    EnvironmentHost Exec ExposeHostPort Group Image Label Network NoNewPrivileges Notify PodmanArgs
    PublishPort ReadOnly RunInit SeccompProfile Timezone User VolatileTmp Volume
    """.split()  # noqa: SIM905
)
"""Keys of `[Container]` that podman 4.4 takes (`pkg/systemd/quadlet`); any other is an error, and
then there is no service."""


def unit(path: Path) -> dict[str, dict[str, str]]:
    read = configparser.RawConfigParser(strict=True, interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read_string(path.read_text())
    return {name: dict(read[name]) for name in read.sections()}


def taken(words: list[str]) -> None:
    """Our command takes these words: a wrong option ends it with 2 before it does anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["headrace", *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0


def test_the_service_is_one_that_systemd_takes() -> None:
    found = unit(UNIT)["Service"]
    assert found["Type"] == "notify"
    assert found["NotifyAccess"] == "all", "the process that serves is not the first one"
    taken(shlex.split(found["ExecStart"])[1:])
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    words = [analyze, "security", "--offline=true", str(UNIT)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    level = re.search(r"exposure level for headrace.service: ([\d.]+)", said)
    assert level
    assert float(level[1]) < 2.5
    # Words that Debian 12's systemd does not know are left out with a warning.
    words = [analyze, "verify", str(UNIT)]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    assert "Unknown" not in said


def test_the_quadlet_starts_the_image() -> None:
    found = unit(QUADLET)["Container"]
    assert found.keys() <= KEYS
    assert found["PodmanArgs"] == "--tmpfs=/tmp", "Tmpfs= came with a later podman"
    assert found["Image"] == f"localhost/headrace:{VERSION}"
    taken(shlex.split(found["Exec"]))


@pytest.mark.parametrize("name", COMPOSE)
def test_a_service_of_the_compose_file_is_a_command_of_ours(name: str) -> None:
    service: dict[str, Any] = COMPOSE[name]
    image = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", service["image"])
    assert image == f"localhost/headrace:{VERSION}" + ("-cuda" if name == "headrace-gpu" else "")
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
    taken(words)
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    if words[0] == "route":
        _, (source,) = read_servers([word for word in words if word.startswith("dns://")])
        assert source.name == "dns://pod:8000"
        assert "pod" in COMPOSE


def test_the_containerfile_makes_what_the_image_is() -> None:
    lines = re.sub(r"\\\n\s*", "", CONTAINERFILE)
    assert f"USER {USER}:{USER}" in lines
    (settings,) = re.findall(r"^ENV (.*)$", lines, re.M)
    ours = {*ENVIRONMENT, *CUDA_ENVIRONMENT}
    assert {one for one in ours if not one.startswith(("PATH", "LANG"))} <= {*settings.split()}
    (words,) = re.findall(r"^CMD (.*)$", lines, re.M)
    taken(yaml.safe_load(words))
    for lock in re.findall(r"LOCK=([\w.-]+)", lines):
        assert (DEPLOY / lock).is_file()
