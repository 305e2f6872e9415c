"""Resolution of options: decided with reasons, or refused with options that would help."""

from __future__ import annotations

import gc
import re
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.base import hardware as hardware_module
from headrace.base.config import EngineOptions
from headrace.base.errors import DoesNotFit, InvalidRequest, OptionError
from headrace.base.gpus import GpuFacts
from headrace.base.hardware import CpuFacts, Hardware, cpu, hardware, torch_build
from headrace.base.modelfiles import ModelFiles
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.input import InputProcessor, default_sampling
from headrace.engine.loop import gpu_start, start
from headrace.engine.loop.build import build
from headrace.engine.loop.gpu_start import alone_on
from headrace.engine.loop.start import explain, resolve
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.program import CpuProgram
from headrace.loader import open_model
from headrace.roofline.memory import USABLE
from headrace.text import load_tokenizer

CPU = CpuFacts("a CPU", frozenset(), cores=8, physical_cores=4, memory=2**34, available=2**33)
GPU = GpuFacts(0, "a GPU", (9, 0), 80 * 2**30, 79 * 2**30)
OLD_GPU = GpuFacts(0, "an old GPU", (7, 5), 2**34, 2**33)


@pytest.fixture
def files(tiny: Path) -> ModelFiles:
    return open_model(str(tiny))


def decisions(options: EngineOptions, files: ModelFiles, machine: Hardware) -> dict[str, str]:
    return {d.name: d.value for d in resolve(options, files, machine).decisions}


def test_without_a_gpu(files: ModelFiles) -> None:
    resolved = resolve(EngineOptions(), files, Hardware(CPU, ()))
    assert (resolved.options.device, resolved.options.dtype) == ("cpu", "float32")
    assert resolved.options.kv_dtype == "bfloat16"
    assert resolved.options.threads == 4
    assert resolved.available == 2**33
    for decision in resolved.decisions:
        assert decision.reason


def test_a_machine_of_more_cores_than_a_team_may_have(files: ModelFiles) -> None:
    large = replace(CPU, cores=768, physical_cores=384)
    threads = resolve(EngineOptions(), files, Hardware(large, ())).options.threads
    assert threads == 256
    EngineOptions(threads=threads).verify()
    Team(threads)


@pytest.mark.parametrize(
    ("fields", "kv_dtype"),
    [
        ({"kernels": "cpu"}, "bfloat16"),
        ({"kernels": "ref"}, "float32"),
        ({"kernels": "ref", "dtype": "float16"}, "float16"),
        ({"kv_dtype": "int8"}, "int8"),
    ],
)
def test_the_kv_of_a_cpu(files: ModelFiles, fields: dict[str, str], kv_dtype: str) -> None:
    resolved = resolve(EngineOptions(**fields), files, Hardware(CPU, ()))  # type: ignore[arg-type]
    assert resolved.options.kv_dtype == kv_dtype


