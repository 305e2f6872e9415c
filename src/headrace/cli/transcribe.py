"""`headrace transcribe`."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from ..base.errors import HeadraceError, InvalidRequest, PackageAbsent, file_errors
from ..base.hardware import cpu
from ..base.names import nearest
from ..engine.hearing.opening import DEFAULT_MODEL, open_transcriber
from ..loader.progress import ProgressLine
from ..media import AudioLimits, Sound, decode
from ..speech.captions import clock, srt, vtt
from ..speech.decoding import MOST_BEAMS, DecodingOptions
from ..speech.languages import code_of, language_names
from ..speech.transcript import Segment, Transcriber, Transcript
from .flags import argument, flag

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_MOST_BYTES = 2 << 30
_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".mp4", ".m4a", ".webm")
LINE_SECONDS = 30.0
"""Seconds between two lines of progress without a terminal."""


@command.command()
def transcribe(
    files: Annotated[
        list[Path], argument("Sounds: wav, flac, ogg, mp3, mp4, m4a, webm; or folders.")
    ],
    model: Annotated[str, flag("Catalog name or folder.", "--model")] = DEFAULT_MODEL,
    language: Annotated[
        str | None, flag("Code or name: de, German.", "--language", show_default="what is heard")
    ] = None,
    translate: Annotated[bool, flag("Into English, whatever is spoken.", "--translate")] = False,
    form: Annotated[
        Literal["text", "srt", "vtt", "json"], flag("What to print.", "--format")
    ] = "text",
    words: Annotated[bool, flag("Times of words; in JSON.", "--words")] = False,
    chunked: Annotated[
        bool, flag("Stretches of speech side by side: faster, no context.", "--chunked")
    ] = False,
    beams: Annotated[int, flag("Beams of a search.", "--beams", min=1, max=MOST_BEAMS)] = 1,
    prompt: Annotated[str, flag("What was said before; names.", "--prompt")] = "",
    exact: Annotated[
        bool, flag("Weights as the file has them, not in eight bits.", "--exact")
    ] = False,
    threads: Annotated[
        int | None, flag("Of the CPU.", "--threads", min=1, show_default="one for each core")
    ] = None,
    cache_dir: Annotated[
        Path | None, flag("Where models are kept.", "--cache-dir", show_default=False)
    ] = None,
) -> None:
    """Print the text of a sound file as it is decoded; progress goes to standard error.

    The texts of several files, or of a folder's, are written beside them: talk.srt for talk.wav;
    those that are there stay. A run that is stopped has written what it had decoded.
    """
    one = files[0] if len(files) == 1 and not files[0].is_dir() else None
    sound = None if one is None else _sound(one)
    found = [] if one is not None else _listed(files)
    with ProgressLine(sys.stderr) as bars:
        transcriber = open_transcriber(
            model,
            threads or cpu().physical_cores,
            "exact" if exact else "int8",
            cache_dir=cache_dir,
            keep=True,
            progress=bars,
        )
    known = transcriber.files.special.languages
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
    job = _FileWriter(transcriber, options, form, words=words, chunked=chunked)
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        if one is not None and sound is not None:
            job.transcribe(one, sound, sys.stdout)
        else:
            job.beside(found)
    finally:
        signal.signal(signal.SIGTERM, before)
        transcriber.close()


def _sound(file: Path) -> Sound:
    with file_errors(InvalidRequest, f"{file} cannot be read", "file"):
        if file.stat().st_size > _MOST_BYTES:
            raise InvalidRequest(f"{file} is larger than {_MOST_BYTES >> 30} GiB", param="file")
        data = file.read_bytes()
    limits = AudioLimits(bytes=_MOST_BYTES, seconds=24 * 3600.0, memory=4 << 30, wall_seconds=900)
    return decode(data, limits)


def _listed(given: list[Path]) -> list[Path]:
    """Return the files, and each folder's sounds by name. Raises `InvalidRequest`."""
    found: list[Path] = []
    for path in given:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        sounds = [one for one in inside if one == path or one.suffix.lower() in _SUFFIXES]
        if not sounds:
            raise InvalidRequest(f"{path} holds no sound ({', '.join(_SUFFIXES)})", param="file")
        found += sounds
    return found


