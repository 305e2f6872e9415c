"""The task of every agent: one tool, one question, one report. Imports no library."""

from __future__ import annotations

import json
import sys

QUESTION = "What is the weather in Paris? Use the tool get_weather, then say how many degrees."
ANSWER = "It is 17 degrees in Paris, with wind."
SAMPLING = {"temperature": 0.0, "max_tokens": 160}
calls: list[str] = []


def weather(city: str) -> str:
    calls.append(city)
    return ANSWER


def arguments() -> tuple[str, str]:
    """(address of the server, name of the model)."""
    return sys.argv[1], sys.argv[2]


def report(answer: object) -> None:
    print(json.dumps({"calls": calls, "answer": str(answer)}))
