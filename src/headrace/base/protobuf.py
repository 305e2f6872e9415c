"""Messages of protobuf, made at run time from short descriptions: no generated code, no compiler.

A part whose size or number a peer could inflate is declared as bytes, its form on the wire. So it
is counted before anything in it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import HeadraceError
from .extras import needed

_TYPES = {
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "number": 5, "bool": 8, "text": 9,
    "bytes": 12, "uint32": 13,
}  # fmt: skip
"""Field types of `google.protobuf.FieldDescriptorProto`; any other is a message's name."""
_MESSAGE = 11


class MalformedMessage(HeadraceError):
    """Bytes that are not a message, or a message that is not allowed now."""

    status = 400
    code = "malformed_message"


class MessageTypes:
    """Message types of one protocol."""

    def __init__(self, package: str, fields: Mapping[str, str], user: str) -> None:
        """Describe them. `fields`: by the message's name, "NUMBER NAME TYPE, …"; `*` before a type:
        it is repeated. `user`: their user, named in the error if protobuf is not installed."""
        self._package, self._fields, self._user = package, fields, user
        self._made: dict[str, Any] | None = None

    def new(self, name: str) -> Any:
        """Make an empty message. Raises `PackageAbsent`."""
        return self._classes()[name]()

    def parsed(self, name: str, data: bytes) -> Any:
        """Parse a message. Raises `MalformedMessage`."""
        failures = self._needed("message")
        try:
            return self._classes()[name].FromString(data)
        except failures.DecodeError:
            raise MalformedMessage(f"the bytes are no {name}") from None

    def filled(self, name: str, values: Mapping[str, Any]) -> Any:
        """Make a message from plain values; values without a field are left out."""
        return self._needed("json_format").ParseDict(
            values, self.new(name), ignore_unknown_fields=True
        )

    def forget(self) -> None:
        """Forget the classes; they are made again on demand."""
        self._made = None

    def _needed(self, module: str) -> Any:
        return needed(f"google.protobuf.{module}", self._user, "picker")

    def _classes(self) -> dict[str, Any]:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _make(self) -> dict[str, Any]:
        pools, factory = self._needed("descriptor_pool"), self._needed("message_factory")
        struct = self._needed("struct_pb2")
        # proto2 distinguishes an absent field from an empty one; on the wire they are alike.
        file = self._needed("descriptor_pb2").FileDescriptorProto(
            name=self._package, package=self._package, syntax="proto2"
        )
        file.dependency.append(struct.DESCRIPTOR.name)
        for name, fields in self._fields.items():
            message = file.message_type.add(name=name)
            for one in fields.split(", "):
                number, field, kind = one.split()
                repeated = kind[0] == "*"
                made = message.field.add(name=field, number=int(number), label=1 + 2 * repeated)
                kind = kind.removeprefix("*")
                made.type = _TYPES.get(kind, _MESSAGE)
                if kind not in _TYPES:
                    package = "google.protobuf" if kind == "Struct" else self._package
                    made.type_name = f".{package}.{kind}"
        pool = pools.DescriptorPool()
        pool.AddSerializedFile(struct.DESCRIPTOR.serialized_pb)
        pool.Add(file)
        return {
            name: factory.GetMessageClass(pool.FindMessageTypeByName(f"{self._package}.{name}"))
            for name in self._fields
        }
