"""Digests of the content of a model's files, cheap enough for every start.

A digest covers a file's size and samples from all of it, so another model, quantisation or
fine-tuning has a different one. It does not protect against deliberate changes between the samples.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

SAMPLES = 16
SAMPLE_BYTES = 64 << 10


class WeightFiles(Protocol):
    """Interface of a model's weight files for digests and kept panels: `ModelFiles`, or a
    transcription model."""

    @property
    def path(self) -> Path:
        """Return the folder, or the one file."""

    @property
    def weights(self) -> tuple[Path, ...]:
        """Return the files of its weights."""


def sampled(path: Path) -> tuple[int, int, str]:
    """Return (size in bytes, time of change in ns, digest of samples). Raises `OSError`."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest = hashlib.sha256()
        step = max(SAMPLE_BYTES, stat.st_size // SAMPLES)
        for at in (*range(0, stat.st_size, step), max(0, stat.st_size - SAMPLE_BYTES)):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, at))
    return stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def content_digest(files: WeightFiles) -> str:
    """Return 16 hexadecimal digits of a model's weights, independent of place and time of storage.

    Raises `OSError` if a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files.weights:
        size, _, samples = sampled(path)
        digest.update(f"{size}:{samples};".encode())
    return digest.hexdigest()[:16]


def adapter_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits of a LoRA adapter's files: its configuration and its matrices.

    Raises `OSError` if one cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("adapter_*")):
        size, _, samples = sampled(path)
        digest.update(f"{path.name}:{size}:{samples};".encode())
    return digest.hexdigest()[:16]
