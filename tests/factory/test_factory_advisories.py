"""Advisories: what OSV's rules say of a version, and when nobody can say."""

from __future__ import annotations

import json
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from factory_cell import Made, make
from packaging.version import Version

from headrace.base.errors import InvalidRequest
from headrace.factory import advisories as module
from headrace.factory.advisories import Affected, affects, hold_advisories, read_advisories
from headrace.factory.build import Build, BuildOptions
from headrace.factory.sbom import SBOM_TYPE, bill, locked
from headrace.factory.stage import Outcome, Result, Stage, Work
from headrace.factory.store import Store

MODEL = {"name": "m", "licence": None, "files": [{"path": "w", "digest": "sha256:" + "1" * 64}]}
LOCK = "Old_Wheel==1.2\nfine==3.0\n"
ASKED = {"stale": False, "accepted": [], "most_days": 30}


def advisory(name: str, *events: dict[str, str], **more: Any) -> dict[str, Any]:
    """A document as OSV publishes them, with fields that nobody here reads."""
    ranges = [{"type": "ECOSYSTEM", "events": list(events)}] if events else []
    part = {"package": {"ecosystem": "PyPI", "name": name}, "ranges": ranges, "versions": []}
    return {
        "schema_version": "1.7.0",
        "id": "GHSA-1111-2222-3333",
        "modified": "2026-11-01T10:00:00Z",
        "summary": "it may be planted",
        "aliases": ["CVE-2026-1"],
        "affected": [{**part, **more.pop("part", {}), "database_specific": {"a": 1}}],
        **more,
    }


PLANTED = advisory("old-wheel", {"introduced": "0"}, {"fixed": "1.3"})
OTHER = advisory("nobody-has", {"introduced": "0"}, id="GHSA-0", aliases=[])


def folder(path: Path, *documents: dict[str, Any]) -> Path:
    path.mkdir()
    for number, one in enumerate(documents):
        (path / f"{number}.json").write_text(json.dumps(one))
    return path


def held(tmp_path: Path, *documents: dict[str, Any], lock: str = LOCK, **asked: Any) -> Result:
    """Return the gate's result for a lock with these advisories."""
    store = Store(tmp_path / "store")
    listed = store.put(bill(MODEL, locked(lock, "x86_64")), SBOM_TYPE)
    data = read_advisories(folder(tmp_path / "osv", *documents)) if documents else None
    stage = Stage("advisories", "advisories", ("sbom",), {**ASKED, **asked})
    inputs = {"sbom": Result({"sbom.cdx.json": listed})}
    return hold_advisories(Work(stage, store, inputs, SimpleNamespace(advisories=data)))


def test_an_old_wheel_is_found(tmp_path: Path) -> None:
    found = held(tmp_path, PLANTED, OTHER)
    assert found.outcome is Outcome.FAILED
    assert found.reason == "old-wheel 1.2: GHSA-1111-2222-3333 (as of 2026-11-01)"
    assert found.figures["found"] == ["old-wheel 1.2: GHSA-1111-2222-3333"]


def test_what_is_mended_passes_and_says_of_which_day(tmp_path: Path) -> None:
    found = held(tmp_path, PLANTED, OTHER, lock="old-wheel==1.3\nfine==3\n")
    assert found.outcome is Outcome.PASSED
    assert found.reason == "nothing is known against 2 packages, as of 2026-11-01"
    assert found.figures["newest"] == "2026-11-01T10:00:00+00:00"


@pytest.mark.parametrize(("name", "count"), [("GHSA-1111-2222-3333", 1), ("CVE-2026-1", 1)])
def test_one_that_was_accepted_is_written_down(tmp_path: Path, name: str, count: int) -> None:
    found = held(tmp_path, PLANTED, accepted=[name])
    assert found.outcome is Outcome.PASSED
    assert found.reason.endswith(f"; {count} accepted")
    assert found.figures["accepted"] == ["old-wheel 1.2: GHSA-1111-2222-3333"]


def test_nothing_is_decided_without_data_or_with_old_data(tmp_path: Path) -> None:
    assert held(tmp_path).outcome is Outcome.NOT_EVALUATED
    found = held(tmp_path, PLANTED, stale=True)
    assert found.outcome is Outcome.NOT_EVALUATED
    assert found.reason == "the data is of 2026-11-01, more than 30 days old"


def test_nothing_is_decided_where_a_bound_is_no_version(tmp_path: Path) -> None:
    strange = advisory("old-wheel", {"introduced": "0"}, {"fixed": "the next"})
    found = held(tmp_path, strange)
    assert found.outcome is Outcome.NOT_EVALUATED
    assert "cannot be told by its versions" in found.reason


