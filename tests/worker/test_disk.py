"""The disk tier: what it gives back is what was written, whatever happened to the files."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.worker.disk import HEAD_BYTES, DiskTier, StoredBlock, room_for, stored_blocks

PARTS = 6
SIZE = 1000
TENANT = "0" * 16


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(number: int, size: int = SIZE) -> list[memoryview]:
    rng = random.Random(number)
    return [memoryview(bytearray(rng.randbytes(size))) for _ in range(PARTS)]


def tier_of(root: Path, engine: str = "engine", limit: int = 1 << 30) -> DiskTier:
    tier = DiskTier(root, engine, 2, limit)
    tier.look(again=True)
    return tier


def path_of(tier: DiskTier, number: int, group: int = 0) -> Path:
    return tier.folder / TENANT / f"{key(number).hex()}-{group}"


def read(tier: DiskTier, number: int, group: int = 0) -> bool:
    """Read and compare; False where it is not there."""
    found = tier.read(key(number), group, TENANT, PARTS * SIZE, 0)
    assert found is None or found == b"".join(content(number))
    return found is not None


def test_another_process_reads_what_one_wrote(tmp_path: Path) -> None:
    first, second = tier_of(tmp_path), tier_of(tmp_path)
    assert first.write(key(1), 1, TENANT, content(1), 0)
    assert key(1) not in second.exists(1)
    second.look(again=True)
    assert key(1) in second.exists(1)
    assert key(1) not in second.exists(0)
    assert read(second, 1, group=1)
    assert second.nbytes == first.nbytes == HEAD_BYTES + PARTS * SIZE
    first.forget()
    assert not read(second, 1, group=1)
    assert key(1) not in second.exists(1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def flip_head(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    os.truncate(path, HEAD_BYTES + SIZE)


def empty_out(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: HEAD_BYTES + 3 * SIZE] + bytes(3 * SIZE))


@pytest.mark.parametrize("harm", [flip, flip_head, tear, empty_out, lengthen])
def test_what_is_damaged_is_dropped(tmp_path: Path, harm: object) -> None:
    tier = tier_of(tmp_path)
    tier.write(key(1), 0, TENANT, content(1), 0)
    harm(path_of(tier, 1))  # type: ignore[operator]
    assert not read(tier, 1)
    assert not path_of(tier, 1).exists()
    assert key(1) not in tier.exists(0)
    assert tier.write(key(1), 0, TENANT, content(1), 0)
    assert read(tier, 1)


def test_a_block_under_another_name_is_not_believed(tmp_path: Path) -> None:
    tier, other = tier_of(tmp_path), tier_of(tmp_path, "other")
    for number in range(4):
        tier.write(key(number), 0, TENANT, content(number), 0)
    path_of(tier, 0).replace(path_of(tier, 1))  # of other tokens
    path_of(tier, 2).replace(path_of(tier, 2, group=1))  # of another layer group
    path_of(other, 3).parent.mkdir(parents=True)
    path_of(tier, 3).replace(path_of(other, 3))  # of another model or version
    assert not read(tier, 1)
    assert not read(tier, 2, group=1)
    assert not read(other, 3)


def test_what_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    tier.folder.mkdir(parents=True)
    path_of(tier, 1).parent.mkdir()
    os.mkfifo(path_of(tier, 1))
    path_of(tier, 2).mkdir()
    path_of(tier, 3).symlink_to("/etc/passwd")
    tier.look(again=True)
    assert not any(read(tier, number) for number in (1, 2, 3))


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_disk import content, key, tier_of, TENANT
tier = tier_of(Path(sys.argv[1]))
print("begun", flush=True)
number = 0
while True:
    tier.write(key(number % 50), 0, TENANT, content(number % 50), 0)
    number += 1
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_may_be_killed_at_any_time(tmp_path: Path) -> None:
    """After each kill every block is whole, or not there."""
    code = WRITER.format(tests=str(Path(__file__).parent))
    rng = random.Random(1)
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        for _ in range(rng.randint(0, 60)):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        tier = tier_of(tmp_path)
        there = sorted(tier.exists(0))  # type: ignore[call-overload]
        for name in there:
            assert read(tier, int.from_bytes(name, "big"))


DIES = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_disk import content, key, tier_of, TENANT

def life(root, at, half):
    left = at
    def dying(name, call):
        def do(*given):
            nonlocal left
            left -= 1
            if left >= 0:
                return call(*given)
            if half and name == "writev":
                call(given[0], [memoryview(given[1][0])[:7]])
            elif half:
                call(*given)
            os.kill(os.getpid(), signal.SIGKILL)
        return do
    tier = tier_of(root)
    for name in ("open", "writev", "close", "replace"):
        setattr(os, name, dying(name, getattr(os, name)))
    for number in (1, 2):
        tier.write(key(number), 0, TENANT, content(number), 0)

for half in (False, True):
    at, status = 0, 1
    while status:
        root = Path(sys.argv[1], str(half), str(at))
        tier_of(root).write(key(9), 0, TENANT, content(9), 0)
        child = os.fork()
        if not child:
            life(root, at, half)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        at += 1
"""


@pytest.mark.slow
def test_a_writer_may_be_killed_at_each_of_its_calls(tmp_path: Path) -> None:
    """Before each call of the system by which two blocks are written, and behind it, or in the
    midst of the bytes: blocks are whole or not there, others stay, and the next writer goes on."""
    code = DIES.format(tests=str(Path(__file__).parent))
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=600, check=True)
    for half in tmp_path.iterdir():
        lives = [half / str(at) for at in range(len(list(half.iterdir())))]
        assert len(lives) == 2 * 4 + 1, "each call once, and a life to the end"
        found = []
        for folder in lives:
            tier = tier_of(folder)
            names = tier.exists(0)
            assert isinstance(names, set)
            there = sorted(int.from_bytes(name, "big") for name in names)
            assert 9 in there
            assert all(read(tier, number) for number in there)
            assert tier.write(key(1), 0, TENANT, content(1), 0)
            found.append(there)
        assert found[0] == [9]
        assert found[-1] == [1, 2, 9]


