"""The catalog's voices, read back by our own Whisper base, and the time to the first sound.

    python -m benchmarks.voices [--readings /its/python] [--json FILE]

Needs espeak-ng and the extras `programs` and `audio`. `joe` speaks the English texts of
`speech_words.py` with two seeds: word errors without case or punctuation. `kokoro` speaks texts of
our own in kana. Whisper writes kanji, so both sides become katakana first, by pyopenjtalk of the
Python named by `--readings` (`pip install pyopenjtalk-plus`); errors of that count too.

The first sound is that of a text of ten seconds: wall, which needs a quiet machine, and the
processor's seconds of its program.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.word_errors import Errors, character_errors, word_errors
from headrace.engine.clients.speaking import SpeechClient
from headrace.engine.hearing.opening import open_transcriber
from headrace.engine.programs.engine import ProgramEngine, ProgramLimits
from headrace.engine.programs.files import program_files
from headrace.engine.programs.speaking import ProgramSpeaker
from headrace.media.audio import decode
from headrace.media.writing import to_pcm, wav_head
from headrace.speech.decoding import DecodingOptions

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "voices.json"
ENGLISH: list[str] = json.loads((HERE / "speech_texts.json").read_text())["en"]["texts"]
KANA = (
    "きょう は てんき が いい ので、こうえん まで あるいて いきました。",
    "まいあさ ろくじ に おきて、コーヒー を のみます。",
    "えき の まえ に あたらしい ほんや が できました。",
    "らいしゅう の にちようび に ともだち と えいが を みます。",
    "この かわ の みず は とても つめたい です。",
    "でんしゃ が おくれた ので、かいぎ に まにあいません でした。",
    "こども たち は にわ で ボール を なげて あそんで います。",
    "ふゆ に なる と、やま に ゆき が つもります。",
    "としょかん で かりた ほん を きのう かえしました。",
    "ばんごはん の あと で、おんがく を ききながら べんきょう します。",
)
TEN_SECONDS = (
    "The water turns the wheel, and the wheel turns the mill. Seven boats pass the bridge before "
    "noon, and the children on the bank wave to every one of them. In the evening it is quiet."
)
"""A text of ten seconds."""
_READ = (
    "import sys, pyopenjtalk\nfor row in sys.stdin: print(pyopenjtalk.g2p(row.strip(), kana=True))"
)
Hear = Callable[[npt.NDArray[np.float32], int], str]


async def beside(work: Callable[..., str], *arguments: str) -> str:
    return await asyncio.to_thread(work, *arguments)


async def spoken(speaker: ProgramSpeaker, text: str, voice: str, seed: int) -> npt.NDArray[Any]:
    speaking = speaker.speak(text, voice, {"seed": seed}, SpeechClient())
    return np.concatenate([samples async for samples in speaking.pieces()])


def listener(language: str) -> Hear:
    """Return what writes down a sound."""
    whisper = open_transcriber("whisper-base", 2, "int8")
    options = DecodingOptions(language=language)

    def hear(samples: npt.NDArray[np.float32], rate: int) -> str:
        pcm = to_pcm(samples)
        return whisper.transcribe(decode(wav_head(rate, len(pcm)) + pcm).samples, options).text

    return hear


def readings(python: str, texts: Sequence[str]) -> list[str]:
    """Return texts in katakana."""
    rows = "\n".join(text.replace("\n", " ") for text in texts)
    done = subprocess.run([python, "-c", _READ], input=rows, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-500:])
    return done.stdout.splitlines()


async def english(speaker: ProgramSpeaker, seeds: int) -> dict[str, Any]:
    hear, found, seconds = listener("en"), list[Errors](), 0.0
    for seed in range(seeds):
        for text in ENGLISH:
            samples = await spoken(speaker, text, speaker.voices[0], seed)
            seconds += len(samples) / speaker.rate
            found.append(word_errors(text, hear(samples, speaker.rate)))
    said, wrong = (sum(column) for column in zip(*found, strict=True))
    return {"words": said, "wrong": wrong, "rate": wrong / said, "seconds": round(seconds, 1)}


async def japanese(speaker: ProgramSpeaker, python: str) -> dict[str, Any]:
    hear, heard = listener("ja"), list[str]()
    for number, text in enumerate(KANA):
        voice = speaker.voices[number % len(speaker.voices)]
        heard.append(hear(await spoken(speaker, text, voice, 0), speaker.rate))
    said = readings(python, [text.replace(" ", "") for text in KANA])
    pairs = zip(said, readings(python, heard), strict=True)
    found = [character_errors(*pair) for pair in pairs]
    said_in_all, wrong = (sum(column) for column in zip(*found, strict=True))
    return {"characters": said_in_all, "wrong": wrong, "rate": wrong / said_in_all, "heard": heard}


async def first_sound(speaker: ProgramSpeaker, rounds: int) -> dict[str, Any]:
    walls, processor, lengths = [], [], set[float]()
    for seed in range(rounds):
        begun = time.perf_counter()
        busy, first = speaker.program.confined.processor_ns(), 0.0
        speaking = speaker.speak(TEN_SECONDS, speaker.voices[0], {"seed": seed}, SpeechClient())
        async for _ in speaking.pieces():
            if not first:
                first = time.perf_counter() - begun
                processor.append((speaker.program.confined.processor_ns() - busy) / 1e9)
        walls.append(first)
        lengths.add(round(speaking.samples / speaker.rate, 1))
    return {
        "seconds": statistics.median(walls),
        "least": min(walls),
        "processor": statistics.median(processor),
        "of": sorted(lengths),
    }


async def main() -> None:
    given = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    given.add_argument("--readings", metavar="PYTHON", help="Python with pyopenjtalk")
    given.add_argument("--seeds", type=int, default=2)
    given.add_argument("--rounds", type=int, default=9)
    given.add_argument("--only", choices=("english", "japanese", "first"))
    given.add_argument("--json", type=Path, default=RESULTS)
    asked = given.parse_args()
    limits = ProgramLimits(seconds=600.0, load_seconds=600.0)
    engine = await ProgramEngine.start(program_files(("joe", "kokoro")), limits, lanes=1)
    found: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json.is_file() else {}
    joe, kokoro = (ProgramSpeaker(engine, engine.find(one), beside) for one in ("joe", "kokoro"))
    try:
        if asked.only in (None, "first"):
            found["first_sound"] = await first_sound(joe, asked.rounds)
        if asked.only in (None, "english"):
            found["joe"] = await english(joe, asked.seeds)
        if asked.readings and asked.only in (None, "japanese"):
            found["kokoro"] = await japanese(kokoro, asked.readings)
    finally:
        await engine.close()
    asked.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    asyncio.run(main())
