"""Fleets: what starts no process, what one bad cell does to the others, what a kill costs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from factory_cell import AT_LEAST, Made, make

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.factory.build import BuildOptions
from headrace.factory.fleet import (
    Cell,
    build_cell,
    locally,
    read_fleet,
    run_command,
    run_fleet,
)
from headrace.factory.workflow import WorkflowOptions, tasks


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("fleet"), without="accuracy")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def toml(made: Made, *models: str, recipes: str = "[{}]") -> str:
    named = json.dumps([str(made.model), *models])
    build = f'[build]\nat_least = {AT_LEAST}\nwithout = "accuracy"\n'
    return f"models = {named}\nrecipes = {recipes}\n{build}"


def nobody(cells: list[Cell]) -> Iterator[tuple[int, int, str]]:
    assert not cells, "nothing is to be built"
    return iter(())


@pytest.mark.slow
def test_a_fleet_is_built_once(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell is there already, one is new, one has no model: each ends for itself."""
    monkeypatch.setenv("HEADRACE_CACHE", str(made.cache))
    recipes = "[{threads = 1}, {threads = 1, max_sequences = 2, prefix_cache = false}]"
    file = written(tmp_path / "fleet.toml", toml(made, str(tmp_path / "none"), recipes=recipes))
    cells = read_fleet(file)
    assert len(cells) == 4
    ends = list(run_fleet(cells, locally(2)))
    assert [one.end for one in ends] == ["kept", "broken", "broken", "built"]
    assert ends[0].name == made.cell
    assert "none" in ends[1].why
    again = list(run_fleet(cells[:2], nobody))
    assert [(one.name, one.end) for one in again] == [(ends[i].name, "kept") for i in (0, 3)]
    said = made.call("fleet", str(file), status=1)
    assert "4 cells: 2 broken, 2 kept" in said


def test_the_command_of_a_cell_says_what_was_set() -> None:
    engine = EngineOptions(model="one", prefix_cache=False, deterministic=True, max_sequences=2)
    cell = Cell(engine, BuildOptions(at_least=2.5, store="/there"))
    assert cell.words("--json") == [
        *("factory", "build", "--json", "--deterministic", "--max-sequences=2"),
        *("--no-prefix-cache", "--store=/there", "--at-least=2.5", "--", "one"),
    ]


@pytest.mark.parametrize("model", ["-none", "--json", "--help"])
def test_a_model_that_begins_with_a_hyphen_is_no_option(model: str, tmp_path: Path) -> None:
    """The command looks for the model, and says that there is none of its name."""
    cell = Cell(EngineOptions(model=model, offline=True), BuildOptions(store=str(tmp_path)))
    status, said = build_cell(cell)
    assert status > 1
    assert model in said
    assert "option" not in said.lower()


def test_cells_are_of_kinds_of_machines(made: Made, tmp_path: Path) -> None:
    text = 'hardware = ["arm", "gpu"]\n' + toml(made, recipes="[{}, {threads = 1}]")
    cells = read_fleet(written(tmp_path / "fleet.toml", text))
    assert [one.hardware for one in cells] == ["arm", "gpu", "arm", "gpu"]
    with pytest.raises(OptionError, match="--on"):
        tasks(cells, WorkflowOptions(), in_pods=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = [", "is not valid TOML"),
        ("models = []", "models not empty"),
        ('models = "one"', "models not empty"),
        ('models = ["one"]\nrecipe = 1', "recipe is none of"),
        ('models = ["one"]\nrecipes = [{max_contxt = 1}]', "max_contxt"),
        ('models = ["one"]\nrecipes = [{max_sequences = 0}]', "max_sequences"),
        ('models = ["one"]\nrecipes = [3]', "recipes"),
        ('models = ["one"]\n[build]\nleast_share = 7', "least_share"),
        ("models = [1]", "model"),
        ('models = ["one"]\nhardware = []', "hardware"),
        ('models = ["one"]\nhardware = "gpu"', "hardware"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read_fleet(written(tmp_path / "fleet.toml", text))
    with pytest.raises(OptionError, match="No such file"):
        read_fleet(tmp_path / "none.toml")


@pytest.mark.parametrize(("kills", "status"), [(0, 0), (2, 0), (9, -9)])
def test_a_killed_process_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, status: int
) -> None:
    """Each start writes a line, and the first ones are killed before they have done anything."""
    starts = tmp_path / "starts"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        f"with open({str(starts)!r}, 'a+') as file:\n"
        "    file.write('.')\n"
        "    file.seek(0)\n"
        f"    if len(file.read()) <= {kills}:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    ended, said = run_command(["--version"])
    assert ended == status
    assert len(starts.read_text()) == min(kills + 1, 3)
    assert said.startswith("headrace") == (status == 0)
