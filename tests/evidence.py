"""The evidence pack of programs with deadlines: each requirement, its tests, its figures.

    python tests/evidence.py FOLDER [--results JUNIT.xml …]

Without results the tests of the requirements are run. FOLDER gets `evidence.json` and
`evidence.md` (requirement → tests → figures, timing, faults, limits), `sbom.cdx.json` (packages of
the lock), `tests.xml`, and `SHA256SUMS`. Figures and faults are those of `benchmarks/results`, with
the time of the commit that wrote them. Exit 1 if a requirement is not shown, a figure beyond its
bound or a fault's promise broken. The pack states what was tested and measured; it says nothing of
a standard's approval, which only an assessor gives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.version import VERSION
from headrace.factory.sbom import LOCK, bill, locked

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Figure:
    """A number of a record, and its bound."""

    file: str
    path: str
    """Keys from the top, joined by slashes."""
    most: float | None = None
    least: float | None = None

    def look(self) -> dict[str, Any]:
        found: Any = None
        if (place := RESULTS / self.file).is_file():
            found = json.loads(place.read_text())
            for key in self.path.split("/"):
                found = found.get(key) if isinstance(found, dict) else None
        there = isinstance(found, int | float)
        kept = there and not (
            (self.most is not None and found > self.most)
            or (self.least is not None and found < self.least)
        )
        bound = f"at most {self.most}" if self.least is None else f"at least {self.least}"
        command = "git", "log", "-1", "--format=%h %cI", "--", str(place)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return {
            "figure": f"{self.file}: {self.path}",
            "value": found if there else None,
            "bound": bound,
            "state": "kept" if kept else "beyond" if there else "not measured",
            "commit": done.stdout.strip(),
        }


@dataclass(frozen=True)
class Requirement:
    name: str
    text: str
    tests: tuple[str, ...]
    """Files below `tests`, or tests of them, as `tests/paths.py` names them."""
    figures: tuple[Figure, ...] = ()
    faults: tuple[str, ...] = ()
    """Beginnings of rows of the fault table."""


ENGINE, GUARD = "engine/test_program_engine.py", "engine/test_program_guard.py"
FOREIGN, CAMERAS = "programs/test_foreign_program.py", "server/test_server_cameras.py"
TIMES = "programs.json"
REQUIREMENTS = (
    Requirement(
        "read",
        "A file is read with bounds before a library has it; what it may not have is refused.",
        ("programs/test_inspection.py", "programs/test_description.py"),
    ),
    Requirement(
        "confined",
        "A program computes in a process of its own and does nothing else.",
        ("programs/test_confined_program.py",),
    ),
    Requirement(
        "equal",
        "Outputs are bare ONNX Runtime's bits; a request's seed repeats its draws.",
        (
            f"{FOREIGN}::test_the_bits_of_bare_onnx_runtime",
            f"{FOREIGN}::test_random_nodes_draw_from_the_seed",
            f"{FOREIGN}::test_rows_go_together_only_where_it_is_proven",
            "programs/test_exports.py",
        ),
    ),
    Requirement(
        "order",
        "Class, deadline, arrival decide what is next; what cannot end in time is not begun.",
        (
            f"{ENGINE}::test_the_order_is_class_then_deadline_then_arrival",
            f"{ENGINE}::test_what_cannot_end_in_time_is_not_begun",
            f"{ENGINE}::test_a_run_is_stopped_at_its_deadline",
            "engine/test_program_jobs.py",
        ),
    ),
    Requirement(
        "admitted",
        "An admitted stream is in time up to a utilisation of 0.8; beyond, streams are refused.",
        (
            "sched/test_deadlines.py",
            f"{ENGINE}::test_a_stream_is_admitted_kept_and_ended",
            f"{ENGINE}::test_runs_too_long_for_the_streams_are_refused",
        ),
        (Figure(TIMES, "streams/missed", most=0), Figure(TIMES, "streams/utilisation", most=1.6)),
        ("stop: a foreign program runs",),
    ),
    Requirement(
        "cost",
        "A run costs little above the library's own.",
        (f"{ENGINE}::test_programs_run_beside_each_other",),
        (
            Figure(TIMES, "overhead/p50_ms/above", most=0.3),
            Figure(TIMES, "overhead/p99_ms/above", most=1.0),
            Figure(TIMES, "four/of_default/median", least=1.3),
            Figure(TIMES, "four/of_tuned/median", least=0.97),
        ),
    ),
    Requirement(
        "memory",
        "A frame keeps no memory and takes no new page.",
        ("engine/test_program_memory.py",),
        (Figure(TIMES, "memory/growth", most=0.01),),
    ),
    Requirement(
        "replaced",
        "A process that dies or does not end is replaced, and costs other programs nothing.",
        (
            f"{ENGINE}::test_one_endless_node_costs_its_own_process_alone",
            f"{ENGINE}::test_a_process_that_dies_is_replaced_and_its_run_repeated",
            f"{ENGINE}::test_a_process_that_does_not_start_again_is_told_and_tried_again",
        ),
        faults=(
            "kill: the process of",
            "stop: the process of",
            "fill: temporary folder full, the process",
        ),
    ),
    Requirement(
        "guarded",
        "Self-tests and a scrub find changed weights; modes are left by steps.",
        (GUARD,),
        faults=("flip: bits of",),
    ),
    Requirement(
        "cameras",
        "Answers to cameras have sequence, age, both clocks' times and a checksum; a loss is told.",
        (CAMERAS,),
        faults=("stop: a camera", "flip: each bit"),
    ),
    Requirement(
        "replayed",
        "A recorded drive gives equal outputs again.",
        (f"{CAMERAS}::test_a_recorded_drive_has_equal_outputs",),
    ),
    Requirement(
        "spoken to",
        "Clients of KServe v2 are served, and wrong messages get typed errors.",
        (
            "server/test_server_programs.py",
            "server/test_server_grpc.py",
            "server/test_tensors.py",
        ),
    ),
)
LIMITS = (
    "Times hold for the machine and load on which they were measured; a run that others delay may "
    "miss, and is then answered as a miss.",
    "Work is not interrupted inside a node: what runs holds up real time once, for its length.",
    "The CPU alone runs programs; memory errors outside weights and outputs are not looked for.",
    "A checksum shows damage, not intent; answers are not signed.",
    "Requirements, tests and figures are this project's own; nobody outside has assessed them.",
)


def ran(files: Iterable[Path]) -> list[tuple[str, str, str, float]]:
    """(Dotted file, test, outcome, seconds) of each case in pytest's records."""
    found = []
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "passed"
            outcome = "skipped" if "skipped" in kinds else outcome
            where, name = case.get("classname", ""), case.get("name", "")
            found.append((where, name, outcome, float(case.get("time", 0))))
    return found


