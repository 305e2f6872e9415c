"""State that all routes share: the engine, the options, requests in work, readiness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, MutableMapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypeIs

from ..base.config import Decision, ServerOptions
from ..base.errors import (
    ContextOverflow,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    ShuttingDown,
)
from ..base.sampling import SamplingParams
from ..engine.clients.input import default_sampling
from ..obs.loopwatch import LoopWatch
from ..obs.spans import Spans
from ..obs.tasks import TaskWatch, ended
from ..obs.threads import THREADS
from ..text import Foreign, encode_between
from .body import BodiesInFlight
from .caller import named
from .decoders import Decoders
from .faces import Ears, ProgramsFace, Resting, Voices
from .hands import Hands
from .speech import Speech

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..engine.clients.face import ServingEngine
    from ..engine.clients.pictures import PicturePrompts
    from ..engine.hearing.engine import HearingEngine
    from ..engine.programs.engine import ProgramEngine
    from ..speech.prompts import SoundPrompts
    from .files.store import FileStore
    from .served_profile import ServedProfile

INLINE_CHARACTERS = 8192
"""Maximum characters tokenised in the event loop; longer texts would delay the streams."""
LONG_CHARACTERS = 2**20
"""Characters above which texts are tokenised one at a time: such a text has up to a million ids."""
UNBROKEN = 64 * 1024
UNBROKEN_OF_A_TOKEN = 4
"""Maximum characters without a position where a text may be cut (`text.segments`). It is
`UNBROKEN`, or this many per token of the context if that is more, so that any fitting text is
accepted."""
KEEP_ALIVE = 15.0
"""Seconds of silence after which a stream begins with a comment, or sends another one."""
DRAIN_RETRY = 2.0
"""Seconds after which a client of a draining server should retry (elsewhere)."""


class Entrance:
    """Admission state of a server, shared by its models."""

    def __init__(self) -> None:
        self.draining = False
        self.in_work = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.residents: Resting | None = None


def _of_door(name: str, doc: str) -> Any:
    """Make a property that reads and sets the entrance's attribute of this name."""
    return property(
        lambda service: getattr(service._door, name),
        lambda service, value: setattr(service._door, name, value),
        doc=doc,
    )


