"""Protocols of the routes that a service holds, so that it need not import them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from ..engine.hearing.engine import HearingEngine
    from ..engine.programs.engine import ProgramEngine
    from ..engine.programs.executor import ServedProgram
    from .program_fields import OcrBody, StreamBody
    from .speech_fields import SpeechBody


class Ears(Protocol):
    """Transcription routes: `hearing.ears.HearingRoutes`."""

    engine: HearingEngine

    async def transcribe(self, request: Request, task: str) -> Response: ...
    def live(self, request: Request) -> Response: ...


class Voices(Protocol):
    """Speech synthesis routes: `speaking.SpeakingRoutes`."""

    async def speak(self, request: Request, body: SpeechBody) -> Response: ...


class ProgramsFace(Protocol):
    """Routes of foreign programs: `inference.ProgramRoutes`."""

    engine: ProgramEngine

    def find(self, name: str, version: str | None = None) -> ServedProgram: ...
    def version(self, program: ServedProgram) -> str: ...
    def described(self, program: ServedProgram) -> dict[str, Any]: ...
    @property
    def read(self) -> Callable[[Request, OcrBody], Awaitable[dict[str, Any]]]: ...
    async def infer(self, request: Request, name: str, version: str | None) -> Response: ...
    async def open_stream(
        self, request: Request, name: str, body: StreamBody
    ) -> dict[str, Any]: ...
    def close_stream(self, name: str, stream: str) -> None: ...
    def cameras(self, request: Request) -> Response: ...


class Resting(Protocol):
    """Models loaded and unloaded at run time: `residents.Residents`, with its `Service` as Any."""

    resting: list[Any]

    async def load(self, word: str) -> Any: ...
    async def unload(self, name: str, *, rest: bool = False) -> None: ...
    async def wanted(self, name: str) -> None: ...
    def at_rest(self, name: str) -> Any: ...
    def used(self, service: Any) -> None: ...
    def keep(self, service: Any, seconds: float) -> None: ...
    def expires_in(self, service: Any) -> float: ...
    async def watch(self) -> None: ...
