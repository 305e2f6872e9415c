"""The process that `count.py` counts: a model's steps under callgrind, with marks between them.

Run by `count.py` only, under valgrind. One thread, fixed token ids, greedy. Its argument and the
file of facts that it leaves are JSON.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

from callgrind import SPLIT, Marks

from headrace import LLM, SamplingParams
from headrace.base.errors import HeadraceError
from headrace.kernels.cpu import library
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.cpu.records import HrRecord, HrStep


class Watch:
    """Stands in `Team.run_at`: marks at some calls, and one call record by record."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._call = 0
        self._begin: int | None = None
        self._from = self._to = -1
        self._name, self._rows = "", 0
        self.records: dict[str, int] = {}
        """Work → records of its step."""
        self._inner, watch = Team.run_at, self

        def run_at(team: Team, records: int, count: int, step: int) -> None:
            call = watch._call
            watch._call = call + 1
            if call == watch._begin:
                watch._marks.start()
            if call == watch._from:
                watch._marks.dump("")
            if call == watch._to:
                watch._apart(team, records, count, step)
            else:
                watch._inner(team, records, count, step)

        Team.run_at = run_at  # type: ignore[method-assign]

    def aim(self, name: str, rows: int, begin: int | None, first: int, last: int) -> None:
        """Aim at the calls from now on: count from `begin`; what lies between the beginnings of
        `first` and `last` is the work's, `last` is run apart. `rows` of its step."""
        self._name, self._rows, self._call = name, rows, 0
        self._begin, self._from, self._to = begin, first, last

    def _apart(self, team: Team, records: int, count: int, step: int) -> None:
        self._marks.dump(self._name)
        rows = HrStep.from_address(step).n
        assert rows == self._rows, (rows, self._rows)
        for place in range(count):
            self._inner(team, records + place * ctypes.sizeof(HrRecord), 1, step)
            self._marks.dump(f"{self._name}{SPLIT}{place}")
        self._marks.stop()
        self.records[self._name] = count


def ids(seed: int, count: int, vocabulary: int) -> list[int]:
    return [(seed * 7_919 + place * 104_729) % vocabulary for place in range(count)]


def say(text: str) -> None:
    print(f"  {time.process_time():6.0f} s  {text}", file=sys.stderr, flush=True)


def count(work: dict[str, Any], marks: Marks) -> dict[str, Any]:
    rows, steps, context, prefill = (work[key] for key in ("rows", "steps", "context", "prefill"))
    warm = work["warm"]
    longest = max(prefill + 2, context + warm + steps + 4)
    with LLM(
        work["model"],
        threads=1,
        device="cpu",
        kernels="cpu",
        max_sequences=max(rows),
        max_context=longest,
        step_tokens=max(512, prefill, max(rows) * context),
        kv_memory="256MiB",
        offline=work["offline"],
        speculate="off",
    ) as llm:
        level, vocabulary = library.level(), llm.files.arch.vocab_size
        say(f"loaded; the CPU that valgrind offers has level {level}")
        watch = Watch(marks)

        def answer(prompts: list[list[int]], tokens: int) -> None:
            llm.generate(
                prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            )

        answer([ids(1, 16, vocabulary)], 4)
        for each in rows:
            prompts = [ids(100 * each + row, context, vocabulary) for row in range(each)]
            watch.aim(f"decode {each}", each, 1, warm + 1, warm + 1 + steps)
            answer(prompts, warm + steps + 2)
            say(f"counted: {steps} decoding steps of {each}, and one by operators")
        if prefill:
            watch.aim("", 0, 0, -1, -1)
            answer([ids(50, 1, vocabulary)], 1)
            watch.aim(f"prefill {prefill}", prefill, None, 0, 0)
            answer([ids(51, prefill, vocabulary)], 1)
            say(f"counted: a prompt of {prefill}")
        program = llm._engine.core.executor._worker.text.program  # type: ignore[attr-defined]
        assert isinstance(program, CpuProgram)
        return {"level": level, "names": program.names, "records": watch.records}


def main() -> None:
    work = json.loads(sys.argv[1])
    marks = Marks()
    if not marks.under_valgrind:
        raise SystemExit("counted.py runs under callgrind only: `python benchmarks/count.py`")
    try:
        facts = count(work, marks)
    except HeadraceError as error:
        raise SystemExit(f"count: {error}") from error
    Path(work["facts"]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