@pytest.mark.parametrize(("gpu", "dtype"), [(GPU, "bfloat16"), (OLD_GPU, "float16")])
def test_with_a_gpu_and_a_torch_that_knows_it(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, gpu: GpuFacts, dtype: str
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    resolved = resolve(EngineOptions(), files, Hardware(CPU, (gpu,)))
    assert (resolved.options.device, resolved.options.dtype) == ("cuda", dtype)
    assert resolved.available == gpu.free
    assert resolve(EngineOptions(device="cpu"), files, Hardware(CPU, (gpu,))).available == 2**33


@pytest.mark.parametrize(("free", "rows"), [(80 * 2**30, 1024), (3 * 2**23, 68), (2**23, 64)])
def test_a_gpu_has_two_steps_in_flight_and_the_rows_that_its_pool_holds(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, free: int, rows: int
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    machine = Hardware(CPU, (replace(GPU, free=free),))
    options = EngineOptions(device="cuda", step_tokens=16)
    resolved = resolve(options, files, machine)
    memory = start.plan(resolved, files, 1000)
    assert memory.rows == rows
    values = {one.name: one.value for one in (*resolved.decisions, *memory.decisions)}
    assert values["depth"] == "2"
    assert values["max_sequences"] == str(rows)
    asked = resolve(replace(options, max_sequences=7), files, machine)
    assert start.plan(asked, files, 1000).rows == 7


def test_a_small_gpu_starts_with_few_rows(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,024 rows of the logits that graphs keep would not fit beside the weights."""
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    wide = replace(files, arch=replace(files.arch, vocab_size=150_000))
    graphs = 10 * 1024 * 150_000
    machine = Hardware(CPU, (replace(GPU, free=graphs),))
    resolved = resolve(EngineOptions(device="cuda", step_tokens=64), wide, machine)
    memory = start.plan(resolved, wide, 1000)
    assert 64 <= memory.rows <= 512
    assert memory.max_context == files.arch.max_context


def test_a_gpu_without_memory_of_its_own_leaves_a_host_half(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    machine = Hardware(CPU, (replace(GPU, integrated=True),))
    resolved = resolve(EngineOptions(device="cuda"), files, machine)
    planned = resolved.available * USABLE["cuda"]
    assert planned == pytest.approx(GPU.free * USABLE["cpu"], rel=1e-6)


def test_a_driver_too_old_for_torch_is_named(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    machine = Hardware(CPU, (GPU,), cuda=(12, 8))
    assert resolve(EngineOptions(), files, machine).options.device == "cpu"
    with pytest.raises(OptionError, match=r"CUDA 13\.0 and the driver serves 12\.8: update"):
        resolve(EngineOptions(device="cuda"), files, machine)
    machine = Hardware(CPU, (GPU,), cuda=(13, 0))
    assert resolve(EngineOptions(), files, machine).options.device == "cuda"


def test_two_starts_on_one_gpu_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    order = []
    monkeypatch.setattr(gpu_start, "LOOK", 0.01)

    def second() -> None:
        with alone_on(GPU):
            order.append("second")

    other = threading.Thread(target=second)
    with alone_on(GPU):
        other.start()
        with alone_on(replace(GPU, uuid="another")):
            order.append("first")
        other.join(0.2)
        order.append("still first")
    other.join(30)
    assert order == ["first", "still first", "second"]


@pytest.mark.parametrize(
    ("torch", "said"),
    [(("2.13.0+cpu", None), "without CUDA"), (("", None), r"pip install 'torch[^ ]*'")],
)
def test_a_gpu_that_torch_cannot_use_is_said(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, torch: tuple[str, None], said: str
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: torch)
    machine = Hardware(CPU, (GPU,))
    resolved = resolve(EngineOptions(), files, machine)
    assert resolved.options.device == "cpu"
    assert re.search(said, resolved.decisions[0].reason)
    with pytest.raises(OptionError, match=said) as caught:
        resolve(EngineOptions(device="cuda"), files, machine)
    assert caught.value.param == "device"


def test_what_was_asked_for_is_kept(files: ModelFiles) -> None:
    asked = {
        "dtype": "bfloat16",
        "kv_dtype": "int8",
        "step_tokens": 64,
        "threads": 3,
        "depth": 1,
        "max_sequences": 5,
    }
    options = EngineOptions(**asked, kernels="ref", speculate="off")
    resolved = resolve(options, files, Hardware(CPU, ()))
    assert set(decisions(options, files, Hardware(CPU, ()))) == {"device", "context_cache"}
    assert resolved.options == replace(options, device="cpu")


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"dtype": "float16"}, "auto or float32, or --kernels ref"),
        ({"dtype": "bfloat16", "kernels": "cpu"}, "auto or float32, or --kernels ref"),
        ({"kv_dtype": "fp8"}, "int8, k8v4, or --kernels ref"),
        ({"quantise": "fp8"}, "auto or int8, int4$"),
    ],
)
def test_what_a_cpu_has_no_kernels_for_is_refused(
    files: ModelFiles, fields: dict[str, str], instead: str
) -> None:
    """The reference would take ten to a hundred times as long, and nobody asked for it."""
    with pytest.raises(OptionError, match=instead) as caught:
        resolve(EngineOptions(**fields), files, Hardware(CPU, ()))  # type: ignore[arg-type]
    assert caught.value.param == next(iter(fields))
    if "quantise" not in fields:
        resolve(EngineOptions(**{**fields, "kernels": "ref"}), files, Hardware(CPU, ()))  # type: ignore[arg-type]


def test_bad_options_are_named(files: ModelFiles) -> None:
    for fields in ({"device": "tpu"}, {"depth": 3}, {"max_sequences": 0}, {"kv_memory": "much"}):
        with pytest.raises(OptionError) as caught:
            resolve(EngineOptions(**fields), files, Hardware(CPU, ()))
        assert caught.value.param == next(iter(fields))


def test_explain_needs_no_weights_and_says_what_was_given_up(files: ModelFiles) -> None:
    small = Hardware(replace(CPU, available=6 * 2**20), ())
    options = EngineOptions(kv_memory="auto", step_tokens=32, max_sequences=256)
    found, memory = explain(options, files, small)
    given_up = {d.name for d in found} & {"max_context", "max_sequences"}
    assert given_up, found
    assert memory.rows < 256 or memory.max_context < files.arch.max_context


def test_what_does_not_fit_says_what_would_help(files: ModelFiles) -> None:
    small = Hardware(replace(CPU, available=int(3.3 * 2**20)), ())
    options = EngineOptions(kv_dtype="float32", max_context=512, max_sequences=64, step_tokens=512)
    with pytest.raises(DoesNotFit) as caught:
        explain(options, files, small)
    assert "--step-tokens 64" in caught.value.message


def test_a_built_engine_obeys_its_plan(options: dict[str, Any], files: ModelFiles) -> None:
    phases: list[str] = []
    built = build(
        EngineOptions(**{**options, "max_context": 100, "max_sequences": 3}),
        files,
        worker="engine_fakes:load",
        on_phase=lambda name, seconds: phases.append(name),
    )
    try:
        assert built.memory.rows == 3
        assert built.core.max_context == 100
        assert phases[0] == "plan"
        assert phases[-3:] == ["kv_pool", "warm_up", "first_token"]
        assert not built.core.has_work, "the proof leaves nothing behind"
        assert built.core.scheduler.stats().kv_usage == 0.0
    finally:
        built.close()


def test_hardware_facts_of_this_machine() -> None:
    facts = hardware().cpu
    assert facts.name
    assert 1 <= facts.physical_cores <= facts.cores
    assert 0 < facts.available <= facts.memory
    version, _ = torch_build()
    assert version.startswith("2.")


@pytest.mark.parametrize(
    ("files_", "cores"),
    [
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_a_containers_quota_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_: dict[str, str], cores: int
) -> None:
    for name, text in files_.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(hardware_module, "_CGROUP", tmp_path)
    monkeypatch.setattr(hardware_module, "_affinity", lambda: set(range(64)))
    assert cpu().cores == cores


@pytest.mark.parametrize(
    "names",
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
)
def test_a_containers_limit_bounds_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str, str, str]
) -> None:
    (tmp_path / "memory").mkdir()
    limit, used, stat, cache = names
    (tmp_path / limit).write_text(str(2**28))
    (tmp_path / used).write_text(str(2**27))
    (tmp_path / stat).write_text(f"anon 5\n{cache} {2**26}\n")
    monkeypatch.setattr(hardware_module, "_CGROUP", tmp_path)
    facts = cpu()
    assert facts.memory == 2**28
    assert facts.available == 2**28 - 2**27 + 2**26


def test_default_sampling_is_the_authors(files: ModelFiles) -> None:
    own = replace(files, generation={"temperature": 0.6, "top_k": 20, "unknown": 1})
    assert default_sampling(own) == SamplingParams(temperature=0.6, top_k=20)
    assert default_sampling(replace(files, generation={"do_sample": False})).greedy


def test_stop_ids_of_a_request(files: ModelFiles) -> None:
    processor = InputProcessor(files, load_tokenizer(files.tokenizer), 512)

    def stop_ids(**fields: Any) -> tuple[int, ...]:
        return processor.request("a", SamplingParams(**fields), request_id="x").spec.stop_ids

    assert stop_ids() == files.eos_ids == (256,)
    assert stop_ids(ignore_eos=True) == ()
    assert stop_ids(stop_token_ids=[5, 256]) == (256, 5)
    with pytest.raises(InvalidRequest, match="priority"):
        processor.request("a", SamplingParams(), request_id="x", priority=2**40)


def test_a_large_pool_costs_no_memory_until_it_is_used(tiny: Path) -> None:
    """Allocating it is quick, and what nobody wrote is not there."""
    psutil = pytest.importorskip("psutil")
    pytest.importorskip("torch")
    from headrace.base.groups import graph_groups, pool_bytes
    from headrace.base.step import PoolShape
    from headrace.models.registry import describe
    from headrace.worker.kv_tensors import allocate_kv

    arch = open_model(str(tiny)).arch
    block = pool_bytes(PoolShape(16, graph_groups(describe(arch), "float32", 1)))
    pool = PoolShape(16, graph_groups(describe(arch), "float32", 2**31 // block))
    process = psutil.Process()
    before = process.memory_info().rss
    cache = allocate_kv(pool, "cpu")
    assert process.memory_info().rss - before < 64 * 2**20
    assert float(cache.layers[1].v[-1].sum()) == 0.0


def test_what_a_model_held_goes_without_the_collector(tiny: Path) -> None:
    def programs() -> int:
        return sum(type(each) is CpuProgram for each in gc.get_objects())

    gc.collect()
    before, was = programs(), gc.isenabled()
    gc.disable()
    try:
        llm = LLM(str(tiny), kv_memory="1MB", threads=1)
        assert programs() > before
        llm.close()
        del llm
        assert programs() == before
    finally:
        if was:
            gc.enable()


def test_one_row_and_a_queue_of_one_start(tiny: Path) -> None:
    """The first texts come one after the other: there are more than fit at once."""
    small: dict[str, Any] = {"max_sequences": 1, "max_waiting": 1, "kv_memory": "1MB"}
    options = EngineOptions(model=str(tiny), device="cpu", threads=1, **small)
    build(options, open_model(str(tiny))).close()
