"""Dialects of tool calls by family of models, one file each, and their detection from a template.

A dialect is found by its markers. They stand in the text of a chat template that renders the
assistant's earlier calls, or describes calls to the model. A template that mentions tools without
known markers, or no tools, gets the generic dialect.
"""

from __future__ import annotations

from headrace.base.errors import InvalidRequest

from .deepseek import DEEPSEEK, DEEPSEEK_V31
from .dialect import CallFormat, Dialect
from .gemma4 import GEMMA4
from .generic import GENERIC
from .harmony import HARMONY
from .hermes import HERMES
from .kimi import KIMI
from .listed import COMMAND, GRANITE, NEMOTRON, PHI4
from .llama3 import LLAMA3
from .mistral import MISTRAL, MISTRAL_V11
from .pythonic import LFM2, OLMO3
from .tagged import TAGGED

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        HARMONY,
        DEEPSEEK,
        DEEPSEEK_V31,
        MISTRAL_V11,
        MISTRAL,
        COMMAND,
        GRANITE,
        PHI4,
        NEMOTRON,
        KIMI,
        GEMMA4,
        *TAGGED,
        OLMO3,
        HERMES,
        LLAMA3,
        LFM2,
        GENERIC,
    )
}
"""Dialects in the order of detection; the more specific first."""


def detect_dialect(template: str | None) -> Dialect:
    """Return the first dialect whose marks are all in the template's text."""
    for dialect in DIALECTS.values():
        if template and dialect.marks and all(mark in template for mark in dialect.marks):
            return dialect
    return GENERIC


def find_dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise InvalidRequest(
            f"tool dialect {name!r} is not known; known are {', '.join(sorted(DIALECTS))}",
            param="tool_dialect",
        )
    return DIALECTS[name]


__all__ = [
    "DIALECTS", "GENERIC", "HARMONY", "CallFormat", "Dialect", "detect_dialect", "find_dialect",
]  # fmt: skip
