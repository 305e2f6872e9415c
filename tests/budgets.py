"""Sizes that may not grow much: each ceiling leaves room for ordinary work above today's largest.

A change that needs more room splits something up, or says in its commit why the ceiling is wrong.
Triton's device functions are apart: their parameters are pointers and strides, and what one of
them does cannot be called from another without registers moving.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headrace"
DOCS = ROOT / "docs"

CEILINGS = {
    "lines of a file": 530,  # What is read in one sitting.
    "lines of a function": 140,  # What is understood without scrolling back.
    "lines of a command": 150,  # Most of them say what an option means.
    "lines of a class": 450,  # What has one reason to change.
    "lines of a Triton function": 230,
    "lines of the package": 156_500,  # All Python below src/headrace, with 3 % of room.
    "parameters": 16,  # What a caller can get right without looking it up.
    "parameters of a command": 40,  # Each is an option that `--help` prints.
    "parameters of a Triton function": 41,
    "fields": 37,  # What a record can be explained as; public options and wire formats: `WIDE`.
    "own imports in functions": 56,  # Each hides an edge of the graph of modules.
    "other imports in functions": 76,  # Each keeps a start without torch, or quick.
    "class names with two meanings": 58,  # One word, one meaning (`docs/glossary.md`).
    "environment reads": 0,  # Outside `base/environment.py`, which lists every variable.
}
WIDE = {"base.config.EngineOptions": 38, "bench.options.RunOptions": 42}
"""Records that a user writes or a file holds, one option or column a field."""


FRAGMENT = re.compile(
    r"(Of|As|Who|Whom|Whose|And|But|Nor|Else|Then|Also|(With|For|From|In|By|To|On) which"
    r"|Those|That of|The same(?= for\b|[,.:])|Likewise)\b|…"
)
"""Beginnings that no docstring may have: they would need the line above to be understood."""
RELATIVE = re.compile(r"(What|Whoever|Which|Where|How|Whether it is)\b")
"""Beginnings that no docstring of the package may have: a noun phrase or a verb serves."""
RETIRED = {
    "sees to both sides": "bidirectional",
    "held to a form": "constrained",
    "demanded form": "constrained answer",
    "pages of KV": "blocks",
}
"""Home-made or foreign terms that are gone, and the glossary's word for them."""
EVERYWHERE = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {"__init__", "__main__"}
KEPT = {
    "slot": {
        "base",
        "engine",
        "kernels",
        "kv",
        "loader",
        "roofline",
        "sched",
        "server",
        "speech",
        "worker",
    },
    "whole": {"bench", "engine", "server"},
    "gate": {
        "base",
        "bench",
        "cli",
        "factory",
        "kernels",
        "layers",
        "loader",
        "models",
        "quant",
        "roofline",
    },
    "recorder": {"engine", "obs"},
}
"""Words of the glossary that names may only have in these packages, where they mean what it says:
elsewhere each had a second meaning once."""

Size = tuple[int, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): parsed(path)
        for path in sorted(SOURCE.rglob("*.py"))
    }


KINDS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Attribute, ast.ImportFrom


@cache
def kept() -> list[tuple[str, ast.AST]]:
    return [
        (module, node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, KINDS)
    ]


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    return ((module, node) for module, node in kept() if isinstance(node, kinds))


def lines(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", None) or 0) - getattr(node, "lineno", 0) + 1


def decorated(node: Function | ast.ClassDef, word: str) -> bool:
    return any(word in ast.unparse(one) for one in node.decorator_list)


def sort_of(module: str, function: Function) -> str:
    if module.startswith("kernels.triton.") and decorated(function, "triton.jit"):
        return "Triton function"
    command = module.startswith("cli.") and (
        function.name.endswith("_command")
        or any(word in ast.unparse(function.args) for word in ("flag(", "argument("))
    )
    return "command" if command else "function"


def parameters(function: Function) -> int:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def files() -> Iterator[Size]:
    for path in SOURCE.rglob("*.py"):
        yield len(path.read_text().splitlines()), str(path.relative_to(SOURCE))


def functions(sort: str) -> Iterator[Size]:
    for module, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, Function)
        if sort_of(module, node) == sort:
            yield lines(node), f"{module}.{node.name}"


def signatures(sort: str) -> Iterator[Size]:
    for module, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, Function)
        if sort_of(module, node) == sort:
            yield parameters(node), f"{module}.{node.name}"


def classes() -> Iterator[Size]:
    for module, node in nodes(ast.ClassDef):
        yield lines(node), f"{module}.{getattr(node, 'name', '')}"


def records() -> Iterator[Size]:
    """Fields of dataclasses; a `msgspec.Struct` and a pydantic model have those of a format."""
    for module, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        name = f"{module}.{node.name}"
        if decorated(node, "dataclass"):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            yield len(fields) if len(fields) > WIDE.get(name, 0) else 0, name


