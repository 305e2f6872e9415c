"""Imports point down: the ranks of the packages, held by parsing every import.

A module may import only packages of a lower rank and its own siblings, without cycles among
modules; the two planes meet nowhere but in `base`; what must start without torch does.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paths
from budgets import parsed
from budgets import (
    test_a_word_has_one_row_in_the_glossary as test_a_word_has_one_row_in_the_glossary,
)
from budgets import test_every_docstring_can_be_read_alone as test_every_docstring_can_be_read_alone
from budgets import test_nothing_grows_beyond_its_ceiling as test_nothing_grows_beyond_its_ceiling
from budgets import test_retired_words_do_not_come_back as test_retired_words_do_not_come_back
from budgets import (
    test_the_glossary_names_files_that_are_there as test_the_glossary_names_files_that_are_there,
)
from budgets import test_wide_records_do_not_grow as test_wide_records_do_not_grow
from budgets import test_words_stay_in_their_packages as test_words_stay_in_their_packages
from messages import test_messages_to_users_are_clauses as test_messages_to_users_are_clauses
from messages import (
    test_the_rule_refuses_what_it_should as test_the_rule_refuses_what_it_should,
)

ROOT = Path(__file__).parent.parent / "src" / "headrace"

RANKS = {
    "base": 0,
    "obs": 1,
    "text": 1,
    "media": 1,
    "kv": 1,
    "kernels": 1,
    "dist": 2,
    "layers": 1,
    "speculate": 1,
    "sched": 2,
    "quant": 2,
    "models": 2,
    "roofline": 3,
    "loader": 3,
    "programs": 4,
    "worker": 5,
    "speech": 5,
    "engine": 6,
    "quantise": 6,
    "server": 7,
    "bench": 7,
    "route": 8,
    "factory": 8,
    "cli": 9,
}
CONTROL = {"sched", "kv", "text", "roofline"}
DATA = {"kernels", "dist", "quant", "worker"}
DESCRIPTION = {"layers", "models"}
"""Packages of neither plane: what a model is, on `base` alone."""
PUBLIC_FACE = {"__init__", "__main__"}
"""The package's own top: `headrace.LLM` and `python -m headrace` may reach everything."""


@cache
def modules() -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__") or "__init__"
        found.append((name, parsed(path)))
    return found


