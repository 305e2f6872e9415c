"""Errors that know their HTTP status.

Every refusal in Headrace is one of these. It names the field, the mistake and the allowed values.
It carries an HTTP status and an OpenAI error type for the server, and an exit code for the command
line. Anything else that escapes is a bug and is reported as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import ClassVar


class HeadraceError(Exception):
    """Base of all typed errors.

    `message` is a sentence for the user, `param` the field that it is about (`"sampling.top_p"`).
    `retry_after` is the seconds after which the same request may succeed. `code` is for programs,
    if it differs from the class's.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: str | None = None
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.code = code or self.code


class InvalidRequest(HeadraceError):
    """The request itself is wrong; the same request will never succeed."""

    status = 400
    type = "invalid_request_error"
    exit_code = 2


class ContextOverflow(InvalidRequest):
    """Prompt, or prompt and requested output, exceed the served context."""

    code = "context_length_exceeded"


class NotFound(HeadraceError):
    """The named model, adapter, route or object does not exist here."""

    status = 404
    type = "not_found_error"
    exit_code = 2


class ModelNotFound(NotFound):
    code = "model_not_found"


class TooLarge(InvalidRequest):
    """A body, prompt, schema or file is over its bound."""

    status = 413
    code = "request_too_large"


class Unauthorised(HeadraceError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(HeadraceError):
    status = 403
    type = "permission_error"


class RateLimited(HeadraceError):
    """This caller is over its own limit; others are not affected."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Overloaded(HeadraceError):
    """The server is full or is not ready; retry after `retry_after` seconds."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class ShuttingDown(Overloaded):
    """The server is shutting down and accepts nothing new; another one may."""

    code = "shutting_down"


class EngineDead(Overloaded):
    """The engine stopped while this request was in it."""

    code = "engine_dead"


class EngineFault(HeadraceError):
    """A step failed; the requests that were in it end with this error."""

    status = 500
    type = "internal_error"
    code = "engine_fault"


class OptionError(HeadraceError):
    """An option or a combination of options cannot work; found before anything is loaded."""

    status = 400
    type = "invalid_request_error"
    exit_code = 2


class ModelFileError(HeadraceError):
    """A model file is damaged, lies about itself, or is of a kind that is never read (pickle)."""

    type = "model_file_error"
    exit_code = 3


class UnsupportedModel(HeadraceError):
    """Architecture, tensor type or config value that Headrace does not support; lists supported
    ones."""

    type = "unsupported_model_error"
    exit_code = 3


class RunStopped(HeadraceError):
    """A program's run ended at its time limit (`code` "time") or by a cancel ("cancelled")."""

    status = 504
    type = "run_stopped_error"


class DeadlineMissed(HeadraceError):
    """Work was not begun because it could no longer end in time, or was stopped at its deadline;
    the message says which of the two, and why."""

    status = 504
    type = "deadline_error"
    code = "deadline_missed"


class Untrusted(HeadraceError):
    """Bytes do not match a digest or a signature; names it."""

    type = "untrusted_error"
    exit_code = 6


class PackageAbsent(HeadraceError):
    """The request needs a package of an extra that is not installed; names it."""

    type = "package_absent_error"
    exit_code = 3


class DownloadError(HeadraceError):
    """No source could deliver the file: lists those tried, and each one's answer."""

    type = "download_error"
    exit_code = 4


class Unreachable(HeadraceError):
    """A server that a command needs does not answer, or has left."""

    status = 503
    code = "unreachable"
    exit_code = 69


class DoesNotFit(HeadraceError):
    """The memory plan does not fit; names the options that would help and their values."""

    type = "does_not_fit_error"
    exit_code = 5


class Undecodable(ValueError):
    """Bytes that are not in the expected format; names the fault."""

    well_formed = False
    """Whether they are valid JSON or MessagePack, of a type other than expected."""


def one_of(
    value: object, allowed: Collection[str], param: str, kind: type[HeadraceError] = InvalidRequest
) -> None:
    """Raise `kind` unless `value` is among `allowed`, which the message lists."""
    if value not in allowed:
        raise kind(f"{param} must be one of {', '.join(allowed)}, not {value!r:.80}", param=param)


@contextmanager
def file_errors(kind: type[HeadraceError], what: str, param: str | None = None) -> Iterator[None]:
    """Raise `kind` with "`what`: reason" if the system refuses a file, or its text is not UTF-8."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{what}: {reason}", param=param) from None
