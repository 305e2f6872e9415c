"""Kernels that start early: each waits before it touches memory, and the switch is the table's."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_sass import find_unwaited

from headrace.kernels.triton import early, table
from headrace.kernels.triton.early import OFF, EarlyConfig, launch_options
from headrace.kernels.triton.operators import TritonOperators

FILES = sorted(Path(early.__file__).parent.glob("*.py"))
TOUCHES = ("load", "store", "atomic_add")


def kernels(text: str) -> list[ast.FunctionDef]:
    """Functions with a switch EARLY: what is launched with `launch_options`."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and node.name != "wait_for_inputs"
        and "EARLY" in [argument.arg for argument in node.args.args]
    ]


def faults(kernel: ast.FunctionDef) -> list[str]:
    """What stands before the wait of a kernel and must not; or that there is none."""
    found = []
    for statement in kernel.body:
        calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        names = [f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls]
        if isinstance(statement, ast.Expr) and names == ["wait_for_inputs"]:
            return found
        if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            found.append("leaves")
        if any(isinstance(node, ast.For | ast.While) for node in ast.walk(statement)):
            found.append("loops")
        found += [name for name in names if name in TOUCHES]
    return [*found, "does not wait"]


def test_every_kernel_waits_before_it_touches_memory() -> None:
    found = [kernel for file in FILES for kernel in kernels(file.read_text())]
    assert {kernel.name for kernel in found} >= {
        "_split_kernel",
        "_rope_kernel",
        "_norm_kernel",
        "_gated_kernel",
        "_gated_codes_kernel",
        "_quantise_kernel",
        "_sum_kernel",
        "_route_kernel",
        "_gather_kernel",
        "_dense_kernel",
    }
    assert len([kernel for kernel in found if kernel.name == "_product_kernel"]) >= 2
    assert {kernel.name: faults(kernel) for kernel in found if faults(kernel)} == {}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = tl.load(p)\n    wait_for_inputs(EARLY)", ["load"]),
        ("if a:\n        return\n    wait_for_inputs(EARLY)", ["leaves"]),
        ("for i in range(2):\n        wait_for_inputs(EARLY)", ["loops", "does not wait"]),
        ("if a:\n        wait_for_inputs(EARLY)", ["does not wait"]),
        ("ask_ahead(w)\n    wait_for_inputs(EARLY)\n    x = tl.load(p)", []),
    ],
)
def test_what_is_a_fault(body: str, said: list[str]) -> None:
    (kernel,) = kernels(f"def kernel(p, EARLY):\n    {body}\n")
    assert faults(kernel) == said


def listing(*lines: str) -> str:
    return "".join(
        f"{line}:\n" if line.startswith(".") else f"        /*{16 * at:04x}*/  {line} ;\n"
        for at, line in enumerate(lines)
    )


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["S2R R0, SR_TID.X", "LDG.E R2, [R4]", "EXIT"], None),
        (["CCTL.E.PF2 [R2]", "PREEXIT", "ACQBULK", "LDG.E R2, [R4]", "EXIT"], ()),
        (["@P0 LDG.E R2, [R4]", "ACQBULK", "EXIT"], ("LDG",)),
        (["LDGSTS.E [R7], desc[UR6][R2.64]", "ACQBULK", "EXIT"], ("LDGSTS",)),
        # A wait under a predicate is no wait.
        (["@P0 ACQBULK", "STG.E [R2], R4", "EXIT"], ("EXIT", "STG")),
        # Around the wait.
        (["@P0 BRA `(.L_x_1)", "ACQBULK", ".L_x_1", "LDG.E R2, [R4]", "EXIT"], ("EXIT", "LDG")),
        # A loop before it, as tensor memory is asked for, and what only others come to.
        (
            [
                ".L_x_1",
                "@P0 BRA `(.L_x_1)",
                "BRA `(.L_x_2)",
                "LDG.E R2, [R4]",
                ".L_x_2",
                "ACQBULK",
                "STG.E [R2], R4",
                "EXIT",
            ],
            (),
        ),
        (["CALL.REL.NOINC `($f)", "ACQBULK", "EXIT", ".f", "RET"], ("CALL",)),
        (["CALL.REL.NOINC `(.f)", "ACQBULK", "EXIT", ".f", "LDG.E R2, [R4]", "RET"], ("LDG",)),
        (["BRX R2", "ACQBULK", "EXIT"], ("BRX",)),
        (["@P0 EXIT", "ACQBULK", "EXIT"], ("EXIT",)),
    ],
)
def test_ways_past_the_wait_are_found(lines: list[str], found: tuple[str, ...] | None) -> None:
    assert find_unwaited(listing(*lines)) == found


def test_the_switch_is_the_tables() -> None:
    for name, wanted in (("sm_80", False), ("sm_90", True), ("sm_100", True)):
        ops = TritonOperators(torch.bfloat16, architecture=name)
        assert ops._early(torch.empty(1)) == table.Table(name).early()
        assert table.Table(name).early().early is wanted
        ahead = table.Table(name).early().ahead
        assert ahead & (ahead - 1) == 0, "a power of two"


def test_the_interpreter_launches_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_options(True) == launch_options(False) == {"EARLY": False}
    monkeypatch.setattr(early, "INTERPRETED", False)
    assert launch_options(True) == {"EARLY": True, "launch_pdl": True}
    assert launch_options(False) == {"EARLY": False}
    assert EarlyConfig() == OFF
