"""`headrace generate`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Annotated

import typer

from ..base.config import DEFAULT_MODEL, EngineOptions
from ..base.errors import InvalidRequest
from .brief import BriefHelp
from .configured import configured
from .flags import argument, flag
from .remote import API_KEY
from .start import engine_of
from .voice import LocalVoice, RemoteVoice, SamplingOptions, Voice

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@partial(configured, argument=False)
def generate(
    words: Annotated[
        list[str],
        argument(
            f"The prompt, or - for standard input; before it the model, if not {DEFAULT_MODEL}.",
            metavar="[MODEL] PROMPT",
        ),
    ],
    engine: EngineOptions,
    sampling: SamplingOptions,
    chat: Annotated[
        bool, flag("The prompt is a message: use the chat template.", "--chat")
    ] = False,
    as_json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
    url: Annotated[
        str | None, flag("Ask this running server; MODEL is its name there.", "--url")
    ] = None,
    key: Annotated[str | None, flag("API key for --url.", *API_KEY)] = None,
) -> None:
    """Continue a prompt once and print the answer as it comes."""
    if len(words) > 2:
        raise InvalidRequest(
            "generate takes [MODEL] and one PROMPT: put the prompt in quotes", param="prompt"
        )
    prompt = sys.stdin.read() if words[-1] == "-" else words[-1]
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    model = words[0] if len(words) == 2 else None
    if model is not None:
        engine.model = model
    asyncio.run(
        _generate(
            prompt, engine, sampling, chat=chat, as_json=as_json, url=url, key=key, name=model
        )
    )


async def _generate(
    prompt: str,
    options: EngineOptions,
    sampling: SamplingOptions,
    *,
    chat: bool,
    as_json: bool,
    url: str | None,
    key: str | None,
    name: str | None,
) -> None:
    async with AsyncExitStack() as stack:
        voice: Voice
        if url is not None:
            voice = remote = RemoteVoice(url, name, key)
            stack.push_async_callback(remote.close)
            await remote.open()
        else:
            engine = await stack.enter_async_context(engine_of(options, quiet=as_json))
            voice = LocalVoice(engine)
        begin = time.perf_counter()
        first = 0.0
        texts: list[str] = []
        totals = {"completion_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
        finish = None
        messages = [{"role": "user", "content": prompt}]
        answer = voice.chat(messages, sampling) if chat else voice.complete(prompt, sampling)
        # Also closed here if writing fails: if the reader has left, no work may stay.
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                first = first or time.perf_counter() - begin
                texts.append(piece.text)
                totals["completion_tokens"] += piece.tokens
                totals["prompt_tokens"] = piece.prompt_tokens or totals["prompt_tokens"]
                totals["cached_tokens"] = piece.cached_tokens or totals["cached_tokens"]
                finish = piece.finish or finish
                if not as_json:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        seconds = time.perf_counter() - begin
        if as_json:
            report = {
                "model": voice.name,
                "text": "".join(texts),
                "finish_reason": finish,
                **totals,
                "first_token_seconds": round(first, 4),
                "seconds": round(seconds, 4),
            }
            sys.stdout.write(json.dumps(report, ensure_ascii=False))
        sys.stdout.write("\n")
