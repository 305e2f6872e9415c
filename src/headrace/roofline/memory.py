"""The memory plan: made before anything is allocated, so that nothing runs out later.

All memory that an engine may use is divided into weights, activations of the largest step, tables,
graphs, a margin, and the KV pool. The pool takes the rest up to its full need. A size that does not
fit is lowered if the user left the choice (and the plan says so). Otherwise it is refused with the
options and values that would help.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..base.arch import ModelArch
from ..base.config import Decision
from ..base.errors import DoesNotFit, OptionError
from ..base.groups import graph_groups
from ..base.step import GroupShape, PoolShape
from ..models.registry import describe
from .formats import check_kv_dtype, dtype_bytes
from .memory_parts import (
    GRAPH_LOGITS,
    GRAPH_ROWS,
    Wish,
    activation_bytes,
    blocks_of,
    fixed_bytes,
    has_logits,
    kept_bytes,
    one_token,
    pool_of,
    process_bytes,
    smallest_pool,
    table_bytes,
    window_cap,
)

USABLE = {"cpu": 0.5, "cuda": 0.92}
"""Share of the available memory that is planned: a host has other tenants and a page cache that
serves mapped weights, a device has the driver's context, library workspaces and fragmentation."""

HOST_POOL_SHARE = 0.125
HOST_TOKENS_PER_ROW = 1024
"""Bounds of a host's pool: this share of the available memory and, without a chosen context, this
many tokens a row. It may be larger if one sequence needs more or `kv_memory` asks for it. Next to
the weights of a model that fits a CPU, gigabytes of KV hold prefixes that hardly ever come back,
and other processes need the memory too. (A device is the engine's own: it takes all.)"""

COMFORTABLE_CONTEXT = 2048
"""Context below which rows are given up before more context is."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Size of every part of the memory, and the concessions that made it fit."""

    pool: PoolShape
    rows: int
    step_tokens: int
    max_context: int
    kv_dtype: str
    available: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    table_bytes: int
    graph_bytes: int
    process_bytes: int
    """Interpreters and libraries of further processes that share the model."""
    margin_bytes: int
    """Bytes left alone: the share of `available` that is never planned, and the unneeded rest."""
    kv_bytes_per_token: int
    """Bytes in all layers, for a token inside every window."""
    decisions: tuple[Decision, ...]
    encoding_bytes: int = 0
    """Bytes of encodings of inputs that are not text, and of the largest one's computation."""
    codec_bytes: int = 0
    """Bytes of the codec of a model that speaks, with the rows of every sound."""
    beside_bytes: int = 0
    """Bytes of the plans of the server's other models."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds: of its largest group, the null block left out."""
        most = max((group.blocks for group in self.pool.groups if not group.state), default=1)
        return (most - 1) * self.pool.block_size

    @property
    def full_sequences(self) -> float:
        """Sequences of `max_context` that are held at the same time."""
        per_sequence = math.ceil(self.max_context / self.pool.block_size)
        full = [group.blocks - 1 for group in self.pool.groups if group.kind == "full"]
        return min(full) / per_sequence if full else float(self.rows)

    def parts(self) -> list[tuple[str, int]]:
        """Return (name, bytes) of the parts, which sum to `available`."""
        return [
            ("weights", self.weight_bytes),
            ("KV pool", self.kv_bytes),
            ("activations", self.activation_bytes),
            ("tables", self.table_bytes),
            ("graphs", self.graph_bytes),
            ("processes", self.process_bytes),
            *([("encodings", self.encoding_bytes)] if self.encoding_bytes else []),
            *([("codec", self.codec_bytes)] if self.codec_bytes else []),
            *([("other models", self.beside_bytes)] if self.beside_bytes else []),
            ("margin", self.margin_bytes),
        ]

    @property
    def taken(self) -> int:
        """Bytes that this model takes."""
        return self.available - self.margin_bytes - self.beside_bytes

    def verify(self) -> None:
        """Assert the invariants of a plan."""
        assert sum(size for _, size in self.parts()) == self.available
        assert all(size >= 0 for _, size in self.parts())
        assert all(group.blocks >= 2 for group in self.pool.groups)
        assert self.rows >= 1
        assert self.max_context >= 1


