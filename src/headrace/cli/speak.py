"""`headrace speak`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from ..base.config import EngineOptions
from ..base.errors import InvalidRequest
from ..engine.clients.speaking import Speaker
from ..media.writing import MEDIA_TYPES, SoundWriter, wav_head
from ..speech.voices import FILE, open_voices
from .brief import BriefHelp
from .configured import configured
from .start import engine_of

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def speak(
    engine: EngineOptions,
    text: Annotated[str, typer.Argument(help="What is spoken, or - for standard input.")],
    out: Annotated[
        Path, typer.Option("--out", help="The file; its name's end is the format: wav, mp3, …")
    ] = Path("speech.wav"),
    voice: Annotated[
        str | None,
        typer.Option("--voice", help="One of the model's.", show_default="the first of them"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", show_default="what the folder says")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same sound.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Codes at most.", show_default="the context's end"),
    ] = None,
) -> None:
    """Write the sound of a text, as it is made. MODEL is a folder with a speech.json and a codec;
    progress goes to standard error."""
    form = out.suffix.removeprefix(".").lower()
    if form not in MEDIA_TYPES:
        raise InvalidRequest(
            f"{out} must end in one of {', '.join('.' + one for one in MEDIA_TYPES)}", param="out"
        )
    if not (Path(engine.model) / FILE).is_file():
        raise InvalidRequest(
            f"{engine.model} does not speak: a folder with {FILE} and a codec is wanted",
            param="model",
        )
    given = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    said = {name: value for name, value in given.items() if value is not None}
    spoken = sys.stdin.read() if text == "-" else text
    # A wrong codec is reported before the model is loaded.
    voices = open_voices(Path(engine.model), sys.maxsize)
    voices.check(voice or voices.voices[0])
    try:
        with out.open("wb") as file:
            asyncio.run(_speak(engine, spoken, voice or voices.voices[0], said, form, file))
    except OSError as error:
        raise InvalidRequest(f"{out} cannot be written: {error.strerror}", param="out") from error


async def _speak(
    options: EngineOptions,
    text: str,
    voice: str,
    given: dict[str, float],
    form: str,
    file: BinaryIO,
) -> None:
    async with engine_of(options) as engine:
        speaker = Speaker.of(engine)
        writer = SoundWriter(form, speaker.rate)
        speaking = speaker.speak(text, voice, given, request_id="speak")
        async with aclosing(speaking.pieces()) as pieces:
            async for samples in pieces:
                file.write(writer.write(samples))
                if sys.stderr.isatty():
                    seconds = speaking.samples / speaker.rate
                    sys.stderr.write(f"\r\x1b[K{seconds:.1f} s of sound")
                    sys.stderr.flush()
        file.write(writer.end())
        if form == "wav":
            file.seek(0)
            file.write(wav_head(speaker.rate, 2 * speaking.samples))
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        why = "" if speaking.finish_reason == "stop" else ", cut at the limit of tokens"
        print(f"{file.name}: {speaking.samples / speaker.rate:.2f} s{why}", file=sys.stderr)
