"""A quantised model compared with its original, token by token, by the kernels that serve both.

Perplexity alone hides losses that cancel. KL divergence counts every change of the distribution,
its 99.9th percentile the rare large ones. Greedy decoding shows the top token's share and the flips
("Accuracy is not all you need", 2407.09141).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from ..base.modelfiles import ModelFiles
from ..bench.statistics import t_95
from ..engine.preload import give_back
from ..kernels.arrays import floats
from ..quantise.batches import batch_of, pool_of
from ..worker.kv_tensors import allocate_kv, leave_biases_out
from ..worker.loading import open_parts
from ..worker.options import WorkerOptions, resolve
from ..worker.part import Part

Floats = npt.NDArray[np.float32]
ROWS = 64
"""Tokens whose distributions are compared at once."""
EIGHT_BITS = frozenset({"Q8_0", "int-quantized", "float-quantized"})
"""Types of GGUF and formats of compressed-tensors that store a weight in eight bits."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval over windows, paired by window."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of a quantised model from its original on the same tokens."""

    tokens: int
    windows: int
    kv_dtype: str
    perplexity: float
    original: float
    """Perplexity of the original."""
    share: Interval
    """The original's perplexity over the quantised one's: 1 means no loss."""
    kl: Interval
    """Mean KL divergence, in nats a token."""
    kl_999: float
    """99.9th percentile of the KL divergence of tokens."""
    same_top: Interval
    """Share of tokens with the same most likely next token."""
    flips: float
    """Share of tokens that one of the models predicts and the other does not."""

    def said(self) -> dict[str, Any]:
        """Return it as plain JSON, rounded."""
        found: dict[str, Any] = _rounded(asdict(self))
        return found

    def fails(self, least_share: float, least_same: float) -> list[str]:
        """List the figures that are below their thresholds or not numbers, one per line."""
        share, same, found = self.share.mean, self.same_top.mean, []
        if math.isnan(share):
            found.append("the share of the original's perplexity is not a number")
        elif share < least_share:
            found.append(f"{share:.2%} of the original's perplexity, {least_share:.1%} is asked")
        if math.isnan(same):
            found.append("the share of the same top token is not a number")
        elif same < least_same:
            found.append(f"the same top token in {same:.1%}, {least_same:.0%} is asked")
        return found


def thresholds(kinds: Sequence[str]) -> tuple[float, float]:
    """Return a format's default thresholds: (share of perplexity, share of top tokens)."""
    return (0.999, 0.99) if EIGHT_BITS.issuperset(kinds) else (0.99, 0.93)


class Scorer:
    """A loaded model that computes the logits of every token of a window."""

    def __init__(self, files: ModelFiles, longest: int, threads: int | None = None) -> None:
        """Load the model as a worker on the CPU does."""
        options = WorkerOptions(threads=threads, max_context=longest)
        resolved = resolve(options)
        graph, source = open_parts(files, options)["text"][1:3]
        if "logits" not in graph.outputs:
            raise InvalidRequest("the model makes vectors; the gate reads text", param="model")
        self.kv_dtype = resolved.kv_dtype
        self._part = Part(graph, source, options, resolved, longest)

    def hidden(self, window: npt.NDArray[np.int64]) -> Any:
        """Return the hidden states [N, D] of a window's tokens."""
        model, operators = self._part.model, self._part.operators
        pool = pool_of(model.graph, [window], self.kv_dtype)
        with self._part.inference():
            cache = allocate_kv(pool, "cpu", host=operators.host)
            leave_biases_out(model, operators.name, cache)
            batch = batch_of([window], pool, host=operators.host)
            return model.forward(operators, batch, cache, every=True)[0]

    def read(self, windows: Sequence[npt.NDArray[np.int64]]) -> list[Any]:
        """Return the hidden states of each window, and keep only the head afterwards."""
        found = [self.hidden(window) for window in windows]
        weights = self._part.model.weights
        weights.by_key = {
            key: one for key, one in weights.by_key.items() if key[1] in ("logits", "vector")
        }
        give_back()
        return found

    def log_probabilities(self, hidden: Any) -> Floats:
        """Return log-probabilities [R, V] of some hidden states."""
        with self._part.inference():
            logits = floats(self._part.model.logits(self._part.operators, hidden))
        logits = logits.astype(np.float32)
        logits = logits - logits.max(-1, keepdims=True)
        found: Floats = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return found


