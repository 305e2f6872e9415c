"""Several models on a command line: their own options, names, and what they cannot have."""

from __future__ import annotations

import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.base.several import read_models


def test_a_word_is_a_model_with_options_of_its_own() -> None:
    base = EngineOptions(threads=2, max_context=2048)
    one, two, three = read_models(
        [
            "qwen2.5-coder-0.5b",
            "/models/some:thing",
            "smollm2-135m:kv=2GB,name=small,name=chat,weight=0.5,max-context=512,prefix_cache=off",
        ],
        base,
    )
    assert (one.options.model, one.names, one.weight) == ("qwen2.5-coder-0.5b", (), 1.0)
    assert two.options.model == "/models/some:thing"
    assert (three.options.model, three.names, three.weight) == (
        "smollm2-135m",
        ("small", "chat"),
        0.5,
    )
    assert three.options.kv_memory == "2GB"
    assert three.options.max_context == 512
    assert three.options.prefix_cache is False
    assert three.options.threads == 2
    assert base.model == EngineOptions().model


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a:kv="], "kv_memory of 'a:kv=' has no value"),
        (["a:threads=3"], "no option 'threads' of its own; allowed: name, weight"),
        (["a:weight=0"], "weight must be from 0.01 to 100"),
        (["a:max_context=many"], "max_context must be a whole number"),
        (["a:max_context=2"], "max_context must be at least 8"),
        (["a:prefix_cache=maybe"], "prefix_cache must be on or off"),
        (["a", "a"], "two models have the name 'a'"),
        (["a:name=b", "b"], "two models have the name 'b'"),
    ],
)
def test_a_wrong_word_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        read_models(words, EngineOptions())


@pytest.mark.parametrize(
    "option",
    [
        {"layout": "TP2"},
        {"executor": "multiproc"},
        {"draft_model": "c"},
        {"role": "prefill@tcp://127.0.0.1:1"},
        {"kv_events": "tcp://127.0.0.1:1"},
        {"device": "cuda"},
    ],
)
def test_what_several_cannot_have_is_said(option: dict[str, str]) -> None:
    options = EngineOptions(**option)  # type: ignore[arg-type]
    read_models(["a"], options)
    with pytest.raises(OptionError, match="several models"):
        read_models(["a", "b"], options)
