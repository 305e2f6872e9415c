"""Greedy conversion of frames to tokens, frame by frame: CTC (Graves et al. 2006), RNN-T (Graves
2012), and TDT, whose tokens have durations in frames (Xu et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .rules import log_softmax

Floats = npt.NDArray[np.float32]


class Emission(NamedTuple):
    """A token and its frame."""

    token: int
    frame: int
    frames: int
    """Number of frames that it lasts; 1 if unknown."""
    log_share: float


def ctc(logits: Floats, blank: int) -> list[Emission]:
    """Choose the likeliest token of each frame [frames, vocab]; merge repeats, drop blanks."""
    found: list[Emission] = []
    best = logits.argmax(axis=1)
    before = blank
    for frame, token in enumerate(best.tolist()):
        if token != before and token != blank:
            share = float(log_softmax(logits[frame])[token])
            found.append(Emission(token, frame, 1, share))
        elif token != blank:
            found[-1] = found[-1]._replace(frames=found[-1].frames + 1)
        before = token
    return found


class Predictor:
    """LSTM over the earlier tokens: the joint network's second input, next to a frame."""

    def __init__(
        self,
        embedding: Floats,
        cells: list[tuple[Floats, Floats, Floats]],
        out: Floats,
        bias: Floats,
    ) -> None:
        """Start at zero. `cells`: for each layer the weights of input and state [4 D, D] and their
        bias, gates in PyTorch's order: input, forget, cell, output."""
        self._embedding, self._cells, self._out, self._bias = embedding, cells, out, bias
        width = embedding.shape[1]
        self._state: list[tuple[Floats, Floats]] = [
            (np.zeros(width, np.float32), np.zeros(width, np.float32)) for _ in cells
        ]

    def say(self, token: int) -> Floats:
        """Return its output after one more token."""
        x: Floats = self._embedding[token]
        for i, (inner, recurrent, bias) in enumerate(self._cells):
            h, c = self._state[i]
            gates: Floats = np.asarray(inner @ x + recurrent @ h + bias, np.float32)
            into, keep, new, out = np.split(gates, 4)
            cell = np.asarray(_sigmoid(keep) * c + _sigmoid(into) * np.tanh(new), np.float32)
            x = np.asarray(_sigmoid(out) * np.tanh(cell), np.float32)
            self._state[i] = x, cell
        return np.asarray(self._out @ x + self._bias, np.float32)


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def transduce(
    frames: Floats,
    predictor: Predictor,
    joint: Callable[[Floats], Floats],
    *,
    blank: int,
    vocab: int,
    start: int,
    durations: tuple[int, ...],
    most_symbols: int,
    found: list[Emission],
) -> Iterator[None]:
    """Fill `found` from projected frames [n, D]; stop after every 64 steps.

    `joint`: logits [vocab + durations] of a frame's and the predictor's sum. A blank advances by
    its duration, at least one frame. Any other token advances by its duration, which is zero in an
    RNN-T. After `most_symbols` tokens of one frame the next frame follows, which bounds the steps.
    """
    said = predictor.say(start)
    frame = symbols = steps = 0
    while frame < len(frames):
        logits = joint(frames[frame] + said)
        token = int(logits[:vocab].argmax())
        lasts = durations[int(logits[vocab:].argmax())] if durations else int(token == blank)
        if token == blank:
            lasts = max(1, lasts)
        else:
            share = float(log_softmax(logits[:vocab])[token])
            found.append(Emission(token, frame, max(1, lasts), share))
            said = predictor.say(token)
        symbols = 0 if lasts else symbols + 1
        if symbols >= most_symbols:
            lasts, symbols = 1, 0
        frame += lasts
        steps += 1
        if not steps % 64:
            yield
