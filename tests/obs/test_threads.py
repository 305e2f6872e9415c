"""Long-lived threads: an error in one is counted and shown, and ends nothing."""

from __future__ import annotations

import threading

import pytest

from headrace.base.foreign import Undecodable
from headrace.obs.threads import ThreadWatch


def test_a_kept_thread_goes_on_after_what_it_raises(caplog: pytest.LogCaptureFixture) -> None:
    watch, go_on = ThreadWatch(), threading.Event()
    turns: list[dict[str, str]] = []
    entered = threading.Event()

    def work() -> None:
        turns.append(watch.down)
        if len(turns) == 1:
            raise ValueError("the first")
        entered.set()
        go_on.wait(60)

    thread = watch.keep("sweep", work, pause=0.2)
    while not watch.down:
        assert thread.is_alive()
    assert watch.down == {"sweep": "ValueError: the first"}
    assert watch.news() == (["sweep"], {"sweep": "ValueError: the first"})
    assert entered.wait(60), "it never ran again"
    assert watch.down == {}
    assert watch.news() == ([], {})
    assert watch.news() is None
    go_on.set()
    thread.join(60)
    assert turns == [{}, {}]
    assert "the first" in caplog.text


def test_an_errand_that_fails_is_counted_and_nothing_is_down() -> None:
    watch = ThreadWatch()

    def work(what: str) -> None:
        raise KeyError(what)

    thread = watch.errand("dump", work, "lost")
    assert thread is not None
    thread.join(60)
    assert dict(watch.failures) == {"dump": 1}
    assert not watch.down


def test_an_errand_without_a_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    watch = ThreadWatch()
    assert watch.errand("line", print) is None
    assert dict(watch.failures) == {"line": 1}


def test_a_message_that_fails_is_skipped_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch, served = ThreadWatch(), []
    for number in range(1000):
        with watch.skipping("lending"):
            if number % 2:
                raise Undecodable("no UTF-8")
            served.append(number)
    assert len(served) == 500
    assert watch.failures["lending"] == 500
    assert len(caplog.records) < 10
    assert "no UTF-8" in caplog.text
    assert "Traceback" not in caplog.text
