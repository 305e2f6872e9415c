"""One description of a model, whatever names it; what does not fit; limits that nothing beats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import DoesNotFit, HeadraceError, OptionError, UnsupportedModel
from headrace.base.layout import Layout
from headrace.cli.roofline import command
from headrace.engine.simulator.described import describe_model, make_case
from headrace.loader import open_model
from headrace.loader.catalog import CATALOG
from headrace.models.registry import describe
from headrace.roofline.composition import compose, decode_step, prefill_step
from headrace.roofline.config import read_config
from headrace.roofline.counts import Case
from headrace.roofline.efficiency import CPU_EFFICIENCY
from headrace.roofline.fit import StepRecord, fit_efficiency, honest
from headrace.roofline.fits import verify_fits
from headrace.roofline.hardware import DEVICES
from headrace.roofline.hardware_files import find_hardware
from headrace.roofline.known import KNOWN, known
from headrace.roofline.machine import gpu_named
from headrace.roofline.memory import plan_memory
from headrace.roofline.planner import formats_of, search
from headrace.roofline.prices import PRICES
from headrace.roofline.steady import Demand, Goal
from headrace.roofline.step import StepModel, step_time
from headrace.roofline.weights import parameters, parse_format, total_bytes

from .archs import LLAMA_8B, QWEN_05B


def test_a_mixture_in_every_second_layer_has_what_its_makers_publish() -> None:
    """Llama 4 Maverick is Scout with more experts in fewer layers."""
    scout = KNOWN["llama-4-scout"]["config"]["text_config"]
    maverick = {**scout, "num_local_experts": 128, "interleave_moe_layer_step": 2}
    arch, _ = read_config({"model_type": "llama4", "text_config": maverick})
    assert sum(parameters(arch).values()) / 1e9 == pytest.approx(400.7, rel=0.01)


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_config_is_priced_and_placed(name: str) -> None:
    """The roofline counts what the graph has; a step has a time, and a device the room."""
    arch, weights = known(name)
    counted = sum(map(math.prod, describe(arch).tensors().values()))
    assert sum(parameters(arch).values()) == pytest.approx(counted, rel=1e-3)
    held = total_bytes(arch, weights)
    time = step_time(Case(arch, weights), DEVICES["H200"], decode_step(arch, 8, 2048))
    assert held / DEVICES["H200"].bandwidth / 500 < time.seconds < 1
    placed = plan_memory(
        arch,
        weight_bytes=int(held),
        available=int(held * 1.5) + 40 * 2**30,
        rows=16,
        step_tokens=512,
        max_context=4096,
        device="cuda",
    )
    assert (placed.rows, placed.max_context) == (16, 4096)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_a_published_config_is_planned(name: str) -> None:
    arch, weights = known(name)
    most = 2 ** math.ceil(math.log2(1 + total_bytes(arch, weights) / 1e11))
    found = search(
        arch,
        Demand(2.0, 200, 50),
        Goal(1.0, 0.05),
        PRICES,
        devices=[DEVICES["H200"]],
        formats=formats_of(weights)[:1],
        pools=False,
        max_devices=most,
    )
    assert found.candidates


@pytest.mark.parametrize("key", ["linear_num_value_heads", "mamba_d_state", "index_topk"])
def test_what_is_not_priced_is_named(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        read_config({**KNOWN["deepseek-v3"]["config"], key: 32})
    with pytest.raises(UnsupportedModel, match="gate"):
        read_config({**KNOWN["llama-3.1-8b"]["config"], "model_type": "falcon"})


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["glm-4.5-air"]["config"]))
    folder, file = (describe_model(str(p)) for p in (tmp_path, tmp_path / "config.json"))
    assert folder == file
    assert folder.weights.format == "bfloat16"
    done = CliRunner().invoke(command, [str(tmp_path), "--hardware", "B200", "--layout", "TP2"])
    assert done.exit_code == 0, done.output
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HeadraceError, match=r"model_type|hidden_size"):
        describe_model(str(tmp_path))


def test_a_known_name_is_its_published_architecture() -> None:
    """The catalog's file of the same name is a quantisation of it; `plan` needs no download."""
    for name in set(KNOWN) & set(CATALOG):
        assert describe_model(name).source == "known architecture"
    with pytest.raises(HeadraceError, match=r"llama-3.1-8b.*config.json"):
        describe_model("no-such-model")


@pytest.mark.model
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m"])
def test_a_name_of_the_catalog_is_its_file(name: str) -> None:
    cpu = replace(DEVICES["H200"], kind="cpu")
    case = make_case(name, cpu)
    assert case == make_case(str(open_model(name).path), cpu)
    # The file is weights but for a few megabytes of metadata.
    assert total_bytes(case.arch, case.weights) == pytest.approx(CATALOG[name].size, rel=0.02)


def test_mixed_widths() -> None:
    weights = parse_format("int4,attention=fp8,head=int4")
    assert [weights.format_of(role) for role in ("down", "qkv", "output", "head", "embed")] == [
        "int4",
        "fp8",
        "fp8",
        "int4",
        "bfloat16",
    ]
    assert parse_format("float32").format_of("embed") == "float32"
    for bad in ("int3", "fp8,int4", "fp8,nose=int4", ""):
        with pytest.raises(OptionError):
            parse_format(bad)


