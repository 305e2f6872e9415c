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
GGUF = HERE.parent / "tests" / "loader"
SHARING = ("deepseek_v3", "mixtral", "olmo3")
"""Families whose files call themselves after another."""
RANKS = HERE.parent / "tests" / "worker" / "test_ranks_of_workers.py"
CHECKED_AS = {"bert": "encoder.py"}
"""Families whose oracle is not one of `tests/tiny/families.py`."""


def constant(path: Path, name: str) -> ast.expr:
    """What a module calls `name`, unread."""
    for node in ast.parse(path.read_text()).body:
        target = getattr(node, "target", None) or (getattr(node, "targets", None) or [None])[0]
        if isinstance(target, ast.Name) and target.id == name:
            return node.value  # type: ignore[attr-defined, no-any-return]
    raise LookupError(f"{path.name} has no {name}")


def keys(path: Path, name: str) -> list[Any]:
    found = constant(path, name)
    assert isinstance(found, ast.Dict)
    return [ast.literal_eval(key) for key in found.keys if key is not None]


def gguf_cases() -> dict[str, str]:
    """Case of the tests of GGUF → its family."""
    found: dict[str, str] = {}
    for module, name in (("test_gguf_families", "FAMILIES"), ("test_gguf_llamacpp", "ELSEWHERE")):
        cases = constant(GGUF / f"{module}.py", name)
        assert isinstance(cases, ast.Dict)
        for case, value in zip(keys(GGUF / f"{module}.py", name), cases.values, strict=True):
            assert isinstance(value, ast.Tuple)
            word = case.partition(" ")[0]
            arch = GGUF_ARCHITECTURES[ast.literal_eval(value.elts[1])]
            found[case] = word if word in SHARING else arch
    return found


def ranked() -> set[str]:
    """Families of the tiny models that tests share out to ranks."""
    lists = ("DENSE", "NORMS_OF_ALL_HEADS", "MIXTURES", "STATES", "LATENT")
    names = [name for each in lists for name in ast.literal_eval(constant(RANKS, each))]
    return {name.partition("-")[0] for name in names}


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
    cases_of_gguf, ranks = gguf_cases(), ranked()
    unread = ast.literal_eval(constant(GGUF / "test_gguf_llamacpp.py", "UNREAD"))
    beside = {family for case, family in cases_of_gguf.items() if case not in unread}
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
        files = ["yes" if family in found else "" for found in (cases_of_gguf.values(), beside)]
        shared = "yes" if family in ranks else ""
        rows.append([f"`{family}`", *files, *cells, shared, whole])
    head = ["family", "GGUF", "beside llama.cpp", *columns, "ranks"]
    return table([*head, "whole in Triton's interpreter"], rows)


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
            "weights. GGUF gives 64 of 64 tokens that transformers gives (`tests/loader/"
            "test_gguf_greedy.py`), and llama.cpp gives the same from the same file "
            "(`test_gguf_llamacpp.py`; Mistral's and Mixtral's files call themselves llama). "
            "Ranks: the same answers from several workers that share the model "
            "(`tests/worker/test_ranks_of_workers.py`).",
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
