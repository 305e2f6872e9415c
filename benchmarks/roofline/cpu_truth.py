"""Predicted against measured steps on this machine: calibrate, fit, and shapes kept out of the fit.

`python benchmarks/roofline/cpu_truth.py MODEL OUT.json [--again]` on a quiet machine, about a
minute: what `headrace roofline MODEL --calibrate --measure` does, with everything measured kept in
OUT.json. `--again` fits the steps that are kept there once more, without measuring.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headrace.bench.calibrate import calibrate, measure_steps
from headrace.engine.loop.prediction import case_of, serving_types
from headrace.loader import open_model
from headrace.roofline.composition import compose
from headrace.roofline.efficiency import CPU_EFFICIENCY
from headrace.roofline.fit import StepRecord, fit_efficiency, prediction_errors
from headrace.roofline.hardware_files import load_hardware, save_hardware
from headrace.roofline.machine import calibration_path
from headrace.roofline.step import StepModel


def as_dicts(records: list[StepRecord]) -> list[dict[str, Any]]:
    return [
        {"starts": r.starts, "counts": r.counts, "samples": r.samples, "seconds": r.seconds}
        for r in records
    ]


def as_records(rows: list[dict[str, Any]]) -> list[StepRecord]:
    return [StepRecord(r["starts"], r["counts"], r["samples"], r["seconds"]) for r in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args(arguments)
    files = open_model(given.model)
    dtype, kv_dtype = serving_types(files)
    case = case_of(files, dtype=dtype, kv_dtype=kv_dtype)
    if given.again:
        kept = json.loads(given.out.read_text())
        fitted_on, held = as_records(kept["fitted_on"]), as_records(kept["held_out"])
        hardware = load_hardware(calibration_path()).fitted(CPU_EFFICIENCY)
        case = case_of(files, dtype=kept["dtype"], kv_dtype=kept["kv_dtype"])
    else:
        hardware, _ = calibrate()
        fitted_on, held = measure_steps(given.model)
    found = fit_efficiency(case, hardware, fitted_on)
    hardware = hardware.fitted(found.efficiency)
    save_hardware(hardware, calibration_path())
    median, worst = prediction_errors(case, hardware, held)
    model = StepModel(case, hardware)
    print("| entries | tokens | first start | held out | measured ms | predicted ms | ratio |")
    print("|--:|--:|--:|---|--:|--:|--:|")
    for records, mark in ((fitted_on, ""), (held, "yes")):
        for r in records:
            seconds = model.seconds(compose(case.arch, r.starts, r.counts, r.samples))
            print(
                f"| {len(r.starts)} | {sum(r.counts)} | {r.starts[0]} | {mark} | "
                f"{r.seconds * 1e3:.1f} | {seconds * 1e3:.1f} | {seconds / r.seconds:.2f} |"
            )
    print(
        f"fitted on {found.steps} steps: median {found.median_error:.1%}, worst "
        f"{found.worst_error:.1%}; {len(held)} steps of other shapes: median {median:.1%}, worst "
        f"{worst:.1%}"
    )
    result = {
        "machine": hardware.name,
        "dtype": case.dtype,
        "kv_dtype": case.kv_dtype,
        "bandwidth": hardware.bandwidth,
        "rates": hardware.rates,
        "fit": {"median": found.median_error, "worst": found.worst_error},
        "held": {"median": median, "worst": worst},
        "fitted_on": as_dicts(fitted_on),
        "held_out": as_dicts(held),
    }
    given.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
