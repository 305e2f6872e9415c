"""The assembler that makes operands of codes, run here line by line, against the codes' layout.

Nothing else proves it without a GPU: Triton's interpreter has no assembler.
"""

from __future__ import annotations

import re

import pytest
import torch

from headrace.kernels.triton.packed import tile_weight
from headrace.kernels.triton.unpack import (
    BF16,
    E2M1,
    FP16,
    Packing,
    added,
    spell,
    spell_all,
    unpack_step,
)
from headrace.kernels.weights import PackedWeight

WORD = 0xFFFFFFFF
DTYPES = {BF16: torch.bfloat16, FP16: torch.float16}


def run_ptx(text: str, inputs: list[int], outputs: int = 2) -> list[int]:
    """The outputs $0, $1 … of words `inputs`, which follow them, by the PTX manual's semantics."""
    values: dict[str, int] = {f"${place + outputs}": word for place, word in enumerate(inputs)}
    written = False
    for line in text.strip("{} ").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        target, *operands = [word.strip() for word in rest.split(",")]
        assert not (written and any(word.startswith("$") for word in operands)), "overwritten"
        a, *others = [values[w] if w in values else int(w, 0) for w in operands]
        match name:
            case "mov.b32":
                found = a
            case "and.b32":
                found = a & others[0]
            case "or.b32":
                found = a | others[0]
            case "lop3.b32":
                assert others[2] == 0xCA  # b where a has ones, else c
                found = a & others[0] | ~a & others[1]
            case "sub.rn.f16x2":
                first, second = (torch.tensor(numbers([word], FP16)) for word in (a, others[0]))
                bits = (first - second).half().view(torch.int16).int() & 0xFFFF
                found = int(bits[0]) | int(bits[1]) << 16
            case "shr.u32":
                found = a >> others[0]
            case "shl.b32":
                found = a << others[0]
            case "shf.l.wrap.b32":
                # The upper word of b:a turned left by c, of which five bits count.
                found = (((others[0] << 32 | a) << (others[1] & 31)) >> 32) & WORD
            case "prmt.b32":
                source = (others[0] << 32 | a).to_bytes(8, "little")
                picks = [(others[1] >> (4 * place)) & 15 for place in range(4)]
                assert max(picks) < 8
                found = int.from_bytes(bytes(source[pick] for pick in picks), "little")
            case _:
                raise AssertionError(f"no such instruction here: {name}")
        values[target] = found & WORD
        written = written or target.startswith("$")
    return [values[f"${place}"] for place in range(outputs)]


def numbers(words: list[int], magic: int) -> list[float]:
    """Four numbers out of two words, the lower half of each first."""
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    signed = torch.tensor([half - 65536 * (half >> 15) for half in halves], dtype=torch.int16)
    return signed.view(DTYPES[magic]).tolist()


def test_the_semantics_of_this_file() -> None:
    """Examples from the PTX manual's definitions."""
    assert run_ptx("{ prmt.b32 $0, $2, $3, 0x7410; mov.b32 $1, 5; }", [0x44332211, 0x88776655]) == [
        0x88552211,
        5,
    ]
    assert re.findall(r"\$\d", spell(5, 0, BF16, False)).count("$4") == 2
    turned = run_ptx(
        "{ .reg .b32 u; shf.l.wrap.b32 u, $2, $2, 28; mov.b32 $0, u; mov.b32 $1, u; }", [0x00000010]
    )
    assert turned == [1, 1]


@pytest.mark.parametrize("magic", [BF16, FP16])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
def test_every_code_of_a_chunk(bits: int, group: int, magic: int) -> None:
    """A row of codes as `tile_weight` lays it: what comes out is code plus what `added` says."""
    torch.manual_seed(bits)
    codes = torch.randint(0, 2**bits, (1, 128), dtype=torch.uint8)
    packed = PackedWeight(codes, torch.ones(1, 128 // group), None, bits, group, (1, 128))
    stored = tile_weight(packed).codes.flatten().tolist()
    step = unpack_step(Packing(bits, group, None, magic))
    for at in range(0, 128, step):
        for place in range(0, step, 4):
            column = at + place if bits == 8 else (at + place) % 64
            words = [stored[column : column + 4]]
            if bits == 6:
                words.append(stored[64 + place : 68 + place])
            if bits == 5:
                plane = stored[64 + place % 16 : 68 + place % 16]
                words += [plane, [0] * 4] if place < 16 else [[0] * 4, plane]
            given = [int.from_bytes(bytes(word), "little") for word in words]
            found = numbers(run_ptx(spell(bits, at, magic, False), given), magic)
            if bits == 8 and magic == BF16:
                high = numbers(run_ptx(spell(bits, at, magic, True), given), magic)
                found = [a + b for a, b in zip(found, high, strict=True)]
            wanted = codes[0, at + place : at + place + 4].tolist()
            assert found == [code + added(bits, magic) for code in wanted]


@pytest.mark.parametrize("magic", [BF16, FP16])
def test_all_bytes(magic: int) -> None:
    """Each byte in each place, beside bytes of ones: no bit reaches a neighbour."""
    for byte in range(256):
        for place in range(4):
            word = WORD ^ (0xFF << 8 * place) | byte << 8 * place
            low = numbers(run_ptx(spell(4, 0, magic, False), [word]), magic)
            assert low[place] == added(4, magic) + byte % 16
            upper = numbers(run_ptx(spell(4, 64, magic, False), [word]), magic)
            assert upper[place] == added(4, magic) + byte // 16


@pytest.mark.parametrize("magic", [BF16, FP16])
def test_numbers_of_four_bits(magic: int) -> None:
    """The table of OCP's Microscaling Formats 1.0, the sign of zero too."""
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = [str(float(x)) for x in (*sizes, *(-x for x in sizes[1:]))]
    wanted.insert(8, "-0.0")
    for byte in range(256):
        for place in range(4):
            word = WORD ^ (0xFF << 8 * place) | byte << 8 * place
            low, upper = (
                numbers(run_ptx(spell(E2M1, at, magic, False), [word]), magic) for at in (0, 64)
            )
            assert (str(low[place]), str(upper[place])) == (wanted[byte % 16], wanted[byte // 16])
            assert {low[other] for other in range(4) if other != place} == {-6.0}


@pytest.mark.parametrize("magic", [BF16, FP16])
def test_constants(magic: int) -> None:
    zeros = [*range(65), *([] if magic == FP16 else [80, 96, 112]), 128]
    for bits in (4, 5, 6, 8):
        for zero in zeros:
            if bits == 8 and zero % 16:
                continue
            value = -(added(bits, magic) + zero)
            assert numbers(run_ptx(spell_all(value, magic), [0]), magic) == [value] * 4
    assert numbers(run_ptx(spell_all(1, magic), [0]), magic) == [1.0] * 4
