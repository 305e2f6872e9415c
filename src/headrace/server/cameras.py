"""Cameras of one session over a websocket: frames in, answers out, the newest frame first.

A camera holds at most one waiting frame and one in work, at any sending and reading speed. A newer
frame replaces the waiting one, which is counted. Every answer carries its frame's age, a number,
our clock's time and a CRC. So a client detects a lost, repeated, late or damaged answer. A camera
that stops sending is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ..base.errors import DeadlineMissed, HeadraceError, InvalidRequest, NotFound, Overloaded
from ..base.foreign import Undecodable, any_json, json_reader
from ..base.tiling import Reducing
from ..engine.programs.cameras import CameraInput, CaptureClock, MotionFilter
from ..engine.programs.ocr import OcrPipeline, pipeline_names
from ..media import decode_picture
from ..programs.confined import MOST_REGION
from ..programs.ocr.pixels import Codes
from ..programs.ocr.steps import LONGEST
from ..programs.rows import Array
from ..sched.deadlines import INTERACTIVE
from .access import log_exchange
from .body import converted
from .caller import CALLER
from .errors import error_body, internal_error
from .generation import Usage
from .program_fields import CameraBody
from .protocol import SOCKET_BYTES
from .reading import LIMITS, OcrRoutes
from .session import SessionReply, read_messages
from .socket import Socket
from .tensors import shown
from .wire import encode

if TYPE_CHECKING:
    from .service import Service

log = logging.getLogger("headrace.server")

MOST_CAMERAS = 16
"""Maximum cameras of a session."""
MOST_HEADER = 1024
"""Maximum bytes of a frame's header."""
LOST_PERIODS, LOST_SECONDS = 3, 0.2
"""Periods without a frame after which a camera is reported lost, and the minimum in seconds."""
LEAST_STD = 1e-6
MANY = 4096
"""Elements of an output above which it is sent as base64."""


class FrameHeader(msgspec.Struct):
    """First line of a frame's message."""

    camera: str
    sequence: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    captured: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    """Seconds of the camera's clock."""
    crc32: int | None = None
    """CRC-32 of the data."""


_read_header = json_reader(FrameHeader)


class DamagedFrame(InvalidRequest):
    code = "frame_damaged"


class RepeatedFrame(InvalidRequest):
    code = "frame_repeated"


@dataclass(slots=True)
class Frame:
    """One complete frame."""

    data: bytes
    sequence: int
    captured: float
    received: float
    delay: float
    """Transit time in seconds, as far as it is known."""
    held: int = 0
    """Bytes counted as held for it."""


class CameraReply(SessionReply):
    """Response to a handshake."""

    def __init__(self, service: Service, ocr: OcrRoutes, request: Any) -> None:
        super().__init__(service, request)
        self._ocr = ocr

    async def serve(self, scope: Scope, receive: Receive, send: Send, socket: Socket) -> bool:
        session = CameraSession(self._service, self._ocr, self._account, send, scope)
        return await session.run(receive, socket)


