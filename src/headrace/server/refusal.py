"""How a layer in front of the routes refuses: in the shape of the interface that was called."""

from __future__ import annotations

from starlette.responses import Response

from ..base.errors import HeadraceError
from .errors import error_response
from .routes.messages.serve import error_reply

ANTHROPIC = "/v1/messages"


def refusal(path: str, error: HeadraceError) -> Response:
    """The error as the clients of this path read it."""
    own = path == ANTHROPIC or path.startswith(ANTHROPIC + "/")
    return error_reply(error) if own else error_response(error)
