"""Encodings as both planes see them: an input's handle, and the computation of its rows.

An encoding is the output of an encoder part for one input: rows in place of a prompt's tokens. It
is named by its tenant and its input's digest, so that all requests of a tenant share it.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_INPUTS = 512
"""Maximum inputs of a process in sealed memory, if it may have eight times as many files open."""


class SealedHandle(NamedTuple):
    """Handle of an array [rows, width] in fp32 in sealed shared memory (`dist.payloads`)."""

    process: int
    """The process that has it open."""
    descriptor: int
    token: bytes
    """First bytes of the memory: a descriptor may have been closed and used again."""
    rows: int
    width: int
    first: int = 0
    """Rows of the memory before the array's."""
    total: int = 0
    """All rows of the memory; 0: the array's alone."""
    tables: int = 0
    """Tables for decoding an array kept as one byte per number; 0: it is kept in fp32."""


class EncodingName(NamedTuple):
    tenant: str
    """Name of the requests that share it, as `Admission.tenant`."""
    digest: bytes
    """`InputSpan.digest`."""


class EncodingStart(NamedTuple):
    """An encoding to begin, once for each time that its computation begins."""

    slot: int
    """Its number in the worker, and its row among the entries of its part."""
    name: EncodingName
    source: SealedHandle
    units: int
    """Size of the input in units of its encoder: positions."""
    columns: int = 0
    """`InputSpan.columns`."""
    aligns: bool = False
    """`InputSpan.aligns`."""


class EncoderShape(NamedTuple):
    """An encoder part as the control plane sees it."""

    slices: int
    """Parts of an encoding that a step can compute, one after the other: layers."""
    width: int
    """Numbers of a row of an encoding, in fp32."""
    bound: int
    """Maximum bytes of encodings, those that are being computed included."""
    slot: int = 0
    """Bytes of any encoding that cross attention reads (K and V of each layer, and the data kept
    for alignment); 0: encodings are rows."""
    whole: bool = False
    """Whether no reader needs single tokens of texts: then they and slices wait for each other."""

    def size(self, rows: int) -> int:
        """Return the bytes of an encoding of `rows`."""
        return self.slot or 4 * self.width * rows


class EncodingStats(NamedTuple):
    """Counts since the start, and the state after a step."""

    computed: int = 0
    """Encodings that were computed."""
    shared: int = 0
    """Uses of an encoding that another request had computed or was waiting for."""
    failed: int = 0
    waiting: int = 0
    """Encodings that are requested and not complete."""
    bytes: int = 0
    """Bytes of those that are reserved or kept."""
    seconds: float = 0.0
    """Time of their slices."""
