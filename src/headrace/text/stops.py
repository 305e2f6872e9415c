"""Stop strings in a text that arrives in parts."""

from __future__ import annotations

from collections.abc import Sequence

from .automaton import Automaton


class StopStrings:
    """Filter that passes text on until a stop string is complete.

    Only a possible beginning of a stop string is held back. The match is the one that is complete
    first, so that the result does not depend on how the text is cut; of two that end at the same
    character, the longer. Text after a match is dropped.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """Start before the text. `include`: the stop string itself is passed on too."""
        self._automaton = Automaton(stops) if stops else None
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """Stop string that ended the text."""

    def feed(self, text: str) -> str:
        """Return the text that these further characters make certain."""
        automaton = self._automaton
        if automaton is None:
            return text
        if self.matched is not None:
            return ""
        self._state, read, self.matched = automaton.scan(self._state, text)
        window = self._held + text[:read]
        if self.matched is not None:
            self._held = ""
            return window if self._include else window[: len(window) - len(self.matched)]
        held = automaton.held(self._state)
        certain = len(window) - held
        self._held = window[certain:]
        return window[:certain]

    def finish(self) -> str:
        """Return the held-back text at the end."""
        held, self._held, self._state = self._held, "", 0
        return held
