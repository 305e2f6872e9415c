"""Reading machine code, and what follows from its figures. No kernel is compiled here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_dry
import gpu_ptx
import gpu_sass
from gpu_aot import Compiled
from gpu_loops import Loop, main_loop, warp_bytes
from gpu_sass import KINDS, Code, count_instructions, resident_blocks

LISTING = """
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/               @P1 LDGSTS.E.BYPASS.128 [R7], desc[UR6][R2.64] ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0040*/              @UP0 UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8] ;
        /*0050*/                   STL.64 [R1], R2 ;
        /*0060*/                   LDL R2, [R1+0x4] ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0080*/                   BRA `(.L_x_1) ;
.L_x_1:
"""


def test_instructions_are_counted_by_kind() -> None:
    found = count_instructions(LISTING)
    assert found["all"] == 9
    assert found["spill"] == 2
    assert found["warpgroup"] == found["tensor memory"] == found["HMMA"] == 1
    assert found["asynchronous copy"] == found["global load"] == 1


def test_what_adds_nothing_is_no_fused_multiply_add() -> None:
    """Pairs of numbers as Triton 3.6 has them multiplied for sm_100, and a sum fused with that."""
    products = [
        "FFMA2 R70, R72.F32x2.HI_LO, R70.F32x2.HI_LO, RZ.F32 ;",
        "FFMA R4, R5, R6, -RZ ;",
        "FFMA2 R10, R10.F32x2.HI_LO, R35.reuse.F32, R52.F32x2.HI_LO ;",
        "FFMA R4, RZ, R6, R7 ;",
    ]
    lines = [f"        /*{16 * at:04x}*/    {text}" for at, text in enumerate(products)]
    found = count_instructions("\n".join(lines))
    assert (found["fused multiply-add"], found["all"]) == (2, 4)


def test_resident_blocks_by_what_is_scarce() -> None:
    assert resident_blocks("sm_90", 32, 4, 0) == 16  # warps
    assert resident_blocks("sm_90", 255, 8, 0) == 1  # registers
    assert resident_blocks("sm_90", 96, 4, 39_168) == 5  # both
    assert resident_blocks("sm_80", 64, 4, 80 * 1024) == 2  # shared memory
    assert resident_blocks("sm_90", 64, 4, 240 * 1024) == 0
    assert resident_blocks("sm_100", 64, 4, 1024, 256) == 2  # tensor memory


def test_a_product_that_the_compiler_made_nothing_of_is_a_fault() -> None:
    """Triton's result for sm_100 with 5 and 6 bits at 128 x 128 on eight warps had 16
    instructions."""
    counts = dict.fromkeys((*KINDS, "all"), 0) | {"all": 16}
    step = gpu_dry.STEPS[2]
    for kernel, wanted in (("product_packed._product_kernel", 1), ("norm._norm_kernel", 0)):
        compiled = Compiled(kernel, "sm_100", 8, 3, {}, 1024, Code(4, 0, counts), 0.0)
        assert len(list(gpu_dry.find_faults(compiled, step))) == wanted
        compiled.wide = True
        assert not list(gpu_dry.find_faults(compiled, step)), "fp32 is multiplied without them"


def test_tensor_memory_that_is_not_there_is_a_fault() -> None:
    """Eight sums of 128 x 64 and their operands, as 6-bit codes had them at 256 rows."""
    counts = dict.fromkeys((*KINDS, "all"), 0) | {"tensor memory": 16}
    kernel, code = "product_packed._product_kernel", Code(64, 0, counts)
    for columns, wanted in ((512, 0), (528, 1)):
        compiled = Compiled(kernel, "sm_100", 8, 3, {}, 1024, code, 0.0, columns=columns)
        faults = list(gpu_dry.find_faults(compiled, gpu_dry.STEPS[2]))
        assert [fault.startswith(f"needs {columns} columns") for fault in faults] == [True] * wanted


LOOPS = """
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E R2, [R4.64] ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   MOV R9, RZ ;
.L_x_3:
.L_x_1:
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR6][R2.64] ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/                   LDSM.16.MT88.4 R8, [R7] ;
        /*0070*/                   F2F.BF16.F16 R8, R8 ;
        /*0080*/                   F2FP.F16.E4M3.UNPACK_B R8, R8 ;
        /*0090*/                   HMMA.16816.F32.BF16 R8, R8, R16, RZ ;
        /*00a0*/               @P1 BRA `(.L_x_2) ;
        /*00b0*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*00c0*/               @P2 BRA `(.L_x_3) ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   BRA `(.L_x_4) ;
