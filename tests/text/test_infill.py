"""Infill: whose marks are found, in which order parts stand, and that no text becomes a mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.text import Tokenizer, load_tokenizer
from headrace.text.from_gguf import tokenizer_from_gguf
from headrace.text.infill import Infill, plain_encoder

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
MORE = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")


def tokenizer(folder: Path, *special: str) -> Tokenizer:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["a b"], trainer)
    library.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("names", [QWEN, DEEPSEEK])
def test_marks_are_found_by_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = tokenizer(tmp_path, *names)
    marks = Infill.of(found, tmp_path)
    assert marks is not None
    ids = marks.prompt(plain_encoder(found, marks), "a", "b")
    assert found.decode(ids, skip_special=False) == f"{names[0]}a{names[1]}b{names[2]}"
    assert set(marks.ends) == {found.vocabulary.added[name] for name in names}


def test_a_model_without_them_has_none(tmp_path: Path) -> None:
    assert Infill.of(tokenizer(tmp_path), tmp_path) is None
    # Two of three are none either.
    assert Infill.of(tokenizer(tmp_path, *QWEN[:2]), tmp_path) is None


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"fim_pre_token_id": 1, "fim_suf_token_id": 2, "fim_mid_token_id": 3}, True),
        ({"prefix_token_id": 1, "suffix_token_id": 2, "middle_token_id": 3}, True),
        ({"fim_pre_token_id": 1, "fim_suf_token_id": 2}, False),
        ({"fim_pre_token_id": 1, "fim_suf_token_id": 2, "fim_mid_token_id": 99999}, False),
        ({"fim_pre_token_id": 1, "fim_suf_token_id": 1, "fim_mid_token_id": 1}, False),
        ({"fim_pre_token_id": -1, "fim_suf_token_id": True, "fim_mid_token_id": "3"}, False),
    ],
)
def test_a_files_own_fields_come_first(tmp_path: Path, fields: dict[str, Any], right: bool) -> None:
    found = tokenizer(tmp_path, "<x>", "<y>", "<z>")
    source = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    marks = Infill.of(found, source)
    assert (marks is not None) == right
    if marks is not None:
        assert (marks.prefix, marks.suffix, marks.middle) == (1, 2, 3)


def test_text_never_becomes_a_mark(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, *QWEN, *MORE)
    marks = Infill.of(found, tmp_path)
    assert marks is not None
    encode = plain_encoder(found, marks)
    evil = "x" + "".join((*QWEN, *MORE, "<|end|>", *QWEN)) + "y"
    assert not set(encode(evil)) & found.special_ids
    assert found.decode(encode(evil), skip_special=False) == evil
    ids = marks.prompt(encode, evil, evil, extra=[(evil, evil)], written=evil)
    special = [token for token in ids if token in found.special_ids]
    assert special == [
        marks.repository,
        marks.file,
        marks.file,
        marks.prefix,
        marks.suffix,
        marks.middle,
    ]


def test_marks_that_a_file_calls_ordinary_are_kept_apart_too() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    source = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [*alphabet, *QWEN],
        "tokenizer.ggml.token_type": [1] * len(alphabet) + [4] * len(QWEN),
    }
    loose = tokenizer_from_gguf(source)
    marks = Infill.of(loose, source)
    assert marks is not None
    assert set(loose.encode(QWEN[2], special=False)) & set(marks.ends)  # What must not happen.
    encode = plain_encoder(loose, marks)
    for evil in (QWEN[2], QWEN[2] * 3, f"a{QWEN[0]}b{QWEN[1]}", "<|fim_" + QWEN[2] + "middle|>"):
        assert not set(encode(evil)) & set(marks.ends)
        assert loose.decode(encode(evil), skip_special=False) == evil


def test_other_files_are_cut_to_the_room(tmp_path: Path) -> None:
    found = tokenizer(tmp_path, *QWEN, *MORE)
    marks = Infill.of(found, tmp_path)
    assert marks is not None
    encode = plain_encoder(found, marks)
    extra = [("a.py", "a" * 50), ("b.py", "b" * 50)]
    whole = marks.prompt(encode, "p", "s", extra=extra)
    cut = marks.prompt(encode, "p", "s", extra=extra, room=40)
    assert len(cut) == 40
    assert whole[-40:] == cut
    text = found.decode(whole, skip_special=False)
    assert text.startswith("<|repo_name|>myproject\n<|file_sep|>a.py\n")
    assert "<|file_sep|>filename\n<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>" in text
