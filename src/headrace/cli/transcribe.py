"""`headrace transcribe`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..base.errors import InvalidRequest
from ..base.hardware import cpu
from ..media import AudioLimits, decode
from ..speech.captions import clock, srt, vtt
from ..speech.decoding import DecodingOptions
from ..speech.opening import DEFAULT_MODEL, open_transcriber
from ..speech.transcript import Segment, Transcript
from .progress import DownloadBars

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_MOST_BYTES = 2 << 30


@command.command()
def transcribe(
    file: Annotated[Path, typer.Argument(help="Sound: wav, flac, ogg, mp3, mp4, m4a, webm.")],
    model: Annotated[str, typer.Option("--model", help="Catalog name or folder.")] = DEFAULT_MODEL,
    language: Annotated[
        str | None,
        typer.Option("--language", help="Code of it, as en or de.", show_default="what is heard"),
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
    """Print the text of a sound file; progress goes to standard error."""
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
    if language is not None and known and language not in known:
        raise InvalidRequest(
            f"language {language!r:.20} is not known; one of {', '.join(sorted(known))}",
            param="language",
        )
    options = DecodingOptions(
        language=language,
        task="translate" if translate else "transcribe",
        prompt=prompt,
        beams=beams,
    )
    shown = _Progress(sound.seconds, plain=form == "text")
    found = transcriber.transcribe(
        sound.samples, options, words=words, chunked=chunked, told=shown.told
    )
    shown.end()
    if not found.segments:
        reasons = ", ".join(sorted({one.reason for one in found.left_out})) or "it is empty"
        print(f"nothing is said in {file}: {reasons}", file=sys.stderr)
    if form == "json":
        print(json.dumps(_record(found), ensure_ascii=False, indent=1))
    elif form != "text":
        sys.stdout.write((srt if form == "srt" else vtt)(found.segments))


class _Progress:
    """Segments of plain text as they come; on a terminal also the progress."""

    def __init__(self, seconds: float, *, plain: bool) -> None:
        self._seconds, self._plain, self._live = seconds, plain, sys.stderr.isatty()

    def told(self, new: list[Segment], upto: float) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
        if self._plain:
            for segment in new:
                print(segment.text.strip(), flush=True)
        if self._live:
            sys.stderr.write(f"{clock(upto, '.')} of {clock(self._seconds, '.')}")
            sys.stderr.flush()

    def end(self) -> None:
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
