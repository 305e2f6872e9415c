"""Counts the instructions of the aarch64 products in a library, where none can be timed.

Run: `python benchmarks/neon_instructions.py build/cpu-aarch64/_headrace_cpu.so`, which
tests/kernels_cpu/test_levels_and_machines.py builds. For each kind of weights and rows the loop
over a unit (16 outputs × 32 of K) at level dotprod: vector operations, and registers spilled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

NAME = re.compile(r"^[0-9a-f]+ <.*group_rows<[^Q]*(Q\w+), (\d+),")
LINE = re.compile(r"^\s+([0-9a-f]+):\s+(\S+)\s*(.*)$")
Instruction = tuple[int, str, str]


def loop_of(code: list[Instruction]) -> list[Instruction]:
    """The shortest loop with dot products in it."""
    best: list[Instruction] = []
    for at, name, arguments in code:
        to = re.search(r"\b([0-9a-f]+) <", arguments)
        if to is None or not re.match(r"b(\.|$)|cbn?z|tbn?z", name) or int(to[1], 16) >= at:
            continue
        body = [each for each in code if int(to[1], 16) <= each[0] <= at]
        if any(each[1] == "sdot" for each in body) and (not best or len(body) < len(best)):
            best = body
    return best


def on_stack(loop: list[Instruction], verb: str) -> int:
    """Vector registers that go to the stack or come from it."""
    return sum(
        2 if name.endswith("p") else 1
        for _, name, arguments in loop
        if name.startswith(verb) and arguments.startswith("q") and "sp" in arguments
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    library = parser.parse_args().library
    text = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    functions: dict[tuple[str, int], list[list[Instruction]]] = {}
    code: list[Instruction] | None = None
    for line in text.splitlines():
        if line.endswith(">:"):
            found = NAME.match(line)
            code = [] if found else None
            if found and code is not None:
                functions.setdefault((found[1], int(found[2])), []).append(code)
        elif code is not None and (instruction := LINE.match(line)):
            code.append((int(instruction[1], 16), instruction[2], instruction[3]))
    print("kind  rows  all  vector  a row  sdot  spilled  brought back")
    for (kind, rows), bodies in sorted(functions.items()):
        loop = min(filter(None, map(loop_of, bodies)), key=len, default=[])
        if not loop:
            continue
        vector = sum(
            bool(re.match(r"v\d", arguments)) and not name.startswith(("ld", "st"))
            for _, name, arguments in loop
        )
        dots = sum(name == "sdot" for _, name, _ in loop)
        spilled, back = on_stack(loop, "st"), on_stack(loop, "ld")
        print(
            f"{kind:5} {rows:4} {len(loop):4} {vector:7} {vector / rows:6.0f} {dots:5} "
            f"{spilled:8} {back:13}"
        )


if __name__ == "__main__":
    main()
