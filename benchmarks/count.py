"""Instructions and memory traffic of a model's steps, counted: a measure that no neighbour moves.

    python benchmarks/count.py [--rows 1 8] [--prefill 64] [--rounds 2] [--json out.json]

The clock of a shared machine moves by a tenth from minute to minute; these numbers do not. A short
greedy decode runs on one thread under callgrind (`valgrind`, from your system's packages), which
counts every instruction and simulates the caches. Two rounds differ by less than 0.1 %, and
`--rounds 2` says by how much. What is counted:

  kernels       instructions inside of calls into the CPU library, per step and by operator
  host          all others between the beginning of one such call and the next: scheduler, plan,
                batch, tokens, text, and the interpreter below them (Python's share of a step)
  read          bytes of the lines that a last level of `--cache` MiB did not hold, against what the
                roofline expects: weights once a step, and the KV that is seen

Callgrind does not know AVX-512: it offers the process a CPU of level avx2, whose kernels run. So
instructions are those of avx2, which are more than those of wider levels, while the panels, the
order in which they are read, and the host's work are the same at every level. The simulated caches
fetch nothing ahead, and prefetches count nothing: which lines have to come is the same without.

A round of the default model takes seven minutes of one core (`--rows 1 --prefill 0`: two) and
1 GiB. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from callgrind import SPLIT, Counts, Part, read_parts

from headrace.base.config import DEFAULT_MODEL
from headrace.base.errors import HeadraceError
from headrace.base.modelfiles import ModelFiles
from headrace.engine.loop.prediction import case_of, serving_types
from headrace.kernels.cpu.library import FILE, LibraryAbsent, load
from headrace.loader import open_model
from headrace.roofline.composition import Composition, decode_step, prefill_step
from headrace.roofline.operators import count_step

WARM = 1
"""Decoding steps that the caches, empty at first, see before those that count."""
FUNCTIONS = 8
"""Functions of the library that take most, as many as the JSON names."""


@dataclass
class Operator:
    """All records of one kind in a step."""

    records: int = 0
    counts: Counts = field(default_factory=Counts)
    expected_bytes: float = 0.0


@dataclass
class Work:
    """One step, on average over those that were counted."""

    name: str
    tokens: int
    steps: int
    kernels: Counts
    """Counts of the kernels, all steps together."""
    host: int | None
    """Instructions of all steps; None: not counted."""
    expected_bytes: float
    operators: dict[str, Operator]
    functions: Counter[str]
    objects: Counter[str]

    @property
    def instructions(self) -> float:
        """Instructions of the kernels in a step."""
        return self.kernels.instructions / self.steps

    @property
    def fetched(self) -> float:
        return self.kernels.fetched / self.steps

    def plain(self) -> dict[str, Any]:
        host = {} if self.host is None else {"host_instructions": round(self.host / self.steps)}
        return {
            "work": self.name,
            "tokens": self.tokens,
            "steps": self.steps,
            "kernel_instructions": round(self.instructions),
            **host,
            "read_bytes": round(self.fetched),
            "expected_bytes": round(self.expected_bytes),
            "operators": {
                name: {
                    "records": each.records,
                    "instructions": each.counts.instructions,
                    "read_bytes": each.counts.fetched,
                    "expected_bytes": round(each.expected_bytes),
                }
                for name, each in self.operators.items()
            },
            "functions": {
                name: round(count / self.steps)
                for name, count in self.functions.most_common(FUNCTIONS)
            },
            "host_by_object": {
                Path(name).name: round(count / self.steps)
                for name, count in self.objects.most_common(FUNCTIONS)
            },
        }


class Expectation:
    """What the roofline says that a step has to read."""

    def __init__(self, files: ModelFiles) -> None:
        dtype, kv_dtype = serving_types(files)
        self.arch, self._case = files.arch, case_of(files, dtype=dtype, kv_dtype=kv_dtype)
        self.shapes = {
            count.shape: count.label
            for count in self._counts(self.decode(1, 1))
            if count.shape is not None
        }
        """(outputs, inputs) of a product → its label."""

    def _counts(self, step: Composition) -> Any:
        return count_step(self._case, step)

    def decode(self, rows: int, context: int) -> Composition:
        return decode_step(self.arch, rows, context)

    def prefill(self, tokens: int) -> Composition:
        return prefill_step(self.arch, [tokens])

    def of(self, step: Composition) -> Counter[str]:
        """Bytes by label: weights and KV; activations stay in the caches."""
        found: Counter[str] = Counter()
        for count in self._counts(step):
            label = "rope" if count.operator == "write" else count.label
            found[label] += round(count.calls * (count.weight_bytes + count.kv_bytes))
        return found

    def label(self, name: str) -> str:
        """The label of a record of the program: `linear 896×4864 Q6_K` → `down`."""
        shape = re.match(r"linear (\d+)×(\d+)", name)
        label = self.shapes.get((int(shape[1]), int(shape[2]))) if shape else None
        return label or name.split()[0]


def composed(
    parts: list[Part], facts: dict[str, Any], asked: dict[str, Any], expectation: Expectation
) -> list[Work]:
    """The works, from all dumps of one run."""
    whole = {part.name: part for part in parts if part.name and SPLIT not in part.name}
    works = []
    for name, part in whole.items():
        kind, tokens = name.split()[0], int(name.split()[1])
        labels = [expectation.label(each) for each in facts["names"][:-1]]
        apart = {each.name: each for each in parts if each.name.startswith(name + SPLIT)}
        if len(apart) != facts["records"][name]:
            raise SystemExit(f"count: {len(apart)} of {facts['records'][name]} records were dumped")
        operators: dict[str, Operator] = {}
        for place in range(len(apart)):
            # The last record of the program, the head, may be several where it picks tokens.
            label = labels[place] if place < len(labels) else "head"
            operator = operators.setdefault(label, Operator())
            operator.records += 1
            operator.counts.update(apart[f"{name}{SPLIT}{place}"].inside)
        if kind == "decode":
            steps, kernels = asked["steps"], part.inside
            step = expectation.decode(tokens, asked["context"] + WARM + (steps - 1) // 2)
            host: int | None = part.outside
        else:
            steps, kernels, host = 1, Counts(), None
            step = expectation.prefill(tokens)
            for operator in operators.values():
                kernels.update(operator.counts)
        expected = expectation.of(step)
        for label, operator in operators.items():
            operator.expected_bytes = expected[label]
        objects = part.objects if host is not None else Counter()
        told = name, tokens, steps, kernels, host, expected.total(), operators
        works.append(Work(*told, part.functions, objects))
    return works


def ended(status: int) -> str:
    """How the counted process ended."""
    if status == -signal.SIGILL:
        return "this valgrind does not know an instruction of the kernels"
    if status < 0:
        return f"the counted process was ended by {signal.Signals(-status).name}"
    return f"the counted process ended with {status}"


def run_once(asked: dict[str, Any], cache: int, folder: Path) -> tuple[list[Part], dict[str, Any]]:
    """One run under callgrind: its dumps, and what the process said of itself."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit(
            "count: there is no `valgrind` on the path; it comes from your system's packages "
            "(Debian and Ubuntu: apt install valgrind)"
        )
    dumps, facts = folder / "dumps", folder / "facts.json"
    flags = "--tool=callgrind -q --instr-atstart=no --combine-dumps=yes --cache-sim=yes"
    flags += f" --I1=32768,8,64 --D1=32768,8,64 --LL={cache << 20},16,64"
    command = [valgrind, *flags.split(), f"--callgrind-out-file={dumps}", sys.executable]
    command += [str(Path(__file__).with_name("counted.py"))]
    command += [json.dumps({**asked, "facts": str(facts)})]
    # The same hashes in each run: dictionaries of the interpreter count too.
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if not re.match(r"--\d+-- warning: .* LL ", line):  # Of the host's, not of ours.
                said.append(line)
            if line.startswith(" "):  # Progress; valgrind's own lines begin with its process id.
                print(line, end="", file=sys.stderr, flush=True)
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if process.returncode:
        raise SystemExit("".join(said[-12:]) + f"count: {ended(process.returncode)}")
    with dumps.open(errors="replace") as lines:
        return list(read_parts(lines, FILE.name)), json.loads(facts.read_text())


