"""Parakeet: log-mel features, FastConformer layer by layer, then CTC or a transducer.

One window is a stretch of speech of at most 30 s, whose frames all attend to each other. Products
run in the CPU library, the rest in numpy, one layer at a time; after each layer others have their
turn. A window does not depend on others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from .features import through_filters
from .parakeet_files import ParakeetFiles
from .product import Precision, Product, layer_norm, silu, softmax
from .transducers import Emission, Predictor, ctc, transduce

Floats = npt.NDArray[np.float32]
WINDOWS = 10
_EPS = 1e-5
_FFT, _WINDOW, _HOP = 512, 400, 160


def features(samples: Floats, mels: int) -> Floats:
    """Compute [samples // 160, mels] like `transformers`' ParakeetFeatureExtractor: preemphasis
    0.97, Hann over 400 samples in a transform of 512, log of Slaney's mels, each mel with mean 0
    and deviation 1 over the sound."""
    count = max(2, len(samples) // _HOP)
    emphasised = np.asarray(samples, np.float32).copy()
    emphasised[1:] -= np.float32(0.97) * np.asarray(samples[:-1], np.float32)
    padded = np.zeros(count * _HOP + 2 * _FFT, np.float64)
    padded[_FFT // 2 : _FFT // 2 + len(samples)] = emphasised[: len(padded) - _FFT // 2]
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP][:count]
    hann = np.zeros(_FFT)
    hann[(_FFT - _WINDOW) // 2 : (_FFT + _WINDOW) // 2] = np.hanning(_WINDOW)
    power = np.abs(np.fft.rfft(frames * hann, axis=1)) ** 2
    log = np.log(through_filters(power, mels, _FFT) + 2.0**-24)
    deviation = log.std(axis=0, ddof=1)
    return np.asarray((log - log.mean(axis=0)) / (deviation + 1e-5), np.float32)


class _LayerNorm:
    """Layer norm."""

    def __init__(self, files: ParakeetFiles, name: str) -> None:
        self._gain = files.tensor(f"{name}.weight", files.width)
        self._shift = files.tensor(f"{name}.bias", files.width)

    def __call__(self, x: Floats) -> Floats:
        return layer_norm(x, self._gain, self._shift)


class _Conformer:
    """One layer of the encoder (Gulati et al. 2020, figure 1)."""

    def __init__(self, net: ParakeetNetwork, name: str) -> None:
        files, width = net.files, net.files.width
        self._heads = files.heads
        self._norms = [
            _LayerNorm(files, f"{name}.norm_{which}")
            for which in ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
        ]
        self._feeds = [
            (
                net.linear(f"{name}.feed_forward{i}.linear1", files.inner, width),
                net.linear(f"{name}.feed_forward{i}.linear2", width, files.inner),
            )
            for i in (1, 2)
        ]
        own = f"{name}.self_attn"
        self._q, self._k, self._v, self._o, self._r = (
            net.linear(f"{own}.{which}_proj", width, width)
            for which in ("q", "k", "v", "o", "relative_k")
        )
        size = width // files.heads
        self._content = files.tensor(f"{own}.bias_u", files.heads, size).reshape(width)
        self._place = files.tensor(f"{own}.bias_v", files.heads, size).reshape(width)
        self._doubled = net.linear(f"{name}.conv.pointwise_conv1", 2 * width, width, 1)
        self._last = net.linear(f"{name}.conv.pointwise_conv2", width, width, 1)
        # The batch norm after the convolution is folded into its weights.
        norm = f"{name}.conv.norm"
        spread = np.sqrt(files.tensor(f"{norm}.running_var", width) + np.float32(_EPS))
        gain = files.tensor(f"{norm}.weight", width) / spread
        kernel = files.tensor(f"{name}.conv.depthwise_conv.weight", width, 1, files.kernel)
        self._taps = np.ascontiguousarray((kernel[:, 0] * gain[:, None]).T)
        bias = files.optional(f"{name}.conv.depthwise_conv.bias", width)
        shift = files.tensor(f"{norm}.bias", width)
        mean = files.tensor(f"{norm}.running_mean", width)
        self._bias: Floats = shift + ((0 if bias is None else bias) - mean) * gain

    def __call__(self, x: Floats, places: Floats) -> Floats:
        half = np.float32(0.5)
        x = x + half * self._feed(0, self._norms[0](x))
        x = x + self._attention(self._norms[1](x), places)
        x = x + self._convolution(self._norms[2](x))
        x = x + half * self._feed(1, self._norms[3](x))
        return self._norms[4](x)

    def _feed(self, which: int, x: Floats) -> Floats:
        up, down = self._feeds[which]
        return down(silu(up(x)))

    def _convolution(self, x: Floats) -> Floats:
        both, width = self._doubled(x), x.shape[1]
        y: Floats = both[:, :width] / (1 + np.exp(-both[:, width:]))
        reach = len(self._taps) // 2
        padded = np.pad(y, ((reach, reach), (0, 0)))
        total: Floats = np.broadcast_to(self._bias, x.shape).copy()
        for i, tap in enumerate(self._taps):
            total += padded[i : i + len(x)] * tap
        return self._last(silu(total))

    def _attention(self, x: Floats, places: Floats) -> Floats:
        """Attend from each frame to all, by content and distance (Dai et al. 2019, appendix B)."""
        n, heads = len(x), self._heads
        q, k, v, r = self._q(x), self._k(x), self._v(x), self._r(places)
        size = x.shape[1] // heads
        scale = np.float32(size**-0.5)
        out = np.empty_like(x)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            near = np.asarray((q[:, part] + self._place[part]) @ r[:, part].T, np.float32)
            # Row i begins at the place that is i frames after it.
            apart = np.lib.stride_tricks.as_strided(
                near[:, n - 1 :], (n, n), (near.strides[0] - near.strides[1], near.strides[1])
            )
            scores = np.asarray((q[:, part] + self._content[part]) @ k[:, part].T, np.float32)
            scores += apart
            scores *= scale
            out[:, part] = softmax(scores) @ v[:, part]
        return self._o(out)


class _Subsampling:
    """Convolutions over time and mels; each halves both."""

    def __init__(self, net: ParakeetNetwork) -> None:
        files, channels = net.files, net.files.channels
        name = "encoder.subsampling"
        self._first = np.ascontiguousarray(
            files.tensor(f"{name}.layers.0.weight", channels, 1, 3, 3).reshape(channels, 9).T
        )
        self._shift = files.tensor(f"{name}.layers.0.bias", channels)
        self._along, self._across = [], []
        for i in range(files.halvings - 1):
            at = f"{name}.layers.{2 + 3 * i}"
            kernel = files.tensor(f"{at}.weight", channels, 1, 3, 3)[:, 0]
            bias = files.tensor(f"{at}.bias", channels)
            self._along.append((np.ascontiguousarray(kernel.transpose(1, 2, 0)), bias))
            at = f"{name}.layers.{3 + 3 * i}"
            self._across.append(net.linear(at, channels, channels, 1, 1))
        mels = files.mels >> files.halvings
        # The file has channel before mel, but the rows here mel before channel.
        weight = files.tensor(f"{name}.linear.weight", files.width, channels * mels)
        weight = weight.reshape(files.width, channels, mels).transpose(0, 2, 1)
        bias = files.tensor(f"{name}.linear.bias", files.width)
        self._linear = net.product(weight.reshape(files.width, -1), bias)

    def __call__(self, mel: Floats) -> Floats:
        x = mel[:, :, None]
        taps = np.stack([part[..., 0] for part, _, _ in _nine(x)], axis=-1)
        x = np.maximum(taps @ self._first + self._shift, 0)
        for (kernel, bias), across in zip(self._along, self._across, strict=True):
            times, mels, channels = x.shape
            y = np.zeros(((times + 1) // 2, (mels + 1) // 2, channels), np.float32)
            for part, i, j in _nine(x):
                y += part * kernel[i, j]
            y += bias
            x = across(y.reshape(-1, channels)).reshape(y.shape)
            np.maximum(x, 0, out=x)
        return self._linear(x.reshape(len(x), -1))


def _nine(x: Floats) -> Iterator[tuple[Floats, int, int]]:
    """Yield the inputs at each of the nine kernel positions of a convolution with stride 2, with
    zeros beyond the edges."""
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    times, mels = (x.shape[0] + 1) // 2, (x.shape[1] + 1) // 2
    for i in range(3):
        for j in range(3):
            yield padded[i : i + 2 * times - 1 : 2, j : j + 2 * mels - 1 : 2], i, j


class ParakeetNetwork:
    """One model, which transcribes `windows` windows at the same time, layer by layer."""

    def __init__(self, files: ParakeetFiles, team: Team, precision: Precision = "int8") -> None:
        """Load the weights. Raises `ModelFileError` if a tensor is missing or has another shape."""
        self.files, self._team, self._packer = files, team, Packer(team)
        self._coded = precision == "int8"
        self.windows = WINDOWS
        self.heard: list[list[Emission]] = [[] for _ in range(WINDOWS)]
        """Transcribed tokens by window."""
        self._subsampling = _Subsampling(self)
        self._blocks = [_Conformer(self, f"encoder.layers.{i}") for i in range(files.layers)]
        width, inner = files.width, files.predictor
        if not inner:
            kernel = files.tensor("ctc_head.weight", files.vocab, width, 1)[:, :, 0]
            self._head = self.product(kernel, files.tensor("ctc_head.bias", files.vocab))
            return
        self._project = self.linear("encoder_projector", inner, width)
        self._embedding = files.tensor("decoder.embedding.weight", files.vocab, inner)
        self._cells = []
        for i in range(files.predictor_layers):
            into, recurrent = (
                files.tensor(f"decoder.lstm.weight_{which}_l{i}", 4 * inner, inner)
                for which in ("ih", "hh")
            )
            bias = sum(
                files.tensor(f"decoder.lstm.bias_{which}_l{i}", 4 * inner) for which in ("ih", "hh")
            )
            self._cells.append((into, recurrent, np.asarray(bias, np.float32)))
        self._out = files.tensor("decoder.decoder_projector.weight", inner, inner)
        self._out_bias = files.tensor("decoder.decoder_projector.bias", inner)
        outputs = files.vocab + len(files.durations)
        self._joint = files.tensor("joint.head.weight", outputs, inner)
        self._joint_bias = files.tensor("joint.head.bias", outputs)

    def product(self, weight: Floats, bias: Floats | None) -> Product:
        """Prepare a matrix [out, width]."""
        return Product(self._team, self._packer, weight, bias, coded=self._coded)

    def linear(self, name: str, out: int, width: int, *ones: int) -> Product:
        """Prepare the matrix of that name, with its bias if it has one; `ones`: the kernel
        dimensions of a pointwise convolution."""
        weight = self.files.tensor(f"{name}.weight", out, width, *ones).reshape(out, width)
        return self.product(weight, self.files.optional(f"{name}.bias", out))

    def hear(self, samples: Floats, window: int) -> Iterator[None]:
        """Transcribe samples into a window's slot; pause after each layer."""
        files = self.files
        x = self._subsampling(features(samples, files.mels))
        if files.scaled:
            x = x * np.float32(files.width**0.5)
        places = _places(len(x), files.width)
        for block in self._blocks:
            x = block(x, places)
            yield
        if not files.predictor:
            self.heard[window] = ctc(self._head(x), files.blank)
            return
        found: list[Emission] = []
        predictor = Predictor(self._embedding, self._cells, self._out, self._out_bias)
        yield from transduce(
            self._project(x),
            predictor,
            self._logits,
            blank=files.blank,
            vocab=files.vocab,
            start=files.start,
            durations=files.durations,
            most_symbols=files.most_symbols,
            found=found,
        )
        self.heard[window] = found

    def _logits(self, joined: Floats) -> Floats:
        found: Floats = self._joint @ np.maximum(joined, 0) + self._joint_bias
        return found


def _places(count: int, width: int) -> Floats:
    """Return [2 count - 1, width]: interleaved sines and cosines of the distance of two frames,
    from count - 1 down."""
    apart = np.arange(count - 1, -count, -1, dtype=np.float32)[:, None]
    rate = (1 / 10_000 ** (np.arange(0, width, 2, dtype=np.float32) / width)).astype(np.float32)
    angles = apart * rate
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(2 * count - 1, width)
