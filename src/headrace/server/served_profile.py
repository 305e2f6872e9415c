"""Facts about the signed profile that the server was started with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ServedProfile:
    """Served profile, made before the engine starts; `share` is set once its speed was measured."""

    name: str
    digest: str
    """Digest of the signed file."""
    fit: str
    why: str
    """Reason for the fit of this machine to the profile."""
    outcomes: dict[str, str]
    """Result of each gate."""
    seconds_per_token: float | None
    """Certified seconds per token of a single answer."""
    share: float | None = None
    """Certified seconds per token, divided by those measured here; 1: the certified speed."""

    def __str__(self) -> str:
        text = f"{self.name}, {self.fit}"
        return text if self.share is None else f"{text}, {self.share:.2f} of its certified speed"

    def document(self) -> dict[str, Any]:
        """Return the document for `/v1/metadata`."""
        return {
            "profile": self.name,
            "digest": self.digest,
            "fit": self.fit,
            "why": self.why,
            "gates": self.outcomes,
            "share": None if self.share is None else round(self.share, 3),
        }
