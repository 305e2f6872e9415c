"""Our own byte-level BPE against the library's: the same ids for every text.

`test_tokenizer.py` and `test_real_vocabularies.py` use it too, where it was built.
"""

from __future__ import annotations

import random
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from character_classes import runs
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers
from vocabularies import byte_level_metadata

from headrace.base import textlibrary
from headrace.base.errors import ModelFileError
from headrace.base.strings import StringArray
from headrace.text import load_tokenizer
from headrace.text.from_gguf import ByteLevelEncoder
from headrace.text.native import NativeBpe, native_bpe
from headrace.text.pretokenize import PRE_TOKENIZERS, PreTokenizer

pytestmark = pytest.mark.skipif(
    textlibrary.library() is None,
    reason="the text library was not built: python -m headrace.kernels.cpu.build",
)
SOURCE = Path(textlibrary.__file__).parents[1] / "text" / "csrc"
NATIVE = sorted(name for name, known in PRE_TOKENIZERS.items() if known.native is not None)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LETTERS = "  \n\r\t\v\x85'sSſtTrReEvVmMlLdD aZ09²Ⅷ.,!_-(){}　 日本éé́ßǅ़𝟘👍\u200b"
TEXTS = st.lists(
    st.one_of(st.sampled_from(LETTERS), st.characters(codec="utf-8")), max_size=60
).map("".join)


def vocabulary(seed: int) -> tuple[list[str], list[str]]:
    """Tokens and merges: bytes, and pairs of what there was, drawn from short words. A few pairs
    come twice, and a few tokens are reached by two pairs."""
    draw = random.Random(seed)
    tokens, merges = list(ALPHABET), list[str]()
    likely = [*"abelrstvd'Ġ.0129Ċ", "Ã", "©"]
    while len(merges) < 400:
        left, right = draw.choice(likely), draw.choice(likely)
        if len(left + right) > 12:
            continue
        merges.append(f"{left} {right}")
        if left + right not in tokens:
            tokens.append(left + right)
            likely.append(left + right)
    return tokens, merges


def by_library(tokens: list[str], merges: list[str], known: PreTokenizer) -> tokenizers.Tokenizer:
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    library = tokenizers.Tokenizer(models.BPE(ids, pairs, ignore_merges=known.ignore_merges))
    library.pre_tokenizer = known.build()
    normalizer = known.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    return library


def both(pre: str, seed: int = 1) -> tuple[NativeBpe, tokenizers.Tokenizer]:
    known = PRE_TOKENIZERS[pre]
    tokens, merges = vocabulary(seed)
    assert known.native is not None
    own = native_bpe(
        tokens, merges, known.native, ignore_merges=known.ignore_merges, composed=known.nfc
    )
    assert own is not None
    return own, by_library(tokens, merges, known)


def ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


@pytest.mark.slow  # Every code point, five seconds.
def test_the_classes_are_those_of_the_library() -> None:
    written = (SOURCE / "classes.inc").read_text()
    assert [int(word, 0) for word in written.replace(",", " ").split()] == runs()


@pytest.mark.parametrize("pre", ["gpt-2", "olmo", "qwen2", "dbrx", "llama-bpe"])
def test_ids_are_those_of_the_library(pre: str) -> None:
    assert pre in NATIVE
    own, library = both(pre)

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def equal(text: str) -> None:
        expected = ids(library, text)
        assert own.encode(text) == expected
        assert len(expected) * own.longest >= len(text.encode())

    equal()


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_merges(seed: int) -> None:
    own, library = both("gpt-2", seed)
    draw = random.Random(seed)
    for length in [*range(1, 60), 200, 1000]:
        word = "".join(draw.choice("abelrstvd") for _ in range(length))
        assert own.encode(word) == ids(library, word)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
@pytest.mark.parametrize("text", ["a", "ab", " ", "x9 ", "=", "é", "'s", "abelrstvd"])
def test_long_texts(pre: str, text: str) -> None:
    own, library = both(pre)
    assert own.encode(text * 3000) == ids(library, text * 3000)


def test_every_character_alone_and_between_letters() -> None:
    own, library = both("llama-bpe")
    draw = random.Random(3)
    some = [*range(0x3400), *draw.sample(range(0x3400, 0x110000), 20_000)]
    text = "".join(f"a{chr(code)}1 {chr(code)}" for code in some if not 0xD800 <= code < 0xE000)
    assert own.encode(text) == ids(library, text)


