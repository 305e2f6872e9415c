"""The evidence pack says what was tested, what failed, and what nobody looked at."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import evidence

pytest.importorskip("cyclonedx", reason="needs the extra factory: cyclonedx")
FIRST = evidence.REQUIREMENTS[0]


def junit(path: Path, *cases: tuple[str, str, str]) -> Path:
    """A record as pytest writes it."""
    rows = "".join(
        f'<testcase classname="tests.{file}" name="{name}" time="0.5">{inside}</testcase>'
        for file, name, inside in cases
    )
    path.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    return path


def dotted(test: str) -> tuple[str, str]:
    file, _, name = test.partition("::")
    return file.removesuffix(".py").replace("/", "."), name or "test_any[case]"


def everything(inside: str = "") -> list[tuple[str, str, str]]:
    return [(*dotted(test), inside) for one in evidence.REQUIREMENTS for test in one.tests]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records in which every figure and fault is as it should be."""
    folder = tmp_path / "results"
    folder.mkdir()
    records: dict[str, dict[str, object]] = {}
    rows = []
    for one in evidence.REQUIREMENTS:
        for figure in one.figures:
            place = records.setdefault(figure.file, {})
            *keys, last = figure.path.split("/")
            for key in keys:
                place = place.setdefault(key, {})  # type: ignore[assignment]
            place[last] = figure.most if figure.least is None else figure.least
        for word in one.faults:
            kind, _, fault = word.partition(": ")
            rows.append({"kind": kind, "fault": fault, "facts": {"a": 1}, "broken": []})
    for name, record in records.items():
        (folder / name).write_text(json.dumps(record))
    (folder / "faults.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(evidence, "RESULTS", folder)
    return folder


def states(tmp_path: Path, *cases: tuple[str, str, str]) -> dict[str, str]:
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    pack = evidence.packed(out, [junit(tmp_path / "tests.xml", *cases)])
    return {one["requirement"]: one["state"] for one in pack["requirements"]}


def test_every_test_exists() -> None:
    tests = Path(__file__).parent
    for one in evidence.REQUIREMENTS:
        assert one.tests
        for test in one.tests:
            file, _, name = test.partition("::")
            assert f"def {name or 'test_'}" in (tests / file).read_text(), test


def test_a_whole_pack(tmp_path: Path, measured: Path) -> None:
    assert set(states(tmp_path, *everything()).values()) == {"shown"}
    out = tmp_path / "out"
    rows = [row.split("  ") for row in (out / "SHA256SUMS").read_text().splitlines()]
    for digest, name in rows:
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert {name for _, name in rows} | {"SHA256SUMS"} == {one.name for one in out.iterdir()}
    listed = json.loads((out / "sbom.cdx.json").read_text())["components"]
    assert {"msgspec", "numpy"} <= {one["name"] for one in listed}
    for one in out.iterdir():
        assert "certified" not in one.read_text().lower()


def test_a_failed_a_skipped_and_an_absent_test(tmp_path: Path, measured: Path) -> None:
    cases = everything()
    failed = (*dotted(FIRST.tests[0]), "<failure/>")
    assert states(tmp_path, *cases, failed)[FIRST.name] == "failed"
    own = [case for case in cases if case[0] == dotted(FIRST.tests[0])[0]]
    others = [case for case in cases if case not in own]
    assert states(tmp_path, *others)[FIRST.name] == "not shown"
    skipped = [(file, name, "<skipped/>") for file, name, _ in own]
    found = states(tmp_path, *others, *skipped)
    assert found.pop(FIRST.name) == "not shown"
    assert set(found.values()) == {"shown"}


def test_figures_and_faults_count(tmp_path: Path, measured: Path) -> None:
    record = json.loads((measured / "programs.json").read_text())
    record["overhead"]["p50_ms"]["above"] = 0.31
    (measured / "programs.json").write_text(json.dumps(record))
    rows = json.loads((measured / "faults.json").read_text())["rows"]
    rows[0]["broken"] = ["1 hung"]
    (measured / "faults.json").write_text(json.dumps({"rows": rows[:-1]}))
    found = states(tmp_path, *everything())
    named = [one.name for one in evidence.REQUIREMENTS if one.faults]
    assert found["cost"] == "failed"
    assert (found[named[0]], found[named[-1]]) == ("failed", "not shown")
    (measured / "programs.json").unlink()
    assert states(tmp_path, *everything())["cost"] == "not shown"
