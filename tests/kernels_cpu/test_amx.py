"""The AMX level: dense products of bf16 through tiles, as instructions and in plain C++.

`kernels_amx.h` is compiled twice: over instructions (level amx, by name where CPU and system allow)
and, in a test build, over tiles in plain C++ that refuse what the architecture refuses (level
amx-emulated, chosen by name only). Both must give the same bits, which this machine can only say
if it has AMX; the emulation alone is held against float64 everywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from building import built

from headrace.kernels.arrays import tensor
from headrace.kernels.cpu import library
from headrace.kernels.cpu.backend import AmxBackend, CpuBackend, RoundedBackend
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.weights import DenseWeight, StackedWeight

ROOT = Path(__file__).parents[2]
EMULATED = "amx-emulated"
UNDER_TEST = os.environ.get("KERNELS_LEVEL_UNDER_TEST")
LEVEL = UNDER_TEST if UNDER_TEST == EMULATED else library.TILES
ROWS = (1, 2, 15, 16, 17, 32, 33, 64, 100, 270)
SHAPES = ((32, 16), (96, 1), (896, 50), (2048, 300), (1056, 33))
"""(K, outputs): one block of K and several parts of it, odd numbers of panels, tails."""


@pytest.fixture(scope="module")
def tiles() -> CpuOperators:
    """Operators of two threads over tiles."""
    if library.level(LEVEL) is None:
        assert LEVEL != EMULATED
        pytest.skip(f"no level amx here: {library.tiles_refused()}")
    return CpuOperators(2, LEVEL)


def drawn(rows: int, width: int, out: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 7 + width + out)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randn(out, width, generator=generator).bfloat16()


def cut(x: torch.Tensor) -> torch.Tensor:
    """Activations as the tiles see them, in float64: the sum of two bf16 numbers."""
    high = x.bfloat16()
    return high.double() + (x - high.float()).bfloat16().double()


@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_the_sums_of_two_pieces(tiles: CpuOperators, width: int, out: int) -> None:
    x, weight = drawn(max(ROWS), width, out)
    bias = torch.randn(out)
    packed = pack(DenseWeight(weight), tiles.team)
    got = tensor(tiles.linear(x, packed, bias))
    want = cut(x) @ weight.double().T + bias
    scale = x.double().abs() @ weight.double().abs().T
    assert ((got - want).abs() / scale).max() < 4e-7  # The sums' own roundings.
    full = x.double() @ weight.double().T + bias
    assert ((got - full).abs() / scale).max() < 2**-16
    for rows in ROWS:  # A row's bits depend on no other row.
        assert torch.equal(tensor(tiles.linear(x[:rows], packed, bias)), got[:rows])
        last = tensor(tiles.linear(x[-rows:], packed, bias))
        assert torch.equal(last, got[-rows:])


def test_activations_that_are_rounded_once() -> None:
    if library.level(library.ROUNDED) is None:
        pytest.skip(f"no level amx-bf16 here: {library.tiles_refused()}")
    ops = CpuOperators(2, library.ROUNDED)
    for width, out in SHAPES:
        x, weight = drawn(40, width, out)
        packed = pack(DenseWeight(weight), ops.team)
        got = tensor(ops.linear(x, packed, None))
        want = x.bfloat16().double() @ weight.double().T
        scale = x.double().abs() @ weight.double().abs().T
        assert ((got - want).abs() / scale).max() < 4e-7
        for rows in (1, 16, 17, 40):
            assert torch.equal(tensor(ops.linear(x[:rows], packed, None)), got[:rows])


def test_the_head_finds_the_highest_of_the_same_logits(tiles: CpuOperators) -> None:
    x, weight = drawn(20, 64, 1000)
    packed = pack(DenseWeight(weight), tiles.team)
    logits = tensor(tiles.logits(x, packed, None))
    for rows in (1, 5, 20):
        assert torch.equal(tensor(tiles.logits(x[:rows], packed, None)), logits[:rows])


def test_parts_of_other_kinds_beside(tiles: CpuOperators) -> None:
    x, weight = drawn(40, 96, 70)
    parts = weight[:30], weight[30:].float()
    packed = StackedWeight(tuple(pack(DenseWeight(part), tiles.team) for part in parts))
    for rows in (1, 40):
        got = tensor(tiles.linear(x[:rows], packed, None))
        torch.testing.assert_close(got, x[:rows] @ weight.float().T, rtol=1e-4, atol=1e-3)


def test_widths_that_no_block_fits_are_a_chain(tiles: CpuOperators) -> None:
    """The same numbers as at level bf16."""
    x, weight = drawn(20, 48, 33)
    packed = pack(DenseWeight(weight), tiles.team)
    plain = CpuOperators(2, "bf16")
    assert torch.equal(tensor(tiles.linear(x, packed, None)), tensor(plain.linear(x, packed, None)))


def test_no_number_stays_in_its_row(tiles: CpuOperators) -> None:
    x, weight = drawn(18, 64, 20)
    clean = tensor(tiles.linear(x, pack(DenseWeight(weight), tiles.team), None))
    x[3, 5] = float("nan")
    got = tensor(tiles.linear(x, pack(DenseWeight(weight), tiles.team), None))
    assert got[3].isnan().all()
    others = [row for row in range(18) if row != 3]
    assert torch.equal(got[others], clean[others])


def test_instructions_and_emulation_give_the_same_bits() -> None:
    if UNDER_TEST != EMULATED or library.level(library.TILES) is None:
        pytest.skip("wants a test build and a CPU with AMX")
    both = [CpuOperators(2, name) for name in (EMULATED, library.TILES)]
    for width, out in SHAPES:
        x, weight = drawn(50, width, out)
        x[0] *= 1e-36  # Products below the least normal number count as none.
        packed = pack(DenseWeight(weight), both[0].team)
        for rows in (1, 7, 50):
            one, other = (tensor(ops.linear(x[:rows], packed, None)) for ops in both)
            assert np.array_equal(one.numpy().view(np.uint32), other.numpy().view(np.uint32))


def test_a_build_for_use_has_no_emulated_tiles() -> None:
    if UNDER_TEST == EMULATED:
        pytest.skip("this one is for tests")
    assert library.level(EMULATED) is None
    assert EMULATED not in library.LEVELS


def test_the_level_serves_by_name_only() -> None:
    why = library.tiles_refused()
    assert (library.level(library.TILES) is None) == (why is not None)
    decision = CpuBackend().decisions()[0]
    assert decision.value == library.level() != library.TILES
    assert ("--kernels amx" in decision.reason) == (why is None)
    if why is None:
        assert AmxBackend().decisions()[0].value == library.TILES
        assert RoundedBackend().decisions()[0].value == library.ROUNDED


def test_the_instructions_are_in_the_library() -> None:
    if library.unbuilt():
        pytest.skip(f"not built: {library.BUILD_ALL}")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    source = b"tdpbf16ps %tmm2, %tmm1, %tmm0\n"
    if subprocess.run(
        ["as", "-o", os.devnull, "-"], input=source, stderr=subprocess.DEVNULL
    ).returncode:
        pytest.skip("the assembler does not know AMX")
    file = Path(library.load()._name)
    command = ["objdump", "-d", "--no-show-raw-insn", str(file)]
    found = subprocess.run(command, capture_output=True, check=True)
    for name in ("ldtilecfg", "tileloadd", "tilezero", "tdpbf16ps", "tilestored", "tilerelease"):
        assert f"\t{name}".encode() in found.stdout, name


@pytest.mark.slow
def test_the_same_on_emulated_tiles() -> None:
    why = library.refused("bf16")
    if why and "not built" not in why:
        pytest.skip(f"{why}, which the level needs beside tiles")
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    build = built(
        "cpu-amx", "-DHEADRACE_TEST_AMX=ON", "-DHEADRACE_KERNELS=bf16", target="headrace_cpu"
    )
    environment = {
        **os.environ,
        "KERNELS_UNDER_TEST": str(build / library.FILE.name),
        "KERNELS_LEVEL_UNDER_TEST": EMULATED,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "-m", "not slow", __file__],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert ran.returncode == 0, (ran.stdout[-4000:], ran.stderr[-4000:])
