"""Prompts that a prefill server computes: the same answers, nothing held for long."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import OPTIONS
from split_pair import (
    PROMPT,
    add,
    built,
    counts,
    decoding,
    finished,
    greedy,
    loopback,
    nothing_is_held,
    own,
    prefilling,
    until,
)

from headrace import LLM
from headrace.base.errors import OptionError
from headrace.engine.loop.lending import Lender
from headrace.worker import fetching, sending
from headrace.worker.places import Places
from tiny import families
from tiny.kept import Kept

pytestmark = pytest.mark.usefixtures("a_split_pays")


@pytest.fixture(params=["memory", "another user", "the same host", "hosts", "hosts with a key"])
def by(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An address, and servers that can move blocks in this way alone."""
    way = request.param
    copied = []
    copy, near = Places.copy, fetching._opened

    def copying(*given: Any) -> None:
        copied.append(1)
        copy(*given)

    def far(kind: Any, where: Any, *given: Any) -> Any:
        if where[:1] == "\0":
            raise ConnectionRefusedError("of another host")
        return near(kind, where, *given)

    monkeypatch.setattr(Places, "copy", copying)
    if way.startswith("hosts"):
        monkeypatch.setattr(fetching, "_opened", far)
    elif way == "another user":
        monkeypatch.setattr(sending, "is_same_user", lambda sock: False)
    (tmp_path / "key").write_bytes(b"k" * 32)
    if way in ("memory", "another user"):
        yield f"ipc://{tmp_path}/split"
    elif way == "hosts with a key":
        yield f"{loopback()}?key={tmp_path}/key"
    else:
        yield loopback()
    assert bool(copied) == (way in ("memory", "the same host"))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "k8v4"])
def test_a_prompt_that_was_handed_over_has_the_same_answer(
    tiny: Path, by: str, kv_dtype: str
) -> None:
    address = by
    with LLM(str(tiny), **OPTIONS, kv_dtype=kv_dtype) as alone:
        answers = [greedy(alone, PROMPT[:size])[0] for size in (70, 64, 33)]
    with (
        prefilling(tiny, address, kv_dtype=kv_dtype) as there,
        decoding(tiny, address, kv_dtype=kv_dtype) as here,
    ):
        for number, size in enumerate((70, 64, 33)):
            built(here).core.scheduler.kv.reset()  # type: ignore[attr-defined]
            found = min(size // 16 * 16, size - 1)
            assert greedy(here, PROMPT[:size]) == (answers[number], found)
            nothing_is_held(here, there)
        assert counts(here).brought == counts(here).handed == 3
        assert counts(there).computed == 3
        assert counts(there).lent_bytes > 0
        # What it has, it asks nobody for.
        assert greedy(here, PROMPT[:33]) == (answers[2], 32)
        assert counts(here).handed == 3


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma3", "qwen3_next", "lfm2", "granitemoehybrid-dense"]
)
def test_latents_windows_and_states_are_handed_over_too(
    kept: Kept, tiny: Path, tmp_path: Path, address: str, family: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(kept(families.make, family), model)
    shutil.copy(tiny / "tokenizer.json", model)
    with LLM(str(model), **OPTIONS, max_context=256) as alone:
        answer = greedy(alone, PROMPT)[0]
    with (
        prefilling(model, address, max_context=256) as there,
        decoding(model, address, max_context=256) as here,
    ):
        assert greedy(here, PROMPT) == (answer, 64)
        assert counts(here).brought == 1
        nothing_is_held(here, there)


def test_two_hundred_aborts_leave_nothing(tiny: Path, address: str) -> None:
    """In every state of a handover: asked for, computed, lent, under way, decoding."""
    with (
        prefilling(tiny, address, kv_memory="4MiB") as there,
        decoding(tiny, address, kv_memory="4MiB") as here,
    ):
        core = built(here).core
        waiting: list[str] = []
        for number in range(200):
            waiting.append(add(here, number, own(number)))
            core.turn()
            if len(waiting) > 12:
                core.abort(waiting.pop(number % 12))
        for request in waiting:
            core.abort(request)
        finished(here)
        nothing_is_held(here, there)
        assert counts(here).handed == 200
        assert counts(here).left > 0
        until(lambda: counts(there).leases == counts(there).lent_blocks == 0)
        assert greedy(here, PROMPT)[1] == 64
        nothing_is_held(here, there)


def test_a_prompt_that_is_left_at_once_is_not_lent(
    tiny: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prefill server takes one prompt, others are asked for and left: it heeds the order
    of what it heard."""
    begin = Lender._begin

    def slowly(*about: Any) -> str:
        time.sleep(0.02)
        return begin(*about)

    monkeypatch.setattr(Lender, "_begin", slowly)
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        core = built(here).core
        for number in range(30):
            request = add(here, number, own(number))
            core.turn()
            core.abort(request)
        finished(here)
        assert greedy(here, PROMPT)[1] == 64, "it has taken all that came before"
        nothing_is_held(here, there)
        assert counts(there).expired == 0


def test_many_prompts_at_once_have_their_answers(tiny: Path, address: str) -> None:
    """More than the prefill server may hold: what it declines is computed here."""
    with LLM(str(tiny), **OPTIONS) as alone:
        for number in range(40):
            add(alone, number, own(number % 30))
        wanted = finished(alone)
    with prefilling(tiny, address) as there, decoding(tiny, address) as here:
        for number in range(40):
            add(here, number, own(number % 30))
        assert finished(here) == wanted
        assert counts(here).brought > 0
        nothing_is_held(here, there)


@pytest.mark.parametrize(
    ("role", "why"),
    [
        ("helper", "must be both"),
        ("prefill", "must be both"),
        ("decode@", "must be both"),
        ("prefill@http://127.0.0.1:1", "neither tcp"),
        ("prefill@tcp://127.0.0.1:x", "neither tcp"),
        ("prefill@tcp://10.0.0.7:5601", "not on this machine"),
        ("decode@tcp://127.0.0.1:1,tcp://127.0.0.1:1", "each once"),
        ("prefill@tcp://127.0.0.1:1,tcp://127.0.0.1:2", "at most 1"),
        ("decode@tcp://10.0.0.7:5601?key=/nowhere/key", "cannot be read"),
        ("decode@tcp://10.0.0.7:5601?seed=1", "not key=FILE"),
    ],
)
def test_roles_that_cannot_be_are_refused(tiny: Path, role: str, why: str) -> None:
    with pytest.raises(OptionError, match=why) as refused:
        LLM(str(tiny), **OPTIONS, role=role)
    assert refused.value.param == "role"


def test_engines_that_cannot_lend_say_why(tiny: Path, address: str) -> None:
    for options, why in (
        ({"prefix_cache": False}, "prefix cache, which is off"),
        ({"executor": "multiproc"}, "in the engine's process"),
    ):
        with pytest.raises(OptionError, match=why):
            LLM(str(tiny), **{**OPTIONS, **options}, role=f"prefill@{address}")


def test_terms_that_differ_are_named_and_nothing_is_lent(
    tiny: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        prefilling(tiny, address, kv_dtype="int8"),
        decoding(tiny, address, servers=0, kv_dtype="bfloat16") as here,
    ):
        until(lambda: "lends nothing to this server" in caplog.text)
        assert "option kv_dtype: bfloat16, now int8" in caplog.text
        assert greedy(here, PROMPT)[1] == 0
        assert counts(here).servers == counts(here).handed == 0
