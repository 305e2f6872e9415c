"""SNAC's decoder: codes of several levels to samples, in a stream (Siuzdak et al. 2024).

Every layer keeps the rows that its kernel still needs. So a streamed sound has the same bits as a
whole one: nothing is computed twice, and nothing is cross-faded. Rows are moments, columns are
channels. Products go through the CPU library, where a row's result does not depend on other rows;
the rest is elementwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from .codec_files import DILATIONS, KERNEL, CodecFiles
from .product import Product

Floats = npt.NDArray[np.float32]
_NOISE_ROWS = 4_096
"""Numbers of noise drawn at once, from a separate seed."""


class _Layer(Protocol):
    def __call__(self, x: Floats, last: bool) -> Floats:
        """Return the output computable from these rows and the earlier ones; `last`: end of
        stream."""


def _snake(x: Floats, alpha: Floats, inverse: Floats) -> Floats:
    """Compute x + sin(alpha x)^2 / alpha, channel by channel (Ziyin et al. 2020)."""
    y = x * alpha
    np.sin(y, out=y)
    np.multiply(y, y, out=y)
    y *= inverse
    y += x
    return y


class _Snake:
    def __init__(self, files: CodecFiles, name: str, width: int) -> None:
        self._alpha = files.vector(f"{name}.alpha", 1, width, 1).reshape(width)
        self._inverse: Floats = np.reciprocal(self._alpha + np.float32(1e-9))

    def __call__(self, x: Floats) -> Floats:
        return _snake(x, self._alpha, self._inverse)


class _Depthwise:
    """A convolution channel by channel, over seven rows, with a dilation."""

    def __init__(self, files: CodecFiles, name: str, width: int, dilation: int) -> None:
        kernel = files.kernel(name, width, 1, KERNEL)
        self._taps = np.ascontiguousarray(kernel[:, 0].T)
        self._bias = files.vector(f"{name}.bias", width)
        self.dilation, self.width = dilation, width

    @property
    def reach(self) -> int:
        """Return the rows on each side."""
        return (KERNEL - 1) // 2 * self.dilation

    def __call__(self, x: Floats) -> Floats:
        rows = len(x) - 2 * self.reach
        y: Floats = x[:rows] * self._taps[0]
        part = np.empty_like(y)
        for i in range(1, KERNEL):
            np.multiply(x[i * self.dilation : i * self.dilation + rows], self._taps[i], out=part)
            y += part
        y += self._bias
        return y


class _Reaching:
    """Window of the rows of one stream that a layer still needs."""

    def __init__(self, width: int, before: int, after: int, kept: int) -> None:
        """Start empty. `before`: zero rows before the first; `after`: zero rows after the last;
        `kept`: rows that later output still needs."""
        self._rows: Floats = np.zeros((before, width), np.float32)
        self._after, self._kept = after, kept

    def __call__(self, x: Floats, last: bool) -> Floats:
        """Return all rows on which the output possible now depends."""
        parts = [self._rows, x]
        if last:
            parts.append(np.zeros((self._after, x.shape[1]), np.float32))
        rows = np.concatenate(parts)
        # A copy: a view would keep all rows of the piece.
        self._rows = rows[max(0, len(rows) - self._kept) :].copy()
        return rows


class _Unit:
    """A residual unit's weights: snake, depthwise convolution, snake, pointwise convolution."""

    def __init__(self, codec: Codec, name: str, width: int, dilation: int) -> None:
        files = codec.files
        self._first = _Snake(files, f"{name}.block.0", width)
        self._along = _Depthwise(files, f"{name}.block.1", width, dilation)
        self._second = _Snake(files, f"{name}.block.2", width)
        kernel = files.kernel(f"{name}.block.3", width, width, 1)[:, :, 0]
        self._across = codec.product(kernel, files.vector(f"{name}.block.3.bias", width))

    def stream(self) -> _Layer:
        reach, width = self._along.reach, self._along.width
        near = _Reaching(width, reach, reach, 2 * reach)
        waiting: Floats = np.zeros((0, width), np.float32)

        def run(x: Floats, last: bool) -> Floats:
            nonlocal waiting
            waiting = np.concatenate([waiting, x])
            rows = near(self._first(x), last)
            count = max(0, len(rows) - 2 * reach)
            if not count:
                return waiting[:0]
            y = self._across(self._second(self._along(rows)), count)
            y += waiting[:count]
            waiting = waiting[count:].copy()
            return y

        return run


