"""The life of one request in its API process: times and counts, nothing of its content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..base.drafted import Drafted


@dataclass(slots=True)
class RequestLife:
    """Times and counts of a request. Times are `time.monotonic()`, 0 if not reached."""

    arrival: float
    prompt_tokens: int
    choices: int = 1
    max_tokens: int = 0
    scheduled: float = 0.0
    """First step that computed for it."""
    first_token: float = 0.0
    last_token: float = 0.0
    generated: int = 0
    """Tokens, of all choices."""
    longest: int = 0
    """Tokens of the longest choice."""
    cached: int = 0
    loaded: int = 0
    """Tokens of `cached` that came from the disk."""
    preemptions: int = 0
    reason: str = ""
    """End of the request: stop, length, abort or error."""
    adapter: str | None = None
    ended: float = 0.0
    trace: Any = None
    """The request's parent span, if traces are on (`obs.spans`)."""
    temperature: float | None = None
    top_p: float | None = None
    drafted: Drafted | None = None
    """Results of its drafts, once it has ended; None if none were verified."""

    @property
    def ttft(self) -> float:
        """Seconds from arrival to first token."""
        return self.first_token - self.arrival

    @property
    def queue(self) -> float:
        """Seconds from arrival to first step."""
        return max(0.0, self.scheduled - self.arrival)

    @property
    def prefill(self) -> float:
        """Seconds from first step to first token."""
        return max(0.0, self.first_token - self.scheduled)

    @property
    def decode(self) -> float:
        """Seconds from first token to last."""
        return self.last_token - self.first_token

    @property
    def inference(self) -> float:
        """Seconds from first step to last token."""
        return max(0.0, self.last_token - self.scheduled)

    @property
    def time_per_token(self) -> float | None:
        """Mean time between the tokens of a choice after its first; None below two tokens."""
        steps = self.generated / self.choices - 1
        return self.decode / steps if steps > 0 else None