def plan_memory(
    arch: ModelArch,
    *,
    weight_bytes: int,
    available: int,
    rows: int,
    step_tokens: int,
    max_context: int | None,
    block_size: int = 16,
    kv_dtype: str = "float32",
    dtype: str = "float32",
    kv_memory: int | None = None,
    device: str = "cpu",
    depth: int = 1,
    graph_bytes: int = 0,
    kv_share: int = 1,
    step_bytes: int = 0,
    ranks: tuple[tuple[GroupShape, ...], ...] = (),
) -> MemoryPlan:
    """Divide `available` bytes, weights included (so: measured before they are loaded).

    `max_context=None` leaves the context to the plan: the model's, lowered to a size that fits. An
    explicit context is kept or refused; rows are lowered if that helps. `kv_memory`, if given, is
    the size of the pool and may then use the share that `USABLE` would leave alone. Without it a
    host's pool is bounded by `HOST_POOL_SHARE` and `HOST_TOKENS_PER_ROW`.

    `graph_bytes` is the size of captured graphs. `step_bytes` is the measured size of the largest
    step's tensors; it then replaces the formula of `activation_bytes` (and of graphs on a device:
    `GRAPH_LOGITS`). `kv_share` ranks keep one part each of every token's KV (sizes are then those
    of one rank). `ranks`: KV groups of each rank that shares the model on this host (sizes are then
    those of all). Raises `OptionError` for values out of range, `DoesNotFit` with options that
    help.
    """
    _verify(rows, step_tokens, max_context, block_size, depth)
    check_kv_dtype(kv_dtype)
    dtype_bytes(dtype)
    if device not in USABLE:
        raise OptionError(f"device must be one of {', '.join(USABLE)}, not {device!r}")
    if device == "cuda" and not step_bytes and not graph_bytes and has_logits(arch):
        graph_bytes = GRAPH_LOGITS * min(rows, GRAPH_ROWS) * arch.vocab_size
    if max_context is not None and max_context > arch.max_context:
        raise OptionError(
            f"max_context ({max_context}) is more than the model was made for ({arch.max_context})",
            param="max_context",
        )
    wish = Wish(
        arch,
        weight_bytes,
        rows,
        step_tokens,
        max_context or arch.max_context,
        block_size,
        kv_dtype,
        dtype,
        depth,
        graph_bytes,
        kv_share,
        step_bytes,
        ranks,
    )

    def room(candidate: Wish) -> int:
        """Return the bytes that the KV pool may take."""
        if kv_memory is not None:
            return min(kv_memory, available - fixed_bytes(candidate))
        return int(available * USABLE[device]) - fixed_bytes(candidate)

    def fits(candidate: Wish) -> bool:
        return room(candidate) >= kept_bytes(candidate, smallest_pool(candidate))

    if kv_memory is not None and kv_memory > available - fixed_bytes(wish):
        left = available - fixed_bytes(wish)
        raise DoesNotFit(
            f"kv_memory of {_size(kv_memory)} does not fit: weights, activations and tables take "
            f"{_size(fixed_bytes(wish))} of {_size(available)}"
            + (f"; what would help: --kv-memory {left // 2**20}MiB" if left >= 2**20 else ""),
            param="kv_memory",
        )

    fitted = _fit(wish, fits, lower_context=max_context is None)
    if fitted is None and kv_memory is not None:
        raise _too_small(wish, kv_memory, explicit=max_context is not None)
    if fitted is None:
        raise _refusal(wish, fits, available, room)
    decisions = list(_given_up(wish, fitted, room(wish), available))
    allowed, per_row = room(fitted), None
    if device == "cpu" and kv_memory is None:
        per_row = max_context or min(HOST_TOKENS_PER_ROW, fitted.max_context)
        enough = _enough_for_a_host(fitted, available, per_row)
        if enough < allowed:
            allowed = enough
        else:
            per_row = None
    pool = largest_pool(fitted, allowed)
    kv_bytes = kept_bytes(fitted, pool)
    decisions.append(_pool_decision(fitted, pool, kv_bytes, per_row))
    plan = MemoryPlan(
        pool=pool,
        rows=fitted.rows,
        step_tokens=fitted.step_tokens,
        max_context=fitted.max_context,
        kv_dtype=kv_dtype,
        available=available,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        activation_bytes=fitted.processes * activation_bytes(fitted),
        table_bytes=fitted.processes * table_bytes(fitted),
        graph_bytes=graph_bytes,
        process_bytes=process_bytes(fitted),
        margin_bytes=available - fixed_bytes(fitted) - kv_bytes,
        kv_bytes_per_token=kept_bytes(fitted, one_token(arch, kv_dtype)),
        decisions=tuple(decisions),
    )
    plan.verify()
    return plan


