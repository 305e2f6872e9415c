"""`headrace serve` on damaged files: what is wrong, the exit status, no trace."""

from __future__ import annotations

import json
import struct
import subprocess
from pathlib import Path

import httpx
import pytest
from processes import headrace, running

from tiny import talker

pytestmark = pytest.mark.slow
MODEL_FILE_ERROR = 3


def refused(model: Path) -> str:
    done = subprocess.run(
        headrace("serve", str(model), "--port", "0", "--offline"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == MODEL_FILE_ERROR, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert "ready:" not in said
    return said


def damage(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    first = header["lm_head.weight"]
    match how:
        case "cut":
            path.write_bytes(data[:-1000])
            return
        case "header longer than the file":
            path.write_bytes(struct.pack("<Q", 2**40) + data[8:])
            return
        case "offsets outside":
            first["data_offsets"] = [len(rest), len(rest) + 102400]
        case "shape and offsets differ":
            first["shape"] = [400, 65]
        case "another type":
            first["dtype"] = "F16"
        case "overlap":
            first["data_offsets"] = header["model.norm.weight"]["data_offsets"]
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + rest)


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "header longer than the file",
        "offsets outside",
        "shape and offsets differ",
        "another type",
        "overlap",
    ],
)
def test_safetensors_that_lie(tmp_path: Path, how: str) -> None:
    folder = talker.make(tmp_path / "tiny")
    damage(folder, how)
    assert "model.safetensors" in refused(folder)


def test_a_gguf_that_is_cut(tmp_path: Path) -> None:
    """A header that promises more than the file has (every cut is in tests/loader/test_gguf)."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 10, 2**40) + b"\x00" * 100)
    assert "cut.gguf" in refused(path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such conversation') }}",
        "{{ messages[99].content }}{{ 1 / 0 }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
    ids=["raises", "fails", "has no end", "is huge", "looks around"],
)
def test_templates_that_do_harm(tmp_path: Path, template: str) -> None:
    folder = talker.make(tmp_path / "tiny")
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with running(headrace("serve", str(folder), "--port", "0", "--threads", "1")) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30)
        assert reply.status_code in (400, 413), reply.text  # 413: over a bound
        assert reply.json()["error"]["param"] == "messages"
        plain = {"prompt": "x", "max_tokens": 2}
        assert httpx.post(server.url + "/v1/completions", json=plain, timeout=30).is_success