"""


def test_the_inner_loop_that_multiplies_is_counted() -> None:
    """Not the one before it, the one around it or the one behind the end."""
    assert main_loop(LOOPS) == Loop(8, 1, 1, 1, 1, 1024, 512, 0.0)
    assert main_loop(LOOPS.replace("HMMA", "FFMA")) is None
    turn = main_loop(LOOPS.replace("HMMA.16816.F32.BF16", "HGMMA.64x128x16.F32.BF16"))
    assert turn is not None
    assert 4 * turn.tensor == 64 * 128 * 16 / 2048


@pytest.mark.parametrize(
    ("opcode", "forms", "found"),
    [
        ("LDS", "", 128),
        ("LDS", ".U16", 64),
        ("STS", ".128", 512),
        ("LDGSTS", ".E.64", 256),
        ("LDG", ".E.128.STRONG.GPU", 512),
        ("LDSM", ".16.M88", 128),
        ("STSM", ".16.MT88.4", 512),
    ],
)
def test_bytes_of_a_warp(opcode: str, forms: str, found: int) -> None:
    assert warp_bytes(opcode, forms) == found


def test_what_binds_a_loop() -> None:
    """4,096 bytes are 198 cycles of an H200's memory; of 8 warps they are 1,583."""
    free = Loop(100, 1, 0, 0, 0, 8192, 4096, 0.0)
    assert free.share("sm_90", 8, hoped=True) == (1.0, "memory")
    crowded = Loop(100, 1, 0, 0, 0, 40_960, 4096, 0.0)
    share, what = crowded.share("sm_90", 8, hoped=True)
    assert what == "shared memory"
    assert share == pytest.approx(1582 / 2560, rel=0.01)
    # Conversions whose rate nobody says: hoped and as slow as others.
    converting = Loop(100, 1, 0, 128, 0, 8192, 4096, 0.0)
    assert converting.share("sm_90", 8, hoped=True) == (1.0, "memory")
    share, what = converting.share("sm_90", 8, hoped=False)
    assert (what, round(share, 2)) == ("conversions", 0.77)


PTX = """
$L__BB0_2:
	mul.f32 	%f1, %f9, %f8;
	MASKED
	ex2.approx.ftz.f32 	%f4, %f3;
	bra.uni 	$L__BB0_3;
$L__BB0_3:
	fma.rn.f32 	%f5, %f9, %f8, %f7;
	ex2.approx.ftz.f32 	%f6, %f5;
"""


@pytest.mark.parametrize(
    ("made", "sources"),
    [
        ("sub.f32 	%f3, %f1, %f7;", "sub.f32"),
        ("fma.rn.f32 	%f3, %f9, %f8, %f7;", "fma.rn.f32"),
    ],
)
def test_scores_that_a_mask_stands_behind_are_rounded_as_others(
    monkeypatch: pytest.MonkeyPatch, made: str, sources: str
) -> None:
    """The two variants are the compiler's result for two loops of one source, and today's."""
    monkeypatch.setattr(gpu_ptx, "FEW", 0)
    found = gpu_ptx.exponent_sources(PTX.replace("MASKED", made))
    assert found == [{sources: 1}, {"fma.rn.f32": 1}]
    counts = dict.fromkeys((*KINDS, "all"), 0) | {"warpgroup": 1}
    kernel = "attention_prefill._prefill_kernel"
    compiled = Compiled(kernel, "sm_90", 8, 2, {}, 0, Code(4, 0, counts), 0.0, found)
    faults = list(gpu_dry.find_faults(compiled, gpu_dry.STEPS[0]))
    assert len(faults) == (sources != "fma.rn.f32")


def test_a_soft_caps_exponentials_are_no_scores() -> None:
    counts = dict.fromkeys((*KINDS, "all"), 0) | {"warpgroup": 1}
    kernel, step = "attention_prefill._prefill_kernel", gpu_dry.STEPS[0]
    found = [{"mul.f32": 64}, {"fma.rn.f32": 64, "sub.f32": 4}]
    for cap, wanted in ((50.0, 0), (0.0, 1)):
        code, constants = Code(4, 0, counts), {"SOFTCAP": cap}
        compiled = Compiled(kernel, "sm_90", 4, 3, constants, 0, code, 0.0, found)
        assert len(list(gpu_dry.find_faults(compiled, step))) == wanted


