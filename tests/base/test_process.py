"""The share of a machine that other programs use, from what Linux counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.base import process
from headrace.base.process import Others, busy_words


class Machine:
    """A fake `/proc` of a machine with this process, and the time."""

    def __init__(self, root: Path) -> None:
        self.root, self.now = root, 0.0
        self.own = root / str(os.getpid())
        (self.own / "task").mkdir(parents=True)
        (self.own / "statm").write_text("1 1 1")

    def at(self, now: float, busy: float, own: float) -> None:
        """Seconds: of the clock, of all processors' work, of this process'."""
        ticks = os.sysconf("SC_CLK_TCK")
        self.now = now
        (self.root / "stat").write_text(f"cpu {busy * ticks:.0f} 0 0 900 0 0 0")
        (self.own / "stat").write_text(f"1 (a name) S {'0 ' * 10}{own * ticks:.0f} 0")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(process.time, "monotonic", lambda: made.now)
    return made


def test_others_are_all_but_this_process(machine: Machine) -> None:
    machine.at(0.0, busy=100.0, own=50.0)
    others = Others()
    machine.at(10.0, busy=119.0, own=51.0)
    assert others.share() == pytest.approx(0.9)
    machine.at(20.0, busy=129.0, own=61.0)
    assert others.share() == pytest.approx(0.0)
    machine.at(30.0, busy=130.0, own=21.0)  # A child with 40 seconds is gone.
    assert others.share() == pytest.approx(0.05)


def test_what_cannot_be_seen_is_not_guessed(machine: Machine) -> None:
    machine.at(0.0, busy=1.0, own=1.0)
    others = Others()
    (machine.root / "stat").unlink()
    assert others.share() is None
    machine.at(1.0, busy=2.0, own=2.0)
    assert others.share() is None
    machine.at(2.0, busy=3.0, own=2.0)
    assert others.share() == pytest.approx(0.5)


def test_figures_of_a_shared_machine_say_so() -> None:
    assert busy_words(None) is None
    assert busy_words(0.02) is None
    assert "used 35% of the processors" in (busy_words(0.35) or "")
