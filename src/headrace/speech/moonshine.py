"""Moonshine: convolutions over a sound's samples, an encoder that attends to all of a stretch, and
a decoder that writes token after token, greedily (Jeffries et al. 2024).

The cost is proportional to the stretch: no window of 30 s is padded with silence. Products run in
the CPU library, the rest in numpy. It pauses after each layer of the encoder and each token, where
another sound may have its turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from ..loader.whisper_files import HEAD, TABLE
from .features import RATE
from .moonshine_files import MoonshineFiles
from .product import Precision, Product, layer_norm, silu, softmax
from .rules import log_softmax
from .transducers import Emission

Floats = npt.NDArray[np.float32]
WINDOWS = 10
TOKENS_A_SECOND = 6.5
"""The authors' limit of tokens per second: a longer text is a loop."""
_LEAST_TOKENS = 8
_LEAST_SAMPLES = 1_120
"""Fewest samples from which the convolutions make a row."""


class _Attention:
    """Attention over rows; rotary positions turn adjacent pairs of numbers."""

    def __init__(self, net: MoonshineNetwork, name: str, heads: int) -> None:
        width = net.files.width
        self._q, self._k, self._v, self._o = (
            net.linear(f"{name}.{which}_proj", width, width) for which in ("q", "k", "v", "o")
        )
        self._heads, self._size = heads, width // heads

    def split(self, x: Floats) -> Floats:
        """Reshape [n, width] to [heads, n, size]."""
        return x.reshape(len(x), self._heads, self._size).transpose(1, 0, 2)

    def keys(self, x: Floats, turn: Floats | None) -> tuple[Floats, Floats]:
        """Compute K and V of rows."""
        return _turned(self.split(self._k(x)), turn), self.split(self._v(x))

    def __call__(self, x: Floats, k: Floats, v: Floats, turn: Floats | None) -> Floats:
        q = _turned(self.split(self._q(x)), turn)
        scores = q @ k.transpose(0, 2, 1)
        scores *= np.float32(self._size**-0.5)
        seen = softmax(scores) @ v
        return self._o(np.ascontiguousarray(seen.transpose(1, 0, 2)).reshape(len(x), -1))


def _turned(x: Floats, turn: Floats | None) -> Floats:
    """Rotate [heads, n, size] by the angles' cosines and sines [2, n, pairs]; None: unchanged."""
    if turn is None:
        return x
    cos, sin = turn
    end = 2 * cos.shape[1]
    even, odd = x[..., 0:end:2], x[..., 1:end:2]
    y = x.copy()
    y[..., 0:end:2] = even * cos - odd * sin
    y[..., 1:end:2] = odd * cos + even * sin
    return y