FULL = """
import logging, resource, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_disk import content, key, read, tier_of, TENANT
logging.basicConfig(level=logging.WARNING, format="%(message)s")
tier = tier_of(Path(sys.argv[1]))
assert tier.write(key(1), 0, TENANT, content(1), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for number in (2, 3):
    assert not tier.write(key(number), 0, TENANT, content(number), 0)
assert read(tier, 1) and not read(tier, 2)
"""


def test_a_disk_that_takes_no_more_is_said_once(tmp_path: Path) -> None:
    """A file may not grow beyond 2,000 bytes: as on a full disk the write ends in the middle."""
    code = FULL.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("what is computed is not kept") == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_cannot_be_made_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("a file, where the folder should be")
    tier = tier_of(tmp_path)
    with caplog.at_level(logging.WARNING, "headrace.cache"):
        assert not tier.write(key(1), 0, TENANT, content(1), 0)
        assert not tier.write(key(2), 0, TENANT, content(2), 0)
    assert len(caplog.records) == 1
    assert not read(tier, 1)


def test_the_limit_holds_over_all_engines(tmp_path: Path) -> None:
    each = HEAD_BYTES + PARTS * SIZE
    tier_of(tmp_path, "old").write(key(0), 0, TENANT, content(0), 0)
    os.utime(path_of(tier_of(tmp_path, "old"), 0), (1, 1))
    tier = tier_of(tmp_path, limit=10 * each)
    for number in range(30):
        tier.write(key(number), 0, TENANT, content(number), number)
        assert sum(block.nbytes for block in stored_blocks(tier.root)) <= 10 * each
    assert not read(tier_of(tmp_path, "old"), 0)


def test_of_one_prefix_the_deepest_block_goes_first(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    for number in range(6):
        tier.write(key(number), 0, TENANT, content(number), number)
    gone = room_for(stored_blocks(tier.root), 3 * (HEAD_BYTES + PARTS * SIZE))
    depths = [int(block.path.name.partition("-")[0], 16) for block in gone]
    whole_minute = depths == [5, 4, 3]
    assert whole_minute or len(depths) == 3  # A minute may have ended between two writes.


def test_nobody_pushes_out_who_holds_less() -> None:
    today = time.time() - 3600
    flood = [StoredBlock(Path(f"f{n}"), "flood", 10, today + n) for n in range(100)]
    small = [StoredBlock(Path(f"s{n}"), "small", 10, today - 999 + n) for n in range(5)]
    gone = room_for([*flood, *small], 200)
    assert {block.tenant for block in gone} == {"flood"}
    assert sum(block.nbytes for block in gone) == 850
    assert max(block.used for block in gone) < today + 85, "the oldest go first"


def test_a_tenant_has_its_quota_and_the_others_what_they_had(tmp_path: Path) -> None:
    size = HEAD_BYTES + PARTS * SIZE
    tier = DiskTier(tmp_path, "engine", 2, 1 << 30, quota=10 * size)
    small = "1" * 16
    for number in range(3):
        assert tier.write(key(100 + number), 0, small, content(number), 0)
    for number in range(30):
        assert tier.write(key(number), 0, TENANT, content(number), 30 - number)
    held = [block.tenant for block in stored_blocks(tier.root)]
    assert held.count(small) == 3
    assert 9 <= held.count(TENANT) <= 10
    assert read(tier, 29), "the oldest go first"
    assert not read(tier, 0)


def test_a_quota_goes_before_the_limit() -> None:
    today = time.time() - 3600
    blocks = [StoredBlock(Path(f"{n}"), f"{n % 2}", 10, today + n) for n in range(40)]
    blocks += [StoredBlock(Path(f"s{n}"), "small", 10, today) for n in range(5)]
    gone = room_for(blocks, 1000, quota=100)
    assert [sum(block.tenant == name for block in gone) for name in ("0", "1", "small")] == [
        10,
        10,
        0,
    ]
    assert max(block.used for block in gone) == today + 19


READ_ONLY = """
import logging, os, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_disk import content, key, read, tier_of, TENANT
logging.basicConfig(level=logging.WARNING, format="%(message)s")
os.mkdir(sys.argv[1])
assert os.system(f"mount -t tmpfs none {{sys.argv[1]}}") == 0
tier = tier_of(Path(sys.argv[1]))
for number in (1, 2):
    assert tier.write(key(number), 0, TENANT, content(number), 0)
assert os.system(f"mount -o remount,ro {{sys.argv[1]}}") == 0
for number in (3, 4):
    assert not tier.write(key(number), 0, TENANT, content(number), 0)
assert read(tier, 1) and read(tier_of(Path(sys.argv[1])), 2)
tier.make_room()
tier.forget()
print("read")
"""


def test_a_disk_that_may_only_be_read_is_read(tmp_path: Path) -> None:
    """A file system of its own, mounted read-only under the tier."""
    mounted = ["unshare", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"]).returncode:
        pytest.skip("nothing may be mounted here")
    code = READ_ONLY.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [*mounted, sys.executable, "-c", code, str(tmp_path / "disk")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read\n"
    assert done.stderr.count("what is computed is not kept") == 1
