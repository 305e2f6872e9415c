"""`kernels.sampling` in numpy for logits in host memory; the definitions are there.

It works row by row and reads as little of a row as possible. At 152,000 tokens a row is 600 kB, so
each pass over it costs more than the calls around it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .draws import DrawParameters, LogprobColumns

BLOCK = 16_384
"""Logits whose exponentials are summed at once, in fp32; they fit into the first caches."""
GROUP = 128
"""Logits per group; the search for the most likely ones looks at each group's largest."""

Logits = npt.NDArray[np.float32]


def penalise_rows(
    logits: Logits,
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int32],
    prompt_lengths: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    repetition: npt.NDArray[np.float32],
    frequency: npt.NDArray[np.float32],
    presence: npt.NDArray[np.float32],
) -> None:
    """Apply `sampling.penalise` in place: rows [P] of logits [R, V], by tokens [P, L].

    Only the logits of tokens that appear are touched.
    """
    for place, row in enumerate(rows.tolist()):
        line, known = logits[row], tokens[place, : lengths[place]]
        if repetition[place] != 1:
            seen = np.zeros(len(line), np.bool_)
            seen[known] = True
            ids = np.flatnonzero(seen)
            values, factor = line[ids], repetition[place]
            line[ids] = np.where(values > 0, values / factor, values * factor)
        if frequency[place] != 0 or presence[place] != 0:
            ids, counts = np.unique(known[prompt_lengths[place] :], return_counts=True)
            values = line[ids] - counts.astype(np.float32) * frequency[place]
            line[ids] = values - presence[place]


def log_probabilities(logits: Logits, tokens: npt.NDArray[np.int64], top: int) -> LogprobColumns:
    """Return log-probabilities of `tokens` [R] and of the `top` most likely, by raw logits [R,
    V]."""
    found = LogprobColumns([], [], [], [])
    for line, token in zip(logits, tokens.tolist(), strict=True):
        norm, own = _logsumexp(line), float(line[token])
        found.logprobs.append(own - norm)
        found.ranks.append(int(np.count_nonzero(line > own)) + 1)
        ids = _most_likely(line, top)
        found.top_ids.append(ids.tolist())
        found.top_logprobs.append([value - norm for value in line[ids].tolist()])
    return found


def normalisers(logits: Logits) -> npt.NDArray[np.float64]:
    """Return the logarithm of the sum of the exponentials of each row [R]."""
    return np.array([_logsumexp(line) for line in logits], np.float64)


def best_beams(
    values: npt.NDArray[np.float64],
    beams: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    most: int,
) -> npt.NDArray[np.int64]:
    """Return the places of the `most` largest of `values` [N], the best first. Among equals the
    smaller beam [N] comes first, then the smaller token [N]; -inf is left out."""
    some = np.flatnonzero(values > -np.inf)
    if len(some) > 4 * most:
        bound = np.partition(values[some], len(some) - most)[len(some) - most]
        some = some[values[some] >= bound]
    order = np.lexsort((tokens[some], beams[some], -values[some]))
    return some[order[:most]]


def draw(logits: Logits, parameters: DrawParameters) -> npt.NDArray[np.int64]:
    """Draw as `sampling.draw` does, with a sort of the whole row for top-p, which is rare."""
    tokens = np.empty(len(logits), np.int64)
    # Rows with NaN logits get an arbitrary token; other rows are not affected.
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for row, line in enumerate(logits):
            scaled = line / parameters.temperature[row]
            threshold = _threshold(
                scaled, parameters.top_k[row], parameters.top_p[row], parameters.min_p[row]
            )
            tokens[row] = _invert(_masses(scaled, threshold), float(parameters.uniform[row]))
    return tokens


def argmax(logits: Logits) -> npt.NDArray[np.int64]:
    """Return the most likely token [R] of logits [R, V], the smallest id among equals."""
    found: npt.NDArray[np.int64] = logits.argmax(-1)
    return found


def _logsumexp(line: Logits) -> float:
    peak = line.max()
    if not np.isfinite(peak):
        return float(peak)
    room, total = np.empty(min(BLOCK, len(line)), np.float32), 0.0
    for low in range(0, len(line), BLOCK):
        part = line[low : low + BLOCK]
        masses = np.subtract(part, peak, out=room[: len(part)])
        total += float(np.exp(masses, out=masses).sum())
    return float(peak) + math.log(total)


def _most_likely(line: Logits, top: int) -> npt.NDArray[np.int64]:
    """Return the ids of the `top` largest, ordered as in `LogprobColumns`."""
    if top == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(line >= _bound(line, top))
    if len(candidates) < top:  # Some logits are NaN.
        candidates = np.arange(len(line))
    order = np.argsort(-line[candidates], kind="stable")
    return candidates[order[:top]]


def _bound(line: Logits, top: int) -> float:
    """Return a bound that at least `top` logits reach and few others do: the `top`-th group's
    peak."""
    groups = len(line) // GROUP
    if groups < 2 * top:
        return -math.inf
    peaks = line[: groups * GROUP].reshape(groups, GROUP).max(1)
    return float(np.partition(peaks, groups - top)[groups - top])


def _threshold(scaled: Logits, top_k: np.int64, top_p: np.float32, min_p: np.float32) -> np.float32:
    """Return the least scaled logit that min-p, top-k and top-p keep, applied in this order."""
    threshold: np.float32 = scaled.max() + np.log(min_p)
    if 0 < top_k < len(scaled):
        place = len(scaled) - top_k
        threshold = max(threshold, np.partition(scaled, place)[place])
    if top_p >= 1:
        return threshold
    ordered = np.sort(scaled[scaled >= threshold])[::-1]
    if not len(ordered):
        return threshold
    cumulative = np.cumsum(_masses(ordered, threshold))
    # The nucleus ends at the token that brings the mass to its share of the kept mass.
    last = np.searchsorted(cumulative, np.float64(top_p) * cumulative[-1])
    found: np.float32 = ordered[min(int(last), len(ordered) - 1)]
    return found


def _masses(scaled: Logits, threshold: np.float32) -> npt.NDArray[np.float64]:
    """Return unnormalised probabilities in fp64; zero below the threshold."""
    masses = np.exp(scaled - scaled.max())
    masses[scaled < threshold] = 0
    result: npt.NDArray[np.float64] = masses.astype(np.float64)
    return result


def _invert(masses: npt.NDArray[np.float64], uniform: float) -> int:
    """Return the index at which the sum of the `masses` [V] passes `uniform` of the total."""
    cumulative = np.cumsum(masses)
    total = cumulative[-1]
    found = int(np.searchsorted(cumulative, uniform * total, side="right"))
    # The product may round up to the total: then take the last place with any mass.
    last = min(int(np.searchsorted(cumulative, total)), len(masses) - 1)
    return min(found, last)
