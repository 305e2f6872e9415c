"""This machine among the known hardware: its calibration file, or its GPU by name."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from ..base.environment import cache_root
from ..base.hardware import cpu, gpus
from .hardware import DEVICES, Hardware
from .hardware_files import load_hardware


def calibration_path() -> Path:
    """Return this machine's calibration file in the cache folder: homes are shared between
    machines."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"{platform.node()}-{cpu().name}").strip("-")
    return cache_root() / "hardware" / f"{name}.json"


def this_hardware(device: str) -> Hardware | None:
    """Return the hardware of "cpu" or "cuda" here: the calibrated CPU, or a GPU with a known name.

    None if the machine was never calibrated, its calibration cannot be true, or the GPU is not in
    the table.
    """
    if device == "cpu":
        path = calibration_path()
        kept = load_hardware(path) if path.is_file() else None
        return None if kept is None or kept.implausible() else kept
    found = gpus()
    return gpu_named(found[0].name) if found else None


def gpu_named(name: str) -> Hardware | None:
    """Find the entry for a driver's name such as "NVIDIA H200" or "NVIDIA GeForce RTX 4090"."""
    plain = re.sub(r"[^A-Z0-9]+", " ", name.upper())
    for key, device in DEVICES.items():
        if re.search(rf"\b{key.replace('RTX', 'RTX ?')}\b", plain):
            return device
    return None


def last_level_cache() -> int:
    """Return the bytes of the largest cache that the kernel reports; 8 MiB if it reports none."""
    sizes = [8 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 1024)
        elif text.endswith("M") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * 2**20)
    return max(sizes)
