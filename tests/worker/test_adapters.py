"""LoRA adapters: equal to merged weights, mixed in one batch, more of them than slots."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.base.arch import ModelArch
from headrace.base.errors import Forbidden, HeadraceError, ModelFileError, UnsupportedModel
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import DraftCosts
from headrace.kernels.lora import add_lora
from headrace.kernels.weights import LoraWeight
from headrace.loader.adapters import open_adapter, within
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle import lora
from oracle.driving import Driver
from oracle.reference import Oracle
from tiny import families
from tiny.kept import Kept

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"target_modules": "all-linear", "r": 8, "lora_alpha": 8},
    "rslora": {"use_rslora": True, "r": 2, "target_modules": ["k_proj", "gate_proj"]},
    "patterns": {
        "rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 2},
        "alpha_pattern": {"v_proj": 40},
    },
}
PROMPT = [(7 * i * i + 3 * i) % families.VOCAB for i in range(60)]
numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def model(kept: Kept) -> Path:
    return kept(families.make, "qwen2")


@pytest.fixture(scope="module")
def adapters(folder: Path, model: Path) -> dict[str, Path]:
    return {
        name: lora.make(model, folder / name, seed=place, **config)
        for place, (name, config) in enumerate(KINDS.items())
    }


def worker_of(model: Path, **options: Any) -> Worker:
    values = {"kernels": "ref", "threads": 1, "rows": 16, "max_context": 512, "adapters": 2}
    return Worker(open_model(str(model)), WorkerOptions(**{**values, **options}))


@pytest.fixture(scope="module")
def worker(model: Path, adapters: dict[str, Path]) -> Worker:
    made = worker_of(model)
    assert "adapter" in made.facts.features
    for name, path in adapters.items():
        made.load_adapter(name, str(path))
    return made


def add(
    driver: Driver, adapter: str | None, *, prompt: list[int] = PROMPT, tokens: int = 12
) -> str:
    name = f"{adapter} {next(numbers)}"
    sampling = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=0)
    driver.scheduler.add(Request(name, list(prompt), RequestSpec(sampling, 0, adapter=adapter)))
    return name


def ask(worker: Worker, adapter: str | None, **more: Any) -> Any:
    driver = Driver(worker)
    name = add(driver, adapter, **more)
    return driver.run()[name, 0]


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("kernels", ["ref", "cpu"])
def test_equal_to_merged_weights(kept: Kept, folder: Path, family: str, kernels: str) -> None:
    path = kept(families.make, family)
    adapter = lora.make(path, folder / f"{family}-{kernels}-adapter")
    worker = worker_of(path, kernels=kernels, kv_dtype="float32")
    worker.load_adapter("a", str(adapter))
    answer, plain = ask(worker, "a"), ask(worker, None)
    oracle = Oracle(lora.merged(path, adapter))
    expected = torch.log_softmax(oracle.logits(PROMPT), -1)
    wanted = [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])]
    got = [one.logprob for one in answer.prompt_logprobs]
    assert got == pytest.approx(wanted, abs=2e-3)
    assert [one.logprob for one in plain.prompt_logprobs] != pytest.approx(wanted, abs=0.1)
    if oracle.gaps(PROMPT, answer.tokens).min() > 1e-2:
        assert answer.tokens == oracle.greedy(PROMPT, 12)


@pytest.mark.parametrize("name", list(KINDS))
def test_every_kind_of_config(
    worker: Worker, model: Path, adapters: dict[str, Path], name: str
) -> None:
    answer = ask(worker, name)
    expected = torch.log_softmax(Oracle(lora.merged(model, adapters[name])).logits(PROMPT), -1)
    wanted = [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert [one.logprob for one in answer.prompt_logprobs] == pytest.approx(wanted, abs=2e-3)


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
def test_a_mixed_batch_gives_the_same_bits(
    model: Path, adapters: dict[str, Path], kernels: str
) -> None:
    """Row invariance: with an adapter or without one, whoever else is in the batch."""
    worker = worker_of(model, kernels=kernels, adapters=len(adapters))
    for name, path in adapters.items():
        worker.load_adapter(name, str(path))
    kinds = [None, *adapters]
    alone = {kind: ask(worker, kind) for kind in kinds}
    driver = Driver(worker, step_tokens=64)
    names = [(kind, add(driver, kind)) for kind in kinds * 2]
    answers = driver.run()
    for kind, name in names:
        got, wanted = answers[name, 0], alone[kind]
        assert got.tokens == wanted.tokens
        assert [o.logprob for o in got.prompt_logprobs] == [
            o.logprob for o in wanted.prompt_logprobs
        ]
    assert len({tuple(alone[kind].tokens) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
def test_a_draft_model_knows_of_no_adapter(
    model: Path, adapters: dict[str, Path], kernels: str
) -> None:
    """It drafts for an adapted row as for any, without what the adapter adds: less is right."""
    told = {"drafts": 4, "drafters": "draft", "draft_model": str(model)}
    found = []
    for drafting in ({}, told):
        worker = worker_of(model, kernels=kernels, **drafting)
        worker.load_adapter("all", str(adapters["all"]))
        if worker.drafter is not None:
            # A tiny model is as dear as its target.
            worker.drafter._estimate = worker.drafter.costs = DraftCosts(0.1, 0.0)
        driver = Driver(worker, drafts=4 if drafting else 0)
        names = [add(driver, adapter, tokens=30) for adapter in ("all", None)]
        answers = driver.run()
        found.append([answers[name, 0].tokens for name in names])
    assert found[0] == found[1]
    assert sum(plan.drafts for plan in driver.plans) > 10


def test_slots_change_hands(worker: Worker) -> None:
    """Four adapters one after the other in two slots, again and again."""
    first = {name: ask(worker, name).tokens for name in KINDS}
    for name in [*KINDS, *reversed(KINDS)]:
        assert ask(worker, name).tokens == first[name]


def test_unloading_while_it_runs(worker: Worker, adapters: dict[str, Path]) -> None:
    expected = ask(worker, "plain").tokens
    driver = Driver(worker)
    name = add(driver, "plain")
    for _ in range(4):
        driver.step()
    worker.unload_adapter("plain")
    assert driver.run()[name, 0].tokens == expected, "who has it goes on with it"
    gone = add(driver, "plain")
    driver.run()
    # The control plane does not let this happen; the worker says so and goes on.
    assert "no adapter 'plain'" in str(driver.answers[gone, 0].error)
    worker.load_adapter("plain", str(adapters["plain"]))
    assert ask(worker, "plain").tokens == expected


def test_prefixes_are_not_shared_between_adapters(worker: Worker) -> None:
    driver = Driver(worker)
    answers = {}
    for kind in (None, "plain", None, "plain"):
        name = f"x {next(numbers)}"
        sampling = SamplingParams(temperature=0, max_tokens=4)
        driver.scheduler.add(Request(name, list(PROMPT), RequestSpec(sampling, 0, adapter=kind)))
        answer = driver.run()[name, 0]
        assert (answer.cached > 0) == (kind in answers)
        assert answers.setdefault(kind, answer.tokens) == answer.tokens


def test_the_operator_against_its_definition() -> None:
    torch.manual_seed(0)
    slots, parts, rank, width = 3, (5, 7), 4, 6
    weight = LoraWeight(
        torch.randn(slots, len(parts) * rank, width),
        tuple(torch.randn(slots, rank, out) for out in parts),
        np.array([rank, 0, rank], np.int32),
    )
    x, y = torch.randn(9, width), torch.randn(9, sum(parts))
    adapters = [0, -1, 2, 2, 1, 0, -1, 2, 0]
    groups = [(s, torch.tensor([i for i, a in enumerate(adapters) if a == s])) for s in (0, 1, 2)]
    wanted = y.clone()
    for token, slot in enumerate(adapters):
        if slot in (0, 2):
            a = weight.down[slot].view(len(parts), rank, width)
            added = [up[slot].T @ (a[p] @ x[token]) for p, up in enumerate(weight.up)]
            wanted[token] += torch.cat(added)
    add_lora(y, x, groups, weight)
    torch.testing.assert_close(y, wanted)


# Files from strangers


def arch_of(model: Path) -> ModelArch:
    return open_model(str(model)).arch


def changed(source: Path, target: Path, **config: Any) -> Path:
    target.mkdir()
    values = json.loads((source / "adapter_config.json").read_text()) | config
    (target / "adapter_config.json").write_text(json.dumps(values))
    save_file(load_file(source / "adapter_model.safetensors"), target / "adapter_model.safetensors")
    return target


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"r": 0}, "r is out"),
        ({"r": "4"}, "r must be a number"),
        ({"r": 5}, "the model and r need"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(a+)+$": 3}}, "pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
)
def test_configs_that_are_refused(
    model: Path, adapters: dict[str, Path], tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    path = changed(adapters["plain"], tmp_path / "bad", **config)
    with pytest.raises((ModelFileError, UnsupportedModel), match=said):
        open_adapter(path, arch_of(model), max_rank=16)


Tensors = dict[str, torch.Tensor]
AT = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def _rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {k: v for k, v in t.items() if k != f"{AT}A.weight"}, "has only lora_B"),
        (lambda t: _rename(t, "layers.2.", "layers.9."), "not a matrix"),
        (lambda t: _rename(t, "q_proj", "q_norm"), "not a matrix"),
        (lambda t: _rename(t, "lora_A", "lora_magnitude_vector"), "not a LoRA matrix"),
        (lambda t: t | {"extra": torch.zeros(1)}, "not a LoRA matrix"),
        (lambda t: t | {f"{AT}A.weight": torch.zeros(4, 7)}, "the model and r need"),
        (lambda t: t | {f"{AT}A.weight": torch.zeros(4, 192, dtype=torch.int8)}, "I8"),
        (lambda t: {}, "no tensor"),
    ],
)
def test_tensors_that_are_refused(
    model: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    change: Callable[[Tensors], Tensors],
    said: str,
) -> None:
    path = changed(adapters["plain"], tmp_path / "bad")
    weights = path / "adapter_model.safetensors"
    save_file(change(load_file(weights)), weights)
    with pytest.raises((ModelFileError, UnsupportedModel), match=said):
        open_adapter(path, arch_of(model), max_rank=16)


def test_numbers_that_are_none_change_nothing(
    worker: Worker, adapters: dict[str, Path], tmp_path: Path
) -> None:
    path = changed(adapters["plain"], tmp_path / "bad")
    tensors = load_file(path / "adapter_model.safetensors")
    tensors[f"{AT}B.weight"][0, 0] = float("inf")
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ModelFileError, match="not finite"):
        worker.load_adapter("bad", str(path))
    assert "bad" not in worker._adapters.loaded


def test_damaged_pickled_missing_and_too_large(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    arch = arch_of(model)
    path = changed(adapters["plain"], tmp_path / "bad")
    weights = path / "adapter_model.safetensors"
    with pytest.raises(UnsupportedModel, match="above the largest"):
        open_adapter(path, arch, max_rank=2)
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(ModelFileError):
        open_adapter(path, arch, max_rank=16)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="pickled"):
        open_adapter(path, arch, max_rank=16)
    with pytest.raises(HeadraceError):
        open_adapter(tmp_path, arch, max_rank=16)


def test_only_from_allowed_roots(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for each in (root / "a", outside):
        each.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    assert within(root / "a", [root]) == (root / "a").resolve()
    for path in (outside, root / "link", root / ".." / "outside", root / "nothing", "\0"):
        with pytest.raises(Forbidden):
            within(path, [root])
    with pytest.raises(Forbidden):
        within(root / "a", [])
