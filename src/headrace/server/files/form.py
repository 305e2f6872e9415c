"""Parser of `multipart/form-data` while it arrives (RFC 7578); file content is never held in
memory."""

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
"""Bytes of a part that is not a file."""
MAX_BOUNDARY = 70


@dataclass(frozen=True, slots=True)
class Part:
    """Header of one part."""

    name: str
    filename: str | None
    """None for a field that is not a file."""


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a content type. Raises `UnsupportedMediaType` and `InvalidRequest`."""
    message = Message()
    message["content-type"] = content_type
    if message.get_content_type() != "multipart/form-data":
        raise UnsupportedMediaType(
            f"the content type must be multipart/form-data, not {content_type[:100] or 'absent'}"
        )
    try:
        boundary = message.get_boundary()
    except ValueError:  # an invalid character set (RFC 2231)
        boundary = None
    if not boundary or len(boundary) > MAX_BOUNDARY or not boundary.isascii():
        raise _wrong(f"the boundary must have 1 to {MAX_BOUNDARY} ASCII characters")
    return boundary.encode()


class FormReader:
    """Reader of one part after the other: `part` finds the next header, `data` yields its
    content."""

    def __init__(
        self, chunks: AsyncIterator[bytes], boundary: bytes, most_parts: int = MAX_PARTS
    ) -> None:
        self._chunks, self._most_parts = chunks, most_parts
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # This makes the first delimiter like the others.
        self._parts = 0

    async def part(self) -> Part | None:
        """Skip the rest of the previous part; return the next one, or None at the form's end.

        Raises `InvalidRequest` if the bytes are not a form.
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
        except ValueError:  # an invalid character set (RFC 2231)
            raise _wrong("the names of a part cannot be read") from None
        if message.get_content_disposition() != "form-data" or not isinstance(name, str):
            raise _wrong("a part has no name")
        return Part(name, filename)

    async def data(self) -> AsyncIterator[bytes]:
        """Yield the content of the part whose header was read last."""
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
        """Return the content of a part that is not a file.

        `most`: its maximum bytes; None: `MAX_FIELD`. Raises `InvalidRequest` if it is too long or
        not text.
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
        """Return the bytes before `mark` and consume both; return `also` if the bytes begin with
        it."""
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
