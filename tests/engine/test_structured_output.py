"""Answers that are held to a form, through the whole engine: always valid, whatever happens."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest
from headrace.base.request import OutputDelta
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.text import load_tokenizer
from headrace.text.grammar import MAX_NUMBER, from_choice, from_lark, from_regex, from_schema
from headrace.text.lltokenizer import grammar_tokenizer
from headrace.worker.grammar import LIMITS, SHARED_FROM
from tiny import bytewise
from tiny.kept import Kept

WILD: dict[str, Any] = {
    "temperature": 1.5,
    # White space between two tokens of JSON is free: less of it makes the answers shorter.
    "logit_bias": dict.fromkeys(b" \n\r\t", -4.0),
}
SMALL = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def roomy(kept: Kept) -> Path:
    return kept(bytewise.make, context=2048)


def opened(folder: Path, **more: Any) -> LLM:
    options = {
        "device": "cpu",
        "threads": 1,
        "kv_memory": "8MiB",
        "step_tokens": 256,
        "offline": True,
        "max_sequences": 16,
    }
    return LLM(str(folder), **{**options, **more})


@pytest.fixture(scope="module")
def llm(roomy: Path) -> Iterator[LLM]:
    with opened(roomy) as it:
        yield it


names = st.text('abcdefgh_é"\\', min_size=1, max_size=4)
numbers = st.integers(-MAX_NUMBER, MAX_NUMBER)
scalars = st.one_of(
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 8)),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"}),
    st.builds(lambda v: {"enum": v}, st.lists(st.one_of(names, numbers), min_size=1)),
    st.builds(lambda v: {"const": v}, st.one_of(names, st.booleans(), st.none())),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "time", "uuid", "ipv4")]),
)


def _object(fields: dict[str, Any], required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields)[:required],
        "additionalProperties": False,
    }


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 2**32))
def test_any_schema_at_any_temperature(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    parts: list[str] = []
    output = llm.generate(
        "ab",
        SamplingParams(**WILD, seed=seed, max_tokens=1500),
        grammar=from_schema(schema, "schema"),
        on_delta=lambda delta: parts.append(delta.text),
    )[0].outputs[0]
    assert output.error is None
    assert output.finish_reason == "stop", "forms are bounded, so they end"
    jsonschema.validate(json.loads(output.text), schema)
    assert "".join(parts) == output.text


@settings(max_examples=12, deadline=None)
@given(chosen=st.lists(schemas, min_size=3, max_size=6), seed=st.integers(0, 2**32))
def test_a_mixed_batch_with_preemptions(
    small_pool: LLM, chosen: list[dict[str, Any]], seed: int
) -> None:
    """Rows with different grammars and rows with none; not enough blocks for all of them."""
    llm = small_pool
    count = len(chosen)
    grammars = [*(from_schema(schema, "schema") for schema in chosen), *[None] * count]
    params = [SamplingParams(**WILD, seed=seed + i, max_tokens=400) for i in range(2 * count)]
    together = llm.generate(["ab"] * 2 * count, params, grammar=grammars)
    for schema, answer in zip(chosen, together, strict=False):
        text = answer.outputs[0].text
        if answer.outputs[0].finish_reason == "stop":
            jsonschema.validate(json.loads(text), schema)
    alone = [
        llm.generate("ab", one, grammar=grammar)[0].outputs[0].token_ids
        for one, grammar in zip(params, grammars, strict=True)
    ]
    assert [answer.outputs[0].token_ids for answer in together] == alone


@pytest.fixture(scope="module")
def small_pool(roomy: Path) -> Iterator[LLM]:
    with opened(roomy, kv_memory="400KiB", kv_dtype="float32", max_context=512) as it:
        yield it
        assert it._engine.core.scheduler.stats().preemptions > 0, "the pool was too large"


@pytest.mark.parametrize("executor", ["inline", "multiproc"])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_executor_and_depth(roomy: Path, llm: LLM, executor: str, depth: int) -> None:
    params = [SamplingParams(**WILD, seed=i, max_tokens=300, n=1 + i % 3) for i in range(6)]
    grammars = [from_schema(SMALL, "schema"), None, from_regex("[a-z]{3,9}(\\.[0-9]+)?x", "regex")]
    wanted = llm.generate(["one"] * 6, params, grammar=grammars * 2)
    with opened(roomy, executor=executor, depth=depth) as other:
        got = other.generate(["one"] * 6, params, grammar=grammars * 2)
        # The worker is not stuck: what was compiled is there, what is new is compiled.
        assert other.generate("x", grammar=from_choice(["fine"], "c"))[0].outputs[0].text == "fine"
    for one, other_one in zip(wanted, got, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other_one.outputs]
    for output in wanted[0].outputs + wanted[3].outputs:
        jsonschema.validate(json.loads(output.text), SMALL)
    assert len({output.text for output in wanted[5].outputs}) > 1, "choices differ"
    for output in wanted[2].outputs + wanted[5].outputs:
        assert re.fullmatch(r"[a-z]{3,9}(\.[0-9]+)?x", output.text)


def test_many_rows_share_the_threads(llm: LLM) -> None:
    count = SHARED_FROM + 4
    grammars = [from_regex(f"[a-c]{{{1 + i % 7}}}{i}", "regex") for i in range(count)]
    outputs = llm.generate(["x"] * count, SamplingParams(**WILD, max_tokens=20), grammar=grammars)
    for place, output in enumerate(outputs):
        assert re.fullmatch(f"[a-c]{{{1 + place % 7}}}{place}", output.outputs[0].text)


def test_the_end_of_a_form(llm: LLM) -> None:
    """Only an end may follow; the end is not text; nothing about ends can be switched off."""
    yes = from_choice(["yes"], "choice")
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"temperature": 0.0}):
        output = llm.generate("q", SamplingParams(max_tokens=60, **more), grammar=yes)[0].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("yes", "stop", None)
        assert output.token_ids == [*b"yes", bytewise.END]
    cut = llm.generate("q", SamplingParams(max_tokens=3), grammar=yes)[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("yes", "length")


def test_min_tokens_holds_while_the_form_can_go_on(llm: LLM) -> None:
    letters = from_regex("[a-d]{0,40}", "regex")
    # Were it not for min_tokens, it would end at once.
    params = SamplingParams(logit_bias={bytewise.END: 100}, max_tokens=60)
    assert llm.generate("q", params, grammar=letters)[0].outputs[0].text == ""
    params = SamplingParams(logit_bias={bytewise.END: 100}, max_tokens=60, min_tokens=20)
    assert len(llm.generate("q", params, grammar=letters)[0].outputs[0].text) == 20


def test_stop_strings_ids_and_logprobs(llm: LLM) -> None:
    dashes = from_regex("[a-c]{5}-[a-c]{5}", "regex")
    output = llm.generate("q", SamplingParams(stop=["-"], max_tokens=60), grammar=dashes)[0]
    assert re.fullmatch("[a-c]{5}", output.outputs[0].text)
    assert output.outputs[0].stop_reason == "-"
    params = SamplingParams(stop_token_ids=[ord("-")], max_tokens=60, logprobs=3)
    one = llm.generate("q", params, grammar=dashes)[0].outputs[0]
    assert one.stop_reason == ord("-")
    assert one.logprobs is not None
    # Log-probabilities are the model's own: the form does not touch them.
    assert any(entry.rank > 3 for entry in one.logprobs)


def test_a_cached_prefix_changes_nothing(llm: LLM) -> None:
    prompt = list(range(1, 200))
    params = SamplingParams(**WILD, seed=5, max_tokens=200)
    grammar = from_schema(SMALL, "schema")
    first, second = (llm.generate(prompt, params, grammar=grammar)[0] for _ in range(2))
    assert second.cached_tokens > 150
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_broken_grammar_ends_its_own_request_only(llm: LLM) -> None:
    """One that got past the checks at the door, as if llguidance were of two minds."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = llm.generate("abc", params)[0].outputs[0].token_ids
    many = llm.generate(["abc"] * 3, params, grammar=[None, "start: no grammar at all", None])
    assert [many[0].outputs[0].token_ids, many[2].outputs[0].token_ids] == [expected] * 2
    assert many[1].outputs[0].finish_reason == "error"
    assert many[1].outputs[0].token_ids == []
    assert "the grammar cannot be kept" in str(many[1].outputs[0].error)
    llm._engine.core.scheduler.check_integrity()


