"""The scripts of benchmarks/peers: what they conclude from what was measured."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.base.errors import HeadraceError
from headrace.bench.options import RunOptions

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", PEERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_what_is_not_there_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("run")
    monkeypatch.delenv("NOWHERE_ENV", raising=False)
    for command in ("$NOWHERE_ENV/bin/serve {model}", "/nowhere/serve {port}"):
        peer = {"command": command, "port": 9}
        with pytest.raises(HeadraceError, match=r"is not (set|installed here)"):
            run.measure(peer, RunOptions(), "model", tmp_path / "log")
    with pytest.raises(HeadraceError, match="ended with exit code 3"):
        run.measure(
            {"command": f"{sys.executable} -c 'raise SystemExit(3)'", "port": 9, "wait": 20.0},
            RunOptions(),
            "model",
            tmp_path / "log",
        )
    peers = (PEERS / "peers.toml").read_text()
    assert "{here}/openvino_server.py" in peers
    assert (PEERS / "openvino_server.py").is_file()


def test_peers_are_compared_within_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("run")
    mock = f"{sys.executable} -m headrace bench mock --ttft 0.005 --itl {{itl}} --port {{port}}"
    config = tmp_path / "peers.toml"
    # Bound and never listening: nobody is given these ports, and a server may take them.
    places = [socket.socket() for _ in range(2)]
    for one in places:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in places]
    tables = [
        f'[{name}]\ncommand = "{mock.format(itl=itl, port="{port}")}"\nport = {port}\n'
        for (name, itl), port in zip((("quick", 0.002), ("slow", 0.5)), ports, strict=True)
    ]
    config.write_text("\n".join([*tables, '[gone]\ncommand = "/nowhere/x"\nport = 1\n']))
    out = tmp_path / "out"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "run.py",
            str(config),
            "--model",
            "m",
            "--out",
            str(out),
            "--only",
            "3",
            "--requests",
            "4",
            "--concurrency",
            "2",
            "--input",
            "4",
            "--output",
            "10",
            "--json",
            str(tmp_path / "kept.json"),
        ],
    )
    before = os.getpriority(os.PRIO_PROCESS, 0)
    run.main()
    text = (out / "table.md").read_text()
    assert "| | quick | slow |" in text
    assert "absent: gone: /nowhere/x is not installed here" in text
    results: dict[str, Any] = {
        name: json.loads((out / f"{name}-3.json").read_text()) for name in ("quick", "slow")
    }
    speeds = {n: r["figures"]["output_throughput"]["value"] for n, r in results.items()}
    assert speeds["quick"] > speeds["slow"]
    for one in places:
        one.close()
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert set(kept["absent"]) == {"gone"}
    assert kept["rounds"]["slow"][0]["output tok/s"] == speeds["slow"]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before, "the client's priority is its own"


def test_runs_that_are_not_to_be_believed_are_named() -> None:
    run = script("run")
    one = {
        "valid": True,
        "requests": 4,
        "succeeded": 4,
        "figures": {"output_throughput": {"value": 5.0}},
        "samples": {
            name: {"percentiles": {"p50": 1.0, "p99": 2.0}} for name in ("ttft", "tpot", "itl")
        },
    }
    results = {"a": [one, one], "b": [one, {**one, "valid": False, "succeeded": 3}]}
    lines = run.table(results, {"c": "not here"}).splitlines()
    assert lines[-3:] == [
        "absent: c: not here",
        "invalid: b in the rounds [1]: the client was late or overloaded",
        "failed: b: 1 requests",
    ]
