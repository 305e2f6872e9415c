"""Steps and readers of blocks on the same cores: who waits for whom, and never for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from headrace.worker import gaps
from headrace.worker.gaps import Gaps

SOON = 60.0


def beside(work: Callable[[], None]) -> threading.Event:
    """Do it in a thread; the event says that it is done."""
    done = threading.Event()
    threading.Thread(target=lambda: (work(), done.set()), daemon=True).start()
    return done


def step(of: Gaps) -> None:
    of.step_begins()
    of.step_ended()


def test_a_reader_waits_for_the_end_of_a_step() -> None:
    of = Gaps()
    of.wait()  # Nothing runs.
    of.order_begins()
    of.step_begins()
    read = beside(of.wait)
    assert not read.wait(0.05)
    of.step_ended()
    assert read.wait(SOON)


def test_a_step_waits_until_what_was_ordered_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "SHARE", 1e9)
    of = Gaps()
    step(of)
    step(of)  # Nobody reads.
    of.order_begins()
    begun = beside(of.step_begins)
    assert not begun.wait(0.05)
    of.wait()
    of.order_ended()
    assert begun.wait(SOON)


def test_no_step_waits_for_a_disk_that_does_not_answer() -> None:
    of = Gaps()
    of.order_begins()
    step(of)
    assert beside(lambda: step(of)).wait(SOON)