def test_what_was_withdrawn_says_nothing(tmp_path: Path) -> None:
    gone = {**PLANTED, "withdrawn": "2026-11-02T00:00:00Z"}
    assert held(tmp_path, gone, OTHER).outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("events", "affected", "free"),
    [
        ([{"introduced": "0"}], ["0.dev1", "0.0.1a1", "7!1"], []),
        ([{"introduced": "0"}, {"fixed": "1.2"}], ["0", "1.2rc1"], ["1.2", "1.2.0", "2"]),
        ([{"introduced": "1"}, {"last_affected": "1.4"}], ["1.0.0", "1.4"], ["0.9", "1.4.post1"]),
        (
            [{"introduced": "1"}, {"fixed": "1.2"}, {"introduced": "2"}, {"fixed": "2.1"}],
            ["1", "1.1", "2", "2.0.9"],
            ["0.9", "1.2", "1.9", "2.1", "3"],
        ),
        ([{"fixed": "2.1"}, {"introduced": "2"}], ["2", "2.0.1"], ["1", "2.1"]),
        ([{"introduced": "0", "fixed": "1"}], ["0.5"], ["1"]),
        ([{"introduced": "0"}, {"limit": "2"}], ["1.9"], ["2", "3"]),
        ([{"introduced": "0"}, {"limit": "*"}], ["1", "99"], []),
        ([], [], ["1"]),
    ],
)  # fmt: skip
def test_ranges_are_read_as_osv_says(
    events: list[dict[str, str]], affected: list[str], free: list[str]
) -> None:
    """The algorithm at https://ossf.github.io/osv-schema/#evaluation, with PEP 440's order."""
    document = advisory("a", *events)["affected"][0]
    part = msgspec.convert(document, Affected)
    assert [text for text in affected if affects(part, Version(text)) is not True] == []
    assert [text for text in free if affects(part, Version(text)) is not False] == []


def test_listed_versions_count_in_any_spelling_and_commits_do_not() -> None:
    part = msgspec.convert(
        {
            "versions": ["1.0.0", "not one"],
            "ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}],
        },
        Affected,
    )
    assert affects(part, Version("1")) is True
    assert affects(part, Version("1.1")) is False


def test_a_zip_and_a_folder_are_the_same_data(tmp_path: Path) -> None:
    path = folder(tmp_path / "osv", PLANTED, OTHER)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for one in path.iterdir():
            archive.write(one, f"elsewhere/{one.name}")
    assert read_advisories(tmp_path / "all.zip") == read_advisories(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no advisory of OSV"),
        ("[]", "is no advisory of OSV"),
        ('{"id": "x"}', "is no advisory of OSV"),
        ('{"id": "x", "modified": "soon"}', "is no advisory of OSV"),
        ('{"id": "x", "modified": "2026-11-01T10:00:00Z"}', "holds no advisory about PyPI"),
        (" " * 5_000_000, "more than 4,194,304 bytes"),
    ],
)
def test_what_is_no_data_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = folder(tmp_path / "osv")
    (path / "one.json").write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        read_advisories(path)


def test_places_that_hold_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_advisories(tmp_path / "none")
    (tmp_path / "text").write_text("no zip")
    with pytest.raises(InvalidRequest, match="is no zip"):
        read_advisories(tmp_path / "text")
    with pytest.raises(InvalidRequest, match="holds no advisory"):
        read_advisories(folder(tmp_path / "empty"))
    monkeypatch.setattr(module, "MOST_FILES", 1)
    with pytest.raises(InvalidRequest, match="more than 1 files"):
        read_advisories(folder(tmp_path / "many", PLANTED, OTHER))


# In a build


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("factory"), without="performance,accuracy")


@pytest.mark.slow
def test_a_build_is_held_to_what_was_brought(made: Made, tmp_path: Path) -> None:
    """A passed gate runs again when the data is too old, and when there is newer data."""
    fork, lock = made.fork(tmp_path), tmp_path / "lock"
    lock.write_text(LOCK)
    now = datetime.now(UTC)
    fine = {**OTHER, "modified": (now - timedelta(days=2)).isoformat()}
    brought = folder(tmp_path / "osv", fine)
    wanted: dict[str, Any] = {
        "store": fork,
        "without": "performance,accuracy",
        "lock": str(lock),
        "advisories": str(brought),
    }

    def outcome(**more: Any) -> tuple[str, list[str]]:
        ended = Build(made.engine(), BuildOptions(**{**wanted, **more})).run()
        one = next(step for step in ended.steps if step.stage.name == "advisories")
        assert one.result is not None
        return str(one.result.outcome), ended.ran

    assert outcome()[0] == "passed"
    assert outcome() == ("passed", [])
    assert outcome(most_days=1.0)[0] == "not evaluated"
    newer = folder(tmp_path / "newer", fine, {**PLANTED, "modified": now.isoformat()})
    ended = Build(made.engine(), BuildOptions(**{**wanted, "advisories": str(newer)})).run()
    assert ended.failed == ["advisories"]
    assert ended.profile is None
    assert outcome(advisories=str(newer), accept_advisories="CVE-2026-1")[0] == "passed"
