"""Mutations of every input by fixed seeds: a result or a typed error, never anything else."""

from __future__ import annotations

import http_mutations
import mutations
import pytest

KINDS = (
    "tokenizer",
    "config",
    "safetensors",
    "gguf",
    "template",
    "schema",
    "lark",
    "regex",
    "structural_tag",
)


def test_every_kind_is_tried() -> None:
    assert set(KINDS) == set(mutations.examples())


@pytest.mark.parametrize("kind", KINDS)
def test_mutations_are_read_or_refused(kind: str) -> None:
    ends, findings = mutations.mutate(kind, 300)
    assert not findings
    assert ends["refused"] > 5, ends


@pytest.mark.slow
def test_mutated_requests_are_answered_or_refused() -> None:
    ends, findings = http_mutations.mutate(300)
    assert not findings
    assert ends["read"] + ends["refused"] == 300, ends
    assert min(ends["read"], ends["refused"]) > 5, ends


@pytest.mark.parametrize(
    "content",
    [
        b'{"model":{"type":"BPE","vocab":{"a":2147483648},"merges":[]},"decoder":{"type":"ByteLevel"}}',
        b'{"model":{"vocab":{"a":0}},"added_tokens":[{"id":4294967295,"content":"x"}]}',
    ],
)
def test_an_id_of_two_to_the_31_asks_for_no_gigabytes(tmp_path, content: bytes) -> None:  # type: ignore[no-untyped-def]
    from headrace.base.errors import ModelFileError
    from headrace.text import load_tokenizer

    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelFileError, match="id"):
        load_tokenizer(tmp_path)
