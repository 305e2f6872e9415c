"""An engine that starts again finds what the one before it computed, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import OPTIONS
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.base.config import EngineOptions
from headrace.base.errors import EngineDead, OptionError
from headrace.base.hardware import hardware
from headrace.base.identity import Identity
from headrace.base.tiers import TierStats
from headrace.base.version import VERSION
from headrace.cli.main import main
from headrace.engine.loop.controls import Controls
from headrace.engine.loop.start import explain
from headrace.engine.messages import Operate
from headrace.kernels.cpu import operators
from headrace.kernels.cpu.library import BUILD_ALL, LEVELS, Team, level, unbuilt
from headrace.loader import open_model
from headrace.roofline.tiers import read_trace, savings
from headrace.worker.seal import forget_keys
from tiny import families
from tiny.kept import Kept

PROMPT = [(place * 7) % 250 for place in range(70)]


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this model takes as long to compute as a disk takes to answer."""
    monkeypatch.setattr("headrace.kv.tiers.LATENCY", -1e9)
    monkeypatch.setattr("headrace.kv.tiers.ASKING", -1.0)


def opened(model: Path, folder: Path, **options: Any) -> LLM:
    """An engine that has seen what is in its folder."""
    asked = {**OPTIONS, "context_cache": "64MiB", **options}
    llm = LLM(str(model), **asked, cache_dir=folder)
    stats(llm)
    return llm


def stats(llm: LLM) -> TierStats:
    context = llm._built.context  # type: ignore[union-attr]
    assert context is not None
    context.settle()
    return context.tiers.stats


def greedy(llm: LLM, prompt: list[int], tokens: int = 24) -> tuple[list[int], int]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    output = llm.generate([prompt], params)[0]
    return list(output.outputs[0].token_ids), output.cached_tokens


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "k8v4"])
def test_a_restart_loads_what_was_computed(
    tiny: Path, tmp_path: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny, tmp_path, kv_dtype=kv_dtype) as first:
        answer, cached = greedy(first, PROMPT)
        assert cached == 0
        assert stats(first).written_blocks >= 5
    with opened(tiny, tmp_path, kv_dtype=kv_dtype) as second:
        assert greedy(second, PROMPT) == (answer, 64)
        assert stats(second).loads == 1
        assert stats(second).written_blocks == 0
        # A conversation goes on: what was generated is there, too.
        more, cached = greedy(second, [*PROMPT, *answer], 4)
        assert cached == 93
    # Each load leaves a block out, computes it and compares the bytes.
    monkeypatch.setattr("headrace.kv.tiers.CANARY", 1)
    with opened(tiny, tmp_path, kv_dtype=kv_dtype) as third:
        assert greedy(third, PROMPT) == (answer, 48)
        assert greedy(third, [*PROMPT, *answer], 4)[0] == more
        assert stats(third).checked >= 1
        assert stats(third).wrong == 0


