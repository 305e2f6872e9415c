"""`StepBatch.states` in a buffer that CUDA graphs read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .arrays import tensor
from .operators import STATE_COLUMNS, StepBatch

NOWHERE = 1 << 30
"""Certain tokens of an entry that is none: it walks nowhere and leaves nothing."""


class StateLines:
    """Lines [entries, 6] int32 of the largest bucket."""

    def __init__(self, entries: int, device: torch.device) -> None:
        self._lines = torch.zeros(entries, STATE_COLUMNS, dtype=torch.int32, device=device)
        self._idle = self._lines.clone()
        self._idle[:, 1] = NOWHERE

    def view(self, entries: int) -> torch.Tensor:
        """What a graph of so many entries reads."""
        return self._lines[:entries]

    def copies(self, batch: StepBatch, entries: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(part of the buffer, what is copied there) of a step, padding behind it."""
        count = len(batch.lengths)
        if count:
            yield self._lines[:count], device_lines(batch)
        yield self._lines[count:entries], self._idle[count:entries]


def device_lines(batch: StepBatch) -> torch.Tensor:
    """`StepBatch.states` where the step's arrays are, copied once; where it has none, all that came
    before is in the states, nothing is a draft, nor kept."""
    if batch.state_rows is None and batch.states is not None:
        batch.state_rows = torch.from_numpy(batch.states).to(batch.tokens.device)
    if batch.state_rows is None:
        counts = tensor(batch.query_starts).diff()
        nothing = torch.zeros_like(counts)
        lines = [tensor(batch.lengths) - counts, counts, *[nothing] * (STATE_COLUMNS - 2)]
        batch.state_rows = torch.stack(lines, 1).to(torch.int32)
    found: torch.Tensor = tensor(batch.state_rows)
    return found
