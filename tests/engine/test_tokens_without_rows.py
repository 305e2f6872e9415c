"""A tokenizer that has more tokens than the model has rows: none of them reaches a matrix."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import OPTIONS

from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest
from headrace.base.request import Request
from headrace.loader import open_model
from headrace.text import load_tokenizer
from headrace.text.grammar import from_regex
from headrace.text.infill import Infill
from headrace.text.lltokenizer import grammar_tokenizer
from tiny import bytewise
from tiny import encoder as encoders

ROWS = bytewise.VOCAB
FAR = ["<far>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
"""Added tokens, of which the first has the id `ROWS`."""
FORM = from_regex(r"(ab|x)<far><\|im_end\|>c", "grammar")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return state


def longer(folder: Path, *, library: bool, special: bool = True, more: Any = None) -> Path:
    """Add the tokens; `library`: in a way that our own tokenizer leaves to the library."""
    bytewise.make(folder)
    state = state_of(folder)
    for place, text in enumerate(FAR):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        state["added_tokens"].append(
            {"id": ROWS + place, "content": text, "special": special, **plain}
        )
    for token in state["added_tokens"]:
        token["normalized"] = False
    if library:
        state["added_tokens"][0]["lstrip"] = True
    if more is not None:
        more(state)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["library", "own"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return longer(tmp_path_factory.mktemp("longer"), library=request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS, speculate="auto") as opened:
        yield opened


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("library", [True, False])
def test_such_a_token_is_text(tmp_path: Path, library: bool, special: bool) -> None:
    files = open_model(str(longer(tmp_path, library=library, special=special)))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    assert ("library" in tokenizer.served.value) == library
    for text in ("a <far> b", "<far><|mark|><|im_end|>", "<extra3><far>", "<far>" * 20_000):
        ids = tokenizer.encode(text)
        assert max(ids) < ROWS
        assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.encode("<far>") == list(b"<far>")
    assert tokenizer.encode("<|mark|><extra0>") == [bytewise.MARK, 260]
    # Whoever asks of rows that are not known is given all tokens.
    assert load_tokenizer(files.tokenizer).encode("<far>") == [ROWS]
    assert tokenizer.vocab_size == ROWS
    assert tokenizer.token_to_id("<far>") is None
    assert not {"<far>", "<|im_end|>"} & {*tokenizer.special_tokens, *tokenizer.vocabulary.added}
    assert Infill.of(tokenizer, files.tokenizer) is None


def test_a_text_is_answered_as_its_bytes(llm: LLM) -> None:
    for text in ("hi <far>", "<|im_end|>", "a<far>b"):
        (told,) = llm.generate([text], GREEDY)
        assert list(told.prompt_token_ids) == list(text.encode())
        (same,) = llm.generate([list(text.encode())], GREEDY)
        assert told.outputs[0].token_ids == same.outputs[0].token_ids
    (told,) = llm.chat([{"role": "user", "content": "<far>"}], GREEDY)
    assert max(told.prompt_token_ids) < ROWS


def test_a_template_that_writes_one(llm: LLM) -> None:
    (told,) = llm.chat([{"role": "user", "content": "x"}], GREEDY, template="<far><|mark|>x")
    assert list(told.prompt_token_ids) == [*b"<far>", bytewise.MARK, ord("x")]


def test_vectors_and_scores(llm: LLM) -> None:
    one, other = llm.embed(["a <far>", [*b"a <far>"]])
    assert list(one.prompt_token_ids) == [*b"a <far>"]
    assert one.vector == other.vector
    first, second = llm.embed([[*b"<far>"], [*b"<|im_end|>"]])
    cosine = sum(map(operator.mul, first.vector, second.vector))
    assert llm.score("<far>", "<|im_end|>")[0].score == pytest.approx(cosine)


@pytest.mark.parametrize("labels", [0, 1])
def test_an_encoder(tmp_path: Path, labels: int) -> None:
    encoders.make(tmp_path, labels=labels)
    state = state_of(tmp_path)
    rows = open_model(str(tmp_path)).arch.vocab_size
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    state["added_tokens"].append({"id": rows, "content": "<far>", "special": True, **plain})
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("<far>") == [rows]
    with LLM(tmp_path, max_sequences=4, threads=1, device="cpu") as llm:
        told = llm.score("river", "<far>") if labels else llm.embed(["river <far>"])
        assert len(told) == 1
        assert max(llm.get_tokenizer().encode_with_specials("river <far>")) < rows


def test_an_expected_answer_is_no_draft_of_one(llm: LLM) -> None:
    """Ids that a client gives are cut, too, where one has no row."""
    expected: list[tuple[int, ...]] = []
    request = llm._input.request

    def noted(*given: Any, **more: Any) -> Request:
        made = request(*given, **{**more, "expected": [*more["expected"], ROWS, 5]})
        expected.append(made.spec.expected)
        return made

    llm._input.request = noted  # type: ignore[method-assign]
    try:
        (told,) = llm.generate(["abc"], GREEDY, prediction="x<far>")
    finally:
        llm._input.request = request  # type: ignore[method-assign]
    assert expected == [tuple(b"x<far>")]
    assert told.outputs[0].token_ids == llm.generate(["abc"], GREEDY)[0].outputs[0].token_ids


def test_what_ends_a_turn(llm: LLM, folder: Path) -> None:
    """Ids that may not come are written into rows of logits."""
    assert open_model(str(folder)).eos_ids == (bytewise.END,)
    for more in ({"min_tokens": 3}, {"allowed_token_ids": [97, 98]}):
        asked = SamplingParams(temperature=0.0, max_tokens=6, **more)  # type: ignore[arg-type]
        assert llm.generate(["abc"], asked)[0].outputs[0].token_ids
    for field in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        given: Any = {ROWS: 1.0} if field == "logit_bias" else [ROWS]
        with pytest.raises(InvalidRequest, match=f"{field}.*{ROWS}"):
            llm.generate(["abc"], SamplingParams(max_tokens=2, **{field: given}))


def test_a_grammar_forces_none(tmp_path: Path) -> None:
    longer(tmp_path, library=False, special=False)
    files = open_model(str(tmp_path))
    tokenizer = load_tokenizer(files.tokenizer, ROWS)
    made = grammar_tokenizer(tokenizer, vocab_size=ROWS, eos_ids=files.eos_ids)
    assert made.vocab_size == ROWS
    assert max(made.tokenize_str("a<far>")) < ROWS
    with LLM(tmp_path, **OPTIONS, speculate="auto") as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=40)
        (told,) = llm.generate(["abc"], asked, grammar=FORM)
        assert told.outputs[0].text.endswith("<far><|im_end|>c")
        assert max(told.outputs[0].token_ids) < ROWS


def test_a_vocabulary_that_is_larger_than_the_model(tmp_path: Path) -> None:
    """A word of the vocabulary itself has no other form, so the text is refused."""

    def words(state: Any) -> None:
        state["model"]["vocab"]["xy"] = ROWS + len(FAR)
        state["model"]["merges"] = [["x", "y"]]

    longer(tmp_path, library=True, more=words)
    files = open_model(str(tmp_path))
    tokenizer = load_tokenizer(files.tokenizer, ROWS)
    last = ROWS + len(FAR)
    assert tokenizer.encode("xy") == [last]
    assert tokenizer.encode("xy" * 30_000)[0] == last
    made = grammar_tokenizer(tokenizer, vocab_size=ROWS, eos_ids=files.eos_ids)
    assert made.tokenize_str("axy") == [97]
    with LLM(tmp_path, **OPTIONS) as llm:
        refused = f"token ids must be integers from 0 to {ROWS - 1}, not {last}"
        with pytest.raises(InvalidRequest, match=refused):
            llm.generate(["axy"], GREEDY)
        with pytest.raises(InvalidRequest, match=refused):
            llm.embed(["axy"])
        with pytest.raises(InvalidRequest, match=refused):
            llm.score("a", ["xy"])
        assert llm.generate(["abc"], GREEDY, prediction="xy")[0].outputs[0].token_ids