def test_tokens_are_found_as_the_file_writes_them() -> None:
    tokens, merges = vocabulary(1)
    twice = [*tokens, "ab", "ab", "<|end|>"]
    known = PRE_TOKENIZERS["gpt-2"].native
    assert known is not None
    own = native_bpe(twice, merges, known, ignore_merges=False, composed=False)
    assert own is not None
    assert own.find("<|end|>") == len(twice) - 1
    assert own.find("ab") == len(twice) - 2, "the last of equals, as in a dictionary"
    assert own.find("nowhere") is own.find("") is own.find("\ud800") is None
    assert own.encode("") == []


@pytest.mark.parametrize(
    ("tokens", "merges"),
    [
        (ALPHABET, ["a b"]),  # together they are no token
        ([*ALPHABET, "ab"], ["a  b"]),
        ([*ALPHABET, "ab"], ["ab"]),
        ([*ALPHABET, "ab", "b c", "ab c"], ["a b c"]),
        (ALPHABET[1:], []),  # a byte without a token
        ([], []),
        ([*ALPHABET, "\ud800"], []),
    ],
)
def test_what_does_not_fit_is_left_to_the_library(tokens: list[str], merges: list[str]) -> None:
    known = PRE_TOKENIZERS["gpt-2"].native
    assert known is not None
    assert native_bpe(tokens, merges, known, ignore_merges=False, composed=False) is None


@pytest.mark.parametrize("merge", ["h zzz", "h q", "h", "h e l", "qqqqqqqqqqqqqqqq z", " "])
def test_merges_that_do_not_fit_are_refused(merge: str) -> None:
    """They are refused where the library would panic too: the parts are tokens, their sum is
    none."""
    with pytest.raises(ModelFileError, match="merges do not fit the vocabulary"):
        load_tokenizer(byte_level_metadata(**{"tokenizer.ggml.merges": [merge]}))


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xff",
        b"\xc0\x80",
        b"\xc3",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf0\x80\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
        b"a\x80",
        b"\xe2\x82",
    ],
)
def test_tokens_that_are_no_text_are_not_taken(wrong: bytes) -> None:
    sound = StringArray.of(ALPHABET, "a test")
    buffer = sound.buffer + bytes(8) + wrong
    values = StringArray(buffer, array("Q", [*sound.starts, len(buffer)]), "a test")
    known = PRE_TOKENIZERS["gpt-2"].native
    assert known is not None
    assert native_bpe(values, [], known, ignore_merges=False, composed=False) is None


def test_a_library_that_cannot_be_used_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line with the reason, where the other library steps in."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    for changes, words in (
        ({"FILE": broken, "INSTALLED": broken}, "broken.so cannot be loaded: "),
        ({"VERSION": 0}, "belongs to another version of Headrace"),
    ):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(textlibrary, name, value)
            textlibrary.library.cache_clear()
            try:
                served = load_tokenizer(byte_level_metadata()).served
            finally:
                textlibrary.library.cache_clear()
        assert served.value == "tokenizers library"
        assert words in served.reason
        assert "\n" not in served.reason
    assert textlibrary.absence() is None


@pytest.mark.parametrize(
    ("pre", "value", "words"),
    [
        ("qwen2", "own byte-level BPE", "qwen2"),
        ("smollm", "tokenizers library", "does not know how smollm cuts text into words"),
    ],
)
def test_who_turns_text_into_ids(pre: str, value: str, words: str) -> None:
    served = load_tokenizer(byte_level_metadata(**{"tokenizer.ggml.pre": pre})).served
    assert (served.name, served.value) == ("tokenizer", value)
    assert words in served.reason


def test_several_threads_at_once() -> None:
    own, library = both("qwen2")
    texts = [f"able {number} starved\n" * 400 for number in range(32)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(own.encode, texts)) == [ids(library, text) for text in texts]


@pytest.mark.parametrize("library_absent", [False, True])
def test_the_same_without_the_library(
    library_absent: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if library_absent:
        monkeypatch.setattr(textlibrary, "FILE", tmp_path / "none.so")
        monkeypatch.setattr(textlibrary, "INSTALLED", tmp_path / "none.so")
        textlibrary.library.cache_clear()
    try:
        tokenizer = load_tokenizer(byte_level_metadata())
        kind: type = ByteLevelEncoder if library_absent else NativeBpe
        assert isinstance(tokenizer._encoder, kind)
        assert tokenizer.served.value == (
            "tokenizers library" if library_absent else "own byte-level BPE"
        )
        assert ("was not built" in tokenizer.served.reason) == library_absent
        encoded = tokenizer.encode("hello wü 👍<|end|>")
        assert tokenizer.decode(encoded, skip_special=False) == "hello wü 👍<|end|>"
        assert tokenizer.token_to_id("hello") == 259
        assert tokenizer.token_to_id("nowhere") is None
    finally:
        textlibrary.library.cache_clear()
