"""What a worker tells once its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import Decision


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Sizes in bytes, times in seconds."""

    weight_bytes: int
    device_memory: int
    """What the device has left for KV and work space."""
    kernels: list[Decision] = field(default_factory=list)
    """Per operator which backend serves it and why; and what "auto" became."""
    phases: dict[str, float] = field(default_factory=dict)
    """The time of each part of loading."""
    features: tuple[str, ...] = ()
    """What requests may ask for: "grammar", "adapter", "pooling"; "score": its one label rates
    pairs."""
    step_bytes: int = 0
    """Measured: the most that tensors of the largest step take; 0: not measured here."""
    graph_bytes: int = 0
    """Measured: what captured graphs will take."""