@dataclass(frozen=True)
class _FileWriter:
    """One opened model, with the options for its sounds."""

    transcriber: Transcriber
    options: DecodingOptions
    form: str
    words: bool
    chunked: bool

    def transcribe(self, file: Path, sound: Sound, out: TextIO) -> None:
        """Write the text of a sound to `out`, even if it is stopped."""
        written = _Written(sound.seconds, self.form, out)
        try:
            found = self.transcriber.transcribe(
                sound.samples,
                self.options,
                words=self.words,
                chunked=self.chunked,
                told=written.told,
            )
        except (KeyboardInterrupt, SystemExit):
            code = self.options.language or ""
            written.end(Transcript(code, sound.seconds, written.segments), complete=False)
            raise
        written.end(found, complete=True)
        if not found.segments:
            reasons = ", ".join(sorted({one.reason for one in found.left_out})) or "it is empty"
            print(f"nothing is said in {file}: {reasons}", file=sys.stderr)

    def beside(self, files: list[Path]) -> None:
        """Write each file's text next to it. A file that fails is reported, and its error raised at
        the end; a stopped one leaves its text in `NAME.partial`."""
        failed: HeadraceError | None = None
        for file in files:
            path = file.with_suffix(".txt" if self.form == "text" else f".{self.form}")
            if path.exists():
                print(f"{path} is there: left as it is", file=sys.stderr)
                continue
            partial = path.with_name(f"{path.name}.partial")
            try:
                sound = _sound(file)
                with partial.open("w", encoding="utf-8") as out:
                    self.transcribe(file, sound, out)
                partial.replace(path)
            except OSError as error:
                reason = error.strerror or error
                failed = InvalidRequest(f"{path} cannot be written: {reason}", param="file")
                print(failed.message, file=sys.stderr)
            except PackageAbsent:
                raise  # The others lack it, too.
            except HeadraceError as error:
                failed = error
                print(f"{file}: {error.message}", file=sys.stderr)
            else:
                print(path)
        if failed is not None:
            raise failed


def _stopped(number: int, _frame: object) -> None:
    """End like a terminated process, but write the text so far."""
    raise SystemExit(128 + number)


class _Written:
    """The output as it comes: text and captions by segment, JSON at the end; and the progress."""

    def __init__(self, seconds: float, form: str, out: TextIO) -> None:
        self._out = out
        self.segments: list[Segment] = []
        self._seconds, self._form = seconds, form
        self._live = sys.stderr.isatty()
        self._said = time.monotonic()

    def told(self, new: list[Segment], upto: float) -> None:
        self._clear()
        first = len(self.segments) + 1
        self.segments += new
        if self._form == "text":
            self._out.writelines(f"{segment.text.strip()}\n" for segment in new)
        elif self._form != "json" and new:
            self._out.write((srt if self._form == "srt" else vtt)(new, first))
        self._out.flush()
        now = time.monotonic()
        if self._live or now - self._said >= LINE_SECONDS:
            self._said = now
            sys.stderr.write(f"{clock(upto, '.')} of {clock(self._seconds, '.')}")
            sys.stderr.write("" if self._live else "\n")
            sys.stderr.flush()

    def end(self, found: Transcript, *, complete: bool) -> None:
        """Write the end of the output: JSON, or the header of captions without segments."""
        self._clear()
        if self._form == "json":
            record = _record(found) | {"complete": complete}
            print(json.dumps(record, ensure_ascii=False, indent=1), file=self._out)
        elif self._form == "vtt" and not found.segments:
            self._out.write(vtt([]))
        self._out.flush()

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
