"""Hardware by its name, and as files: a machine's calibration, or a user's description."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from ..base.errors import NotFound, OptionError
from ..base.foreign import any_json
from .efficiency import CPU_EFFICIENCY, Curve, Efficiency
from .hardware import DEVICES, Hardware, Loop


def find_hardware(name: str, calibrated: Path | None = None) -> Hardware:
    """Find a device by name, "this" (read from `calibrated`), or a JSON file.

    Case and dashes of a name do not matter. The file has `Hardware`'s fields: name, rates,
    bandwidth and memory at least.
    """
    if name.lower().endswith(".json"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise NotFound(f"no such file: {name}", param="hardware")
        return load_hardware(path)
    key = name.upper().replace("-", "").replace(" ", "").replace("_", "")
    if key == "THIS":
        if calibrated is None or not calibrated.is_file():
            raise NotFound(
                "this machine is not calibrated yet: run `headrace roofline --calibrate`",
                param="hardware",
            )
        found = load_hardware(calibrated)
        if (why := found.implausible()) is not None:
            raise OptionError(
                f"the calibration of this machine cannot be true ({why}): it was made while others "
                "worked; run `headrace roofline --calibrate` again",
                param="hardware",
            )
        return found
    for known, device in DEVICES.items():
        if key in (known, f"{known}SXM", f"{known}NVL72", f"JETSON{known}", f"JETSONAGX{known}"):
            return device
    raise NotFound(
        f"unknown hardware {name!r}; known: this, {', '.join(DEVICES)}, or a .json file of its "
        "own figures",
        param="hardware",
    )


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Write as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(hardware), indent=1))
    partial.replace(path)


def load_hardware(path: Path) -> Hardware:
    """Read a file of `save_hardware` or a user; `OptionError` names the file and the error."""

    def wrong(what: object) -> OptionError:
        return OptionError(
            f"{path} does not describe hardware: {what} (`headrace roofline --calibrate` writes "
            "this machine's)",
            param="hardware",
        )

    try:
        data: dict[str, Any] = any_json(path.read_bytes())
        unknown = sorted(set(data) - {spec.name for spec in fields(Hardware)})
        if unknown:
            known = ", ".join(spec.name for spec in fields(Hardware))
            raise wrong(f"{unknown[0]!r} is none of {known}")
        shares = data.pop("efficiency", {})
        curves = {name: Curve(**values) for name, values in shares.pop("curves", {}).items()}
        loop = Loop(**data.pop("loop", {}))
        made = Hardware(**data, efficiency=Efficiency(**shares, curves=curves), loop=loop)
        if not isinstance(made.name, str) or not made.name or not made.name.isprintable():
            raise wrong(f"name must be printable text, not {made.name!r:.80}")
        figures = [made.bandwidth, made.memory, *made.rates.values()]
        if not all(math.isfinite(each) and each >= 0 for each in astuple(loop)):
            raise wrong("loop must have seconds from 0")
        if not made.rates or not all(math.isfinite(each) and each > 0 for each in figures):
            raise wrong("rates, bandwidth and memory must be above 0")
        made.rate("bfloat16")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise wrong(error) from None
    if made.efficiency.source == CPU_EFFICIENCY.source:
        return made.fitted(CPU_EFFICIENCY)  # Today's, not those of the version that wrote the file.
    return made
