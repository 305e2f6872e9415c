"""`headrace cache`: what is there is shown, measured, carried over and forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.worker.disk import DiskTier, stored_blocks
from headrace.worker.seal import Sealed, TenantKeys

ENGINE, OTHER, TENANT = "a" * 32, "b" * 32, "c" * 16


def kept(folder: Path, engine: str, numbers: range) -> DiskTier:
    tier = DiskTier(folder, engine, 1, 1 << 20)
    for number in numbers:
        parts = [memoryview(bytes([number] * 500)), memoryview(bytes(300))]
        assert tier.write(number.to_bytes(16, "big"), 0, TENANT, parts, number)
    return tier


def count(folder: Path) -> int:
    return len(stored_blocks(folder / "kv"))


def test_blocks_go_to_another_folder_and_are_forgotten(run: Any, tmp_path: Path) -> None:
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "blocks"
    kept(here, ENGINE, range(5))
    kept(here, OTHER, range(2))
    shown = run("cache", "show", "--cache-dir", str(here)).stdout
    assert ENGINE[:12] in shown
    assert OTHER[:12] in shown
    done = run("cache", "export", str(file), "--engine", "aa", "--cache-dir", str(here))
    assert done.returncode == 0, done.stderr
    done = run("cache", "import", str(file), "--cache-dir", str(there))
    assert "5 blocks imported, 0 refused" in done.stderr
    found = DiskTier(there, ENGINE, 1, 1 << 20).read((3).to_bytes(16, "big"), 0, TENANT, 800, 3)
    assert found is not None
    assert found[:500] == bytes([3] * 500)
    assert (
        "2 blocks forgotten"
        in run("cache", "forget", "--engine", "b", "--cache-dir", str(here)).stderr
    )
    assert count(here) == 5
    assert (
        "0 blocks" in run("cache", "forget", "--unused-days", "1", "--cache-dir", str(here)).stderr
    )
    assert "5 blocks" in run("cache", "forget", "--cache-dir", str(here)).stderr
    assert count(here) == 0


def test_what_is_damaged_is_found_and_not_carried_over(run: Any, tmp_path: Path) -> None:
    kept(tmp_path, ENGINE, range(4))
    first, *_ = sorted((tmp_path / "kv").rglob("*-0"))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    file = tmp_path / "blocks"
    assert "3 blocks" in run("cache", "export", str(file), "--cache-dir", str(tmp_path)).stderr
    assert "1 damaged" in run("cache", "measure", "--cache-dir", str(tmp_path)).stdout
    assert count(tmp_path) == 3
    run("cache", "forget", "--cache-dir", str(tmp_path))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = run("cache", "import", str(file), "--cache-dir", str(tmp_path))
    assert "2 blocks imported, 1 refused" in done.stderr
    assert count(tmp_path) == 2


def test_what_is_no_export_is_refused(run: Any, tmp_path: Path) -> None:
    file, line = tmp_path / "blocks", f"{ENGINE}/{TENANT}/{'0' * 32}-0"
    beginnings = (
        "",
        "something else\n",
        "headrace blocks 1\n../../etc/passwd 5\nhello",
        f"headrace blocks 1\n{line} 99999999999\n",
        f"headrace blocks 1\n{line} -1\n",
    )
    for text in beginnings:
        file.write_text(text)
        done = run("cache", "import", str(file), "--cache-dir", str(tmp_path))
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert str(file) in done.stderr
    assert run("cache", "import", str(tmp_path / "none")).returncode == 2
    file.write_text(f"headrace blocks 1\n{line} 5000\ncut off")
    done = run("cache", "import", str(file), "--cache-dir", str(tmp_path))
    assert "0 blocks imported, 1 refused" in done.stderr
    assert count(tmp_path) == 0


def test_a_caller_is_forgotten_with_the_key(run: Any, tmp_path: Path) -> None:
    keys, where = tmp_path / "keys", ["--cache-dir", str(tmp_path)]
    tier = DiskTier(tmp_path, Sealed(ENGINE, TenantKeys(keys)), 1, 1 << 20)
    for tenant in (TENANT, "f" * 16):
        assert tier.write(bytes(16), 0, tenant, [memoryview(bytes(800))], 0)
    forget = ["cache", "forget", "--keys", str(keys), *where]
    assert run(*forget, "--engine", "aa").returncode == 2
    assert count(tmp_path) == 2
    said = run(*forget, "--tenant", "ff").stderr
    assert "1 keys forgotten" in said
    assert "1 blocks forgotten" in said
    assert [path.name for path in keys.iterdir()] == [f"{TENANT}.key"]
    assert "1 blocks" in run("cache", "export", str(tmp_path / "file"), *where).stderr
