"""MLPerf's Whisper: sounds as samples of LoadGen, and word accuracy over their texts.

The benchmark is whisper-large-v3 under Offline, on LibriSpeech's dev-clean and dev-other packed
into pieces of 30 s, at 99 % of a word accuracy of 97.9329 (100 minus the word error rate). Neither
weights nor sounds are available here, so a folder of sounds with texts replaces them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..base.foreign import any_json
from .client import Stream
from .hearing import EDGE, form_of
from .http import Address, request_bytes
from .job import Target
from .mlperf_samples import LibrarySample
from .sounds import read_recordings
from .word_errors import Errors, word_errors
from .workload import Turn

PATH = "/v1/audio/transcriptions"
AT_ONCE = 16
"""Concurrent sounds: Offline has them all at once, and servers refuse some."""
KEPT = 16 << 20
"""Most bytes of an answer."""


def from_sounds(folder: Path, limit: int | None) -> list[LibrarySample]:
    """Make a sample for each sound of a folder; raise the errors of `read_recordings`."""
    return [
        LibrarySample(Turn("", _most(one.seconds)), truth=one.said, recording=one)
        for one in read_recordings(folder)[:limit]
    ]


def _most(seconds: float) -> int:
    """Return the most tokens of a text of this length."""
    return 448 * (1 + int(seconds))


def sound_request(address: Address, target: Target, sample: LibrarySample) -> bytes:
    """Build the request for a sample's text with its tokens."""
    assert sample.recording is not None
    fields = {"model": target.model, "response_format": "verbose_json", **target.extra}
    headers = {"Content-Type": f"multipart/form-data; boundary={EDGE}"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    return request_bytes(address, "POST", PATH, form_of(fields, sample.recording), headers)


def take_transcript(stream: Stream, status: int) -> None:
    """Record an answer's text and count its tokens: those of its segments, or words if the server
    reports no tokens."""
    record, body = stream.record, bytes(stream.raw)
    record.status = status
    if status != 200:
        kind = "server" if status >= 500 else "refused"
        record.error_kind = "overload" if status in (429, 503) else kind
        record.error = f"HTTP {status}: {body[:300].decode(errors='replace')}"
        return
    try:
        data = any_json(body)
        text = str(data["text"])
        tokens = sum(len(one.get("tokens", ())) for one in data.get("segments") or ())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.error_kind, record.error = "protocol", f"the answer is not as expected: {error}"
        return
    stream.text.append(text)
    record.output_tokens = tokens or len(text.split())


def word_accuracy(answers: Mapping[int, str], truths: Sequence[str | None]) -> float | None:
    """Return 100 minus the word error rate over all answered samples, in per cent; None if one
    lacks a text."""
    found: list[Errors] = []
    for index, answer in answers.items():
        truth = truths[index]
        if truth is None:
            return None
        found.append(word_errors(truth, answer))
    if not found:
        return None
    return 100 * (1 - sum(one.wrong for one in found) / max(1, sum(one.said for one in found)))
