"""Files of sound that grow: what readers make of them, and what one cannot have."""

from __future__ import annotations

import builtins
import io
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import InvalidRequest, PackageAbsent
from headrace.media import decode
from headrace.media.writing import MEDIA_TYPES, SoundWriter, wav_head

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
RATE = 24_000


def tone(seconds: float) -> np.ndarray[Any, Any]:
    at = np.arange(round(seconds * RATE)) / RATE
    return (0.4 * np.sin(2 * np.pi * 440 * at)).astype(np.float32)


def written(form: str, samples: np.ndarray[Any, Any]) -> tuple[bytes, int]:
    """The file, and how much of it was there before the end."""
    writer = SoundWriter(form, RATE)
    parts = [writer.write(samples[i : i + 3000]) for i in range(0, len(samples), 3000)]
    early = sum(map(len, parts))
    return b"".join(parts) + writer.end(), early


@pytest.mark.parametrize("form", sorted(set(MEDIA_TYPES) - {"pcm"}))
def test_a_reader_finds_the_samples(form: str) -> None:
    samples = tone(3)
    data, early = written(form, samples)
    if form != "flac":
        assert early > 0.3 * len(data)
    found, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate == RATE
    assert abs(len(found) - len(samples)) < 2_400
    assert 0.37 < np.abs(found[5_000:60_000]).max() < 0.43
    assert abs(decode(data).seconds - 3) < 0.1


def test_pcm_is_sixteen_bits() -> None:
    data, early = written("pcm", np.array([0, 1, -1, 2, -2, 0.5], np.float32))
    assert early == len(data)
    assert np.frombuffer(data, "<i2").tolist() == [0, 32767, -32767, 32767, -32767, 16384]


def test_a_wav_of_known_length() -> None:
    samples = np.frombuffer(written("pcm", tone(0.1))[0], "<i2")
    data = wav_head(RATE, 2 * len(samples)) + samples.tobytes()
    found, _ = soundfile.read(io.BytesIO(data), dtype="int16")
    assert np.array_equal(found, samples)


def test_a_rate_that_a_format_lacks() -> None:
    with pytest.raises(InvalidRequest, match=r"44,100 Hz") as refused:
        SoundWriter("opus", 44_100)
    assert refused.value.param == "response_format"


def test_without_the_library_only_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "soundfile":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(
        "headrace.base.extras.import_module", lambda name: without(name), raising=True
    )
    assert SoundWriter("wav", RATE).write(tone(0.1))
    with pytest.raises(PackageAbsent, match="sounds as mp3 need soundfile"):
        SoundWriter("mp3", RATE)
