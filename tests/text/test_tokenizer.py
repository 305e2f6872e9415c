"""Tokenizers against the libraries that define them: `tokenizers` and `sentencepiece`."""

from __future__ import annotations

import io
import itertools
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from corpus import DECOMPOSED, PLAIN, TEXT, random_texts, source_code
from hypothesis import given, settings
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from vocabularies import byte_level_metadata, sentencepiece_metadata

from headrace.base import textlibrary
from headrace.base.errors import InvalidRequest, ModelFileError, TooLarge, UnsupportedModel
from headrace.text import Tokenizer, load_tokenizer
from headrace.text import tokenizer as tokenizer_module
from headrace.text.json_bpe import own_tokenizer, read
from headrace.text.pretokenize import PRE_TOKENIZERS

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [*PLAIN, *DECOMPOSED, *random_texts(100), source_code()[:20_000]]


def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level BPE, trained here with the cut of a family."""
    known = PRE_TOKENIZERS[pre]
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=known.ignore_merges))
    library.pre_tokenizer = known.build()
    normalizer = known.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    library.train_from_iterator([source_code()[:60_000], *PLAIN], trainer)
    library.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    return library


def as_gguf(library: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    model = json.loads(library.to_str())["model"]
    vocab = library.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = {**dict.fromkeys(SPECIALS, 3), "<tool_call>": 4}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
    }


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "gpt-2", "smollm", "tekken", "deepseek-v3"])
def test_byte_level_equals_the_library(pre: str, tmp_path: Path) -> None:
    library = trained(pre)
    library.save(str(tmp_path / "tokenizer.json"))
    from_gguf = load_tokenizer(as_gguf(library, pre))
    from_json = load_tokenizer(tmp_path / "tokenizer.json")
    own = "own byte-level BPE" if pre in ("qwen2", "llama-bpe", "gpt-2") else "tokenizers library"
    assert from_gguf.served.value == from_json.served.value == own
    marked = [f"<|im_start|>user\n{text}<|im_end|>\n<tool_call>x" for text in PLAIN]
    for text in [*TEXTS, *marked]:
        expected = library.encode(text, add_special_tokens=False).ids
        assert from_gguf.encode(text) == expected, text[:80]
        assert from_json.encode(text) == expected, text[:80]
        for skip in (True, False):
            decoded = library.decode(expected, skip_special_tokens=skip)
            assert from_gguf.decode(expected, skip_special=skip) == decoded
            assert from_json.decode(expected, skip_special=skip) == decoded
    assert from_gguf.vocab_size == from_json.vocab_size == library.get_vocab_size()
    assert from_gguf.special_ids == from_json.special_ids
    pieces = [from_gguf.piece(index) for index in range(from_gguf.vocab_size)]
    assert pieces == [from_json.piece(index) for index in range(from_json.vocab_size)]


def bos_in_front(library: tokenizers.Tokenizer) -> None:
    """Llama 3 has its bos so."""
    bos = ("<|im_start|>", library.token_to_id("<|im_start|>"))
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<|im_start|> $A", "<|im_start|> $A $B", [bos]),
        ]
    )


def word_alone(library: tokenizers.Tokenizer) -> None:
    library.add_tokens([tokenizers.AddedToken("the", single_word=True, normalized=False)])


def composed_before(library: tokenizers.Tokenizer) -> None:
    library.add_tokens([tokenizers.AddedToken("<a>", normalized=True)])


def space_in_front(library: tokenizers.Tokenizer) -> None:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def lower_case(library: tokenizers.Tokenizer) -> None:
    library.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize(
    ("change", "own"),
    [
        (bos_in_front, True),
        (word_alone, False),
        (composed_before, False),
        (space_in_front, False),
        (lower_case, False),
    ],
)
def test_only_what_our_own_knows_wholly_is_not_the_librarys(
    change: Callable[[tokenizers.Tokenizer], None], own: bool, tmp_path: Path
) -> None:
    library = trained("qwen2")
    change(library)
    library.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert (ours.served.value == "own byte-level BPE") == own
    for text in ["The other the<a>\u0338 Ae\u0301<|im_end|>", *PLAIN]:
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=True) == library.encode(text).ids
    for token in ("<|im_end|>", "<tool_call>", "the", "nowhere at all"):
        assert ours.token_to_id(token) == library.token_to_id(token)
    assert list(ours.vocabulary.tokens) == [
        library.id_to_token(index) for index in range(library.get_vocab_size())
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["added_tokens"].extend(
            {**state["added_tokens"][-1], "content": f"<{at}>", "id": 1501 + at} for at in (1, 0)
        ),
        lambda state: state["added_tokens"][-1].update(id=1999),
        lambda state: state["model"].update(dropout=0.5),
        lambda state: state["model"].update(end_of_word_suffix="</w>"),
        lambda state: state["model"]["vocab"].update(hole=1999),
        lambda state: state["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
        lambda state: state["pre_tokenizer"]["pretokenizers"].pop(0),
        lambda state: state["added_tokens"].append(state["added_tokens"][0]),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_the_librarys(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    state = json.loads(trained("qwen2").to_str())
    change(state)
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert own_tokenizer(*read(tmp_path / "tokenizer.json")) is None


def test_the_cuts_are_those_of_the_families() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, pattern in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        if name not in PRE_TOKENIZERS:
            continue
        reference = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        ours = PRE_TOKENIZERS[name].build()
        for text in TEXTS:
            assert ours.pre_tokenize_str(text) == reference.pre_tokenize_str(text), name


def spm_model(tmp_path: Path, **options: Any) -> tuple[bytes, dict[str, Any]]:
    """A SentencePiece model trained here, and the same as GGUF metadata."""
    corpus = tmp_path / "corpus.txt"
    lines = [line for text in [source_code()[:60_000], *PLAIN] for line in text.splitlines()]
    corpus.write_text("\n".join(lines).replace("\0", " "), encoding="utf-8")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=1400,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = processor.get_piece_size()
    tokens = [processor.id_to_piece(index) for index in range(count)]
    user = set(options.get("user_defined_symbols", []))

    def kind(index: int) -> int:
        if processor.is_unknown(index):
            return 2
        if processor.is_control(index):
            return 3
        if processor.is_byte(index):
            return 6
        return 4 if tokens[index] in user else 1

    return model.getvalue(), {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [processor.get_score(index) for index in range(count)],
        "tokenizer.ggml.token_type": [kind(index) for index in range(count)],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": options.get("add_dummy_prefix", True),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁▁", "\n", "<tag>"]},
        {"user_defined_symbols": ["▁▁", "▁▁▁"]},
        {"split_by_whitespace": False},
    ],
    ids=["llama", "no-prefix", "gemma", "prefix-and-runs", "words-joined"],
)
def test_sentencepiece_equals_the_library(options: dict[str, Any], tmp_path: Path) -> None:
    model, metadata = spm_model(tmp_path, **options)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = load_tokenizer(metadata)
    for text in TEXTS:
        # SentencePiece takes these two for marks of its own.
        text = text.replace("\0", "").replace("\u2585", "")
        expected = library.encode(text)
        assert ours.encode(text, special=False) == expected, text[:80]
        assert ours.fewest(text) <= len(expected), text[:80]
        if "�" not in text:
            assert ours.decode(expected) == library.decode(expected), text[:80]
    assert ours.encode("a", add_bos=True)[0] == library.bos_id()


@settings(deadline=None)
@given(text=TEXT)
def test_the_leftmost_of_equals_is_joined_first(text: str) -> None:
    """The rule by which "aaaaa" is cut, against a search of all neighbours at every turn."""
    text = text[:30].replace("\n", "aaaa")
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    ours = load_tokenizer(metadata)
    scores = {
        token: score
        for token, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == 1
    }
    plain = text.replace(" ", "").replace("<tag>", "")
    symbols = list(plain)
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in scores
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    expected: list[str] = []
    for symbol in symbols:
        known = symbol in scores
        expected += [symbol] if known else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    assert [ours.id_to_token(index) for index in ours.encode(plain, special=False)] == expected


def llama_json(tmp_path: Path) -> tuple[Path, tokenizers.Tokenizer]:
    """A `tokenizer.json` as Llama 2 has it, and its config."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in [*"▁abcdefghijklmnopqrstuvwxyz", "▁a", "he", "▁the", "▁t"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "a"), ("h", "e"), ("▁", "t"), ("▁t", "he")]
    library = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    library.enable_truncation(16)
    library.enable_padding(length=16)
    library.save(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return tmp_path, library


def test_sentencepiece_style_json(tmp_path: Path) -> None:
    folder, library = llama_json(tmp_path)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>"},
                "eos_token": "</s>",
                "added_tokens_decoder": {"290": {"content": "<|new|>", "special": True}},
            }
        )
    )
    ours = load_tokenizer(folder)
    assert ours.encode("x" * 100) == library.encode("x" * 100, add_special_tokens=False).ids
    for text in ("the cat", " a  b", "日本 the", "a</s>the", ""):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == library.decode(ids)
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (1, 2, True)
    assert ours.encode("the", add_bos=True) == library.encode("the").ids
    assert ours.encode("<|new|>") == [290]
    assert ours.encode("<s>", special=False) != [1]
    assert ours.encode("<s>") == [1]
    assert ours.decode(ours.encode("a<s>b", special=False)) == "a<s>b"


