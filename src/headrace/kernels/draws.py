"""Parameters and random numbers shared by all functions from logits to tokens.

They apply to arrays in host memory (numpy) and on a device (torch), so this module needs no torch.
`kernels.sampling` defines the filters and their order; `kernels.host_sampling` computes them for
arrays of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import Array, tensor

RULE = np.dtype(
    [
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("stream", np.uint64),
    ]
)
"""Rule by which a program chooses a row's tokens, step after step. Temperature 0: the most likely.
`stream`: the value of `streams`; others as in `DrawParameters`."""


@dataclass(slots=True)
class DrawParameters:
    """Columns of the drawing rows: [R] each, on the device of the logits; temperature is above
    zero.

    A greedy row (the smallest id among equals) has temperature 1, min_p 1 and uniform number 0.
    """

    temperature: Any
    """fp32."""
    top_k: Any
    """int64; 0: all. On a device None if no row uses it; likewise `top_p`."""
    top_p: Any
    min_p: Any
    """fp32."""
    uniform: Any
    """fp64 in [0, 1)."""

    @property
    def filtered(self) -> bool:
        """Whether any row uses top-k or top-p, which need additional kernels."""
        return self.top_k is not None or self.top_p is not None


@dataclass(frozen=True, slots=True)
class Drawing:
    """Functions from logits to tokens, numpy to numpy or tensors to tensors, by the reference or a
    backend."""

    draw: Callable[[Any, DrawParameters], Any]
    """logits [R, V] fp32 → tokens [R] int64, one draw per row."""
    argmax: Callable[[Any], Any]
    """logits [R, V] → the most likely token [R] int64; the smallest id among equals."""


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities of the raw distribution, columns of R rows.

    The most likely tokens come by value descending, the smallest id first among equals.
    """

    logprobs: list[float]
    ranks: list[int]
    """1 + the number of more likely tokens."""
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def uniforms(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per row, a function of its three values (SplitMix64, Steele
    2014)."""
    return numbers(streams(seeds, choices), positions)


def numbers(
    streams: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return `uniforms` of rows whose `streams` are known."""
    with np.errstate(over="ignore"):
        state = _mix(streams ^ (positions.astype(np.uint64) + np.uint64(0x8CB92BA72F3D8DD7)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def streams(
    seeds: npt.NDArray[np.uint64], choices: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Return the part of `uniforms` that is constant while a sequence grows."""
    with np.errstate(over="ignore"):
        state = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
        return _mix(state ^ (choices.astype(np.uint64) + np.uint64(0xD1B54A32D192ED03)))


def by_rules(
    drawing: Drawing, logits: Array, rules: npt.NDArray[np.void], places: npt.NDArray[np.int64]
) -> Array:
    """Choose tokens [R] int64 from logits [R, V] in the host's memory, by rules [R] of `RULE`.
    `places` [R]: positions of the tokens in their sequences."""
    drawn = np.flatnonzero(rules["temperature"] > 0)
    if not len(drawn):
        return drawing.argmax(logits)
    kind = _same if isinstance(logits, np.ndarray) else tensor
    some = rules[drawn]
    parameters = DrawParameters(
        temperature=kind(some["temperature"].copy()),
        top_k=kind(some["top_k"].astype(np.int64)),
        top_p=kind(some["top_p"].copy()),
        min_p=kind(some["min_p"].copy()),
        uniform=kind(numbers(some["stream"], places[drawn])),
    )
    if len(drawn) == len(rules):
        return drawing.draw(logits, parameters)
    tokens, index = drawing.argmax(logits), kind(drawn)
    tokens[index] = drawing.draw(logits[index], parameters)
    return tokens


def _same(array: Array) -> Array:
    return array


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
