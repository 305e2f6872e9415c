"""The GPUs of a machine, told by a driver that is compiled for the test: real libraries, loaded by
the names that the real ones have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

GIB = 2**30
BIG, SMALL, PART = "aa" * 16, "bb" * 16, "cc" * 16
H200 = f"{BIG} {141 * GIB} {140 * GIB} GPU 9 0 132 0 NVIDIA H200"
T4 = f"{SMALL} {15 * GIB} {9 * GIB} GPU 7 5 40 0 Tesla T4"
MIG = f"{PART} {18 * GIB} {17 * GIB} MIG 9 0 16 0 NVIDIA H100 MIG 1g.20gb"
ORIN = f"{BIG} {61 * GIB} -1 GPU 8 7 16 1 Orin"
SPARK = f"{BIG} {119 * GIB} -1 GPU 12 1 48 1 NVIDIA GB10"
ASK = """
import json, sys
from dataclasses import asdict
from headrace.base.gpus import driver
print(json.dumps(asdict(driver(int(sys.argv[1])))))
"""

Machine = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_gpus.c")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, source], check=True)
    return folder


@pytest.fixture
def machine(libraries: Path, tmp_path: Path) -> Machine:
    """Return the environment of a process on a machine with these devices."""

    def build(*devices: str, init: int = 0, cuda: int = 13000) -> dict[str, str]:
        facts = tmp_path / "gpus"
        facts.write_text("\n".join([f"{init} {cuda}", *devices]) + "\n")
        return {**os.environ, "LD_LIBRARY_PATH": str(libraries), "FAKE_GPUS": str(facts)}

    return build


def ask(environment: dict[str, str], host: int = 64 * GIB) -> dict[str, Any]:
    command = [sys.executable, "-c", ASK, str(host)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_devices_have_cudas_numbers_and_the_memory_of_their_own_uuid(machine: Machine) -> None:
    found = ask(machine(H200, T4))["gpus"]
    assert [gpu["name"] for gpu in found] == ["NVIDIA H200", "Tesla T4"]
    assert [gpu["free"] for gpu in found] == [140 * GIB, 9 * GIB]
    assert [gpu["index"] for gpu in found] == [0, 1]
    assert found[1]["capability"] == [7, 5]
    assert found[0]["multiprocessors"] == 132
    assert found[0]["block_memory"] == 101376


def test_an_instance_of_a_partitioned_gpu_has_its_own_memory(machine: Machine) -> None:
    [part] = ask(machine(MIG))["gpus"]
    assert (part["memory"], part["free"], part["multiprocessors"]) == (18 * GIB, 17 * GIB, 16)


def test_a_jetson_without_a_management_library(machine: Machine, tmp_path: Path) -> None:
    """Its GPU has the host's memory, and older systems of it have no NVML."""
    environment = machine(ORIN)
    only = tmp_path / "only"
    only.mkdir()
    (only / "libcuda.so.1").symlink_to(Path(environment["LD_LIBRARY_PATH"]) / "libcuda.so.1")
    [gpu] = ask({**environment, "LD_LIBRARY_PATH": str(only)}, 20 * GIB)["gpus"]
    assert (gpu["free"], gpu["memory"], gpu["integrated"]) == (20 * GIB, 61 * GIB, True)
    assert gpu["capability"] == [8, 7]


@pytest.mark.parametrize(("host", "free"), [(64 * GIB, 64 * GIB), (500 * GIB, 119 * GIB)])
def test_a_gpu_without_memory_of_its_own_has_the_hosts(
    machine: Machine, host: int, free: int
) -> None:
    [gpu] = ask(machine(SPARK), host)["gpus"]
    assert gpu["integrated"]
    assert gpu["free"] == free


def test_a_gpu_whose_free_memory_nobody_says_is_there_all_the_same(machine: Machine) -> None:
    [gpu] = ask(machine(H200.replace(str(140 * GIB), "-1")))["gpus"]
    assert gpu["free"] == gpu["memory"] == 141 * GIB


@pytest.mark.parametrize(
    ("init", "said", "broken"),
    [
        (100, "CUDA_VISIBLE_DEVICES", False),
        (802, "fabricmanager", True),
        (803, "restart", True),
        (999, "error 999", True),
    ],
)
def test_a_driver_that_does_not_work_says_why(
    machine: Machine, init: int, said: str, broken: bool
) -> None:
    found = ask(machine(H200, init=init))
    assert found["gpus"] == []
    assert said in found["obstacle"]
    assert found["broken"] is broken


def test_a_device_that_does_not_answer_is_said(machine: Machine) -> None:
    found = ask(machine(H200.replace(str(141 * GIB), "0")))
    assert found["gpus"] == []
    assert found["obstacle"] == "cuDeviceTotalMem_v2 of the driver failed with error 999"
    assert found["broken"]


def test_no_driver(tmp_path: Path) -> None:
    found = ask({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert found["gpus"] == []
    assert "--gpus all" in found["obstacle"]
    assert not found["broken"]
