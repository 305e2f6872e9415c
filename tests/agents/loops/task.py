"""The task of every agent: one tool, one question, one report. Imports no library.

The default model (0.5 billion parameters), once it has a tool's result, calls the tool again for
as long as it is offered. llama.cpp's server renders the second turn to the same 219 tokens and
continues them greedily as we do, with the same call line after line (64 tokens compared); its own
loop ends without the tool, for under `auto` it takes the first turn's fenced call for an answer in
words. So an agent ends as its library lets a tool end it, or, in a loop by hand, by a last turn
with `tool_choice` none over the whole history.
"""

from __future__ import annotations

import json
import sys

QUESTION = "What is the weather in Paris?"
ANSWER = "It is 17 degrees in Paris, with wind."
SAMPLING = {"temperature": 0.0, "max_tokens": 64}
calls: list[str] = []


def weather(city: str) -> str:
    calls.append(city)
    return ANSWER


def arguments() -> tuple[str, str]:
    """(address of the server, name of the model)."""
    return sys.argv[1], sys.argv[2]


def report(answer: object) -> None:
    print(json.dumps({"calls": calls, "answer": str(answer)}))