def test_the_published_gpt_oss_by_hand() -> None:
    """36 layers of 4 of 128 experts in MXFP4 (4.25 bits), all else in BF16, at one sequence."""
    arch, weights = known("gpt-oss-120b")
    time = step_time(Case(arch, weights), DEVICES["H100"], decode_step(arch, 1, 2048))
    experts = 36 * 4 * 3 * 2880 * 2880 * 4.25 / 8
    rest = 36 * (2880 * 64 * (64 + 16) + 64 * 64 * 2880 + 2880 * 128) + 2880 * 201_088
    read = sum(each.count.weight_bytes * each.count.calls for each in time.operators)
    assert read == pytest.approx(experts + rest * 2, rel=0.001)


def test_what_does_not_fit_is_said() -> None:
    for case, hardware, step in (
        (Case(*known("deepseek-v3")), "H100", None),
        (Case(known("llama-3.1-405b")[0]), "THOR", None),
        (Case(LLAMA_8B), "H200", decode_step(LLAMA_8B, 4096, 100_000)),
    ):
        step = step or decode_step(case.arch, 1, 1024)
        with pytest.raises(DoesNotFit, match=r"GB of weights and .* GB of KV"):
            verify_fits(case, DEVICES[hardware], step)
    large = known("llama-3.1-70b")[0]
    with pytest.raises(DoesNotFit, match="--layout TP2"):
        verify_fits(Case(large), DEVICES["H100"], decode_step(large, 1, 9))
    verify_fits(Case(LLAMA_8B), DEVICES["H100"], decode_step(LLAMA_8B, 64, 2048))
    for given in (["--context", "5000000"], ["--prompt", "200000"]):
        done = CliRunner().invoke(command, ["llama-3.1-8b", "--hardware", "H200", *given])
        assert isinstance(done.exception, OptionError), done.output


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_has_a_source_and_a_price(name: str) -> None:
    device = find_hardware(name.lower())
    assert device.source
    assert name in PRICES
    assert device.rates["bfloat16"] > device.rates["float32"]
    assert 0.1e12 < device.bandwidth < 9e12


def test_devices_of_other_drivers_names() -> None:
    for name, key in (
        ("NVIDIA L4", "L4"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA H20", "H20"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H200 NVL", "H200"),
    ):
        assert gpu_named(name) is DEVICES[key]
    assert gpu_named("NVIDIA L40") is None


def test_hardware_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    mine = {"name": "mine", "rates": {"bfloat16": 1e14}, "bandwidth": 1e12, "memory": 5 * 10**10}
    file.write_text(json.dumps(mine))
    done = CliRunner().invoke(command, ["llama-3.1-8b", "--hardware", str(file)])
    assert done.exit_code == 0, done.output
    for wrong, why in (
        ({"bandwith": 1.0}, "bandwith"),
        ({"memory": -1}, "above 0"),
        ({"rates": {}}, "above 0"),
    ):
        file.write_text(json.dumps({**mine, **wrong}))
        with pytest.raises(OptionError, match=why):
            find_hardware(str(file))


def test_the_limit_has_no_traffic_that_fusing_saves() -> None:
    """8B, a prompt of 8,192 on H100: 129 TFLOP and attention at 989 TFLOP/s, nothing beside."""
    step = prefill_step(LLAMA_8B, [8192])
    time = step_time(Case(LLAMA_8B), DEVICES["H100"], step)
    flops = sum(
        each.count.flops * each.count.calls
        for each in time.operators
        if each.count.kind != "vector"
    )
    assert time.limit_seconds == pytest.approx(flops / 989e12, rel=1e-9)
    assert time.limit_seconds == pytest.approx(0.1309, rel=0.01)


def test_no_recorded_step_is_above_its_limit() -> None:
    """A machine that was calibrated while others worked: ceilings a third of the true ones."""
    case = Case(QWEN_05B, parse_format("int4"), "float32", "float32")
    true = replace(
        DEVICES["H200"],
        rates={"float32": 2e11, "int8": 9e11},
        bandwidth=3e10,
        kind="cpu",
        cache_bandwidth=9e10,
        tile_rows=1,
        efficiency=CPU_EFFICIENCY,
    )
    shapes = [([c] * b, [1] * b) for b in (1, 4, 16) for c in (64, 600, 2000)]
    shapes += [([0], [n]) for n in (16, 128, 512)]
    model = StepModel(case, true)
    records = [
        StepRecord(starts, counts, len(starts), model.seconds(compose(QWEN_05B, starts, counts)))
        for starts, counts in shapes
    ]
    low = replace(
        true, bandwidth=1e10, cache_bandwidth=3e10, rates={"float32": 1.1e10, "int8": 4e11}
    )
    steps = [compose(QWEN_05B, *shape) for shape in shapes]

    def above(hardware: Any) -> list[float]:
        pairs = zip(steps, records, strict=True)
        return [step_time(case, hardware, s).limit_seconds / r.seconds for s, r in pairs]

    fitted = low.fitted(fit_efficiency(case, low, records).efficiency)
    assert max(above(fitted)) > 1.3
    made = honest(case, fitted, records)
    assert max(above(made)) <= 1 + 1e-9
    assert "raised" in made.efficiency.source
    for step in steps:
        assert StepModel(case, made).seconds(step) == pytest.approx(
            StepModel(case, fitted).seconds(step), rel=0.03
        )
    assert honest(case, true, records) is true


def test_layouts_share_what_they_hold() -> None:
    whole = Case(LLAMA_8B)
    step = decode_step(LLAMA_8B, 600, 2048)
    with pytest.raises(DoesNotFit):
        verify_fits(whole, DEVICES["H100"], step)
    verify_fits(replace(whole, layout=Layout(4)), DEVICES["H100"], step)
