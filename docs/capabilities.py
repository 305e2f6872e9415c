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
from typing import Any

from headrace.base.arch_gguf import GGUF_ARCHITECTURES
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
PROVEN = HERE.parent / "tests" / "models" / "test_features.py"
TRITON = HERE.parent / "tests" / "kernels_triton"
GGUF_FAMILIES = {*GGUF_ARCHITECTURES.values(), "mistral", "mixtral", "deepseek_v3"}
"""Families that have an architecture of GGUF, also those that share one."""
CHECKED_AS = {"bert": "encoder.py"}
"""Families whose oracle is not one of `tests/tiny/families.py`."""


def constant(path: Path, name: str) -> ast.Dict:
    """The dictionary that a module calls `name`, unread."""
    for node in ast.parse(path.read_text()).body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if isinstance(target, ast.Name) and target.id == name:
            assert isinstance(node.value, ast.Dict)  # type: ignore[attr-defined]
            return node.value  # type: ignore[attr-defined]
    raise LookupError(f"{path.name} has no {name}")


def keys(path: Path, name: str) -> list[Any]:
    return [ast.literal_eval(key) for key in constant(path, name).keys if key is not None]


def oracles() -> list[str]:
    """Names of the tiny models that tests hold against transformers."""
    return keys(MODELS / "families.py", "MODELS")


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


def features() -> str:
    """Families by what `tests/models/test_features.py` proves of each of their tiny models."""
    named, columns = oracles(), keys(PROVEN, "FEATURES")
    refused = ast.literal_eval(constant(PROVEN, "REFUSED"))
    triton = keys(TRITON / "test_whole_models.py", "SHALLOW")
    triton += keys(TRITON / "test_families.py", "FAMILIES")
    rows = []
    for family in FAMILIES:
        cases = [name for name in named if name.partition("-")[0] == family]
        if not cases:
            continue
        cells = [
            "no" if any((case, column) in refused for case in cases) else "yes"
            for column in columns
        ]
        whole = "yes" if set(cases) & set(triton) else ""
        gguf = "yes" if family in GGUF_FAMILIES else ""
        rows.append([f"`{family}`", gguf, *cells, whole])
    return table(["family", "GGUF", *columns, "whole in Triton's interpreter"], rows)


def weights() -> str:
    gguf = [
        [f"GGUF {name}", str(form.bits), "panels" if name in KINDS else "expanded"]
        for name, form in FORMATS.items()
    ]
    bits = {"awq": "4", "fp8": "8"}
    packed = [[f"safetensors {name}", bits.get(name, "4, 8"), "panels"] for name in METHODS]
    dense = [["dense F32", "32", "panels"], ["dense F16, BF16", "16", "panels"]]
    return table(
        ["weights", "bits", "on the CPU kernels"],
        [*gguf, *packed, *dense],
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
            "## Families and features",
            "Of each family in safetensors on the CPU kernels: the same answers with the feature "
            "as without, or the refusal by name (`no`), as `tests/models/test_features.py` runs "
            "them for every tiny model of the family; adapters against the adapter in the "
            "weights. Its GGUF is held against its folder by `tests/loader/test_gguf_families.py`.",
            features(),
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
