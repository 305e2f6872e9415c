"""Whisper's two parts in a worker, step by step, without a scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.base.encodings import EncodingName, EncodingStart
from headrace.base.groups import cross_groups, graph_groups
from headrace.base.modelfiles import ModelFiles
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan, RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.dist.payloads import SealedInputs
from headrace.kernels.arrays import host
from headrace.kernels.program import EVERY
from headrace.loader.panels import PanelShelf
from headrace.loader.whisper_files import WhisperFiles
from headrace.models.registry import describe
from headrace.speech.features import log_mel
from headrace.worker import Worker, WorkerOptions

BLOCKS = 28
"""Blocks of a row: of its whole context."""


def sound(seed: int, seconds: float = 9.0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed) * t) * np.sin(t)
    return (0.2 * tone + 0.02 * draw.normal(size=len(t))).astype(np.float32)


class WhisperParts:
    """A worker with rows, each of which has its own blocks, and slots of windows."""

    def __init__(
        self,
        files: ModelFiles,
        kv: str = "float32",
        *,
        kernels: str = "auto",
        windows: int = 3,
        rows: int = 6,
        shelf: PanelShelf | None = None,
    ) -> None:
        self.whisper: WhisperFiles = files.opened.files
        given: dict[str, Any] = {"threads": 2, "kernels": kernels, "kv_dtype": kv}
        options = WorkerOptions(**given, max_context=448, step_tokens=128, rows=rows)
        self.worker = Worker(files, options, shelf=shelf)
        graph = describe(files.arch)
        groups = graph_groups(graph, kv, 1 + BLOCKS * rows)
        self.worker.allocate(PoolShape(16, groups, cross=cross_groups(graph, kv, 94 * windows)))
        assert self.worker.encoder is not None
        self.encoder, self._inputs = self.worker.encoder, SealedInputs()
        self._held: set[int] = set()

    def encode(self, samples: np.ndarray, slot: int, cuts: tuple[int, ...] = ()) -> np.ndarray:
        """Encode a window of samples; return its features. `cuts`: slices of each run but the
        last."""
        mel = log_mel(samples, self.whisper.mels)
        features = np.zeros((3_001, self.whisper.mels), np.float32)
        features[:-1] = mel
        payload, name = self._inputs.hold("", features), EncodingName("", bytes([slot]))
        start = EncodingStart(slot, name, payload.source, 1_500, aligns=True)
        self.encoder.take(StepPlan(0, [], [], [], [], encodings=[start]))
        first, slices = 0, len(self.encoder._bounds) - 1
        for count in (*cuts, slices - sum(cuts)):
            self.encoder.run(slot, first, count)
            first += count
        payload.close()
        return mel

    def logits(self, row: int, slot: int, tokens: list[int], start: int = 0) -> np.ndarray:
        """Decode tokens of a row, which attends to a slot; return the logits of all."""
        return self.together([(row, slot, tokens, start)])[0]

    def together(self, chunks: list[tuple[int, int, list[int], int]]) -> list[np.ndarray]:
        """Decode chunks of rows in one step: row, slot, tokens, and the place of the first."""
        worker, plan = self.worker, StepPlan(1, [], [], [], [])
        for row, slot, tokens, start in chunks:
            if row not in self._held:
                self._admit(row, slot)
            known = worker._rows.host_tokens
            known[row, start : start + len(tokens)] = tokens
            plan.rows.append(row)
            plan.starts.append(start)
            plan.counts.append(len(tokens))
            plan.samples.append(True)
        with worker.text.inference():
            batch = worker._batch(plan, None)
            hidden = worker.text.program.step(batch, EVERY).hidden
            assert hidden is not None
            logits = np.array(host(worker.text.program.head(hidden)))
        ends = np.cumsum(plan.counts)
        pairs = zip(ends, plan.counts, strict=True)
        return [logits[end - count : end] for end, count in pairs]

    def _admit(self, row: int, slot: int) -> None:
        self._held.add(row)
        span = InputSpan(0, 0, "sound", bytes([slot]), units=1_500)
        spec = RequestSpec(SamplingParams(temperature=0.0), 0, inputs=(span,))
        admission = Admission(row, row, [], 0, 0, spec)
        self.worker._rows.admit(admission)
        self.encoder.take(StepPlan(0, [], [], [], [], admitted=[admission]))
        blocks = [1 + BLOCKS * row + at for at in range(BLOCKS)]
        self.worker._tables.write([BlockWrite(row, 0, 0, blocks)])
