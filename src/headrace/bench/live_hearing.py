"""A live session of the bench: one sound, sent in real time (`/v1/realtime`)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.extras import needed
from ..base.foreign import any_json
from ..media import RATE, decode
from .http import Address, ConnectionLost
from .options import RunOptions
from .sounds import LIMITS, HeardSound

WIRE_RATE = 24_000
"""Samples a second of OpenAI's sessions."""
STEP = 0.1
"""Seconds of sound in a message."""
LOUD = 0.01
"""Amplitude (-40 dBFS) from which a sample counts as speech."""
TAIL = 2.0
"""Seconds of silence after the sound, so that a server notices its end."""
QUIET = 20.0
"""Most seconds without a message after the end of a sound while a text is open."""


async def session(
    one: HeardSound,
    address: Address,
    options: RunOptions,
    language: str | None,
    now: Callable[[], float],
) -> None:
    """Run one session and fill in `one`.

    First partial: from the first loud sample to the first text. Final: from the sending of the last
    loud sample to the last final text. Rewritten: words of a partial text that the next one
    changes. Raises `ConnectionLost`, `PackageAbsent`.
    """
    soxr, websockets = (needed(name, "sessions", "audio") for name in ("soxr", "websockets"))
    samples = (await asyncio.to_thread(decode, one.recording.data, LIMITS)).samples
    loud = np.flatnonzero(np.abs(samples) > LOUD) / RATE
    begins, ends = (loud[0], loud[-1]) if len(loud) else (0.0, len(samples) / RATE)
    wire = np.concatenate(
        (soxr.resample(samples, RATE, WIRE_RATE), np.zeros(int(TAIL * WIRE_RATE)))
    )
    data = (np.clip(wire, -1, 1) * 32767).astype("<i2").tobytes()
    said: dict[str, Any] = {"model": options.model or ""}
    if language:
        said["language"] = language
    change = {"type": "transcription", "audio": {"input": {"transcription": said}}}
    scheme = "wss" if address.tls else "ws"
    url = f"{scheme}://{address.authority}{address.path}/v1/realtime?intent=transcription"
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        async with websockets.connect(url, additional_headers=headers) as socket:
            await socket.send(json.dumps({"type": "session.update", "session": change}))
            while (event := any_json(await socket.recv()))["type"] != "session.updated":
                if event["type"] == "error":
                    raise ConnectionLost(str(event["error"].get("message", event)))
            begin = now()
            feeding = asyncio.ensure_future(_feed(socket, data, begin, now))
            try:
                await _listen(socket, one, feeding, (begin + begins, begin + ends), now)
            finally:
                feeding.cancel()
    except websockets.WebSocketException as error:
        raise ConnectionLost(f"the session ended: {error}") from None


async def _feed(socket: Any, data: bytes, begin: float, now: Callable[[], float]) -> None:
    size = int(WIRE_RATE * STEP) * 2
    for number, at in enumerate(range(0, len(data), size), 1):
        # A message is sent when its last sample has been spoken.
        await asyncio.sleep(begin + number * STEP - now())
        audio = base64.b64encode(data[at : at + size]).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))


async def _listen(
    socket: Any,
    one: HeardSound,
    feeding: asyncio.Future[None],
    spoken: tuple[float, float],
    now: Callable[[], float],
) -> None:
    """Receive until everything is sent and every started turn has its final text."""
    finals: list[str] = []
    stable: list[str] = []
    guess: list[str] = []
    begun = rewritten = 0
    while not (feeding.done() and begun and len(finals) >= begun):
        event = await _next(socket, feeding)
        if event is None:
            if len(finals) < begun:
                raise ConnectionLost(f"no final text {QUIET:g} s after the end")
            break  # The server detected no speech.
        kind = event.get("type", "")
        if kind == "error":
            raise ConnectionLost(str(event["error"].get("message", event["error"])))
        if kind.endswith("speech_started"):
            begun += 1
            stable, guess = [], []
        elif kind.endswith("transcription.delta"):
            stable += event["delta"].split()
            words = [*stable, *event.get("unstable", "").split()]
            rewritten += sum(a != b for a, b in zip(guess, words, strict=False))
            guess = words
            if words and not one.first:
                one.first = now()
        elif kind.endswith("transcription.completed"):
            finals.append(event["transcript"])
            one.end = now()
    one.text = " ".join(finals)
    one.live = {"rewritten_words": float(rewritten)}
    if one.first:
        one.live["first_partial_seconds"] = one.first - spoken[0]
    if finals:
        one.live["final_seconds"] = one.end - spoken[1]


async def _next(socket: Any, feeding: asyncio.Future[None]) -> dict[str, Any] | None:
    """Return the next message; None after `QUIET` seconds without one once everything is sent."""
    coming = asyncio.ensure_future(socket.recv())
    if not feeding.done():
        await asyncio.wait({coming, feeding}, return_when=asyncio.FIRST_COMPLETED)
    done, _ = await asyncio.wait({coming}, timeout=QUIET)
    if not done:
        coming.cancel()
        return None
    found: dict[str, Any] = any_json(coming.result())
    return found