def cases(test: str, found: list[tuple[str, str, str, float]]) -> list[tuple[str, float]]:
    """(Outcome, seconds) of the cases of a test, or of all tests of a file."""
    file, _, name = test.partition("::")
    dotted = f".{file.removesuffix('.py').replace('/', '.')}"
    return [
        (outcome, seconds)
        for where, case, outcome, seconds in found
        if f".{where}".endswith(dotted) and (not name or case.partition("[")[0] == name)
    ]


def judged(one: Requirement, found: Any, faults: list[dict[str, Any]]) -> dict[str, Any]:
    tests: list[dict[str, Any]] = []
    for test in one.tests:
        own = cases(test, found)
        counts = Counter(outcome for outcome, _ in own)
        seconds = round(sum(took for _, took in own), 2)
        tests.append({"test": f"tests/{test}", **counts, "seconds": seconds})
    rows = [row for row in faults if row["fault"].startswith(one.faults or "\0")]
    figures = [figure.look() for figure in one.figures]
    failed = any(test.get("failed") for test in tests) or any(row["broken"] for row in rows)
    shown = all(test.get("passed") for test in tests)
    shown = shown and all(figure["state"] == "kept" for figure in figures)
    shown = shown and all(any(r["fault"].startswith(word) for r in rows) for word in one.faults)
    state = "failed" if failed else "shown" if shown else "not shown"
    state = "failed" if any(figure["state"] == "beyond" for figure in figures) else state
    return {
        "requirement": one.name,
        "text": one.text,
        "state": state,
        "tests": tests,
        "figures": figures,
        "faults": [row["fault"] for row in rows],
    }


