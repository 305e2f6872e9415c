"""`headrace cache precompute`: prompts that a server will find on the disk."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import track

from ..base.config import EngineOptions
from ..base.errors import InvalidRequest
from ..base.sampling import SamplingParams
from ..engine.loop.context import served_size
from ..server.caller import Caller
from ..server.pins import read_prompts
from .cache import command
from .configured import configured
from .flags import flag
from .start import engine_of

Prompts = Annotated[
    Path,
    flag('Lines of JSON: {"prompt": "..."} or {"messages": [...], "tools": [...]}.', "--prompts"),
]
Key = Annotated[str, flag("For the callers of this API key alone: its name in the key file.")]


@command.command()
@partial(configured, argument=True)
def precompute(engine: EngineOptions, prompts: Prompts, key: Key = "") -> None:
    """Compute prompts and keep their KV on the disk, for servers of this model and these options.

    A server with API keys keeps callers apart: for each caller that is to find a prompt, run it
    with its `--key`. Prompts that are there already are not computed again.
    """
    if engine.context_cache == "auto":
        engine = replace(engine, context_cache=served_size(engine))
    given = list(read_prompts(prompts, "prompts"))
    salt = Caller(key, f"key {key}").salt(None) if key else ""
    tokens, found = asyncio.run(_compute(engine, given, salt))
    print(f"{len(given)} prompts, {tokens} tokens; {found} were there", file=sys.stderr)


async def _compute(
    options: EngineOptions, given: list[dict[str, Any]], salt: str
) -> tuple[int, int]:
    """Return (tokens of all prompts, tokens found in the cache)."""
    tokens = found = 0
    async with engine_of(options) as engine:
        for one in track(
            given, "computing", console=Console(stderr=True, markup=False), transient=True
        ):
            prompt: Any = one.get("prompt")
            if prompt is None:
                if engine.template is None:
                    raise InvalidRequest("this model has no chat template", param="messages")
                prompt = await asyncio.to_thread(
                    engine.template.render,
                    one["messages"],
                    tools=one.get("tools"),
                    add_generation_prompt=False,
                )
            output = await engine.generate(
                prompt, SamplingParams(max_tokens=1, temperature=0.0), cache_salt=salt
            )
            tokens += len(output.prompt_token_ids)
            found += output.cached_tokens
    return tokens, found
