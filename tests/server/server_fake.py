"""An engine with the serving face and no model: it answers with words it was told.

It stands in where a test speaks of HTTP alone; what speaks of answers runs the real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry

from headrace.base.arch import ModelArch
from headrace.base.config import Decision, EngineOptions
from headrace.base.drafted import Drafted
from headrace.base.errors import EngineDead, HeadraceError, InvalidRequest, NotFound
from headrace.base.identity import Identity
from headrace.base.modelfiles import ModelFiles
from headrace.base.request import OutputDelta, StepStats
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.engine.clients.face import Health
from headrace.engine.clients.input import InputProcessor
from headrace.engine.clients.operations import Asleep, Profile
from headrace.engine.clients.stream import Stream
from headrace.obs.life import RequestLife
from headrace.text import ChatTemplate

VOCABULARY = 1000
ARCH = ModelArch(
    family="fake",
    vocab_size=VOCABULARY,
    hidden=8,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=8,
    intermediate=8,
    max_context=512,
    norm_eps=1e-6,
)


class FakeTokenizer:
    """One id per byte, from 0."""

    vocab_size = VOCABULARY
    special_ids: frozenset[int] = frozenset()
    special_tokens: ClassVar[dict[str, int]] = {}
    vocabulary = SimpleNamespace(added=special_tokens, special_ids=special_ids)

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        most: int | None = None,
        unbroken: int | None = None,
    ) -> list[int]:
        return list(text.encode())

    def fewest(self, text: str) -> int:
        return len(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""


TEMPLATE = "{% set shown = tools %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class FakeOperations:
    """Remembers what it was told."""

    def __init__(self, engine: FakeEngine) -> None:
        self.asleep = 0
        self.recording = False
        self._engine = engine

    async def sleep(self, level: int, mode: str = "abort") -> dict[str, float]:
        self.asleep = max(level, self.asleep)
        self._engine.refusal = Asleep("the engine sleeps", retry_after=5.0)
        self._engine.state = Health(ready=False, alive=True, reason="asleep", retry_after=5.0)
        return {"kv_bytes": 4096.0} if level == 1 else {}

    async def wake(self) -> None:
        self.asleep = 0
        self._engine.refusal = None
        self._engine.state = Health(ready=True, alive=True)

    async def reset_prefix_cache(self) -> dict[str, float]:
        return {"blocks": 7.0}

    async def start_profile(self) -> None:
        if self.recording:
            raise InvalidRequest("a profile is being recorded; stop it first")
        self.recording = True

    async def stop_profile(self) -> Profile:
        if not self.recording:
            raise InvalidRequest("no profile is being recorded")
        self.recording = False
        return Profile(Path("timeline.json"), 3, 2)


class FakeEngine:
    """Streams `answer` one token per `delay` seconds, again and again up to max_tokens.

    With a `gate` every answer waits after `held_after` tokens until that file is there: a test that
    looks at an answer in work, or ends it, finds it so however slow the test and however fast this.
    """

    held_after = 5

    def __init__(
        self,
        *,
        delay: float = 0.0,
        answer: str = "Hello, world. ",
        template: str = "",
        gate: str | Path | None = None,
    ) -> None:
        self.options = EngineOptions()
        self.files = ModelFiles(
            name="fake",
            format="gguf",
            path=Path("fake"),
            weights=(),
            arch=ARCH,
            tokenizer={},
            chat_template=template,
            eos_ids=(),
        )
        self.tokenizer = FakeTokenizer()
        self.template: Any = ChatTemplate(TEMPLATE)
        self.model_name = "fake"
        self.max_context = ARCH.max_context
        self.rows = 64
        self.decisions = [Decision("kernels", "fake", "a test")]
        self.identity = Identity("weights", "architecture", {"device": "cpu"}, {"linear": "fake"})
        self.phases = {"start": 0.0}
        self.stats = StepStats()
        self.registry = CollectorRegistry()
        self.operations = FakeOperations(self)
        self.delay = delay
        self.answer = answer
        self.gate = gate
        self.held: set[str] = set()
        """Requests that wait at the gate."""
        self.drafted: Drafted | None = None
        """Results of drafts that each request reports."""
        self.once = False
        """Ends with the answer's end."""
        self.state = Health(ready=True, alive=True)
        self.running: dict[str, asyncio.Task[None]] = {}
        self.streams: dict[str, Stream] = {}
        self.seen: list[tuple[list[int], SamplingParams]] = []
        self.refusal: HeadraceError | None = None
        """Raised by `submit`."""
        self.fault: HeadraceError | None = None
        """Ends every stream after `fault_after` tokens."""
        self.fault_after = 0
        self.dies_after: int | None = None
        """The engine process dies once, after so many tokens of the next answer."""
        self._input = InputProcessor(self.files, self.tokenizer, self.max_context)  # type: ignore[arg-type]

    def submit(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        *,
        whole: bool = False,
        request_id: str = "",
        **more: Any,
    ) -> Stream:
        if self.refusal is not None:
            raise self.refusal
        request = self._input.request(prompt, sampling, request_id=request_id, **more)
        self.seen.append((request.prompt, request.spec.sampling))
        choices = request.spec.sampling.n
        stream = Stream(request_id, request.prompt, choices, self._cancel, whole=whole)
        self.streams[request_id] = stream
        self.running[request_id] = asyncio.get_running_loop().create_task(
            self._run(stream, request.spec.sampling)
        )
        return stream

    async def stream(self, prompt: Any, sampling: Any, **more: Any) -> AsyncIterator[OutputDelta]:
        stream = self.submit(prompt, sampling, **more)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def _run(self, stream: Stream, sampling: SamplingParams) -> None:
        text = self.answer.encode()
        assert sampling.max_tokens is not None
        place = -1
        while place < sampling.max_tokens - 1:
            place += 1
            await asyncio.sleep(self.delay)
            await self._held(stream.request_id, place)
            if place == self.dies_after:
                self.dies_after = None
                if not stream.repeatable:
                    stream.fail(EngineDead("the engine died", retry_after=1.0))
                    break
                stream.again()
                place = -1
                continue
            if self.fault is not None and place >= self.fault_after:
                stream.fail(self.fault)
                break
            token = text[place % len(text)]
            last = place == sampling.max_tokens - 1
            ends = self.once and place == len(text) - 1
            for choice in range(sampling.n):
                delta = OutputDelta(
                    stream.request_id,
                    choice,
                    text=chr(token),
                    token_ids=[token],
                    prompt_tokens=len(stream.prompt_ids),
                    cached_tokens=3,
                    finish_reason="stop" if ends else "length" if last else None,
                    drafted=self.drafted if last and choice == sampling.n - 1 else None,
                )
                if sampling.logprobs is not None:
                    top = list(range(65, 65 + sampling.logprobs))
                    delta.logprobs = [TokenLogprobs(-0.5, 1, top, [-0.5 * i - 1 for i in top])]
                if sampling.prompt_logprobs is not None and not place and not choice:
                    count = len(stream.prompt_ids) - 1
                    delta.prompt_logprobs = [
                        None,
                        *([TokenLogprobs(-1.0, 2, [66], [-0.1])] * count),
                    ]
                stream.push(delta)
            if ends:
                break
        self.running.pop(stream.request_id, None)

    async def _held(self, request_id: str, place: int) -> None:
        if self.gate is None or place < self.held_after:
            return
        self.held.add(request_id)
        try:
            while not Path(self.gate).exists():
                await asyncio.sleep(0.01)
        finally:
            self.held.discard(request_id)

    def _cancel(self, request_id: str) -> None:
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()

    def in_work(self) -> list[tuple[str, Any]]:
        return [(name, RequestLife(0.0, 1)) for name in self.running]

    def abort(self, request_id: str) -> bool:
        if request_id not in self.running:
            return False
        self._cancel(request_id)
        self.streams[request_id].push(OutputDelta(request_id, 0, finish_reason="abort"))
        return True

    async def load_adapter(self, name: str, path: str) -> None:
        raise InvalidRequest("this engine serves no adapters", param="lora_name")

    async def unload_adapter(self, name: str) -> None:
        raise NotFound(f"there is no adapter {name[:200]!r}", param="lora_name")

    def health(self) -> Health:
        return self.state

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        return lambda: None

    async def close(self, drain_seconds: float = 0.0) -> None:
        for request_id in list(self.running):
            self.abort(request_id)
