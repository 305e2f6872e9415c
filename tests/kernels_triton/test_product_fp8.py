"""Products in e4m3 in the interpreter: exact against the codes, near to the dense product."""

from __future__ import annotations

import pytest
import torch

from headrace.base.errors import OptionError
from headrace.kernels.backend import Question
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.select import choose
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.product_fp8 import (
    Fp8Config,
    merge_fp8,
    product_fp8,
    quantise_rows,
    quantise_weight,
)
from headrace.kernels.triton.table import architecture, multiplies_fp8
from headrace.kernels.weights import DenseWeight, Fp8Weight, StackedWeight
from oracle import graphs


def blocked_weight(out: int, width: int) -> Fp8Weight:
    torch.manual_seed(out)
    scales = torch.rand(-(-out // 128), -(-width // 128)) * 0.02 + 0.01
    return Fp8Weight((torch.randn(out, width) * 20).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize("blocked", [False, True])
def test_quantised_rows(blocked: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 300)
    x[1] = 0.0
    codes, scales = quantise_rows(x, blocked=blocked)
    assert scales.shape == (3, 3 if blocked else 1)
    wide = scales.repeat_interleave(128, 1)[:, :300] if blocked else scales
    # Half a step of the coarsest binade of e4m3.
    assert ((codes.float() * wide - x).abs() <= wide * 16.01).all()
    assert not codes[1].float().any()
    peaks = codes.float().abs().amax(1)
    assert (peaks[[0, 2]] == 448).all()


@pytest.mark.parametrize(("rows", "out", "width"), [(1, 40, 64), (20, 200, 300), (70, 130, 257)])
@pytest.mark.parametrize("blocked", [False, True])
def test_equals_the_product_of_the_codes(rows: int, out: int, width: int, blocked: bool) -> None:
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, width), torch.randn(out)
    weight = blocked_weight(out, width) if blocked else quantise_weight(torch.randn(out, width))
    weight = weight.per_row()
    config = Fp8Config(32, 64)
    y = product_fp8(x, weight, bias, config)
    codes, scales = quantise_rows(x, blocked=weight.blocked)
    wide = scales.repeat_interleave(128, 1)[:, :width] if weight.blocked else scales
    exact = (codes.float() * wide).double() @ weight.values().double().T + bias.double()
    torch.testing.assert_close(y.double(), exact, atol=2e-4, rtol=2e-4)
    alone = product_fp8(x[-1:], weight, bias, config)
    assert torch.equal(alone[0], y[-1])


def test_online_quantisation_keeps_the_product() -> None:
    torch.manual_seed(1)
    ops = TritonOperators(torch.float32, quantise="fp8")
    parts = tuple(DenseWeight(torch.randn(out, 256)) for out in (256, 512))
    weight = ops.prepare(StackedWeight(parts), "linear", None)  # type: ignore[arg-type]
    assert isinstance(weight, Fp8Weight)
    assert weight.shape == (768, 256)
    x = torch.randn(5, 256)
    exact = x @ torch.cat([part.data for part in parts]).T
    error = (ops.linear(x, weight, None) - exact).norm() / exact.norm()
    assert error < 0.05
    for role, kept in (("logits", parts[0]), ("linear", DenseWeight(torch.randn(8, 256)))):
        assert isinstance(ops.prepare(kept, role, None), DenseWeight)  # type: ignore[arg-type]


def test_scales_of_tensors_and_blocks_are_merged_where_they_can() -> None:
    tensor = Fp8Weight(torch.ones(8, 16).to(torch.float8_e4m3fn), torch.full((1, 1), 0.5))
    assert not tensor.blocked
    merged = merge_fp8([tensor.per_row(), quantise_weight(torch.randn(4, 16))])
    assert merged is not None
    assert torch.equal(merged.values()[:8], torch.full((8, 16), 0.5))
    whole = merge_fp8([blocked_weight(128, 256), blocked_weight(40, 256)])
    assert whole is not None
    assert torch.equal(whole.values()[128:], blocked_weight(40, 256).values())
    assert merge_fp8([blocked_weight(40, 256), blocked_weight(128, 256)]) is None
    assert merge_fp8([tensor.per_row(), blocked_weight(256, 16)]) is None


def test_the_reference_and_old_gpus_expand_it() -> None:
    weight = blocked_weight(130, 140)
    made = ReferenceOperators(torch.float32).prepare(weight, "linear", None)  # type: ignore[arg-type]
    assert isinstance(made, DenseWeight)
    assert torch.equal(made.data, weight.values())
    old = TritonOperators(torch.float32, architecture="sm_80")
    assert isinstance(old.prepare(weight, "linear", None), DenseWeight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "has"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_each_device_has_its_row_and_fp8_from_8_9_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    device = torch.device("cuda")
    assert multiplies_fp8(device) == has
    assert architecture(device) == f"sm_{capability[0]}{capability[1]}"
    # What was asked for decides alone, and a CPU (the interpreter) is taken for a new device.
    assert not multiplies_fp8(device, "sm_80")
    assert multiplies_fp8(device, "sm_90")
    assert multiplies_fp8(torch.device("cpu"))


def test_who_cannot_quantise_says_so() -> None:
    question = Question(
        "cpu", "float32", "float32", graphs.decoder(), frozenset({"float32"}), quantise="fp8"
    )
    with pytest.raises(OptionError, match="does not quantise weights to fp8"):
        choose(question)
    _, decisions = choose(question, "triton")
    assert {decision.value for decision in decisions} == {"triton"}
