"""Facts that a worker reports once its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import Decision


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Sizes in bytes, times in seconds."""

    weight_bytes: int
    device_memory: int
    """Memory that the device has left for KV and work space."""
    kernels: list[Decision] = field(default_factory=list)
    """Backend of each operator and the reason; and the resolved values of "auto"."""
    phases: dict[str, float] = field(default_factory=dict)
    """Time of each part of loading."""
    features: tuple[str, ...] = ()
    """Features that requests may use: "grammar", "adapter", "pooling"; "score": its one label rates
    pairs."""
    step_bytes: int = 0
    """Measured peak of the tensors of the largest step; 0 if not measured here."""
    graph_bytes: int = 0
    """Measured memory of captured graphs."""
