"""A server that was started with a signed profile, and one that may not start with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from factory_cell import Made, flip, headrace, make, rewrite
from processes import running

from headrace.base.config import EngineOptions
from headrace.base.errors import NotFound, OptionError, Untrusted
from headrace.base.identity import Identity
from headrace.factory.admit import admit
from headrace.factory.profile import check_identity, with_profile
from headrace.factory.release import Rings
from headrace.factory.sign import signer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("factory"), without="accuracy")


def options(made: Made, **changes: Any) -> EngineOptions:
    return EngineOptions(cache_dir=str(made.cache), **changes)


def test_a_server_keeps_to_its_profile(made: Made) -> None:
    """It is named by its ring; `admit` below takes every other name."""
    assert made.result.profile is not None
    digest = made.result.profile.digest
    words = "promote", made.cell, "production", "--unevaluated", "accuracy"
    assert made.call(*words) == f"production 1: {digest}\n"
    command = headrace(
        "serve", "--profile", "production", "--cache-dir", str(made.cache), "--port", "0"
    )
    with running(command) as server:
        with urllib.request.urlopen(f"{server.url}/v1/metadata") as reply:
            told = json.load(reply)
        with urllib.request.urlopen(f"{server.url}/metrics") as reply:
            metrics = reply.read().decode()
        server.await_line(rf"profile: {made.cell}, compatible, [0-9.]+ of its certified speed")
    assert told["selectedModelProfileId"] == digest
    assert told["modelInfo"][0]["shortName"] == "tiny"
    assert told["certified"]["share"] > 0
    assert told["certified"]["gates"]["performance"] == "passed"
    assert "\nheadrace_certified_share " in metrics
    assert f'digest="{digest}"' in metrics


def test_a_changed_profile_is_not_served(made: Made, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(made.envelope + b"\n")  # A flipped bit breaks the form or the signature.
    environment = {**os.environ, "HEADRACE_CACHE": str(made.cache)}
    command = headrace("serve", "--profile", str(path), "--port", "0")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == Untrusted.exit_code
    assert "ready" not in done.stdout
    # Which of the two: the flipped bit may make another letter of the signature's alphabet.
    assert done.stderr.startswith(
        (
            "error: the envelope is not as it was written",
            "error: the signature does not match what is signed",
        )
    )


def test_a_pointer_that_was_changed_is_not_served(made: Made) -> None:
    cache = str(made.cache)
    rings = Rings(made.store, made.keys, cache)
    rings.promote(made.cell, "dev", signer(None, cache))
    assert admit("dev", options(made)).profile.body.name == made.cell
    path = made.store.root / "rings" / "dev.json"
    data = path.read_bytes()
    path.write_bytes(flip(data))
    with pytest.raises(Untrusted, match=r"rings/dev\.json: "):
        admit("dev", options(made))
    path.write_bytes(data)
    assert list(rings.problems()) == []


def test_a_profile_sets_the_options(made: Made) -> None:
    assert made.result.profile is not None
    digest = made.result.profile.digest
    for wanted in (made.cell, digest, digest.removeprefix("sha256:")):
        admitted = admit(wanted, options(made))
        assert admitted.options.threads == 1
        assert Path(admitted.options.model).is_relative_to(made.store.root)
    path = made.store.root / "profiles" / f"{made.cell}.json"
    assert admit(str(path), options(made)).profile.digest == digest
    assert admit(str(path), options(made, model=str(made.model))).options.threads == 1


def test_what_does_not_match_is_refused_by_name(made: Made, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="max_context is 64, the profile binds"):
        admit(made.cell, options(made, max_context=64))
    model = shutil.copytree(made.model, tmp_path / "tiny")
    weights = model / "model.safetensors"
    rewrite(weights, flip(weights.read_bytes()))
    with pytest.raises(Untrusted, match=r"model\.safetensors has other bytes"):
        admit(made.cell, options(made, model=str(model)))
    rewrite(weights, flip(weights.read_bytes()))
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(Untrusted, match=r"tokenizer_config\.json is absent"):
        admit(made.cell, options(made, model=str(model)))
    with pytest.raises(NotFound, match="neither a file nor a name"):
        admit("other", options(made))
    with pytest.raises(NotFound, match="nothing was promoted to staging"):
        admit("staging", options(made))
    with pytest.raises(OptionError, match="no key is trusted"):
        admit(made.cell, EngineOptions(cache_dir=str(tmp_path)))


def test_an_engine_with_another_identity_is_refused(made: Made) -> None:
    body = made.body
    same = Identity(**body.identity)
    check_identity(body, same)
    with pytest.raises(Untrusted, match="weights"):
        check_identity(body, Identity(**{**body.identity, "weights": "other"}))
    with pytest.raises(Untrusted, match="does not say"):
        check_identity(body, None)
    body.identity = {"weights": 1}
    with pytest.raises(Untrusted, match="not in shape"):
        check_identity(body, same)


def test_an_option_that_does_not_exist_here_is_refused(made: Made) -> None:
    body = made.body
    body.options = {"model": "other"}
    with pytest.raises(Untrusted, match="model, which is no option"):
        with_profile(EngineOptions(), body, made.model)
