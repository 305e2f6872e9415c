"""Whisper's two parts on the CPU library, with room for windows and sequences.

The encoder runs over one window at a time and stops after each layer, so that others need not wait
for all of it. Its output is K and V of each layer of the decoder, in the blocks of a window's slot.
The decoder takes chunks of many sequences in one step; each token attends to all of its window.
Sequences of one window (beams, other temperatures, the question for the language) share its slot;
in a step its K and V are read once for all of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.graph import AttentionSpec, Graph, Node, Value
from ..base.slices import slices
from ..kernels.cpu.library import Team
from ..kernels.cpu.operators import CpuOperators
from ..kernels.cpu.pieces import LoweredPieces
from ..kernels.cpu.program import compile_program
from ..kernels.interpret import Interpreter
from ..kernels.model import Model
from ..kernels.operators import GroupBatch, KvCache, KvLayer, StepBatch, StepLimits
from ..kernels.program import LOGITS, CallByCall, Program
from ..loader.panels import PanelShelf
from ..models.sounds import HEAD_SIZE
from ..models.whisper import describe_decoder, describe_encoder
from .features import FRAMES, log_mel
from .files import WhisperFiles
from .weights import prepared

Floats = npt.NDArray[np.float32]
Precision = Literal["exact", "int8"]
"""Form of the weights: the file's own, with sums in fp32; or codes of eight bits with a scale for
each 32, and activations likewise."""
USUAL_KV = {"exact": "float32", "int8": "int8"}
"""Type of K and V by the form of the weights."""
BLOCK = 16
"""Positions of a block of KV."""
MAX_ROWS = 512
"""Tokens of a step of the decoder."""
MAX_LOGITS = 64
"""Rows of logits of a step."""
WINDOWS, SEQUENCES = 10, 48
"""Default number of windows and sequences at a time."""
_FRAME_SAMPLES = 320
"""Samples of a position of the encoder's output."""
_LEAST_FRAMES, _BEHIND_FRAMES = 200, 50
"""Smallest number of positions of a short window, and the positions added after its sound."""
_NONE = np.zeros(0, np.int64)


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence in a step."""

    sequence: int
    """Slot that holds its own KV."""
    window: int
    """Slot of the window that it attends to."""
    start: int
    """Position of the first token."""
    tokens: Sequence[int]
    wanted: Sequence[int]
    """Indices of the tokens whose logits are wanted."""


class Network:
    """One model with room for `windows` windows and `sequences` sequences at a time."""

    def __init__(
        self,
        files: WhisperFiles,
        team: Team,
        precision: Precision = "int8",
        kv: str | None = None,
        windows: int = WINDOWS,
        sequences: int = SEQUENCES,
        shelf: PanelShelf | None = None,
    ) -> None:
        """Load the model. `kv`: type of K and V, of cross attention and of the decoder: float32,
        bfloat16, int8; None: as `USUAL_KV` has it. `shelf`: packed-weight cache."""
        kv = kv or USUAL_KV[precision]
        coded, arch = precision == "int8", files.arch
        self.files, self.windows, self.sequences = files, windows, sequences
        encoder, decoder = describe_encoder(arch), describe_decoder(arch)
        self.weights = prepared((encoder, decoder), files, team, coded, shelf)
        if shelf is not None:
            shelf.finish()  # Before records hold addresses: packed weights may move here.
        self._cross_blocks = -(-arch.frames // BLOCK)
        self._own_blocks = -(-arch.context // BLOCK)
        layers = range(arch.decoder_layers)
        self._cross = [self._room(windows * self._cross_blocks, kv) for _ in layers]
        self._own = [self._room(sequences * self._own_blocks, kv) for _ in layers]
        cross = {arch.across(layer): self._cross[layer] for layer in layers}
        within: dict[int, KvLayer] = {}
        if coded:
            room = self._room(self._cross_blocks, "int8" if kv == "int8" else "bfloat16")
            within = dict.fromkeys(range(arch.encoder_layers), room)
        groups = dict.fromkeys(cross, 0) | dict.fromkeys(within, 1)
        kept = KvCache({**cross, **within}, groups)
        self._encoder = LoweredPieces(team, encoder, self.weights, kept, arch.frames)
        self._bounds = _bounds(encoder)
        self._hidden, self._writes = encoder.outputs["hidden"], _written(encoder)
        groups = dict.fromkeys(layers, 0) | dict.fromkeys(cross, 1)
        self._cache = KvCache({**dict(enumerate(self._own)), **cross}, groups)
        self._operators = CpuOperators(team.threads, team=team)
        model, drawing = Model(decoder, self.weights), self._operators.drawing
        plain = CallByCall(model, self._operators, self._cache, drawing)
        limits = StepLimits(MAX_ROWS, MAX_LOGITS, arch.context)
        self._decoder: Program = compile_program(self._operators, plain, limits) or plain
        self._asking = _queries(decoder)
        self.heard = [arch.frames] * windows
        """Encoded positions of each window."""
        self.keys: list[dict[int, Floats]] = [{} for _ in range(windows)]
        """K [frames, width] in fp32 by aligning layer, of each window whose words are wanted."""

    def _room(self, blocks: int, kind: str) -> KvLayer:
        shape = blocks, self.files.heads, BLOCK, HEAD_SIZE
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[kind]
        # Pages without a token are read, but with weight zero: they and their scales may hold
        # anything except NaN. Zeros take no memory before they are written.
        k, v = (np.zeros(shape, dtype) for _ in range(2))
        scales = [np.zeros(shape[:3], np.uint16) for _ in range(2)] if kind == "int8" else ()
        return KvLayer(k, v, *scales)

    def hear(
        self, samples: Floats, window: int, short: bool = False, words: bool = False
    ) -> Iterator[None]:
        """Encode samples; with `short`, only as much of the window as they fill."""
        mel = log_mel(samples, self.files.mels)
        return self.encode(mel, window, len(samples) if short else None, words)

    def encode(
        self, mel: Floats, window: int, samples: int | None = None, words: bool = True
    ) -> Iterator[None]:
        """Fill a window's slot from features [3000, mels]; stop after each layer, where other
        windows may be encoded, or go on.

        `samples`: number of the window's samples to encode, with a second of what follows them;
        None: all. `words`: keep `keys` of the window, 9 MB of the default model, for times of
        words.
        """
        rows = self.files.frames
        if samples is not None:
            rows = min(rows, max(_LEAST_FRAMES, -(-samples // _FRAME_SAMPLES) + _BEHIND_FRAMES))
        self.heard[window] = rows
        features = np.zeros((2 * rows + 1, self.files.mels), np.float32)
        features[:FRAMES] = mel[: 2 * rows + 1]
        item = self._encoder.begin(self._window(window, rows), features)
        for bound in self._bounds:
            self._encoder.run(item, bound)
            yield
        self.keys[window] = {}
        aligning = {layer for layer, _ in self.files.alignment if words}
        for layer, (index, kv) in enumerate(self._writes):
            self._encoder.run(item, index + 1)
            if layer in aligning:
                keys = self._encoder.rows(item, kv)[:, : self.files.width]
                self.keys[window][layer] = keys.copy()
        self.encoded = self._encoder.rows(item, self._hidden)

    def _window(self, window: int, rows: int) -> StepBatch:
        """Make the step of a window's first `rows` positions, which attend to each other."""
        positions = np.arange(rows, dtype=np.int64)
        tables = np.arange(self._cross_blocks, dtype=np.int32)[None]
        first = window * self._cross_blocks
        groups = [
            GroupBatch(tables + np.int32(first), positions + first * BLOCK, None),
            GroupBatch(tables, positions, None),
        ]
        last = np.full(rows, rows - 1, np.int64)
        starts, lengths = np.array([0, rows], np.int32), np.array([rows], np.int32)
        rest = starts, lengths, groups, _NONE, rows, rows
        seen = StepBatch(positions, last, *rest)
        return StepBatch(positions, positions, *rest, across=seen)

    def decode(self, chunks: Sequence[Chunk]) -> Floats:
        """Run one step; return logits [R, vocab] of the wanted tokens of all chunks in order, valid
        until the next call. At most `MAX_ROWS` tokens, and at most `MAX_LOGITS` wanted ones."""
        logits = self._decoder.step(self._step(chunks), LOGITS).logits
        assert logits is not None
        return np.asarray(logits)

    def queries(self, chunk: Chunk) -> list[Floats]:
        """Decode a chunk; return q [N, width] of each layer's cross attention."""
        nodes, values = self._asking
        run = Interpreter(nodes, self.weights, values)
        return run.run(self._operators, self._step([chunk]), self._cache, {})

    def _step(self, chunks: Sequence[Chunk]) -> StepBatch:
        tokens = np.concatenate([np.asarray(c.tokens, np.int64) for c in chunks])
        counts = [len(c.tokens) for c in chunks]
        n = len(tokens)
        assert 0 < n <= MAX_ROWS
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < self.files.vocab
        positions = np.concatenate([c.start + np.arange(len(c.tokens)) for c in chunks])
        assert int(positions.max()) < self.files.positions
        sequence = np.repeat([c.sequence for c in chunks], counts)
        blocks = np.arange(self._own_blocks, dtype=np.int32)
        own = np.array([c.sequence * self._own_blocks for c in chunks], np.int32)[:, None] + blocks
        slots = sequence * (self._own_blocks * BLOCK) + positions
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = np.array([c.start + len(c.tokens) for c in chunks], np.int32)
        wanted = [starts[i] + w for i, c in enumerate(chunks) for w in c.wanted]
        assert len(wanted) <= MAX_LOGITS
        seen = self._listening(chunks, tokens, starts, np.array(wanted, np.int64))
        groups = [GroupBatch(own, slots, None), seen.groups[1]]
        ends = max(counts), int(lengths.max())
        return StepBatch(
            tokens, positions, starts, lengths, groups, seen.sample_rows, *ends, across=seen
        )

    def _listening(
        self,
        chunks: Sequence[Chunk],
        tokens: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.int64],
    ) -> StepBatch:
        """Make the step for cross attention. Consecutive chunks that attend to one window are one
        entry, so its K and V are read once for all of their tokens."""
        windows = [c.window for c in chunks]
        firsts = [i for i, w in enumerate(windows) if not i or w != windows[i - 1]]
        starts = starts[[*firsts, len(chunks)]]
        heard = np.array([windows[i] for i in firsts], np.int32)
        tables = heard[:, None] * self._cross_blocks + np.arange(self._cross_blocks, dtype=np.int32)
        lengths = np.array([self.heard[window] for window in heard], np.int32)
        counts = np.diff(starts)
        last = np.repeat(lengths, counts).astype(np.int64) - 1
        group, ends = GroupBatch(tables, tokens, None), (int(counts.max()), int(lengths.max()))
        return StepBatch(tokens, last, starts, lengths, [group, group], wanted, *ends)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of sequence `source` to `target`."""
        count = -(-length // BLOCK)
        first, into = source * self._own_blocks, target * self._own_blocks
        for layer in self._own:
            for cache in (layer.k, layer.v, layer.k_scale, layer.v_scale):
                if cache is not None:
                    cache[into : into + count] = cache[first : first + count]


def _bounds(encoder: Graph) -> list[int]:
    """Return the nodes before which a run may stop: the end of each layer."""
    return [*slices(encoder)[2:-1], encoder.maker(encoder.outputs["hidden"])]


def _written(encoder: Graph) -> list[tuple[int, Value]]:
    """Return the nodes that write K and V of the decoder's layers, and what they write."""
    return [
        (index, node.reads[0]) for index, node in enumerate(encoder.nodes) if node.kind == "write"
    ]


def _queries(decoder: Graph) -> tuple[tuple[Node, ...], list[Value]]:
    """Return q of each layer's cross attention, and the nodes up to the last of them."""
    values = [
        node.reads[0]
        for node in decoder.nodes
        if node.kind == "attend" and isinstance(node.spec, AttentionSpec) and node.spec.across
    ]
    return decoder.nodes[: decoder.maker(values[-1]) + 1], values