def compare(
    original: ModelFiles,
    quantised: ModelFiles,
    windows: Sequence[npt.NDArray[np.int64]],
    threads: int | None = None,
) -> Comparison:
    """Compare the models on windows of at least two tokens."""
    longest = max(map(len, windows))
    some = [window for window in windows if len(window) > 1]
    if not some:
        raise InvalidRequest("the text has no window of two tokens", param="text")
    give_back()
    scorers, states = [], []
    for files in (original, quantised):  # In turn: both at once need twice the memory.
        scorers.append(Scorer(files, longest, threads))
        states.append(scorers[-1].read(some))
    each = [_window(scorers, *of) for of in zip(some, *states, strict=True)]
    counts = np.array([len(one["kl"]) for one in each], np.float64)
    means = {name: np.array([one[name].mean() for one in each]) for name in each[0]}
    ratio = _interval(means["before"] - means["after"], counts)
    every = {name: np.concatenate([one[name] for one in each]) for name in each[0]}
    return Comparison(
        tokens=int(counts.sum()),
        windows=len(each),
        kv_dtype=scorers[1].kv_dtype,
        perplexity=_exp(every["after"].mean()),
        original=_exp(every["before"].mean()),
        share=Interval(*map(_exp, ratio)),
        kl=Interval(*_interval(means["kl"], counts)),
        kl_999=float(np.quantile(every["kl"], 0.999)),
        same_top=Interval(*_interval(means["same"], counts)),
        flips=float(every["flips"].mean()),
    )


def _window(
    scorers: Sequence[Scorer], window: npt.NDArray[np.int64], *hidden: Any
) -> dict[str, Floats]:
    """Return the figures of each predicted token of a window with these hidden states."""
    found: dict[str, list[Floats]] = {}
    for first in range(0, len(window) - 1, ROWS):
        rows = slice(first, min(first + ROWS, len(window) - 1))
        before, after = (
            scorer.log_probabilities(one[rows]) for scorer, one in zip(scorers, hidden, strict=True)
        )
        for name, values in _figures(before, after, window[rows.start + 1 : rows.stop + 1]):
            found.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in found.items()}


def _figures(
    before: Floats, after: Floats, wanted: npt.NDArray[np.int64]
) -> Iterator[tuple[str, Floats]]:
    at = np.arange(len(wanted))
    tops = before.argmax(-1), after.argmax(-1)
    yield "before", -before[at, wanted]
    yield "after", -after[at, wanted]
    # Rounding may make a sum slightly negative.
    yield "kl", np.maximum((np.exp(before) * (before - after)).sum(-1), 0)
    yield "same", (tops[0] == tops[1]).astype(np.float32)
    yield "flips", ((tops[0] == wanted) != (tops[1] == wanted)).astype(np.float32)


def _interval(values: npt.NDArray[Any], counts: npt.NDArray[Any]) -> tuple[float, float, float]:
    """Return (mean, low, high) over windows of `counts` tokens."""
    weights = counts / counts.sum()
    mean = float((weights * values).sum())
    if len(values) < 2:
        return mean, -math.inf, math.inf
    spread = math.sqrt(
        float((weights**2 * (values - mean) ** 2).sum()) * len(values) / (len(values) - 1)
    )
    half = t_95(len(values) - 1) * spread
    return mean, mean - half, mean + half


def _exp(value: float) -> float:
    """Return e to this power; infinity on overflow."""
    with np.errstate(over="ignore"):
        return float(np.exp(np.float64(value)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
