"""Whisper's encoder and decoder as records of the CPU library (Radford et al. 2022, section 2.2).

The encoder runs over one window at a time and stops after each layer, so that others need not wait
for all of it. The decoder takes chunks of many sequences in one step. Cross attention is ordinary
attention over blocks. The encoder's output is written once, as K and V of each decoder layer, into
the blocks of a window's slot, and every token of a step attends to all 1,500 positions. Sequences
of one window (beams, other temperatures, the question for the language) share its slot; in a step
its K and V are read once for all of their tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.graph import AttentionSpec
from ..kernels.arrays import address, aligned
from ..kernels.cpu import emit
from ..kernels.cpu.emit import NOT_QUANTISED, Emitted, Matrix, QuantisedRows, matrix
from ..kernels.cpu.library import Team
from ..kernels.cpu.records import ROWS_N, HrQuantised, HrStep
from ..kernels.operators import KvLayer
from ..loader.panels import PanelShelf
from .features import FRAMES, log_mel
from .files import HEAD_SIZE, WhisperFiles
from .weights import EncoderFiles, packed

Floats = npt.NDArray[np.float32]
Precision = Literal["exact", "int8"]
"""Form of the weights: the file's own, with sums in fp32; or codes of eight bits with a scale for
each 32, and activations likewise."""
BLOCK = 16
"""Positions of a block of KV."""
MAX_ROWS = 512
"""Tokens of a step of the decoder."""
MAX_LOGITS = 64
"""Rows of logits of a step."""
WINDOWS, SEQUENCES = 10, 48
"""Default number of windows and sequences at a time."""
_EPS = 1e-5
_FRAME_SAMPLES = 320
"""Samples of a position of the encoder's output."""
_LEAST_FRAMES, _BEHIND_FRAMES = 200, 50
"""Smallest number of positions of a short window, and the positions added after its sound."""


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


class _Activations:
    """Buffers for rows of activations: in fp32, and as codes if products need these."""

    def __init__(self, rows: int, width: int, coded: bool) -> None:
        self.floats: Floats = aligned((rows, width), np.float32)
        self._room = QuantisedRows(rows, width) if coded else None
        self.codes: HrQuantised = NOT_QUANTISED if self._room is None else self._room.struct
        self.width = width

    @property
    def at(self) -> Matrix:
        return matrix(self.floats)

    @property
    def plain(self) -> Matrix | None:
        """Return the fp32 destination if there are no codes."""
        return self.at if self._room is None else None

    def quantised(self) -> list[Emitted]:
        """Return the records that quantise the rows from fp32."""
        if self._room is None:
            return []
        return [emit.quantise(self.at, self.codes, self.width, ROWS_N)]


class _Rows:
    """Saved rows of one window between two slices, while another window's rows are in their
    place."""

    def __init__(self) -> None:
        self.kept: Floats | None = None


class _Repeated:
    """Records that are run again and again."""

    def __init__(self, team: Team, emitted: Sequence[Emitted]) -> None:
        self._team, self._count = team, len(emitted)
        self._records = emit.program(emitted)

    def run(self, step: HrStep) -> None:
        self._team.run(self._records, self._count, step)


