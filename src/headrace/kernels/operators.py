"""The public operators, with their shapes written once.

Layers and models compute only through an `Operators` object that they are given: no module global,
no arithmetic of their own beyond views. So a backend can be chosen per operator, and two engines in
one process can use different ones. A backend may *record* the calls of one forward pass and replay
them (a CUDA graph, a CPU program). The roofline counts the same list.

Letters: N tokens in the step (all sequences, concatenated), B entries (sequences), D hidden,
H query heads, G KV heads, E head size, V vocabulary, I intermediate size, S block size.
A backend must compute row n of every result from row n of its inputs (and, in attention, from the
KV of its own sequence) only: row invariance, DESIGN promise 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..base.graph import AttentionSpec, LatentSpec, Role, RouteSpec
from ..base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from .arrays import Array, host
from .draws import DrawParameters
from .encoded import EncodedRows
from .prepared import RopeTable
from .ranked import PicturedRows, RankedRows
from .weights import BlockWeight, DenseWeight, PackedWeight, Weight

if TYPE_CHECKING:
    import torch

    from .attention_plan import AttentionPlan
    from .fuse import Joining
    from .key_bias import KeyBias
    from .ranks import ExpertShare


class Dequantise(Protocol):
    """Dequantiser of block-quantised weights, from `quant`. It is passed down, since this package
    may not import `quant`. It remembers its last result, so that a tied table is expanded once."""

    def __call__(self, weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
        """Return its values."""
        ...

    def unpack(self, weight: BlockWeight) -> PackedWeight:
        """Return its codes, scales and offsets in the plain layout, without loss."""
        ...


@dataclass(slots=True)
class KvLayer:
    """The paged KV of one layer: `k` and `v` [blocks, G, S, E].

    In latent attention both are one array. With an int8 or fp8 cache `k_scale` and `v_scale`
    [blocks, G, S] bf16 hold one scale per token and head.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None
    bias: KeyBias | None = None
    """Biases left out of int8 keys; attention adds them again."""
    planes: Array | None = None
    """`bias.planes()` on the device, unless that is a CPU."""

    @property
    def block_size(self) -> int:
        return int(self.k.shape[2])

    @property
    def across(self) -> bool:
        """Whether the tokens of a block are contiguous in `v`, which is then a view of [blocks, G,
        E, S]. So GPUs can multiply e4m3 values without a transposition."""
        return bool(self.v.stride(2) < self.v.stride(3))


@dataclass(slots=True)
class StateLayer:
    """The states of one layer, by block of the state group: see `base.groups.state_arrays`."""

    inputs: Array
    """[blocks, taps - 1 + drafts, C]."""
    state: Array | None = None
    """[blocks, H, K, V]. The backend decides the layout of a head's matrix."""
    tail: Array | None = None
    """[blocks, drafts, H, K + V + 2]: k, v, then decay and step of each draft."""


STATE_COLUMNS = 6
"""Numbers of `StepBatch.states`."""


@dataclass(slots=True)
class GroupBatch:
    """A step's view of one layer group."""

    tables: Array
    """[B, max_blocks] int32: block of each sequence's tokens; 0 (null) if out of the window."""
    slots: Array
    """[N] int64: slot of each token's K and V, block · S + offset."""
    window: int | None


@dataclass(frozen=True, slots=True)
class HostStep:
    """A `StepBatch`'s entries as numbers in host memory."""

    counts: npt.NDArray[np.int64]
    """[B]."""
    lengths: npt.NDArray[np.int64]
    """[B]."""
    sample_rows: npt.NDArray[np.int64]
    """[R]."""


