"""This machine as the roofline's `Hardware`: measured in a separate process, kept as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ..base.errors import HeadraceError
from ..base.extras import require_torch
from ..base.hardware import CpuFacts, cpu
from ..roofline.efficiency import CPU_EFFICIENCY
from ..roofline.fit import StepRecord
from ..roofline.hardware import Hardware
from ..roofline.hardware_files import save_hardware
from ..roofline.machine import calibration_path, last_level_cache


def calibrate() -> tuple[Hardware, dict[str, Any]]:
    """Measure and save; return (hardware, raw figures). Takes some ten seconds."""
    require_torch("a full calibration")
    facts = cpu()
    command = [sys.executable, "-m", "headrace.bench.probe", str(facts.cores)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise HeadraceError(f"the calibration process failed: {last[0]}")
    raw: dict[str, Any] = json.loads(done.stdout)
    hardware = from_figures(facts, raw)
    if (why := hardware.implausible()) is not None:
        raise HeadraceError(f"the figures cannot be true ({why}): try again when less else runs")
    save_hardware(hardware, calibration_path())
    return hardware, raw


def measure_steps(model: str) -> tuple[list[StepRecord], list[StepRecord]]:
    """Return (steps for a fit, steps of held-out shapes), timed on a worker in its own process.

    Takes a minute or more: real steps of a real model.
    """
    command = [sys.executable, "-m", "headrace.bench.steps", model]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise HeadraceError(f"the process that times steps failed: {last[0]}")
    fit: list[StepRecord] = []
    held: list[StepRecord] = []
    for line in done.stdout.splitlines():
        data = json.loads(line)
        record = StepRecord(data["starts"], data["counts"], data["samples"], data["seconds"])
        (held if data["held_out"] else fit).append(record)
    return fit, held


def from_figures(facts: CpuFacts, raw: dict[str, Any]) -> Hardware:
    """Convert the measured figures into ceilings; types slower than fp32 are left out."""
    rates = {"float32": float(raw["float32"]), "int8": float(raw["int8"])}
    if raw["bfloat16"] > raw["float32"]:
        rates["bfloat16"] = float(raw["bfloat16"])
    return Hardware(
        name=f"{facts.name}, {facts.cores} threads",
        rates=rates,
        bandwidth=float(raw["bandwidth"]),
        memory=facts.memory,
        cache=last_level_cache(),
        cache_bandwidth=float(max(raw["cache_bandwidth"], raw["bandwidth"])),
        kind="cpu",
        efficiency=CPU_EFFICIENCY,
        source="measured on this machine",
    )