def largest_pool(wish: Wish, room: int) -> PoolShape:
    """Return the largest useful pool in `room` bytes.

    F blocks of full attention go with min(F, cap) blocks of each window: sequences of any length
    then run out of full blocks before they run out of windowed ones.
    """
    low = max(blocks_of(wish, wish.max_context), wish.rows)
    kept = graph_groups(describe(wish.arch), wish.kv_dtype)
    groups = [group for group in kept if not group.state]
    high = max([low, *(window_cap(wish, group.window) for group in groups)])
    more = range(low + 1, high + 1)
    fit = bisect(more, room, key=lambda blocks: kept_bytes(wish, pool_of(wish, blocks)))
    return pool_of(wish, low + fit)


def _enough_for_a_host(wish: Wish, available: int, per_row: int) -> int:
    """Return the default bytes of the pool of a host's engine."""
    average = pool_of(wish, wish.rows * blocks_of(wish, per_row))
    share = int(available * HOST_POOL_SHARE)
    return max(kept_bytes(wish, smallest_pool(wish)), min(share, kept_bytes(wish, average)))


def _given_up(wish: Wish, fitted: Wish, room: int, available: int) -> Iterator[Decision]:
    """Yield each lowered value and its reason; `room` is of the wish's pool."""
    if fitted.max_context < wish.max_context:
        yield Decision(
            "max_context",
            str(fitted.max_context),
            f"the model's {wish.max_context} would need "
            f"{_size(kept_bytes(wish, smallest_pool(wish)))} of KV for one sequence, "
            f"{_size(room)} are there",
        )
    if fitted.rows < wish.rows:
        yield Decision(
            "max_sequences",
            str(fitted.rows),
            f"{wish.rows} rows need {_size(fixed_bytes(wish) - wish.weight_bytes)} of "
            f"activations and tables beside the pool; {_size(available)} are there in all",
        )


def _fit(wish: Wish, fits: Callable[[Wish], bool], *, lower_context: bool) -> Wish | None:
    """Give up as little of the wish as possible: context to a comfortable one, rows, context."""
    if fits(wish):
        return wish
    comfortable = min(wish.max_context, COMFORTABLE_CONTEXT)
    if lower_context:
        found = _largest_context(wish, fits, comfortable)
        if found is not None:
            return found
    rows = wish.rows
    while rows > 1:
        rows = (rows + 1) // 2
        fewer = replace(wish, rows=rows)
        found = _largest_context(fewer, fits, comfortable) if lower_context else None
        if found is not None or (not lower_context and fits(fewer)):
            return found or fewer
    if lower_context:
        return _largest_context(replace(wish, rows=1), fits, min(comfortable, 8 * wish.block_size))
    return None


def _largest_context(wish: Wish, fits: Callable[[Wish], bool], least: int) -> Wish | None:
    """Find the largest context from `least` up, a multiple of the block size, that fits."""
    low = blocks_of(wish, least)
    high = wish.max_context // wish.block_size

    def at(blocks: int) -> Wish:
        return replace(wish, max_context=min(wish.max_context, blocks * wish.block_size))

    if not fits(at(low)):
        return None
    more = range(low + 1, high + 1)
    return at(low + bisect(more, False, key=lambda blocks: not fits(at(blocks))))