class _Up:
    """A transposed convolution's weights; its kernel is twice as wide as its stride. One product of
    a row and the previous row gives `stride` rows of output."""

    def __init__(self, codec: Codec, name: str, width: int, out: int, rate: int) -> None:
        files = codec.files
        self._snake = _Snake(files, f"{name}.0", width)
        kernel = files.kernel(f"{name}.1", width, out, 2 * rate)
        taps = kernel.transpose(2, 1, 0)
        matrix = np.concatenate([taps[rate:], taps[:rate]], axis=2)
        bias = np.tile(files.vector(f"{name}.1.bias", out), rate)
        self._product = codec.product(matrix.reshape(rate * out, 2 * width), bias, width)
        self._width, self._out, self._rate = width, out, rate

    def stream(self) -> _Layer:
        near, rate = _Reaching(self._width, 1, 1, 1), self._rate
        cut = -(-rate // 2)

        def run(x: Floats, last: bool) -> Floats:
            nonlocal cut
            rows = near(self._snake(x), last)
            y = self._product(rows, len(rows) - 1).reshape(-1, self._out)
            if last:
                y = y[: len(y) - rate // 2]
            y, cut = y[cut:], max(0, cut - len(y))
            return y

        return run


class _Noise:
    """Noise scaled by the rows: the same at the same moment, for any batching of the rows."""

    def __init__(self, codec: Codec, name: str, width: int) -> None:
        kernel = codec.files.kernel(f"{name}.linear", width, width, 1)[:, :, 0]
        self._product = codec.product(kernel, None)

    def stream(self, seed: int, place: int) -> _Layer:
        at = 0

        def run(x: Floats, last: bool) -> Floats:
            nonlocal at
            y = self._product(x, len(x))
            y *= noise(seed, place, at, len(x))[:, None]
            y += x
            at += len(x)
            return y

        return run


def noise(seed: int, place: int, first: int, count: int) -> Floats:
    """Draw normal numbers [count] from moment `first` on, for the block at that place."""
    blocks = range(first // _NOISE_ROWS, -(-(first + count) // _NOISE_ROWS))
    drawn = [
        np.random.Generator(np.random.Philox(key=[seed, place << 40 | block])).standard_normal(
            _NOISE_ROWS, np.float32
        )
        for block in blocks
    ]
    skip = first % _NOISE_ROWS
    return np.concatenate([np.empty(0, np.float32), *drawn])[skip : skip + count]


class _Mouth:
    """End of the decoder: snake, a convolution to one channel, tanh."""

    def __init__(self, codec: Codec, place: int, width: int) -> None:
        name = f"decoder.model.{place}"
        self._snake = _Snake(codec.files, name, width)
        name = f"decoder.model.{place + 1}"
        kernel = codec.files.kernel(name, 1, width, KERNEL)
        bias = codec.files.vector(f"{name}.bias", 1)
        flat = np.ascontiguousarray(kernel[0].T).reshape(1, -1)
        self._product = codec.product(flat, bias, width)
        self._width = width

    def stream(self) -> _Layer:
        reach = (KERNEL - 1) // 2
        near = _Reaching(self._width, reach, reach, 2 * reach)

        def run(x: Floats, last: bool) -> Floats:
            rows = near(self._snake(x), last)
            count = max(0, len(rows) - 2 * reach)
            return np.tanh(self._product(rows, count)[:, 0])

        return run


class Codec:
    """One SNAC decoder, whose streams take turns: they share the buffers of its products."""

    def __init__(self, files: CodecFiles, team: Team) -> None:
        """Load the weights. Raises `ModelFileError` if a tensor is missing or has another shape."""
        self.files, self._team, self._packer = files, team, Packer(team)
        self._books = [
            files.vector(f"quantizer.quantizers.{i}.codebook.weight", files.codes, files.code_width)
            for i in range(len(files.strides))
        ]
        names = [f"quantizer.quantizers.{i}.out_proj" for i in range(len(files.strides))]
        self._outs = [
            np.ascontiguousarray(files.kernel(name, files.latent, files.code_width, 1)[:, :, 0].T)
            for name in names
        ]
        self._biases = [files.vector(f"{name}.bias", files.latent) for name in names]
        self._along = _Depthwise(files, "decoder.model.0", files.latent, 1)
        kernel = files.kernel("decoder.model.1", files.width, files.latent, 1)[:, :, 0]
        self._across = self.product(kernel, files.vector("decoder.model.1.bias", files.width))
        self._blocks: list[_Up | _Noise | _Unit] = []
        width = files.width
        for place, rate in enumerate(files.rates, 2):
            name, out = f"decoder.model.{place}.block", width // 2
            self._blocks.append(_Up(self, name, width, out, rate))
            if files.noise:
                self._blocks.append(_Noise(self, f"{name}.2", out))
            first = 2 + files.noise
            for i, dilation in enumerate(DILATIONS, first):
                self._blocks.append(_Unit(self, f"{name}.{i}", out, dilation))
            width = out
        self._end = _Mouth(self, 2 + len(files.rates), width)

    def product(self, weight: Floats, bias: Floats | None, step: int = 0) -> Product:
        """Prepare a matrix [out, width] of this decoder."""
        return Product(self._team, self._packer, weight, bias, step)

    def latents(self, codes: Sequence[npt.NDArray[np.int64]]) -> Floats:
        """Sum the embeddings of the codes of all levels, [frames, latent]."""
        total: Floats | None = None
        for level, ids in enumerate(codes):
            picked = self._books[level][ids]
            rows = np.broadcast_to(self._biases[level], (len(ids), self.files.latent)).copy()
            for i in range(self.files.code_width):
                rows += picked[:, i : i + 1] * self._outs[level][i]
            rows = np.repeat(rows, self.files.strides[level], axis=0)
            total = rows if total is None else total + rows
        assert total is not None
        return total

    def stream(self, seed: int = 0) -> SoundStream:
        """Begin a new sound; `seed`: of its noise, from 0 to 2^64 - 1."""
        return SoundStream(self, seed)

    def layers(self, seed: int) -> Iterator[_Layer]:
        """Yield the layers of one sound, in order, each with its own kept rows."""
        reach = self._along.reach
        near = _Reaching(self.files.latent, reach, reach, 2 * reach)

        def begin(x: Floats, last: bool) -> Floats:
            rows = near(x, last)
            count = max(0, len(rows) - 2 * reach)
            if not count:
                return np.zeros((0, self.files.width), np.float32)
            return self._across(self._along(rows), count)

        yield begin
        for place, block in enumerate(self._blocks):
            yield block.stream(seed, place) if isinstance(block, _Noise) else block.stream()
        yield self._end.stream()


class SoundStream:
    """One sound in progress: codes in, samples out."""

    def __init__(self, codec: Codec, seed: int) -> None:
        self._codec = codec
        self._layers = list(codec.layers(seed))

    def push(self, frames: npt.NDArray[np.int64], *, last: bool = False) -> Floats:
        """Return the samples that these frames determine; with `last`, all remaining samples.

        `frames` [n, codes of a frame]: codes in the order of `CodecFiles.levels`, each below
        `CodecFiles.codes`. A sample waits for the frames that its layers need: about a quarter of a
        second in SNAC at 24 kHz.
        """
        *_, made = self.slices(frames, last=last)
        assert made is not None
        return made

    def slices(
        self, frames: npt.NDArray[np.int64], *, last: bool = False
    ) -> Iterator[Floats | None]:
        """Do as `push`, but yield after each layer: None, and after the last one the samples."""
        files = self._codec.files
        levels = np.array(files.levels)
        assert not len(frames) or int(frames.max()) < files.codes
        codes = [frames[:, levels == level].reshape(-1) for level in range(len(files.strides))]
        x = self._codec.latents(codes)
        yield None
        for layer in self._layers[:-1]:
            x = layer(x, last)
            yield None
        yield self._layers[-1](x, last)
