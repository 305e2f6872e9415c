"""The library's product of 8-bit numbers where it serves, and our own where it refuses."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.kernels.triton import library
from headrace.kernels.triton.library import TRIED, ScaledProducts, WideProducts
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.product_fp8 import Fp8Config, product_fp8, quantise_weight
from headrace.kernels.weights import DenseWeight, Fp8Weight

real = torch._scaled_mm


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A library as cuBLASLt is on some devices; what it was asked for as (rows, inputs)."""
    asked: list[tuple[int, int]] = []

    def refuses(codes: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append((len(codes), codes.shape[1]))
        if codes.shape[1] > 128 and len(codes) <= 256:
            raise RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul"
            )
        return real(codes, weight, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    return asked


def product(rows: int, width: int, scaled: ScaledProducts | None) -> torch.Tensor:
    torch.manual_seed(width)
    weight = quantise_weight(torch.randn(32, width))
    x = torch.randn(300, width)[:rows]
    return product_fp8(x, weight, None, Fp8Config(), library=scaled)


def test_what_the_library_refuses_is_ours(
    asked: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    scaled = ScaledProducts()
    with caplog.at_level(logging.WARNING, "headrace.kernels"):
        refused = product(18, 256, scaled)
    assert "256 → 32" in caplog.text
    assert asked == [(17, 256)], "one refusal is enough"
    assert torch.equal(refused, product(18, 256, None))
    caplog.clear()
    product(40, 256, scaled)
    assert asked == [(17, 256)], "it was tried before"
    served = product(18, 64, scaled)
    assert (18, 64) in asked
    torch.testing.assert_close(served, product(18, 64, None), rtol=0.02, atol=0.1)
    more = product(300, 256, scaled)
    assert (300, 256) in asked, "of more rows it has other kernels"
    torch.testing.assert_close(more, product(300, 256, None), rtol=0.02, atol=0.2)
    assert not caplog.records


def blocks_as_cublaslt(
    codes: torch.Tensor,
    weight: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Takes scales in the layout that torch's own check asks for (ScaledBlas.cpp), and no other."""
    rows, (width, outs) = len(codes), weight.shape
    assert weight.stride() == (1, width)
    assert (scale_a.shape, scale_a.stride()) == ((rows, width // 128), (1, rows))
    assert (scale_b.shape, scale_b.stride()) == ((width // 128, -(-outs // 128)), (1, width // 128))
    assert not use_fast_accum
    wide = codes.float() * scale_a.repeat_interleave(128, 1)
    spread = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :outs]
    return (wide @ (weight.float() * spread)).to(out_dtype)


def test_blocks_of_many_rows_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def library(codes: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(len(codes))
        return blocks_as_cublaslt(codes, weight, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_scaled_mm", library)
    torch.manual_seed(4)
    weight = Fp8Weight((torch.randn(160, 512) * 20).to(torch.float8_e4m3fn), torch.rand(2, 4))
    x = torch.randn(260, 512)
    ours = product_fp8(x, weight, None, Fp8Config())
    scaled = ScaledProducts()
    theirs = product_fp8(x, weight, None, Fp8Config(), library=scaled)
    assert seen == [*TRIED[False], 260]
    torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02 * float(ours.abs().max()))
    # Few rows are ours, and blocks that some versions pad.
    product_fp8(x[:256], weight, None, Fp8Config(), library=scaled)
    odd = Fp8Weight(weight.data[:, :384].contiguous(), torch.rand(2, 3))
    product_fp8(x[:, :384], odd, None, Fp8Config(), library=scaled)
    assert len(seen) == 3


def test_a_device_without_blocks_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("Invalid scaling configuration")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    weight = Fp8Weight(torch.zeros(128, 512).to(torch.float8_e4m3fn), torch.rand(1, 4))
    scaled, x = ScaledProducts(), torch.randn(300, 512)
    with caplog.at_level(logging.WARNING, "headrace.kernels"):
        for _ in range(2):
            product_fp8(x, weight, None, Fp8Config(), library=scaled)
    assert caplog.text.count("Invalid scaling configuration") == 1


def test_another_error_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> torch.Tensor:
        raise TypeError("another signature")

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    with pytest.raises(TypeError):
        product(18, 64, ScaledProducts())


def test_sizes_that_it_never_serves_are_not_tried(asked: list[tuple[int, int]]) -> None:
    weight = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
    assert not ScaledProducts().serves(Fp8Weight(weight, torch.ones(8, 1)), 20)
    assert not asked


def test_rows_that_must_not_depend_on_others_are_never_the_librarys() -> None:
    class Cuda:
        is_cuda = True

    assert TritonOperators(torch.bfloat16)._library(Cuda()) is not None  # type: ignore[arg-type]
    deterministic = TritonOperators(torch.bfloat16, deterministic=True)
    assert deterministic._library(Cuda()) is None  # type: ignore[arg-type]
    assert min(library.TRIED[True]) > 16, "fewer rows are the skinny product's"


def test_products_into_fp32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked as the library wants it (torch infers the shapes), once where it refuses."""
    wide, single = WideProducts(), torch.float32
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(90, 64).bfloat16()
    rounded = torch.nn.functional.linear(x, weight).float()
    assert torch.equal(wide.linear(x, weight, None, single, None), rounded), "a CPU has none"
    x, weight, home = x.to("meta"), weight.to("meta"), torch.empty(40, 90, device="meta")
    found = wide.linear(x, weight, None, single, None)
    assert (found.shape, found.dtype) == (home.shape, single)
    assert wide.linear(x, weight, None, single, home) is home

    def refuses(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("no such product")

    monkeypatch.setattr(torch, "mm", refuses)
    with caplog.at_level(logging.WARNING, "headrace.kernels"):
        for _ in range(2):
            found = wide.linear(x, weight, None, single, home)
            assert found is not home
            assert (found.shape, found.dtype) == (home.shape, single)
    assert caplog.text.count("no such product") == 1


@pytest.mark.parametrize(("rows", "deterministic"), [(3, False), (20, True), (20, False)])
def test_logits_go_where_they_are_wanted(rows: int, deterministic: bool) -> None:
    torch.manual_seed(1)
    ops = TritonOperators(torch.float32, deterministic=deterministic)
    x, weight = torch.randn(rows, 64), DenseWeight(torch.randn(80, 64))
    home = torch.full((rows, 80), torch.nan)
    found = ops.logits(x, weight, 5.0, home)
    assert torch.equal(found, ops.logits(x, weight, 5.0))
    # On a CPU the library gives a tensor of its own, which the graph's last step copies.
    assert (found.data_ptr() == home.data_ptr()) == (deterministic or rows <= 16)
