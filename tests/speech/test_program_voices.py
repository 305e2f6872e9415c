"""Files beside a program that speaks, and those that are wrong."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import INT64, PIPER, double, model, node, port, voices

from headrace.base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from headrace.programs import inspected
from headrace.speech import program_voices
from headrace.speech.program_voices import ProgramVoice, open_program_voice


def opened(path: Path) -> ProgramVoice | None:
    return open_program_voice(path, {one.name: one for one in inspected(path).described.inputs})


def test_piper(tmp_path: Path) -> None:
    voice = opened(voices(tmp_path)["ann"])
    assert voice is not None
    assert (voice.rate, voice.names) == (16_000, ("ann",))
    fed = voice.feed("abx.", "ann", 2.0)
    assert fed["input"].tolist() == [[1, 0, 8, 0, 9, 0, 4, 0, 2]]
    assert fed["input_lengths"].tolist() == [9]
    assert fed["scales"] == pytest.approx([0.5, 0.5, 0.8])
    assert voice.unknown("ab.") == ""
    assert voice.unknown("abx") == "x"


def test_kokoro(tmp_path: Path) -> None:
    paths = voices(tmp_path)
    voice = opened(paths["kana"])
    assert voice is not None
    assert voice.names == ("jf_one", "jm_two", "af_three")
    styles = np.load(paths["kana"].with_name("voices.npz"))
    for symbols in ("a", "ai.", "a" * 60):
        fed = voice.feed(symbols, "jm_two", 1.0)
        row = min(len(symbols), 40) - 1
        assert np.array_equal(fed["style"], styles["jm_two"][row])
        assert fed["tokens"].shape == (1, len(symbols) + 2)
    assert voice.spoken("jf_one")("あい。") == "ai."
    with pytest.raises(InvalidRequest, match="af_three; send phonemes"):
        voice.spoken("af_three")


def test_speakers_are_voices(tmp_path: Path) -> None:
    path = tmp_path / "two.onnx"
    ports = [port("input", [1, "n"], INT64), port("input_lengths", [1], INT64)]
    ports += [port("scales", [3]), port("sid", [1], INT64)]
    made = model([node("Identity", "scales", "y")], ports, [port("y", [3])])
    path.write_bytes(made)
    said = {**PIPER, "num_speakers": 2, "speaker_id_map": {"bea": 1, "cal": 0}}
    path.with_name("two.onnx.json").write_text(json.dumps(said))
    voice = opened(path)
    assert voice is not None
    assert voice.names == ("bea", "cal")
    assert voice.feed("a", "bea", 1.0)["sid"].tolist() == [1]


def test_a_program_without_such_files_does_not_speak(tmp_path: Path) -> None:
    path = voices(tmp_path)["ann"]
    path.with_name("ann.onnx.json").unlink()
    assert opened(path) is None
    other = tmp_path / "double.onnx"
    other.write_bytes(double("n"))
    other.with_name("double.onnx.json").write_text("{}")
    assert opened(other) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"espeak": {"voice": "../../etc/passwd"}}, "espeak.voice"),
        ({"espeak": {"voice": "-w/tmp/a"}}, "espeak.voice"),
        ({"espeak": None}, "espeak.voice is missing"),
        ({"audio": {"sample_rate": 10**9}}, "sample_rate"),
        ({"audio": {"sample_rate": True}}, "sample_rate"),
        ({"phoneme_id_map": {}}, "phoneme_id_map"),
        ({"phoneme_id_map": {**PIPER["phoneme_id_map"], "a": [-1]}}, "an id must be"),
        ({"phoneme_id_map": {**PIPER["phoneme_id_map"], "ab": [3]}}, "single characters"),
        ({"phoneme_id_map": {**PIPER["phoneme_id_map"], "a": [1] * 9}}, "lists of ids"),
        ({"inference": {"length_scale": float("nan")}}, "length_scale"),
        ({"inference": {"noise_scale": "loud"}}, "noise_scale must be a number"),
        ({"inference": {"length_scale": 10**400}}, "length_scale"),
        ({"num_speakers": 2}, "no sid"),
        ({"phoneme_type": "text"}, "phoneme_type"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = voices(tmp_path)["ann"]
    path.with_name("ann.onnx.json").write_text(json.dumps({**PIPER, **change}))
    with pytest.raises((ModelFileError, UnsupportedModel), match=message):
        opened(path)


def npz(**styles: Any) -> bytes:
    room = io.BytesIO()
    np.savez(room, **styles)
    return room.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        npz(jf_one=np.zeros((4, 1, 4))),
        npz(jf_one=np.zeros((4, 1, 3), "f")),
        npz(jf_one=np.zeros((0, 1, 4), "f")),
        npz(jf_one=np.full((4, 1, 4), np.nan, "f")),
        npz(jf_one=np.array([{}], object)),
    ],
    ids=["empty", "cut", "double", "size", "none", "NaN", "pickle"],
)
def test_wrong_styles_are_refused(tmp_path: Path, data: bytes) -> None:
    path = voices(tmp_path)["kana"]
    path.with_name("voices.npz").write_bytes(data)
    with pytest.raises(ModelFileError, match=r"voices\.npz must have float32 styles"):
        opened(path)


def test_styles_are_bounded_before_they_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = voices(tmp_path)["kana"]
    np.savez_compressed(path.with_name("voices.npz"), jf_one=np.zeros((10_000, 1, 4), "f"))
    assert path.with_name("voices.npz").stat().st_size < 1 << 14
    assert opened(path) is not None
    monkeypatch.setattr(program_voices, "_MOST_STYLES", 1 << 14)
    monkeypatch.setattr(np, "load", None)
    with pytest.raises(ModelFileError, match=r"voices\.npz must have float32 styles"):
        opened(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vocab": {"ab": 1}}', '{"vocab": {"a": -1}}'])
def test_a_wrong_vocabulary_is_refused(tmp_path: Path, text: str) -> None:
    path = voices(tmp_path)["kana"]
    path.with_name("vocab.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"vocab\.json"):
        opened(path)
