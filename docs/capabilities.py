"""Writes `capabilities.md` beside this file from the registries of the code and the tests' cases.

Run: `python docs/capabilities.py`; `tests/docs/test_capabilities.py` holds the page against both.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace.base.config import CPU_VALUES, EngineOptions
from headrace.base.groups import graph_groups
from headrace.cli.main import COMMANDS
from headrace.kernels.cpu.library import LEVELS_OF
from headrace.models.reader import GGUF_ARCHITECTURES
from headrace.models.registry import FAMILIES, FILES, describe
from headrace.roofline.known import KNOWN, known
from headrace.server.app import OPERATOR_ROUTERS, ROUTERS

HERE = Path(__file__).parent
PAGE = HERE / "capabilities.md"
TESTS = HERE.parent / "tests"
MODELS = TESTS / "tiny"
PROVEN = TESTS / "models" / "test_features.py"
FORMATS = TESTS / "models" / "test_formats.py"
LEVELS = TESTS / "kernels_cpu" / "test_levels_and_machines.py"
TRITON = TESTS / "kernels_triton"
GGUF = TESTS / "loader"
COMPILED = HERE.parent / "benchmarks" / "gpu_dry.py"
REFUSES = "__headrace_refuses__"
NOT_TRIED = "not tried"
SHARING = ("deepseek_v3", "mixtral", "olmo3")
"""Families whose files call themselves after another."""
RANKS = TESTS / "worker" / "test_ranks_of_workers.py"
CHECKED_AS = (
    {"bert": "encoder.py", "dlrm_dcnv2": "ranker.py", "unet": "stable.py"}
    | {
        "dit": "dit.py",
        "pixart": "dit.py",
    }
    | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "qwen_chat.py")
)
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
    """Which published models are of a family, and what a sequence keeps in their layers."""
    named, rows = oracles(), []
    published: defaultdict[str, list[str]] = defaultdict(list)
    kept: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for name in KNOWN:
        arch, _ = known(name)
        published[arch.family].append(f"`{name}`")
        for group in graph_groups(describe(arch), "bfloat16"):
            kept[arch.family][re.sub(r"\d+", "s", group.name)] = None
    files = {one.name: file.__name__ for file in FILES for one in file.FAMILIES}
    for family in FAMILIES:
        cases = [name for name in named if name.partition("-")[0] == family]
        if family in CHECKED_AS:
            cases = [CHECKED_AS[family].removesuffix(".py")]
        held = ", ".join(f"`{case}`" for case in cases) or "no: its graph alone"
        described = f"`models/{files[family].split('.')[-1]}.py`"
        more = ", ".join(published[family]), ", ".join(kept[family])
        rows.append([f"`{family}`", described, held, *more])
    head = ["family", "described in", "held against transformers as", "published", "keeps"]
    return table(head, rows)


def features() -> str:
    """Families by what `tests/models/test_features.py` proves of each of their tiny models."""
    named, columns = oracles(), keys(PROVEN, "FEATURES")
    refused = ast.literal_eval(constant(PROVEN, "REFUSED"))
    triton = keys(TRITON / "test_whole_models.py", "SHALLOW")
    triton += keys(TRITON / "test_families.py", "FAMILIES")
    cases_of_gguf, ranks = gguf_cases(), ranked()
    unread = ast.literal_eval(constant(GGUF / "test_gguf_llamacpp.py", "UNREAD"))
    beside = {family for case, family in cases_of_gguf.items() if case not in unread}
    held: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for family in FAMILIES:
        cases = [name for name in named if name.partition("-")[0] == family]
        if not cases:
            continue
        held["GGUF"][family] = "" if family in cases_of_gguf.values() else NOT_TRIED
        held["beside llama.cpp"][family] = "" if family in beside else NOT_TRIED
        for column in columns:
            no = any((case, column) in refused for case in cases)
            held[column][family] = "refused" if no else ""
        held["ranks"][family] = "" if family in ranks else NOT_TRIED
        held["whole in Triton's interpreter"][family] = "" if {*cases} & {*triton} else NOT_TRIED
    rows = [[name, _all_but(of)] for name, of in held.items()]
    return f"{len(held['GGUF'])} decoder families:\n\n" + table(["feature", "families"], rows)


def _all_but(found: dict[str, str]) -> str:
    """Name those that fall short (name → how; "" if it does not), by how."""
    ways = [way for way in dict.fromkeys(found.values()) if way]
    lists = ["; ".join(name for name in found if found[name] == way) for way in ways]
    short = " · ".join(f"{way}: {names}" for way, names in zip(ways, lists, strict=True))
    return f"all, but {short}" if short else "all"


def weights() -> str:
    """Formats of weights by the kernels that `tests/models/test_formats.py` answers with."""
    paths = keys(FORMATS, "PATHS")
    refused = keys(FORMATS, "REFUSED")
    names = keys(MODELS / "formats.py", "FORMATS")
    rows = [
        [path, _all_but({name: "refused" if (name, path) in refused else "" for name in names})]
        for path in paths
    ]
    return "; ".join(names) + ".\n\n" + table(["kernels", "formats"], rows)


def platforms() -> str:
    """Processors and GPUs, and what shows that they serve."""
    emulated = keys(LEVELS, "EMULATED")
    rows = []
    for processor, levels in LEVELS_OF.items():
        here = "run where the machine has it" if processor == "x86_64" else ""
        proof = "run in an emulator" if {*levels} <= {*emulated} else here
        rows.append([processor, ", ".join(f"`{level}`" for level in levels), proof])
    names = ast.literal_eval(constant(COMPILED, "ARCHITECTURES"))
    rows.append(["NVIDIA", ", ".join(f"`{name}`" for name in names), "`make gpu-compile`"])
    embedded = ast.literal_eval(constant(TRITON / "test_embedded.py", "EMBEDDED"))
    rows += [
        [devices, f"`{name}`", f"compiled as `{row}`; fake driver"]
        for name, (devices, row, _) in embedded.items()
    ]
    return table(["platform", "level", "proof"], rows)


def compiled() -> str:
    """Models whose kernels `make gpu-compile` makes, by the weights and KV that they have there."""
    models: defaultdict[str, tuple[dict[str, None], dict[str, None]]]
    models = defaultdict(lambda: ({}, {}))
    for model, kind, kv, _ in ast.literal_eval(constant(COMPILED, "MODELS")):
        models[model][0][kind] = models[model][1][kv] = None
    rows = [[f"`{name}`", *map(", ".join, kinds)] for name, kinds in models.items()]
    return table(["model", "weights", "KV"], rows)


def routes() -> Iterator[tuple[str, Any]]:
    """(`METHOD path`, endpoint) of every route, those of the operator's port too."""
    for router in (*ROUTERS, *OPERATOR_ROUTERS):
        for route in router.routes:
            for method in sorted(route.methods or ()):  # type: ignore[attr-defined]
                yield f"`{method} {route.path}`", route.endpoint  # type: ignore[attr-defined]