@dataclass(slots=True)
class StepBatch:
    """A step's tokens in arrays: built once per step, read by every layer."""

    tokens: Array
    """[N] int64."""
    positions: Array
    """[N] int64: place of each token in its sequence."""
    query_starts: Array
    """[B + 1] int32: entry b owns tokens query_starts[b] : query_starts[b + 1]."""
    lengths: Array
    """[B] int32: tokens of each sequence that exist once this step is done (start + count)."""
    groups: list[GroupBatch]
    sample_rows: Array
    """[R] int64, ascending: index into N of every token that gets logits."""
    max_count: int
    """Largest count in the step: 1 means pure decode."""
    max_length: int
    types: Array | None = None
    """[N] int64: token type of each token, for encoders that have them."""
    turns: Array | None = None
    """[axes, N] int64: position of each token on each axis, for ropes that have some (`Rope.axes`).
    None: `positions` on all of them."""
    reach: Array | None = None
    """[N] int64: last position that each token sees, of its own sequence and within `lengths`; it
    never decreases within an entry. None: each token sees up to its own position."""
    windows: Array | None = None
    """[windows + 1] int32: bounds of the windows of attention with `AttentionSpec.windowed`."""
    adapters: npt.NDArray[np.int32] | None = None
    """[N], on the host: LoRA slot of each token, -1 for none; None: no token has one."""
    fixed: bool = False
    """Whether this very object may come again, with new numbers in the same memory."""
    host: HostStep | None = None
    """Local: imports torch, for single operators only."""
    plan: AttentionPlan | None = None
    """Division of its attention, if the backend has a `planner`. If it is missing, the first layer
    makes it from `host`."""
    rules: npt.NDArray[np.void] | None = None
    """[R] of `draws.RULE`: draw rules of the tokens of `sample_rows`, for host arrays, unless all
    tokens are greedy."""
    draws: DrawParameters | None = None
    """Draw parameters of the tokens of `sample_rows`, for arrays on a device."""
    targets: Array | None = None
    """[R] int64, on a device: place of each new token in the flattened table of tokens."""
    logits: Array | None = None
    """[R, V] fp32, on a device: where the head may write its logits, which saves a copy."""
    states: npt.NDArray[np.int32] | None = None
    """[B, `STATE_COLUMNS`], on the host, for a model that keeps states. Columns: tokens in the
    entry's state; tokens of this step that are not drafts; then, for each of two checkpoints, the
    tokens of the sequence after which it is made (0: no checkpoint) and its block. None: no drafts
    and no checkpoints."""
    state_rows: Array | None = None
    """`states` on the device of the other arrays."""
    encoded: EncodedRows | None = None
    """Rows of other parts for some tokens, in place of their ids'; None: no token has any."""
    across: StepBatch | None = None
    """The same tokens for cross-attention: entries with the same input may be merged, each token's
    position is the input's last row, and `lengths` are those of the inputs. None without
    cross-attention."""

    ranked: RankedRows | None = None
    """Features of the rows of a ranking; None: the model is not a ranker."""
    pictured: PicturedRows | None = None
    """Numbers of the pictures; None: the model draws none."""

    @property
    def labels(self) -> Array | None:
        """Return [R] int64: class of the picture of each sampled row."""
        return None if self.pictured is None else self.pictured.labels

    def sampled_places(self) -> npt.NDArray[np.int64]:
        """Return `sample_rows` on the host, without waiting for a device."""
        return host(self.sample_rows) if self.host is None else self.host.sample_rows

    def next_places(self) -> npt.NDArray[np.int64]:
        """Return [R]: position of each new token in its sequence. For arrays in host memory."""
        found: npt.NDArray[np.int64] = host(self.positions)[host(self.sample_rows)] + 1
        return found


