"""Chat templates: a conversation to the text that the model was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest, ModelFileError, TooLarge

from .messages import clean_messages

MAX_TEMPLATE = 512 * 1024
"""Characters of a template."""


_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none\b", re.IGNORECASE)
"""A template that tells messages without content from those with an empty one."""
_END_MARK = "\ue0f0end of the answer so far\ue0f1 "
"""Written behind the last message's content, to find where it ends: in private characters, which
no template knows."""


class ChatTemplate:
    """A compiled template; `render` may be called from several threads."""

    def __init__(self, source: str, *, special: Mapping[str, str] | None = None) -> None:
        """`special`: names of special tokens and their text (bos_token, eos_token, …), which
        templates read as variables. Raises `ModelFileError` where it does not compile.
        """
        if len(source) > MAX_TEMPLATE:
            raise ModelFileError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE} are read",
                param="chat_template",
            )
        # Local: 20 ms of imports, of no use to a start that renders no conversation.
        import jinja2

        from .sandbox import TemplateEnvironment

        self.source = source
        self._asks_for_none = _NONE.search(source) is not None
        self._special = {"bos_token": "", "eos_token": "", **(special or {})}
        try:
            self._template = TemplateEnvironment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelFileError(
                f"the chat template does not compile: {error}", param="chat_template"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; its special tokens are written out in it.

        `messages` are OpenAI's; content given as text parts is joined. `continue_final_message`
        leaves the last message open for the model to go on with. `variables` are the template's
        own (`{"enable_thinking": False}`); they cannot replace what this method passes.
        Raises `InvalidRequest`, with the template's own words where it refuses, and `TooLarge`
        where it goes over a bound of the sandbox.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        clean = clean_messages(messages, absent=None if self._asks_for_none else "")
        if continue_final_message:
            _open_end(clean)
            clean[-1]["content"] += _END_MARK
        text = self._run(
            {
                **self._special,
                **(variables or {}),
                "messages": clean,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if continue_final_message:
            text, mark, rest = text.rpartition(_END_MARK.rstrip())
            if not mark:
                raise InvalidRequest(
                    "the chat template does not write the last message as it is, so it cannot be "
                    "continued",
                    param="continue_final_message",
                )
            # A template that strips content took the space behind the mark with it.
            if not rest.startswith(" "):
                text = text.rstrip()
        return text

    def _run(self, variables: dict[str, Any]) -> str:
        from .sandbox import METER, Exhausted, Meter, Raised, check

        token = METER.set(Meter())
        try:
            parts: list[str] = []
            length = 0
            for part in self._template.generate(variables):
                length += len(part)
                check(length)
                parts.append(part)
            return "".join(parts)
        except Raised as error:
            raise InvalidRequest(f"the chat template refuses: {error}", param="messages") from None
        except Exhausted as error:
            raise TooLarge(f"the chat template {error}", param="messages") from None
        except Exception as error:  # noqa: BLE001 - the border to foreign code
            raise InvalidRequest(
                f"the chat template fails on this request: {type(error).__name__}: {error}"[:1000],
                param="messages",
            ) from None
        finally:
            METER.reset(token)


def chat_template(source: str | None, special: Mapping[str, str] | None = None) -> ChatTemplate:
    """A model's template; raises `InvalidRequest` where it has none."""
    if not source:
        raise InvalidRequest(
            "this model has no chat template: it is a base model or its file lacks one; use "
            "/v1/completions, or start with a template file",
            param="messages",
        )
    return ChatTemplate(source, special=special)


def open_end(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text with which a prompt ends that goes on with the last message. Raises
    `InvalidRequest` where there is none."""
    return _open_end(clean_messages(messages[-1:]))


def _open_end(messages: list[dict[str, Any]]) -> str:
    """Of cleaned messages, as templates strip it."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest(
            "continue_final_message needs a last message with text",
            param="continue_final_message",
        )
    return content.strip()
