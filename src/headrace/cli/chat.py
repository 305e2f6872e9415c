"""`headrace chat`: a conversation in the terminal that streams."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from ..base.config import EngineOptions
from ..base.environment import cache_root
from ..base.errors import HeadraceError
from .brief import BriefHelp
from .configured import configured
from .conversation import HELP, Conversation
from .flags import flag
from .main import fail
from .remote import API_KEY
from .start import engine_of
from .typed import Typed
from .voice import LocalVoice, RemoteVoice, SamplingOptions, Voice

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, flag("System message.", "--system")] = None,
    url: Annotated[str | None, flag("Talk to this running server instead.", "--url")] = None,
    key: Annotated[str | None, flag("API key for --url.", *API_KEY)] = None,
    served: Annotated[
        str | None, flag("Name of the model at --url, if not the first.", "--served")
    ] = None,
) -> None:
    """Talk to a model. Enter sends, Alt-Enter breaks the line, Ctrl-C stops an answer.

    /image FILE or /video FILE, or a picture dropped on the terminal, goes with the next message, if
    the model takes it.
    """
    asyncio.run(_chat(engine, sampling, system=system, url=url, key=key, served=served))


async def _chat(
    options: EngineOptions,
    sampling: SamplingOptions,
    *,
    system: str | None,
    url: str | None,
    key: str | None,
    served: str | None,
) -> None:
    async with AsyncExitStack() as stack:
        voice: Voice
        if url is not None:
            voice = remote = RemoteVoice(url, served, key)
            stack.push_async_callback(remote.close)
            await remote.open()
        else:
            voice = LocalVoice(await stack.enter_async_context(engine_of(options)))
        conversation = Conversation(voice, sampling, system)
        typed = Typed(cache_root() / "chat_history")
        if typed.interactive:
            print(f"{voice.name}: {HELP}")
        while not conversation.over:
            try:
                text = await typed.read()
            except EOFError:
                break
            except KeyboardInterrupt:
                continue
            try:
                await _turn(conversation, text)
            except HeadraceError as error:
                fail(error.message)
                if not typed.interactive:
                    raise typer.Exit(error.exit_code) from None


async def _turn(conversation: Conversation, text: str) -> None:
    """Answer one message of the user; Ctrl-C ends the answer, not the program."""
    turn = asyncio.ensure_future(conversation.take(text, _write))
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, turn.cancel)
    try:
        await turn
    except asyncio.CancelledError:
        if not turn.cancelled():
            raise
        _write("\n[stopped]\n")
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
