"""`multipart/form-data` while it arrives (RFC 7578): nothing of a file is held in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from ...base.errors import InvalidRequest
from ..errors import UnsupportedMediaType

MAX_HEADERS = 8 * 1024
"""Bytes of one part's headers."""
MAX_PARTS = 16
MAX_FIELD = 1024
"""Bytes of a part that is no file."""
MAX_BOUNDARY = 70


@dataclass(frozen=True, slots=True)
class Part:
    """The head of one part."""

    name: str
    filename: str | None
    """None: it is a field, not a file."""


def boundary_of(content_type: str) -> bytes:
    """Raises `UnsupportedMediaType` and `InvalidRequest`."""
    message = Message()
    message["content-type"] = content_type
    if message.get_content_type() != "multipart/form-data":
        raise UnsupportedMediaType(
            f"the content type must be multipart/form-data, not {content_type[:100] or 'absent'}"
        )
    try:
        boundary = message.get_boundary()
    except ValueError:  # a character set that cannot be (RFC 2231)
        boundary = None
    if not boundary or len(boundary) > MAX_BOUNDARY or not boundary.isascii():
        raise _wrong(f"the boundary must have 1 to {MAX_BOUNDARY} ASCII characters")
    return boundary.encode()


class FormReader:
    """Part after part: `part` finds the next one's head, `data` gives its content in pieces."""

    def __init__(
        self, chunks: AsyncIterator[bytes], boundary: bytes, most_parts: int = MAX_PARTS
    ) -> None:
        self._chunks, self._most_parts = chunks, most_parts
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # So that the first delimiter is like the others.
        self._parts = 0

    async def part(self) -> Part | None:
        """What is left of the part before is skipped. None: the form is complete.

        Raises `InvalidRequest` where the bytes are no form.
        """
        async for _ in self.data():
            pass
        del self._buffer[: len(self._delimiter)]
        end = await self._until(b"\r\n", 256, also=b"--")
        if end == b"--":
            return None
        if end.strip(b" \t"):
            raise _wrong("text follows a boundary")
        self._parts += 1
        if self._parts > self._most_parts:
            raise _wrong(f"at most {self._most_parts} parts are allowed")
        head = await self._until(b"\r\n\r\n", MAX_HEADERS)
        try:
            message = HeaderParser().parsestr(head.decode("utf-8"))
        except UnicodeDecodeError:
            raise _wrong("the headers of a part are not UTF-8") from None
        try:
            name = message.get_param("name", header="content-disposition")
            filename = message.get_filename()
        except ValueError:  # a character set that cannot be (RFC 2231)
            raise _wrong("the names of a part cannot be read") from None
        if message.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _wrong("a part has no name")
        return Part(name, filename)

    async def data(self) -> AsyncIterator[bytes]:
        """The content of the part whose head was read last."""
        while True:
            at = self._buffer.find(self._delimiter)
            sure = at if at >= 0 else len(self._buffer) - len(self._delimiter)
            if sure > 0:
                piece = bytes(self._buffer[:sure])
                del self._buffer[:sure]
                yield piece
            if at >= 0:
                return
            await self._fill()

    async def field(self, name: str, most: int | None = None) -> str:
        """The content of a part that is no file; `InvalidRequest` where it is long or no text.

        `most`: bytes of it; None: `MAX_FIELD`.
        """
        most, content = most or MAX_FIELD, b""
        async for piece in self.data():
            content += piece
            if len(content) > most:
                raise _wrong(f"{name[:100]} is longer than {most} bytes", param=name[:100])
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise _wrong(f"{name[:100]} is not UTF-8", param=name[:100]) from None

    async def _until(self, mark: bytes, most: int, also: bytes | None = None) -> bytes:
        """The bytes before `mark`, which is taken too; `also`, where they begin with that."""
        while True:
            if also is not None and self._buffer[: len(also)] == also:
                return also
            at = self._buffer.find(mark)
            if 0 <= at <= most:
                found = bytes(self._buffer[:at])
                del self._buffer[: at + len(mark)]
                return found
            if len(self._buffer) > most:
                raise _wrong(f"the head of a part is longer than {most} bytes")
            await self._fill()

    async def _fill(self) -> None:
        try:
            self._buffer += await self._chunks.__anext__()
        except StopAsyncIteration:
            raise _wrong("the form ends in the middle") from None


def _wrong(why: str, param: str | None = None) -> InvalidRequest:
    return InvalidRequest(f"the form is wrong: {why}", param=param, code="invalid_form")
