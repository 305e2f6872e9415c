"""Format in which the served model writes tool calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..text import Dialect, Foreign, ReasoningMarks, StreamRouter, detect_dialect, detect_reasoning
from ..text.tools import Tool

if TYPE_CHECKING:
    from ..engine.clients.face import ServingEngine


@dataclass(frozen=True, slots=True)
class Speech:
    """Answer format for prompts of one chat template; it makes the stream routers."""

    dialect: Dialect | None = None
    marks: ReasoningMarks | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    """Special tokens, text → id."""
    foreign: Foreign = field(default_factory=lambda: Foreign(()))
    """Filter that removes special tokens from untrusted texts."""
    counts_reasoning: bool = False
    """Whether each reasoning mark is one token. Then reasoning can be limited to a number of tokens
    (`engine.clients.input`, ADR 0058)."""

    @classmethod
    def of(cls, engine: ServingEngine, template: str | None) -> Speech:
        """Read the format from a template of the engine's model."""
        special = engine.tokenizer.special_tokens
        marks = detect_reasoning(template)
        counts = marks is not None and all(
            len(engine.tokenizer.encode(mark)) == 1 for mark in (marks.open, marks.close)
        )
        return cls(detect_dialect(template), marks, special, Foreign(special), counts)

    def hidden(self, *, tools: bool) -> frozenset[str]:
        """Return the special tokens with a meaning: they must reach the router, but not the
        user."""
        markers = set(self.dialect.markers) if self._read(tools) and self.dialect else set()
        if self.marks is not None:
            markers |= {self.marks.open, self.marks.close}
        return frozenset(markers & self.special.keys())

    def _read(self, tools: bool) -> bool:
        """Check whether the dialect must parse the answer."""
        return tools or (self.dialect is not None and bool(self.dialect.head))

    def ids(self, hidden: frozenset[str]) -> tuple[int, ...]:
        """Return the ids of these special tokens."""
        return tuple(self.special[text] for text in sorted(hidden))

    def router(
        self, *, opened: bool, tools: Mapping[str, Tool] | None, hidden: frozenset[str], held: bool
    ) -> StreamRouter | None:
        """Create the router of one choice, or None if everything is content.

        `opened`: the prompt ends inside reasoning. `tools`: None if none are offered. `held`: a
        grammar constrains the answer.
        """
        read = self._read(tools is not None)
        if not read and self.marks is None:
            return None
        return StreamRouter(
            self.dialect if read else None,
            tools={} if tools is None else tools,
            reasoning=self.marks,
            in_reasoning=opened,
            hidden=hidden,
            held=held,
        )