class CameraSession:
    """Cameras of one client."""

    def __init__(
        self,
        service: Service,
        ocr: OcrRoutes,
        account: Any,
        send: Send,
        scope: MutableMapping[str, Any],
    ) -> None:
        self.service, self.ocr, self.account = service, ocr, account
        self._send, self._scope = send, scope
        self._sending = asyncio.Lock()
        self._number = 0
        self._cameras: dict[str, Camera] = {}

    async def run(self, receive: Receive, socket: Socket) -> bool:
        """Serve until the client leaves (return False), or the server has a reason to end the
        session."""
        try:
            return await read_messages(receive, socket, self.service, self._take, self.error)
        finally:
            for camera in list(self._cameras.values()):
                await self.close(camera)

    async def tell(self, kind: str, **fields: Any) -> None:
        """Send an event; waits until the client reads. Its last field is the CRC-32 of the text
        before it."""
        async with self._sending:
            self._number += 1
            head = {"type": kind, "number": self._number, "monotonic": time.monotonic()}
            body = encode({**head, **fields})[:-1]
            body += b',"crc32":%d}' % zlib.crc32(body)
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def error(self, error: HeadraceError, **fields: Any) -> None:
        await self.tell("error", **fields, **error_body(error))

    def hold(self, size: int) -> None:
        """Count bytes of frames as held. Raises `Overloaded`."""
        if size > 0:
            self.service.bodies.take(self._scope, size)
        else:
            self.service.bodies.give(self._scope, -size)

    async def _take(self, message: Message) -> None:
        name = None
        try:
            data = message.get("bytes")
            if data is not None:
                header, data = _header(bytes(data))
                name = header.camera
                self._find(name).put(header, data)
                return
            event = _decoded(message.get("text") or "")
            kind, name = event.pop("type", None), event.get("camera")
            if kind == "camera.open":
                self._open(converted(event, CameraBody))
            elif kind == "camera.close":
                await self.close(self._find(name))
                await self.tell("camera.closed", camera=name)
            else:
                raise InvalidRequest("type must be camera.open or camera.close", param="type")
        except HeadraceError as error:
            named = {"camera": name} if isinstance(name, str) and len(name) <= 64 else {}
            await self.error(error, **named)

    def _find(self, name: Any) -> Camera:
        found = self._cameras.get(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidRequest(f"no camera {name!r:.80} is open", param="camera")
        return found

    def _open(self, body: CameraBody) -> None:
        if body.camera in self._cameras:
            raise InvalidRequest(f"the camera {body.camera!r} is open", param="camera")
        if len(self._cameras) >= MOST_CAMERAS:
            raise Overloaded(f"a session has at most {MOST_CAMERAS} cameras")
        camera = self._cameras[body.camera] = Camera(self, body)
        self.ocr.engine.metrics.cameras.inc()
        camera.begin()

    async def close(self, camera: Camera) -> None:
        if self._cameras.get(camera.name) is camera:  # Its own task closes it, too.
            del self._cameras[camera.name]
            self.ocr.engine.metrics.cameras.dec()
            await camera.end()


class Camera:
    """One camera and the program that runs on its frames."""

    def __init__(self, session: CameraSession, body: CameraBody) -> None:
        """Find its program. Raises `ModelNotFound`, and `InvalidRequest` if the program takes no
        picture."""
        self.name, self._body, self._session = body.camera, body, session
        self._engine = session.ocr.engine
        self._deadline = body.deadline or body.period
        self._pipeline: OcrPipeline | None = None
        self._input: CameraInput | None = None
        if body.model in pipeline_names(self._engine.programs):
            if body.format == "tensor" or body.outputs:
                wrong = f"{body.model} reads pictures and answers lines"
                raise InvalidRequest(f"{wrong}; leave out format and outputs", param="format")
            self._pipeline = session.ocr.find(body.model)
        else:
            self._program = self._engine.find(body.model)
            self._input = CameraInput.of(
                self._program,
                body.size,
                scale=body.scale,
                mean=body.mean,
                std=body.std,
                reversed=body.channels == "bgr",
            )
            there = [one.name for one in self._program.confined.inspection.described.graph.outputs]
            if strange := sorted(set(body.outputs or ()) - set(there)):
                wrong = f"no output {strange[0]!r:.80}; the outputs are: {', '.join(there)}"
                raise InvalidRequest(wrong, param="outputs")
        if body.motion and body.format == "tensor":
            raise InvalidRequest("motion is of pictures; a tensor has none", param="motion")
        if any(abs(one) < LEAST_STD for one in body.std):
            raise InvalidRequest(f"std must not be 0, nor within {LEAST_STD} of it", param="std")
        self._stream: str | None = None
        self._clock = CaptureClock()
        self._motion = MotionFilter(body.motion, body.refresh)
        self._lost_after = body.lost_after or max(LOST_SECONDS, LOST_PERIODS * body.period)
        self._waiting: Frame | None = None
        self._came = asyncio.Event()
        self._last = 0
        """Sequence number of the newest frame."""
        self._counts = dict.fromkeys(("answered", "dropped", "still", "missing", "lost"), 0)
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to answer its frames."""
        serving = self._serve()
        self._task = self._session.service.tasks.errand(f"camera {self.name}", serving)

    async def end(self) -> None:
        """End its work, and release what it holds."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._waiting is not None:
            self._session.hold(-self._waiting.held)
        self._leave()
        log_exchange(
            logging.INFO,
            {"path": "/v1/cameras", "camera": self.name, **self._counts},
            {"headrace.account": self._session.account, "headrace.usage": Usage(self._body.model)},
        )

    def _leave(self) -> None:
        if self._stream is not None and self._pipeline is None:
            with contextlib.suppress(NotFound):
                self._engine.close_stream(self._stream, CALLER.get().owner, self._program)

    def _note(self, outcome: str) -> None:
        self._engine.metrics.frames.labels(self._body.model, outcome).inc()

    # Frames

    def put(self, header: FrameHeader, data: bytes) -> None:
        """Accept a frame; it replaces the waiting one. Raises `InvalidRequest`, `Overloaded`."""
        now, sequence = time.monotonic(), header.sequence
        if sequence <= self._last:
            self._note("frame_repeated")
            why = "the camera stands still, or is to be opened again"
            raise RepeatedFrame(f"the frame {sequence} came after frame {self._last}: {why}")
        if header.crc32 not in (None, zlib.crc32(data)):
            self._note("frame_damaged")
            raise DamagedFrame(f"the CRC-32 of frame {sequence} is {zlib.crc32(data)}")
        if self._last:
            self._counts["missing"] += sequence - self._last - 1
        self._last = sequence
        delay = self._clock.delay(header.captured, now)
        frame = Frame(data, sequence, header.captured, now, delay)
        if self._waiting is not None:
            self._counts["dropped"] += 1
            self._note("dropped")
            self._session.hold(-self._waiting.held)
            self._waiting = None
        self._hold(frame, len(data))
        self._waiting = frame
        self._came.set()

    async def _serve(self) -> None:
        """Answer frames one by one; report the camera lost while none arrive."""
        try:
            await self._admit(opens=True)
        except HeadraceError as error:
            await self._session.error(error, camera=self.name)
            self._task = None  # `end` would wait for this task itself.
            await self._session.close(self)
            return
        lost = False
        while True:
            try:
                async with asyncio.timeout(None if lost else self._lost_after):
                    await self._came.wait()
            except TimeoutError:
                lost = True
                self._counts["lost"] += 1
                self._engine.metrics.losses.labels(self._body.model).inc()
                await self._tell("lost", self._last, seconds=self._lost_after)
                continue
            lost = False
            self._came.clear()
            frame, self._waiting = self._waiting, None
            if frame is None:
                continue  # The newer frame that replaced it was refused.
            try:
                await self._answer(frame)
            finally:
                self._session.hold(-frame.held)

    def _hold(self, frame: Frame, size: int) -> None:
        """Count bytes as held for a frame. Raises `Overloaded`."""
        self._session.hold(size)
        frame.held += size

    async def _answer(self, frame: Frame) -> None:
        fields: dict[str, Any] = {}
        try:
            found = await self._found(frame)
            kind, outcome = ("still", "still") if found is None else ("answer", "run")
            fields = found or {}
        except HeadraceError as error:
            kind, outcome, fields = "failed", error.code or error.type, error_body(error)
        except Exception:  # the border of one frame
            log.exception("a camera's frame")
            kind, outcome, fields = "failed", "bug", error_body(internal_error())
        if kind == "failed":
            self._motion.forget()  # Its change was not answered: the next frame must be.
        self._note(outcome)
        self._counts["answered" if kind == "answer" else "still"] += kind != "failed"
        age = frame.delay + time.monotonic() - frame.received
        self._engine.metrics.age.labels(self._body.model).observe(age)
        times = {"captured": frame.captured, "received": frame.received, "age": age}
        await self._tell(kind, frame.sequence, **times, **fields)

    async def _tell(self, kind: str, sequence: int, **fields: Any) -> None:
        counts = {**self._counts, "clock_jumps": self._clock.jumps}
        await self._session.tell(
            f"camera.{kind}", camera=self.name, sequence=sequence, counts=counts, **fields
        )

    async def _found(self, frame: Frame) -> dict[str, Any] | None:
        """Run on a frame; return None if nothing moved. Raises the errors of a run."""
        service = self._session.service
        if self._session.account is not None:
            self._session.account.count()
        if self._body.format == "tensor":
            assert self._input is not None
            return await self._outputs(frame, self._input.of_bytes(frame.data))
        rule = Reducing(LONGEST)
        picture = await service.decoders.run(decode_picture, frame.data, rule, LIMITS, "frame")
        pixels: Codes = picture.tiles[0]
        self._hold(frame, pixels.nbytes)
        if not await service.hands.run(self._motion.passes, pixels, frame.received, large=True):
            return None
        if self._pipeline is not None:
            lines = await self._session.ocr.lines(
                self._pipeline, lambda: picture, urgency=INTERACTIVE, timeout=self._left(frame)
            )
            return {"lines": lines}
        assert self._input is not None
        feed = await service.hands.run(self._input.of_pixels, pixels, large=True)
        return await self._outputs(frame, feed)

    def _left(self, frame: Frame) -> float:
        """Return the seconds left until a frame's deadline. Raises `DeadlineMissed`."""
        took = time.monotonic() - frame.received
        if took >= self._deadline:
            raise DeadlineMissed(f"not begun: its frame is {took * 1e3:.1f} ms old")
        return self._deadline - took

    async def _outputs(self, frame: Frame, feed: Array) -> dict[str, Any]:
        assert self._input is not None
        owner, name = CALLER.get().owner, self._input.port.name
        self._hold(frame, feed.nbytes)
        for again in (True, False):
            try:
                found = await self._engine.run(
                    self._program,
                    {name: feed},
                    timeout=self._left(frame),
                    stream=self._stream,
                    owner=owner,
                )
                break
            except NotFound:
                if not again:
                    raise
                await self._admit()  # Its stream ended while the camera was silent.
        wanted = {one: found[one] for one in self._body.outputs or found}
        self._hold(frame, sum(one.nbytes for one in wanted.values()))

        def written() -> list[dict[str, Any]]:
            return [shown(one, wanted[one], MANY) for one in wanted]

        many = sum(one.size for one in wanted.values()) > MANY
        hands = self._session.service.hands
        return {"outputs": await hands.run(written, large=True) if many else written()}

    async def _admit(self, *, opens: bool = False) -> None:
        """Admit its runs if they and all others will meet their deadlines. Raises `Overloaded`.

        A pipeline runs once per line of its picture, so it has deadlines but no guarantee.
        """
        fields: dict[str, Any] = {"admitted": self._pipeline is None, "model": self._body.model}
        if self._input is not None:
            most = SOCKET_BYTES if self._body.format == "tensor" else MOST_REGION
            stream = await self._engine.open_stream(
                self._program,
                {self._input.port.name: self._input.shape},
                period=self._body.period,
                deadline=self._deadline,
                owner=CALLER.get().owner,
                most=most,
            )
            self._stream = stream.id
            admitted = stream.admitted
            fields |= {
                "shape": self._input.shape,
                "run_seconds": admitted.stream.seconds,
                "utilisation": admitted.stream.utilisation,
                "lane": admitted.lane,
            }
        if opens:
            times = {"period": self._body.period, "deadline": self._deadline}
            await self._session.tell("camera.opened", camera=self.name, **fields, **times)


def _header(data: bytes) -> tuple[FrameHeader, bytes]:
    """Split a frame's message into its header, one line of JSON, and its data."""
    end = data.find(b"\n", 0, MOST_HEADER)
    try:
        return _read_header(data[: max(0, end)]), data[end + 1 :]
    except Undecodable as error:
        wrong = f"a frame begins with a line of JSON of at most {MOST_HEADER} bytes"
        raise InvalidRequest(f"{wrong}: {error}", param="frame") from None


def _decoded(text: str) -> dict[str, Any]:
    try:
        found = any_json(text)
    except Undecodable:
        raise InvalidRequest("the text is not valid JSON", code="invalid_json") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the text is no JSON object", code="invalid_json")
    return found
