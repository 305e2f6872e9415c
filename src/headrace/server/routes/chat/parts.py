"""One choice of a chat answer: its deltas routed into content, reasoning and tool calls."""

from __future__ import annotations

from typing import Any

import msgspec

from ....base.request import OutputDelta
from ....text import StreamRouter
from ....text.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart


class Parts:
    """State of one choice; `take` returns the fields of its next chunks."""

    __slots__ = (
        "_legacy", "_most_calls", "_router", "_show_reasoning", "calls", "content", "finish",
        "logprobs", "reasoning", "stop", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        router: StreamRouter | None,
        *,
        show_reasoning: bool = True,
        echoed: str = "",
        legacy: bool = False,
        parallel: bool = True,
    ) -> None:
        """Begin a choice. `echoed`: the beginning of its content; `legacy`: a call is sent as
        `function_call`; `parallel`: False keeps only the first call, even if the model writes
        more."""
        self._router = router
        self._show_reasoning = show_reasoning
        self._legacy = legacy
        self._most_calls = None if parallel else 1
        self.content: list[str] = [echoed] if echoed else []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[int] = []
        self.logprobs: list[msgspec.Raw] = []
        """In encoded form: as objects they would number hundreds of thousands, and freeing them all
        at once would block the event loop."""
        self.finish: str | None = None
        self.stop: str | int | None = None

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self._router is None

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._router is None else self._router.reasoning_tokens

    def take(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the `delta` objects for this delta, in order."""
        if delta.finish_reason is not None:
            self.finish, self.stop = delta.finish_reason, delta.stop_reason
        if self._router is None:
            if not delta.text:
                return []
            self.content.append(delta.text)
            return [{"content": delta.text}]
        events = self._router.feed(delta.text, len(delta.token_ids))
        if delta.finish_reason is not None:
            events += self._router.finish(cut=self.finish == "length")
        chunks = [chunk for event in events if (chunk := self._chunk(event)) is not None]
        if self.calls and self.finish == "stop":
            self.finish = "function_call" if self._legacy else "tool_calls"
        return chunks

    def _chunk(self, event: Event) -> dict[str, Any] | None:
        match event:
            case ContentDelta(text):
                self.content.append(text)
                return {"content": text}
            case ReasoningDelta(text):
                self.reasoning.append(text)
                return {"reasoning_content": text} if self._show_reasoning else None
            case ToolCallStart(index) | ToolCallArguments(index) if self._beyond(index):
                return None
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                self.calls.append({"id": call_id, "type": "function", "function": function})
                if self._legacy:
                    return {"function_call": dict(function)}
                opening = {"index": index, "id": call_id, "type": "function"}
                return {"tool_calls": [{**opening, "function": dict(function)}]}
            case ToolCallArguments(index, text):
                self.calls[index]["function"]["arguments"] += text
                if self._legacy:
                    return {"function_call": {"arguments": text}}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None

    def _beyond(self, index: int) -> bool:
        return self._most_calls is not None and index >= self._most_calls

    def message(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not content else content,
            "refusal": None,
        }
        if self.reasoning and self._show_reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls and self._legacy:
            message["function_call"] = self.calls[0]["function"]
        elif self.calls:
            message["tool_calls"] = self.calls
        return message
