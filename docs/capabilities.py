"""Writes `capabilities.md` beside this file from the registries of the code and the tests' cases.

Run: `python docs/capabilities.py`; `tests/docs/test_capabilities.py` holds the page against both.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from headrace.base.config import EngineOptions
from headrace.cli.main import COMMANDS
from headrace.kernels.cpu.records import KINDS
from headrace.models.registry import FAMILIES
from headrace.quant.ggml import FORMATS
from headrace.quant.schemes import METHODS
from headrace.server.app import OPERATOR_ROUTERS, ROUTERS

HERE = Path(__file__).parent
PAGE = HERE / "capabilities.md"
MODELS = HERE.parent / "tests" / "tiny"
CHECKED_AS = {"bert": "encoder.py"}
"""Families whose oracle is not one of `tests/tiny/families.py`."""


def oracles() -> list[str]:
    """Names of the tiny models that tests hold against transformers."""
    for node in ast.parse((MODELS / "families.py").read_text()).body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if isinstance(target, ast.Name) and target.id == "MODELS":
            keys: Iterable[ast.expr | None] = node.value.keys  # type: ignore[attr-defined]
            return [str(ast.literal_eval(key)) for key in keys if key is not None]
    raise LookupError("tests/tiny/families.py has no MODELS")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def families() -> str:
    named = oracles()
    rows = []
    for family, description in FAMILIES.items():
        cases = [name for name in named if name.partition("-")[0] == family]
        if family in CHECKED_AS:
            cases = [CHECKED_AS[family].removesuffix(".py")]
        held = ", ".join(f"`{case}`" for case in cases) or "no: its graph alone"
        rows.append([f"`{family}`", f"`models/{description.__module__.split('.')[-1]}.py`", held])
    return table(["family", "described in", "held against transformers as"], rows)


def weights() -> str:
    gguf = [
        [f"GGUF {name}", str(form.bits), "panels" if name in KINDS else "expanded"]
        for name, form in FORMATS.items()
    ]
    packed = [[f"safetensors {name}", "4, 8", "expanded"] for name in METHODS if name != "fp8"]
    dense = [["dense F32", "32", "panels"], ["dense F16, BF16", "16", "panels"]]
    return table(
        ["weights", "bits", "on the CPU kernels"],
        [*gguf, *packed, ["safetensors fp8", "8", "expanded"], *dense],
    )


def interfaces() -> str:
    """Routes by the module or folder that serves them, those of the operator's port too."""
    routes: defaultdict[str, list[str]] = defaultdict(list)
    for router in (*ROUTERS, *OPERATOR_ROUTERS):
        for route in router.routes:
            place = route.endpoint.__module__  # type: ignore[attr-defined]
            name = re.sub(r"headrace\.server\.(routes\.)?", "", place).split(".")[0]
            for method in sorted(route.methods or ()):  # type: ignore[attr-defined]
                routes[name].append(f"`{method} {route.path}`")  # type: ignore[attr-defined]
    rows = [[f"`{name}`", ", ".join(dict.fromkeys(routes[name]))] for name in sorted(routes)]
    return table(["in `server/routes`", "routes"], rows)


def choices() -> str:
    rows = [
        [f"`--{one.name.replace('_', '-')}`", ", ".join(map(str, one.metadata["choices"]))]
        for one in fields(EngineOptions)
        if "choices" in one.metadata
    ]
    return table(["option", "values"], rows)


def commands() -> str:
    return table(["command", "what"], [[f"`{name}`", text] for name, (_, text) in COMMANDS.items()])


def written() -> str:
    """The whole page."""
    return "\n\n".join(
        [
            "# What there is",
            "Made by `python docs/capabilities.py` from the code's own registries and the tests' "
            "cases; a test holds it, and that a test names every route, family and command.",
            "## Model families",
            families(),
            "## Weights",
            "Panels are computed with as they are; what is expanded is computed with in the "
            "model's type by the reference, and packed on a GPU ([gpu.md](gpu.md)).",
            weights(),
            "## Choices of an engine",
            choices(),
            "## Interfaces",
            interfaces(),
            "## Commands",
            commands(),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(written())
