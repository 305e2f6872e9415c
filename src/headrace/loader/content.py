"""Digests of what a model's files contain, cheap enough for every start.

A digest is of samples from all of a file and of its size: a file of another model, another
quantisation or another fine-tuning has another. It is no defence against somebody who changes a
file between the samples on purpose.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

SAMPLES = 16
SAMPLE_BYTES = 64 << 10


class WeightFiles(Protocol):
    """What of a model its digests and kept panels go by: `ModelFiles`, or a model that hears."""

    @property
    def path(self) -> Path:
        """The folder, or the one file."""

    @property
    def weights(self) -> tuple[Path, ...]:
        """The files of its weights."""


def sampled(path: Path) -> tuple[int, int, str]:
    """(size in bytes, time of change in ns, digest of samples). Raises `OSError`."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest = hashlib.sha256()
        step = max(SAMPLE_BYTES, stat.st_size // SAMPLES)
        for at in (*range(0, stat.st_size, step), max(0, stat.st_size - SAMPLE_BYTES)):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    return stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def content_digest(files: WeightFiles) -> str:
    """16 hexadecimal digits of a model's weights, wherever and whenever they were stored.

    Raises `OSError` where a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files.weights:
        size, _, samples = sampled(path)
        digest.update(f"{size}:{samples};".encode())
    return digest.hexdigest()[:16]


def adapter_digest(folder: Path) -> str:
    """16 hexadecimal digits of the files of a LoRA adapter: its configuration and its matrices.

    Raises `OSError` where one cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("adapter_*")):
        size, _, samples = sampled(path)
        digest.update(f"{path.name}:{size}:{samples};".encode())
    return digest.hexdigest()[:16]
