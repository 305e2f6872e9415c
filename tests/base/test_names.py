"""Keywords that nobody knows: answered with ours, over Python as elsewhere."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import pytest

from headrace import LLM, EngineOptions, SamplingParams
from headrace.base.config import ServerOptions
from headrace.base.errors import HeadraceError, InvalidRequest, OptionError
from headrace.base.names import FOREIGN, hint


@pytest.mark.parametrize(
    ("make", "given", "kind", "said"),
    [
        (LLM, {"tensor_parallel_size": 2}, OptionError, "; here that is layout (TP2)"),
        (LLM, {"max_model_len": 64}, OptionError, "; here that is max_context"),
        (EngineOptions, {"max_contxt": 64}, OptionError, "; did you mean max_context?"),
        (ServerOptions, {"api_key": "x"}, OptionError, "keys (its hash goes into a key file)"),
        (
            LLM,
            {"gpu_memory_utilization": 0.9},
            OptionError,
            "not a share; auto takes what remains)",
        ),
        (
            LLM,
            {"trust_remote_code": True},
            OptionError,
            "no code of a model's folder is ever run; built-in families need none",
        ),
        (SamplingParams, {"max_token": 3}, InvalidRequest, "; did you mean max_tokens?"),
        (SamplingParams, {"max_new_tokens": 3}, InvalidRequest, "; here that is max_tokens"),
        (SamplingParams, {"colour": 3}, InvalidRequest, " has no colour"),
    ],
)
def test_an_unknown_keyword_is_named(
    make: Any, given: dict[str, Any], kind: type[HeadraceError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        make(**given)
    assert caught.value.message.endswith(said)
    assert caught.value.param == next(iter(given))


def test_records_are_what_they_were() -> None:
    asked = SamplingParams(max_tokens=3, temperature=0.5)
    assert replace(asked, max_tokens=4) == SamplingParams(max_tokens=4, temperature=0.5)
    assert "max_context" in inspect.signature(EngineOptions).parameters
    with pytest.raises(TypeError):
        SamplingParams(*range(99))  # type: ignore[arg-type]


def test_every_name_of_the_table_is_answered() -> None:
    kinds = EngineOptions, ServerOptions, SamplingParams
    ours = {spec.name for kind in kinds for spec in fields(kind)}
    for theirs, word in FOREIGN.items():
        if theirs not in ours and word.ours != "model":
            said = f"here that is {word.ours}" if word.ours else "there is no such option here"
            assert said in hint(theirs, ours)