def imports(name: str, tree: ast.Module, is_package: bool) -> Iterator[tuple[str, bool]]:
    """(module below headrace, is it needed at run time?) for each own import of a module."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(tree):
        runtime = id(node) not in typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("headrace."):
                    yield alias.name.removeprefix("headrace."), runtime
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
                target = [*base, *(node.module.split(".") if node.module else [])]
            elif node.module and node.module.split(".")[0] == "headrace":
                target = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                full = [*target, alias.name]
                exists = (ROOT.joinpath(*full)).is_dir() or (
                    ROOT.joinpath(*full[:-1], full[-1] + ".py")
                ).is_file()
                yield ".".join(full if exists else target), runtime


@cache
def graph() -> dict[str, list[tuple[str, bool]]]:
    return {
        name: list(imports(name, tree, (ROOT.joinpath(*name.split("."))).is_dir()))
        for name, tree in modules()
        if name not in PUBLIC_FACE
    }


def test_every_package_has_a_rank() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == set(RANKS)


def test_imports_point_down() -> None:
    wrong = []
    for module, targets in graph().items():
        package = module.split(".")[0]
        for target, _ in targets:
            other = target.split(".")[0]
            if other not in RANKS:
                wrong.append(f"{module} imports the top of the package")
            elif other != package and RANKS[other] >= RANKS[package]:
                wrong.append(f"{module} (rank {RANKS[package]}) imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_planes_do_not_meet() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target, _ in targets
        for here, there in ((CONTROL, DATA), (DATA, CONTROL))
        if module.split(".")[0] in here and target.split(".")[0] in there
    ]
    assert not wrong, "\n".join(wrong)


def test_a_description_stands_on_base_alone() -> None:
    """No array, no weight, no backend: the roofline prices what the models say."""
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target, _ in targets
        if module.split(".")[0] in DESCRIPTION
        and target.split(".")[0] not in DESCRIPTION | {"base"}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_cycles_among_modules() -> None:
    """Imports for types alone count too: who reads a module can read those below it first."""
    edges = {
        module: {target for target, _ in targets if target != module}
        for module, targets in graph().items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            pytest.fail(" → ".join([*path[path.index(module) :], module]))
        if module in done:
            return
        for target in sorted(edges.get(module, ())):
            # A submodule's import of its own package's __init__ is the usual re-export.
            if target != module.rpartition(".")[0]:
                visit(target, (*path, module))
        done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize(
    "module",
    [
        "headrace",
        "headrace.kv",
        "headrace.sched",
        "headrace.speculate",
        "headrace.text",
        "headrace.roofline",
        "headrace.base",
        "headrace.obs",
        "headrace.bench",
        "headrace.server.app",
        "headrace.cli.main",
        "headrace.kernels.draws",
        "headrace.kernels.host_sampling",
        "headrace.kernels.rope",
        "headrace.kernels.select",
        "headrace.loader.weights",
        "headrace.models.registry",
        "headrace.worker",
    ],
)
def test_starts_without_torch(module: str) -> None:
    code = (
        f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_gateway_starts_without_the_routes_of_the_server() -> None:
    code = "import headrace.route.gateway, sys; sys.exit('fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def functions_of(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Each function, and the module itself, with what is in it and in no function within it."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    waiting: list[ast.AST] = [tree]
    while waiting:
        function = waiting.pop()
        found: list[ast.AST] = []
        inner = [*ast.iter_child_nodes(function)]
        while inner:
            node = inner.pop()
            if isinstance(node, kinds):
                waiting.append(node)
            else:
                found.append(node)
                inner += ast.iter_child_nodes(node)
        yield function, found


def called(node: ast.AST) -> str:
    func = node.func if isinstance(node, ast.Call) else None
    return str(getattr(func, "attr", getattr(func, "id", "")))


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def bound_names(body: list[ast.AST], wanted: ast.AST) -> set[str]:
    """Names that the value with this call in it is given to, or that it is put into."""
    found = set()
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(one is wanted for one in ast.walk(node)):
                for one in targets:
                    one = one.value if isinstance(one, ast.Subscript) else one
                    found |= {one.id} if isinstance(one, ast.Name) else set()
    return found


def unseen(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Tasks, futures and threads that end unseen, with the line."""
    for _, body in functions_of(tree):
        awaited = [node for node in body if isinstance(node, ast.Await)]
        directly = {id(one) for node in awaited for one in ast.walk(node)}
        known = {name for node in awaited for name in names_in(node)}
        joined = set()
        for node in body:
            if called(node) in ("add", "append") and isinstance(node, ast.Call):
                owner = node.func.value if isinstance(node.func, ast.Attribute) else node
                if names_in(owner) & known:
                    known |= {name for one in node.args for name in names_in(one)}
            if called(node) == "join" and isinstance(node, ast.Call):
                joined |= names_in(node.func)
        for node in body:
            line = getattr(node, "lineno", 0)
            if called(node) == "create_task":
                yield line, "starts a task past TaskWatch"
            bound = (
                bound_names(body, node) if called(node) in ("ensure_future", "Thread") else set()
            )
            if called(node) == "ensure_future" and id(node) not in directly and not bound & known:
                yield line, "leaves a future that its function does not await"
            if called(node) == "Thread" and not bound & joined:
                yield line, "starts a thread past ThreadWatch"


