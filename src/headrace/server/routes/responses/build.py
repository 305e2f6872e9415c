"""State of a growing response: its events, and the object that they add up to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from ....base.errors import HeadraceError
from ...generation import Usage
from ..chat.parts import Parts
from .schema import NamedChoice, ResponseBody

Event = dict[str, Any]


class ResponseBuilder:
    """One response. Every method returns the events to send, numbered in order."""

    def __init__(self, body: ResponseBody, model: str, response_id: str, usage: Usage) -> None:
        self._usage = usage
        self._sequence = self._begun = 0
        self._text = ""
        """Text of the open item."""
        self._logprobs: list[dict[str, Any]] = []
        """Log-probabilities of its tokens, if requested."""
        self._open: dict[str, Any] | None = None
        choice = body.tool_choice
        form = body.text.format if body.text else None
        self.response: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": bool(body.background),
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {
                "format": form.model_dump(exclude_none=True, by_alias=True)
                if form
                else {"type": "text"}
            },
            "tool_choice": choice.model_dump()
            if isinstance(choice, NamedChoice)
            else choice or "auto",
            "top_logprobs": body.top_logprobs or 0,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def begin(self) -> list[Event]:
        events = [self._state("response.created"), self._state("response.in_progress")]
        self._begun = self._sequence
        return events

    def again(self) -> None:
        """Discard everything taken so far; only allowed if the reader saw nothing but the first
        events."""
        self._text, self._logprobs, self._open = "", [], None
        self._sequence = self._begun
        self.response["output"] = []

    def take(self, fields: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Add one `delta` of a chat answer, with the `logprobs` of its content's tokens."""
        events: list[Event] = []
        if "reasoning_content" in fields:
            events += self._enter("reasoning")
            events += self._delta("response.reasoning_text.delta", fields["reasoning_content"])
        if "content" in fields:
            events += self._enter("message")
            events += self._delta("response.output_text.delta", fields["content"], logprobs)
        for call in fields.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                events += self._close() + self._enter("function_call")
                assert self._open is not None
                self._open.update(call_id=call["id"], name=function["name"])
                events += self._added()
            if function["arguments"]:
                events += self._delta(
                    "response.function_call_arguments.delta", function["arguments"]
                )
        return events

    def end(self, parts: Parts) -> list[Event]:
        events = self._close()
        self._count()
        cut = parts.finish == "length"
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
            if self.response["output"]:
                self.response["output"][-1]["status"] = "incomplete"
        return [*events, self._state(f"response.{self.response['status']}")]

    def fail(self, error: HeadraceError) -> list[Event]:
        self._count()
        self.response["status"] = "failed"
        self.response["error"] = {"code": error.code or error.type, "message": error.message}
        return [self._state("response.failed")]

    def cancel(self) -> None:
        self._close()
        self._count()
        self.response["status"] = "cancelled"

    def _count(self) -> None:
        usage = self._usage
        self.response["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _state(self, kind: str) -> Event:
        return self._event(kind, response={**self.response, "output": [*self.response["output"]]})

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.response["output"])}

    def _enter(self, kind: str) -> list[Event]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close()
        self._text, self._logprobs = "", []
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind}
        if kind == "function_call":
            self._open = {
                **item,
                "call_id": "",
                "name": "",
                "arguments": "",
                "status": "in_progress",
            }
            return events  # sent once its name is known
        self._open = {**item, "status": "in_progress", "content": []}
        if kind == "message":
            self._open["role"] = "assistant"
        else:
            self._open["summary"] = []
        part = self._part("")
        return [
            *events,
            *self._added(),
            self._event("response.content_part.added", **self._place(), content_index=0, part=part),
        ]

    def _added(self) -> list[Event]:
        assert self._open is not None
        index = len(self.response["output"])
        return [
            self._event("response.output_item.added", output_index=index, item=dict(self._open))
        ]

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": [*self._logprobs],
        }

    def _delta(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._text += text
        self._logprobs += logprobs
        more: dict[str, Any] = {} if "arguments" in kind else {"content_index": 0}
        if "output_text" in kind:
            more["logprobs"] = [*logprobs]
        return [self._event(kind, **self._place(), **more, delta=text)]

    def _close(self) -> list[Event]:
        """Complete the open item."""
        item = self._open
        if item is None:
            return []
        place, text = self._place(), self._text
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [
                self._event(
                    "response.function_call_arguments.done",
                    **place,
                    name=item["name"],
                    arguments=text,
                )
            ]
        else:
            part = self._part(text)
            item["content"] = [part]
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            more: dict[str, Any] = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
            events = [
                self._event(f"response.{kind}.done", **place, content_index=0, text=text, **more),
                self._event("response.content_part.done", **place, content_index=0, part=part),
            ]
        item["status"] = "completed"
        index = place["output_index"]
        self.response["output"].append(item)
        self._open = None
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]
