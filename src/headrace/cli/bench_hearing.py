"""`headrace bench hear`: speed and accuracy of a server's transcription."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..base.config import verify_bounds
from ..base.errors import InvalidRequest
from ..bench.compare import INVALID_RUN
from ..bench.hearing import SoundLoad
from ..bench.hearing_limit import add_hearing_limit, hearing_limit
from ..bench.options import RunOptions
from ..bench.run import ask_server
from ..bench.sounds import read_recordings
from ..bench.store import write_text
from ..loader.whisper_files import open_whisper
from ..obs.progress import StatusLine
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from ..speech.finding import find
from .bench_flags import (
    AsJson,
    HardwareOf,
    Out,
    default_folder,
    fresh_seed,
    with_run_flags,
)
from .flags import argument, flag

NAMES = {
    "latency_seconds": "whole answer, s",
    "first_text_seconds": "first text, s",
    "rtfx_each": "sound for each second of a request",
    "first_partial_seconds": "first partial behind the speaker, s",
    "final_seconds": "final text behind the speaker, s",
    "rewritten_words": "guessed words that changed, a session",
}
COLUMNS = ("mean", "p50", "p90", "p99")


@with_run_flags(
    only="url model requests arrivals concurrency seed timeout api_key",
    concurrency=1,
)
def hear_command(
    options: RunOptions,
    folder: Annotated[
        Path,
        argument(
            "Sounds (wav, flac, ogg, mp3 …), each with what is said in a .txt; each is asked "
            "once, unless --requests says how many in all."
        ),
    ],
    language: Annotated[str | None, flag("Code of it; none: what the server hears.")] = None,
    live: Annotated[
        bool, flag("Sessions, fed in the time in which they are spoken.", "--live")
    ] = False,
    roofline: Annotated[
        str | None, flag("Whisper whose roofline is put beside: a closed loop's.")
    ] = None,
    hardware: HardwareOf = "this",
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Load with transcription requests or live sessions: speed, times, word errors."""
    verify_bounds(options)
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is no folder of sounds", param="folder")
    if roofline is not None and (live or options.arrivals is not None):
        raise InvalidRequest("only a closed loop of files has a roofline", param="roofline")
    console = Console(stderr=as_json, highlight=False, markup=False)
    limited = None
    if roofline is not None:
        limited = open_whisper(find(roofline)), find_hardware(hardware, calibration_path())
    options.seed = fresh_seed(options.seed)
    recordings = read_recordings(folder)
    server = ask_server(options)
    options.model = options.model or server["model"]
    total = options.requests or len(recordings)
    with StatusLine(sys.stderr, "hearing") as said:

        def watch(heard: int) -> None:
            said(f"{heard} of {total}")

        load = SoundLoad(options, recordings, language, live=live, watch=watch)
        whole = load.run()
    result = load.result(server, whole=whole)
    if limited is not None and roofline is not None:
        files, device = limited
        good = [one for one in load.heard if one.error is None]
        found = hearing_limit(good, files, device, options.concurrency)
        add_hearing_limit(result, found, roofline, device)
    place = out or default_folder("hear")
    place.mkdir(parents=True, exist_ok=True)
    texts = [{"sound": r.recording.name, "text": r.text, "error": r.error} for r in load.heard]
    write_text(place / "result.json", json.dumps(result, indent=1))
    write_text(place / "texts.jsonl", "".join(json.dumps(each) + "\n" for each in texts))
    if as_json:
        print(json.dumps(result))
    else:
        _show(console, result)
    console.print(f"written: {place}", style="dim", soft_wrap=True)
    if result["invalid"] is not None:
        console.print(f"invalid: {result['invalid']}", style="bold red", soft_wrap=True)
        raise typer.Exit(INVALID_RUN)


def _show(console: Console, result: dict[str, Any]) -> None:
    about = "sessions" if result["live"] else "files"
    rate = "" if result["live"] else f": {result['rtfx']:.1f} seconds of sound a second"
    console.print(
        f"{result['requests']} {about} of {result['sound_seconds']:.0f} s together in "
        f"{result['seconds']:.1f} s, {result['load']}{rate}",
        soft_wrap=True,
    )
    if (limit := result.get("roofline")) is not None:
        console.print(
            f"{limit['share']:.1%} of the roofline of {limit['model']} on {limit['hardware']}: "
            f"{limit['rtfx']:.0f} (encoder {limit['encoder']:.2f} s, decoder "
            f"{limit['decoder']:.2f} s of {limit['tokens']:.0f} tokens)",
            soft_wrap=True,
        )
    for name, what in (("words", "word"), ("characters", "character")):
        if (found := result[name]) is not None:
            rate = f"{found['rate']:.2%} ({found['wrong']} of {found['said']})"
            console.print(f"{what} error rate {rate}")
    table = Table("", box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, what in NAMES.items():
        if (found := result["metrics"].get(name)) is not None:
            table.add_row(what, *(f"{found[column]:.3f}" for column in COLUMNS))
    console.print(table)
    if result["failed"]:
        console.print(f"{result['failed']} failed: {'; '.join(result['problems'])}", style="red")
