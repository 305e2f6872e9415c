"""vLLM's development routes for operators: sleep and wake, cache reset, profile."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest
from ..openapi import replies
from ..service import of
from ..wire import json_response


class SleepReply(TypedDict):
    is_sleeping: bool
    level: int
    kv_bytes: NotRequired[int]
    """Bytes of the KV pool that were freed."""


class SleepingReply(TypedDict):
    is_sleeping: bool
    level: int


class ResetReply(TypedDict):
    blocks: int
    """Cached blocks that were dropped."""


class ProfileReply(TypedDict):
    path: str
    """Path on the server's disk; open the file in ui.perfetto.dev."""
    steps: int
    left_out: int
    """Later steps missing from the profile because the recording was full."""


router = APIRouter(tags=["operator"])


def _only_known(request: Request, *names: str) -> None:
    """Raise `InvalidRequest` for an unknown query parameter: its sender would believe that it had
    an effect."""
    for name in request.query_params:
        if name not in names:
            raise InvalidRequest(
                f"{name[:100]} is not known here; allowed: {', '.join(names)}", param=name[:100]
            )


@router.post("/sleep", responses=replies(SleepReply, bad_query=True))
async def sleep(
    request: Request,
    level: Annotated[int, Query(ge=1, le=2, description="1: KV memory; 2: weights too.")] = 1,
    mode: Annotated[
        Literal["abort", "wait"], Query(description="Treatment of requests in work.")
    ] = "abort",
) -> Response:
    """Free the engine's memory; requests are refused until it is woken."""
    _only_known(request, "level", "mode")
    operations = of(request).engine.operations
    facts = await operations.sleep(level, mode)
    reply: dict[str, Any] = {"is_sleeping": True, "level": operations.asleep}
    if "kv_bytes" in facts:
        reply["kv_bytes"] = int(facts["kv_bytes"])
    return json_response(reply)


@router.post("/wake_up", responses=replies(SleepingReply, bad_query=True))
async def wake_up(
    request: Request,
    tags: Annotated[
        list[Literal["weights", "kv_cache"]],
        Query(description="Parts to wake: all that sleep; fewer are refused."),
    ] = [],  # noqa: B006 - FastAPI copies it
) -> Response:
    """Allocate the memory again; the answer comes when requests are served."""
    _only_known(request, "tags")
    operations = of(request).engine.operations
    asleep = {1: {"kv_cache"}, 2: {"kv_cache", "weights"}}.get(operations.asleep, set())
    if tags and asleep - set(tags):
        raise InvalidRequest(
            f"the engine wakes as a whole: tags must name {' and '.join(sorted(asleep))}, or "
            "nothing",
            param="tags",
        )
    await operations.wake()
    return json_response({"is_sleeping": False, "level": 0})


@router.get("/is_sleeping", responses=replies(SleepingReply, body=False))
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps, and at which level."""
    level = of(request).engine.operations.asleep
    return json_response({"is_sleeping": level > 0, "level": level})


@router.post("/reset_prefix_cache", responses=replies(ResetReply, body=False))
async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached prefixes; later requests recompute them."""
    facts = await of(request).engine.operations.reset_prefix_cache()
    return json_response({"blocks": int(facts["blocks"])})


@router.post("/start_profile", responses=replies(dict[str, bool], bad_query=True))
async def start_profile(request: Request) -> Response:
    """Start recording the engine's steps."""
    await of(request).engine.operations.start_profile()
    return json_response({"recording": True})


@router.post("/stop_profile", responses=replies(ProfileReply, bad_query=True))
async def stop_profile(request: Request) -> Response:
    """Write the recording as a timeline, as `headrace profile` does."""
    made = await of(request).engine.operations.stop_profile()
    return json_response({"path": str(made.path), "steps": made.steps, "left_out": made.left_out})
