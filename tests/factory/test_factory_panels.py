"""Panels that a profile binds: made and signed once, shipped beside the weights, then mapped."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from factory_cell import Made, flip, make, rewrite
from oci_registry import running

from headrace.base.config import EngineOptions
from headrace.base.errors import NotFound, Untrusted
from headrace.engine.clients.llm import LLM
from headrace.factory.admit import Admitted, admit
from headrace.factory.artifact import panels_manifest
from headrace.factory.bundle import panels, read_bundle, shipped, take_in, write_bundle
from headrace.factory.profile import ProfileFile
from headrace.factory.release import Rings
from headrace.factory.store import Store
from headrace.kernels.cpu.library import load
from headrace.loader.panels import PanelShelf, panel_folder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _of_any_size() -> Any:
    """A tiny model's panels are kept as well."""
    load()  # Without the kernels nothing here has a meaning.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PanelShelf.__init__.__kwdefaults__, "least", 0)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("factory"), without="accuracy,sbom", panels=True)


def bound(made: Made) -> ProfileFile:
    assert made.body.model.panels is not None
    return made.body.model.panels


def decided(admitted: Admitted) -> str:
    """Start an engine of these options, check that it answers, and return its panels' place."""
    with LLM(**asdict(admitted.options)) as llm:
        assert llm.generate(["A river"])[0].outputs[0].token_ids
        (found,) = [one for one in llm.decisions if one.name == "panels"]
    return f"{found.value} {found.reason}"


def fresh(made: Made, root: Path) -> Made:
    """A machine that believes the same keys and has nothing else."""
    shutil.copytree(made.cache / "factory" / "trusted", root / "cache" / "factory" / "trusted")
    return replace(made, cache=root / "cache")


def test_two_builders_make_the_same_panels(made: Made, tmp_path: Path) -> None:
    other = make(tmp_path / "elsewhere", without="accuracy,sbom", panels=True)
    assert bound(other) == bound(made)
    assert made.call("verify", "--store", str(made.store.root))
    without = made.again(without="accuracy,sbom")
    assert "panels" not in {step.stage.name for step in without.plan()}


def test_a_server_maps_what_came_from_a_registry(made: Made, tmp_path: Path) -> None:
    one = bound(made)
    with running() as server:
        reference = f"{server.host}/models:one"
        made.call("publish", made.cell, reference)
        site = fresh(made, tmp_path)
        site.call("load", reference)
        assert not site.store.blob(one.digest).exists(), "who loads the weights repacks them"
        options = EngineOptions(cache_dir=str(site.cache), threads=1)
        admit(made.cell, options)
        assert not (panel_folder(site.cache) / one.path).exists()
        site.call("load", reference, "--panels")
    assert site.call("verify", made.cell)
    told = decided(admit(made.cell, options))
    assert told.split()[0] in ("mapped", "copied")
    assert one.path in told
    assert [path.name for path in panel_folder(site.cache).iterdir()] == [one.path]
    # What the engine would not find (its sums are no digests) is found before.
    rewrite(site.store.blob(one.digest), flip(site.store.blob(one.digest).read_bytes()))
    with pytest.raises(Untrusted, match=f"{one.path} has other bytes than the profile binds"):
        admit(made.cell, options)
    bare = make(tmp_path / "bare", without="accuracy,sbom")
    with running() as server:
        bare.call("publish", bare.cell, f"{server.host}/models:bare")
        words = "load", f"{server.host}/models:bare", "--panels"
        assert ".panels" in fresh(bare, tmp_path / "b").call(*words, status=NotFound.exit_code)


def test_a_server_maps_what_a_cluster_mounts(made: Made, tmp_path: Path) -> None:
    """Weights and panels in folders of their own, as image volumes are, which nobody may write."""
    site, one = fresh(made, tmp_path), bound(made)
    weights, profile = tmp_path / "weights", tmp_path / "profile" / "profile.dsse.json"
    profile.parent.mkdir()
    shutil.copytree(made.model, weights)
    profile.write_bytes(made.envelope)
    mounted = tmp_path / "panels" / one.path
    mounted.parent.mkdir()
    shutil.copyfile(made.store.blob(one.digest), mounted)
    options = EngineOptions(cache_dir=str(site.cache), model=str(weights), threads=1)
    assert one.path in decided(admit(str(profile), options))
    rewrite(mounted, flip(mounted.read_bytes()))
    with pytest.raises(Untrusted, match=one.path):
        admit(str(profile), options)
    assert admit(str(profile), replace(options, keep_packed=False)), "nobody reads them then"


def test_a_bundle_brings_them_with_their_profile_alone(made: Made, tmp_path: Path) -> None:
    rings = Rings(made.store, made.keys, str(made.cache))
    kept, root = panels(made.store, rings, made.cell), shipped(made.store, rings, made.cell)
    assert kept is not None
    assert panels(made.store, rings, made.cell) == panels_manifest(made.store, made.body)
    write_bundle(made.store, {"one": root, "one.panels": kept}, tmp_path / "both.tar")
    store = Store(tmp_path / "store")
    assert take_in(store, read_bundle(store, tmp_path / "both.tar"), made.keys) == [made.cell]
    write_bundle(made.store, {"one.panels": kept}, tmp_path / "alone.tar")
    with pytest.raises(Untrusted, match="no profile that came with them binds the panels"):
        take_in(store, read_bundle(store, tmp_path / "alone.tar"), made.keys)
    made.store.blob(bound(made).digest).rename(tmp_path / "away")
    assert panels(made.store, rings, made.cell) is None
    (tmp_path / "away").rename(made.store.blob(bound(made).digest))
    with pytest.raises(NotFound):
        panels(made.store, rings, "nobody")
