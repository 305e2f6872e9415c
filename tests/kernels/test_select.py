"""Composing operators from backends: every choice and refusal has its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.base.errors import OptionError
from headrace.kernels.backend import Question
from headrace.kernels.cpu.backend import CpuBackend
from headrace.kernels.operators import StepLimits
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.reference_backend import ReferenceBackend
from headrace.kernels.select import choose, known_backends
from headrace.kernels.weights import BlockWeight, DenseWeight
from oracle import graphs

QUESTION = Question("cpu", "float32", "float32", graphs.decoder(), frozenset({"Q4_K"}))


class FastOperators(ReferenceOperators):
    name = "fast"

    def prepare(self, weight, role, dequantise):
        return weight

    def compile(self, plain, limits):
        return "program"


class Fast:
    name = "fast"

    def __init__(self, *operators: str) -> None:
        self.operators = operators
        self.built = 0

    def supports(self, operator: str, question: Question) -> str | None:
        return None if operator in self.operators else f"has no {operator}"

    def build(self, question: Question) -> FastOperators:
        self.built += 1
        return FastOperators(getattr(torch, question.dtype))


def test_the_reference_is_always_there() -> None:
    assert known_backends()[-1].name == "ref"
    operators, decisions = choose(QUESTION, "ref")
    assert operators.name == "ref"
    *served, cost = [decision.value for decision in decisions]
    assert served == ["ref"] * len(graphs.kinds(QUESTION.graph))
    assert cost == "PyTorch"


def test_each_operator_goes_to_the_first_that_can() -> None:
    fast = Fast("linear")
    operators, decisions = choose(QUESTION, backends=[fast, ReferenceBackend()])
    served = {decision.name: (decision.value, decision.reason) for decision in decisions}
    assert served["kernels.linear"] == ("fast", "first choice for this device")
    assert served["kernels.embed"] == ("ref", "fast: has no embed")
    assert operators.name == "fast+ref"
    assert fast.built == 1
    assert operators.linear.__self__.name == "fast"
    assert operators.embed.__self__.name == "ref"


def test_weights_are_prepared_by_who_will_use_them() -> None:
    operators, _ = choose(QUESTION, backends=[Fast("linear"), ReferenceBackend()])
    blocks = BlockWeight("Q4_K", torch.zeros(1, 144, dtype=torch.uint8), (1, 256))
    dense = DenseWeight(torch.zeros(1, 256))
    assert operators.prepare(blocks, "linear", lambda *_: dense) is blocks
    assert isinstance(operators.prepare(blocks, "embed", lambda *_: dense), DenseWeight)


def test_programs_need_one_provider_for_all() -> None:
    arguments = (None, StepLimits(1, 1, 8))
    alone, _ = choose(QUESTION, backends=[Fast(*graphs.kinds(QUESTION.graph)), ReferenceBackend()])
    assert alone.compile(*arguments) == "program"
    mixed, _ = choose(QUESTION, backends=[Fast("linear"), ReferenceBackend()])
    assert mixed.compile(*arguments) is None


def test_what_one_kind_cannot_do_takes_no_other_with_it() -> None:
    """Heads of 24 numbers have no pages of the CPU kernels; everything else is served by them."""
    if CpuBackend().supports("linear", QUESTION) is not None:
        pytest.skip("no CPU kernels here")
    question = replace(QUESTION, graph=graphs.decoder(24))
    operators, decisions = choose(question)
    served = {decision.name: (decision.value, decision.reason) for decision in decisions}
    refused = "cpu: the head size 24 is no multiple of 16"
    assert served["kernels.attend"][0] == served["kernels.write"][0] == "ref"
    assert served["kernels.attend"][1].startswith(refused)
    assert {served[f"kernels.{kind}"][0] for kind in ("embed", "linear", "norm", "gated")} == {
        "cpu"
    }
    assert "slower" in served["reference"][1]
    assert operators.name == "cpu+ref"


def test_a_wish_is_kept_or_refused() -> None:
    backends = [Fast("linear"), ReferenceBackend()]
    _, decisions = choose(QUESTION, "fast", backends)
    assert {decision.value for decision in decisions} == {"fast", "ref", "PyTorch"}
    with pytest.raises(OptionError, match="fast: has no embed") as raised:
        choose(QUESTION, "fast", [Fast(), ReferenceBackend()])
    assert raised.value.param == "kernels"
    with pytest.raises(OptionError, match="there are: auto, fast, ref"):
        choose(QUESTION, "triton", backends)
