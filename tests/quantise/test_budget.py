"""The loss of each product, predicted by one backward pass, and the mix of types under a budget."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_command import command, dense, model, text  # noqa: F401 - fixtures
from test_rounding import matrix
from test_statistic import FAMILIES, windows

from headrace.base.errors import DoesNotFit, OptionError
from headrace.factory.mix import KINDS, Budget, best_mix, with_unseen
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.quantise.blocks import FORMATS
from headrace.quantise.sensitivity import Read, gains, sensitivities
from headrace.quantise.solve import Grid, Solver, loss
from tiny.checkpoints import hf_model, save_folder


def weighed(folder: Path, some: Sequence[Any]) -> dict[str, list[Read]]:
    found: dict[str, list[Read]] = {}

    def visit(reads: Mapping[str, Sequence[Read]]) -> None:
        for name, each in reads.items():
            found.setdefault(name, []).extend(each)

    assert sensitivities(open_model(str(folder)), some, visit) == sum(map(len, some))
    return found


@pytest.mark.parametrize(
    "family", ["Llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("Gemma2", "Lfm2"))]
)
def test_a_change_of_a_product_costs_what_was_predicted(family: str, tmp_path: Path) -> None:
    oracle, some = audible(family, tmp_path / "model"), windows(*[64] * 8)
    reads, matrices = weighed(tmp_path / "model", some), dict(oracle.named_parameters())
    assert products(tmp_path / "model") <= {*reads}
    before, ratios = distributions(oracle, some), []
    for name in sorted(products(tmp_path / "model") & {*matrices})[::2]:
        w = matrices[name]
        off = 0.2 * w.detach().abs().mean() * torch.randn(w.shape)
        with torch.no_grad():
            w.add_(off)
            after = distributions(oracle, some)
            w.sub_(off)
        kl = float((before.exp() * (before - after)).sum())
        rows = off.numpy()
        predicted = sum(one.loss(rows.__getitem__, 10**6) for one in reads[name])
        ratios.append(predicted / kl)
    assert all(0.5 < one < 2 for one in ratios), ratios
    assert 0.8 < float(np.exp(np.mean(np.log(ratios)))) < 1.25, ratios


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_every_product_of_mixtures_and_latent_heads_is_weighed(family: str, tmp_path: Path) -> None:
    audible(family, tmp_path / "model")
    reads = weighed(tmp_path / "model", windows(*[64] * 2))
    names = products(tmp_path / "model")
    assert names
    assert names <= {*reads}
    for name in names:
        for one in reads[name]:
            width = 0 if one.x is None else one.x.shape[1]
            assert one.loss(lambda rows, width=width: np.ones((len(rows), width), "f4"), 8) > 0


def audible(family: str, folder: Path) -> Any:
    """Save a model whose products change what it says: those of a fresh one hardly do."""
    torch.manual_seed(0)
    oracle = hf_model(family, **FAMILIES[family])
    with torch.no_grad():
        for name, one in oracle.named_parameters():
            if one.ndim > 1 and "embed" not in name:
                one.mul_(4)
    save_folder(oracle, folder)
    return oracle


def products(folder: Path) -> set[str]:
    """Name the matrices of a model that multiply every token, but heads and tables."""
    refs = describe(open_model(str(folder)).arch).weights()
    return {name for ref in refs if ref.role == "linear" for name in ref.names}


def distributions(oracle: Any, some: Sequence[Any]) -> torch.Tensor:
    with torch.no_grad():
        logits = [oracle(torch.tensor(one)[None]).logits[0] for one in some]
    return torch.log_softmax(torch.cat(logits).double(), -1)


def test_what_gptq_gains_lies_between_what_two_halves_say() -> None:
    w, _ = matrix(64, 96)
    rng = np.random.default_rng(3)
    mix = rng.standard_normal((96, 96)) / 8
    x = (rng.standard_normal((800, 96)) @ mix).astype(np.float32)
    low, high = gains(x)
    solver = Solver(x.T @ x)
    grid = FORMATS["Q4_0"].fitted(w, solver.gram).grid
    errors = [
        loss(grid.values(codes) - w, solver.gram)
        for codes in (grid.round(w), solver.codes(w, grid))
    ]
    assert 0.8 * low < errors[1] / errors[0] < 1.2 * high < 1


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_settled_codes_and_scales_lose_no_more(kind: str) -> None:
    w, statistic = matrix(32, 256)
    grid = FORMATS[kind].fitted(w, statistic.gram).grid
    solver = Solver(statistic.gram)
    codes = solver.codes(w, grid)

    def lost(codes: Any, grid: Grid) -> float:
        return loss(grid.values(codes) - w, statistic.gram)

    fixed = solver.settled(w, codes, replace(grid, allowed=None))
    settled = solver.settled(w, codes, grid)
    assert (grid.nearest(settled[0]) == settled[0]).all()
    assert lost(*settled) <= lost(*fixed) < lost(codes, grid)
    assert (lost(*settled) < lost(*fixed)) is (grid.allowed is not None)


class Priced:
    """A matrix with a size in each type, as the chooser sees it."""

    def __init__(self, name: str, width: int, numbers: int) -> None:
        self.file_name, self.names, self.width = name, (name,), width
        self.numbers = self.dense_bytes = numbers

    def bytes_as(self, kind: str) -> int:
        bits = {"Q4_0": 4, "Q4_K": 4, "Q5_0": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}
        return self.numbers * bits[kind]


@pytest.fixture(scope="module")
def arch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("arch") / "model"
    save_folder(hf_model("Llama"), folder)
    return open_model(str(folder)).arch


@pytest.mark.parametrize("seed", range(5))
def test_the_mix_is_the_best_of_all_up_to_one_matrix(seed: int, arch: Any) -> None:
    rng = np.random.default_rng(seed)
    tensors = [Priced(f"t{number}", 32, int(rng.integers(1, 9))) for number in range(5)]
    kinds = [kind for kind in KINDS if "K" not in kind]
    losses = {
        one.file_name: {
            kind: (loss, loss) for kind, loss in zip(kinds, -np.sort(-rng.random(3)), strict=True)
        }
        for one in tensors
    }

    def cost(mix: Mapping[str, str]) -> float:
        return float(sum(one.bytes_as(mix[one.file_name]) for one in tensors))

    def lost(mix: Mapping[str, str]) -> float:
        return sum(losses[name][kind][0] for name, kind in mix.items())

    every = [
        dict(zip([one.file_name for one in tensors], choice, strict=True))
        for choice in itertools.product(kinds, repeat=5)
    ]
    step, least = max(one.numbers for one in tensors) * 4, min(map(cost, every))
    for budget in range(int(least), int(max(map(cost, every))) + 1, 8):
        found = best_mix(tensors, arch, losses, cost, budget, "bytes")
        assert cost(found) <= budget
        assert lost(found) <= min(
            lost(mix) for mix in every if cost(mix) <= max(budget - step, min(map(cost, every)))
        )
    with pytest.raises(DoesNotFit, match="smallest mix"):
        best_mix(tensors, arch, losses, cost, least - 1, "bytes")


def test_gate_and_up_have_one_type(arch: Any) -> None:
    names = [f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up", "down")]
    tensors = [Priced(name, 256, 4) for name in names]
    losses = {
        name: {kind: (loss, loss) for kind in KINDS for loss in [share / (1 + KINDS.index(kind))]}
        for name, share in zip(names, (9.0, 0.1, 1.0), strict=True)
    }

    def cost(mix: Mapping[str, str]) -> float:
        return float(sum(one.bytes_as(mix[one.file_name]) for one in tensors))

    for budget in range(48, 100, 4):
        found = best_mix(tensors, arch, losses, cost, budget, "bytes")
        assert found[names[0]] == found[names[1]]


def test_a_matrix_that_no_token_went_through_is_not_free_of_loss(arch: Any) -> None:
    tensors = [Priced(name, 32, 4) for name in ("seen", "unseen")]
    kinds = [kind for kind in KINDS if "K" not in kind]
    losses = {"seen": dict(zip(kinds, [(4.0, 4.0), (2.0, 2.0), (1.0, 1.0)], strict=True))}

    def cost(mix: Mapping[str, str]) -> float:
        return float(sum(one.bytes_as(mix[one.file_name]) for one in tensors))

    full = with_unseen(losses, tensors, kinds)
    assert full["unseen"] == losses["seen"] == full["seen"]
    half = with_unseen(losses, [tensors[0], Priced("unseen", 32, 2)], kinds)
    assert half["unseen"]["Q4_0"] == (2.0, 2.0)
    assert best_mix(tensors, arch, full, cost, 40, "bytes") == dict.fromkeys(
        ("seen", "unseen"), "Q5_0"
    )


@pytest.mark.parametrize("text_", ["", "fast", "-3ms", "nanms", "0ms", "1e400MB", "3 parsecs"])
def test_a_budget_that_is_none_is_refused(text_: str) -> None:
    with pytest.raises(OptionError, match="budget"):
        Budget.parse(text_)


def test_budgets_are_bytes_or_seconds() -> None:
    assert Budget.parse("400MB") == Budget(nbytes=400_000_000)
    assert Budget.parse("2.5 ms") == Budget(seconds=0.0025)


@pytest.mark.slow
def test_a_budget_is_kept_and_its_loss_predicted(dense: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    made = []
    for name in ("first", "second"):
        out = tmp_path / f"{name}.gguf"
        given = ("--budget", "0.6MB", "--text", text, "--out", out, "--least-share", 0)
        done = command(dense, *given)
        assert done.exit_code == 0, done.output
        assert out.stat().st_size <= 600_000
        made.append(out.read_bytes())
    assert made[0] == made[1]
    report = json.loads((tmp_path / "second.gguf.report.json").read_text())
    assert report["budget"] == "0.6MB"
    assert len({one["kind"] for one in report["tensors"]}) > 1
    low, mean, high = (report["predicted_kl"][one] for one in ("low", "mean", "high"))
    assert 0 < low <= mean <= high
    assert math.isfinite(report["comparison"]["kl"]["mean"])


@pytest.mark.slow
def test_budgets_that_cannot_be_are_refused(
    dense: Path,  # noqa: F811
    model: Path,  # noqa: F811
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    cases = {
        ("--budget", "1kB", "--text", text): "smallest mix of types",
        ("--budget", "1MB", "--text", "none"): "needs a text",
        ("--budget", "1MB", "--to", "q4_k"): "belong together",
        ("--to", "mix"): "belong together",
    }
    for words, told in cases.items():
        done = command(dense, *words, "--out", tmp_path / "out.gguf")
        assert done.exit_code != 0
        assert told in " ".join(done.output.split()), done.output
        assert not (tmp_path / "out.gguf").exists()
    done = command(model, "--budget", "1MB", "--text", text, "--out", tmp_path / "out")
    assert done.exit_code != 0
