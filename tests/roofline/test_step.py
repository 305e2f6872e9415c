"""Step times against published ceilings, and efficiencies recovered from recorded steps."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest, NotFound, OptionError
from headrace.base.layout import Layout
from headrace.roofline.composition import compose, decode_step, prefill_step, verify_step
from headrace.roofline.counts import Case
from headrace.roofline.efficiency import CPU_EFFICIENCY, Curve, Efficiency, of_products
from headrace.roofline.fit import StepRecord, fit_efficiency, prediction_errors, read_records
from headrace.roofline.hardware import DEVICES, Hardware
from headrace.roofline.hardware_files import find_hardware, load_hardware, save_hardware
from headrace.roofline.prices import read_prices
from headrace.roofline.step import StepModel, step_time
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

from .archs import ALL, LLAMA_8B, QWEN_05B

SLOW = Hardware(
    "slow",
    {"float32": 200e9, "int8": 900e9},
    20e9,
    16 * 10**9,
    cache=32 * 2**20,
    cache_bandwidth=100e9,
    kind="cpu",
)


def test_the_ceiling_of_llama_8b_on_h200() -> None:
    # FIELD.md K: batch 1, weights alone, about 320 tokens/s in bf16 and 600 in fp8.
    step = decode_step(LLAMA_8B, 1, 1)
    bf16 = step_time(Case(LLAMA_8B), DEVICES["H200"], step)
    fp8 = step_time(Case(LLAMA_8B, WeightBytes("fp8", formats=WIDE_ENDS)), DEVICES["H200"], step)
    assert 1 / bf16.limit_seconds == pytest.approx(320, rel=0.03)
    assert 1 / fp8.limit_seconds == pytest.approx(600, rel=0.05)
    assert bf16.bound == "memory"
    assert bf16.seconds > bf16.limit_seconds


def test_what_binds_changes_with_the_batch() -> None:
    case, device = Case(LLAMA_8B), DEVICES["H100"]
    few = step_time(case, device, decode_step(LLAMA_8B, 1, 500))
    prompt = step_time(case, device, prefill_step(LLAMA_8B, [8192]))
    gate = {
        name: next(o for o in step.operators if o.count.label == "gate_up").bound
        for name, step in (("few", few), ("prompt", prompt))
    }
    assert gate == {"few": "memory", "prompt": "compute"}
    assert prompt.bound == "compute"


def test_launches_are_a_part_of_the_estimate() -> None:
    """Much of a step that has next to nothing to do, little of a long prefill."""
    model = StepModel(Case(LLAMA_8B), DEVICES["H200"])
    tiny = model.estimate(decode_step(LLAMA_8B, 1, 1))
    long = model.estimate(prefill_step(LLAMA_8B, [8192]))
    whole = model.time(prefill_step(LLAMA_8B, [8192]))
    assert DEVICES["H200"].efficiency.step_seconds < tiny.launch < tiny.seconds
    assert tiny.launch / tiny.seconds > 3 * long.launch / long.seconds
    assert long.seconds == pytest.approx(whole.seconds)


def test_quantised_products_on_a_cpu_run_in_int8() -> None:
    assert SLOW.compute_type("Q4_K", "float32") == "int8"
    assert SLOW.compute_type("float32", "float32") == "float32"
    assert DEVICES["H100"].compute_type("int4", "bfloat16") == "bfloat16"
    assert DEVICES["A100"].compute_type("fp8", "bfloat16") == "bfloat16"


def verifying(hardware: Hardware, weights: WeightBytes) -> list[float]:
    """Seconds of a step of one sequence by its rows, from none on."""
    model = StepModel(Case(QWEN_05B, weights), hardware)
    steps = (verify_step(QWEN_05B, 1, 512, drafts) for drafts in range(13))
    return [0.0, *(model.seconds(step) for step in steps)]


FAST = Hardware("fast", {"float32": 1e15, "int8": 1e15}, 20e9, 16 * 10**9, kind="cpu")


@pytest.mark.parametrize(("format", "rate", "share"), [("float32", 1e9, 0.95), ("Q8_0", 3e9, 0.5)])
def test_products_reach_the_share_of_their_own_type(format: str, rate: float, share: float) -> None:
    """Counted: the FLOPs of a prompt's products over the type's rate and its share."""
    cpu = Hardware("C", {"float32": 1e9, "int8": 3e9}, 1e15, 2**36, kind="cpu")
    cpu = cpu.fitted(of_products(0.8, 0.5, 0.95))
    case = Case(QWEN_05B, WeightBytes(format), "float32", "float32")
    found = step_time(case, cpu, prefill_step(QWEN_05B, [64]))
    products = [one for one in found.operators if one.count.kind == "product"]
    many = [one for one in products if one.count.rows == 64]
    assert many
    for one in many:
        counted = one.count.flops * one.count.calls / (rate * share)
        assert one.seconds == pytest.approx(counted, rel=1e-3), one.count.label


def test_a_step_that_admits_has_a_fixed_price_of_its_own() -> None:
    cpu = Hardware("C", {"float32": 1e12, "int8": 3e12}, 1e11, 2**36, kind="cpu")
    case = Case(QWEN_05B, WeightBytes("Q8_0"), "float32", "float32")
    known = cpu.fitted(replace(CPU_EFFICIENCY, admitting_seconds=0.5))
    plain = cpu.fitted(replace(CPU_EFFICIENCY, admitting_seconds=0.0))
    for step, more in (
        (decode_step(QWEN_05B, 4, 100), 0.0),
        (verify_step(QWEN_05B, 4, 100, 3), 0.0),
        (prefill_step(QWEN_05B, [17]), 0.5),
        (compose(QWEN_05B, [0, 50], [9, 1], 2), 0.5),
    ):
        assert step_time(case, known, step).seconds - step_time(
            case, plain, step
        ).seconds == pytest.approx(more)
        found = StepModel(case, known).seconds(step)
        assert found == pytest.approx(step_time(case, known, step).seconds)
    records = [
        StepRecord([0], [n], 1, StepModel(case, known).seconds(prefill_step(QWEN_05B, [n])))
        for n in (5, 17, 64)
    ]
    assert prediction_errors(case, known, records)[1] < 1e-6


def test_rows_of_one_pass_wait_for_their_weights_and_thirteen_do_not() -> None:
    """With a memory that a curve of many rows reads at half its speed, the thirteenth row costs
    more than all before it."""
    curves = {"product/few": Curve(1.0, 1.0), "product/many": Curve(1.0, 0.5)}
    hardware = replace(FAST, efficiency=replace(Efficiency(), curves=curves))
    seconds = verifying(hardware, WeightBytes("Q4_K"))
    assert seconds[12] < 1.15 * seconds[1]
    assert seconds[13] > 1.8 * seconds[12]


def test_up_to_four_rows_spare_the_low_bits_of_a_head() -> None:
    """On a CPU; a head of 8.5 bits, of which 3 are behind the bounds."""
    weights = WeightBytes("Q4_K", formats={"head": "Q8_0"})
    seconds = verifying(FAST, weights)
    low = QWEN_05B.vocab_size * QWEN_05B.hidden * 3 / 8
    row = seconds[4] - seconds[3]
    spared = low / FAST.bandwidth / FAST.efficiency.product_memory
    assert seconds[5] - seconds[4] == pytest.approx(spared + row, rel=0.02)
    device = verifying(replace(FAST, kind="cuda"), weights)
    assert device[5] - device[4] < 2 * (device[4] - device[3])


def test_more_ranks_are_faster_but_not_twice() -> None:
    times = [
        step_time(
            Case(LLAMA_8B, layout=Layout(tp)), DEVICES["H100"], decode_step(LLAMA_8B, 16, 2000)
        ).seconds
        for tp in (1, 2, 4)
    ]
    assert times[0] > times[1] > times[2] > times[0] / 4


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_limit_is_never_above_the_prediction(name: str) -> None:
    arch = ALL[name]
    for device in DEVICES.values():
        for step in (decode_step(arch, 8, 300), prefill_step(arch, [100, 900])):
            time = step_time(Case(arch), device, step)
            assert 0 < time.limit_seconds < time.seconds
            for operator in time.operators:
                assert operator.limit_seconds <= operator.seconds
            assert StepModel(Case(arch), device).seconds(step) == pytest.approx(time.seconds)


def recorded(truth: Efficiency, noise: float, count: int, seed: int) -> list[StepRecord]:
    rng = random.Random(seed)
    case, device = Case(QWEN_05B, WeightBytes("Q4_K"), "float32", "float32"), SLOW.fitted(truth)
    records = []
    for _ in range(count):
        entries = [
            (rng.randrange(1, 2000), 1) if rng.random() < 0.6 else (0, rng.randrange(8, 600))
            for _ in range(rng.choice((1, 1, 2, 4, 8, 16)))
        ]
        starts, counts = [s for s, _ in entries], [c for _, c in entries]
        seconds = StepModel(case, device).seconds(compose(QWEN_05B, starts, counts))
        records.append(
            StepRecord(starts, counts, len(entries), seconds * rng.lognormvariate(0, noise))
        )
    return records


def test_efficiencies_are_recovered_from_steps() -> None:
    truth = Efficiency(0.31, 0.62, 0.2, 0.4, 0.5, 0.75, 0.8, 8e-6, 3e-3)
    case = Case(QWEN_05B, WeightBytes("Q4_K"), "float32", "float32")
    fit = fit_efficiency(case, SLOW, recorded(truth, 0.02, 120, 1))
    assert fit.median_error < 0.03
    assert fit.efficiency.product_compute == pytest.approx(0.31, rel=0.1)
    assert fit.efficiency.curves["product/few"].memory == pytest.approx(0.62, rel=0.15)
    # Steps that the fit has not seen.
    fresh = recorded(truth, 0.0, 40, 2)
    middle, worst = prediction_errors(case, SLOW.fitted(fit.efficiency), fresh)
    assert middle < 0.03
    assert worst < 0.15
    before, _ = prediction_errors(case, SLOW, fresh)
    assert before > 0.2, "the assumed efficiencies were wrong, so the fit did something"


def test_a_stalled_step_does_not_bend_the_others() -> None:
    """The machine stood still during the longest of thirty steps."""
    truth = Efficiency(0.31, 0.62, 0.2, 0.4, 0.5, 0.75, 0.8, 8e-6, 3e-3)
    case = Case(QWEN_05B, WeightBytes("Q4_K"), "float32", "float32")
    steps = recorded(truth, 0.0, 30, 1)
    longest = max(range(30), key=lambda place: steps[place].seconds)
    stalled = replace(steps[longest], seconds=2.5 * steps[longest].seconds)
    fresh = recorded(truth, 0.0, 40, 2)
    worst = []
    for given in (steps, [*steps[:longest], stalled, *steps[longest + 1 :]]):
        fitted = SLOW.fitted(fit_efficiency(case, SLOW, given).efficiency)
        worst.append(prediction_errors(case, fitted, fresh)[1])
    assert worst[1] < worst[0] + 0.05


def test_records_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = {"starts": [0], "counts": [5], "samples": 1, "seconds": 0.5}
    path.write_text(json.dumps(line) + "\n")
    assert read_records(path) == [StepRecord([0], [5], 1, 0.5)]
    path.write_text(json.dumps(line) + "\n{half")
    with pytest.raises(InvalidRequest, match="line 2"):
        read_records(path)
    with pytest.raises(InvalidRequest, match="at least 3"):
        fit_efficiency(Case(QWEN_05B), SLOW, [])


def test_hardware_by_name(tmp_path: Path) -> None:
    assert find_hardware("h200") is DEVICES["H200"]
    assert find_hardware("rtx-4090") is DEVICES["RTX4090"]
    assert find_hardware("Jetson Thor").name == "THOR"
    with pytest.raises(NotFound, match="H200"):
        find_hardware("h9000")
    with pytest.raises(NotFound, match="--calibrate"):
        find_hardware("this", tmp_path / "absent.json")
    path = tmp_path / "deep" / "machine.json"
    save_hardware(replace(SLOW, efficiency=Efficiency(0.5)), path)
    assert find_hardware("this", path) == replace(SLOW, efficiency=Efficiency(0.5))
    for name in ("a\ntouch x", "", 3):
        path.write_text(json.dumps(asdict(replace(SLOW, name=name))))  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="name must be printable"):
            load_hardware(path)
    for text in ("{half", "[" * 100_000, '{"name": ' * 100_000):
        path.write_text(text)
        with pytest.raises(OptionError, match="calibrate"):
            load_hardware(path)
        with pytest.raises(InvalidRequest, match="no price table"):
            read_prices(path)