def test_spills_of_a_checks_odd_shapes_are_counted_and_no_fault() -> None:
    code = Code(255, 0, dict.fromkeys((*KINDS, "all"), 0) | {"spill": 80})
    compiled = Compiled("norm._norm_kernel", "sm_90", 8, 3, {}, 0, code, 0.0)
    for step, wanted in ((gpu_dry.STEPS[0], 1), (gpu_dry.Step(gpu_dry.CHECKED_STEP, ()), 0)):
        assert len(list(gpu_dry.find_faults(compiled, step))) == wanted


def test_spills_are_explained_up_to_a_number() -> None:
    kernel, step = "product_skinny._product_kernel", gpu_dry.STEPS[0]
    for spills, wanted in ((9, 0), (10, 1)):
        counts = dict.fromkeys((*KINDS, "all"), 0) | {"warpgroup": 1, "spill": spills}
        compiled = Compiled(kernel, "sm_90", 4, 3, {}, 0, Code(128, 0, counts), 0.0)
        assert len(list(gpu_dry.find_faults(compiled, step))) == wanted


def test_bounds_that_are_lost_are_a_fault() -> None:
    code = Code(40, 0, dict.fromkeys((*KINDS, "all"), 0))
    compiled = Compiled("norm._norm_kernel", "sm_90", 4, 3, {}, 0, code, 0.0, bounds=["lost"])
    assert list(gpu_dry.find_faults(compiled, gpu_dry.STEPS[0])) == ["lost"]


def test_jumps_to_addresses_become_labels() -> None:
    """An image of two kernels, as nvdisasm lists it: each has its own lines and labels."""
    listing = (
        '\t.headerflags\t@"EF_CUDA_SM90"\n'
        "        /*0000*/                   LDG.E R2, [R4.64] ;\n"
        "        /*0010*/              @!P0 BRA 0x0 ;\n"
        "        /*0020*/                   BSSY B0, 0x40 ;\n"
        "        /*0030*/                   EXIT ;\n"
        "        /*0040*/                   HMMA.16816.F32.BF16 R8, R8, R16, RZ ;\n"
        "        /*0050*/               @P1 BRA 0x40 ;\n"
    )
    first, second = gpu_sass.split_listing(listing, [0x40, 0x20])
    assert first.splitlines()[0] == ".L_0:"
    assert "BRA `(.L_0) ;" in first
    assert main_loop(first) is None
    assert count_instructions(first)["all"] == 4
    turn = main_loop(second)
    assert turn is not None
    assert turn.instructions == 2


@pytest.mark.parametrize(
    ("kernel", "constants", "codes"),
    [
        ("moe_products._fp8_kernel", {}, True),
        ("product_skinny._product_kernel", {"SCALED": True}, True),
        ("product_skinny._product_kernel", {"SCALED": False}, False),
    ],
)
def test_codes_that_are_widened_before_they_are_multiplied_are_a_fault(
    kernel: str, constants: dict[str, object], codes: bool
) -> None:
    """The fault was sm_90's code for tiles of four and sixteen rows while rows came first."""
    for architecture, found, wanted in (
        ("sm_90", "HMMA", codes),
        ("sm_90", "warpgroup", False),
        ("sm_100", "HMMA", False),
    ):
        counts = dict.fromkeys((*KINDS, "all"), 0) | {found: 8}
        compiled = Compiled(kernel, architecture, 4, 4, constants, 0, Code(40, 0, counts), 0.0)
        assert len(list(gpu_dry.find_faults(compiled, gpu_dry.STEPS[0]))) == wanted


def test_a_part_of_a_sum_is_rounded_before_it_is_added() -> None:
    counts = dict.fromkeys((*KINDS, "all"), 0) | {"warpgroup": 1, "fused multiply-add": 64}
    for blocked, wanted in ((False, 1), (True, 0)):
        code, constants = Code(4, 0, counts), {"BLOCKED": blocked}
        compiled = Compiled("product_fp8._product_kernel", "sm_90", 4, 3, constants, 0, code, 0.0)
        assert len(list(gpu_dry.find_faults(compiled, gpu_dry.STEPS[0]))) == wanted
