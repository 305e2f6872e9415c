"""LoRA adapters through the engine: loaded, mixed, evicted, unloaded, after a crash."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crawling_worker import CRAWLING
from engine_fakes import LET_GO
from engine_waits import until
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.base.errors import Forbidden, InvalidRequest, ModelFileError, NotFound
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision
from headrace.engine.ranks.group import GroupExecutor
from headrace.worker import Worker

NAMES = ["one", "two", "three", "four"]
PROMPTS = ["The water", "a", "turns the turbine and", "x = "]


def write(folder: Path, seed: int) -> Path:
    """An adapter for the tiny model, in PEFT's layout."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(2):
        for module, out, width in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 64, 128)):
            at = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{at}A.weight"] = random.normal(0, 0.3, (4, width)).astype(np.float32)
            tensors[f"{at}B.weight"] = random.normal(0, 0.3, (out, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate([*NAMES, "never served"]):
        write(folder / name, seed)
    return folder


def greedy(tokens: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **fields)


def opened(options: dict[str, Any], root: Path, **more: Any) -> LLM:
    llm = LLM(**{**options, "max_adapters": 2, **more})
    for name in NAMES:
        llm.load_adapter(name, root / name)
    return llm


@pytest.fixture(scope="module")
def expected(tiny: Path, root: Path) -> dict[str | None, list[list[int]]]:
    """Each adapter alone."""
    from engine_fakes import OPTIONS

    with opened({**OPTIONS, "model": str(tiny)}, root) as llm:
        answers = {
            name: [llm.generate(p, greedy(), adapter=name)[0].outputs[0].token_ids for p in PROMPTS]
            for name in (None, *NAMES)
        }
    assert len({str(answer) for answer in answers.values()}) == 5, "each adapter does something"
    return answers


@pytest.mark.parametrize(
    "more",
    [
        *(
            {"executor": kind, "depth": depth}
            for kind in ("inline", "multiproc")
            for depth in (1, 2)
        ),
        *({"layout": layout, "threads": 2} for layout in ("TP2", "PP2", "TP2.PP2")),
    ],
)
def test_more_adapters_than_slots_in_one_batch(
    options: dict[str, Any],
    root: Path,
    expected: dict[str | None, list[list[int]]],
    more: dict[str, Any],
) -> None:
    mix = [(name, place) for place in range(len(PROMPTS)) for name in (None, *NAMES)]
    with opened(options, root, **more) as llm:
        outputs = llm.generate(
            [PROMPTS[place] for _, place in mix], greedy(), adapter=[name for name, _ in mix]
        )
        for (name, place), output in zip(mix, outputs, strict=True):
            assert output.outputs[0].token_ids == expected[name][place]
        said = [{"role": "user", "content": PROMPTS[0]}]
        bare = "{{ messages[0]['content'] }}"
        chats = llm.chat([said] * 5, greedy(), template=bare, adapter=[None, *NAMES])
        for name, output in zip((None, *NAMES), chats, strict=True):
            assert output.outputs[0].token_ids == expected[name][0]
        with pytest.raises(ModelFileError, match="cannot be read"):
            llm.load_adapter("broken", root)
        with pytest.raises(NotFound, match="no adapter 'broken'"):
            llm.generate("a", greedy(), adapter="broken")
        llm.unload_adapter("one")
        with pytest.raises(NotFound):
            llm.generate("a", greedy(), adapter="one")
        with pytest.raises(InvalidRequest, match="in use"):
            llm.load_adapter("two", root / "three")
        # Another adapter under an old name: nothing of the old one is left, not even its KV.
        llm.load_adapter("one", root / "never served")
        again = llm.generate(PROMPTS, greedy(), adapter="one")
        assert again[0].cached_tokens == 0
        # KV belongs to what an adapter holds, under whatever name.
        llm.unload_adapter("one")
        llm.load_adapter("one", root / "four")
        again = llm.generate(PROMPTS, greedy(), adapter="one")
        assert [output.outputs[0].token_ids for output in again] == expected["four"]
        assert again[0].cached_tokens == 8


def test_all_stages_have_an_adapter_or_none(
    options: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    """An error in the second stage's part undoes the first stage's."""
    damaged = write(tmp_path / "damaged", 1)
    file = damaged / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"][0, 0] = np.nan
    save_file(tensors, file)
    with opened(options, root, layout="PP2", threads=2) as llm:
        executor = llm._engine.core.executor
        assert isinstance(executor, GroupExecutor)
        assert isinstance(executor._own.worker, Worker)
        before = executor._own.worker._adapters.loaded
        with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.down_proj is not finite"):
            llm.load_adapter("damaged", damaged)
        assert executor._own.worker._adapters.loaded == before
        llm.generate(PROMPTS, greedy(), adapter="two")


def test_preempted_rows_find_their_adapter_again(
    options: dict[str, Any], root: Path, expected: dict[str | None, list[list[int]]]
) -> None:
    params = greedy(150)
    with opened(options, root, kv_memory="160KiB", max_context=256) as llm:
        mix = [(None, *NAMES)[place % 5] for place in range(15)]
        alone = {
            name: llm.generate(PROMPTS[0], params, adapter=name)[0].outputs[0].token_ids
            for name in (None, *NAMES)
        }
        outputs = llm.generate([PROMPTS[0]] * 15, params, adapter=mix)
        assert llm._engine.core.scheduler.stats().preemptions > 0
        for name, output in zip(mix, outputs, strict=True):
            assert output.outputs[0].token_ids == alone[name]


def test_without_the_option(options: dict[str, Any], root: Path) -> None:
    with LLM(**options) as llm, pytest.raises(InvalidRequest, match="max_adapters"):
        llm.load_adapter("one", root / "one")


@pytest.fixture
def served(options: dict[str, Any], root: Path) -> dict[str, Any]:
    return {**options, "max_adapters": 2, "adapter_roots": str(root)}


def test_asyncio(
    served: dict[str, Any],
    root: Path,
    expected: dict[str | None, list[list[int]]],
    tmp_path: Path,
    supervision: Supervision,
    notes: Path,
) -> None:
    (notes / LET_GO).touch()

    async def ask(engine: AsyncEngine, name: str | None) -> list[int]:
        output = await engine.generate(PROMPTS[0], greedy(), adapter=name)
        return output.outputs[0].token_ids

    async def run() -> None:
        async with await AsyncEngine.start(
            supervision=supervision, worker=CRAWLING, **served
        ) as engine:
            outside = write(tmp_path / "outside", 9)
            with pytest.raises(Forbidden):
                await engine.load_adapter("x", outside)
            with pytest.raises(NotFound):
                engine.submit("a", greedy(), adapter="one")
            results = await asyncio.gather(
                *(engine.load_adapter(name, root / name) for name in NAMES),
                engine.load_adapter("one", root / "two"),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [type(None)] * 4 + [InvalidRequest]
            assert sorted(engine.adapters.loaded) == sorted(NAMES)
            kinds = [None, *NAMES] * 3
            got = await asyncio.gather(*(ask(engine, name) for name in kinds))
            for name, tokens in zip(kinds, got, strict=True):
                assert tokens == expected[name][0]
            # Unloaded in the middle: who has it goes on, who comes later is refused.
            (notes / LET_GO).unlink()
            stream = engine.submit(PROMPTS[0], greedy(300), adapter="two")
            first = await anext(stream)
            await engine.unload_adapter("two")
            with pytest.raises(NotFound):
                engine.submit("a", greedy(), adapter="two")
            (notes / LET_GO).touch()
            tokens = [token async for delta in stream for token in delta.token_ids]
            assert len(first.token_ids) < 200
            assert len(first.token_ids) + len(tokens) > 200
            # A new engine process has the others again.
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            await until(lambda: engine.health().restarts and engine.health().ready, "again")
            assert await ask(engine, "three") == expected["three"][0]
            with pytest.raises(NotFound):
                engine.submit("a", greedy(), adapter="two")
            report = await engine.inspect()
            assert (report.running, report.integrity) == (0, "")

    asyncio.run(run())