@pytest.mark.parametrize("special", [False, True])
def test_bytes_that_were_added_are_bytes(special: bool, tmp_path: Path) -> None:
    folder, _ = llama_json(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["<nothing>"] = vocab.pop("<0x41>")
    token = max(vocab.values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append({"id": token, "content": "<0x41>", "special": special, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    library, ours = (
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
        load_tokenizer(folder),
    )
    around = ours.encode("the")
    for ids in ([token], [token, token], [*around, token, *around]):
        decoded = ours.decode(ids, skip_special=False)
        assert decoded == library.decode(ids, skip_special_tokens=False)
        assert "A" in decoded


def test_config_decides_over_bos(tmp_path: Path) -> None:
    folder, _ = llama_json(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    assert not load_tokenizer(folder).add_bos


def test_wordpiece(tmp_path: Path) -> None:
    vocab = {
        token: index
        for index, token in enumerate(
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", "!"]
        )
    }
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(cleanup=False)
    library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    ids = ours.encode("Hello worlds!")
    assert ids == [4, 5, 6, 7]
    assert [*ours.vocabulary.prefix_ids, *ids, *ours.vocabulary.suffix_ids] == library.encode(
        "Hello worlds!"
    ).ids
    assert ours.decode(ids) == "hello worlds !" == library.decode(ids)


def test_special_tokens_in_text(byte_level: Tokenizer) -> None:
    end, start = (byte_level.token_to_id(token) for token in ("<|end|>", "<|im_start|>"))
    text = "a<|end|><|im_start|>b<|end"
    assert byte_level.encode(text).count(end or -1) == 1
    assert byte_level.encode(text)[1:3] == [end, start]
    plain = byte_level.encode(text, special=False)
    assert not byte_level.special_ids & set(plain)
    assert byte_level.decode(plain) == text
    # A user-defined token is a word of the vocabulary, not a control token.
    assert byte_level.encode("<tool_call>", special=False) == [
        byte_level.token_to_id("<tool_call>")
    ]
    assert (byte_level.eos_id, byte_level.add_bos) == (end, False)


def test_the_fewest_ids_of_a_text(byte_level: Tokenizer) -> None:
    long = "<|im_start|>"
    assert len(long) == max(map(len, byte_level.vocabulary.added))
    for text in (long, "a" + long * 5, "ö" * 40, "u\u0308\u0301" * 40, "\ud800"):
        shortest = len(byte_level.encode(text)) if text != "\ud800" else 1
        assert byte_level.fewest(text) <= shortest
    if textlibrary.library() is not None:
        assert byte_level.fewest("x" * 10_000) > 50


def test_bad_text(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        byte_level.encode("ab\ud800")
    with pytest.raises(InvalidRequest):
        byte_level.encode(b"bytes")  # type: ignore[arg-type]
    monkeypatch.setattr(tokenizer_module, "MAX_CHARACTERS", 10)
    with pytest.raises(TooLarge):
        byte_level.encode("x" * 11)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModel, "'rwkv'.*gpt2, llama"),
        ({"tokenizer.ggml.model": None}, UnsupportedModel, "None"),
        ({"tokenizer.ggml.pre": "klingon"}, UnsupportedModel, "'klingon'.*qwen2"),
        ({"tokenizer.ggml.pre": None}, UnsupportedModel, "None"),
        ({"tokenizer.ggml.tokens": None}, ModelFileError, "tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, ModelFileError, "tokens"),
        ({"tokenizer.ggml.token_type": [1]}, ModelFileError, "token_type"),
        ({"tokenizer.ggml.token_type": [-1]}, ModelFileError, "token_type"),
        ({"tokenizer.ggml.merges": ["no such"]}, ModelFileError, "merges"),
        ({"tokenizer.ggml.merges": ["nospace"]}, ModelFileError, "merges"),
        ({"tokenizer.ggml.merges": None}, ModelFileError, "merges"),
        (
            {"tokenizer.ggml.merges": ["h e", None]},
            ModelFileError,
            "merges must be an array of str",
        ),
        ({"tokenizer.ggml.tokens": ["a", 7]}, ModelFileError, "tokens must be an array of str"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, ModelFileError, "eos_token_id"),
        ({"tokenizer.ggml.bos_token_id": "x"}, ModelFileError, "bos_token_id"),
    ],
)
def test_bad_gguf(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    metadata = {**byte_level_metadata(), **changes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(error, match=words):
        load_tokenizer(metadata)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "scores"),
        ({"tokenizer.ggml.scores": None}, "scores"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "whitespace"),
    ],
)
def test_bad_sentencepiece_gguf(changes: dict[str, Any], words: str) -> None:
    metadata = {**sentencepiece_metadata(), **changes}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises((ModelFileError, UnsupportedModel), match=words):
        load_tokenizer(metadata)


def test_bad_json(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError):
        load_tokenizer(tmp_path)
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="decoder"):
        load_tokenizer(tmp_path)
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    for config in ("[", "[]", '{"added_tokens_decoder": {"7": {"content": "x"}}}'):
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(ModelFileError):
            load_tokenizer(tmp_path)


def test_normal_form(byte_level: Tokenizer) -> None:
    """Qwen's tokenizer composes characters first."""
    for text in DECOMPOSED:
        composed = unicodedata.normalize("NFC", text)
        assert byte_level.encode(text) == byte_level.encode(composed)


def test_added_tokens_of_a_gguf_without_rows_are_text() -> None:
    metadata = byte_level_metadata()
    whole = load_tokenizer(metadata)
    last = max(whole.vocabulary.added.values())
    (text,) = (text for text, index in whole.vocabulary.added.items() if index == last)
    assert whole.encode(f"a{text}")[-1] == last
    ours = load_tokenizer(metadata, last)
    ids = ours.encode(f"a{text}")
    assert max(ids) < last
    assert ours.decode(ids, skip_special=False) == f"a{text}"
    assert ours.vocab_size == last
    assert text not in ours.vocabulary.added
