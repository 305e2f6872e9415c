"""Stages as data: what runs, what does not, what a kill or a changed byte costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest, OptionError, Untrusted
from headrace.factory.graph import Graph, Step
from headrace.factory.key import canonical, changed
from headrace.factory.stage import Outcome, Recipe, Result, Stage, Work
from headrace.factory.store import Descriptor, Store, name_of

TEXT = "text/plain"


def counted() -> tuple[list[str], dict[str, Recipe]]:
    """Recipes that write down that they ran."""
    ran: list[str] = []

    def write(work: Work) -> Result:
        ran.append(work.stage.name)
        inputs = {name: one.content for name, one in work.inputs.items()}
        text = canonical({"of": inputs, **work.stage.parameters})
        return Result({"text": work.store.put(text, TEXT)})

    def gate(work: Work) -> Result:
        ran.append(work.stage.name)
        return Result(outcome=Outcome(work.stage.parameters["outcome"]), reason="it was told so")

    return ran, {"write": Recipe(write), "gate": Recipe(gate)}


def chain(model: str = "a") -> list[Stage]:
    return [
        Stage("fetch", "write", (), {"model": model}),
        Stage("quantise", "write", ("fetch",), {"bits": 4}),
        Stage("image", "write", (), {"base": "small"}),
        Stage("profile", "write", ("quantise", "image")),
    ]


def names(steps: list[Step], *, ran: bool) -> list[str]:
    return sorted(step.stage.name for step in steps if step.ran is ran)


def test_unchanged_stages_do_not_run(tmp_path: Path) -> None:
    ran, recipes = counted()
    store = Store(tmp_path)
    first = Graph(chain(), recipes).run(store)
    again = Graph(chain(), recipes).run(Store(tmp_path))
    assert sorted(ran) == ["fetch", "image", "profile", "quantise"]
    assert names(again, ran=True) == []
    assert [step.manifest for step in first] == [step.manifest for step in again]


def test_a_changed_leaf_runs_what_depends_on_it_and_says_why(tmp_path: Path) -> None:
    ran, recipes = counted()
    store = Store(tmp_path)
    first = Graph(chain(), recipes).run(store)
    before = {step.stage.name: step.manifest.digest for step in first if step.manifest}
    ran.clear()
    plan = Graph(chain("b"), recipes).plan(store, before=before)
    assert {step.stage.name: step.why for step in plan if step.result is None} == {
        "fetch": "parameters.model was a, is b",
        "quantise": "fetch comes first",
        "profile": "quantise comes first",
    }
    assert ran == []
    again = Graph(chain("b"), recipes).run(store, before=before)
    assert names(again, ran=True) == ["fetch", "profile", "quantise"]


def test_a_recipe_that_changed_and_gives_the_same_ends_the_work_there(tmp_path: Path) -> None:
    ran, recipes = counted()
    store = Store(tmp_path)
    Graph(chain(), recipes).run(store)
    ran.clear()
    newer = {**recipes, "write": replace(recipes["write"], tools=("no-such-package",))}
    stages = [replace(s, recipe="old") if s.name != "fetch" else s for s in chain()]
    Graph(stages, {"old": recipes["write"], **newer}).run(store)
    assert "quantise" in ran  # Another recipe's name is another key …
    ran.clear()
    again = [replace(s, recipe="new") if s.name == "fetch" else s for s in stages]
    done = Graph(again, {"old": recipes["write"], "new": newer["write"]}).run(store)
    assert ran == ["fetch"]  # … and the same result of another fetch is not.
    assert names(done, ran=True) == ["fetch"]


def test_who_needs_a_failed_gate_is_left_out_and_the_others_run(tmp_path: Path) -> None:
    ran, recipes = counted()
    stages = [
        Stage("gate", "gate", (), {"outcome": "failed"}),
        Stage("unsure", "gate", (), {"outcome": "not evaluated"}),
        Stage("after", "write", ("gate",)),
        Stage("later", "write", ("after",)),
        Stage("beside", "write", ("unsure",)),
    ]
    steps = {step.stage.name: step for step in Graph(stages, recipes).run(Store(tmp_path))}
    assert sorted(ran) == ["beside", "gate", "unsure"]
    assert (steps["after"].result, steps["after"].why) == (None, "gate failed")
    assert steps["later"].why == "after is left out"
    assert steps["gate"].result is not None
    assert steps["gate"].result.outcome is Outcome.FAILED


def test_asked_for_anew_runs_though_it_is_kept(tmp_path: Path) -> None:
    ran, recipes = counted()
    graph, store = Graph(chain(), recipes), Store(tmp_path)
    graph.run(store)
    ran.clear()
    graph.run(store, fresh={"image"})
    assert ran == ["image"]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([Stage("a", "write"), Stage("a", "write")], "two stages are called a"),
        ([Stage("a", "write", ("b",))], "no stage 'b'"),
        ([Stage("a", "none")], "no recipe 'none'"),
        ([Stage("a", "write", ("b",)), Stage("b", "write", ("a",))], "need each other"),
    ],
)
def test_what_is_no_graph_is_refused(stages: list[Stage], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Graph(stages, counted()[1])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink])
@pytest.mark.parametrize("part", ["manifest", "key", "pointer"])
def test_a_damaged_result_is_made_again(
    tmp_path: Path, part: str, damage: Callable[[Path], None]
) -> None:
    ran, recipes = counted()
    store = Store(tmp_path)
    steps = Graph(chain(), recipes).run(store)
    image = next(step for step in steps if step.stage.name == "image")
    assert image.key is not None
    assert image.manifest is not None
    path = {
        "manifest": store.blob(image.manifest.digest),
        "key": store.blob(image.key),
        "pointer": tmp_path / "stages" / image.key.removeprefix("sha256:"),
    }[part]
    damage(path)
    ran.clear()
    again = Graph(chain(), recipes).run(store)
    assert ran == ["image"]
    assert [step.manifest for step in again] == [step.manifest for step in steps]


def test_a_pointer_to_the_result_of_another_stage_is_not_believed(tmp_path: Path) -> None:
    _, recipes = counted()
    store = Store(tmp_path)
    steps = {step.stage.name: step for step in Graph(chain(), recipes).run(store)}
    key, other = steps["image"].key, steps["fetch"].manifest
    assert key is not None
    assert other is not None
    store.keep(key, other)
    plan = {step.stage.name: step for step in Graph(chain(), recipes).plan(store)}
    assert "of another key" in plan["image"].why


def test_a_blob_is_believed_only_in_its_own_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = store.put(b"some bytes", TEXT)
    assert store.read(one.digest) == b"some bytes"
    flipped(store.blob(one.digest))
    with pytest.raises(Untrusted, match=one.digest):
        store.read(one.digest)
    assert store.put(b"some bytes", TEXT) == one
    assert store.read(one.digest) == b"some bytes"


def test_the_folder_is_an_oci_layout(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = store.put(b"{}", "application/json")
    store.tag("name", one)
    store.tag("name", store.put(b"[]", "application/json"))
    assert json.loads((tmp_path / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["schemaVersion"] == 2
    assert [entry["size"] for entry in index["manifests"]] == [2]
    assert [name_of(entry) for entry in index["manifests"]] == ["name"]


def test_a_file_is_kept_as_a_copy_and_comes_back_under_its_name(tmp_path: Path) -> None:
    store, source = Store(tmp_path / "store"), tmp_path / "weights"
    source.write_bytes(b"weights")
    one = store.put_file(source, TEXT)
    source.write_bytes(b"changed")
    assert one == store.put(b"weights", TEXT)
    folder = store.checkout({"inside/weights": one})
    assert (folder / "inside" / "weights").read_bytes() == b"weights"
    (folder / "inside" / "weights").unlink()
    assert store.checkout({"inside/weights": one}) == folder
    assert (folder / "inside" / "weights").read_bytes() == b"weights"
    assert store.export("page.html", b"page").read_bytes() == b"page"
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


def test_a_cells_last_run_is_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one = store.put(b"{}", TEXT)
    store.remember("a cell", {"fetch": one.digest})
    assert store.remembered("a cell") == {"fetch": one.digest}
    assert store.remembered("another") == {}


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file")
    with pytest.raises(OptionError, match="--store"):
        Store(tmp_path)


def test_a_key_says_what_changed() -> None:
    before, now = {"a": {"b": 1, "c": [1]}, "d": "x"}, {"a": {"b": 2, "c": [1]}}
    assert changed(before, now) == ["a.b was 1, is 2", "d was x, is absent"]
    with pytest.raises(ValueError):
        canonical({"not": float("nan")})


def fleet(models: int, code: str = "1") -> list[Stage]:
    """Fifteen cells of each model: five kinds of hardware, three recipes."""
    stages = []
    for model in range(models):
        stages.append(Stage(f"m{model}/fetch", "write", (), {"model": model, "code": code}))
        for cell in range(15):
            name = f"m{model}/c{cell}"
            stages.append(Stage(name, "write", (f"m{model}/fetch",), {"cell": cell}))
    return stages


def test_an_unchanged_fleet_runs_nothing_and_one_leaf_its_dependents(tmp_path: Path) -> None:
    ran, recipes = counted()
    store = Store(tmp_path)
    Graph(fleet(20), recipes).run(store)
    assert len(ran) == 20 * 16
    ran.clear()
    assert not any(step.ran for step in Graph(fleet(20), recipes).run(store))
    leaf = [
        replace(one, parameters={"cell": -1}) if one.name == "m7/c3" else one for one in fleet(20)
    ]
    Graph(leaf, recipes).run(store)
    assert ran == ["m7/c3"]


CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from headrace.factory.graph import Graph
from headrace.factory.store import Store
from test_factory_graph import counted, fleet
def watch(what, step):
    print(what, step.stage.name, flush=True)
Graph(fleet(4), counted()[1]).run(Store(Path(sys.argv[2])), watch=watch)
"""