class _EncoderLayer:
    def __init__(self, net: MoonshineNetwork, name: str) -> None:
        files, width = net.files, net.files.width
        self._gains = [
            files.tensor(f"{name}.{norm}.weight", width)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        self._attention = _Attention(net, f"{name}.self_attn", files.heads[0])
        self._up = net.linear(f"{name}.mlp.fc1", files.inner, width, bias=True, activation="gelu")
        self._down = net.linear(f"{name}.mlp.fc2", width, files.inner, bias=True)

    def __call__(self, x: Floats, turn: Floats) -> Floats:
        h = layer_norm(x, self._gains[0])
        x = x + self._attention(h, *self._attention.keys(h, turn), turn)
        return x + self._down(self._up(layer_norm(x, self._gains[1])))


class _DecoderLayer:
    def __init__(self, net: MoonshineNetwork, name: str) -> None:
        files, width = net.files, net.files.width
        self._gains = [
            files.tensor(f"{name}.{norm}.weight", width)
            for norm in ("input_layernorm", "post_attention_layernorm", "final_layernorm")
        ]
        self.own = _Attention(net, f"{name}.self_attn", files.heads[1])
        self.cross = _Attention(net, f"{name}.encoder_attn", files.heads[1])
        self._up = net.linear(f"{name}.mlp.fc1", 2 * files.inner, width, bias=True)
        self._down = net.linear(f"{name}.mlp.fc2", width, files.inner, bias=True)
        self._inner = files.inner

    def __call__(
        self, x: Floats, past: list[Floats], heard: tuple[Floats, Floats], turn: Floats
    ) -> Floats:
        """Process one more token's row [1, width]; its K and V are appended to `past`."""
        h = layer_norm(x, self._gains[0])
        fresh = self.own.keys(h, turn)
        past[:] = [np.concatenate([old, new], axis=1) for old, new in zip(past, fresh, strict=True)]
        x = x + self.own(h, past[0], past[1], turn)
        x = x + self.cross(layer_norm(x, self._gains[1]), *heard, None)
        both = self._up(layer_norm(x, self._gains[2]))
        return x + self._down(silu(both[:, self._inner :]) * both[:, : self._inner])


class MoonshineNetwork:
    """One model, which transcribes `windows` stretches at the same time."""

    def __init__(self, files: MoonshineFiles, team: Team, precision: Precision = "int8") -> None:
        """Load the weights. Raises `ModelFileError` if a tensor is missing or has another shape."""
        self.files, self._team, self._packer = files, team, Packer(team)
        self._coded = precision == "int8"
        self.windows = WINDOWS
        self.heard: list[list[Emission]] = [[] for _ in range(WINDOWS)]
        """Transcribed tokens by window; their frames are meaningless."""
        width = files.width
        first = files.tensor("model.encoder.conv1.weight", width, 1, 127)[:, 0]
        self._first = Product(team, self._packer, np.pad(first, ((0, 0), (0, 1))), None, 64)
        self._group = [
            files.tensor(f"model.encoder.groupnorm.{name}", width) for name in ("weight", "bias")
        ]
        self._second = self._convolution("conv2", 2 * width, width, 7, 3)
        self._third = self._convolution("conv3", width, 2 * width, 3, 2)
        encoder, decoder = files.layers
        self._encoder = [_EncoderLayer(self, f"model.encoder.layers.{i}") for i in range(encoder)]
        self._end = files.tensor("model.encoder.layer_norm.weight", width)
        self._decoder = [_DecoderLayer(self, f"model.decoder.layers.{i}") for i in range(decoder)]
        self._last = files.tensor("model.decoder.norm.weight", width)
        self._embedding = files.tensor(TABLE, files.vocab, width)
        head = self._embedding
        if not files.tied:
            head = files.tensor(HEAD, files.vocab, width)
        self._head = Product(team, self._packer, head, None, coded=self._coded)

    def linear(
        self, name: str, out: int, width: int, *, bias: bool = False, activation: str | None = None
    ) -> Product:
        """Prepare the matrix of that name."""
        weight = self.files.tensor(f"{name}.weight", out, width)
        shift = self.files.tensor(f"{name}.bias", out) if bias else None
        return Product(
            self._team, self._packer, weight, shift, coded=self._coded, activation=activation
        )

    def _convolution(self, name: str, out: int, width: int, size: int, step: int) -> Product:
        kernel = self.files.tensor(f"model.encoder.{name}.weight", out, width, size)
        flat = kernel.transpose(0, 2, 1).reshape(out, -1)
        bias = self.files.tensor(f"model.encoder.{name}.bias", out)
        return Product(self._team, self._packer, flat, bias, step * width, activation="gelu")

    def _turn(self, count: int, first: int, heads: int) -> Floats:
        """Return cosines and sines [2, count, pairs] of positions from `first` on."""
        files = self.files
        turned = int(files.width // heads * files.rotated)
        rate = 1 / files.theta ** (np.arange(0, turned, 2, dtype=np.float32) / turned)
        angles = np.arange(first, first + count, dtype=np.float32)[:, None] * rate
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def encode(self, samples: Floats) -> Iterator[Floats]:
        """Yield the rows after each layer; the last ones are the decoder's input."""
        count = max(_LEAST_SAMPLES, len(samples))
        padded = np.zeros(count + 1, np.float32)
        padded[: len(samples)] = samples
        x = np.tanh(self._first(padded, (count - 127) // 64 + 1))
        x = (x - x.mean()) / np.sqrt(x.var() + np.float32(1e-5)) * self._group[0] + self._group[1]
        x = self._second(x, (len(x) - 7) // 3 + 1)
        x = self._third(x, (len(x) - 3) // 2 + 1)
        turn = self._turn(len(x), 0, self.files.heads[0])
        for layer in self._encoder:
            x = layer(x, turn)
            yield x
        yield layer_norm(x, self._end)

    def hear(self, samples: Floats, window: int) -> Iterator[None]:
        """Transcribe samples into a window's slot; pause after each layer and each token."""
        files, found = self.files, list[Emission]()
        encoded = np.empty((0, 0), np.float32)
        for rows in self.encode(samples):
            encoded = rows
            yield
        heard = [layer.cross.keys(encoded, None) for layer in self._decoder]
        size = files.width // files.heads[1]
        none = np.zeros((files.heads[1], 0, size), np.float32)
        past = [[none, none] for _ in self._decoder]
        token = files.start
        most = _LEAST_TOKENS + int(TOKENS_A_SECOND * len(samples) / RATE)
        for place in range(min(files.positions, most)):
            row = self._embedding[token][None]
            turn = self._turn(1, place, files.heads[1])
            for layer, own, cross in zip(self._decoder, past, heard, strict=True):
                row = layer(row, own, cross, turn)
            logits = self._head(layer_norm(row, self._last))[0]
            token = int(logits.argmax())
            if token in files.ends:
                break
            found.append(Emission(token, 0, 1, float(log_softmax(logits)[token])))
            yield
        self.heard[window] = found