def page(pack: dict[str, Any]) -> str:
    """The pack as a page."""
    lines = [f"# Evidence for headrace {pack['version']}, commit {pack['commit']}", ""]
    lines += ["| requirement | state | tests passed | figures | faults |", "|---|---|--:|---|---|"]
    for one in pack["requirements"]:
        passed = sum(test.get("passed", 0) for test in one["tests"])
        figures = [
            f"{each['figure'].partition(': ')[2]} = {each['value']} ({each['bound']})"
            for each in one["figures"]
        ]
        cells = one["text"], one["state"], str(passed), "; ".join(figures), "; ".join(one["faults"])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| fault | facts | broken |", "|---|---|---|"]
    for row in pack["faults"]:
        facts = ", ".join(f"{name} {value}" for name, value in row["facts"].items())
        lines.append(f"| {row['fault']} | {facts} | {'; '.join(row['broken']) or 'nothing'} |")
    return "\n".join([*lines, "", "Limits:", "", *(f"- {one}" for one in pack["limits"]), ""])


def packed(folder: Path, results: list[Path]) -> dict[str, Any]:
    """Write the pack and return it."""
    record = RESULTS / "faults.json"
    rows = json.loads(record.read_text())["rows"] if record.is_file() else []
    faults = [{**row, "fault": f"{row['kind']}: {row['fault']}"} for row in rows]
    words = tuple(word for one in REQUIREMENTS for word in one.faults)
    faults = [row for row in faults if row["fault"].startswith(words)]
    found = ran(results)
    git = "git", "describe", "--always", "--dirty", "--abbrev=12"
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    timing = RESULTS / TIMES
    pack = {
        "version": VERSION,
        "commit": commit.strip(),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "requirements": [judged(one, found, faults) for one in REQUIREMENTS],
        "timing": json.loads(timing.read_text()) if timing.is_file() else {},
        "faults": faults,
        "limits": LIMITS,
    }
    pins = locked(LOCK.read_text(), platform.machine())
    model = {"name": "programs", "licence": None, "files": []}
    made = {
        "evidence.json": json.dumps(pack, indent=1).encode(),
        "evidence.md": page(pack).encode(),
        "sbom.cdx.json": bill(model, pins),
        **{
            f"tests{'-' * bool(at)}{at or ''}.xml": one.read_bytes()
            for at, one in enumerate(results)
        },
    }
    for name, data in made.items():
        (folder / name).write_bytes(data)
    sums = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in made.items())
    (folder / "SHA256SUMS").write_text("".join(sums))
    return pack


def tested(folder: Path) -> Path:
    """Run the tests of all requirements, room by room as their fixtures want it."""
    room = folder / "junit"
    room.mkdir()
    names = sorted({test for one in REQUIREMENTS for test in one.tests})
    whole = ElementTree.Element("testsuites")
    for place in sorted({name.partition("/")[0] for name in names}):
        own = [f"tests/{name}" for name in names if name.startswith(f"{place}/")]
        file = room / f"{place}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not model", f"--junitxml={file}"]
        subprocess.run([*command, *own], cwd=ROOT, check=False)
        whole.extend(ElementTree.parse(file).getroot())
    made = folder / "tests.xml"
    ElementTree.ElementTree(whole).write(made)
    shutil.rmtree(room)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, nargs="+", help="pytest's --junitxml files")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    pack = packed(given.folder, given.results or [tested(given.folder)])
    for one in pack["requirements"]:
        print(f"{one['state']:9}  {one['requirement']}: {one['text']}")
    return int(any(one["state"] != "shown" for one in pack["requirements"]))


if __name__ == "__main__":
    sys.exit(main())