class Service:
    """One served model and its HTTP state, which `attaching.attach` opens. Services of several
    models (`beside`) share the state of the server."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.started = time.time()
        self._door = Entrance()
        self.models = [self]
        """Services of all models of the server; the first one gets requests without a name."""
        self._names: list[str] = []
        self.keep_alive = KEEP_ALIVE
        self.tasks = TaskWatch()
        self.loop = LoopWatch()
        """Watch over the event loop of this server; `run` starts it."""
        self.hands = Hands()
        self.decoders, self.fetches = Decoders(), Decoders()
        self.fetch_hosts: tuple[str, ...] = ()
        self.bodies = BodiesInFlight()
        self._long_text = asyncio.Semaphore(1)
        self.spans = Spans(options.otlp_endpoint) if options.otlp_endpoint else None
        """Writer of traces; None: they are off and cost nothing."""
        self.files: FileStore | None = None
        self.served_profile: ServedProfile | None = None
        """Signed profile that the server was started with."""
        self._engine: ServingEngine | None = None
        self._alone: ProgramEngine | None = None
        self._ears: Ears | None = None
        self._voices: Voices | None = None
        self.programs: ProgramsFace | None = None
        """Foreign programs, with a model or alone."""
        self.sounds: SoundPrompts | None = None
        """Preparation of a chat's sounds; None if the model takes none."""
        self.pictures: PicturePrompts | None = None
        """Preparation of a chat's pictures; None if the model takes none."""
        self.places = Foreign(())
        """Cutter of their placeholder tokens, in the texts of all roles."""
        self._defaults = SamplingParams()
        self._speech = Speech()
        self._speeches: dict[str | None, Speech] = {}
        """Answer formats by the template that wrote the prompt."""

    def beside(self) -> Service:
        """Return an unopened service for one more model; its caller adds it to `models`."""
        other = copy(self)
        other._engine = other._ears = other._voices = other.sounds = other.pictures = None
        other._names = []
        return other

    def open(self, engine: ServingEngine, names: Sequence[str] = ()) -> None:
        """Serve text with the ready engine under these names; without any, those of the options or
        the engine's own."""
        self._engine = engine
        self._names = list(names)
        self._defaults = default_sampling(engine.files)
        self._speech = Speech.of(engine, engine.files.chat_template)
        self._speeches = {one: Speech.of(engine, one) for one in engine.files.used_templates}
        if self.spans is not None and hasattr(engine, "on_end"):
            engine.on_end = partial(self.spans.request, model=self.name)

    def hear_with(self, ears: Ears, names: Sequence[str] = ()) -> None:
        """Serve transcription and nothing else, under these names: see `open`."""
        self._ears, self._names = ears, list(names)

    def speak_with(self, voices: Voices) -> None:
        self._voices = voices

    def run_with(self, programs: ProgramsFace, *, alone: bool) -> None:
        """Serve foreign programs; `alone`: nothing else is served."""
        self.programs = programs
        self._alone = programs.engine if alone else None

    def runs(self, name: str) -> bool:
        """Whether requests for this name go to foreign programs."""
        return self._alone is not None or (
            self.programs is not None and name in self.programs.engine.programs
        )

    @property
    def routes_of_programs(self) -> ProgramsFace:
        """The routes of foreign programs. Raises `Overloaded` while they load, `NotFound` without
        any."""
        if self.programs is None:
            _ = self.served
            raise NotFound(
                f"{self.name} is no foreign program; headrace serve --programs NAME serves some",
                param="model",
            )
        return self.programs

    @property
    def writes(self) -> bool:
        """Whether a text engine is ready."""
        return self._engine is not None

    @property
    def served(self) -> ServingEngine | HearingEngine | ProgramEngine:
        """The engine, of any kind. Raises `Overloaded` while the model loads."""
        if self._ears is not None:
            return self._ears.engine
        if self._alone is not None:
            return self._alone
        if self._engine is None:
            raise Overloaded("the model is being loaded", retry_after=2.0)
        return self._engine

    @property
    def engine(self) -> ServingEngine:
        """The text engine. Raises `Overloaded` while the model loads, and `InvalidRequest` if the
        model is a transcription model."""
        served = self.served
        if served is self._alone:
            raise _unsupported(
                f"{self.name} is a foreign program; use /v2/models/{self.name}/infer"
            )
        if not writes(served):
            raise _unsupported(
                f"{self.name} transcribes speech and does nothing else; use "
                "/v1/audio/transcriptions, /v1/audio/translations or /v1/realtime"
            )
        return served

    @property
    def ears(self) -> Ears:
        """The transcription routes. Raises `Overloaded` while the model loads, and `InvalidRequest`
        if it is a text model."""
        if self._ears is None:
            _ = self.served
            raise _unsupported(
                f"{self.name} does not hear; /v1/audio and /v1/realtime need a speech model, such "
                "as whisper-base"
            )
        return self._ears

    @property
    def voices(self) -> Voices:
        """The speech synthesis routes. Raises `Overloaded` while the model loads, and
        `InvalidRequest` if nothing here synthesises speech."""
        if self._voices is None:
            _ = self.served
            raise _unsupported(
                f"{self.name} does not speak; /v1/audio/speech needs a voice such as joe, or a "
                "model whose folder has a speech.json and a codec"
            )
        return self._voices

    draining: bool = _of_door("draining", "Whether new work is refused, for the server ends.")
    residents: Resting | None = _of_door(
        "residents", "Loader of further models; None: this server has the one it was started with."
    )
    in_work: int = _of_door("in_work", "Requests that hold, or wait for, an engine.")

    @property
    def modalities(self) -> list[Literal["text", "audio", "image", "video"]]:
        """Kinds of parts that the model takes in a chat."""
        found: list[Literal["text", "audio", "image", "video"]] = ["text"]
        if self.sounds is not None:
            found.append("audio")
        if self.pictures is not None:
            found += ["image"] if self.pictures.film_place is None else ["image", "video"]
        return found

    @property
    def loaded(self) -> bool:
        return not (self._engine is None and self._ears is None and self._alone is None)

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return self.names[0]

    @property
    def names(self) -> list[str]:
        """Names under which the model is served."""
        if self._alone is not None:
            return list(self._alone.programs)
        return self._names or self.options.served_names or [self.served.model_name]

    @property
    def all_names(self) -> list[str]:
        """Names of all models of the server, including resting ones."""
        resting = [] if self.residents is None else self.residents.resting
        return [name for one in (*self.models, *resting) for name in one.names]

    def choose(self, name: str | None, *, resting: bool = False) -> Service:
        """Return the service of the model, or of the adapter's model, with this name. Without a
        name, or for an unknown one (which `check_model` refuses), return this service. `resting`:
        also find a resting model, which can be described but cannot answer."""
        if name and resting and self.residents is not None:
            found: Service | None = self.residents.at_rest(name)
            if found is not None:
                return found
        if name and self.models != [self]:
            for spelt in (name, name.removesuffix(":latest")):
                for one in self.models:
                    if spelt in one.names or one.adapter(spelt):
                        return one
        return self

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of every answer; empty until the engine has been ready once."""
        identity = self.engine.identity
        return "" if identity is None else identity.fingerprint

    @property
    def defaults(self) -> SamplingParams:
        """Sampling defaults that the model's authors ship."""
        return self._defaults

    @property
    def speech(self) -> Speech:
        """Format of calls and reasoning by the default template."""
        return self._speech

    def speech_for(self, *, tools: bool, documents: bool) -> Speech:
        """Return the format of calls and reasoning for the template of a request."""
        template = self.engine.files.template_for(tools=tools, documents=documents)
        return self._speeches.get(template, self._speech)

    def check_grammar(self, grammar: str | None) -> None:
        """Raise `InvalidRequest` if a grammar is demanded that the engine does not support."""
        if grammar is not None and "grammar" not in getattr(self.engine, "features", ()):
            raise InvalidRequest(
                "structured output is not supported by this engine",
                param="response_format",
                code="unsupported_parameter",
            )

    def check_generates(self) -> None:
        """Raise `InvalidRequest` if the model only makes vectors."""
        if self.engine.files.arch.task != "tokens":
            raise _unsupported(
                "this model does not generate; use /v1/embeddings, /rerank or /score"
            )

    @property
    def vocab_size(self) -> int:
        return self.engine.files.arch.vocab_size

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise `InvalidRequest` unless the model has all of these tokens."""
        size = self.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"token ids must be from 0 to {size - 1}, not {wrong}", param=param
            )

    def adapter(self, name: str | None) -> str | None:
        """Return the name if it is that of a loaded adapter and not of the model."""
        loaded = getattr(getattr(self._engine, "adapters", None), "loaded", {})
        return name if name and name not in self.names and name in loaded else None

    def check_new_name(self, name: str) -> None:
        """Raise `InvalidRequest` if a model, or an adapter of a different model, has the name of a
        new adapter."""
        if name in self.all_names:
            raise InvalidRequest(f"the name {name[:200]!r} is a model's", param="lora_name")
        if self.with_adapter(name) not in (None, self):
            raise InvalidRequest(
                f"the name {name[:200]!r} is an adapter's of another model", param="lora_name"
            )

    def with_adapter(self, name: str) -> Service | None:
        """Return the service of the loaded model that has an adapter of this name."""
        return next((one for one in self.models if one.adapter(name)), None)

    def check_model(self, name: str | None, *, adapters: bool = False) -> None:
        """Raise `ModelNotFound` unless `name` is absent or the served model's, or with `adapters`
        an adapter's."""
        if name and name not in self.names and not (adapters and self.adapter(name)):
            served = ", ".join(map(repr, self.all_names))
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here; this server has {served}",
                param="model",
            )

    def health(self) -> tuple[bool, bool, str, float | None]:
        """Return (ready, alive, reason if not, seconds after which to retry)."""
        if not self.loaded:
            return False, True, "the model is being loaded", 2.0
        health = self.served.health()
        if self.draining:
            return False, health.alive, "the server is shutting down", DRAIN_RETRY
        if health.ready and (broken := self.broken()):
            return False, health.alive, broken, 1.0
        return health.ready, health.alive, health.reason, health.retry_after

    @property
    def role(self) -> str:
        """The engine's part in a prefill/decode split: both, prefill or decode."""
        decisions: list[Decision] = getattr(self.served, "decisions", [])
        decided = (one.value for one in decisions if one.name == "role")
        return next(decided, "both")

    def broken(self) -> str:
        """Return which part of the server itself has failed at the moment, or ""."""
        return ended(self.tasks.down, THREADS.down) or self.loop.problem

    def check_open(self, scope: MutableMapping[str, Any]) -> None:
        """Raise the error that `enter` would raise now; take nothing.

        A batch's request waits for its turn elsewhere (`batches.courtesy`) and takes no place here.
        """
        _ = self.served
        if scope.get("headrace.batch"):
            return
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after=DRAIN_RETRY)
        if self.in_work >= self.options.max_concurrent:
            raise Overloaded(
                f"{self.in_work} requests are in work, which is the limit (max_concurrent)",
                retry_after=1.0,
            )
        account = scope.get("headrace.account")
        if account is not None:
            account.check()

    def enter(self, scope: MutableMapping[str, Any]) -> None:
        """Count the request of this scope as in work until its answer has been sent.

        `Border` calls `leave` for it, which charges the usage that the route left in
        `headrace.usage`. Raises `Overloaded` if the server drains or is full, `RateLimited` if the
        caller's key is at its limit. Call it only once the body is there: see `entry`.
        """
        self.check_open(scope)
        if scope.get("headrace.batch"):
            return
        account = scope.get("headrace.account")
        if account is not None:
            account.enter()
        self.in_work += 1
        self._door.idle.clear()
        scope["headrace.entered"] = True

    def leave(self, scope: MutableMapping[str, Any]) -> None:
        """Release what the exchange of this scope holds, and charge its usage."""
        self.bodies.give(scope)
        if scope.pop("headrace.entered", False):
            account = scope.get("headrace.account")
            if account is not None:
                account.leave(scope.get("headrace.usage"))
            self.in_work -= 1
            if not self.in_work:
                self._door.idle.set()

    def abort(self, name: str) -> bool:
        """Abort the requests whose answers carry this id; return False if none is in work."""
        aborted = 0
        for one in self.models:
            in_work: list[tuple[str, Any]] = getattr(one.served, "in_work", list)()
            ids = [each for each, _ in in_work if name in (each, named(each))]
            aborted += sum(one.served.abort(each) for each in ids or [name])
        return aborted > 0

    async def idle(self) -> None:
        """Wait until no request is in work."""
        await self._door.idle.wait()

    async def encode(
        self,
        text: str,
        *,
        raw: bool,
        must_fit: bool = True,
        counts: bool = False,
        beside: bool = False,
        cut: bool = False,
    ) -> list[int]:
        """Tokenise a text.

        `raw`: no template made the text, so the model's prefix goes before it. `beside`: tokenise
        even a short text off the event loop, because it is one of many. `cut`: the text has cuts
        (`text.foreign`). `must_fit`: raise `ContextOverflow` at once for a text that cannot fit,
        however it is encoded. It is also raised as soon as there are too many ids, unless `counts`
        asks only for their number.
        """
        tokenizer, most = self.engine.tokenizer, self.engine.max_context
        encode: Callable[..., list[int]] = tokenizer.encode
        if cut:
            encode = partial(encode_between, tokenizer)
        if must_fit and len(text) > most and tokenizer.fewest(text) > most:
            raise ContextOverflow(
                f"the prompt has {len(text)} characters, which are more tokens than the {most} "
                "that fit in the context",
                param="prompt",
            )
        if len(text) <= INLINE_CHARACTERS and not beside:
            ids: list[int] = encode(text, add_bos=raw)
            return ids
        bounded = must_fit and not counts
        work = partial(
            encode,
            text,
            add_bos=raw,
            most=most if bounded else None,
            unbroken=max(UNBROKEN, UNBROKEN_OF_A_TOKEN * most),
        )
        if len(text) <= LONG_CHARACTERS:
            ids = await self.hands.run(work)
        else:
            async with self._long_text:
                ids = await self.hands.run(work)
        if bounded and len(ids) > most:
            raise ContextOverflow(
                f"the prompt has more than {most} tokens, which is what fits in the context",
                param="prompt",
            )
        return ids


def _unsupported(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="model", code="unsupported_model")


def writes(engine: ServingEngine | HearingEngine | ProgramEngine) -> TypeIs[ServingEngine]:
    """Check whether it is a text engine."""
    return not (hasattr(engine, "hear") or hasattr(engine, "executor"))


def runs_programs(engine: ServingEngine | HearingEngine | ProgramEngine) -> TypeIs[ProgramEngine]:
    """Check whether it is an engine of foreign programs."""
    return hasattr(engine, "executor")


def of(request: Request) -> Service:
    """Return the service of the application that this request came to."""
    service: Service = request.app.state.service
    return service
