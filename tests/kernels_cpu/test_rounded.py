"""The level that rounds activations of dense bf16 products: held against the instruction's order.

`summed` is that order in numpy, a chain over K by twos; every product here is equal to it bit for
bit, whatever its rows, panels and threads, so that rows and cuts of a prompt are tested with it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.kernels.arrays import tensor
from headrace.kernels.cpu import library
from headrace.kernels.cpu.backend import CpuBackend, PairsBackend
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.weights import DenseWeight, StackedWeight
from tiny import bytewise

ROWS = (1, 2, 3, 12, 13, 24, 35, 96, 97, 200)
SHAPES = ((32, 16), (96, 1), (896, 50), (64, 300), (1056, 33))
"""(K, outputs): one block of K and several, odd numbers of panels, tails."""
Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def rounding() -> CpuOperators:
    """Operators of two threads at the level."""
    if library.level(library.PAIRS) is None:
        pytest.skip(f"no level {library.PAIRS} here: {library.refused(library.PAIRS)}")
    return CpuOperators(2, library.PAIRS)


def flushed(x: Floats) -> Floats:
    """Numbers below the least normal one as zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def fused(product: npt.NDArray[np.float64], c: Floats) -> Floats:
    """product + c rounded once to float32; a product of two bf16 is exact in float64.

    The sum in float64 is rounded to odd, after which a second rounding is that of the exact sum.
    """
    wide = c.astype(np.float64)
    total = product + wide
    back = total - product
    rest = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    inward = (rest != 0) & np.isfinite(rest) & (np.signbit(rest) != np.signbit(total))
    odd = (bits - inward) | ((rest != 0) & np.isfinite(rest))
    with np.errstate(over="ignore"):
        return odd.view(np.float64).astype(np.float32)


def summed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, K] float32 · weight [outputs, K] bf16, as vdpbf16ps sums: [rows, outputs]."""
    a = flushed(torch.from_numpy(flushed(x.numpy())).bfloat16().float().numpy())
    w = flushed(weight.float().numpy())
    acc = np.zeros((len(a), len(w)), np.float32)
    with np.errstate(invalid="ignore"):
        for k in range(0, a.shape[1], 2):
            for each in (k + 1, k):
                product = a[:, None, each].astype(np.float64) * w[None, :, each]
                acc = flushed(fused(product, acc))
    return torch.from_numpy(acc)


def drawn(rows: int, width: int, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + width + out)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randn(out, width, generator=generator).bfloat16()


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal bits; any NaN is a NaN."""
    got, want = (np.nan_to_num(each.numpy(), nan=1.5).view(np.int32) for each in (one, other))
    assert np.array_equal(got, want)
    assert torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_sums_are_those_of_the_instruction(rounding: CpuOperators, width: int, out: int) -> None:
    x, weight = drawn(max(ROWS), width, out)
    x[0] *= 1e-36  # Products below the least normal number count as none,
    x[1] *= 1e-41  # and so do activations.
    x[2] *= 1e37
    packed = pack(DenseWeight(weight), rounding.team)
    want = summed(x, weight)
    for rows in ROWS:
        same(tensor(rounding.linear(x[:rows], packed, None)), want[:rows])
        same(tensor(rounding.linear(x[-rows:], packed, None)), want[-rows:])
    full = x[3:].double() @ weight.double().T
    scale = x[3:].double().abs() @ weight.double().abs().T
    assert ((want[3:] - full).abs() / scale).max() < 2**-8


def test_one_thread_and_three(rounding: CpuOperators) -> None:
    x, weight = drawn(200, 96, 300)
    packed = pack(DenseWeight(weight), rounding.team)
    want = tensor(rounding.linear(x, packed, None))
    for threads in (1, 3):
        same(tensor(CpuOperators(threads, library.PAIRS).linear(x, packed, None)), want)


def test_the_head_finds_the_highest_of_the_same_logits(rounding: CpuOperators) -> None:
    x, weight = drawn(100, 64, 1000)
    packed = pack(DenseWeight(weight), rounding.team)
    want = summed(x, weight)
    for rows in (1, 5, 20, 100):
        same(tensor(rounding.logits(x[:rows], packed, None)), want[:rows])


def test_parts_of_other_kinds_beside(rounding: CpuOperators) -> None:
    x, weight = drawn(150, 96, 70)
    parts = weight[:30], weight[30:].float()
    packed = StackedWeight(tuple(pack(DenseWeight(part), rounding.team) for part in parts))
    plain = pack(DenseWeight(parts[1]), rounding.team)
    for rows in (1, 40, 150):
        got = tensor(rounding.linear(x[:rows], packed, None))
        same(got[:, :30], summed(x[:rows], parts[0]))
        same(got[:, 30:], tensor(CpuOperators(2, "bf16").linear(x[:rows], plain, None)))


def test_widths_that_no_block_fits_are_a_chain(rounding: CpuOperators) -> None:
    """The same numbers as at level bf16."""
    x, weight = drawn(20, 48, 33)
    packed = pack(DenseWeight(weight), rounding.team)
    plain = CpuOperators(2, "bf16")
    same(tensor(rounding.linear(x, packed, None)), tensor(plain.linear(x, packed, None)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_what_is_no_number_stays_in_its_row(rounding: CpuOperators, value: float) -> None:
    """The largest float32 becomes infinite when rounded to bf16."""
    x, weight = drawn(18, 64, 20)
    x[3, 5] = value
    packed = pack(DenseWeight(weight), rounding.team)
    got = tensor(rounding.linear(x, packed, None))
    assert not got[3].isfinite().any()
    same(got, summed(x, weight))


def test_an_engine_of_an_identity_of_its_own(rounding: CpuOperators, tmp_path: Path) -> None:
    """Whatever a prompt's cuts and neighbours, its answers are the same; no other level's name."""
    file = bytewise.make(tmp_path / "model") / "model.safetensors"
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file)
    prompts = [list(range(10, 10 + size)) for size in (3, 40, 150)]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    answers, prints = {}, {}
    for kernels, step_tokens in ((library.PAIRS, 16), (library.PAIRS, 256), ("cpu", 256)):
        options = {"threads": 2, "kv_memory": "2MiB", "step_tokens": step_tokens, "offline": True}
        with LLM(str(file.parent), kernels=kernels, device="cpu", **options) as llm:
            decided = {each.name: each.value for each in llm._built.decisions}
            assert decided["kernels.linear"] == kernels
            prints[kernels] = llm._built.identity.fingerprint
            alone = [llm.generate([prompt], greedy)[0] for prompt in prompts[:1]]
            texts = [*alone, *llm.generate(prompts, greedy)]
            answers[kernels, step_tokens] = [each.outputs[0].token_ids for each in texts]
    assert prints[library.PAIRS] != prints["cpu"]
    cut, whole = answers[library.PAIRS, 16], answers[library.PAIRS, 256]
    assert cut == whole
    assert whole[0] == whole[1]


def test_the_level_serves_by_name_only(rounding: CpuOperators) -> None:
    assert CpuBackend().decisions()[0].value == library.level() != library.PAIRS
    assert PairsBackend().decisions()[0].value == library.PAIRS
    assert library.PAIRS not in library.LEVELS
