"""Incremental detokenising: the parts add up to the whole, and no part ends inside a character."""

from __future__ import annotations

import unicodedata

import pytest
from corpus import PLAIN, TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text import IncrementalDetokenizer, Tokenizer

KINDS = ["byte_level", "sentencepiece", "spaced_sentencepiece"]


@pytest.fixture(params=KINDS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def parts(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip_special=skip, at_start=True)
    return [*(stream.feed([index]) for index in ids), stream.finish()]


def expected(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> str:
    """The whole at once, by the standard library, as each kind defines it."""
    kept = [index for index in ids if not (skip and index in tokenizer.special_ids)]
    data = b"".join(tokenizer.piece(index) for index in kept)
    if tokenizer.vocabulary.kind == "sentencepiece":
        # One replacement per byte that belongs to no character.
        text = data.decode("utf-8", "surrogateescape")
        text = "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text)
    else:
        text = data.decode("utf-8", "replace")
    return text.removeprefix(" ") if tokenizer.vocabulary.strip_space else text


@settings(deadline=None)
@given(data=st.data())
def test_parts_add_up(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skip = data.draw(st.booleans())
    emitted = parts(tokenizer, ids, skip=skip)
    whole = expected(tokenizer, ids, skip=skip)
    assert "".join(emitted) == whole == tokenizer.decode(ids, skip_special=skip)
    so_far = ""
    for part in emitted:
        so_far += part
        assert whole.startswith(so_far)


@settings(deadline=None)
@given(text=TEXT, size=st.integers(1, 5))
def test_text_comes_back(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text)
    stream = IncrementalDetokenizer(tokenizer, skip_special=False, at_start=True)
    emitted = [stream.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    emitted.append(stream.finish())
    assert "".join(emitted) == tokenizer.decode(ids, skip_special=False)
    if tokenizer.vocabulary.kind == "sentencepiece":
        # "▁" and the space are one character there.
        text = text.replace("▁", " ")
    elif "\ufffd" in "".join(emitted):
        assert "\ufffd" in text
    assert "".join(emitted) in (text, unicodedata.normalize("NFC", text))


def test_half_a_character_waits(byte_level: Tokenizer) -> None:
    thumb = byte_level.encode("👍🏽", special=False)
    assert len(thumb) > 4
    stream = IncrementalDetokenizer(byte_level)
    emitted = [stream.feed([index]) for index in thumb]
    assert [part for part in emitted if part] == ["👍", "🏽"]
    assert stream.finish() == ""


def test_end_inside_a_character(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    stream = IncrementalDetokenizer(byte_level)
    assert stream.feed(byte_level.encode("a👍")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    first, second = (sentencepiece.token_to_id(f"<0x{byte:02X}>") for byte in (0xE6, 0x97))
    assert first is not None
    assert second is not None
    stream = IncrementalDetokenizer(sentencepiece)
    assert stream.feed([first, second]) == ""
    assert stream.finish() == "\ufffd\ufffd"


def test_leading_space_only_at_the_start(spaced_sentencepiece: Tokenizer) -> None:
    ids = spaced_sentencepiece.encode("the world")
    assert spaced_sentencepiece.decode(ids) == "the world"
    after_prompt = IncrementalDetokenizer(spaced_sentencepiece)
    assert after_prompt.feed(ids) == " the world"


def test_special_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_start|>b[ARGS]c<tool_call>")
    assert byte_level.decode(ids) == "abc<tool_call>"
    assert byte_level.decode(ids, skip_special=False) == "a<|im_start|>b[ARGS]c<tool_call>"
    kept = byte_level.token_to_id("[ARGS]")
    assert kept is not None
    stream = IncrementalDetokenizer(byte_level, keep=frozenset([kept]))
    assert stream.feed(ids) == "ab[ARGS]c<tool_call>"


def test_ids_without_a_token_are_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(tokenizer.vocab_size + 5) == b""
    assert tokenizer.piece(-1) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_every_plain_text_comes_back_from_byte_level(byte_level: Tokenizer) -> None:
    for text in PLAIN:
        assert byte_level.decode(byte_level.encode(text, special=False)) == text
