"""Runs the library's own object file of level amx in Bochs.

Bochs (https://bochs.sourceforge.io, built with --enable-x86-64 --enable-avx --enable-evex
--enable-amx --with-nogui) emulates a whole Sapphire Rapids: boot.S is its ROM, guest.cpp what it
runs, image.py what it finds in memory. The source of August 2026 needs two corrections: in
cpu/avx/amx.cc DPBDSS takes its bytes as unsigned where TDPBSSD multiplies signed ones (Bit8s), and
BX_MEM_C::load_RAM in memory/misc_mem.cc masks addresses with A20 before that has a value.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "src" / "headrace" / "kernels" / "cpu" / "csrc"
CONFIGURATION = """\
romimage: file=boot.rom, address=0xffff0000
vgaromimage: file=vga.rom
megs: 512
cpu: model=sapphire_rapids, reset_on_triple_fault=0
optramimage1: file=guest.bin, address=0x01000000
optramimage2: file=image.bin, address=0x10000000
port_e9_hack: enabled=1
display_library: nogui
log: bochs.log
panic: action=fatal
"""


def run_in_bochs(bochs: str, library: Path, kernels: Path, folder: Path) -> str:
    """What the guest printed. `kernels` is kernels_amx.cpp's object file in `library`.

    Works in `folder`. Raises `CalledProcessError` where a tool is missing or fails.
    """
    paths = [str(HERE.parent), str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep)}

    def tool(*command: str) -> None:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment)

    tool("gcc", "-c", str(HERE / "boot.S"), "-o", "boot.o")
    tool(
        "ld",
        "-m",
        "elf_x86_64",
        "-Ttext=0xffff0000",
        "--oformat=binary",
        "-e",
        "start16",
        "boot.o",
        "-o",
        "boot.rom",
    )
    alone = (
        "-ffreestanding",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-stack-protector",
        "-fno-tree-loop-distribute-patterns",
        "-mno-red-zone",
    )
    tool(
        "g++",
        "-std=gnu++17",
        "-O2",
        *alone,
        f"-I{CSRC}",
        "-c",
        str(HERE / "guest.cpp"),
        "-o",
        "guest.o",
    )
    tool("ld", "-static", "-T", str(HERE / "guest.ld"), "guest.o", str(kernels), "-o", "guest.elf")
    tool(
        "objcopy",
        "-O",
        "binary",
        "--set-section-flags",
        ".bss=alloc,load,contents",
        "guest.elf",
        "guest.bin",
    )
    screen = bytearray(32768)  # Bochs wants a ROM for the screen too: this one returns at once
    screen[:4] = b"\x55\xaa\x40\xcb"
    screen[-1] = -sum(screen) & 255
    (folder / "vga.rom").write_bytes(screen)
    (folder / "bochsrc").write_text(CONFIGURATION)
    tool(sys.executable, str(HERE / "image.py"), "image.bin", str(library))
    ran = subprocess.run(
        [bochs, "-q", "-f", "bochsrc"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    return ran.stdout
