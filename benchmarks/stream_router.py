"""Instructions per token of routing an answer's text to content, reasoning and calls.

    python benchmarks/stream_router.py [--tokens 2000] [--json out.json]

What `Parts.take` costs the API process for each delta of one token (four characters), counted by
callgrind (`valgrind`, from your system's packages): direct, where a request has neither tools nor a
model that reasons, and through the stream router, for prose, reasoning and a call's arguments. Two
lengths are counted and subtracted, so that starting the interpreter is in no figure. A minute.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.base.request import OutputDelta
from headrace.server.routes.chat.parts import Parts
from headrace.text import StreamRouter, find_dialect
from headrace.text.reasoning import THINK

TEXTS = {
    "direct": ("", "The wheel turns, and the water < 3 m deep goes on. "),
    "prose": ("", "The wheel turns, and the water < 3 m deep goes on. "),
    "reasoning": ("<think>", "The wheel turns, and the water < 3 m deep goes on. "),
    "call": ('<tool_call>\n{"name": "f", "arguments": {"text": "', "The wheel turns, 3 m deep. "),
}
"""What is written → (its beginning, what follows again and again)."""
PIECE = 4


def write(kind: str, tokens: int) -> None:
    """Route an answer of `tokens` deltas."""
    begin, rest = TEXTS[kind]
    router = None
    if kind != "direct":
        router = StreamRouter(
            find_dialect("hermes"),
            tools=frozenset({"f"}),
            reasoning=THINK,
        )
    parts = Parts(router)
    text = begin + rest * (tokens * PIECE // len(rest) + 1)
    shown = 0
    for at in range(tokens):
        piece = text[at * PIECE : (at + 1) * PIECE]
        shown += len(parts.take(OutputDelta("r", 0, text=piece, token_ids=[1])))
    assert shown > tokens // 2, "nothing of it came out"


def counted(kind: str, tokens: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            sys.executable,
            __file__,
            "--write",
            kind,
            "--tokens",
            str(tokens),
        ]
        subprocess.run(command, check=True, capture_output=True)
        found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", choices=TEXTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.tokens)
        return
    few = given.tokens // 10
    found = {}
    for kind in TEXTS:
        more = counted(kind, given.tokens) - counted(kind, few)
        found[kind] = round(more / (given.tokens - few))
        ratio = found[kind] / found["direct"]
        print(f"{kind:10} {found[kind]:7,} instructions per token  {ratio:5.1f}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"tokens": given.tokens, "instructions": found}, indent=1))


if __name__ == "__main__":
    main()
