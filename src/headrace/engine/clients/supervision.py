"""The limits with which an engine's process is supervised, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    ASLEEP = "asleep"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Supervision:
    """Limits of patience, in seconds."""

    late: float = 2.5
    """Silence of the step loop, beyond its step's bound, after which it is not ready."""
    hang: float = 120.0
    """Silence of the step loop after which it counts as hung: longer than any step takes."""
    silent: float = 10.0
    """Silence of rank 0 of a process group, even while computing, after which it is ended."""
    stacks: float = 2.0
    """Time that a hung process gets to write its stacks; a stopped one never does."""
    start: float = 900.0
    """Silence between two phases of the start."""
    back_off: float = 0.5
    """Pause before the first restart; doubles with each failure in a row."""
    back_off_most: float = 30.0
    healthy: float = 60.0
    """Life after which a failure counts as the first again."""
    give_up: int = 5
    """Failures in a row after which the engine no longer counts as alive; attempts go on."""
    dumps: Path | None = None
    """Folder for the flight recorder's dumps; None: no dumps are kept."""