def child(store: Path) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", CHILD, here, str(store)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_anywhere_the_same_command_ends_in_the_same(tmp_path: Path) -> None:
    """Killed after each further event; what had ended does not run again."""
    Graph(fleet(4), counted()[1]).run(Store(tmp_path / "whole"))
    for events in (1, 2, 7, 30):
        process = child(tmp_path / "killed")
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(events)]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        ended = {line.split()[1] for line in seen if line.startswith("ended")}
        plan = Graph(fleet(4), counted()[1]).plan(Store(tmp_path / "killed"))
        assert ended <= {step.stage.name for step in plan if step.result is not None}
    Graph(fleet(4), counted()[1]).run(Store(tmp_path / "killed"))
    for folder in ("blobs/sha256", "stages"):
        whole, killed = (
            {path.name: path.read_bytes() for path in (tmp_path / one / folder).iterdir()}
            for one in ("whole", "killed")
        )
        assert whole == killed


@pytest.mark.slow
def test_two_processes_at_once_do_every_stage_once(tmp_path: Path) -> None:
    Store(tmp_path)
    both = [child(tmp_path), child(tmp_path)]
    told = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    ended = [line.split()[1] for text in told for line in text.splitlines() if "ended" in line]
    assert sorted(ended) == sorted(stage.name for stage in fleet(4))


def test_a_lock_is_dropped_with_its_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    told: list[str] = []
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with store.lock("one"):
            os.write(write, b".")
            signal.pause()
    os.read(read, 1)
    with pytest.raises(BlockingIOError), store.lock("one", lambda: _refuse(told)):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with store.lock("one", lambda: _refuse(told)):
        pass
    assert told == ["waits"]
    os.close(read)
    os.close(write)


def _refuse(told: list[str]) -> None:
    told.append("waits")
    raise BlockingIOError


def test_descriptors_of_strangers_are_checked() -> None:
    for wrong in ({}, {"digest": "md5:1", "size": 1, "mediaType": "a"}, [], None):
        with pytest.raises(Untrusted):
            Descriptor.read(wrong)
