"""Long texts in segments: the same tokens, less memory, no more of them than are asked for."""

from __future__ import annotations

import tracemalloc
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import byte_level_metadata, sentencepiece_metadata

from headrace.base.errors import TooLarge
from headrace.text import Tokenizer, load_tokenizer
from headrace.text import tokenizer as tokenizer_module
from headrace.text.segments import Borders, borders_of, segments
from headrace.text.specials import SpecialSplitter

PROSE = (
    "the world in water on a line, then hello there. \n  Done? <tag> don't  we and <|end|> so on "
)
TEXTS = st.lists(
    st.sampled_from(
        [
            " ",
            "  ",
            "\n",
            "a",
            "the",
            " world",
            "'ll",
            "1",
            "ü",
            "日本",
            "<tag>",
            "<|end|>",
            "ello",
            ".",
            "\u0301",
            "👍",
        ]
    ),
    min_size=20,
    max_size=200,
).map("".join)


@pytest.fixture(params=["byte_level", "sentencepiece", "spaced_sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@settings(max_examples=60)
@given(text=TEXTS, size=st.integers(1, 40))
def test_segments_are_the_text(text: str, size: int) -> None:
    borders = Borders(0, SpecialSplitter({"<|end|>": 0}))
    parts = list(segments(text, borders, size))
    assert "".join(parts) == text
    assert all(len(part) >= size for part in parts[:-1])
    spaced = list(segments(text, Borders(1), size))
    assert " ".join(spaced) == text


@settings(max_examples=100)
@given(text=TEXTS, size=st.integers(1, 40))
def test_segments_have_the_tokens_of_the_whole(text: str, size: int) -> None:
    for tokenizer in _tokenizers():
        parts = [
            tokenizer._encode(part, special=True)
            for part in segments(text, tokenizer._borders, size)
        ]
        assert list(chain.from_iterable(parts)) == tokenizer.encode(text)


@cache
def _tokenizers() -> list[Tokenizer]:
    unspaced = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    made = (byte_level_metadata(), unspaced, sentencepiece_metadata())
    return [load_tokenizer(each) for each in made]


def test_who_may_be_cut(
    byte_level: Tokenizer, sentencepiece: Tokenizer, spaced_sentencepiece: Tokenizer
) -> None:
    assert byte_level._borders.left_out == 0
    assert sentencepiece._borders.left_out == 0
    # It puts a space before each text, and does before each segment.
    assert spaced_sentencepiece._borders.left_out == 1
    assert byte_level._borders.marks is not None


@pytest.mark.parametrize(
    ("tokens", "added"),
    [(["d w"], []), (["d\u2581"], []), (["d\u0120w"], []), ([], ["the"])],
    ids=["space", "sentencepiece", "bytes", "an added token that may take the next space"],
)
def test_what_crosses_a_cut_forbids_it(tokens: list[str], added: list[str]) -> None:
    def bare(text: str) -> list[int]:
        return list(text.encode())

    assert borders_of(bare, ["a", "\u0120b", "<|x|>"], ["<|x|>"], ["<|x|>"])
    assert borders_of(bare, tokens, added, []).left_out is None


@pytest.mark.parametrize(
    ("added", "control"),
    [(["<|x|>", "a<"], "<|x|>"), (["abc"], "abc"), ([" <x>"], " <x>"), (["<<|x|>>"], "<<|x|>>")],
    ids=["another may be under way", "a word", "it takes a space", "it holds its own beginning"],
)
def test_before_what_no_text_is_cut(added: list[str], control: str) -> None:
    def bare(text: str) -> list[int]:
        return list(text.encode())

    assert borders_of(bare, [], ["<|x|>"], ["<|x|>"]).marks is not None
    assert borders_of(bare, [], added, [control]).marks is None


def test_more_than_is_allowed_without_a_cut_is_refused(tokenizer: Tokenizer) -> None:
    size = tokenizer_module.SEGMENT
    mark = list(tokenizer.special_tokens)[-1]
    whole = "a" * (2 * size) + " and so on " + f"{mark}a" * size
    assert tokenizer.encode(whole, unbroken=2 * size) == tokenizer._encode(whole, special=True)
    with pytest.raises(TooLarge, match=f"more than {size} characters in a row"):
        tokenizer.encode("a" * (4 * size), unbroken=size)
    some = tokenizer.encode("a" * (4 * size), unbroken=4 * size)
    assert some == tokenizer._encode("a" * (4 * size), special=True)


def test_a_long_text_is_encoded_in_segments(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PROSE * 800
    whole = tokenizer._encode(text, special=True)
    sizes: list[int] = []
    encode = tokenizer._encode

    def seen(text: str, **how: Any) -> list[int]:
        sizes.append(len(text))
        return encode(text, **how)

    monkeypatch.setattr(tokenizer, "_encode", seen)
    assert tokenizer.encode(text) == whole
    sizes = [size for size in sizes if size > 1000]  # Some were tried.
    assert max(sizes) < tokenizer_module.SEGMENT + 100
    assert len(text) - len(sizes) <= sum(sizes) <= len(text)
    sizes.clear()
    some = tokenizer.encode(text, most=100)
    assert some == whole[: len(some)]
    assert len(some) > 100
    assert len(sizes) <= 1


def test_a_long_text_costs_little_memory(byte_level: Tokenizer) -> None:
    text = PROSE * 10_000
    byte_level.encode(PROSE * 1000)  # What is made once.
    tracemalloc.start()
    ids = byte_level.encode(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * len(ids)  # A place in a list; an id of its own would be 36.


def test_a_tokenizer_json_too(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer._borders.left_out == 0
    text = PROSE * 800
    assert tokenizer.encode(text) == tokenizer._encode(text, special=True)
