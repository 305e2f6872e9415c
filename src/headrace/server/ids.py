"""Lists of token ids in large bodies, read in pieces into arrays.

An id takes two to seven bytes of a body, four in an array, and forty as an integer in a list of
Python's, beside as much again while pydantic parses it. So of the one field that may hold very many
the ids are taken out before the rest is parsed.
"""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec

PIECE = 16 * 1024
"""Bytes that are read at once."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_numbers = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]])
_encode = msgspec.json.encode


def take_ids(
    body: bytes | bytearray, name: str
) -> tuple[bytes, array[int] | list[array[int]]] | None:
    """(the body with a shorter list in the field `name`, what was in it): a list of ids, or of such
    lists. None where the field holds anything else, or the body is wrong: parsing says how."""
    try:
        fields = _fields.decode(body)
        if name not in fields:
            return None
        text = memoryview(fields[name])
        nested = bytes(text[1:PIECE]).lstrip()[:1] == b"["
        ids = _nested(bytes(text)) if nested else _flat(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    if not ids:
        return None
    fields[name] = msgspec.Raw(b"[0]" if isinstance(ids, array) else b"[[0]]")
    return _encode(fields), ids


def _flat(text: memoryview) -> array[int]:
    """The numbers of a list."""
    if bytes(text[:1]) != b"[":
        raise msgspec.DecodeError("not a list")
    ids = array("i")
    start, end = 1, len(text) - 1
    while start < end:
        piece = bytes(text[start : min(start + PIECE, end)])
        if start + PIECE < end:
            cut = piece.rfind(b",")
            if cut <= 0:
                raise msgspec.DecodeError("not ids")
            piece = piece[:cut]
        ids.extend(_numbers.decode(b"[%b]" % piece))
        start += len(piece) + 1
    return ids


def _nested(text: bytes) -> list[array[int]]:
    """The numbers of each list in a list."""
    found: list[array[int]] = []
    end = text.rindex(b"]")
    start = 1
    while (close := text.find(b"]", start, end)) >= 0:
        opening = text.find(b"[", start, close)
        if opening < 0 or text[start:opening].strip(b" \t\r\n,"):
            raise msgspec.DecodeError("not a list of lists")
        found.append(_flat(memoryview(text)[opening : close + 1]))
        start = close + 1
    if text[start:end].strip():
        raise msgspec.DecodeError("not a list of lists")
    return found
