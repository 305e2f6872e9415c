"""What a demanded form costs per token: the same model with and without one, turn by turn.

Run: `python benchmarks/grammar_cost.py [--model NAME] [--rows 1 16] [--tokens 64]`. For each form
and batch size: milliseconds per step with it and without (medians of interleaved rounds), their
ratio, and of that the time the step waited for a mask and laid it on the logits; and the time of
the threads beside it. The forms never end, so that both sides compute the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.text.grammar import from_lark, from_regex, from_schema

FORMS = {
    "any text": from_regex(r"(.|\n){2000,}", "regex"),
    "list of objects": from_schema(
        {
            "type": "array",
            "minItems": 500,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "size": {"type": "integer"},
                    "kind": {"enum": ["file", "folder", "link"]},
                    "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                },
                "required": ["name", "size", "kind", "tags"],
                "additionalProperties": False,
            },
        },
        "schema",
    ),
    "expressions": from_lark(
        'start: sum\nsum: (term "+")* term\nterm: (factor "*")* factor\n'
        'factor: NUMBER | "(" sum ")" | NAME\nNUMBER: /[0-9]{1,9}/\nNAME: /[a-z]{1,12}/\n',
        "grammar",
    ),
}


class Watch:
    """Times a method of an object from outside."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        inner = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                self.seconds += time.perf_counter() - begin

        setattr(owner, name, timed)


def measure(llm: LLM, rows: int, tokens: int, form: str | None) -> tuple[float, int]:
    """(seconds, steps) of decoding; the prompt is in the prefix cache."""
    params = [
        SamplingParams(temperature=0.8, seed=row, max_tokens=tokens, ignore_eos=True)
        for row in range(rows)
    ]
    first = llm.stats.step
    begin = time.perf_counter()
    llm.generate(["List what is in this folder:\n"] * rows, params, grammar=form)
    return time.perf_counter() - begin, llm.stats.step - first


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    options = {"max_sequences": max(arguments.rows), "threads": arguments.threads}
    with LLM(arguments.model, speculate="off", **options) as llm:
        worker = llm._engine.core.executor._loaded  # type: ignore[attr-defined]
        begin = time.perf_counter()
        for form in FORMS.values():
            worker.prepare_grammar(form)
        while not all(worker.prepare_grammar(form) for form in FORMS.values()):
            time.sleep(0.01)
        compiled = time.perf_counter() - begin
        print(f"tokenizer and {len(FORMS)} grammars, once: {compiled:.2f} s")
        waits, moves = Watch(worker._masks, "mask"), Watch(worker._masks, "_move")
        for rows in arguments.rows:
            for name, form in FORMS.items():
                free, held = [], []
                measure(llm, rows, 4, form)
                waits.seconds = moves.seconds = 0.0
                steps_held = 0
                for _ in range(arguments.rounds):
                    seconds, steps = measure(llm, rows, arguments.tokens, None)
                    free.append(seconds / steps)
                    seconds, steps = measure(llm, rows, arguments.tokens, form)
                    held.append(seconds / steps)
                    steps_held += steps
                with_form, without = statistics.median(held), statistics.median(free)
                results.append(
                    {
                        "rows": rows,
                        "form": name,
                        "ms_per_step_free": round(without * 1e3, 3),
                        "ms_per_step_held": round(with_form * 1e3, 3),
                        "ratio": round(with_form / without, 4),
                        "ms_on_the_path": round(waits.seconds / steps_held * 1e3, 3),
                        "ms_beside": round(moves.seconds / steps_held * 1e3, 3),
                    }
                )
                print(json.dumps(results[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"compile_seconds": compiled, "results": results}))


if __name__ == "__main__":
    main()
