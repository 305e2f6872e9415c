"""Transcription load: requests for whole files, or live sessions fed in real time; latency and
errors.

Works with any server that has OpenAI's `/v1/audio/transcriptions` (files, answered as events or
whole) or `/v1/realtime` (sessions). Times are measured in this process, from a request's due time:
to a user, a late client is a late server. The result contains this process's own lateness; a run in
which it matters is invalid.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..base.foreign import any_json
from .arrivals import parse_arrivals
from .http import ConnectionLost, Pool, parse_url, request_bytes
from .live_hearing import session
from .options import RunOptions
from .sounds import HeardSound, Recording
from .statistics import Distribution, describe
from .word_errors import Errors, character_errors, word_errors

LATE = 0.1
"""Largest lateness of this process (p99) in a valid run, as a share of the median latency."""
EDGE = "headrace-bench-4f1d7c"
"""Boundary between the parts of a form."""


class SoundLoad:
    """One run: recordings in turn, by sequential users or at their due times."""

    def __init__(
        self,
        options: RunOptions,
        recordings: Sequence[Recording],
        language: str | None,
        *,
        live: bool,
        watch: Callable[[int], None] = lambda heard: None,
    ) -> None:
        """Send `options.requests` recordings in all, each equally often; None: each once.

        `watch` receives the number of recordings transcribed so far.
        """
        self._options, self._language, self._live = options, language, live
        self._watch = watch
        self._address = parse_url(options.url)
        self._recordings = list(recordings)
        random.Random(options.seed).shuffle(self._recordings)
        self.heard: list[HeardSound] = []
        self._begin = 0.0

    def run(self) -> bool:
        """Return whether all were transcribed; Ctrl-C ends it early and keeps the records."""
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            return False
        return True

    async def _run(self) -> None:
        options, pool = self._options, Pool(self._address)
        wanted = options.requests or len(self._recordings)
        coming = itertools.islice(itertools.cycle(self._recordings), wanted)
        self._begin = time.monotonic()
        try:
            if options.arrivals is None:
                users = min(options.concurrency, wanted)
                await asyncio.gather(*(self._user(coming, pool) for _ in range(users)))
            else:
                offsets = parse_arrivals(options.arrivals)(random.Random(options.seed + 1))
                pairs = zip(coming, offsets, strict=False)
                await asyncio.gather(*(self._one(HeardSound(*pair), pool) for pair in pairs))
        finally:
            pool.close()

    async def _user(self, coming: Iterator[Recording], pool: Pool) -> None:
        for recording in coming:
            await self._one(HeardSound(recording, self._now()), pool)

    def _now(self) -> float:
        return time.monotonic() - self._begin

    async def _one(self, one: HeardSound, pool: Pool) -> None:
        await asyncio.sleep(one.due - self._now())
        one.begin = self._now()
        try:
            async with asyncio.timeout(self._options.timeout):
                if self._live:
                    await session(one, self._address, self._options, self._language, self._now)
                else:
                    await self._transcribe(one, pool)
        except TimeoutError:
            one.error = f"no answer in {self._options.timeout:g} s"
        except (ConnectionLost, OSError) as error:
            one.error = str(error)
        one.end = one.end or self._now()
        one.first = one.first or one.end
        self.heard.append(one)
        self._watch(len(self.heard))

    async def _transcribe(self, one: HeardSound, pool: Pool) -> None:
        options, body, answer = self._options, bytearray(), _TextEvents()

        def take(when: int, data: bytes) -> None:
            body.extend(data)
            if answer.take(data) and not one.first:
                one.first = when / 1e9 - self._begin

        fields = {"model": options.model or "", "stream": "true", "response_format": "json"}
        if self._language:
            fields["language"] = self._language
        headers = {"Content-Type": f"multipart/form-data; boundary={EDGE}"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        path, form = "/v1/audio/transcriptions", form_of(fields, one.recording)
        reply = await pool.request(request_bytes(self._address, "POST", path, form, headers), take)
        one.end = reply.end_ns / 1e9 - self._begin
        if reply.status != 200:
            one.error = f"{reply.status}: {bytes(body[:200]).decode(errors='replace')}"
        elif answer.error or answer.ended:
            one.text, one.error = answer.text, answer.error or None
        else:  # In one piece: not every server streams.
            try:
                one.text = str(any_json(body)["text"])
            except (ValueError, KeyError, TypeError):
                one.error = f"no text in the answer: {bytes(body[:200])!r}"

    def result(self, server: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        """Return the result to write and show; times in seconds."""
        options, good = self._options, [one for one in self.heard if one.error is None]
        late = describe([one.begin - one.due for one in self.heard], options.seed)
        figures = {"client_late_seconds": late}
        if self._live:
            for name in ("first_partial_seconds", "final_seconds", "rewritten_words"):
                values = [one.live[name] for one in good if name in one.live]
                figures[name] = describe(values, options.seed)
        else:
            seconds = [one.end - one.due for one in good]
            rates = [one.recording.seconds / (one.end - one.due) for one in good]
            texts = [one.first - one.due for one in good if one.text]
            figures["latency_seconds"] = describe(seconds, options.seed)
            figures["first_text_seconds"] = describe(texts, options.seed)
            figures["rtfx_each"] = describe(rates, options.seed)
        wall = max((one.end for one in self.heard), default=0.0)
        sound = sum(one.recording.seconds for one in good)
        return {
            "kind": "hearing",
            "server": server,
            "live": self._live,
            "language": self._language,
            "load": options.arrivals or f"{options.concurrency} users",
            "requests": len(self.heard),
            "failed": len(self.heard) - len(good),
            "problems": sorted({one.error for one in self.heard if one.error})[:5],
            "whole": whole,
            "seconds": wall,
            "sound_seconds": sound,
            "rtfx": sound / wall if wall else 0.0,
            "metrics": {
                name: {"mean": one.mean, **one.percentiles, "intervals": one.intervals}
                for name, one in figures.items()
                if one is not None
            },
            "words": _rate(word_errors, good),
            "characters": _rate(character_errors, good),
            "invalid": _invalid(good, late),
        }


def _invalid(good: Sequence[HeardSound], late: Distribution | None) -> str | None:
    """Return the reason why these are not the server's numbers."""
    if not good or late is None:
        return "nothing was heard"
    latency = sorted(one.end - one.due for one in good)[len(good) // 2]
    worst = late.percentiles["p99"]
    return None if worst <= LATE * latency else f"this process was {worst:.3f} s late (p99)"


def _rate(count: Callable[[str, str], Errors], good: Sequence[HeardSound]) -> dict[str, Any] | None:
    """Return the error rate over all recordings with a transcript; None without any."""
    pairs = [(one.recording.said, one.text) for one in good]
    found = [count(said, text) for said, text in pairs if said is not None]
    if not found:
        return None
    total = Errors(sum(one.said for one in found), sum(one.wrong for one in found))
    return {**total._asdict(), "rate": total.rate}


def form_of(fields: dict[str, str], recording: Recording) -> bytes:
    """Encode as multipart/form-data (RFC 7578)."""
    part = f'--{EDGE}\r\nContent-Disposition: form-data; name="'
    lines = [f'{part}{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    name = Path(recording.name).name.encode("ascii", "replace").decode().replace('"', "_")
    lines.append(f'{part}file"; filename="{name}"\r\nContent-Type: audio/*\r\n\r\n')
    return "".join(lines).encode() + recording.data + f"\r\n--{EDGE}--\r\n".encode()


class _TextEvents:
    """Parser of a stream's `transcript.text.*` events."""

    def __init__(self) -> None:
        self._rest = b""
        self.text, self.ended, self.error = "", False, ""

    def take(self, data: bytes) -> bool:
        """Parse bytes; return whether there is text now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = any_json(line[6:])
            if "error" in event:
                self.error = str(event["error"].get("message", event["error"]))
            elif event.get("type") == "transcript.text.delta":
                self.text += event["delta"]
            elif event.get("type") == "transcript.text.done":
                self.text, self.ended = event["text"], True
        return bool(self.text)
