"""A tiny model through the whole factory: stages, gates, two builders, the commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from factory_cell import AT_LEAST, Made, flip, make, rewrite

from headrace.base.config import EngineOptions
from headrace.base.errors import InvalidRequest, OptionError, Untrusted
from headrace.factory.attest import measured_of
from headrace.factory.build import Build, BuildOptions, CellResult
from headrace.factory.key import hardware_class
from headrace.factory.profile import read_profile

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("factory"))


def outcomes(result: CellResult) -> dict[str, str | None]:
    return {one.stage.name: one.result and str(one.result.outcome) for one in result.steps}


def test_a_build_ends_in_a_signed_profile(made: Made) -> None:
    assert outcomes(made.result) == {
        "fetch": "passed",
        "verify": "not evaluated",
        "format": "passed",
        "licence": "not evaluated",
        "limits": "passed",
        "accuracy": "not evaluated",
        "performance": "passed",
        "sbom": "passed",
        "advisories": "not evaluated",
        "profile": "passed",
        "sign": "passed",
        "provenance": "passed",
    }
    body = made.body
    names = sorted(path.name for path in made.model.iterdir())
    assert [one.path for one in body.model.files] == names
    assert body.limits["max_context"] == 512
    assert body.options == {"threads": 1}
    assert body.hardware == hardware_class()
    assert set(body.gates["performance"].figures) == {"answers"}
    measured = measured_of(made.store, made.keys, read_profile(made.envelope, made.keys))
    assert measured is not None
    assert measured.seconds_per_token is not None
    assert measured.gates["performance"]["tokens_per_second"] > AT_LEAST
    assert body.gates["accuracy"].figures["perplexity"]["tokens"] > 100


def test_again_nothing_runs(made: Made) -> None:
    again = made.again().run()
    assert again.ran == []
    assert again.profile == made.result.profile


def test_one_changed_wish_runs_what_depends_on_it(made: Made) -> None:
    plan = made.again(accept_licences="mine").plan()
    todo = {step.stage.name: step.why for step in plan if step.result is None}
    assert list(todo) == ["licence", "profile", "sign", "provenance"]
    assert todo["licence"].startswith("parameters.accepted was []")


def test_the_page_shows_every_stage(made: Made) -> None:
    text = made.result.page.read_text()
    assert made.result.profile is not None
    assert made.result.profile.digest in text
    for step in made.result.steps:
        assert f'id="{step.stage.name}"' in text
    assert "not evaluated" in text


def test_two_builders_make_the_same(made: Made, tmp_path: Path) -> None:
    """Elsewhere, in another folder, at another time: every byte but what a clock measured."""
    moved = shutil.copytree(made.model, tmp_path / "elsewhere" / "tiny")
    ours = made.again(without="performance", store=made.fork(tmp_path)).run()
    options = BuildOptions(store=str(tmp_path / "store"), without="performance")
    theirs = Build(made.engine(moved), options).run()
    assert theirs.profile == ours.profile
    assert theirs.page.read_bytes() == ours.page.read_bytes()
    assert len(theirs.ran) == 11


def test_two_builds_with_other_figures_sign_one_profile(made: Made, tmp_path: Path) -> None:
    """Figures that a clock measured are signed, outside the profile."""
    again = made.again(fresh="performance", store=made.fork(tmp_path))
    theirs = again.run()
    assert set(theirs.ran) == {"performance", "provenance"}
    assert theirs.profile == made.result.profile
    profile = read_profile(made.envelope, made.keys)
    ours, others = (measured_of(one, made.keys, profile) for one in (made.store, again.store))
    assert ours is not None
    assert others is not None
    assert ours != others, "nanoseconds of two runs"
    assert ours.gates.keys() == others.gates.keys() == {"performance"}


# Gates


def test_a_pickle_is_never_loaded(made: Made, tmp_path: Path) -> None:
    model = shutil.copytree(made.model, tmp_path / "pickled")
    (model / "notes.txt").write_bytes(b"\x80\x04.")
    result = Build(made.engine(model), BuildOptions(store=str(tmp_path / "s"))).run()
    assert result.failed == ["format"]
    assert result.profile is None
    left_out = {step.stage.name for step in result.steps if step.result is None}
    assert {"limits", "accuracy", "performance", "profile", "sign", "provenance"} == left_out


def test_too_slow_is_a_failed_gate_and_no_profile(made: Made, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"without": "accuracy", "at_least": 1e12}
    result = made.again(**wanted, store=made.fork(tmp_path)).run()
    assert result.failed == ["performance"]
    assert result.profile is None


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "passed"), (0.5, "failed")])
def test_accuracy_is_held_against_a_reference(
    made: Made, tmp_path: Path, factor: float, outcome: str
) -> None:
    found = made.body.gates["accuracy"].figures["perplexity"]
    reference = {
        "schema": "headrace.bench.reference/1",
        "model": "tiny",
        "prompts": [],
        "answers": [],
        "perplexity": {**found, "value": found["value"] * factor},
        "tasks": None,
    }
    path = tmp_path / "reference.json"
    path.write_text(json.dumps(reference))
    store = made.fork(tmp_path)
    again = made.again(without="performance", reference=str(path), store=store)
    assert outcomes(again.run())["accuracy"] == outcome


def test_what_cannot_be_left_out_or_run_anew_is_refused(made: Made) -> None:
    with pytest.raises(InvalidRequest, match=r"one of accuracy.*not 'verify'"):
        made.again(without="verify")
    with pytest.raises(InvalidRequest, match=r"one of fetch.*not 'bake'"):
        made.again(fresh="bake")
    with pytest.raises(OptionError, match="least_share must be at most 1"):
        BuildOptions(least_share=2.0).verify()


def test_a_model_that_changed_is_another(made: Made, tmp_path: Path) -> None:
    model = shutil.copytree(made.model, tmp_path / "tiny")
    weights = model / "model.safetensors"
    rewrite(weights, flip(weights.read_bytes()))
    plan = Build(made.engine(model), BuildOptions(at_least=AT_LEAST)).plan()
    assert [step.stage.name for step in plan if step.result is not None] == ["licence"]


def test_a_damaged_blob_is_not_measured_and_fetched_anew(made: Made, tmp_path: Path) -> None:
    """The size stays the same, so that only bytes tell."""
    store = made.fork(tmp_path)
    weights = next(one for one in made.body.model.files if one.path == "model.safetensors")
    for path in (tmp_path / "fork").rglob("*"):
        if path.name in ("model.safetensors", weights.digest.removeprefix("sha256:")):
            rewrite(path, flip(path.read_bytes()))
    with pytest.raises(Untrusted, match=r"model\.safetensors: its blob"):
        made.again(store=store, fresh="limits").run()
    healed = made.again(store=store, fresh="fetch,limits").run()
    assert healed.profile == made.result.profile


def test_a_folder_without_weights_has_no_profile(made: Made, tmp_path: Path) -> None:
    model = shutil.copytree(made.model, tmp_path / "tiny")
    (model / "model.safetensors").rename(model / "model.txt")
    with pytest.raises(Exception, match=r"safetensors|weights"):
        Build(EngineOptions(model=str(model)), BuildOptions(store=str(tmp_path / "s")))


# The command line


def test_the_commands(made: Made, tmp_path: Path) -> None:
    same = (str(made.model), "--threads", "1", "--without", "accuracy,performance")
    store = ("--store", str(tmp_path / "store"))
    first = made.call("build", *same, *store)
    assert "10 of 10 stages ran" in first
    assert f"headrace serve --profile {tmp_path}/store/profiles/{made.cell}.json" in first
    assert "nothing was to run" in made.call("build", *same, *store)
    told = json.loads(made.call("build", *same, *store, "--json").splitlines()[0])
    assert told["ran"] == []
    assert told["stages"]["format"]["outcome"] == "passed"
    assert "asked for anew" in made.call("explain", *same, *store, "--fresh", "format")
    assert "all are what they should be" in made.call("verify", *store)
    assert "the signature holds" in made.call("verify", made.cell, *store)
    listed = json.loads(made.call("profiles", *store, "--json"))
    assert {"profile": made.cell, "fit": "compatible"}.items() <= listed[0].items()
    assert made.cell[:20] in made.call("profiles", *store)
    made.call("verify", "nothing", *store, status=2)
    broken = tmp_path / "broken.json"
    broken.write_bytes(flip(made.envelope))
    made.call("verify", str(broken), *store, status=6)
    made.call("build", *same, *store, "--without", "sign", status=2)
    assert "there is no store" in made.call("verify", "--store", str(tmp_path / "none"), status=2)


def test_a_gate_that_failed_is_the_exit_status(made: Made, tmp_path: Path) -> None:
    words = (str(made.model), "--threads", "1", "--without", "accuracy", "--at-least", "1e12")
    said = made.call("build", *words, "--store", str(tmp_path / "store"), status=1)
    assert "failed: performance; no profile was signed" in said
