"""One state machine for a model's text while it streams: reasoning, content, tool calls.

    start ──▶ reasoning ──▶ start ──▶ content ◀──▶ calls

Only text that may begin a marker is held back, and the spaces around reasoning and calls, which
belong to neither side. Text that looks like a call but is not one becomes content, unchanged. If a
reported call breaks off, its arguments are closed. The text after it is left out up to the mark
with which the call ends. The result does not depend on how the text is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from .automaton import Automaton, automaton_of
from .bare import FIRST, read_bare
from .calls import Calls, SectionReader
from .dialects.dialect import Dialect, long_id
from .events import ContentDelta, Event, ReasoningDelta, ToolCallArguments
from .jsonstream import SPACES, Ended, Malformed
from .reasoning import ReasoningMarks
from .tools import Tool

HELD_SPACES = 64
"""Largest number of spaces dropped before a call or the end of reasoning; more are passed on."""
MAX_PENDING = 65_536
"""Longest text that is read as a call before it is certain, or left out after one that broke
off."""
MAX_AFTER = 64
"""Longest text that is left out between a complete call and the mark with which it ends."""


_REMAINS = "}])\"',;"
"""Characters that close JSON; alone after a call they are not shown."""


class StreamRouter:
    """Converter of one choice's text to events; `feed` each part, `finish` at the end."""

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
        """Start before the text. `dialect` None: calls are not looked for. `tools`: the offered
        ones, by name.

        `reasoning` None: reasoning is not split off; `in_reasoning`: the prompt ends inside it.
        `hidden`: markers that are special tokens, which are never shown as content. `held`: a
        grammar constrains the calls (`toolgrammar`), so that only its forms are looked for.
        """
        self.calls = Calls(
            new_id or (dialect.new_id if dialect else long_id),
            tools,
            held=held,
            ends=dialect.closers if dialect else (),
        )
        self.reasoning_tokens = 0
        """Number of tokens in reasoning parts, as counted by `feed`. A part that is reasoning only
        in places counts by its share of characters, since delayed deltas come as one."""
        self._dialect = dialect
        self._marks = reasoning
        self._hidden = hidden
        openers = dialect.openers + (() if held else dialect.wrappers) if dialect else ()
        self._openers = automaton_of(openers) if openers else None
        self._closer = Automaton([reasoning.close]) if reasoning else None
        self._seek = 0
        """State of the current automaton."""
        self._held = ""
        self._drop_space = False
        """Flag: only dropped spaces came since a call or reasoning."""
        self._may_reason = reasoning is not None
        self._reader: SectionReader | None = None
        self._opener = ""
        """Opener of the section being read, while it is part of the pending text."""
        self._bare = False
        self._pending: list[str] = []
        self._calls_before = 0
        self._broke = False
        """Flag: the call before `_skip` broke off."""
        self._state: Callable[[str, list[Event]], str] = self._start
        if in_reasoning and reasoning is not None:
            self._enter_reasoning()

    @property
    def in_reasoning(self) -> bool:
        """Return whether the next character would be reasoning, as far as is known."""
        return self._state == self._reason

    def feed(self, text: str, tokens: int = 0) -> list[Event]:
        """Return the events that these further characters make certain; `tokens`: their number of
        tokens."""
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
        """Return the events of the held-back text at the end. `cut`: a limit ended the text; then
        an incomplete call stays open."""
        events: list[Event] = []
        while self._reader is not None:
            text = self._give_up(events, ended=True, cut=cut)
            while text:
                text = self._state(text, events)
        held, self._held = self._held, ""
        if self._state == self._skip:
            held = held[: len(held) - self._ends().held(self._seek)]
            held = held.lstrip(SPACES) if held.strip(SPACES + _REMAINS) else ""
        if self.in_reasoning:
            _add(events, ReasoningDelta, held.rstrip(SPACES))
        elif held.strip(SPACES) or not (self.calls.count or self._drop_space):
            _add(events, ContentDelta, held)
        return _merge(events)

    def _start(self, text: str, events: list[Event]) -> str:
        """Read the start of the message, or the text after reasoning: spaces, then the first sign
        of what follows."""
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
        """Pass text on up to a marker; return the marker, the spaces before it, and the rest."""
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
        """Begin a section of calls. `before`: spaces to restore if it is not a call; `bare`: no
        marker proves that it is one."""
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
                if calls.committed:
                    self._commit(events)
                    self._pending = [char]
                return self._give_up(events) + text[place + 1 :]
            if calls.committed:
                self._commit(events)
        return ""

    def _commit(self, events: list[Event]) -> None:
        """Count the text up to here as a call: it can no longer become content."""
        if self.calls.committed:
            events += self.calls.events
            self.calls.events.clear()
            self.calls.committed = False
            self._pending, self._opener = [], ""

    @property
    def _certain(self) -> bool:
        """Return whether the text being read can only be a call."""
        return not self._bare or self.calls.count > self._calls_before

    def _leave_section(self) -> None:
        self._reader, self._pending, self._opener = None, [], ""
        self._held, self._seek = "", 0
        self._drop_space = self.calls.count > 0
        self._state = self._content

    def _give_up(self, events: list[Event], *, ended: bool = False, cut: bool = False) -> str:
        """End a section that is not a call, or an incomplete one; return the text to be read as
        content."""
        calls = self.calls
        if ended:
            self._end_reader(events)
        opener, pending = self._opener, "".join(self._pending)
        certain, begun = self._certain, calls.begun
        before = calls.count
        broke = calls.break_off(close=not cut)
        self._commit(events)
        if broke:
            pending = "" if ended else pending
        elif cut and certain and (begun or not pending.strip(SPACES)):
            # A marker or an earlier call shows that this begins a call: of no use to a reader.
            opener = pending = ""
        elif ended and before > self._calls_before and not begun:
            # Only the closing marker is missing, or a part of it.
            pending = ""
        leaves = broke or (before > self._calls_before and not begun)
        leaves = leaves and not (ended or self._bare) and bool(calls.ends)
        self._leave_section()
        if leaves:
            self._broke = broke
            self._state = self._skip
        if opener and opener.strip(SPACES) not in self._hidden:
            # The spaces before it were kept for a call that did not come.
            self._drop_space = False
            _add(events, ContentDelta, opener)
        return pending

    def _end_reader(self, events: list[Event]) -> None:
        """Signal the end of the text to the reader: a value that it holds may be complete."""
        assert self._reader is not None
        with contextlib.suppress(Ended, Malformed, StopIteration):
            self._reader.throw(Ended())
        self._commit(events)

    def _ends(self) -> Automaton:
        """Return the automaton of the marks at which the rest of a call ends."""
        return automaton_of((*self.calls.ends, *(self._openers.patterns if self._openers else ())))

    def _skip(self, text: str, events: list[Event]) -> str:
        """Drop the rest of a call up to the mark with which calls end, if that comes within the
        bound; otherwise the rest is content."""
        room = (MAX_PENDING if self._broke else MAX_AFTER) - len(self._held)
        self._seek, read, found = self._ends().scan(self._seek, text[:room])
        self._held += text[:read]
        if found is None and read < room:
            return ""
        rest, self._held, self._seek = self._held, "", 0
        self._state = self._content
        if found in self.calls.ends:
            rest = ""
        elif found is not None and self._broke:
            rest = found
        return rest + text[read:]


def _without_tail(text: str) -> str:
    """Remove spaces at the end, except those beyond `HELD_SPACES`."""
    return text[: max(len(text.rstrip(SPACES)), len(text) - HELD_SPACES)]


def _add(events: list[Event], kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
    if text:
        events.append(kind(text))


def _merge(events: list[Event]) -> list[Event]:
    """Merge neighbouring deltas of one kind."""
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
