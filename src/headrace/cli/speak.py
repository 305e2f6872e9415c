"""`headrace speak`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from ..base.config import EngineOptions, ServerOptions
from ..base.errors import InvalidRequest, file_errors
from ..engine.clients.codec_speaking import CodecSpeaker
from ..engine.clients.speaking import Speaker, SpeechClient
from ..engine.programs.files import is_program
from ..engine.programs.speaking import ProgramSpeaker
from ..media.writing import MEDIA_TYPES, SoundWriter, wav_head
from ..speech.voices import FILE, check_voice, open_voices
from .brief import BriefHelp
from .configured import configured
from .flags import argument, flag
from .start import engine_of, running

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def speak(
    engine: EngineOptions,
    text: Annotated[str, argument("What is spoken, or - for standard input.")],
    out: Annotated[
        Path, flag("The file; its name's end is the format: wav, mp3, …", "--out", "-o")
    ] = Path("speech.wav"),
    voice: Annotated[
        str | None, flag("One of the model's.", "--voice", show_default="the first of them")
    ] = None,
    speed: Annotated[
        float | None, flag("From 0.25 to 4; programs only.", "--speed", show_default="1")
    ] = None,
    phonemes: Annotated[bool, flag("The text is phonemes; programs only.", "--phonemes")] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", show_default="what the folder says")
    ] = None,
    seed: Annotated[int | None, flag("Same seed, same sound.", "--seed")] = None,
    max_tokens: Annotated[
        int | None, flag("Codes at most.", "--max-tokens", show_default="the context's end")
    ] = None,
) -> None:
    """Write the sound of a text, as it is made. MODEL is a voice (joe, kokoro, NAME.onnx), or a
    folder with a speech.json and a codec; progress goes to standard error."""
    form = out.suffix.removeprefix(".").lower()
    if form not in MEDIA_TYPES:
        raise InvalidRequest(
            f"{out} must end in one of {', '.join('.' + one for one in MEDIA_TYPES)}", param="out"
        )
    given = {
        "temperature": temperature,
        "seed": seed,
        "max_tokens": max_tokens,
        "speed": speed,
        "phonemes": phonemes or None,
    }
    said = {name: value for name, value in given.items() if value is not None}
    spoken = sys.stdin.read() if text == "-" else text
    opened = partial(_program, engine)
    if not is_program(engine.model):
        if not (Path(engine.model) / FILE).is_file():
            raise InvalidRequest(
                f"{engine.model} does not speak: a voice such as joe is wanted, an .onnx file with "
                f"its .json, or a folder with {FILE} and a codec",
                param="model",
            )
        # A wrong codec is reported before the model is loaded.
        voices = open_voices(Path(engine.model), sys.maxsize)
        check_voice(voice or voices.voices[0], voices.voices)
        opened = partial(_model, engine)
    with file_errors(InvalidRequest, f"{out} cannot be written", "out"), out.open("wb") as file:
        asyncio.run(_speak(opened, spoken, voice, said, form, file))


@asynccontextmanager
async def _model(options: EngineOptions) -> AsyncIterator[Speaker]:
    async with engine_of(options) as engine:
        yield CodecSpeaker.of(engine)


@asynccontextmanager
async def _program(options: EngineOptions) -> AsyncIterator[Speaker]:
    async def in_thread(work: Callable[..., str], *arguments: str) -> str:
        return await asyncio.to_thread(work, *arguments)

    engine = await running(options, ServerOptions(programs=options.model, program_lanes=1))
    try:
        yield ProgramSpeaker(engine, next(iter(engine.programs.values())), in_thread)
    finally:
        await engine.close()


async def _speak(
    opened: Callable[[], Any],
    text: str,
    voice: str | None,
    given: Mapping[str, Any],
    form: str,
    file: BinaryIO,
) -> None:
    async with opened() as speaker:
        writer = SoundWriter(form, speaker.rate)
        speaking = speaker.speak(text, voice or speaker.voices[0], given, SpeechClient())
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