def local_imports(*, own: bool) -> list[str]:
    found = set()
    for module, function in nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                ours = bool(node.level) or (node.module or "").split(".")[0] == "headrace"
            elif isinstance(node, ast.Import):
                ours = any(alias.name.split(".")[0] == "headrace" for alias in node.names)
            else:
                continue
            if ours == own:
                found.add(f"{module}:{node.lineno} {ast.unparse(node)}")
    return sorted(found)


def environment_reads() -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return [
        f"{module}:{node.lineno}"
        for module, node in nodes(ast.Attribute, ast.ImportFrom)
        if module != "base.environment"
        and (
            (isinstance(node, ast.Attribute) and node.attr in names)
            or (isinstance(node, ast.ImportFrom) and names & {one.name for one in node.names})
        )
    ]


def twice_named() -> list[str]:
    """Names that two classes of the house share; a class of `server.routes` is named by the
    interface that it serves."""
    where = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                where[node.name.lstrip("_")].append(module)
    return [f"{name}: {', '.join(places)}" for name, places in where.items() if len(places) > 1]


MEASURED = {
    "lines of a file": lambda: max(files()),
    "lines of a function": lambda: max(functions("function")),
    "lines of a Triton function": lambda: max(functions("Triton function")),
    "lines of a command": lambda: max(functions("command")),
    "lines of a class": lambda: max(classes()),
    "lines of the package": lambda: (sum(size for size, _ in files()), "all packages together"),
    "parameters": lambda: max(signatures("function")),
    "parameters of a command": lambda: max(signatures("command")),
    "parameters of a Triton function": lambda: max(signatures("Triton function")),
    "fields": lambda: max(records()),
    "own imports in functions": lambda: counted(local_imports(own=True)),
    "other imports in functions": lambda: counted(local_imports(own=False)),
    "class names with two meanings": lambda: counted(twice_named()),
    "environment reads": lambda: counted(environment_reads()),
}


def counted(found: list[str]) -> Size:
    return len(found), "\n".join(found)


@pytest.mark.parametrize("what", CEILINGS)
def test_nothing_grows_beyond_its_ceiling(what: str) -> None:
    value, where = MEASURED[what]()
    assert value <= CEILINGS[what], f"{what}: {value}, at most {CEILINGS[what]}: {where}"


@pytest.mark.parametrize("name", WIDE)
def test_wide_records_do_not_grow(name: str) -> None:
    module, _, wanted = name.rpartition(".")
    (fields,) = (
        sum(isinstance(one, ast.AnnAssign) for one in node.body)
        for node in ast.walk(trees()[module])
        if isinstance(node, ast.ClassDef) and node.name == wanted
    )
    assert fields <= WIDE[name], f"{name}: {fields} fields, at most {WIDE[name]}"


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Every text that stands alone as a statement: of modules, classes, functions, attributes."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(parsed(path)):
            for one in body if isinstance(body := getattr(node, "body", None), list) else ():
                if (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                ):
                    yield f"{path.relative_to(ROOT)}:{one.lineno}", one.value.value.strip()


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_every_docstring_can_be_read_alone(folder: str) -> None:
    wrong = [
        f"{where} {text[:60]!r}"
        for where, text in docstrings(ROOT / folder)
        if FRAGMENT.match(text) or (folder == "src" and RELATIVE.match(text))
    ]
    assert not wrong, "\n".join(wrong)


def glossary() -> list[str]:
    """The words that have a row, one by one."""
    rows = re.findall(r"^\| (\*\*.+?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    return [word for row in rows for word in re.findall(r"\*\*(.+?)\*\*", row)]


def test_a_word_has_one_row_in_the_glossary() -> None:
    twice = [word for word, count in Counter(glossary()).items() if count > 1]
    assert len(glossary()) > 40
    assert not twice


def test_the_glossary_names_files_that_are_there() -> None:
    places = re.findall(r"`((?:\w+/)+\w+\.(?:py|h))`", (DOCS / "glossary.md").read_text())
    assert len(places) > 20
    for place in places:
        assert any(SOURCE.rglob(place)), place


def named(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that reaches beyond its function: attributes, arguments, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def test_words_stay_in_their_packages() -> None:
    wrong = [
        f"{module}:{line}: {name}"
        for module, tree in trees().items()
        for name, line in named(tree)
        for part in re.findall(r"[A-Z]?[a-z]+", name)
        if module.split(".")[0] not in KEPT.get(part.lower().removesuffix("s"), EVERYWHERE)
    ]
    assert not wrong, "\n".join(wrong)


def test_retired_words_do_not_come_back() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {word!r}; the word is {instead!r}"
        for path in (*SOURCE.rglob("*.py"), *DOCS.glob("*.md"), ROOT / "README.md")
        for word, instead in RETIRED.items()
        if re.search(rf"\b{word}\b", path.read_text(), re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)
