"""Inputs in sealed memory: bounds, handles of this and other processes, and what is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from headrace.base.encodings import SealedHandle
from headrace.base.errors import EngineFault, Overloaded, TooLarge
from headrace.dist.payloads import SealedInputs, read_payload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory of Linux")


def rows(count: int, value: float = 1.0) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.full((count, 8), value, np.float32)


def test_a_handle_gives_the_array_in_this_process_and_in_another() -> None:
    held = SealedInputs().hold("", np.arange(24, dtype=np.float32).reshape(3, 8))
    assert np.array_equal(read_payload(held.source), np.arange(24).reshape(3, 8))
    told = (
        "from headrace.dist.payloads import read_payload\n"
        "from headrace.base.encodings import SealedHandle\n"
        f"print(read_payload(SealedHandle{tuple(held.source)!r}).sum())"
    )
    other = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert float(other.stdout) == 276


def test_nobody_can_change_it() -> None:
    held = SealedInputs().hold("", rows(3))
    for change in (
        lambda at: os.pwrite(at, b"x", 0),
        lambda at: os.ftruncate(at, 4),
        lambda at: os.ftruncate(at, 1 << 20),
    ):
        with pytest.raises(OSError, match="not permitted"):
            change(held.source.descriptor)


def test_bytes_are_counted_in_all_and_by_owner() -> None:
    """48 bytes each: 16 of the token, and a row of 32."""
    payloads = SealedInputs(most=48 * 4, most_of_one=48 * 2)
    mine = [payloads.hold("a", rows(1)) for _ in range(2)]
    with pytest.raises(Overloaded):
        payloads.hold("a", rows(1))
    with pytest.raises(TooLarge, match="at most 96"):
        payloads.hold("b", rows(3))
    others = [payloads.hold(owner, rows(1)) for owner in "bc"]
    with pytest.raises(Overloaded):
        payloads.hold("d", rows(1))
    assert payloads.bytes == 48 * 4
    mine[0].close()
    mine[0].close()
    assert payloads.bytes == 48 * 3
    del mine, others
    gc.collect()
    assert payloads.bytes == 0
    assert not payloads._of


def test_open_files_are_counted_in_all_and_by_owner() -> None:
    payloads = SealedInputs(most_open=4)
    mine = [payloads.hold("a", rows(1)) for _ in range(2)]
    with pytest.raises(Overloaded):
        payloads.hold("a", rows(1))
    others = [payloads.hold(owner, rows(1)) for owner in "bc"]
    with pytest.raises(Overloaded):
        payloads.hold("d", rows(1))
    others.pop().close()
    mine.append(payloads.hold("d", rows(1)))
    del mine, others
    gc.collect()
    assert not payloads._open


def test_small_inputs_leave_files_to_others() -> None:
    """Connections need some, too: whoever has many short sounds is refused before."""
    code = (
        "import os, resource, numpy as np\n"
        "from headrace.base.errors import Overloaded\n"
        "from headrace.dist.payloads import SealedInputs\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "payloads, held = SealedInputs(), []\n"
        "try:\n"
        "    while True: held.append(payloads.hold(str(len(held)), np.zeros((1, 1), np.float32)))\n"
        "except Overloaded: print(len(held))\n"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (other.stdout, other.returncode) == ("32\n", 0), other.stderr


def test_a_closed_one_is_gone_and_its_descriptor_names_nothing_else() -> None:
    payloads = SealedInputs()
    first = payloads.hold("a", rows(3))
    gone = first.source
    first.close()
    with pytest.raises(EngineFault, match="has ended"):
        read_payload(gone)
    second = payloads.hold("b", rows(3, 2.0))
    again = gone._replace(descriptor=second.source.descriptor)
    with pytest.raises(EngineFault, match="has ended"):
        read_payload(again)


@pytest.mark.parametrize("change", [{"rows": 4}, {"width": 4}, {"process": 2**22 + 5}])
def test_a_handle_that_is_not_true_is_refused(change: dict[str, int]) -> None:
    held = SealedInputs().hold("", rows(3))
    with pytest.raises(EngineFault):
        read_payload(held.source._replace(**change))  # type: ignore[arg-type]


def test_other_files_are_no_inputs() -> None:
    """A pipe does not hold the reader up, and an unsealed file is not believed."""
    reading, writing = os.pipe()
    unsealed = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    os.write(unsealed, b"t" * 16 + bytes(32))
    try:
        for descriptor in (reading, writing, unsealed):
            with pytest.raises(EngineFault):
                read_payload(SealedHandle(os.getpid(), descriptor, b"t" * 16, 1, 8))
    finally:
        for descriptor in (reading, writing, unsealed):
            os.close(descriptor)


def test_what_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    payloads = SealedInputs()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        payloads.hold("", rows(3))
    assert set(os.listdir("/proc/self/fd")) == before
    assert payloads.bytes == 0
