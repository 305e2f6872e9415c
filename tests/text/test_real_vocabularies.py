"""The vocabularies of the catalog's models against their own families' tokenizers."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from corpus import DECOMPOSED, PLAIN, random_texts, source_code

from headrace.base.modelfiles import ModelFiles
from headrace.loader import open_model
from headrace.text import ChatTemplate, Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

TEXTS = [*PLAIN, *DECOMPOSED, *random_texts(300), source_code()]


def metadata_of(files: ModelFiles) -> dict[str, Any]:
    assert isinstance(files.tokenizer, dict)
    return files.tokenizer


@pytest.fixture(scope="module")
def qwen_files() -> ModelFiles:
    return open_model("qwen2.5-coder-0.5b")


@pytest.fixture(scope="module")
def qwen(qwen_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(qwen_files.tokenizer)


@pytest.fixture(scope="module")
def gemma_metadata() -> dict[str, Any]:
    return metadata_of(open_model("gemma-3-270m"))


@pytest.fixture(scope="module")
def gemma(gemma_metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(gemma_metadata)


def test_qwen_equals_its_class_in_transformers(qwen_files: ModelFiles, qwen: Tokenizer) -> None:
    """The class, not `from_pretrained(gguf_file=…)`: that one leaves out the normal form."""
    transformers = pytest.importorskip("transformers")
    metadata = metadata_of(qwen_files)
    tokens, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    reference = transformers.Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens) if types[index] == 1},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
    )
    for kind, special in ((3, True), (4, False)):
        reference.add_tokens(
            [tokens[index] for index, found in enumerate(types) if found == kind],
            special_tokens=special,
        )
    marked = [f"<|im_start|>user\n{text}<|im_end|>\n<tool_call>{text}" for text in PLAIN]
    order: dict[int, int] = {}
    for text in [*TEXTS, *marked]:
        expected = reference.encode(text, add_special_tokens=False)
        # The class numbers the added tokens in its own order.
        names = reference.convert_ids_to_tokens(expected)
        assert [qwen.id_to_token(index) for index in qwen.encode(text)] == names, text[:80]
        order.update(zip(expected, qwen.encode(text), strict=True))
    assert all(ours == theirs for theirs, ours in order.items() if theirs < 151_643)


def test_smollm2_equals_the_tokenizers_library() -> None:
    """Its published tokenizer: digits one by one, then GPT-2's words."""
    tokenizers = pytest.importorskip("tokenizers")
    metadata = metadata_of(open_model("smollm2-135m"))
    tokens, types = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    reference = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    before = tokenizers.pre_tokenizers
    words = before.ByteLevel(add_prefix_space=False)
    reference.pre_tokenizer = before.Sequence([before.Digits(individual_digits=True), words])
    reference.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
    )
    smollm2 = load_tokenizer(metadata)
    for text in [*TEXTS, *(f"<|im_start|>user\n{text}<|im_end|>\n" for text in PLAIN)]:
        found = smollm2.encode(text)
        assert found == reference.encode(text, add_special_tokens=False).ids, text[:80]
        assert smollm2.decode(found, skip_special=False) == text


def test_qwen_template(qwen_files: ModelFiles, qwen: Tokenizer) -> None:
    assert qwen_files.chat_template is not None
    text = ChatTemplate(qwen_files.chat_template).render([{"role": "user", "content": "Hi"}])
    ids = qwen.encode(text)
    assert ids[0] == qwen.token_to_id("<|im_start|>")
    assert qwen.decode(ids, skip_special=False) == text
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_gemma_equals_sentencepiece(gemma_metadata: dict[str, Any], gemma: Tokenizer) -> None:
    """The pieces and scores of the file, run by the library that Gemma is trained with."""
    sentencepiece = pytest.importorskip("sentencepiece")
    # sentencepiece's own copy wants the protobuf of the day it was built.
    proto = pytest.importorskip("transformers.utils.sentencepiece_model_pb2_new")
    model = proto.ModelProto()
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = 3
    model.trainer_spec.bos_id = 2
    model.trainer_spec.eos_id = 1
    model.trainer_spec.pad_id = 0
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.name = "identity"
    names = ("tokens", "scores", "token_type")
    columns = [gemma_metadata[f"tokenizer.ggml.{name}"] for name in names]
    for token, score, kind in zip(*columns, strict=True):
        # GGUF writes runs of spaces as spaces.
        piece = token.replace(" ", "▁") if kind == 4 else token
        model.pieces.add(piece=piece, score=score, type=int(kind))
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    for text in [*TEXTS, "  x" * 40, " " * 100 + "x" + "\n" * 70, "<table>\n<tr>  <td>"]:
        text = text.replace("\0", "").replace("\u2585", "")
        expected = reference.encode(text)
        assert gemma.encode(text, special=False) == expected, text[:80]
        assert gemma.decode(expected) == reference.decode(expected), text[:80]


@pytest.mark.slow
def test_gemma_equals_transformers() -> None:
    """Except for runs of more than 31 spaces, which its merges cut in another way than the model's
    own library, and for "▁" written in the text."""
    transformers = pytest.importorskip("transformers")
    files = open_model("gemma-3-270m")
    reference = transformers.AutoTokenizer.from_pretrained(
        files.path.parent, gguf_file=files.path.name
    )
    gemma = load_tokenizer(files.tokenizer)
    for text in TEXTS:
        if " " * 32 in text or "▁" in text:
            continue
        assert gemma.encode(text) == reference.encode(text, add_special_tokens=False), text[:80]
    text = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert gemma.encode(text, add_bos=True) == reference.encode(text)


def test_gemma_special(gemma: Tokenizer) -> None:
    assert (gemma.bos_id, gemma.eos_id, gemma.add_bos) == (2, 1, True)
    assert gemma.encode("Hi", add_bos=True)[0] == 2
    assert gemma.encode("<bos>Hi", special=False)[0] != 2
    ids = gemma.encode("<bos><start_of_turn>user\n  Hi")
    assert gemma.decode(ids) == "user\n  Hi"


def test_texts_come_back(qwen: Tokenizer, gemma: Tokenizer) -> None:
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text)
        assert qwen.decode(qwen.encode(text)) == composed
        assert gemma.decode(gemma.encode(text, special=False)) == text.replace("▁", " ")
