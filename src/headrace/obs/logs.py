"""Log lines: text for people, JSON with one schema for machines, without secrets.

A JSON line has `ts` (RFC 3339, UTC), `level`, `logger`, `message` and `pid`. If known, it also has
`request_id`, `trace_id`, `span_id`, and `error` with `stack`. All other `extra=` arguments of the
call are under `fields`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import IO, Any

TOP_FIELDS = ("request_id", "trace_id", "span_id")
HIDDEN = "[hidden]"
_MOST = 8192
"""Characters of a message; the rest is cut, so that no request can fill a disk with one line."""
_MOST_FIELD = 1024
"""Characters of the value of one field."""
_MOST_STACK = 64 * 1024

_SECRETS = re.compile(
    r"""(?ix)
    (?P<head>
        \b(?:authorization|proxy-authorization|x-api-key|api[-_]?key|hf[-_]?token|token|password|
           secret|cookie|set-cookie)\b ["']? \s* [:=] \s* ["']? (?:(?:bearer|basic)\s+)?
        | \bbearer\s+
    )
    (?P<value>[^\s"',;&}\]]{4,})
    | \b(?:sk|hf|pk|hr|ghp|xox[bp])[-_][A-Za-z0-9_-]{8,}
    """
)
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


def hide_secrets(text: str) -> str:
    """Replace text that looks like a key, token, password or cookie."""
    return _SECRETS.sub(lambda found: (found["head"] or "") + HIDDEN, text)


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _cut(text: str, most: int = _MOST) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _visible(text: str) -> str:
    """Return the text on one line, with escapes for unprintable characters.

    So a line cannot control a terminal, and foreign text cannot imitate a line of ours.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class TextFormatter(logging.Formatter):
    """Lines like `12:00:00 INFO headrace.server: message name=value`, one line except stacks."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = _visible(_cut(record.getMessage()))
        fields = "".join(
            f" {name}={_visible(_cut(str(value), _MOST_FIELD))}"
            for name, value in _extra(record).items()
        )
        line = f"{clock} {record.levelname} {record.name}: {message}{fields}"
        if record.exc_info:
            stack = _cut(self.formatException(record.exc_info), _MOST_STACK)
            # Indented: an error may contain a client's text with line breaks.
            line += "".join(f"\n  {_visible(part)}" for part in stack.splitlines())
        return hide_secrets(line)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "ts": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": hide_secrets(_cut(record.getMessage())),
            "pid": record.process,
        }
        extra = _extra(record)
        for name in TOP_FIELDS:
            if name in extra:
                line[name] = _plain(extra.pop(name))
        if record.exc_info and record.exc_info[1] is not None:
            error = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            line["error"] = hide_secrets(_cut(error))
            line["stack"] = hide_secrets(_cut(self.formatException(record.exc_info), _MOST_STACK))
        if extra:
            line["fields"] = {
                name: HIDDEN if _SECRETS.match(f"{name}=xxxx") else _plain(value)
                for name, value in extra.items()
            }
        return json.dumps(line, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    return hide_secrets(_cut(str(value), _MOST_FIELD))


class _SafeHandler(logging.StreamHandler[IO[str]]):
    """Handler that survives an unwritable log (full disk, closed pipe) and counts lost lines."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self.lost = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self.lost += 1


def configure_logs(level: str, form: str, stream: IO[str] | None = None) -> logging.Handler:
    """Send all log lines of this process to `stream` (standard error) as "text" or "json"."""
    handler = _SafeHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, _SafeHandler):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler


def logs_as_configured() -> tuple[str, str]:
    """Return (level, form) of this process, for the processes it starts."""
    root = logging.getLogger()
    form = "json" if any(isinstance(h.formatter, JsonFormatter) for h in root.handlers) else "text"
    return logging.getLevelName(root.level).lower(), form
