"""Bytes of others: whatever is wrong with them is one error."""

from __future__ import annotations

import msgspec
import pytest

from headrace.base.foreign import Undecodable, any_json, json_reader, msgpack_reader
from headrace.text.messages import clean_messages


class Named(msgspec.Struct, array_like=True, tag=True):
    name: str


NO_UTF8 = msgspec.msgpack.encode(Named("#salt#")).replace(b"#salt#", b"\xff" * 6)


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b'"\xff"',
        b'{"name": "\xff\xfe"}',
        b"[" * 2**20,
        b"9" * 5000,
        b'"\\ud800"',
        '"\ud800"',
        b"NaN",
    ],
)
def test_json_of_others_has_one_error(wrong: bytes | str) -> None:
    with pytest.raises(Undecodable) as said:
        any_json(wrong)
    assert str(said.value)


def test_json_of_another_type_is_told_from_what_is_no_json() -> None:
    for wrong, well_formed in ((b"[1, 2]", True), (b"[", False)):
        with pytest.raises(Undecodable) as said:
            json_reader(Named)(wrong)
        assert said.value.well_formed == well_formed


@pytest.mark.parametrize(
    "wrong",
    [b"", NO_UTF8, b"\x91" * 2**20, b"\xc1", b"\x81\x81\x01\x02\x03", b"\xd7\xff" + b"\xff" * 8],
)
def test_messagepack_of_others_has_one_error(wrong: bytes) -> None:
    with pytest.raises(Undecodable):
        msgpack_reader(Named)(wrong)


def test_what_is_right_is_decoded() -> None:
    assert msgpack_reader(Named)(msgspec.msgpack.encode(Named("a"))) == Named("a")
    assert any_json('{"a": [1, 2]}') == {"a": [1, 2]}


@pytest.mark.parametrize("arguments", ["[" * 200_000, '{"a": "\\ud800"}', "{"])
def test_arguments_of_an_earlier_call_that_are_no_json_stay_a_text(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (clean,) = clean_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert clean["tool_calls"][0]["function"]["arguments"] == arguments