@pytest.mark.parametrize("depth", [1, 2])
def test_over_the_limits_in_the_middle(
    roomy: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """An ambiguous grammar costs more with every token, until the matcher gives up."""
    monkeypatch.setitem(LIMITS, "step_max_items", 100)  # type: ignore[index]
    source = from_lark('start: "go" e\ne: e e | "a" | "a" e | e "a"\n', "grammar")
    params = SamplingParams(**WILD, seed=1, max_tokens=200, min_tokens=100)
    with opened(roomy, depth=depth) as small:
        plain = small.generate("ab", params)[0].outputs[0]
        both = small.generate(["ab", "ab"], params, grammar=[source, None])
        assert both[1].outputs[0].token_ids == plain.token_ids
        failed = both[0].outputs[0]
        assert failed.finish_reason == "error"
        assert failed.token_ids[:6] == list(b"goaaaa")
        assert len(failed.token_ids) < 50
        assert "Too many items" in str(failed.error)
        small._engine.core.scheduler.check_integrity()
        assert small._engine.core.scheduler.stats().kv_usage == 0.0


def test_asyncio_engine(roomy: Path) -> None:
    async def run() -> None:
        options = {"device": "cpu", "threads": 1, "kv_memory": "8MiB", "offline": True}
        async with await AsyncEngine.start(model=str(roomy), **options) as engine:
            assert "grammar" in engine.features
            texts = await asyncio.gather(*(_streamed(engine, seed) for seed in range(5)))
            for text in texts:
                jsonschema.validate(json.loads(text), SMALL)
            # A reader who leaves in the middle leaves nothing behind.
            stream = engine.submit("a", SamplingParams(max_tokens=900), grammar=endless)
            await anext(stream)
            stream.cancel()
            with pytest.raises(InvalidRequest, match="the grammar cannot be kept"):
                await engine.generate("a", SamplingParams(max_tokens=9), grammar="start: nothing")
            report = await engine.inspect()
            for _ in range(5000):  # Its message has left here, and is acted on after the step.
                if report.running == 0:
                    break
                await asyncio.sleep(0.02)
                report = await engine.inspect()
            assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0.0)

    endless = from_regex("[a-z]*", "regex")
    asyncio.run(run())


