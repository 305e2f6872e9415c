"""Errors in the format of the called interface."""

from __future__ import annotations

from starlette.responses import Response

from ..base.errors import HeadraceError
from .connection import openai_error_frame
from .errors import error_body, error_response, inference_error
from .routes.messages.serve import error_reply, error_value
from .routes.ollama.reply import error_line
from .routes.ollama.reply import error_reply as ollama_reply
from .wire import named_frame

ANTHROPIC = "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA = "/api"
INFERENCE = "/v2"
COHERE = "/v2/rerank"


def refusal(path: str, error: HeadraceError) -> Response:
    """Build the error in the format of this path's clients."""
    if _below(OLLAMA, path):
        return ollama_reply(error)
    if _below(INFERENCE, path) and path != COHERE:
        return inference_error(error)
    return error_reply(error) if _below(ANTHROPIC, path) else error_response(error)


def last_frame(path: str, error: HeadraceError) -> bytes:
    """Build the error frame that ends a stream of this path."""
    if _below(ANTHROPIC, path):
        return named_frame("error", error_value(error))
    if _below(OLLAMA, path):
        return error_line(error)
    if _below(RESPONSES, path):
        return named_frame("error", {"type": "error", **error_body(error)["error"]})
    return openai_error_frame(error)


def _below(root: str, path: str) -> bool:
    return path == root or path.startswith(root + "/")
