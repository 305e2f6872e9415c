"""`headrace replay` in processes of its own: from a recorded answer to a verdict."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Run


def test_an_answer_is_recorded_and_proved_again(run: Run, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    asked = ("generate", str(model), "Once upon a time", "--max-tokens", "24", "--seed", "7")
    for temperature in ("0", "1"):
        answered = run(*asked, "--temperature", temperature, HEADRACE_RECORD=str(folder))
        assert answered.returncode == 0, answered.stderr
        assert "recorded, text and all" in answered.stderr
    files = sorted(folder.glob("records-*.jsonl"))
    together = tmp_path / "all.jsonl"
    together.write_bytes(b"".join(file.read_bytes() for file in files))

    proved = run("replay", str(together))
    assert proved.returncode == 0, proved.stderr
    assert "2 of 2 answers are equal bit for bit, 48 tokens compared" in proved.stdout

    record = json.loads(files[0].read_text())
    token = record["choices"][0]["tokens"][11]
    record["choices"][0]["tokens"][11] = token ^ 1
    record["identity"]["weights"] = "0" * 16
    files[0].write_text(json.dumps(record) + "\n")
    refuted = run("replay", str(files[0]), "--json")
    assert refuted.returncode == 1, refuted.stderr
    report = json.loads(refuted.stdout)
    assert report["equal"] == 0
    assert report["different"][0]["token"] == 11
    assert [line.split(":")[0] for line in report["identity"]] == ["weights"]


def test_what_is_no_record_is_one_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello\n")
    for name, said in ((str(file), "line 1 of"), (str(tmp_path / "none"), "cannot be read")):
        refused = run("replay", name)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
