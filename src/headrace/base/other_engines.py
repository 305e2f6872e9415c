"""Options of vLLM, SGLang, llama.cpp and Ollama, and ours that mean the same: one table.

`other_engines.txt` next to this module is the table, held against the argument lists that its
headings name. `headrace serve --from` translates by it and lists it, and errors about unknown
options quote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OtherOption:
    """One option of another engine."""

    names: tuple[str, ...]
    """Its spellings; the first is shown."""
    values: str
    """Values after it: `flag` (none), `one`, `many`, `switch` (one of on, off, auto, or none)."""
    ours: str
    """Field of `EngineOptions`, `ServerOptions` or `SamplingParams`, or `model`; "": none."""
    turn: str
    """Conversion of the value: a name in `cli.translate.TURNS`."""
    note: str
    """Difference in meaning, or the reason why there is no counterpart."""

    @property
    def example(self) -> str:
        """A sample of our value where the name alone does not help, as in TP2."""
        return f"{self.turn}2" if self.turn in ("TP", "PP", "EP") else ""


def _read(text: str) -> tuple[dict[str, tuple[OtherOption, ...]], dict[str, str]]:
    """Return (engine → options, engine → the published list) of the table."""
    engines: dict[str, list[OtherOption]] = {}
    sources: dict[str, str] = {}
    for row in text.splitlines():
        if row.startswith("["):
            engine, _, source = row[1:].partition("] ")
            engines[engine], sources[engine] = [], source
        elif row and not row.startswith("#"):
            names, *cells = (cell.strip() for cell in row.split("|", 4))
            values, ours, turn, note = [*cells, ""][:4]
            engines[engine].append(OtherOption(tuple(names.split()), values, ours, turn, note))
    return {engine: tuple(words) for engine, words in engines.items()}, sources


ENGINES, SOURCES = _read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
"""Engine → its options, and the published list that they were held against."""
FURTHER = ENGINES.pop("further")
"""Keywords of these engines' Python libraries and requests that no command line has."""
