"""The file of repacked weights: used only when whole and of this very model; else never missed."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.base.errors import ModelNotFound
from headrace.base.modelfiles import ModelFiles
from headrace.loader import cached_models, panelfile, remove
from headrace.loader.kept import kept_panels
from headrace.loader.panelfile import FORMAT, HUGE, MAGIC, PAGE, PanelFile, PanelFileWrong, Part
from headrace.loader.panels import PanelShelf, kept_path, portable
from headrace.loader.progress import ProgressLine

IDENTITY = {"layout": "1", "source": "/model.gguf"}
SIZES = {"small": 100, "one page": PAGE, "long": 3 * HUGE + 17}


def parts(seed: int = 0) -> list[Part]:
    generator = np.random.default_rng(seed)
    return [
        Part(name, "Q4_0", (16, size), generator.integers(0, 256, size, dtype=np.uint8))
        for name, size in SIZES.items()
    ]


def model(folder: Path, size: int = 3 << 20, seed: int = 0) -> ModelFiles:
    path = folder / "model.gguf"
    path.write_bytes(np.random.default_rng(seed).bytes(size))
    return cast(ModelFiles, SimpleNamespace(path=path, weights=(path,)))


def start(
    files: ModelFiles, folder: Path, layout: str = "1", **options: Any
) -> tuple[PanelShelf, dict[str, np.ndarray], set[str]]:
    """One start of a model: → (the shelf, its weights, the names of those that were packed)."""
    shelf = PanelShelf(files, folder, layout, **{"least": 0, **options})
    weights: dict[str, np.ndarray] = {}
    packed = set()
    for part in parts():
        found = shelf.find(part.name, part.kind, part.shape, part.data.nbytes)
        if found is None:
            packed.add(part.name)
            weights[part.name] = part.data

            def replace(data: np.ndarray, name: str = part.name) -> None:
                weights[name] = data

            if shelf.keep(part.name, part.kind, part.shape, part.data, replace):
                part.data[:] = 0  # Nobody needs it any more.
        else:
            weights[part.name] = found
    shelf.finish()
    for part in parts():
        assert np.array_equal(weights[part.name], part.data)
    return shelf, weights, packed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "panels"


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return model(tmp_path)


def test_what_was_written_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.panels"
    panelfile.write(path, IDENTITY, parts())
    file = PanelFile(path, IDENTITY)
    file.check()
    assert list(file.entries) == list(SIZES)
    for part in parts():
        view = file.view(part.name)
        assert np.array_equal(view, part.data)
        assert view.ctypes.data % PAGE == 0
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert os.listdir(tmp_path) == ["x.panels"]
    file.copy_to_huge_pages()
    assert all(np.array_equal(file.view(part.name), part.data) for part in parts())


def test_pieces_of_any_size_keep_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panelfile, "STAGE", HUGE)
    generator = np.random.default_rng(1)
    many = [
        Part(f"w{i}", "F32", (1, 1), generator.integers(0, 256, size, dtype=np.uint8))
        for i, size in enumerate((1, HUGE - PAGE, PAGE + 1, HUGE, 5, 2 * HUGE - 1, 64))
    ]
    panelfile.write(tmp_path / "x", IDENTITY, many)
    file = PanelFile(tmp_path / "x", IDENTITY)
    file.check()
    assert all(np.array_equal(file.view(part.name), part.data) for part in many)


def test_the_second_start_packs_nothing(files: ModelFiles, folder: Path) -> None:
    shelf, _, packed = start(files, folder)
    assert packed == set(SIZES)
    assert shelf.outcome in ("mapped", "copied")
    shelf, weights, packed = start(files, folder)
    assert not packed
    assert str(folder) in shelf.reason
    # Somebody cleans the cache while it serves: what is mapped stays.
    shelf.path.unlink()
    assert all(np.array_equal(weights[part.name], part.data) for part in parts())


def test_panels_of_a_content_serve_it_wherever_it_lies(
    tmp_path: Path, files: ModelFiles, folder: Path
) -> None:
    assert kept_path(files, folder) is None
    assert portable(files, folder, "1") is None
    start(files, folder)
    brought = portable(files, folder, "1")
    assert brought is not None
    whole = brought.read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.gguf").write_bytes(files.path.read_bytes())
    moved = cast(ModelFiles, SimpleNamespace(path=(path := tmp_path / "other" / "model.gguf"),
                                             weights=(path,)))  # fmt: skip
    shelf, _, packed = start(moved, folder)
    assert not packed
    assert shelf.reason.endswith(brought.name) or brought.name in shelf.reason
    assert kept_path(moved, folder) == brought
    # Of equal panels, made elsewhere and of weights in another place, the same bytes.
    start(moved, tmp_path / "second")
    again = portable(moved, tmp_path / "second", "1")
    assert again is not None
    assert (again.name, again.read_bytes()) == (brought.name, whole)
    # Another layout, another content, or damage: they are packed anew, into a file of their own.
    assert start(moved, folder, "2")[2] == set(SIZES)
    for path in folder.iterdir():
        path.unlink()
    brought.write_bytes(whole[:HUGE] + bytes([whole[HUGE] ^ 1]) + whole[HUGE + 1 :])
    assert start(moved, folder)[2] == set(SIZES)
    assert kept_path(moved, folder) != brought
    with pytest.raises(PanelFileWrong, match="of another file"):
        PanelFile(brought, {"layout": "1", "content": "0" * 16})


def test_little_is_not_worth_a_file(files: ModelFiles, folder: Path) -> None:
    shelf, _, _ = start(files, folder, least=1 << 30)
    assert not folder.exists()
    assert shelf.outcome == "memory"


@pytest.mark.parametrize("cut", [0, 10, 47, 60, 500, HUGE, HUGE + 5, 3 * HUGE, -1])
def test_a_truncated_file_is_made_anew(files: ModelFiles, folder: Path, cut: int) -> None:
    shelf, weights, _ = start(files, folder)
    del weights
    whole = shelf.path.read_bytes()
    shelf.path.write_bytes(whole[:cut])
    _, _, packed = start(files, folder)
    assert packed == set(SIZES)
    assert start(files, folder)[2] == set()


@pytest.mark.parametrize("at", [0, 9, 13, 20, -2, -200, HUGE, HUGE + 5_000, 3 * HUGE + 1, -4_000])
def test_one_wrong_bit_is_seen(files: ModelFiles, folder: Path, at: int) -> None:
    shelf, _, _ = start(files, folder)
    whole = bytearray(shelf.path.read_bytes())
    whole[at] ^= 4
    shelf.path.write_bytes(bytes(whole))
    assert start(files, folder)[2] == set(SIZES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 0),
        ("size", HUGE),
        ("size", "x"),
        ("size", -HUGE),
        ("size", 1 << 70),
        ("size", None),
        ("size", float("inf")),
        ("size", float("nan")),
        ("entries", [1]),
        ("entries", {"w": [1]}),
        ("sums", []),
        ("sums", ["x"] * 4),
        ("sums", 7),
        ("entries", {"w": ["F32", 1, 1, -PAGE, 10]}),
        ("entries", {"w": ["F32", 1, 1, 0, 1 << 60]}),
        ("entries", {"w": ["F32", 1, 1, 1 << 60, 1]}),
        ("entries", {"w": ["F32", 1, 1, 0, -1]}),
        ("entries", {"w": ["F32", 1, 1, 7, 1]}),
        ("sums", [float("-inf")] * 4),
        ("entries", {"w": ["F32", 1, 1, 0, float("inf")]}),
        ("entries", {"w": ["F32", "a", 1, 0, 1]}),
    ],
)
def test_a_hostile_head_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "x"
    panelfile.write(path, IDENTITY, parts())
    raw = path.read_bytes()
    length = int.from_bytes(raw[12:16], "little")
    head = json.loads(raw[-length:])
    head[field] = value
    path.write_bytes(headed(json.dumps(head).encode(), raw[48:-length]))
    with pytest.raises(PanelFileWrong):
        PanelFile(path, IDENTITY)


def headed(raw: bytes, payload: bytes = b"") -> bytes:
    """A file whose head this is, with the sum that belongs to it."""
    fixed = MAGIC + FORMAT.to_bytes(4, "little") + len(raw).to_bytes(4, "little")
    return fixed + hashlib.sha256(raw).digest() + payload + raw


def test_a_deeply_nested_head_is_refused_and_listed_as_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(headed(b'{"identity":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
    with pytest.raises(PanelFileWrong):
        PanelFile(path, IDENTITY)
    assert panelfile.describe(path) is None


def test_a_changed_model_is_packed_again(tmp_path: Path, folder: Path) -> None:
    files = model(tmp_path)
    start(files, folder)
    before = files.path.stat()
    model(tmp_path, seed=1)  # The same size, another content …
    os.utime(files.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # … and the old time.
    assert start(files, folder)[2] == set(SIZES)
    assert start(files, folder)[2] == set()
    os.utime(files.path, ns=(0, 0))
    assert start(files, folder)[2] == set(SIZES)
    model(tmp_path, size=(3 << 20) + 1)
    assert start(files, folder)[2] == set(SIZES)
    # All of them were one model's: one file is left.
    assert [kept.source for kept in kept_panels(folder.parent)] == [files.path]


def test_another_layout_is_packed_again(files: ModelFiles, folder: Path) -> None:
    start(files, folder)
    assert start(files, folder, layout="2")[2] == set(SIZES)
    assert start(files, folder, layout="2")[2] == set()


def test_a_refused_file_is_made_anew(files: ModelFiles, folder: Path) -> None:
    start(files, folder)
    shelf = PanelShelf(files, folder, "1", least=0)
    part = parts()[0]
    assert shelf.find(part.name, "Q8_0", part.shape, part.data.nbytes) is None
    assert shelf.find(part.name, part.kind, (1, 1), part.data.nbytes) is None
    assert shelf.find(part.name, part.kind, part.shape, 1) is None
    assert shelf.find("nobody", part.kind, part.shape, part.data.nbytes) is None
    shelf.refuse("a test says so")
    assert shelf.find(part.name, part.kind, part.shape, part.data.nbytes) is None


def test_a_file_without_one_weight_is_completed(files: ModelFiles, folder: Path) -> None:
    shelf = PanelShelf(files, folder, "1", least=0)
    first = parts()[0]
    assert shelf.keep(first.name, first.kind, first.shape, first.data, lambda data: None)
    shelf.finish()
    assert start(files, folder)[2] == set(SIZES) - {first.name}
    assert start(files, folder)[2] == set()


def test_a_folder_that_cannot_be_is_one_line(
    files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        shelf, _, packed = start(files, blocked / "panels")
    assert packed == set(SIZES)
    assert shelf.outcome == "memory"
    assert "Not a directory" in shelf.reason
    assert len(caplog.records) == 1


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Do as a full disk does: a write beyond `size` fails (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, HUGE + 4_096, 4 * HUGE])
def test_a_full_disk_leaves_nothing(
    files: ModelFiles,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
) -> None:
    """The panels written until then come back into memory."""
    monkeypatch.setattr(panelfile, "STAGE", HUGE)
    with caplog.at_level(logging.WARNING), files_of_at_most(room):
        shelf, _, _ = start(files, folder)
    assert shelf.outcome == "memory"
    assert len(caplog.records) == 1
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    assert start(files, folder)[0].outcome != "memory"


def test_no_space_is_known_before_writing(
    files: ModelFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    little = SimpleNamespace(total=1, used=1, free=1 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: little)
    shelf, _, _ = start(files, folder)
    assert "are free" in shelf.reason
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_kept_panels as t
from headrace.loader import cached_models, panelfile, remove
from headrace.loader.kept import kept_panels
panelfile.STAGE = t.HUGE

class Slow:
    written = 0
    def start(self, total, label, **more): pass
    def advance(self, n):
        if self.written:
            print("writing", flush=True)
            time.sleep(float(sys.argv[4]))
        self.written += n
    def done(self): pass

path = Path(sys.argv[2])
files = t.SimpleNamespace(path=path, weights=(path,))
shelf = t.PanelShelf(files, Path(sys.argv[3]), "1", least=0, progress=Slow())
for part in reversed(t.parts()):
    if shelf.find(part.name, part.kind, part.shape, part.data.nbytes) is None:
        shelf.keep(part.name, part.kind, part.shape, part.data, lambda data: None)
shelf.finish()
for part in t.parts():
    found = shelf.find(part.name, part.kind, part.shape, part.data.nbytes)
    assert found is None or bytes(found) == bytes(part.data)
print(shelf.outcome, flush=True)
"""


def child(files: ModelFiles, folder: Path, pause: float) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, here, str(files.path), str(folder), str(pause)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_writer_is_swept_away(files: ModelFiles, folder: Path) -> None:
    with child(files, folder, 600) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        # Somebody who starts meanwhile neither waits nor reads the half of it.
        shelf, _, packed = start(files, folder)
        assert packed == set(SIZES)
        assert shelf.reason == "another process is writing the file for the next start"
        writer.send_signal(signal.SIGKILL)
    left = [kept for kept in kept_panels(folder.parent) if kept.path.suffix == ".tmp"]
    assert len(left) == 1
    assert left[0].nbytes > 0
    assert start(files, folder)[0].outcome != "memory"
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".panels"]


def test_two_processes_at_once(files: ModelFiles, folder: Path) -> None:
    writers = [child(files, folder, 0.05) for _ in range(2)]
    outcomes = [writer.communicate()[0].splitlines()[-1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert set(outcomes) <= {"mapped", "copied", "memory"}
    assert set(outcomes) != {"memory"}
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".panels"]
    assert start(files, folder)[2] == set()


def test_the_cache_accounts_for_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    inside = cache / "models" / "gemma-3-270m"
    inside.mkdir(parents=True)
    ours, local = model(inside), model(tmp_path)
    (record,) = [m for m in cached_models(cache) if m.path == inside]
    assert record.packed == 0
    sizes = [start(each, cache / "panels")[0].path.stat().st_size for each in (ours, local)]
    listed = {m.name: m for m in cached_models(cache)}
    assert listed["gemma-3-270m"].packed == sizes[0]
    assert listed[str(local.path)].packed == sizes[1]
    local.path.unlink()
    assert "gone" in {m.name: m for m in cached_models(cache)}[str(local.path)].what
    assert remove(str(local.path), cache) == sizes[1]
    whole = sizes[0] + ours.path.stat().st_size
    assert remove("gemma-3-270m", cache) == whole
    assert kept_panels(cache) == []
    with pytest.raises(ModelNotFound):
        remove(str(local.path), cache)
    strange = cache / "panels" / "strange.panels"
    strange.write_bytes(b"x")
    assert remove(str(strange), cache) == 1


class Terminal(io.StringIO):
    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_sees_it_once(
    files: ModelFiles, folder: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(ProgressLine, "PATIENCE", 0.0)
    monkeypatch.setattr(ProgressLine, "INTERVALS", (0.0, 0.0))
    shown = Terminal(terminal)
    start(files, folder, progress=ProgressLine(shown, enabled=terminal))
    seen = shown.getvalue()
    assert ("repacking model.gguf for this CPU, once" in seen) == terminal
    assert ("100 %" in seen) == terminal
    assert seen.endswith("\r\x1b[K") == terminal
    again = Terminal(terminal)
    start(files, folder, progress=ProgressLine(again, enabled=terminal))
    assert again.getvalue() == ""