async def _streamed(engine: AsyncEngine, seed: int) -> str:
    params = SamplingParams(**WILD, seed=seed, max_tokens=300)
    deltas: list[OutputDelta] = []
    async for delta in engine.stream("one", params, grammar=from_schema(SMALL, "schema")):
        deltas.append(delta)
    assert deltas[-1].finish_reason == "stop"
    return "".join(delta.text for delta in deltas)


def test_kept_ids_stay_in_the_text(llm: LLM) -> None:
    """A dialect's markers are special tokens that the stream router has to see."""
    grammar = from_lark(f'start: "a" <[{bytewise.MARK}]> "b"\n', "grammar")
    request = llm._input.request("q", SamplingParams(), request_id="1", grammar=grammar)
    assert request.spec.stop_ids == (bytewise.END,)

    async def run() -> list[str]:
        options = {"device": "cpu", "threads": 1, "kv_memory": "8MiB", "offline": True}
        async with await AsyncEngine.start(model=str(llm.options.model), **options) as engine:
            texts = []
            for keep in ((), (bytewise.MARK,)):
                output = await engine.generate(
                    "q", SamplingParams(), grammar=grammar, keep_ids=keep
                )
                assert output.outputs[0].token_ids == [97, bytewise.MARK, 98, bytewise.END]
                texts.append(output.outputs[0].text)
            return texts

    assert asyncio.run(run()) == ["ab", "a<|mark|>b"]


def test_a_small_form_beside_eight_abandoned_huge_ones(options: dict[str, Any]) -> None:
    """No time is measured: the huge ones are compiled by nobody, so only the small one is."""
    from headrace.worker import grammar as module

    compiler = module.GrammarCompiler(lambda: None)
    gate, begun = threading.Event(), []

    def compile_(source: str) -> str:
        begun.append(source[:5])
        gate.wait(300)
        return source

    compiler._queue._compile = compile_
    huge = [f"h{number:04}" + " " * 100_000 for number in range(8)]
    for source in huge:
        assert not compiler.prepare(source, "a")
    assert not compiler.prepare("small", "b")
    gate.set()
    while not compiler.prepare("small", "b"):
        time.sleep(0.01)
    compiler.close()
    assert begun[:2] in (["h0000", "small"], ["small", "h0000"])


def test_what_ends_a_sequence_is_no_text_of_a_form(tmp_path: Path) -> None:
    """If the vocabulary declares the end token plain text, it would fit inside a string."""
    folder = bytewise.make(tmp_path / "plain-end")
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    for token in state["added_tokens"]:
        token["special"] = False
    path.write_text(json.dumps(state))
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    tokenizer = load_tokenizer(folder)
    assert bytewise.END not in tokenizer.special_ids
    matcher = LLMatcher(
        grammar_tokenizer(tokenizer, vocab_size=bytewise.VOCAB, eos_ids=[bytewise.END]),
        from_schema({"type": "string"}, "schema"),
    )
    assert matcher.consume_tokens(list(b'"half'))
    allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    bits = np.unpackbits(allowed, bitorder="little")
    assert bits[ord("a")]
    assert not bits[bytewise.END]
