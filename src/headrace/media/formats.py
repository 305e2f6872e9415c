"""Container formats by their first bytes, and the reasons why a decoder may refuse a file.

The client's file name and MIME type are ignored. The bytes alone choose the decoder, so a playlist,
a subtitle or a script never reaches one.
"""

from __future__ import annotations

import struct

FFMPEG = {"mp4": "mov", "webm": "matroska"}
"""Formats that need FFmpeg (the extra `av`), and the only demuxer that each may open."""
HEAD = 12
"""Number of leading bytes that identify a format."""
REFUSALS = {
    "format": "the file is not a sound of a known format; wav, flac, ogg, mp3, mp4, m4a and webm "
    "are taken",
    "codec": "the codec inside of the file is not taken; pcm, flac, alac, vorbis, opus, mp3 and "
    "aac are",
    "damaged": "the sound cannot be decoded",
    "empty": "the sound has no samples",
    "rate": "the sampling rate must be between 1,000 and 384,000 Hz",
    "channels": "the sound must have between 1 and 8 channels",
    "long": "the sound is longer than is taken here",
    "time": "the sound took too long to decode",
    "room": "the server has no room for the samples",
    "lost": "the sound cannot be decoded within the limits of memory and time",
}
"""Code from the child → clause for the user. A decoder's own words are never shown."""


def container(data: bytes) -> str | None:
    """Detect the format by its signature: wav, flac, ogg, mp3, mp4 (m4a, mov), webm; else None."""
    head = data[:HEAD]
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return "ogg"
    if head[4:8] == b"ftyp":
        return "mp4"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    frame = len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2 and head[2] >> 4 != 15
    return "mp3" if head[:3] == b"ID3" or frame else None


_WIDTHS = (1, 3, 6, 7, 0xFFFE)
"""WAV codec codes with a fixed number of bytes per sample: PCM, float, A-law, µ-law."""


def declared(data: bytes | bytearray) -> float | None:
    """Return the maximum duration in seconds according to the header (WAV: width, FLAC: length).

    None: only decoding can tell.
    """
    head = bytes(data[:64])
    match container(head):
        case "wav" if head[12:16] == b"fmt " and len(head) >= 36:
            code, channels, rate, _, width, bits = struct.unpack_from("<HHIIHH", head, 20)
            width = min(width, channels * (bits // 8))
            return len(data) / (rate * width) if code in _WIDTHS and rate and width else None
        case "flac" if len(head) >= 26 and head[4] & 0x7F == 0:
            numbers = int.from_bytes(head[18:26], "big")
            rate, samples = numbers >> 44, numbers & (1 << 36) - 1
            return samples / rate if rate and samples else None
    return None
