"""Chat templates: a conversation to the text that the model was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from headrace.base.errors import InvalidRequest, ModelFileError, TooLarge
from headrace.base.modelfiles import ModelFiles

from .messages import clean_messages, in_parts
from .taught import Teaching

MAX_TEMPLATE = 512 * 1024
"""Characters of a template."""
SMALL_MESSAGES = 64
SMALL_CHARACTERS = 64 * 1024
"""Largest number of messages, and of characters in their contents, for rendering in-process; larger
conversations go to a process of their own (`text.renderer`)."""


_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none\b", re.IGNORECASE)
"""Pattern of a template that distinguishes messages without content from those with an empty
one."""
_PARTS = re.compile(r"\bfor\s+\w+\s+in\s+message(\[['\"]content['\"]\]|\.content)")
_TEXTS = re.compile(r"\bis\s+(not\s+)?(string|iterable|sequence|mapping)\b")
"""Patterns of a template that iterates over the parts of a content, and of one that accepts a text.
A template with the first but not the second (SmolVLM's) would drop a plain text."""
_END_MARK = "\ue0f0end of the answer so far\ue0f1 "
"""Mark after the last message's content, to find where it ends: private characters that no template
knows."""


class Rendering(TypedDict, total=False):
    """Options of a rendering in addition to the messages, which are in OpenAI's format; content
    given as text parts is joined."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    """Default: True."""
    continue_final_message: bool
    """Whether the last message is left open for the model to continue."""
    variables: Mapping[str, Any] | None
    """Template variables (`{"enable_thinking": False}`); they cannot replace the options above."""


class ChatTemplate:
    """A compiled template; `render` may be called from several threads."""

    def __init__(self, source: str, *, special: Mapping[str, str] | None = None) -> None:
        """Compile a template. Raises `ModelFileError` if it does not compile.

        `special`: names of special tokens and their text (bos_token, eos_token, …), which templates
        read as variables.
        """
        if len(source) > MAX_TEMPLATE:
            raise ModelFileError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE} are read",
                param="chat_template",
            )
        # Local: 20 ms of imports that a start without a conversation saves.
        import jinja2

        from .renderer import Renderers
        from .sandbox import TemplateEnvironment

        self._renderers = Renderers(source)
        self._needs_process = False
        self.source = source
        self._asks_for_none = _NONE.search(source) is not None
        self._takes_parts = bool(_PARTS.search(source)) and not _TEXTS.search(source)
        self._teaching = Teaching(source)
        self._special = {"bos_token": "", "eos_token": "", **(special or {})}
        try:
            self._template = TemplateEnvironment().from_string(source)
        except (
            jinja2.TemplateError,
            RecursionError,
            SyntaxError,
            ValueError,
            MemoryError,
        ) as error:
            raise ModelFileError(
                f"the chat template does not compile: {error}", param="chat_template"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Rendering]) -> str:
        """Return the prompt of a conversation; its special tokens are spelled out.

        Raises `InvalidRequest`, with the template's own words if it refuses, and `TooLarge` if it
        exceeds a bound of the sandbox.
        """
        given = self._given(messages, options)
        text = self._here(given)
        if text is None:
            kind, text = self._renderers.render(given)
            if kind != "ok":
                raise {"raised": _refused, "exhausted": _exhausted, "failed": _failed}[kind](text)
        return _cut(text) if options.get("continue_final_message") else text

    def render_small(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Rendering]
    ) -> str | None:
        """Render in milliseconds, for an event loop; None: call `render`, in a thread."""
        if self._needs_process or not _is_small(messages):
            return None
        text = self._here(self._given(messages, options))
        if text is None or not options.get("continue_final_message"):
            return text
        return _cut(text)

    def _given(self, messages: Sequence[Mapping[str, Any]], options: Rendering) -> dict[str, Any]:
        """Collect the template's variables."""
        tools, documents = options.get("tools"), options.get("documents")
        continued, prompts = (
            options.get("continue_final_message", False),
            options.get("add_generation_prompt", True),
        )
        if continued and prompts:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt to be false",
                param="continue_final_message",
            )
        clean = clean_messages(messages, absent=None if self._asks_for_none else "")
        if tools:
            clean = self._teaching.teach(clean, tools)
        if continued:
            _open_end(clean)
            clean[-1]["content"] += _END_MARK
        if self._takes_parts:
            clean = [in_parts(message) for message in clean]
        return {
            **self._special,
            **(options.get("variables") or {}),
            "messages": clean,
            **(self._teaching.variables(tools) if tools else {"tools": None}),
            "documents": list(documents) if documents else None,
            "add_generation_prompt": prompts,
        }

    def _here(self, given: dict[str, Any]) -> str | None:
        """Render in-process if the rendering is small; else return None."""
        from .sandbox import Elsewhere, Exhausted, Raised, rendered

        if self._needs_process or not _is_small(given["messages"]):
            return None
        try:
            return rendered(self._template, given, small=True)
        except Elsewhere as cause:
            # Slow filters will be used again; a long time is due to this conversation.
            self._needs_process = cause.always
            return None
        except Raised as error:
            raise _refused(str(error)) from None
        except Exhausted as error:
            raise _exhausted(str(error)) from None
        except Exception as error:  # noqa: BLE001 - the boundary to foreign code
            raise _failed(f"{type(error).__name__}: {error}") from None