def interfaces() -> str:
    """Routes that serve something, by the module or folder that serves them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for route, endpoint in routes():
        if not hasattr(endpoint, REFUSES):
            name = re.sub(r"headrace\.server\.(routes\.)?", "", endpoint.__module__).split(".")[0]
            found[name].append(route)
    rows = [[f"`{name}`", ", ".join(dict.fromkeys(found[name]))] for name in sorted(found)]
    return table(["in `server/routes`", "routes"], rows)


def refusals() -> str:
    """Routes that answer every request with an error."""
    rows = [
        [route, getattr(endpoint, REFUSES)]
        for route, endpoint in routes()
        if hasattr(endpoint, REFUSES)
    ]
    return table(["route", "answer"], sorted(rows))


def choices() -> str:
    rows = [
        [
            f"`--{one.name.replace('_', '-')}`",
            ", ".join(map(str, one.metadata["choices"])),
            ", ".join(CPU_VALUES.get(one.name, ())),
        ]
        for one in fields(EngineOptions)
        if "choices" in one.metadata
    ]
    return table(["option", "values", "on a CPU, without `--kernels ref`"], rows)


def commands() -> str:
    return ", ".join(f"`{name}`" for name in COMMANDS) + ": [what they do](cli.md)."


def written() -> str:
    """The whole page."""
    lossy = ast.literal_eval(constant(PROVEN, "LOSSY"))
    bounds = " and ".join(f"{most} ({kind})" for kind, most in lossy.items())
    return "\n\n".join(
        [
            "# What there is",
            "Made by `python docs/capabilities.py` from the code's own registries and the tests' "
            "cases; a test holds it, and that a test names every route, family and command.",
            "## Model families",
            "Published: the configs on which reader, planner and memory plan are held "
            "(`tests/roofline/test_described.py`), and what a sequence keeps in their layers.",
            families(),
            "## Families and features",
            "Of each family in safetensors on the CPU kernels: the same answers with the feature "
            "as without, or a refusal by name, in `tests/models/test_features.py`; "
            "adapters against the adapter in the weights. GGUF gives transformers' 64 tokens "
            "(`tests/loader/test_gguf_greedy.py`) and llama.cpp's (`test_gguf_llamacpp.py`; "
            "Mistral's and Mixtral's files call themselves llama). Ranks: the same answers from "
            "several workers (`tests/worker/test_ranks_of_workers.py`).",
            "KV in int8 and k8v4 is lossy: an answer is the same in any batch and chunks. "
            "Against float32 KV a log-probability of the tiny random models changes by "
            f"{bounds} on average at most; perplexity of the default model by tenths of a percent "
            "([figures](kernels.md#attention-and-the-kv-cache)).",
            features(),
            "## Weights",
            "Of each format a small model answers as transformers does with the values that the "
            "format defines (`tests/models/test_formats.py`); the CPU kernels without PyTorch. "
            "Experts in MXFP4: `tests/loader/test_mxfp4_answers.py`.",
            weights(),
            "## Platforms",
            "Each level of a CPU gives the same bits (`test_levels_and_machines.py`); embedded "
            "GPUs: `test_embedded.py`, `test_gpus.py`.",
            platforms(),
            "Compiled are steps of:",
            compiled(),
            "## Choices of an engine",
            choices(),
            "## Interfaces",
            interfaces(),
            "Routes that always refuse:",
            refusals(),
            "## Commands",
            commands(),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(written())