class Encoder:
    """Encoder of windows; it writes them as K and V of each layer of a decoder, if there is one."""

    def __init__(
        self,
        files: EncoderFiles,
        team: Team,
        precision: Precision,
        kv: str,
        windows: int,
        shelf: PanelShelf | None = None,
    ) -> None:
        """Build the encoder; for the arguments see `Network`."""
        self._sizes, self._team, self._coded = files, team, precision == "int8"
        self._weights = packed(files, team, self._coded, shelf)
        if shelf is not None:
            shelf.finish()  # Before records hold addresses: packed weights may move here.
        self._kept: list[Any] = []
        self._cross_blocks = -(-files.frames // BLOCK)
        self.windows = windows
        layers = range(files.decoder_layers)
        self._cross = [self._cache(windows * self._cross_blocks, kv) for _ in layers]
        self._room = self._cache(self._cross_blocks, "int8" if kv == "int8" else "bfloat16")
        """K and V of a layer of the encoder, if weights are codes."""
        self._build_encoder()
        self.heard = [files.frames] * windows
        """Encoded positions of each window."""
        self.keys: list[list[Floats]] = [[] for _ in range(windows)]
        """K [frames, width] in fp32, by window whose words are wanted, and by aligning layer."""

    # Parts of both.

    def _cache(self, blocks: int, kind: str) -> KvLayer:
        shape = blocks, self._sizes.heads, BLOCK, HEAD_SIZE
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[kind]
        # Pages without a token are read, but with weight zero: they and their scales may hold
        # anything except NaN. Zeros take no memory before they are written.
        k, v = (np.zeros(shape, dtype) for _ in range(2))
        scales = [np.zeros(shape[:3], np.uint16) for _ in range(2)] if kind == "int8" else ()
        return KvLayer(k, v, *scales)

    def _vector(self, name: str) -> Floats:
        found = aligned((len(self._sizes.tensor(name)),), np.float32)
        found[:] = self._sizes.tensor(name)
        self._kept.append(found)
        return found

    def _linear(
        self,
        x: _Activations,
        name: str,
        y: Matrix,
        *,
        add: bool = False,
        activation: str | None = None,
    ) -> Emitted:
        weight, bias = self._weights[name], self._vector(f"{name}.bias")
        floats = None if self._coded else x.at
        return emit.linear(
            x.codes, floats, weight, bias, y, ROWS_N, accumulate=add, activation=activation
        )

    def _norm(self, x: Matrix, name: str, y: _Activations) -> Emitted:
        gain, shift = self._vector(f"{name}.weight"), self._vector(f"{name}.bias")
        return emit.layer_norm(x, None, gain, shift, _EPS, y.plain, y.codes, ROWS_N)

    def _feed_forward(
        self, x: Matrix, h: _Activations, m: _Activations, name: str
    ) -> list[Emitted]:
        return [
            self._norm(x, f"{name}.final_layer_norm", h),
            self._linear(h, f"{name}.fc1", m.at, activation="gelu"),
            *m.quantised(),
            self._linear(m, f"{name}.fc2", x, add=True),
        ]

    def _attention_spec(self, layer: int) -> AttentionSpec:
        heads = self._sizes.heads
        return AttentionSpec(layer, heads, heads, HEAD_SIZE, HEAD_SIZE**-0.5)

    # The encoder.

    def _build_encoder(self) -> None:
        files, coded = self._sizes, self._coded
        rows, width = files.frames, files.width
        self._mel = np.zeros((FRAMES + 2, files.mels), np.float32)
        half = np.zeros((FRAMES + 2, width), np.float32)
        x, positions = _Activations(rows, width, False), aligned((rows, width), np.float32)
        positions[:] = files.tensor("model.encoder.embed_positions.weight")
        h, a = _Activations(rows, width, coded), _Activations(rows, width, coded)
        m = _Activations(rows, 4 * width, coded)
        qkv = aligned((rows, 3 * width), np.float32)
        self.rows: Floats = x.floats
        self._laid: _Rows | None = None
        self._kept += [half, x, positions, h, a, m, qkv]
        # A window of three frames is three consecutive rows: nothing is gathered.
        convolutions = []
        for number, (source, step) in enumerate(((self._mel, 1), (half, 2)), 1):
            name = f"model.encoder.conv{number}"
            into = Matrix(address(half) + 4 * width, width) if number == 1 else x.at
            at = Matrix(address(source), step * source.shape[1])
            weight, bias = self._weights[name], self._vector(f"{name}.bias")
            convolutions.append(
                emit.linear(NOT_QUANTISED, at, weight, bias, into, ROWS_N, activation="gelu")
            )
        self._convolve = _Repeated(self._team, convolutions[:1])
        slices = [[convolutions[1], emit.add(Matrix(*matrix(positions)), x.at, width, ROWS_N)]]
        for i in range(files.encoder_layers):
            name = f"model.encoder.layers.{i}"
            slices.append(
                [
                    self._norm(x.at, f"{name}.self_attn_layer_norm", h),
                    self._linear(h, f"{name}.self_attn.qkv_proj", matrix(qkv)),
                    *self._within(matrix(qkv), a),
                    self._linear(a, f"{name}.self_attn.out_proj", x.at, add=True),
                    *self._feed_forward(x.at, h, m, name),
                ]
            )
        self._slices = [_Repeated(self._team, records) for records in slices]
        self.encoded: Floats = h.floats
        top = _Activations(rows, width, coded)
        gain, shift = (self._vector(f"model.encoder.layer_norm.{k}") for k in ("weight", "bias"))
        ends = [
            # In fp32 even with codes: callers may read the encoder's output.
            emit.layer_norm(x.at, None, gain, shift, _EPS, h.at, NOT_QUANTISED, ROWS_N)
        ]
        if coded:
            ends.append(emit.quantise(h.at, top.codes, width, ROWS_N))
        else:
            top = h
        self._kept.append(top)
        self._end = _Repeated(self._team, ends)
        self._written = qkv
        self._writes = []
        for i in range(files.decoder_layers):
            name = f"model.decoder.layers.{i}.encoder_attn.kv_proj"
            kv = emit.kv(self._cross[i], files.heads, files.heads, 0)
            into = Matrix(address(qkv) + 4 * width, qkv.shape[1])
            write = emit.rope(kv, matrix(qkv), self._attention_spec(i), (), None)
            self._writes.append(_Repeated(self._team, [self._linear(top, name, into), write]))

    def _within(self, qkv: Matrix, a: _Activations) -> list[Emitted]:
        """Attend from a window's positions to each other. With codes, K and V lie in pages like a
        decoder's; their products cost less than half of those in fp32."""
        heads, scale = self._sizes.heads, HEAD_SIZE**-0.5
        if not self._coded:
            return [emit.bidirectional(qkv, heads, HEAD_SIZE, scale, a.at)]
        kv = emit.kv(self._room, heads, heads, 1)
        return [
            emit.rope(kv, qkv, self._attention_spec(0), (), None),
            emit.attention(kv, qkv, None, a.codes, None, self._attention_spec(0), ROWS_N, True),
        ]

    def hear(
        self, samples: Floats, window: int, short: bool = False, words: bool = False
    ) -> Iterator[None]:
        """Encode samples; with `short`, only as much of the window as they fill."""
        mel = log_mel(samples, self._sizes.mels)
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
        files = self._sizes
        rows = files.frames
        if samples is not None:
            rows = min(rows, max(_LEAST_FRAMES, -(-samples // _FRAME_SAMPLES) + _BEHIND_FRAMES))
        step = yield from self.layers(mel, window, rows)
        self._end.run(step)
        self.keys[window] = []
        aligning = {layer for layer, _ in files.alignment if words}
        for layer, program in enumerate(self._writes):
            program.run(step)
            if layer in aligning:
                self.keys[window].append(self._written[:rows, files.width : 2 * files.width].copy())

    def layers(self, mel: Floats, window: int, rows: int) -> Generator[None, None, HrStep]:
        """Run the first `rows` positions of a window through all layers, into `rows`; they attend
        to each other and nothing after them. Stops like `encode`; returns its step."""
        self._mel[1:-1] = mel
        self.heard[window] = rows
        self._convolve.run(HrStep(n=min(FRAMES, 2 * rows + 1)))
        positions = np.arange(rows, dtype=np.int64)
        slots = positions + window * self._cross_blocks * BLOCK
        step = self._listening([Chunk(0, window, 0, range(rows), [])])
        own = np.arange(self._cross_blocks, dtype=np.int32)
        step.groups[0].slots, step.groups[1].slots = address(slots), address(positions)
        step.groups[1].tables = address(own)
        step.keep = step.keep, positions, slots, own
        mine = _Rows()
        for program in self._slices:
            self._lay_down(mine)
            program.run(step)
            yield
        self._lay_down(mine)
        self._laid = None
        return step

    def _lay_down(self, mine: _Rows) -> None:
        """Load a window's rows, and save the rows of the window that was there before."""
        if self._laid is mine:
            return
        if self._laid is not None:
            self._laid.kept = self.rows.copy()
        if mine.kept is not None:
            self.rows[:] = mine.kept
            mine.kept = None
        self._laid = mine

    def _listening(self, chunks: Sequence[Chunk]) -> HrStep:
        """Make the step for cross attention: each token attends to all of its window. Consecutive
        chunks that attend to one window are one entry, so its K and V are read once for all of
        their tokens."""
        windows = [c.window for c in chunks]
        firsts = [i for i, w in enumerate(windows) if not i or w != windows[i - 1]]
        starts = np.concatenate([[0], np.cumsum([len(c.tokens) for c in chunks])])
        starts = starts[[*firsts, len(chunks)]].astype(np.int32)
        heard = np.array([windows[i] for i in firsts], np.int32)
        tables = heard[:, None] * self._cross_blocks + np.arange(self._cross_blocks, dtype=np.int32)
        lengths = np.array([self.heard[window] for window in heard], np.int32)
        last = np.repeat(lengths, np.diff(starts)).astype(np.int64) - 1
        step = HrStep(
            n=len(last),
            b=len(firsts),
            group_count=2,
            positions=address(last),
            query_starts=address(starts),
            lengths=address(lengths),
        )
        step.groups[1].tables, step.groups[1].table_stride = address(tables), tables.shape[1]
        step.keep = starts, tables, lengths, last
        return step


class Network(Encoder):
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
        """Build the network. `kv`: type of K and V, of cross attention and of the decoder:
        float32, bfloat16, int8; None: float32 if weights are exact, else int8. `shelf`:
        packed-weight cache."""
        kv = kv or ("float32" if precision == "exact" else "int8")
        super().__init__(files, team, precision, kv, windows, shelf)
        self.files = files
        self._own_blocks = -(-files.positions // BLOCK)
        self.sequences = sequences
        layers = range(files.decoder_layers)
        self._own = [self._cache(sequences * self._own_blocks, kv) for _ in layers]
        self._places = files.tensor("model.decoder.embed_positions.weight").astype(np.float32)
        self._build_decoder()

    # The decoder.

    def _build_decoder(self) -> None:
        files, coded = self.files, self._coded
        width = files.width
        self._x = _Activations(MAX_ROWS, width, False)
        h, a = _Activations(MAX_ROWS, width, coded), _Activations(MAX_ROWS, width, coded)
        m = _Activations(MAX_ROWS, 4 * width, coded)
        qkv = aligned((MAX_ROWS, 3 * width), np.float32)
        self._q: Floats = aligned((MAX_ROWS, width), np.float32)
        self._kept += [h, a, m, qkv]
        x, q = self._x.at, matrix(self._q)
        self._own_parts, self._cross_parts = [], []
        before: list[Emitted] = []
        for i in range(files.decoder_layers):
            name, spec = f"model.decoder.layers.{i}", self._attention_spec(i)
            own = emit.kv(self._own[i], files.heads, files.heads, 0)
            cross = emit.kv(self._cross[i], files.heads, files.heads, 1)
            part = [
                *before,
                self._norm(x, f"{name}.self_attn_layer_norm", h),
                self._linear(h, f"{name}.self_attn.qkv_proj", matrix(qkv)),
                emit.rope(own, matrix(qkv), spec, (), None),
                emit.attention(own, matrix(qkv), a.plain, a.codes, None, spec, ROWS_N),
                self._linear(a, f"{name}.self_attn.out_proj", x, add=True),
                self._norm(x, f"{name}.encoder_attn_layer_norm", h),
                self._linear(h, f"{name}.encoder_attn.q_proj", q),
            ]
            self._own_parts.append(_Repeated(self._team, part))
            seen = emit.attention(cross, q, a.plain, a.codes, None, spec, ROWS_N)
            self._cross_parts.append(_Repeated(self._team, [seen]))
            before = [
                self._linear(a, f"{name}.encoder_attn.out_proj", x, add=True),
                *self._feed_forward(x, h, m, name),
            ]
        self._normed: Floats = aligned((MAX_ROWS, width), np.float32)
        gain, shift = (self._vector(f"model.decoder.layer_norm.{k}") for k in ("weight", "bias"))
        last = emit.layer_norm(
            x, None, gain, shift, _EPS, matrix(self._normed), NOT_QUANTISED, ROWS_N
        )
        self._last = _Repeated(self._team, [*before, last])
        self._asked = _Activations(MAX_LOGITS, width, coded)
        self._logits: Floats = aligned((MAX_LOGITS, files.vocab), np.float32)
        head = self._weights["model.decoder.embed_tokens"]
        floats = None if coded else self._asked.at
        product = emit.linear(self._asked.codes, floats, head, None, matrix(self._logits), ROWS_N)
        self._head = _Repeated(self._team, [*self._asked.quantised(), product])

    def decode(self, chunks: Sequence[Chunk], queries: list[Floats] | None = None) -> Floats:
        """Compute logits [R, vocab] of the wanted tokens of all chunks in order, valid until the
        next call.

        At most `MAX_ROWS` tokens, and at most `MAX_LOGITS` wanted ones. `queries` gets q [N, width]
        of each layer's cross attention.
        """
        files = self.files
        tokens = np.concatenate([np.asarray(c.tokens, np.int64) for c in chunks])
        counts = [len(c.tokens) for c in chunks]
        n = len(tokens)
        assert 0 < n <= MAX_ROWS
        positions = np.concatenate([c.start + np.arange(len(c.tokens)) for c in chunks])
        assert int(positions.max()) < files.positions
        self._x.floats[:n] = files.embedded(tokens)
        self._x.floats[:n] += self._places[positions]
        sequence = np.repeat([c.sequence for c in chunks], counts)
        blocks = np.arange(self._own_blocks, dtype=np.int32)
        tables = (
            np.array([c.sequence * self._own_blocks for c in chunks], np.int32)[:, None] + blocks
        )
        slots = sequence * (self._own_blocks * BLOCK) + positions
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = np.array([c.start + len(c.tokens) for c in chunks], np.int32)
        own = HrStep(
            n=n,
            b=len(chunks),
            group_count=1,
            positions=address(positions),
            query_starts=address(starts),
            lengths=address(lengths),
        )
        own.groups[0].tables, own.groups[0].table_stride = address(tables), tables.shape[1]
        own.groups[0].slots = address(slots)
        cross = self._listening(chunks)
        for before, seen in zip(self._own_parts, self._cross_parts, strict=True):
            before.run(own)
            if queries is not None:
                queries.append(self._q[:n].copy())
            seen.run(cross)
        self._last.run(own)
        wanted = [starts[i] + w for i, c in enumerate(chunks) for w in c.wanted]
        assert len(wanted) <= MAX_LOGITS
        self._asked.floats[: len(wanted)] = self._normed[wanted]
        if wanted:
            self._head.run(HrStep(n=len(wanted)))
        return self._logits[: len(wanted)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of sequence `source` to `target`."""
        count = -(-length // BLOCK)
        first, into = source * self._own_blocks, target * self._own_blocks
        for layer in self._own:
            for cache in (layer.k, layer.v, layer.k_scale, layer.v_scale):
                if cache is not None:
                    cache[into : into + count] = cache[first : first + count]