@dataclass(slots=True)
class KvCache:
    """The KV of all layers, as passed to a forward pass."""

    layers: Sequence[KvLayer] | Mapping[int, KvLayer]
    """Layers by number."""
    groups: Sequence[int] | Mapping[int, int]
    """Per layer: its index in `StepBatch.groups`."""
    windows: list[int | None] = field(default_factory=list)
    """Window of each group, as in `GroupBatch`; empty if no steps are prepared ahead."""
    states: Mapping[int, StateLayer] = field(default_factory=dict)
    """Layers that keep a state instead of KV."""

    @property
    def first(self) -> KvLayer:
        """The first layer with KV: all share its device, block size and number of heads."""
        layers = self.layers
        return next(iter(layers.values())) if isinstance(layers, Mapping) else layers[0]

    def kept(self) -> Iterator[tuple[KvLayer | StateLayer, int]]:
        """Yield every layer with its group."""
        numbers = self.layers if isinstance(self.layers, Mapping) else range(len(self.layers))
        for number in numbers:
            yield self.layers[number], self.groups[number]
        for number, layer in self.states.items():
            yield layer, self.groups[number]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest possible step: a program preallocates for it."""

    tokens: int
    """N at most."""
    entries: int
    """B at most."""
    max_context: int
    drafts: int = 0
    """Tokens that an entry may verify in addition to its own."""
    texts: int = 1
    """T at most."""

    @property
    def samples(self) -> int:
        """R at most."""
        return min(max(self.tokens, self.entries), self.entries * (1 + self.drafts))


class Operators(Protocol):
    """Operators that a backend implements. x and results are in the model's dtype unless said
    otherwise."""

    name: str
    host: bool
    """Whether its input arrays are numpy arrays in host memory, with vectors in fp32; otherwise
    tensors on its device. If true, it also takes tensors in host memory."""

    @property
    def joined(self) -> Joining | None:
        """Joined nodes that it computes at once (`kernels.fuse`); None: sums and norms only."""
        ...

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        """Convert a weight as stored to the form that operator `role` takes here.

        Called once per use at load (a tied table: for `embed` and for `logits`); the operator is
        later called with the result. Only kinds that `supports` accepted are passed.
        """
        ...

    def embed(self, tokens: Array, weight: Weight, scale: float) -> Array:
        """Look up tokens [N] → weight[tokens] · scale [N, D]."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float, offset: float) -> Array:
        """Compute x [N, D] → x / rms(x) · (weight + offset), statistics in fp32."""
        ...

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        """Compute x [N, D] → (x - mean) / sqrt(variance + eps) · weight + bias, statistics in
        fp32."""
        ...

    def add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, offset: float
    ) -> tuple[Array, Array]:
        """Compute residual' = residual + x → (rms_norm(residual'), residual'). May reuse
        `residual`."""
        ...

    def add(self, x: Array, residual: Array, factor: float = 1.0) -> Array:
        """Compute residual + factor · x [N, D]. May reuse `residual`."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Array | None) -> Array:
        """Compute x [N, in] → x · weightᵀ + bias [N, out]."""
        ...

    def write(
        self,
        qkv: Array,
        spec: AttentionSpec,
        norms: Sequence[Array],
        rope: RopeTable | None,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
    ) -> Array:
        """Turn qkv [N, (H + 2G) · E] into q [N, H · E], normed and rotated. K and V are written to
        `kv`, unless they belong to another layer: see `AttentionSpec.values`.

        `norms` [E] of q and of k, if given, are RMS norms per head, before the rotation; or [H · E]
        and [G · E] over all heads (`whole_norm`). Without a `rope` nothing is rotated. q may stay
        in place in qkv.

        Bidirectional, without `kv`: nothing is written; the result is qkv with normed and rotated q
        and k.
        """
        ...

    def attend(
        self,
        q: Array,
        spec: AttentionSpec,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
        sinks: Array | None = None,
    ) -> Array:
        """Compute causal paged attention: q [N, H · E] → [N, H · E].

        Token n of entry b at position p sees positions max(0, p - window + 1) … p of its own
        sequence, or up to `StepBatch.reach`. The KV of this step's tokens is already in `kv`.
        Softmax in fp32; `softcap` c replaces a score s by c · tanh(s / c). `sinks` [H] are
        additional scores, one per head, with a share of the weights but no value.

        Bidirectional, without `kv`: q is qkv [N, 3 · H · E], and every token sees all tokens of
        its own entry, which are all in this step; or of its window, if `spec.windowed`.
        """
        ...

    def absorb(
        self, q: Array, latent: Array, rotary: Array, spec: LatentSpec, packing: list[Weight]
    ) -> Array:
        """Pack the queries and the key of latent attention into latents: `kernels.latent`."""
        ...

    def unpack(self, mixed: Array, spec: LatentSpec, unpacking: list[Weight]) -> Array:
        """Unpack sums over latents → values of all heads: `kernels.latent`."""
        ...

    def gated(self, gate_up: Array, activation: str) -> Array:
        """Compute gate_up [N, 2I] → act(gate) · up [N, I]; activation silu, gelu_tanh or gelu."""
        ...

    def activate(self, x: Array, activation: str) -> Array:
        """Compute x → act(x), by element; activation silu, gelu_tanh, gelu, tanh, relu or relu2
        (max(x, 0)²)."""
        ...

    def multiply(self, x: Array, gate: Array, activation: str) -> Array:
        """Compute x · act(gate), by element; activation as of `activate`, sigmoid or
        identity."""
        ...

    def short_conv(
        self,
        x: Array,
        spec: ConvSpec,
        taps: Array,
        bias: Array | None,
        layer: StateLayer,
        batch: StepBatch,
        group: int,
    ) -> Array:
        """Convolve x [N, C], or [N, 3C] gated → [N, C]; `taps` [taps · C], tap by tap, fp32; the
        preceding inputs are in `layer`. Checkpoints of `StepBatch.states` are copied."""
        ...

    def recur(
        self,
        given: Sequence[Array],
        spec: DeltaSpec | SsmSpec,
        weights: Sequence[Array],
        layer: StateLayer,
        batch: StepBatch,
        group: int,
    ) -> Array:
        """Run the node `delta_rule` or `ssm` on its inputs and vectors, in their order → [N, H ·
        V].

        Tokens are processed one by one in fp32, so the division of a prompt into chunks does not
        matter. Drafts do not enter the state: their inputs are in `StateLayer.tail`.
        """
        ...

    def route(
        self, logits: Array, spec: RouteSpec, bias: Array | None, gains: Array | None = None
    ) -> tuple[Array, Array]:
        """Route logits [N, experts] → experts [N, active], the highest first, among equals the
        smallest number first; their routing weights [N, active] fp32. `bias` [experts] affects only
        the choice; `gains` [experts] are factors on the routing weights."""
        ...

    def experts(
        self,
        x: Array,
        chosen: Array,
        shares: Array,
        gate_up: list[Weight],
        down: list[Weight],
        activation: str,
        biases: tuple[Array, Array] | None = None,
        inside: bool = False,
        share: ExpertShare | None = None,
    ) -> Array:
        """Compute the routed feed-forward: x [N, D] and the results of `route` → [N, D]; activation
        as of `gated`, or clamped (`ExpertsSpec`). `biases`: of all experts, see `Prepared.biases`.
        `inside`: routing weights multiply the experts' inputs, not their outputs. `share`: a rank's
        part; its results have the columns of its `down`."""
        ...

    def scatter(self, x: Array, rows: Array, places: Array) -> Array:
        """Replace x[places] of x [N, D] by rows [M, D]; places [M] are distinct. May reuse `x`."""
        ...

    def select(self, x: Array, rows: Array) -> Array:
        """Select x[rows] [R, D] of x [N, D]; rows [R] ascend. If R is N, return x itself."""
        ...

    def logits(self, x: Array, weight: Weight, softcap: float | None) -> Array:
        """Compute x [R, D] → fp32 logits [R, V]."""
        ...
