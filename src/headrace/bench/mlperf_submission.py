"""Files next to LoadGen's logs in a submission, and a checker for missing or wrong ones.

The layout is that of MLPerf Inference v6: below `DIVISION/SUBMITTER` are `systems/SYSTEM.json` and
`results/SYSTEM/MODEL/SCENARIO` with `user.conf`, `measurements.json`, `README.md`, `accuracy`,
`performance/run_1` and the compliance tests. No package index has MLCommons' own checker. This one
checks the published rules and LoadGen's logs. Its verdict is only ours: results are *unverified by
MLCommons*.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest
from ..base.hardware import cpu, gpus
from ..base.version import VERSION
from .mlperf_accuracy import LOG, LOG_BYTES
from .mlperf_compliance import TESTS, read_detail
from .store import write_text

UNVERIFIED = "unverified by MLCommons"
SEEDS = {
    "qsl_rng_seed": 2085463073848966840,
    "sample_index_rng_seed": 2747215439041700203,
    "schedule_rng_seed": 16159082839903944936,
}
"""Seeds that MLPerf Inference v6.1 prescribes."""
MIN_MS = 600_000
"""Shortest performance run that the rules accept."""
_TOLD = """
division submitter status system_name system_type number_of_nodes host_processor_model_name
host_processors_per_node host_processor_core_count host_memory_capacity host_storage_capacity
host_storage_type accelerators_per_node accelerator_model_name accelerator_memory_capacity
framework operating_system
"""
TOLD = tuple(_TOLD.split())
"""Fields of a system's description that must not be empty."""
_PRESENT = """
other_software_stack host_processor_frequency host_processor_caches host_memory_configuration
host_processor_interconnect host_networking host_networking_topology host_network_card_count
accelerator_frequency accelerator_host_interconnect accelerator_interconnect
accelerator_interconnect_topology accelerator_memory_configuration
accelerator_on-chip_memories cooling hw_notes sw_notes system_type_detail
"""
PRESENT = tuple(_PRESENT.split())
"""Fields that must be present, and may be empty."""
IMPLEMENTATION = (
    "input_data_types",
    "retraining",
    "starting_weights_filename",
    "weight_data_types",
    "weight_transformations",
)
"""Fields of `measurements.json`."""
DIVISIONS, STATES = ("open", "closed", "network"), ("available", "preview", "rdi")
VERDICTS = {
    "TEST01": ("verify_accuracy.txt", "verify_performance.txt"),
    "TEST06": ("verify_accuracy.txt",),
    "TEST07": ("verify_accuracy.txt",),
    "TEST09": ("verify_output_len.txt",),
}


@dataclass(frozen=True, slots=True)
class SubmissionCheck:
    """One rule, in one place."""

    place: str
    what: str
    passed: bool
    why: str = ""


def describe_system(name: str, division: str, submitter: str) -> dict[str, Any]:
    """Describe this machine; unknown fields are empty, for the user to fill in."""
    facts, devices = cpu(), gpus()
    memory = f"{facts.memory / 2**30:.0f} GiB"
    system: dict[str, Any] = dict.fromkeys((*TOLD, *PRESENT), "")
    system |= {
        "division": division,
        "submitter": submitter,
        "status": "rdi",
        "system_name": name,
        "system_type": "datacenter" if devices else "edge",
        "number_of_nodes": "1",
        "host_processor_model_name": facts.name,
        "host_processors_per_node": "1",
        "host_processor_core_count": str(facts.physical_cores),
        "host_memory_capacity": memory,
        "accelerators_per_node": str(len(devices)),
        "accelerator_model_name": devices[0].name if devices else "N/A",
        "accelerator_memory_capacity": f"{devices[0].memory / 2**30:.0f} GiB" if devices else "N/A",
        "framework": f"headrace {VERSION}",
        "operating_system": f"{platform.system()} {platform.release()}",
        "sw_notes": UNVERIFIED,
    }
    return system