@pytest.mark.parametrize(("family", "groups"), [("deepseek_v3", 1), ("gemma3", 2)])
def test_latents_and_windows_are_kept_too(
    kept: Kept,
    tiny: Path,
    tmp_path: Path,
    family: str,
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A latent layer has one array, a window's group only the blocks that it still sees."""
    monkeypatch.setattr("headrace.kv.tiers.CANARY", 1)
    model = tmp_path / "model"
    shutil.copytree(kept(families.make, family), model)
    shutil.copy(tiny / "tokenizer.json", model)  # one that this face of the engine reads
    with opened(model, tmp_path, max_context=256) as first:
        answer, _ = greedy(first, PROMPT)
        assert len(first._built.memory.pool.groups) == groups  # type: ignore[union-attr]
        assert stats(first).written_blocks >= 5 * groups
    for _ in range(2):
        with opened(model, tmp_path, max_context=256) as again:
            assert greedy(again, PROMPT) == (answer, 48)
            assert stats(again).loads == 1
            assert stats(again).checked == 1
            assert stats(again).wrong == 0


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "granitemoehybrid-dense"])
def test_states_are_kept_too(
    kept: Kept, tiny: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint comes back with the KV before it, and whoever goes on from it says the same."""
    model = tmp_path / "model"
    shutil.copytree(kept(families.make, family), model)
    shutil.copy(tiny / "tokenizer.json", model)
    with opened(model, tmp_path, max_context=256) as first:
        answer, cached = greedy(first, PROMPT)
        assert cached == 0
        assert stats(first).written_blocks >= 5
        group = first._built.memory.pool.groups[-1]  # type: ignore[union-attr]
        assert group.state
    number = max(first_groups(tmp_path))
    for _ in range(2):
        with opened(model, tmp_path, max_context=256) as again:
            assert greedy(again, PROMPT) == (answer, 64)
            assert stats(again).loads == 1
            assert stats(again).damaged == 0
    monkeypatch.setattr("headrace.kv.tiers.CANARY", 1)
    with opened(model, tmp_path, max_context=256) as third:
        assert greedy(third, PROMPT) == (answer, 0)
        assert stats(third).checked == 1
        assert stats(third).wrong == 0
    monkeypatch.setattr("headrace.kv.tiers.CANARY", 16)
    for path in (tmp_path / "kv").rglob(f"*-{number}"):
        path.unlink()  # KV without a state is of no use.
    with opened(model, tmp_path, max_context=256) as fourth:
        assert greedy(fourth, PROMPT) == (answer, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        *((None, dtype) for dtype in ("bfloat16", "float32", "int8", "k8v4")),
        *((family, "bfloat16") for family in ("deepseek_v3", "gemma3", "qwen3_next")),
    ],
)
def test_every_level_and_chunking_keeps_the_same_bytes(
    kept: Kept,
    tiny: Path,
    tmp_path: Path,
    family: str | None,
    kv_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of one name are equal whoever computed them, and in pieces of how many tokens."""
    model = tmp_path / "model"
    shutil.copytree(tiny if family is None else kept(families.make, family), model)
    shutil.copy(tiny / "tokenizer.json", model)
    levels = [name for name in LEVELS if level(name)]
    if len(levels) < 2:
        pytest.skip(f"{', '.join(unbuilt())} not built: {BUILD_ALL}")
    for name, step_tokens in [(levels[-1], 256), *((name, 24) for name in levels)]:
        monkeypatch.setattr(operators, "Team", lambda threads, _, at=name: Team(threads, at))
        folder = tmp_path / f"{name}-{step_tokens}"
        with opened(
            model, folder, kv_dtype=kv_dtype, max_context=256, step_tokens=step_tokens
        ) as llm:
            built = llm._built
            assert built is not None
            assert built.core.executor.worker.text.operators.team.level == name  # type: ignore[attr-defined]
            assert built.memory.step_tokens == step_tokens
            greedy(llm, PROMPT)
            assert stats(llm).written_blocks >= 5
        files = {path.name: path.read_bytes() for path in (folder / "kv").rglob("*-[0-9]")}
        if step_tokens == 256:
            first = files
        assert files == first, name


def first_groups(folder: Path) -> set[str]:
    """The groups of which there are files."""
    return {path.name.rpartition("-")[2] for path in (folder / "kv").rglob("*-[0-9]")}


def test_what_was_sealed_comes_back_until_its_key_is_gone(tiny: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for cached in (0, 64):
        with opened(tiny, tmp_path, context_cache_keys=str(keys)) as engine:
            answer, found = greedy(engine, PROMPT)
            assert found == cached
    with opened(tiny, tmp_path) as other:  # without keys: nothing to be found
        assert greedy(other, PROMPT) == (answer, 0)
    assert forget_keys(keys, "") == 1
    with opened(tiny, tmp_path, context_cache_keys=str(keys)) as engine:
        assert greedy(engine, PROMPT) == (answer, 0)
        assert greedy(engine, [*PROMPT, *answer], 2)[1] == 93


def test_another_machine_loads_from_the_store(tiny: Path, tmp_path: Path) -> None:
    """With a disk of its own, which keeps what came; and without one."""
    remote = {"context_cache_remote": f"file://{tmp_path}/bucket"}
    with opened(tiny, tmp_path / "one", **remote) as first:
        answer, _ = greedy(first, PROMPT)
        assert stats(first).remote_bytes == 0
    for size, kept in (("64MiB", 4), ("0", 0)):
        folder = tmp_path / size
        with opened(tiny, folder, **remote, context_cache=size) as second:
            assert greedy(second, PROMPT) == (answer, 64)
            assert stats(second).remote_bytes > 0
            assert stats(second).damaged == 0
            stats(second)
        assert len(list(folder.glob("kv/*/*/*-0"))) >= kept
    with opened(tiny, tmp_path / "64MiB") as third:
        assert greedy(third, PROMPT) == (answer, 64)


def test_a_pool_of_tensors_is_kept_too(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, tmp_path, kernels="ref") as first:
        answer, _ = greedy(first, PROMPT)
        stats(first)
    with opened(tiny, tmp_path, kernels="ref") as second:
        assert greedy(second, PROMPT) == (answer, 64)


def test_the_canary_sees_another_content(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is whole, under the right name, and wrong."""
    monkeypatch.setattr("headrace.kv.tiers.CANARY", 1)
    with opened(tiny, tmp_path) as first:
        greedy(first, PROMPT)
        stats(first)
        context = first._built.context  # type: ignore[union-attr]
        assert context is not None
        [tier] = context._mover._tier.tiers
        for path in (tmp_path / "kv").rglob("*-0"):
            name, tenant = bytes.fromhex(path.name[:32]), path.parent.name
            size = path.stat().st_size - 64
            tier.write(name, 0, tenant, [memoryview(bytes(size))], 0)
    with opened(tiny, tmp_path) as second:
        greedy(second, PROMPT)
        assert stats(second).checked == 1
        assert stats(second).wrong == 1


def test_damage_and_loss_are_computed_again(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as first:
        answer, _ = greedy(first, PROMPT)
        stats(first)
    files = sorted((tmp_path / "kv").rglob("*-0"))
    for path in files[::2]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with opened(tiny, tmp_path) as second:
        assert greedy(second, PROMPT)[0] == answer
    with opened(tiny, tmp_path) as third:
        assert greedy(third, PROMPT) == (answer, 64)


def test_files_of_another_model_type_or_version_are_not_looked_at(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny, tmp_path / "cache") as first:
        greedy(first, PROMPT)
        stats(first)
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"][5] *= 2
    save_file(weights, other / "model.safetensors")
    for model, options, version in (
        (other, {}, VERSION),
        (tiny, {"kv_dtype": "float32"}, VERSION),
        (tiny, {}, "0.0.9"),
    ):
        monkeypatch.setattr("headrace.engine.loop.build.Identity", Stamped(version))
        with opened(model, tmp_path / "cache", **options) as second:
            assert greedy(second, PROMPT)[1] == 0
            assert stats(second).loads == 0


class Stamped:
    """`Identity` of an engine of another version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def of(self, *given: Any) -> Identity:
        return replace(Identity.of(*given), version=self._version)


def test_prefixes_that_were_reset_do_not_come_back(tiny: Path, tmp_path: Path) -> None:
    with opened(tiny, tmp_path) as llm:
        answer, _ = greedy(llm, PROMPT)
        context = llm._built.context  # type: ignore[union-attr]
        assert context is not None
        context.settle()
        context.tiers.kv.reset()
        context.tiers.store.forget()
        assert greedy(llm, PROMPT) == (answer, 0)


def test_what_the_pool_had_no_room_for_comes_back(tiny: Path, tmp_path: Path) -> None:
    """Twelve prompts in a pool that holds three of them."""
    with opened(tiny, tmp_path, kv_memory="64KiB", max_sequences=2) as llm:
        prompts = [[number, *PROMPT] for number in range(12)]
        answers = [greedy(llm, prompt, 8)[0] for prompt in prompts]
        stats(llm)
        again = [greedy(llm, prompt, 8) for prompt in prompts]
        assert [tokens for tokens, _ in again] == answers
        assert stats(llm).loads > 0


@pytest.mark.parametrize("kernels", ["cpu", "ref"])
def test_a_worker_in_a_process_of_its_own_has_tiers_too(
    tiny: Path, tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process loads the KV that another kept, whichever of them has a worker process.

    After a worker is killed, everything is kept that its steps had given.
    """
    monkeypatch.setattr("headrace.kv.tiers.CANARY", 1)
    apart = {"executor": "multiproc", "kernels": kernels}
    with opened(tiny, tmp_path, **apart) as first:
        answer, cached = greedy(first, PROMPT)
        assert cached == 0
        os.kill(first._built.core.executor.end.pid, signal.SIGKILL)  # type: ignore[union-attr,attr-defined]
        with pytest.raises(EngineDead):
            greedy(first, PROMPT)
    for options in ({"kernels": kernels}, apart):
        with opened(tiny, tmp_path, **options) as again:
            assert greedy(again, PROMPT) == (answer, 48)
            assert greedy(again, [*PROMPT, *answer], 4)[1] >= 64
            assert stats(again).checked >= 1
            assert (stats(again).wrong, stats(again).damaged) == (0, 0)


def test_a_pool_elsewhere_moves_when_it_is_another(tiny: Path, tmp_path: Path) -> None:
    """Sleep gives the pool's memory back; blocks come into the next one, wherever that lies."""
    with opened(tiny, tmp_path, executor="multiproc") as llm:
        built = llm._built
        assert built is not None
        controls = Controls(built, open_model(str(tiny), offline=True))
        answer, _ = greedy(llm, PROMPT)
        stats(llm)
        file = os.fstat(built.core.executor.pool_file)  # type: ignore[attr-defined]
        for action in ("sleep", "wake"):
            assert controls.perform(Operate(1, action)).error is None
        after = os.fstat(built.core.executor.pool_file)  # type: ignore[attr-defined]
        assert after.st_size > file.st_size
        assert after.st_blocks < file.st_blocks
        assert greedy(llm, PROMPT) == (answer, 64)
        assert stats(llm).loads == 1


def test_why_there_is_none_is_explained(tiny: Path) -> None:
    def decided(**options: Any) -> tuple[str, str]:
        asked = EngineOptions(model=str(tiny), **{**OPTIONS, **options})
        decisions, _ = explain(asked, open_model(str(tiny), offline=True), hardware())
        [found] = [one for one in decisions if one.name == "context_cache"]
        return found.value, found.reason

    assert decided()[0] == "0"
    assert decided(context_cache="1MiB")[0] == str(2**20)
    assert decided(context_cache="1MiB", prefix_cache=False) == ("0", "prefix_cache is off")
    assert decided(context_cache="0") == ("0", "asked for")
    assert decided(context_cache="1MiB", executor="multiproc")[0] == str(2**20)
    two = decided(context_cache="1MiB", executor="multiproc", depth=2)
    assert two == (
        "0",
        "a worker in a process of its own leaves no time between two steps in flight",
    )
    with pytest.raises(OptionError, match="context_cache_quota"):
        decided(context_cache="0", context_cache_quota="much")
    with pytest.raises(OptionError, match="is no URL"):
        decided(context_cache_remote="somewhere")


def test_prompts_that_were_computed_beforehand_are_there(
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n\n")
    precompute = ["cache", "precompute", str(tiny), "--prompts", str(prompts)]
    flags = ["--offline", "--device=cpu", "--threads=1", "--kv-memory=2MiB"]
    flags += ["--max-sequences=64", "--step-tokens=256"]
    where = ["--cache-dir", str(tmp_path), "--context-cache", "64MiB"]
    monkeypatch.setattr("sys.argv", ["headrace", *precompute, *flags, *where])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert "1 prompts, 70 tokens; 0 were there" in capsys.readouterr().err
    with opened(tiny, tmp_path) as engine:
        assert greedy(engine, PROMPT)[1] == 64


def test_a_trace_of_prefixes_is_what_the_planner_reads(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    with opened(tiny, tmp_path, context_cache_trace=str(file)) as engine:
        for _ in range(3):
            greedy(engine, PROMPT, 2)
    trace = read_trace(file)
    assert [len(keys) for keys in trace.prefixes[-3:]] == [4, 4, 4]
    assert trace.prefixes[-1] == trace.prefixes[-3]
    assert trace.block_tokens == 16
    [(ram, _)] = savings(trace, 0, [1 << 30])
    assert ram.hits >= 0.5