def _cut(text: str) -> str:
    """Return the text up to the end of the message that is continued."""
    text, mark, rest = text.rpartition(_END_MARK.rstrip())
    if not mark:
        raise InvalidRequest(
            "the chat template does not write the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    # A template that strips content took the space after the mark with it.
    return text if rest.startswith(" ") else text.rstrip()


def _refused(words: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template refuses: {words}", param="messages")


def _exhausted(words: str) -> TooLarge:
    return TooLarge(f"the chat template {words}", param="messages")


def _failed(words: str) -> InvalidRequest:
    return InvalidRequest(
        f"the chat template fails on this request: {words}"[:1000], param="messages"
    )


def _is_small(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation is short enough to be rendered in-process."""
    if not isinstance(messages, list | tuple) or len(messages) > SMALL_MESSAGES:
        return False
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            total += 256 * len(content)
        elif isinstance(content, str):
            total += len(content)
    return total <= SMALL_CHARACTERS


class ChatTemplates:
    """Templates of one model; each request gets the one made for it."""

    def __init__(self, files: ModelFiles) -> None:
        """Compile the templates. Raises `ModelFileError` if one does not compile, `InvalidRequest`
        for a model without a template."""
        self._files = files
        self._made = {source: ChatTemplate(source, special=files.special) for source in _of(files)}

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Rendering]) -> str:
        """Render a conversation; see `ChatTemplate.render`."""
        return self._chosen(options).render(messages, **options)

    def render_small(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[Rendering]
    ) -> str | None:
        """Render a small conversation; see `ChatTemplate.render_small`."""
        return self._chosen(options).render_small(messages, **options)

    def _chosen(self, options: Rendering) -> ChatTemplate:
        tools, documents = bool(options.get("tools")), bool(options.get("documents"))
        source = self._files.template_for(tools=tools, documents=documents)
        return self._made[source or ""]


def _of(files: ModelFiles) -> Sequence[str]:
    if not files.used_templates:
        raise InvalidRequest(
            "this model has no chat template: it is a base model or its file lacks one; use "
            "/v1/completions, or start with a template file",
            param="messages",
        )
    return files.used_templates


def open_end(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the end of a prompt that continues the last message. Raises `InvalidRequest` for a
    message without text."""
    return _open_end(clean_messages(messages[-1:]))


def _open_end(messages: list[dict[str, Any]]) -> str:
    """Return the text that cleaned messages end with, as templates strip it."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest(
            "continue_final_message needs a last message with text", param="continue_final_message"
        )
    return content.strip()
