"""What a compiled kernel is made of: registers, spills, shared memory, the instructions that count.

Read from the machine code with the tools that the triton package brings (`cuobjdump`,
`nvdisasm`), so it says what the hardware will run, not what was meant.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import triton
from gpu_loops import Loop, main_loop

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

MACHINE = {
    "sm_80": "SM80",
    "sm_86": "SM86",
    "sm_89": "SM89",
    "sm_90": "SM90a",
    "sm_100": "SM100a",
    "sm_120": "SM120",
}
"""Instruction set that the compiler uses for an architecture."""
SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""
TENSOR_MEMORY = 512
"""Columns of 128 words that one multiprocessor of sm_100 has; a block holds its own until it ends.
Triton makes a trap of a kernel that asks for more, and refuses to launch it."""
REGISTERS = 65_536
"""Registers of one multiprocessor; a thread has 255 at most."""
WARPS = 64
"""Resident on one multiprocessor."""

KINDS = {
    "HMMA": ("HMMA", "IMMA", "QMMA"),
    "warpgroup": ("HGMMA", "QGMMA", "IGMMA"),
    "tensor memory": ("UTCHMMA", "UTCQMMA", "UTCIMMA"),
    "asynchronous copy": ("LDGSTS", "UTMALDG", "UBLKCP"),
    "global load": ("LDG",),
    "shared load": ("LDS", "LDSM"),
    "shared store": ("STS", "STSM"),
    "spill": ("STL", "LDL"),
    "fused multiply-add": ("FFMA", "FFMA2"),
}
"""Instructions by what they say of a kernel."""

_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
_NOTHING_ADDED = re.compile(r",\s*-?RZ(\.F32)?\s*;")
"""A fused multiply-add that is a product: how pairs of numbers are multiplied."""
_ADDRESS = re.compile(r"^\s*/\*([0-9a-f]+)\*/")
_JUMP = re.compile(r"\b(?:BRA|CALL|BSSY)\b[^;]*?\b(0x[0-9a-f]+)\s*;")
_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Code:
    """The figures of one kernel's machine code."""

    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread in local memory: what does not fit into registers, and arrays."""
    instructions: dict[str, int]
    """Count in the code (not in a run) by `KINDS`; "all" is their total."""
    loop: Loop | None = None
    """The loop that multiplies, if one does."""

    @property
    def spills(self) -> int:
        """Instructions that move a register to local memory or back."""
        return self.instructions["spill"]

    @property
    def tensor_core(self) -> str:
        """The widest kind of matrix instruction present, or "none"."""
        for kind in ("tensor memory", "warpgroup", "HMMA"):
            if self.instructions[kind]:
                return kind
        return "none"


def read_code(cubin: bytes, architecture: str) -> Code:
    """The figures of a cubin that holds one kernel."""
    return read_codes([cubin], architecture)[0]


def read_codes(cubins: Sequence[bytes], architecture: str) -> list[Code]:
    """Figures of cubins of one kernel each.

    nvdisasm takes a third of a second to start and a hundredth for a kernel, so the machine code of
    all is one image for it; what it would have written as labels are addresses then.
    """
    found: list[Code] = []
    texts = [machine_code(cubin) for cubin in cubins]
    for cubin, listing in zip(cubins, listings(texts, architecture), strict=True):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            said = _run("cuobjdump", "-res-usage", file.name)
        usage = _USAGE.search(said)
        assert usage, f"cuobjdump said: {said[:200]}"
        counts = count_instructions(listing)
        found.append(Code(int(usage[1]), int(usage[2]), counts, main_loop(listing)))
    return found


def machine_code(cubin: bytes) -> bytes:
    """The one section of a cubin (ELF, 64 bits) that holds instructions."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + size * n) for n in range(count)]
    text = sections[names][4]
    (found,) = (
        cubin[each[4] : each[4] + each[5]]
        for each in sections
        if cubin[text + each[0] :].startswith(b".text.")
    )
    return found


def listings(texts: Sequence[bytes], architecture: str) -> list[str]:
    """nvdisasm's listing of each, with a label wherever something jumps to."""
    if not texts:
        return []
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(texts))
        file.flush()
        listing = _run("nvdisasm", "-b", MACHINE[architecture], file.name)
    return split_listing(listing, [len(text) for text in texts])


def split_listing(listing: str, lengths: Sequence[int]) -> list[str]:
    """The listing of an image of kernels, cut to kernels of so many bytes each."""
    ends = list(accumulate(lengths))
    parts: list[list[str]] = [[] for _ in lengths]
    targets: set[int] = set()
    for line in listing.splitlines():
        if address := _ADDRESS.match(line):
            if jump := _JUMP.search(line):
                targets.add(int(jump[1], 16))
                line = f"{line[: jump.start(1)]}`(.L_{int(jump[1], 16):x}){line[jump.end(1) :]}"
            parts[bisect(ends, int(address[1], 16))].append(line)
    return ["\n".join(_labelled(part, targets)) for part in parts]


def _labelled(lines: list[str], targets: set[int]) -> Iterator[str]:
    for line in lines:
        address = _ADDRESS.match(line)
        if address and int(address[1], 16) in targets:
            yield f".L_{int(address[1], 16):x}:"
        yield line


def count_instructions(listing: str) -> dict[str, int]:
    """nvdisasm's listing → instructions by `KINDS`, and "all"."""
    opcodes: Counter[str] = Counter()
    for line in listing.splitlines():
        match = _OPCODE.match(line)
        if match:
            product = match[1] in KINDS["fused multiply-add"] and _NOTHING_ADDED.search(line)
            opcodes["FMUL" if product else match[1]] += 1
    counts = {kind: sum(opcodes[name] for name in names) for kind, names in KINDS.items()}
    return {**counts, "all": sum(opcodes.values())}


def resident_blocks(
    architecture: str, registers: int, warps: int, shared: int, columns: int = 0
) -> int:
    """Blocks that one multiprocessor holds at a time, by registers, warps, shared memory and
    columns of tensor memory."""
    # Registers are given out per warp in units of 256.
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // (per_warp * warps)
    # Every block pays 1 KiB to the system; the whole has as much more than one block may take.
    by_shared = (SHARED_LIMIT[architecture] + 1024) // (shared + 1024)
    by_columns = TENSOR_MEMORY // columns if columns else 32
    return min(by_registers, WARPS // warps, by_shared, by_columns, 32)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout
