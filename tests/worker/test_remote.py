"""A store that machines share: a real server, and one that fails."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_disk import PARTS, SIZE, TENANT, content, key

from headrace.base.errors import OptionError
from headrace.worker.disk import HEAD_BYTES, DiskTier
from headrace.worker.remote import RedisStore, RemoteTier, SharedStore, open_store
from headrace.worker.stack import Stack


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("redis")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        child.terminate()
        child.wait()


@pytest.fixture(params=["redis", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedStore]:
    if request.param == "redis":
        found = open_store(request.getfixturevalue("server"))
        yield found
        found.forget("headrace")
    else:
        yield open_store(f"file://{tmp_path}/bucket")


def whole(number: int) -> bytes:
    return b"".join(content(number))


def seek(tier: RemoteTier, numbers: range) -> list[bool]:
    return tier.seek([(key(number), 0, TENANT) for number in numbers])


def test_another_machine_finds_what_one_wrote(store: SharedStore) -> None:
    first, second = RemoteTier(store, "engine", 2), RemoteTier(store, "engine", 2)
    for number in range(5):
        assert first.write(key(number), 0, TENANT, content(number), 0)
    assert key(1) not in second.exists(0)
    assert seek(second, range(9)) == [True] * 5 + [False] * 4
    assert key(1) in second.exists(0)
    for number in range(5):
        assert second.read(key(number), 0, TENANT, PARTS * SIZE, 0) == whole(number)
    assert not any(seek(RemoteTier(store, "other", 2), range(5)))
    first.forget()
    assert not any(seek(second, range(5)))
    assert not second.read(key(1), 0, TENANT, PARTS * SIZE, 0)
    assert key(1) not in second.exists(0)


@pytest.mark.parametrize("harm", ["flipped", "short", "long", "another"])
def test_what_is_damaged_is_not_believed(store: SharedStore, harm: str) -> None:
    tier = RemoteTier(store, "engine", 2)
    tier.write(key(1), 0, TENANT, content(1), 0)
    name = tier._name(key(1), 0, TENANT)
    data = store.read(name, 1 << 20)
    assert len(data) == HEAD_BYTES + PARTS * SIZE
    if harm == "another":
        tier.write(key(2), 0, TENANT, content(2), 0)
        data = store.read(tier._name(key(2), 0, TENANT), 1 << 20)
    changed = {
        "flipped": data[:-5] + bytes([data[-5] ^ 16]) + data[-4:],
        "short": data[:-1],
        "long": data + b"more",
        "another": data,
    }[harm]
    store.write(name, changed)
    assert not tier.read(key(1), 0, TENANT, PARTS * SIZE, 0)
    assert key(1) not in tier.exists(0)


def test_a_value_of_another_type_harms_its_own_key_alone(store: SharedStore) -> None:
    """A list in Redis, a folder in a bucket: that block is computed again, all others are read."""
    tier = RemoteTier(store, "engine", 2)
    for number in range(2):
        tier.write(key(number), 0, TENANT, content(number), 0)
    name = tier._name(key(1), 0, TENANT)
    if isinstance(store, RedisStore):
        store._redis.delete(name)
        store._redis.rpush(name, b"x")
    else:
        store.forget(name)
        store.write(f"{name}/below", b"x")
    assert not tier.read(key(1), 0, TENANT, PARTS * SIZE, 0)
    assert key(1) not in tier.exists(0)
    assert tier.answers
    assert tier.read(key(0), 0, TENANT, PARTS * SIZE, 0) == whole(0)


class Broken:
    """A store of which nothing comes but errors."""

    calls = 0

    def __getattr__(self, name: str) -> object:
        def call(*given: object) -> object:
            self.calls += 1
            raise ConnectionError("nobody is there")

        return call


def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    broken = Broken()
    tier = RemoteTier(broken, "engine", 1)  # type: ignore[arg-type]
    assert not any(seek(tier, range(3)))
    assert not tier.answers
    for _ in range(10):
        assert not tier.write(key(1), 0, TENANT, content(1), 0)
        assert not tier.read(key(1), 0, TENANT, PARTS * SIZE, 0)
        assert not any(seek(tier, range(3)))
    assert broken.calls == 1
    tier._refused_until = 0.0
    assert not tier.write(key(1), 0, TENANT, content(1), 0)
    assert broken.calls == 2


def test_a_store_that_fails_again_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    class Ill:
        """A store that is well at times."""

        ill = True

        def exists(self, names: list[str]) -> list[bool]:
            if self.ill:
                raise ConnectionError("nobody is there")
            return [False] * len(names)

    store = Ill()
    tier = RemoteTier(store, "engine", 1)  # type: ignore[arg-type]
    for ill, said in ((True, 1), (True, 1), (False, 1), (True, 2)):
        store.ill, tier._refused_until = ill, 0.0
        seek(tier, range(1))
        assert caplog.text.count("remote context cache fails") == said


def test_a_server_that_is_gone_fails_soon(server: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        tier = RemoteTier(RedisStore(url), "engine", 1)
        begin = time.monotonic()
        assert not any(seek(tier, range(3)))
        assert time.monotonic() - begin < 30


def test_a_disk_stands_before_the_store(store: SharedStore, tmp_path: Path) -> None:
    disk, remote = DiskTier(tmp_path, "engine", 2, 1 << 20), RemoteTier(store, "engine", 2)
    stack = Stack([disk, remote])
    assert stack.write(key(1), 0, TENANT, content(1), 0)
    assert stack.place(0, key(1)) == 0
    disk.drop(key(1), 0, TENANT)
    assert stack.place(0, key(1)) == 1
    assert stack.read(key(1), 0, TENANT, PARTS * SIZE, 0) == whole(1)
    assert stack.write(key(1), 0, TENANT, content(1), 0)
    assert stack.place(0, key(1)) == 0


def test_what_is_no_store_is_refused() -> None:
    for url in ("http://host/x", "nothing", "redis://host:port:x"):
        with pytest.raises(OptionError, match=r"no store|redis"):
            open_store(url)
