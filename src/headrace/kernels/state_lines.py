"""`StepBatch.states` in a buffer that CUDA graphs read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .arrays import tensor
from .operators import STATE_COLUMNS, StepBatch

NOWHERE = 1 << 30
"""Certain tokens of a padding entry, which processes and keeps nothing."""


class StateLines:
    """Lines [entries, 6] int32 of the largest bucket."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self._lines = torch.zeros(entries, STATE_COLUMNS, dtype=torch.int32, device=device)
        self._idle = self._lines.clone()
        self._idle[:, 1] = NOWHERE

    def view(self, entries: int) -> torch.Tensor:
        """Return the lines that a graph of this many entries reads."""
        return self._lines[:entries]

    def copies(self, batch: StepBatch, entries: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (part of the buffer, its new content) for a step, then for padding."""
        count = len(batch.lengths)
        if count:
            yield self._lines[:count], device_lines(batch)
        yield self._lines[count:entries], self._idle[count:entries]


def device_lines(batch: StepBatch) -> torch.Tensor:
    """Return `StepBatch.states` on the step's device, copied once. If it is None, all preceding
    tokens are in the states, and there are no drafts and no checkpoints."""
    if batch.state_rows is None and batch.states is not None:
        batch.state_rows = torch.from_numpy(batch.states).to(batch.tokens.device)
    if batch.state_rows is None:
        counts = tensor(batch.query_starts).diff()
        nothing = torch.zeros_like(counts)
        lines = [tensor(batch.lengths) - counts, counts, *[nothing] * (STATE_COLUMNS - 2)]
        batch.state_rows = torch.stack(lines, 1).to(torch.int32)
    found: torch.Tensor = tensor(batch.state_rows)
    return found
