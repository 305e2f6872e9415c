"""Writes `other-engines.md` beside this file from the table in `headrace.base.other_engines`.

Run: `python docs/other_engines.py`; `tests/docs/test_other_engines.py` holds the page against it.
"""

from __future__ import annotations

from pathlib import Path

from headrace.base.other_engines import ENGINES, SOURCES, OtherOption

PAGE = Path(__file__).with_suffix(".md").with_name("other-engines.md")
MARK = "## "
"""Beginning of the first part that this script writes; the text above is written by hand."""
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "ollama": "Ollama"}
TURNED = {
    "omit": "left out",
    "share": "left out",
    "request": "left out",
    "refuse": "refused",
    "copies": "refused above 1",
}


def _ours(word: OtherOption) -> str:
    if word.turn in TURNED and (word.turn != "request" or not word.ours):
        return TURNED[word.turn]
    if word.turn in TURNED:
        return f"left out (`{word.ours}`)"
    if word.turn == "off":
        return f"`--no-{word.ours.replace('_', '-')}`"
    if word.turn == "file" or word.ours == "model":
        return "MODEL"
    if not word.ours:
        return ""
    return f"`--{word.ours.replace('_', '-')}{' ' if word.example else ''}{word.example}`"


def written() -> str:
    """Return the page: its head as it is, and the tables."""
    parts = [PAGE.read_text().partition(MARK)[0].rstrip() + "\n"]
    for engine, words in ENGINES.items():
        parts.append(f"## {TITLES[engine]}\n\nHeld against {SOURCES[engine]}.\n")
        rows = ["| theirs | here | note |", "|---|---|---|"]
        for word in words:
            names = " ".join(f"`{name}`" for name in word.names)
            rows.append(f"| {names} | {_ours(word)} | {word.note} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written())