def test_no_task_and_no_thread_ends_unseen() -> None:
    """Every task is started by `obs.tasks.TaskWatch` and every thread by `obs.threads.ThreadWatch`,
    which see its end; what a function starts for itself it awaits or joins (ADR 0006)."""
    wrong = [
        f"{module}:{line} {what}"
        for module, tree in modules()
        if module not in ("obs.tasks", "obs.threads")
        for line, what in unseen(tree)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_path_is_a_test() -> None:
    tests = Path(__file__).parent
    absent = [
        path
        for path in paths.ALL
        for file, _, name in (path.partition("::"),)
        if not (tests / file).is_file()
        or f"def {name.partition('[')[0]}(" not in (tests / file).read_text() + "def ("
    ]
    assert not absent, "\n".join(absent)


def test_files_of_folders_without_a_package_have_names_of_their_own() -> None:
    """pytest imports such a file by its bare name: a second one of that name is an error."""
    first: dict[str, Path] = {}
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        if file.name != "conftest.py" and not (file.parent / "__init__.py").exists():
            other = first.setdefault(file.name, file)
            assert other is file, f"{file} and {other} have one name: rename one of them"


def test_every_folder_of_tests_has_a_path() -> None:
    tests = Path(__file__).parent
    slow = {
        file.relative_to(tests).parts[0]
        for file in tests.rglob("test_*.py")
        if "mark.slow" in file.read_text() or "mark.model" in file.read_text()
    }
    assert {name for name in slow if "." not in name} <= {path.split("/")[0] for path in paths.ALL}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("watching = [ensure_future(one.watch()) for one in replicas]\nawait other()", [2]),
        ("ensure_future(work())", [2]),
        ("self.task = ensure_future(work())", [2]),
        ("task = ensure_future(work())\ntask.cancel()", [2]),
        ("task = loop.create_task(work())\nawait task", [2]),
        ("def inner():\n  stops.append(ensure_future(stop()))\nawait gather(*stops)", [3]),
        ("threading.Thread(target=run).start()", [2]),
        ("thread = threading.Thread(target=run)\nself.thread = thread", [2]),
        ("self.thread = threading.Thread(target=run)", [2]),
        ("tasks = {ensure_future(work()), ensure_future(gone())}\nawait wait(tasks)", []),
        ("pending[ensure_future(work())] = 1\nawait wait(pending)", []),
        ("one = ensure_future(work())\nwaiting.add(one)\nawait wait(waiting)", []),
        ("await gather(*[ensure_future(work()) for _ in range(3)])", []),
        ("thread = threading.Thread(target=run)\nthread.start()\nthread.join()", []),
    ],
)
def test_the_rule_finds_what_ends_unseen(text: str, lines: list[int]) -> None:
    body = "".join(f"  {line}\n" for line in text.split("\n"))
    tree = ast.parse(f"async def outer():\n{body}")
    assert [line for line, _ in unseen(tree)] == lines


def test_what_others_send_is_decoded_in_one_place() -> None:
    """`base.foreign` alone decodes: each of msgspec's decoders raises several errors, of which a
    caller that names some forgets others."""
    wrong = [
        f"{module}:{node.lineno} {ast.unparse(node)}: use base.foreign"
        for module, tree in modules()
        if module != "base.foreign"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node)
        in (
            *(f"msgspec.{kind}.{what}" for kind in ("json", "msgpack") for what in DECODES),
            "msgspec.DecodeError",
            "msgspec.MsgspecError",
        )
    ]
    assert not wrong, "\n".join(wrong)


DECODES = ("decode", "Decoder")


def _calls(name: str, tree: ast.Module) -> bool:
    """Tell whether a module calls a method of this name, of an object other than its own base."""
    methods = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        isinstance(func, ast.Attribute)
        and func.attr == name
        and ast.unparse(func.value) != "super()"
        for func in methods
    )


def test_there_is_one_step_loop() -> None:
    """Plans of every network are asked for and submitted by one module; the simulator's is of
    virtual time."""
    asked = {name for name, tree in modules() if _calls("schedule", tree)}
    assert asked == {"engine.loop.core", "engine.simulator.sim_replica"}
    drivers = {
        name
        for name, tree in modules()
        if name.startswith(("engine.", "server.", "speech."))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("executor.submit")
    }
    assert drivers == {"engine.loop.core"}


def test_the_side_that_answers_computes_no_network() -> None:
    """No module of the API process imports kernels of a device, a worker, a codec or a
    transcriber, directly or not."""
    code = (
        "import sys, headrace.server.app, headrace.server.speaking, headrace.server.hearing.ears, "
        "headrace.engine.clients.group, headrace.engine.programs.speaking; "
        "print(*[m for m in sys.modules if m.startswith(('headrace.kernels.cpu', "
        "'headrace.kernels.program', 'headrace.kernels.operators', 'headrace.worker', "
        "'headrace.speech.codec.', 'headrace.speech.transcript')) or m == 'headrace.speech.codec'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not found.stdout.split()
