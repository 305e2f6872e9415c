"""Buffers of `attention_plan`'s lists, which CUDA graphs read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .arrays import host, tensor
from .attention_plan import COLUMNS, AttentionPlan, Planner
from .operators import StepBatch

CHUNKS = 32
"""Most entries of a mixed step that may be prompts: each may need an attention tile for one row."""
BEHIND = 1 << 30
"""Start offset of a padding chunk; sorts its tiles last."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of one graph."""

    tokens: int
    entries: int

    @property
    def decode(self) -> bool:
        return self.tokens == self.entries


class AttentionLists:
    """Buffers of lists [lines, 8] int32, sized for the largest bucket, and their padding lines."""

    def __init__(
        self,
        planner: Planner,
        buckets: list[Bucket],
        windows: list[int | None],
        device: torch.device,
    ) -> None:
        self._planner = planner
        pieces = max(map(self._pieces_of, buckets))
        chunks = max(map(self.chunks_of, buckets))
        entries = max(bucket.entries for bucket in buckets)

        def lines(count: int, *values: int) -> torch.Tensor:
            line = torch.tensor([*values, *[0] * (COLUMNS - len(values))], dtype=torch.int32)
            return line.repeat(count, 1)

        # Each entry has one token, which sees itself, in the null block.
        idle = lines(entries, 0, 0, 1, 1, 0, 1, 0, 1)
        idle[:, 0] = idle[:, 1] = torch.arange(entries)
        alone = idle.clone()
        # All entries are chunks then.
        alone[:, 4] = torch.arange(entries)
        self._idle_pieces, self._idle_chunks = idle.to(device), alone.to(device)
        self._nothing = lines(pieces).to(device)
        self._no_chunk = lines(chunks, 0, 0, 0, 0, BEHIND).to(device)
        self._pieces = [lines(pieces).to(device) for _ in windows]
        self._chunks = lines(chunks).to(device)

    def view(self, bucket: Bucket) -> AttentionPlan:
        """Return the views that a graph of this bucket reads."""
        return AttentionPlan(
            [each[: self._pieces_of(bucket)] for each in self._pieces],
            self._chunks[: self.chunks_of(bucket)],
            bucket.tokens,
            1 if bucket.decode else max(1, self._planner.widest),
        )

    def copies(
        self, batch: StepBatch, bucket: Bucket, numbers: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (part of a buffer, its new content): the lists of a step, then padding entries,
        then idle lines. `numbers`: 0, 1, 2 … int32."""
        plan = batch.plan
        assert plan is not None, "made by the program"
        tokens, entries = len(batch.tokens), len(batch.lengths)
        extra = bucket.tokens - tokens
        # Padding entries have one token each; a mixed step has one padding entry, short or long
        # like the others.
        short = (1 if bucket.decode else extra) <= self._planner.widest
        length = self._pieces_of(bucket)
        lists = [
            (kept, tensor(lines), self._idle_pieces, self._nothing, length, short)
            for kept, lines in zip(self._pieces, plan.pieces, strict=True)
        ]
        chunks, length = tensor(plan.chunks), self.chunks_of(bucket)
        lists.append((self._chunks, chunks, self._idle_chunks, self._no_chunk, length, not short))
        for kept, lines, idle, nothing, length, padded in lists:
            at = len(lines)
            yield kept[:at], lines
            if padded and extra and bucket.decode:
                yield kept[at : at + extra], idle[entries : bucket.entries]
                at += extra
            elif padded and extra:
                before = 0 if short else plan.chunk_tokens
                values = (entries, tokens, extra, extra, before, extra, 0, 1)
                for column, value in enumerate(values):
                    yield kept[at, column : column + 1], numbers[value : value + 1]
                at += 1
            assert at <= length, f"{at} lines in a list of {length}"
            yield kept[at:length], nothing[at:length]

    def chunks_of(self, bucket: Bucket) -> int:
        """Return the number of lines in the list of chunks, one of them for padding."""
        if not self._planner.widest:
            return bucket.entries
        return 0 if bucket.decode else min(CHUNKS, bucket.tokens // 2) + 1

    def _pieces_of(self, bucket: Bucket) -> int:
        return self._planner.most_pieces(bucket.entries) if self._planner.widest else 0


def plan_step(batch: StepBatch, planner: Planner) -> AttentionPlan:
    """Plan a step that came without a plan. Its numbers, on the host or on a CPU, are copied to the
    device of its arrays."""
    if batch.host is None:
        counts, lengths = np.diff(host(batch.query_starts)), host(batch.lengths)
    else:
        counts, lengths = batch.host.counts, batch.host.lengths
    counts = counts.astype(np.int64)
    lists = planner.lists(counts, lengths.astype(np.int64))
    device = batch.tokens.device
    return planner.plan([torch.from_numpy(each).to(device) for each in lists], counts)