def write_beside(root: Path, scenario: Path, system: dict[str, Any], conf: str, model: str) -> None:
    """Write `user.conf` and the missing files next to the logs; existing files are kept."""
    measurements = dict.fromkeys(IMPLEMENTATION, "")
    measurements |= {"retraining": "no", "starting_weights_filename": model}
    readme = (
        f"# {model}, {scenario.name}\n\nMade by `headrace bench mlperf` {VERSION}; {UNVERIFIED}.\n"
    )
    files = {
        root / "systems" / f"{system['system_name']}.json": json.dumps(system, indent=1),
        scenario / "user.conf": conf,
        scenario / "measurements.json": json.dumps(measurements, indent=1),
        scenario / "README.md": readme,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.name == "user.conf":
            write_text(path, text)


def check_submission(root: Path) -> list[SubmissionCheck]:
    """Check every rule for every scenario below `root`, a submission's `DIVISION/SUBMITTER`.

    Raises `InvalidRequest` if there is no result at all.
    """
    scenarios = sorted(path for path in root.glob("results/*/*/*") if path.is_dir())
    if not scenarios:
        raise InvalidRequest(f"{root} has no results/SYSTEM/MODEL/SCENARIO", param="folder")
    found = []
    for system in sorted({path.parent.parent.name for path in scenarios}):
        found += _check_system(root / "systems" / f"{system}.json")
    for path in scenarios:
        found += _check_scenario(path, "/".join(path.parts[-3:]))
    return found


def _check_system(path: Path) -> list[SubmissionCheck]:
    place = f"systems/{path.name}"
    system = _object(path)
    if system is None:
        return [SubmissionCheck(place, "is a JSON object", False, "it is missing or is none")]
    empty = [name for name in TOLD if not str(system.get(name, "")).strip()]
    missing = [name for name in PRESENT if name not in system]
    return [
        SubmissionCheck(place, "says what it must", not empty, ", ".join(empty)),
        SubmissionCheck(place, "has every field", not missing, ", ".join(missing)),
        SubmissionCheck(
            place, "division", system.get("division") in DIVISIONS, str(system.get("division"))
        ),
        SubmissionCheck(place, "status", system.get("status") in STATES, str(system.get("status"))),
    ]


def _check_scenario(path: Path, place: str) -> list[SubmissionCheck]:
    found = [_has_file(path, place, name) for name in ("user.conf", "README.md")]
    measurements = _object(path / "measurements.json") or {}
    empty = [name for name in IMPLEMENTATION if not str(measurements.get(name, "")).strip()]
    found.append(
        SubmissionCheck(place, "measurements.json says what it must", not empty, ", ".join(empty))
    )
    for name, folder, check in (
        ("performance", path / "performance" / "run_1", _check_performance),
        ("accuracy", path / "accuracy", _check_accuracy),
    ):
        where = f"{place}/{name}"
        try:
            found += check(folder, where, read_detail(folder))
        except InvalidRequest as error:
            found.append(SubmissionCheck(where, "LoadGen's log", False, error.message))
    for test in TESTS:
        if (path / test).is_dir():
            found += _check_test(path / test, f"{place}/{test}", test)
    return found


def _check_performance(path: Path, place: str, detail: dict[str, Any]) -> list[SubmissionCheck]:
    duration = detail.get("effective_min_duration_ms", 0)
    wrong = [name for name, seed in SEEDS.items() if detail.get(f"effective_{name}") != seed]
    scenario = path.parent.parent.name
    asked = "Server" if scenario == "Interactive" else scenario
    errors = detail.get("num_errors", 0)
    return [
        SubmissionCheck(
            place, "performance mode", detail.get("effective_test_mode") == "PerformanceOnly"
        ),
        SubmissionCheck(place, "scenario", detail.get("effective_scenario") == asked),
        SubmissionCheck(place, "LoadGen's seeds", not wrong, ", ".join(wrong)),
        SubmissionCheck(place, "no error of LoadGen's", not errors, f"{errors} errors"),
        SubmissionCheck(
            place, "600 s at least", duration >= MIN_MS, f"{duration / 1000:g} s were asked for"
        ),
        SubmissionCheck(place, "LoadGen says VALID", detail.get("result_validity") == "VALID"),
        _has_file(path, place, "mlperf_log_summary.txt"),
    ]


def _check_accuracy(path: Path, place: str, detail: dict[str, Any]) -> list[SubmissionCheck]:
    whole = detail.get("qsl_reported_total_count")
    log, scores = path / LOG, path / "accuracy.txt"
    size = log.stat().st_size if log.is_file() else 0
    hashed = scores.is_file() and "hash=" in scores.read_text(errors="replace")
    return [
        SubmissionCheck(
            place, "accuracy mode", detail.get("effective_test_mode") == "AccuracyOnly"
        ),
        SubmissionCheck(
            place, "all of the data set", detail.get("effective_accuracy_sample_count") == whole
        ),
        SubmissionCheck(place, "no error of LoadGen's", not detail.get("num_errors", 0)),
        _has_file(path, place, "accuracy.txt"),
        SubmissionCheck(place, "the log's hash in accuracy.txt", hashed),
        SubmissionCheck(place, "the log is truncated", 0 < size <= LOG_BYTES, f"{size} bytes"),
    ]


def _check_test(path: Path, place: str, test: str) -> list[SubmissionCheck]:
    found = []
    for name in VERDICTS[test]:
        text = (path / name).read_text(errors="replace") if (path / name).is_file() else ""
        bad = not text or "False" in text or "FAIL" in text
        found.append(
            SubmissionCheck(place, f"{name} passes", not bad, "it is missing" if not text else "")
        )
    found.append(_has_file(path / "accuracy", place, LOG))
    found.append(_has_file(path / "performance" / "run_1", place, "mlperf_log_detail.txt"))
    return found


def _has_file(folder: Path, place: str, name: str) -> SubmissionCheck:
    path = folder / name
    there = path.is_file() and path.stat().st_size > 0
    return SubmissionCheck(place, name, there, "" if there else "it is missing or empty")


def _object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
