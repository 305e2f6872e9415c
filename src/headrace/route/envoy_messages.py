"""Messages of Envoy's external processing, built from descriptions by `protobuf`.

Only the fields needed to pick an endpoint are described, because Envoy's files import a hundred
others. Numbers are those of `envoy/service/ext_proc/v3/external_processor.proto`. Each part of a
request is declared as bytes, its form on the wire, so its size is known before anything in it is
read.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError
from ..base.extras import needed
from ..base.sections import read_rows

_TYPES = {"number": 5, "bool": 8, "text": 9, "bytes": 12}
"""Field types of `google.protobuf.FieldDescriptorProto`; any other is a message's name."""
_MESSAGE = 11
_FIELDS = dict(row.split(": ") for row in read_rows(Path(__file__).with_suffix(".txt")))
"""Fields of each message."""


class MalformedMessage(HeadraceError):
    """Bytes that are not a message, or a message that is not allowed now."""

    status = 400
    code = "malformed_message"


@cache
def _classes() -> dict[str, Any]:
    """Make the classes. Raises `PackageAbsent`."""
    who, extra = "endpoint pickers", "picker"
    descriptors = needed("google.protobuf.descriptor_pb2", who, extra)
    pools = needed("google.protobuf.descriptor_pool", who, extra)
    factory = needed("google.protobuf.message_factory", who, extra)
    struct = needed("google.protobuf.struct_pb2", who, extra)
    # proto2 distinguishes an absent field from an empty one; on the wire they are alike.
    file = descriptors.FileDescriptorProto(name="envoy", package="envoy", syntax="proto2")
    file.dependency.append(struct.DESCRIPTOR.name)
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for one in fields.split(", "):
            number, field, kind = one.split()
            made = message.field.add(name=field, number=int(number), label=1 + 2 * (kind[0] == "*"))
            kind = kind.removeprefix("*")
            made.type = _TYPES.get(kind, _MESSAGE)
            if kind not in _TYPES:
                made.type_name = (
                    f".google.protobuf.{kind}" if kind == "Struct" else f".envoy.{kind}"
                )
    pool = pools.DescriptorPool()
    pool.AddSerializedFile(struct.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: factory.GetMessageClass(pool.FindMessageTypeByName(f"envoy.{name}"))
        for name in _FIELDS
    }


def new(name: str) -> Any:
    """Make an empty message."""
    return _classes()[name]()


def parsed(name: str, data: bytes) -> Any:
    """Parse a message. Raises `MalformedMessage`."""
    failures = needed("google.protobuf.message", "endpoint pickers", "picker")
    try:
        return _classes()[name].FromString(data)
    except failures.DecodeError:
        raise MalformedMessage(f"the bytes are no {name}") from None
