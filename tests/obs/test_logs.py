from __future__ import annotations

import io
import json
import logging

import pytest

from headrace.obs.logs import HIDDEN, configure_logs, hide_secrets, logs_as_configured


@pytest.fixture
def root() -> object:
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def lines(form: str, root: object) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    configure_logs("info", form, stream)
    return stream, logging.getLogger("headrace.test")


def test_json_has_one_schema(root: object) -> None:
    stream, log = lines("json", root)
    log.info("served %d", 3, extra={"request_id": "r1", "tokens": 5, "note": "a\nb"})
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception("failed")
    log.debug("not shown")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert set(first) == {
        "ts",
        "level",
        "logger",
        "message",
        "pid",
        "request_id",
        "fields",
    }
    assert first["message"] == "served 3"
    assert first["level"] == "info"
    assert first["fields"] == {"tokens": 5, "note": "a\nb"}
    assert first["ts"].endswith("Z")
    assert second["error"] == "ValueError: wrong"
    assert "Traceback" in second["stack"]
    assert logs_as_configured() == ("info", "json")


def test_text_is_one_line(root: object) -> None:
    stream, log = lines("text", root)
    log.warning("two\nlines", extra={"request_id": "r1"})
    assert stream.getvalue().count("\n") == 1
    assert "WARNING headrace.test: two\\nlines request_id=r1" in stream.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer abcdEFGH1234",
        "authorization=Basic dXNlcjpwYXNz",
        '{"api_key": "abcdEFGH1234"}',
        "x-api-key: abcdEFGH1234",
        "url?token=abcdEFGH1234&a=1",
        "HF_TOKEN=hf_abcdEFGH1234",
        "the key sk-abcdEFGH1234 was used",
        "Cookie: abcdEFGH1234",
        "password: abcdEFGH1234",
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_secrets_never_reach_a_line(text: str, form: str, root: object) -> None:
    stream, log = lines(form, root)
    log.info("%s", text)
    log.info("x", extra={"api_key": "abcdEFGH1234", "other": text})
    try:
        raise ValueError(text)
    except ValueError:
        log.exception("failed")
    assert HIDDEN in stream.getvalue()
    for secret in ("abcdEFGH1234", "dXNlcjpwYXNz"):
        assert secret not in stream.getvalue().replace("raise", "")


def test_ordinary_words_stay() -> None:
    for text in ("prompt_tokens: 1234567", "max_tokens=128000", "a bearer of news", "tokens: 5555"):
        assert hide_secrets(text) == text


def test_a_long_message_is_cut(root: object) -> None:
    stream, log = lines("json", root)
    log.info("x" * 10**6)
    assert len(stream.getvalue()) < 10_000


def test_a_full_disk_disturbs_nobody(root: object) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    handler = configure_logs("info", "text", Full())
    logging.getLogger("headrace.test").info("hello")
    assert handler.lost == 1  # type: ignore[attr-defined]


def test_a_clients_words_are_no_line_of_ours(root: object) -> None:
    stream, log = lines("text", root)
    forged = "/v1/zz\n12:00:00 ERROR headrace.engine: FORGED\x1b[31m\r\u2028\x85 \u202e"
    log.info("exchange", extra={"path": forged})
    log.info("a message\x1b[2J with %s", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        log.exception("failed")
    text = stream.getvalue()
    assert all(char.isprintable() or char == "\n" for char in text)
    assert not any(line.startswith("12:00:00 ERROR") for line in text.splitlines())
    assert "\\n12:00:00 ERROR headrace.engine: FORGED\\x1b[31m" in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_field_fills_a_disk(root: object, form: str) -> None:
    stream, log = lines(form, root)
    log.info("exchange", extra={"path": "a" * 10**6, "request_id": "b" * 10**6})
    try:
        raise ValueError("c" * 10**6)
    except ValueError:
        log.exception("failed")
    assert len(stream.getvalue()) < 100_000


def test_our_own_keys_are_hidden() -> None:
    assert hide_secrets("GET /v1/hr-Zk3vBq0pRkLw9sYt") == f"GET /v1/{HIDDEN}"