def difference(rounds: list[list[Work]]) -> dict[str, float]:
    """The largest relative difference between any two rounds, by what was counted."""
    found: dict[str, float] = {}
    for key in ("kernel_instructions", "host_instructions", "read_bytes"):
        for works in zip(*([work.plain() for work in each] for each in rounds), strict=True):
            values = [work[key] for work in works if key in work]
            if values and min(values) > 0:
                found[key] = max(found.get(key, 0.0), max(values) / min(values) - 1)
    return found


def show(works: list[Work]) -> None:
    header = f"{'':18}{'records':>8}{'instructions':>14}{'share':>8}{'read':>11}{'expected':>11}"
    for work in works:
        print(f"\n{work.name}: one step of {work.tokens}")
        print(header)
        for name, each in sorted(
            work.operators.items(), key=lambda item: -item[1].counts.instructions
        ):
            counts = each.counts
            print(
                f"  {name:16}{each.records:8}{counts.instructions / 1e6:12.2f} M"
                f"{counts.instructions / work.instructions:8.1%}{counts.fetched / 1e6:8.2f} MB"
                f"{each.expected_bytes / 1e6:8.2f} MB"
            )
        print(
            f"  {'kernels':16}{'':8}{work.instructions / 1e6:12.2f} M{'':8}"
            f"{work.fetched / 1e6:8.2f} MB{work.expected_bytes / 1e6:8.2f} MB"
            f"  (×{work.fetched / work.expected_bytes:.4f})"
        )
        print(
            f"  {'a token':16}{'':8}{work.instructions / work.tokens / 1e6:12.2f} M{'':8}"
            f"{work.fetched / work.tokens / 1e6:8.2f} MB"
        )
        if work.host is not None:
            print(
                f"  {'host':16}{'':8}{work.host / work.steps / 1e6:12.2f} M  of "
                f"{work.steps} steps; not in the shares"
            )


def positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)


def arguments_of(line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="count.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="name in the catalog, file or folder; GGUF (%(default)s)",
    )
    parser.add_argument(
        "--rows",
        type=positive,
        nargs="+",
        default=[1, 8],
        metavar="N",
        help="sequences that decode together (1 8)",
    )
    parser.add_argument(
        "--steps", type=positive, default=2, help="decoding steps that are counted (%(default)s)"
    )
    parser.add_argument(
        "--context",
        type=positive,
        default=16,
        help="tokens of each prompt before the decoding (%(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=int,
        default=64,
        metavar="N",
        help="tokens of a prompt, counted as one step; 0: none (%(default)s)",
    )
    parser.add_argument(
        "--cache",
        type=positive,
        default=32,
        metavar="MiB",
        help="the simulated last level, 16 ways; a power of two (%(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=1,
        help="whole runs, and by how much they differ (%(default)s)",
    )
    parser.add_argument("--offline", action="store_true", help="never touch the network")
    parser.add_argument("--json", type=Path, help="write everything that was counted there")
    arguments = parser.parse_args(line)
    if arguments.cache & (arguments.cache - 1):
        parser.error(f"--cache {arguments.cache}: a power of two, as 16, 32 or 64")
    if arguments.prefill < 0 or arguments.prefill == 1:
        parser.error(f"--prefill {arguments.prefill}: 0, or at least 2")
    return arguments


def main(line: list[str] | None = None) -> None:
    arguments = arguments_of(line)
    try:
        load()
        files = open_model(arguments.model, offline=arguments.offline)
    except LibraryAbsent as absent:
        raise SystemExit(f"count: {absent}") from absent
    except HeadraceError as error:
        raise SystemExit(f"count: {error}") from error
    expectation = Expectation(files)
    asked = {
        key: getattr(arguments, key)
        for key in ("model", "rows", "steps", "context", "prefill", "offline")
    }
    asked["warm"] = WARM
    rounds, facts = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            parts, facts = run_once(asked, arguments.cache, Path(folder))
            rounds.append(composed(parts, facts, asked, expectation))
    show(rounds[0])
    differs = difference(rounds) if len(rounds) > 1 else {}
    for key, value in differs.items():
        print(f"{key}: {len(rounds)} rounds differ by {value:.4%} at most")
    if arguments.json:
        found = {
            **asked,
            "threads": 1,
            "level": facts["level"],
            "cache_mib": arguments.cache,
            "difference_of_rounds": differs,
            "rounds": [[work.plain() for work in works] for works in rounds],
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\ncount: stopped") from None
