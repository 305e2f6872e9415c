"""One state machine for a model's text while it streams: reasoning, content, tool calls.

    start ──▶ reasoning ──▶ start ──▶ content ◀──▶ calls

Text that may be the beginning of a marker is held back, nothing else but the spaces around
reasoning and calls, which belong to neither side. Text that looks like a call and is none becomes
content, as it was written. What comes out does not depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .automaton import Automaton
from .bare import FIRST, read_bare
from .calls import Calls, SectionReader
from .dialects.dialect import Dialect, long_id
from .events import ContentDelta, Event, ReasoningDelta, ToolCallArguments
from .jsonstream import SPACES, Malformed
from .reasoning import ReasoningMarks
from .tools import Tool

HELD_SPACES = 64
"""So many spaces before a call or the end of reasoning are dropped; more are passed on."""
MAX_PENDING = 65_536
"""Longest text that is read as a call before it is certain."""


class StreamRouter:
    """Turns the text of one choice into events; `feed` for each part, `finish` at the end."""

    def __init__(
        self,
        dialect: Dialect | None = None,
        *,
        tools: Mapping[str, Tool] | None = None,
        reasoning: ReasoningMarks | None = None,
        in_reasoning: bool = False,
        hidden: frozenset[str] = frozenset(),
        held: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`dialect` None: calls are not looked for. `tools`: those on offer, by name. `reasoning`
        None: reasoning is not split off; `in_reasoning`: the prompt ends inside it. `hidden`:
        markers that are special tokens, which are never shown as content. `held`: a grammar holds
        the calls (`toolgrammar`), so that only the forms that it knows are looked for.
        """
        self.calls = Calls(new_id or (dialect.new_id if dialect else long_id), tools, held=held)
        self.reasoning_tokens = 0
        """Tokens of the parts that were reasoning, as counted by `feed`. Of a part that was so in
        parts, the same share as of its characters: news that waited comes as one."""
        self._dialect = dialect
        self._marks = reasoning
        self._hidden = hidden
        openers = dialect.openers + (() if held else dialect.wrappers) if dialect else ()
        self._openers = Automaton(openers) if openers else None
        self._closer = Automaton([reasoning.close]) if reasoning else None
        self._seek = 0
        """State of the automaton at work."""
        self._held = ""
        self._drop_space = False
        """Has nothing but dropped spaces come since a call or reasoning?"""
        self._may_reason = reasoning is not None
        self._reader: SectionReader | None = None
        self._opener = ""
        """The opener of the section being read, while it is part of what is pending."""
        self._bare = False
        self._pending: list[str] = []
        self._calls_before = 0
        self._state: Callable[[str, list[Event]], str] = self._start
        if in_reasoning and reasoning is not None:
            self._enter_reasoning()

    @property
    def in_reasoning(self) -> bool:
        """Would the next character be reasoning, as far as is known?"""
        return self._state == self._reason

    def feed(self, text: str, tokens: int = 0) -> list[Event]:
        """The events that these further characters make certain; `tokens`: how many they were."""
        events: list[Event] = []
        if not text:
            self.reasoning_tokens += tokens * self.in_reasoning
            return events
        length, reasoned = len(text), 0
        while text:
            inside, rest = self.in_reasoning, self._state(text, events)
            reasoned += inside * (len(text) - len(rest))
            text = rest
        self.reasoning_tokens += round(tokens * reasoned / length)
        return _merge(events)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """What was held back, at the end of the text; `cut`: a limit ended it."""
        events: list[Event] = []
        while self._reader is not None:
            text = self._give_up(events, ended=True, cut=cut)
            while text:
                text = self._state(text, events)
        held, self._held = self._held, ""
        if self.in_reasoning:
            _add(events, ReasoningDelta, held.rstrip(SPACES))
        elif held.strip(SPACES) or not (self.calls.count or self._drop_space):
            _add(events, ContentDelta, held)
        return _merge(events)

    def _start(self, text: str, events: list[Event]) -> str:
        """The start of the message, and what follows reasoning: spaces, then what it will be."""
        held = self._held + text
        body = held.lstrip(SPACES)
        self._held = held
        if not body:
            return ""
        if self._may_reason and self._marks is not None:
            mark = self._marks.open
            if len(body) < len(mark) and mark.startswith(body):
                return ""
            if body.startswith(mark):
                self._enter_reasoning()
                return body[len(mark) :]
        if self._dialect is not None and body[0] in FIRST:
            openers = self._openers.patterns if self._openers else ()
            if any(len(body) < len(opener) and opener.startswith(body) for opener in openers):
                return ""
            if not body.startswith(openers):
                self._held = ""
                before = "" if self._drop_space else held[: len(held) - len(body)]
                self._enter_section(body[0], before, bare=True)
                return body[1:]
        self._held = ""
        self._state = self._content
        return body if self._drop_space else held

    def _enter_reasoning(self) -> None:
        self._may_reason = False
        self._seek, self._held, self._drop_space = 0, "", True
        self._state = self._reason

    def _reason(self, text: str, events: list[Event]) -> str:
        assert self._closer is not None
        rest = self._scan(self._closer, text, ReasoningDelta, events)
        if rest is None:
            return ""
        self._state, self._drop_space = self._start, True
        return rest[2]

    def _content(self, text: str, events: list[Event]) -> str:
        if self._openers is None:
            if self._drop_space:
                text = text.lstrip(SPACES)
                self._drop_space = not text
            _add(events, ContentDelta, text)
            return ""
        rest = self._scan(self._openers, text, ContentDelta, events)
        if rest is None:
            return ""
        self._enter_section(rest[0], rest[1])
        return rest[2]

    def _scan(
        self,
        automaton: Automaton,
        text: str,
        kind: type[ContentDelta] | type[ReasoningDelta],
        events: list[Event],
    ) -> tuple[str, str, str] | None:
        """Passes text on up to a marker; returns the marker, the spaces before it, and the rest."""
        idle = not (self._seek or self._held or self._drop_space)
        if idle and text[-1] not in SPACES and automaton.passes(text):
            events.append(kind(text))  # Nearly every token.
            return None
        self._seek, read, found = automaton.scan(self._seek, text)
        window = self._held + text[:read]
        if self._drop_space:
            window = window.lstrip(SPACES)
            self._drop_space = not window
        if found is not None:
            self._seek, self._held = 0, ""
            body = window[: len(window) - len(found)]
            passed = _without_tail(body)
            _add(events, kind, passed)
            return found, body[len(passed) :], text[read:]
        passed = _without_tail(window[: len(window) - automaton.held(self._seek)])
        self._held = window[len(passed) :]
        _add(events, kind, passed)
        return None

    def _enter_section(self, opener: str, before: str, *, bare: bool = False) -> None:
        """`before`: spaces to give back if it turns out to be no call; `bare`: no marker says
        that it is one."""
        assert self._dialect is not None
        self._opener = before + opener
        self._bare = bare
        self._pending = []
        self._calls_before = self.calls.count
        self._reader = (read_bare if bare else self._dialect.read)(opener, self.calls)
        next(self._reader)
        self._state = self._section

    def _section(self, text: str, events: list[Event]) -> str:
        reader, calls = self._reader, self.calls
        assert reader is not None
        for place, char in enumerate(text):
            self._pending.append(char)
            try:
                if len(self._pending) > MAX_PENDING:
                    raise Malformed("too long to be a call")
                reader.send(char)
            except StopIteration as done:
                self._commit(events)
                self._leave_section()
                rest = text[place + 1 :]
                if self._marks is None or done.value != self._marks.open:
                    return (done.value or "") + rest
                self._enter_reasoning()
                return rest
            except Malformed:
                return self._give_up(events) + text[place + 1 :]
            if calls.committed:
                self._commit(events)
        return ""

    def _commit(self, events: list[Event]) -> None:
        """What was read up to here is a call: it can no longer become content."""
        if self.calls.committed:
            events += self.calls.events
            self.calls.events.clear()
            self.calls.committed = False
            self._pending, self._opener = [], ""

    @property
    def _certain(self) -> bool:
        """Is what is being read a call, or nothing?"""
        return not self._bare or self.calls.count > self._calls_before

    def _leave_section(self) -> None:
        self._reader, self._pending, self._opener = None, [], ""
        self._held, self._seek = "", 0
        self._drop_space = self.calls.count > 0
        self._state = self._content

    def _give_up(self, events: list[Event], *, ended: bool = False, cut: bool = False) -> str:
        """The section is no call, or not to its end: what is pending, to be read as content."""
        calls = self.calls
        self._commit(events)
        opener, pending = self._opener, "".join(self._pending)
        if calls.open:
            if ended and pending:
                # The digits of a number (or the letters of a word) that is not complete.
                calls.arguments(pending)
                pending = ""
            calls.end(complete=False)
            self._commit(events)
        elif cut and self._certain and (calls.begun or not pending.strip(SPACES)):
            # The beginning of a call, as a marker or another says: nothing for anybody to read.
            opener = pending = ""
        elif ended and calls.count > self._calls_before and not calls.begun:
            # Only the closing marker is missing, or a part of it.
            pending = ""
        calls.begun = False
        self._leave_section()
        if opener and opener.strip(SPACES) not in self._hidden:
            # The spaces before it were kept back for a call: there is none.
            self._drop_space = False
            _add(events, ContentDelta, opener)
        return pending


def _without_tail(text: str) -> str:
    """Without spaces at the end, but for those beyond `HELD_SPACES`."""
    return text[: max(len(text.rstrip(SPACES)), len(text) - HELD_SPACES)]


def _add(events: list[Event], kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
    if text:
        events.append(kind(text))


def _merge(events: list[Event]) -> list[Event]:
    """Neighbouring deltas of one kind as one."""
    if len(events) < 2:
        return events
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            merged[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + event.text)
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and event.index == last.index
        ):
            merged[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged
