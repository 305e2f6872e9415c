"""Factors on input channels: where they may be, what they gain, that no function changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_command import command, model, text  # noqa: F401 - fixtures
from test_statistic import opened

from headrace.factory.to_compressed import TARGETS, CompressedTensor
from headrace.loader.open import open_model
from headrace.loader.safetensors_file import read_header
from headrace.models.registry import describe
from headrace.quantise.folding import Factors, activation_error, divided, factors_of, folds
from headrace.quantise.statistic import Statistic

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
LOUD = slice(3, 64, 31)
"""Channels of the hidden state that are fifty times as large."""


def noisy(width: int = 64, loud: int = 40) -> Statistic:
    """Make the statistic of an input with one channel of outliers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, width)).astype(np.float32)
    x[:, 5] *= loud
    found = Statistic.empty(width)
    found.add(x)
    return found


def tensor(tmp_path: Path, to: str, w: torch.Tensor) -> CompressedTensor:
    save_file({"w": w.contiguous()}, tmp_path / "w.safetensors")
    return CompressedTensor("w", read_header(tmp_path / "w.safetensors")["w"], TARGETS[to], ("w",))


@pytest.mark.parametrize(
    ("family", "norms", "gated"),
    [("Llama", 4, 2), ("Gemma2", 0, 2), ("Mixtral", 2, 0)],
)
def test_places_come_from_the_graph(family: str, norms: int, gated: int, tmp_path: Path) -> None:
    _, files = opened(family, tmp_path)
    found = [*folds(describe(files.arch))]
    assert sum(bool(one.vectors) for one in found) == norms
    assert sum(one.rows is not None for one in found) == gated
    names = [name for one in found for name in one.readers]
    assert len(names) == len({*names})


def test_rounding_of_activations_against_float64() -> None:
    statistic = noisy()
    w = np.random.default_rng(1).standard_normal((9, 64)).astype(np.float32)
    x = statistic.some.astype(np.float64)
    step = np.abs(x).max(1, keepdims=True) / 127
    off = (np.rint(x / step) * step - x) @ w.astype(np.float64).T
    outputs = x @ w.astype(np.float64).T
    shares = (off**2).sum(1) / (outputs**2).sum(1)
    power = np.einsum("oi,ij,oj->", w, statistic.gram.astype(np.float64), w)
    assert activation_error(w, statistic) == pytest.approx(shares.mean() * power, rel=1e-3)
    # A huge token says no more than any other.
    statistic.some[0] *= 1000
    assert activation_error(w, statistic) == pytest.approx(shares.mean() * power, rel=1e-3)


def test_the_divided_statistic_is_that_of_divided_inputs() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((50, 16)).astype(np.float32)
    factors = np.ldexp(np.float32(1), rng.integers(-3, 4, 16)).astype(np.float32)
    one, other = Statistic.empty(16), Statistic.empty(16)
    one.add(x)
    other.add(x / factors)
    found = divided(one, factors)
    np.testing.assert_allclose(found.gram, other.gram, rtol=1e-4, atol=1e-5)
    assert np.array_equal(found.top, other.top)
    assert np.array_equal(found.some, other.some)
    w = rng.standard_normal((3, 16)).astype(np.float32)
    moved = Factors(factors, np.array([1, 2, 4], np.float32)).of(w)
    np.testing.assert_allclose((x / factors) @ moved.T * [1, 2, 4], x @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("to", ["w8a8", "w4a16-g32"])
def test_factors_gain_where_a_channel_is_loud(to: str, tmp_path: Path) -> None:
    w = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    one, statistic = tensor(tmp_path, to, w), noisy()
    none = np.ones(64, np.float32)
    factors = factors_of(statistic, [one])
    assert (np.log2(factors) % 1 == 0).all()
    assert factors[5] == factors.max() > np.median(factors)
    gain = one.trial(factors, statistic) / one.trial(none, statistic)
    assert gain < (0.3 if to == "w8a8" else 0.9)
    # The error of all rows, in float64, by the definition of both.
    rounded = Factors(factors).of(w.numpy())
    grid = TARGETS[to].fitted(rounded, divided(statistic, factors).gram, "F32", 9.0).grid
    off = (grid.values(grid.round(rounded)) / factors - w.numpy()).astype(np.float64)
    exact = np.einsum("oi,ij,oj->", off, statistic.gram.astype(np.float64), off)
    said = one.trial(factors, statistic)
    if to == "w8a8":
        said -= activation_error(rounded, divided(statistic, factors))
    assert said == pytest.approx(exact, rel=1e-3)


def test_no_factors_where_all_channels_are_alike(tmp_path: Path) -> None:
    w = torch.randn(40, 64, generator=torch.Generator().manual_seed(3)).sign()
    statistic = Statistic(100, 100 * np.eye(64, dtype=np.float32), *np.ones((2, 64), "f4"))
    statistic.some = np.ones((2, 64), np.float32)
    assert (factors_of(statistic, [tensor(tmp_path, "w8a8", w)]) == 1).all()


@pytest.fixture(scope="module")
def loud(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The talking model with outliers after its norms: the same function."""
    out = tmp_path_factory.mktemp("loud") / "model"
    out.mkdir()
    for path in model.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    for name, one in tensors.items():
        if name.endswith("layernorm.weight"):
            one[LOUD] *= 64
        elif name.split(".")[-2] in READERS:
            one[:, LOUD] /= 64
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.slow
@pytest.mark.parametrize("to", ["w8a8", "w4a16-g32"])
def test_a_folder_with_outliers(to: str, loud: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / to
    done = command(loud, "--to", to, "--text", text, "--out", out, "--least-share", 0)
    assert done.exit_code == 0, done.output
    exact, found = (load_file(one / "model.safetensors") for one in (loud, out))
    moved = 0
    for name, one in exact.items():
        if not name.endswith("layernorm.weight"):
            continue
        factors = (one.float() / found[name].float()).numpy()
        assert (np.log2(factors) % 1 == 0).all()
        moved += int((factors != 1).any())
    assert moved
    reads: Any = open_model(str(out))
    assert reads.arch == open_model(str(loud)).arch
