"""The price of a step whose texts attend to encoded inputs: a Whisper's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.base.encodings import EncodingName, EncodingStart, SealedHandle
from headrace.base.groups import cross_groups, group_bytes
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan, RequestSpec
from headrace.base.step import Admission, StepPlan
from headrace.engine.loop.prediction import StepPredictor
from headrace.models.whisper import WhisperArch, describe_decoder, describe_encoder
from headrace.roofline.composition import compose
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import count_step
from headrace.roofline.slices import least_seconds, part_seconds, part_work
from headrace.roofline.step import StepModel
from headrace.roofline.weights import WeightBytes

BASE = WhisperArch(512, 6, 6, 80, 51_865)
CASE = Case(BASE.text, WeightBytes("Q8_0"), "float32", "int8")
CPU = replace(DEVICES["H100"], kind="cpu", rates={"float32": 1e11, "int8": 5e11}, bandwidth=3e10)


def cross_bytes(rows: int) -> int:
    return group_bytes(cross_groups(describe_decoder(BASE), "int8", rows), 1)


def test_a_step_is_the_sum_over_its_graph() -> None:
    """Beside closed sums: matrix by matrix."""
    users, seen = 4, [1_500, 700, 700, 20]
    counts = count_step(CASE, compose(CASE.arch, [100] * users, [1] * users, inputs=seen))
    # Four and two products of both attentions (K and V of the sound are there), the feed-forward,
    # the head.
    numbers = 6 * (4 + 2 + 8) * 512**2 + 51_865 * 512
    products = [one for one in counts if one.kind == "product"]
    assert sum(one.flops * one.calls for one in products) == users * 2 * numbers
    read = sum(one.weight_bytes * one.calls for one in products)
    assert read == pytest.approx(numbers * 34 / 32, rel=1e-6)
    (across,) = [one for one in counts if one.label == "attention/across"]
    assert across.calls == 6
    assert across.flops == sum(seen) * BASE.heads * (4 * 64 + 5)
    assert across.kv_bytes * 6 == sum(map(cross_bytes, seen))
    (own,) = [one for one in counts if one.label == "attention"]
    assert own.flops == 101 * users * BASE.heads * (4 * 64 + 5)


def test_a_prompt_sees_all_of_its_input_with_each_token() -> None:
    step = compose(CASE.arch, [0, 30], [30, 1], inputs=[1_500, 100])
    assert step.across == (30 * 1_500 + 100, 1_600, 100)
    assert compose(CASE.arch, [0], [4]).across == (4 * 1_500, 1_500, 0), "a whole window"


def plan(units: int, *, slices: int = 0) -> StepPlan:
    """A decode of a text that attends to an input of so many units, beside slices of another."""
    name = EncodingName("", b"a")
    source = SealedHandle(0, 0, b"", 1, 1)
    span = InputSpan(0, 0, "sound", b"a", source, units=units)
    spec = RequestSpec(SamplingParams(), 0, inputs=(span,))
    made = StepPlan(1, [3], [40], [1], [True], admitted=[Admission(3, "a", [1] * 41, 41, 0, spec)])
    if slices:
        made.encodings.append(EncodingStart(0, name, source, 1_500))
        made = replace(
            made,
            rows=[3, 0],
            starts=[40, 0],
            counts=[1, slices],
            samples=[True, False],
            parts=(0, 1),
        )
    return made


def test_a_plan_is_priced_by_the_inputs_of_its_rows_and_its_slices() -> None:
    predict = StepPredictor(StepModel(CASE, CPU))
    predict.slices = lambda units: 1e-6 * units
    long, short = predict(plan(1_500)), predict(plan(100))
    assert short.seconds < long.seconds
    assert long.bytes - short.bytes == pytest.approx(cross_bytes(1_400))
    both = predict(plan(1_500, slices=2))
    assert both.seconds == pytest.approx(long.seconds + 3e-3)


def test_eight_bits_are_cheaper_to_encode_with_and_no_quicker_than_the_limit() -> None:
    graph = describe_encoder(BASE)
    coded, wide = (part_seconds(graph, CPU, 1_500, coded=coded) for coded in (True, False))
    least = least_seconds(one.floor(CPU) for one in part_work(graph, 1_500, coded=True))
    assert least < coded < wide
