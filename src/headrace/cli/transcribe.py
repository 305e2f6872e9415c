"""`headrace transcribe`."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..base.errors import InvalidRequest
from ..base.hardware import cpu
from ..base.names import nearest
from ..media import AudioLimits, decode
from ..speech.captions import clock, srt, vtt
from ..speech.decoding import DecodingOptions
from ..speech.languages import code_of, language_names
from ..speech.opening import DEFAULT_MODEL, open_transcriber
from ..speech.transcript import Segment, Transcript
from .progress import DownloadBars

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_MOST_BYTES = 2 << 30
LINE_SECONDS = 30.0
"""Seconds between two lines of progress without a terminal."""


@command.command()
def transcribe(
    file: Annotated[Path, typer.Argument(help="Sound: wav, flac, ogg, mp3, mp4, m4a, webm.")],
    model: Annotated[str, typer.Option("--model", help="Catalog name or folder.")] = DEFAULT_MODEL,
    language: Annotated[
        str | None,
        typer.Option("--language", help="Code or name: de, German.", show_default="what is heard"),
    ] = None,
    translate: Annotated[
        bool, typer.Option("--translate", help="Into English, whatever is spoken.")
    ] = False,
    form: Annotated[
        Literal["text", "srt", "vtt", "json"], typer.Option("--format", help="What to print.")
    ] = "text",
    words: Annotated[bool, typer.Option("--words", help="Times of words; in JSON.")] = False,
    chunked: Annotated[
        bool,
        typer.Option("--chunked", help="Stretches of speech side by side: faster, no context."),
    ] = False,
    beams: Annotated[int, typer.Option("--beams", min=1, max=8, help="Beams of a search.")] = 1,
    prompt: Annotated[str, typer.Option("--prompt", help="What was said before; names.")] = "",
    exact: Annotated[
        bool, typer.Option("--exact", help="Weights as the file has them, not in eight bits.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Of the CPU.", show_default="one for each core"),
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option("--cache-dir", help="Where models are kept.", show_default=False)
    ] = None,
) -> None:
    """Print the text of a sound file as it is decoded; progress goes to standard error.

    A run that is stopped has written what it had decoded.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise InvalidRequest(f"{file} is larger than {_MOST_BYTES >> 30} GiB", param="file")
        data = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", param="file") from error
    limits = AudioLimits(bytes=_MOST_BYTES, seconds=24 * 3600.0, memory=4 << 30, wall_seconds=900)
    sound = decode(data, limits)
    with DownloadBars(sys.stderr) as bars:
        transcriber = open_transcriber(
            model,
            threads or cpu().physical_cores,
            "exact" if exact else "int8",
            cache_dir=cache_dir,
            keep=True,
            progress=bars,
        )
    known = transcriber.network.files.special.languages
    code = None if language is None else code_of(language)
    if code is not None and known and code not in known:
        near = nearest(str(language).strip().lower(), sorted(language_names(known)))
        raise InvalidRequest(
            f"language {language!r:.40} is not known; it is a code such as de, or an English "
            f"name such as German{near}",
            param="language",
        )
    options = DecodingOptions(
        language=code,
        task="translate" if translate else "transcribe",
        prompt=prompt,
        beams=beams,
    )
    written = _Written(sound.seconds, form)
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        found = transcriber.transcribe(
            sound.samples, options, words=words, chunked=chunked, told=written.told
        )
    except (KeyboardInterrupt, SystemExit):
        written.end(Transcript(code or "", sound.seconds, written.segments), complete=False)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    written.end(found, complete=True)
    if not found.segments:
        reasons = ", ".join(sorted({one.reason for one in found.left_out})) or "it is empty"
        print(f"nothing is said in {file}: {reasons}", file=sys.stderr)


def _stopped(number: int, _frame: object) -> None:
    """End as a terminated process does, but write what there is."""
    raise SystemExit(128 + number)


class _Written:
    """The output as it comes: text and captions by segment, JSON at the end; and the progress."""

    def __init__(self, seconds: float, form: str) -> None:
        self.segments: list[Segment] = []
        self._seconds, self._form = seconds, form
        self._live = sys.stderr.isatty()
        self._said = time.monotonic()

    def told(self, new: list[Segment], upto: float) -> None:
        self._clear()
        first = len(self.segments) + 1
        self.segments += new
        if self._form == "text":
            sys.stdout.writelines(f"{segment.text.strip()}\n" for segment in new)
        elif self._form != "json" and new:
            sys.stdout.write((srt if self._form == "srt" else vtt)(new, first))
        sys.stdout.flush()
        now = time.monotonic()
        if self._live or now - self._said >= LINE_SECONDS:
            self._said = now
            sys.stderr.write(f"{clock(upto, '.')} of {clock(self._seconds, '.')}")
            sys.stderr.write("" if self._live else "\n")
            sys.stderr.flush()

    def end(self, found: Transcript, *, complete: bool) -> None:
        """Write what comes at the end: JSON, or the head of captions that have none."""
        self._clear()
        if self._form == "json":
            record = _record(found) | {"complete": complete}
            print(json.dumps(record, ensure_ascii=False, indent=1))
        elif self._form == "vtt" and not found.segments:
            sys.stdout.write(vtt([]))
        sys.stdout.flush()

    def _clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")


def _record(found: Transcript) -> dict[str, Any]:
    segments = []
    for one in found.segments:
        record = asdict(one)
        record["words"] = [word._asdict() for word in one.words]
        segments.append(record)
    return {
        "language": found.language,
        "seconds": found.seconds,
        "text": found.text,
        "segments": segments,
        "left_out": [one._asdict() for one in found.left_out],
    }
