"""Decoding of bytes from a peer, a client or a file: one place, with one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

from .errors import Undecodable as Undecodable

Kind = TypeVar("Kind")
Encoded = bytes | bytearray | memoryview | str
Read = Callable[[Encoded], Kind]


@overload
def json_reader() -> Read[Any]: ...
@overload
def json_reader(kind: type[Kind]) -> Read[Kind]: ...
@overload
def json_reader(kind: object) -> Read[Any]: ...
def json_reader(kind: object = Any) -> Read[Any]:
    """Make a function that decodes JSON into `kind`, a type or a union of types. It raises only
    `Undecodable`."""
    return _reader(msgspec.json.Decoder(kind).decode)


@overload
def msgpack_reader() -> Read[Any]: ...
@overload
def msgpack_reader(kind: type[Kind]) -> Read[Kind]: ...
@overload
def msgpack_reader(kind: object) -> Read[Any]: ...
def msgpack_reader(kind: object = Any) -> Read[Any]:
    """Make a function that decodes MessagePack, like `json_reader` for JSON."""
    return _reader(msgspec.msgpack.Decoder(kind).decode)


def _reader(decode: Callable[[Any], Kind]) -> Read[Kind]:
    def read(data: Encoded) -> Kind:
        try:
            return decode(data)
        # Python's own for text that is not UTF-8 is a `ValueError`; msgspec's are, but not in 0.19.
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            wrong = Undecodable(str(error))
            wrong.well_formed = isinstance(error, msgspec.ValidationError)
            raise wrong from None

    return read


any_json = json_reader()
