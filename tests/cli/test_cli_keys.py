"""`headrace keys`: made, listed, removed; the file knows no key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.server.accounts import Accounts


def test_a_key_is_made_listed_and_removed(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    made = run("keys", "add", "team-a", "--file", str(file), "--requests-per-minute", "60")
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert f"headrace serve --keys {file}" in made.stderr
    operator = run("keys", "add", "ops", "--operator", "--file", str(file)).stdout.strip()
    assert secret not in file.read_text()
    accounts = Accounts(file)
    found = accounts.find(secret)
    assert found is not None
    assert (found.key.name, found.key.role, found.key.requests_per_minute) == ("team-a", "user", 60)
    ops = accounts.find(operator)
    assert ops is not None
    assert ops.key.role == "operator"
    listed = run("keys", "list", "--keys", str(file)).stdout
    assert "team-a" in listed
    assert "sha256" not in listed
    again = run("keys", "add", "ops", "--file", str(file))
    assert again.returncode == 2
    assert "ops" in again.stderr
    assert run("keys", "remove", "team-a", "--file", str(file)).returncode == 0
    assert Accounts(file).find(secret) is None
    assert run("keys", "remove", "team-a", "--file", str(file)).returncode == 2


def test_serve_refuses_a_file_of_keys_that_is_none(run: Any, tmp_path: Path) -> None:
    done = run("serve", "/no/model", "--port", "0", "--keys", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: no keys:")
    assert "headrace keys add makes it" in done.stderr