def _too_small(wish: Wish, kv_memory: int, *, explicit: bool) -> DoesNotFit:
    """Explain a `kv_memory` without room for a sequence; `explicit`: the context was asked for."""
    least = wish.max_context
    if not explicit:
        least = min(wish.max_context, COMFORTABLE_CONTEXT, 8 * wish.block_size)
    needed = kept_bytes(wish, smallest_pool(replace(wish, rows=1, max_context=least)))
    return DoesNotFit(
        f"kv_memory of {_size(kv_memory)} is too small: one sequence of {least} tokens needs "
        f"{_size(needed)}; what would help: --kv-memory {-(-needed // 2**20)}MiB"
        + (" or a smaller --max-context" if explicit else ""),
        param="kv_memory",
    )


def _refusal(
    wish: Wish, fits: Callable[[Wish], bool], available: int, room: Callable[[Wish], int]
) -> DoesNotFit:
    """Name the single options, with values, that would help; else how much memory is missing."""
    help_: list[str] = []
    fewer = wish
    while fewer.rows > 1 and not fits(fewer):
        fewer = replace(fewer, rows=fewer.rows // 2)
    if fewer.rows < wish.rows and fits(fewer):
        help_.append(f"--max-sequences {fewer.rows}")
    shorter = _largest_context(wish, fits, min(wish.max_context, wish.block_size))
    if shorter is not None and shorter.max_context < wish.max_context:
        help_.append(f"--max-context {shorter.max_context}")
    smaller = wish
    while smaller.step_tokens > 64 and not fits(smaller):
        smaller = replace(smaller, step_tokens=smaller.step_tokens // 2)
    if smaller.step_tokens < wish.step_tokens and fits(smaller):
        help_.append(f"--step-tokens {smaller.step_tokens}")
    if wish.kv_dtype != "int8" and fits(replace(wish, kv_dtype="int8")):
        help_.append("--kv-dtype int8")
    missing = max(1, kept_bytes(wish, smallest_pool(wish)) - room(wish))
    if not help_ and wish.weight_bytes > available:
        help_.append("a smaller model or a smaller weight format")
    advice = "any of " + ", ".join(help_) if len(help_) > 1 else "".join(help_)
    return DoesNotFit(
        f"{_size(wish.weight_bytes)} of weights, "
        f"{_size(fixed_bytes(wish) - wish.weight_bytes)} of activations and tables and "
        f"{_size(kept_bytes(wish, smallest_pool(wish)))} of KV for one sequence of "
        f"{wish.max_context} tokens do not fit into {_size(available)} "
        f"({_size(missing)} are missing)"
        + (f"; what would help: {advice}" if advice else "; no single option would help"),
        param="max_context",
    )


def _pool_decision(wish: Wish, pool: PoolShape, kv_bytes: int, per_row: int | None) -> Decision:
    """Explain the pool's size; `per_row`: the tokens that bounded it on a host."""
    if not pool.groups:
        return Decision("kv_memory", _size(0), "this model keeps nothing between two steps")
    groups = ", ".join(f"{group.name} {group.blocks} blocks" for group in pool.groups)
    if all(g.state or g.blocks > window_cap(wish, g.window) for g in pool.groups):
        reason = "every row has its full context"
    elif per_row is not None:
        reason = (
            f"one sequence of {wish.max_context} tokens, or {per_row} for each of "
            f"{wish.rows} rows within {HOST_POOL_SHARE:.1%} of the memory: --kv-memory takes more"
        )
    else:
        reason = "what remains beside weights and activations"
    return Decision(
        "kv_memory",
        _size(kv_bytes),
        f"{groups} of {pool.block_size} tokens in {wish.kv_dtype}; {reason}",
    )


def _verify(
    rows: int, step_tokens: int, max_context: int | None, block_size: int, depth: int
) -> None:
    for name, value, low in (
        ("max_sequences", rows, 1),
        ("step_tokens", step_tokens, 1),
        ("max_context", 8 if max_context is None else max_context, 8),
        ("block_size", block_size, 1),
        ("depth", depth, 1),
    ):
        if value < low:
            raise OptionError(f"{name} must be at least {low}, not {value}", param=name)


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
