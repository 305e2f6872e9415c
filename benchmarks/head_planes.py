"""The head in two planes: how many panels stay candidates, and what a step takes with it.

Run: `python benchmarks/head_planes.py [--rows 1 2 4 8] [--random] [--json FILE]`.

The default model answers prompts. Each of its decoding steps is run several times in turns, with
the head in panels of Q8_0 (`plain`), in two planes of which both are read (`planes`), and with
bounds first (`bounds`, ADR 0024): as a greedy step, and with logits as a step that draws. `left`
are the panels that can hold the token of a row, `together` those of all rows of a step, which are
read whole. With `--random` the prompts are no text, and the model knows less what to say.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM, SamplingParams
from headrace.kernels.cpu import emit, records
from headrace.kernels.cpu.head import Head
from headrace.kernels.cpu.panels import OUTPUTS, low_bytes, pack
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.cpu.timing import timed
from headrace.kernels.weights import BlockWeight, PanelWeight
from headrace.loader.weights import load_weights

THREADS = 2
PROMPTS = [
    "def fibonacci(n):",
    "The capital of France is",
    "Write a haiku about rivers.\n",
    "import numpy as np\n\nclass Matrix:\n",
    "1, 1, 2, 3, 5,",
    "Dear Sir or Madam,",
]


class Steps:
    """The records of a step of `program` with another head."""

    def __init__(self, program: CpuProgram, head: PanelWeight, bounded: int | None) -> None:
        """`bounded` as in `cpu.head.Head`; None: logits."""
        old = program._emitted[-1][1]
        part = records.HrPart.from_buffer_copy(records.HrPart.from_address(old.parts))
        part.data, part.kind = head.data.ctypes.data, records.KINDS[head.kind]
        product = records.HrLinear.from_buffer_copy(old)
        product.parts = ctypes.addressof(part)
        last = [(records.LINEAR, product)]
        self.head = None
        if bounded is not None:
            rows = program._limits.samples
            self.head = Head(product, THREADS, rows, bounded)
            last = self.head.records()
        emitted = [*program._emitted[:-1], *last]
        self._program, self._keep = program, (part, product, head)
        self._records, self._count = emit.program(emitted), len(emitted)
        self._last = len(last)

    def __call__(self, batch: Any) -> tuple[float, float]:
        """Milliseconds of a step, and of the head in it."""
        step = fill_step(self._program._step, batch)
        self._program._filled = None
        begin = time.perf_counter()
        with timed() as records:
            self._program._operators.team.run(self._records, self._count, step)
            whole = time.perf_counter() - begin
        return 1e3 * whole, 1e3 * sum(record.seconds for record in records[-self._last :])


class Watch:
    """Runs each greedy step of `program` with every head in turn, before it runs as it is.

    That a step is run again changes nothing: it writes the same into the same slots.
    """

    def __init__(self, program: CpuProgram, weight: BlockWeight, bounded: int) -> None:
        team, self._step = program._operators.team, program.step
        plain, planes = pack(weight, team), pack(weight, team, planes=True)
        assert low_bytes(planes), f"a head of {weight.kind} has no planes"
        self._steps = {
            "greedy": {
                "plain": Steps(program, plain, 0),
                "planes": Steps(program, planes, 0),
                "bounds": Steps(program, planes, bounded),
            },
            "logits": {
                "plain": Steps(program, plain, None),
                "planes": Steps(program, planes, None),
            },
        }
        self.clear()
        program.step = self  # type: ignore[method-assign,assignment]

    def clear(self) -> None:
        self.ms: dict[str, dict[str, list[tuple[float, float]]]]
        self.ms = defaultdict(lambda: defaultdict(list))
        self.left: list[int] = []
        self.together: list[int] = []

    def __call__(self, batch: Any, want: Any) -> Any:
        if len(batch.sample_rows) == len(batch.tokens):  # No prompt is among them.
            for what, variants in self._steps.items():
                for name in random.sample(list(variants), len(variants)):
                    self.ms[what][name].append(variants[name](batch))
            heads = {name: each.head for name, each in self._steps["greedy"].items()}
            rows = len(batch.sample_rows)
            for each in heads.values():
                assert np.array_equal(each.tokens[:rows], heads["plain"].tokens[:rows])
            head = heads["bounds"]
            if rows <= head.bounded:
                lower = head.lower[:, :rows].max(0)[:, None]
                above = ~(head.bounds[:rows] < lower)
                self.left += above.sum(1).tolist()
                self.together.append(int(above.any(0).sum()))
        return self._step(batch, want)

    def result(self, rows: int) -> dict[str, Any]:
        """Without the first steps, which warm up."""
        document: dict[str, Any] = {"rows": rows}
        for what, variants in self.ms.items():
            times = {name: np.array(each[3:]) for name, each in sorted(variants.items())}
            document[what] = {
                name: {
                    "ms": round(statistics.median(each[:, 0]), 3),
                    "head_ms": round(statistics.median(each[:, 1]), 3),
                    "to_plain": round(statistics.median(each[:, 0] / times["plain"][:, 0]), 4),
                }
                for name, each in times.items()
            }
        for name, panels in (("left", self.left), ("together", self.together)):
            if panels:
                document[name] = {
                    "median": statistics.median(panels),
                    "mean": round(statistics.mean(panels), 1),
                    "most": max(panels),
                }
        return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--bounded", type=int, default=records.BOUNDED, help="rows, at most")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--random", action="store_true", help="prompts of random tokens")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    most = max(arguments.rows)
    with LLM(threads=THREADS, max_context=1024, max_sequences=most, speculate="off") as llm:
        weights = dict(load_weights(llm.files))
        weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        assert isinstance(weight, BlockWeight)
        program = llm._engine.core.executor._worker._program  # type: ignore[attr-defined]
        assert isinstance(program, CpuProgram)
        watch = Watch(program, weight, arguments.bounded)
        asked = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
        prompts: list[Any] = list(PROMPTS)
        if arguments.random:
            prompts = [random.sample(range(100, 100_000), 24) for _ in PROMPTS]
        for rows in arguments.rows:
            watch.clear()
            for first in range(len(prompts) if rows == 1 else 1):
                llm.generate([prompts[(first + i) % len(prompts)] for i in range(rows)], asked)
            results.append(watch.result(rows))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        document = {"panels": -(-weight.shape[0] // OUTPUTS), "steps": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
