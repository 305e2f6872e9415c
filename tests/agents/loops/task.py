"""The task of every agent: one tool, one question, one report. Imports no library.

The default model, once it has a tool's result, calls the tool again for as long as it is offered
(0.5 billion parameters; llama.cpp's server with the same file does the same). So an agent ends as
its library lets a tool end it, or, in a loop by hand, by a last turn with `tool_choice` none over
the whole history.
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
